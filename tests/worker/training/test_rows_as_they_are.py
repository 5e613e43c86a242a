"""A job whose rows are shorter than max_length: planned for them, trained to the same bits, in less memory. Some
tests take seconds: a model is traced for its plan, and again for its engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from planner.commands.plan_job import plan_job
from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.measure.analysis import analyse
from planner.run.folder import RunFolder
from tests.support.texts import CHATML, make_job, tiny_llama_folder, write_jsonl
from worker.check.__main__ import main
from worker.check.verify_resume import differences
from worker.prepare import main as prepare
from worker.training.metrics import read_metrics
from worker.training.run import run_job
from worker.training.stop import StopRequest

CPU = torch.device("cpu")
STEPS = 3
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Chats of up to 50 tokens under rows of 256."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    ask = {"role": "user", "content": "hi"}
    talks = [[ask, {"role": "assistant", "content": "y" * (20 + i % 3)}] for i in range(12)]
    data = write_jsonl(tmp_path / "data.jsonl", [{"messages": talk} for talk in talks])
    model = tiny_llama_folder(tmp_path / "model", chat_template=CHATML)
    keys = {"max_length": 256, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS}
    return make_job(model, data, learning_rate=1e-2, val_size=2, eval_steps=2, **keys)


def planned(folder: Path, job: Job, *, counted: bool = True) -> RunFolder:
    """A run folder with its plan, for rows as they are counted or for max_length."""
    run = RunFolder(folder)
    run.path.mkdir()
    run.resolved.write_text(job.resolved_yaml(), "utf-8")
    assert prepare([str(run.path)]) == Exit.DONE
    found = run.read_counted()
    assert found is not None and 32 < found.longest <= 64 == found.lengths[0]
    run.write_plan(plan_job(job, CPU, cache=None, measure=False, counted=found if counted else None).to_json())
    return run


def peaks(run: RunFolder) -> tuple[int, int]:
    """What the run took of the device, and what was planned."""
    (end,) = (event for event in read_metrics(run.metrics) if event["event"] == "end")
    return end["gpu_peak_bytes"], end["predicted_gpu_peak_bytes"]


def test_bits_are_those_of_a_plan_for_max_length_and_the_peak_is_that_of_the_rows(tmp_path: Path, job: Job) -> None:
    short, full = planned(tmp_path / "short", job), planned(tmp_path / "full", job, counted=False)
    for run in (short, full):
        assert main(["train-until", str(run.path), str(STEPS)]) == Exit.STOPPED
    assert differences(short, full, STEPS) == []
    evaluated = [[e["eval_loss"] for e in read_metrics(run.metrics) if e["event"] == "eval"] for run in (short, full)]
    assert evaluated[0] == evaluated[1] != []
    (peak, plan), (its_peak, its_plan) = peaks(short), peaks(full)
    assert 0.9 * plan < peak <= plan < its_plan / 2, "the plan is for what runs"
    assert its_peak < its_plan / 2


def test_a_budget_that_the_rows_fill_is_enough(tmp_path: Path, job: Job) -> None:
    least = json.loads(planned(tmp_path / "free", job).plan.read_text())["plan"]["gpu_peak_bytes"]
    tight = job.model_copy(update={"gpu_budget": least})
    run = planned(tmp_path / "tight", tight)
    assert run_job(run, StopRequest()) and peaks(run)[0] <= least
    with pytest.raises(UserError, match="No schedule fits"):
        plan_job(tight.model_copy(update={"gpu_budget": least // 4}), CPU, cache=None, measure=False)


def test_the_plan_is_that_of_a_job_whose_max_length_is_the_rows(tmp_path: Path, job: Job) -> None:
    counted = planned(tmp_path / "run", job).read_counted()
    assert counted is not None
    answer = plan_job(job, CPU, cache=None, measure=False, counted=counted)
    same = job.model_copy(update={"max_length": 64})
    other = plan_job(same, CPU, cache=None, measure=False, counted=replace(counted, lengths=(64, 64)))
    assert (answer.key, answer.plan, answer.lengths) == (other.key, other.plan, (64, 64))
    assert answer.chain.slice_tokens == 128 == analyse(same, CPU).slice_tokens


def test_rows_that_no_plan_was_made_for_are_refused_before_a_step(tmp_path: Path, job: Job) -> None:
    run = planned(tmp_path / "run", job)
    document = json.loads(run.plan.read_text())
    run.write_plan(document | {"length": 48, "label_length": 48})
    longer = "rows of 64 tokens and 64 labels; planned for rows of 48 tokens and 48 labels"
    with pytest.raises(UserError, match=longer) as told:
        run_job(run, StopRequest())
    assert told.value.code == "rows-longer-than-planned" and not run.metrics.exists()


def test_a_plan_of_an_earlier_version_for_max_length_goes_on_as_it_is(tmp_path: Path, job: Job) -> None:
    run = planned(tmp_path / "run", job, counted=False)
    document = json.loads(run.plan.read_text())
    del document["label_length"], document["length"]
    run.write_plan(document)
    run.tokens.write_text('{"distinct_tokens": [9, 9]}')
    assert run_job(run, StopRequest())
    predicted = [e["predicted_s"] for e in read_metrics(run.metrics) if e["event"] == "step" and "predicted_s" in e]
    assert all(step_s < document["plan"]["step_s"] for step_s in predicted)
