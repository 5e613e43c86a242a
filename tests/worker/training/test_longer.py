"""A run that goes on with a shorter one is the longer run from the start, to the last bit, where the rate is level."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from offmated.jobs.longer import link
from planner.errors import UserError
from planner.job.schema import Job
from planner.run.folder import RunFolder
from tests.support.preference_jobs import preference_job
from tests.support.runs import STEPS, make_run
from tests.worker.subspace.test_change import begun_run
from worker.training.metrics import read_metrics
from worker.training.run import run_job
from worker.training.stop import StopRequest


def copy_of(run: RunFolder, at: Path, **keys: object) -> RunFolder:
    """Another run of the same job under the same plan, with other keys."""
    other = RunFolder(at)
    at.mkdir(parents=True)
    other.plan.write_bytes(run.plan.read_bytes())
    job = Job.from_resolved(run.resolved).model_copy(update=keys)
    other.resolved.write_text(job.resolved_yaml(), "utf-8")
    return other


def test_more_steps_from_a_checkpoint_are_those_of_the_longer_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    _, whole = make_run(tmp_path, "llama", lr_scheduler_type="constant_with_warmup")
    short, more = copy_of(whole, tmp_path / "short", max_steps=6), copy_of(whole, tmp_path / "more")
    more.goes_on.touch()
    with pytest.raises(UserError) as gone:
        run_job(more, StopRequest())
    assert gone.value.code == "cannot-go-on", "it began from the start"
    assert run_job(whole, StopRequest())
    assert run_job(short, StopRequest())
    link(short.checkpoints / "step-4", more)
    assert run_job(more, StopRequest())
    steps = [event["step"] for event in read_metrics(more.metrics) if event["event"] == "step"]
    assert steps == list(range(5, STEPS + 1))
    one, other = (
        dict(AutoModelForCausalLM.from_pretrained(run.path / "output").named_parameters()) for run in (whole, more)
    )
    assert [name for name, weight in one.items() if not torch.equal(weight, other[name])] == []
    assert (short.checkpoints / "step-4" / "manifest.json").exists(), "it went with the second run's"

    another = copy_of(whole, tmp_path / "another", learning_rate=1e-3)
    another.goes_on.touch()
    link(short.checkpoints / "step-4", another)
    with pytest.raises(UserError) as changed:
        run_job(another, StopRequest())
    assert changed.value.numbers == ("learning_rate: 0.001, was 0.01",), "only the length may differ"


def test_how_adapters_began_that_took_a_part_of_the_model_goes_along(tmp_path: Path) -> None:
    short, more = RunFolder(tmp_path / "short"), RunFolder(tmp_path / "more")
    (short.checkpoints / "step-4").mkdir(parents=True)
    short.begun.write_bytes(b"A and B")
    link(short.checkpoints / "step-4", more)
    assert more.begun.samefile(short.begun)


def test_the_references_scores_go_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    run = begun_run(preference_job(tmp_path, save_steps=2), tmp_path / "run")
    short, more = copy_of(run, tmp_path / "a" / "short", max_steps=3), copy_of(run, tmp_path / "b" / "more")
    assert run_job(short, StopRequest())
    more.goes_on.touch()
    link(short.checkpoints / "step-2", more)
    (scores,) = short.reference.iterdir()
    assert (more.reference / scores.name).samefile(scores)
    assert run_job(more, StopRequest())
    events = [event["event"] for event in read_metrics(more.metrics)]
    assert events.count("step") == 2 and "reference" not in events
