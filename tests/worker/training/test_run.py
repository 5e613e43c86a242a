"""Whole runs in this process, against plain PyTorch, to the last bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from planner.codec import from_json
from planner.errors import UserError
from planner.job.schema import Job
from planner.models.tokenizer import load_tokenizer
from planner.optimizers.adamw import AdamWGroup
from planner.run.folder import RunFolder
from planner.schedule.compile import compile_program
from planner.schedule.measured import TIMELINE, Measured
from tests.support.plain_engine import PlainEngine
from tests.support.runs import STEPS, make_run
from worker.data.batches import Batches
from worker.data.seeds import micro_batch_seed
from worker.training.learning_rate import decay_names, learning_rate
from worker.training.metrics import read_metrics
from worker.training.model import load_model
from worker.training.run import _tell_checkpoints, read_plan, run_job
from worker.training.stop import StopRequest


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=repr,
)
def test_whoever_lacks_the_devices_memory_the_run_ends_with_out_of_memory(
    error: RuntimeError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("worker.training.run.refer_to_other", fails)
    with pytest.raises(UserError, match="The GPU ran out of memory") as caught:
        run_job(RunFolder(tmp_path), StopRequest())
    assert (caught.value.code, caught.value.numbers) == ("out-of-memory", (str(error).partition("\n")[0],))


def plain_run(job: Job, run: RunFolder) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of plain PyTorch on the same data."""
    losses, plain = plainly_trained(job, run)
    return losses, {name: p.detach() for name, p in plain.model.named_parameters()}


def plainly_trained(job: Job, run: RunFolder) -> tuple[list[float], PlainEngine]:
    """Plain PyTorch after all steps of the job, and the losses."""
    model = load_model(job)
    batches = Batches(job, load_tokenizer(job), run.path / "data")
    optimizer = AdamWGroup(
        betas=(job.adam_beta1, job.adam_beta2),
        eps=job.adam_epsilon,
        weight_decay=job.weight_decay,
        decay_names=decay_names(model),
    )
    plain = PlainEngine(model, optimizer=optimizer, max_grad_norm=job.max_grad_norm)
    losses = []
    for step in range(STEPS):
        data = batches.step(step)
        result = plain.step(
            data,
            seeds=[micro_batch_seed(job.seed, step, k) for k in range(len(data))],
            learning_rate=learning_rate(job, step, STEPS),
            num_items_in_batch=torch.tensor(batches.num_items(data)),
        )
        losses.append(float(torch.stack(result.losses).sum()))
    return losses, plain


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ("llama", {"gradient_accumulation_steps": 1, "max_grad_norm": None}),
        ("llama", {"gradient_accumulation_steps": 4, "bf16": True}),
        ("llama", {"gradient_accumulation_steps": 2, "packing": True, "lr_scheduler_type": "cosine"}),
        ("gpt2", {"gradient_accumulation_steps": 1}),
        ("gpt2", {"gradient_accumulation_steps": 4, "max_grad_norm": None}),
    ],
    ids=str,
)
def test_a_run_gives_the_losses_and_the_model_of_plain_pytorch(
    tmp_path: Path, model: str, keys: dict[str, object]
) -> None:
    job, run = make_run(tmp_path, model, **keys)
    assert run_job(run, StopRequest())
    losses, weights = plain_run(job, run)
    assert [event["loss"] for event in read_metrics(run.metrics) if event["event"] == "step"] == losses
    trained = AutoModelForCausalLM.from_pretrained(run.path / "output")
    assert {name: p.dtype for name, p in trained.named_parameters()} == {n: w.dtype for n, w in weights.items()}
    assert [n for n, p in trained.named_parameters() if not torch.equal(p, weights[n])] == []
    if job.packing:  # all rows are full
        recorded = from_json(Measured, json.loads(run.timeline.read_text("utf-8")))
        plan, chain, _ = read_plan(run)
        assert run.timeline == run.plan.with_name(TIMELINE)
        assert recorded.is_of(compile_program(plan, chain)) and not recorded.paused
        assert recorded.first_step == 3  # before the save


@pytest.mark.parametrize("keys", [{"save_steps": 1}, {"save_steps": 2}, {"val_size": 5, "eval_steps": 3}], ids=str)
def test_two_steps_are_recorded_however_often_a_run_saves_or_evaluates(tmp_path: Path, keys: dict[str, int]) -> None:
    _, run = make_run(tmp_path, "llama", packing=True, gradient_accumulation_steps=1, **{"save_steps": 100, **keys})
    assert run_job(run, StopRequest())
    recorded = from_json(Measured, json.loads(run.timeline.read_text("utf-8")))
    assert recorded.paused == (keys == {"save_steps": 1})


@pytest.mark.sweep(2)
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_a_run_evaluates_within_the_plans_budget_as_plain_pytorch_would(tmp_path: Path, model: str) -> None:
    job, run = make_run(tmp_path, model, val_size=7, eval_on_start=True, max_steps=2, warmup_steps=0)
    assert run_job(run, StopRequest())
    trained = AutoModelForCausalLM.from_pretrained(run.path / "output").eval()
    held_out = Batches(job, load_tokenizer(job), run.path / "data").evaluation
    assert held_out is not None
    total = 0.0
    for batch in (held_out.batch(k) for k in range(len(held_out))):
        with torch.no_grad():
            total += float(trained(**batch).loss) * int(batch["num_items_in_batch"])
    first, last = (event for event in read_metrics(run.metrics) if event["event"] == "eval")
    assert (first["step"], last["step"]) == (0, 2)
    assert last["eval_loss"] == total / last["tokens"]
    assert 0 < first["gpu_peak_bytes"] <= json.loads(run.plan.read_text())["plan"]["gpu_budget_bytes"]


def test_a_finished_run_that_is_run_again_trains_nothing_and_has_its_model(tmp_path: Path) -> None:
    """Its process may have died before anybody noted that it was done."""
    _, run = make_run(tmp_path, "llama")
    assert run_job(run, StopRequest())
    written = {path.name: path.stat().st_mtime_ns for path in run.output.iterdir()}
    assert run_job(run, StopRequest())
    assert {path.name: path.stat().st_mtime_ns for path in run.output.iterdir()} == written
    events = read_metrics(run.metrics)
    assert [event["resumed_from"] for event in events if event["event"] == "start"] == [None, STEPS]
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, STEPS + 1))
    assert (events[-1]["status"], events[-1]["output"]) == ("done", str(run.output))


def test_a_checkpoint_of_a_model_of_other_shapes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, run = make_run(tmp_path, "llama")
    full = OSError(28, "No space left on device", "model.safetensors")
    with monkeypatch.context() as patch, pytest.raises(UserError):
        patch.setattr("worker.storage.model_folder.Output._state_dict", lambda *_: (_ for _ in ()).throw(full))
        run_job(run, StopRequest())
    shutil.rmtree(run.trained)
    config = Path(job.model) / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 64', '"intermediate_size": 96'))
    run.base.unlink()  # as if that were allowed
    with pytest.raises(UserError, match="not of the model that is there now") as refused:
        run_job(run, StopRequest())
    assert refused.value.code == "cannot-go-on" and "(32, 96), given was (32, 64)" in refused.value.numbers[0]


def test_a_full_output_folder_is_told_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("precious")
    _, run = make_run(tmp_path, "llama", output_dir=str(tmp_path / "mine"))
    with pytest.raises(UserError, match="is not empty"):
        run_job(run, StopRequest())
    assert not run.metrics.exists()


@pytest.mark.parametrize(("limit", "free_bytes", "warned"), [(2, 299, True), (2, 300, False), (None, 150, False)])
def test_a_disk_without_room_for_the_checkpoints_wanted_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, limit: int | None, free_bytes: int, warned: bool
) -> None:
    job, _ = make_run(tmp_path, "llama", save_total_limit=limit)
    _tell_checkpoints(job, 100, free_bytes)
    assert ("the disk has room for 2 beside the model, wanted are up to 3" in caplog.text) == warned


def test_a_run_folder_without_a_plan_is_an_error(tmp_path: Path) -> None:
    _, run = make_run(tmp_path, "llama")
    run.plan.unlink()
    with pytest.raises(UserError) as caught:
        run_job(run, StopRequest())
    assert str(caught.value) == (
        "The run folder has no plan to train under.\n"
        f"  {run.plan}: there is none\n"
        f"  hint: python -m planner plan {run.path} --measure   [no-plan]"
    )


def damaged(run: RunFolder, how: str) -> None:
    """Change plan.json so that it reads well and is wrong."""
    found = json.loads(run.plan.read_text("utf-8"))
    plan = found["plan"]
    if how == "an update left out":
        stage = next(stage for stage in plan["stages"] if stage["gpu_update"])
        stage["gpu_update"] = stage["gpu_update"][1:]
    elif how == "a smaller budget":
        plan["gpu_budget_bytes"] = plan["gpu_budget_bytes"] - 1
    elif how == "another option":
        plan["options"][1] = "forget"
    else:
        plan["stages"][0]["prefetch"] = ["w:nobody"]
    run.plan.write_text(json.dumps({**found, "key": "0123456789abcdef"}))


@pytest.mark.parametrize("how", ["an update left out", "a smaller budget", "another option", "an unknown tensor"])
def test_a_plan_that_is_wrong_is_not_run(tmp_path: Path, how: str) -> None:
    _, run = make_run(tmp_path, "llama")
    damaged(run, how)
    with pytest.raises(UserError) as caught:
        run_job(run, StopRequest())
    assert caught.value.code == "plan-not-usable"
    assert caught.value.numbers[0].startswith(f"{run.plan}: ")
    assert caught.value.hint == "offmate plans forget 0123456789ab, then submit the job again"
    assert not run.metrics.exists()


def test_the_error_that_ended_a_run_is_told_when_its_last_line_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, run = make_run(tmp_path, "llama", learning_rate=1e30, max_grad_norm=None, warmup_steps=0)

    def full(*_arguments: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("worker.training.run._write_end", full)
    with pytest.raises(UserError, match="is not finite at step"):
        run_job(run, StopRequest())


def test_a_run_whose_only_step_diverges_writes_no_model(tmp_path: Path) -> None:
    keys = {"learning_rate": 1e39, "max_grad_norm": None, "warmup_steps": 0, "max_steps": 1}
    _, run = make_run(tmp_path, "llama", **keys)
    with pytest.raises(UserError, match="is not finite at step 1"):
        run_job(run, StopRequest())
    assert not (run.path / "output").exists()
    assert read_metrics(run.metrics)[-1]["status"] == "failed"


def test_a_diverging_run_says_so_in_its_last_line(tmp_path: Path) -> None:
    _, run = make_run(tmp_path, "llama", learning_rate=1e30, max_grad_norm=None, warmup_steps=0)
    with pytest.raises(UserError, match="is not finite at step"):
        run_job(run, StopRequest())
    end = read_metrics(run.metrics)[-1]
    assert (end["event"], end["status"], end["output"]) == ("end", "failed", None)
