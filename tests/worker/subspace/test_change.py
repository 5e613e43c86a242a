"""Changes of projectors in a run: the bits of plain PyTorch, stops, kills, what is kept on disk, memory. Some tests
take seconds: a model is traced for its plan, and again for its engine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from planner.codec import to_json
from planner.errors import UserError
from planner.job.schema import Job
from planner.measure.machine_rates import estimate_hardware
from planner.run.folder import RunFolder
from tests.support.lora_jobs import CPU, engine_of, finished_run, plan_of
from tests.support.lsp_jobs import lsp_job
from tests.support.texts import byte_tokenizer
from worker.check.comparison import Comparison
from worker.data.batches import Batches
from worker.subspace import change
from worker.training.metrics import read_metrics
from worker.training.run import run_job
from worker.training.stop import StopRequest


class StopAt(StopRequest):
    """Asks for a stop after so many steps."""

    def __init__(self, run: RunFolder, steps: int) -> None:
        self._run, self._steps = run, steps
        super().__init__()

    @property
    def asked(self) -> bool:
        steps = [event["step"] for event in read_metrics(self._run.metrics) if event["event"] == "step"]
        return max(steps, default=0) >= self._steps

    @asked.setter
    def asked(self, value: bool) -> None:
        pass


class Killed(BaseException):
    """The process ended here."""


def begun_run(job: Job, path: Path) -> RunFolder:
    plan, chain = plan_of(job)
    path.mkdir()
    run = RunFolder(path)
    run.resolved.write_text(job.resolved_yaml())
    document = {"plan": plan, "chain": chain, "hardware": estimate_hardware(CPU)}
    run.write_plan({key: to_json(value) for key, value in document.items()})
    return run


def trained(run: RunFolder) -> dict[str, Tensor]:
    return load_file(run.output / "model.safetensors")


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def changes(run: RunFolder) -> list[int]:
    return [event["step"] for event in read_metrics(run.metrics) if event["event"] == "projectors"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of `job_beside_cores`; how often a job saves changes nothing that it learns."""
    path = tmp_path_factory.mktemp("undisturbed")
    return finished_run(job_beside_cores(path), path / "run")


def job_beside_cores(tmp_path: Path, **keys: object) -> Job:
    """A job that trains a weight as a whole beside its cores."""
    return lsp_job(tmp_path, trainable=["model.norm"], **keys)


CASES = [
    {},
    {"bf16": True, "max_grad_norm": 0, "gradient_accumulation_steps": 3},
    {"lsp_nonzeros": None, "name": "qwen2"},
    {"lsp_fit_steps": 3, "gradient_accumulation_steps": 1, "name": "mixtral"},
    {"optim": "adamw_8bit", "lsp_size": 64},
    {"trainable": ["lm_head", "model.norm", r"model\.layers\.0\.mlp"], "weight_decay": 0.1},
]


@pytest.mark.parametrize("keys", CASES, ids=str)
def test_each_bit_is_that_of_plain_pytorch_over_two_changes(tmp_path, keys):
    name = keys.get("name", "llama")
    job = lsp_job(tmp_path, name, **{key: value for key, value in keys.items() if key != "name"})
    batches = Batches(job, byte_tokenizer())
    outcome = Comparison(job=job, batches=batches, steps=6, layers=3, device=CPU, folder=tmp_path).run(*plan_of(job))
    assert {finding.what: finding.equal for finding in outcome.findings} == {
        finding.what: finding.count for finding in outcome.findings
    }
    assert {finding.what for finding in outcome.findings} >= {"losses", "parameters", "moments"}


def test_a_change_changes_what_is_learned(tmp_path):
    often, never = (lsp_job(tmp_path, lsp_check_steps=steps, max_steps=4) for steps in (2, 100))
    one, other = finished_run(often, tmp_path / "often"), finished_run(never, tmp_path / "never")
    assert (changes(one), changes(other)) == ([0, 2], [0])
    assert not equal(trained(one), trained(other))


def test_projectors_stay_where_they_keep_enough(tmp_path):
    run = finished_run(lsp_job(tmp_path, lsp_threshold=2.0), tmp_path / "run")
    first, second = (event for event in read_metrics(run.metrics) if event["event"] == "projectors")
    assert first["changed"] == 21 and second["changed"] == 0
    assert second["bias_before"] == second["bias_after"] != first["bias_before"]


def test_the_model_is_whole_and_has_the_cores_in_its_weights(undisturbed):
    run, job = undisturbed, Job.from_resolved(undisturbed.resolved)
    base = load_file(Path(job.model) / "model.safetensors")
    weights = trained(run)
    assert weights.keys() == base.keys()
    moved = {name for name, tensor in weights.items() if not torch.equal(tensor, base[name])}
    assert moved == {name for name in base if "proj" in name or name == "model.norm.weight"}
    model, info = AutoModelForCausalLM.from_pretrained(run.output, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    batch = Batches(job, byte_tokenizer()).step(5)[0]
    last = [event["loss"] for event in read_metrics(run.metrics) if event["event"] == "step"][-1]
    assert float(model(**batch).loss) < last + 0.5


def test_stops_before_at_and_after_changes_change_no_bit(tmp_path, undisturbed):
    run = begun_run(job_beside_cores(tmp_path), tmp_path / "stopped")
    for stop in (1, 3, 4):
        assert not run_job(run, StopAt(run, stop))
    assert run_job(run, StopRequest())
    assert equal(trained(run), trained(undisturbed))
    assert changes(run) == [0, 3]


@pytest.mark.parametrize("layers", [0, 30], ids=["first-change", "second-change"])
def test_a_kill_within_a_change_loses_nothing(tmp_path, monkeypatch, undisturbed, layers):
    run = begun_run(job_beside_cores(tmp_path, save_steps=2), tmp_path / "killed")
    made = change.new_projectors
    count = 0

    def dying(*args, **kwargs):
        nonlocal count
        count += 1
        if count == layers + 5:
            raise Killed
        return made(*args, **kwargs)

    monkeypatch.setattr(change, "new_projectors", dying)
    with pytest.raises(Killed):
        run_job(run, StopRequest())
    monkeypatch.setattr(change, "new_projectors", made)
    assert run_job(run, StopRequest())
    assert equal(trained(run), trained(undisturbed))


def test_changed_weights_are_written_once_and_stay_with_the_checkpoints_that_build_on_them(tmp_path):
    job = job_beside_cores(tmp_path, save_steps=1, save_total_limit=2, max_steps=7)
    run = begun_run(job, tmp_path / "run")
    whole = trained(finished_run(job, tmp_path / "whole"))
    files = {}
    for stop in (2, 3, 4, 5):
        assert not run_job(run, StopAt(run, stop))
        (file,) = (run.checkpoints / f"step-{stop}").glob("frozen-*")
        files[stop] = file.stat().st_ino
        assert file.stat().st_nlink == {2: 2, 3: 2, 4: 1, 5: 2}[stop]
    assert files[2] == files[3] != files[4] == files[5]
    assert run_job(run, StopRequest())
    assert equal(trained(run), whole)


def test_without_hard_links_each_checkpoint_has_a_copy(tmp_path, monkeypatch, undisturbed):
    link = os.link

    def refuse(source, target):
        if "frozen" in Path(source).name:
            raise OSError("no hard links here")
        link(source, target)

    monkeypatch.setattr("os.link", refuse)
    run = begun_run(job_beside_cores(tmp_path, save_steps=1), tmp_path / "run")
    assert not run_job(run, StopAt(run, 2))
    assert [file.stat().st_nlink for file in run.checkpoints.glob("*/frozen-*")] == [1, 1]
    assert run_job(run, StopRequest())
    assert equal(trained(run), trained(undisturbed))


def test_a_checkpoint_whose_frozen_weights_are_damaged_is_not_used(tmp_path):
    job = lsp_job(tmp_path, save_steps=2, lsp_check_steps=2)
    whole = trained(finished_run(job, tmp_path / "whole"))
    run = begun_run(job, tmp_path / "run")
    assert not run_job(run, StopAt(run, 4))
    (file,) = (run.checkpoints / "step-4").glob("frozen-*")
    with file.open("r+b") as broken:
        broken.seek(-1, 2)
        broken.write(b"!")
    assert run_job(run, StopRequest())
    assert [event["resumed_from"] for event in read_metrics(run.metrics) if event["event"] == "start"] == [None, 2]
    assert equal(trained(run), whole)


def test_after_an_error_within_a_change_nothing_goes_on_from_half_of_it(tmp_path, monkeypatch):
    job = lsp_job(tmp_path)
    plan, chain = plan_of(job)
    engine, model = engine_of(job, plan, chain)
    projectors, batches = change.Projectors(model, job), Batches(job, byte_tokenizer())
    sampled = batches.sampled(0)
    saved = [(name, {part: tensor.clone() for part, tensor in parts.items()}) for name, parts in engine.state()]
    made, calls = change.new_projectors, iter([False, True])

    def failing(*args, **kwargs):
        if next(calls):
            raise torch.OutOfMemoryError("no room")
        return made(*args, **kwargs)

    monkeypatch.setattr(change, "new_projectors", failing)
    with pytest.raises(torch.OutOfMemoryError):
        projectors.change(engine, 0, sampled, batches.num_items(sampled))
    assert engine.torn
    with pytest.raises(UserError, match="ended a step"):
        engine.load_state(saved, step=0)
    engine.close()


def test_a_gradient_that_is_not_finite_ends_the_change(tmp_path):
    job = lsp_job(tmp_path)
    engine, model = engine_of(job, *plan_of(job))
    projectors, batches = change.Projectors(model, job), Batches(job, byte_tokenizer())
    norm = dict(engine.frozen(["model.norm.weight"]))["model.norm.weight"]["master"]
    engine.replace([("model.norm.weight", {"master": torch.full_like(norm, torch.inf)})])
    sampled = batches.sampled(0)
    with pytest.raises(UserError, match="diverged"):
        projectors.change(engine, 0, sampled, batches.num_items(sampled))
    engine.close()


@pytest.mark.parametrize("keys", [{"lsp_samples": 5, "max_length": 64}, {"lsp_samples": None}, {"lsp_fit_steps": 2}])
def test_the_peak_of_a_change_is_within_what_was_planned(tmp_path, keys):
    """Without lsp_samples, 1024 rows of 16 tokens are looked at."""
    job = lsp_job(tmp_path, max_steps=2, **keys)
    plan, chain = plan_of(job)
    run = finished_run(job, tmp_path / "run")
    events = {event["event"]: event for event in read_metrics(run.metrics) if event["step"] in (0, 1)}
    peak = events["projectors"]["gpu_peak_bytes"]
    assert 0.3 * chain.between_gpu_bytes < peak <= plan.gpu_peak_bytes
    assert events["step"]["gpu_peak_bytes"] <= plan.gpu_peak_bytes
    assert json.loads(run.plan.read_text())["chain"]["between_cpu_bytes"] == chain.between_cpu_bytes > 0
