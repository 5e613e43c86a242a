"""The steps of a run: what is trained, saved, written down, and how it stops; with plain PyTorch as the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from planner.errors import UserError
from tests.support.short_runs import Run, checkpoint_names, equal, tiny_job
from worker.data.seeds import epoch_seed, micro_batch_seed
from worker.storage.checkpoint import Checkpoints
from worker.training.learning_rate import decay_names, learning_rate
from worker.training.metrics import read_metrics
from worker.training.model import load_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("keys", [{}, {"bf16": True}, {"max_grad_norm": None}, {"packing": True}], ids=str)
def test_a_run_stopped_and_resumed_ends_as_one_that_was_not(tmp_path: Path, keys: dict[str, object]) -> None:
    job = tiny_job(tmp_path, **keys)
    whole = Run(job, tmp_path / "whole")
    assert whole.training.run()
    first = Run(job, tmp_path / "parts")

    def ask(done: int) -> None:
        first.stop.asked = done == 3  # during the fourth step

    first.before_each_step(ask)
    assert not first.training.run()
    assert checkpoint_names(tmp_path / "parts") == ["step-4"]
    second = Run(job, tmp_path / "parts")
    assert second.engine.steps_done == 4
    assert second.training.run()
    assert equal(whole.masters(), second.masters())
    assert whole.losses() == second.losses()


def test_a_run_that_died_in_a_step_ends_as_one_that_did_not(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, save_steps=2)
    whole = Run(job, tmp_path / "whole")
    whole.training.run()
    first = Run(job, tmp_path / "parts")

    def die(done: int) -> None:
        if done == 5:
            raise InterruptedError

    first.before_each_step(die)
    with pytest.raises(InterruptedError):
        first.training.run()
    second = Run(job, tmp_path / "parts")
    assert second.engine.steps_done == 4
    second.training.run()
    assert equal(whole.masters(), second.masters())
    assert whole.losses() == second.losses()


def test_each_step_is_plain_pytorch_on_the_mean_over_all_its_tokens(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, max_steps=2, max_grad_norm=None)
    run = Run(job, tmp_path / "run")
    model = load_model(job)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in model.named_parameters() if n in decay_names(model)], "weight_decay": 0.1},
            {"params": [p for n, p in model.named_parameters() if n not in decay_names(model)], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.99),
        fused=True,
    )
    for step in range(2):
        batches = run.batches.step(step)
        items = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
        for k, batch in enumerate(batches):
            torch.manual_seed(micro_batch_seed(42, step, k))
            logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
            losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
            )
            (losses / items).backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(job, step, 2)
        optimizer.step()
        optimizer.zero_grad()
    run.training.run()
    for name, master in run.masters().items():
        torch.testing.assert_close(master, model.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)


def test_checkpoints_come_every_save_steps_and_the_last_step_needs_none(tmp_path: Path) -> None:
    run = Run(tiny_job(tmp_path, save_steps=2), tmp_path / "run")
    run.training.run()
    events = [(e["event"], e["step"]) for e in read_metrics(run.metrics_path) if e["event"] == "checkpoint"]
    assert events == [("checkpoint", 2), ("checkpoint", 4)]
    assert checkpoint_names(tmp_path / "run") == ["step-2", "step-4"]


def test_checkpoints_come_every_save_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    run = Run(tiny_job(tmp_path, save_minutes=1.5), tmp_path / "run")
    monkeypatch.setattr("worker.training.loop.time.monotonic", lambda: clock[0])
    run.before_each_step(lambda done: clock.__setitem__(0, clock[0] + 40.0))
    run.training.run()
    assert checkpoint_names(tmp_path / "run") == ["step-3"]  # after 120 s; the next would come with the last step


def test_checkpoints_by_the_clock_take_a_twentieth_of_the_time_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    run = Run(tiny_job(tmp_path, save_minutes=0.1, max_steps=9), tmp_path / "run")
    monkeypatch.setattr("worker.training.loop.time.monotonic", lambda: clock[0])
    run.before_each_step(lambda done: clock.__setitem__(0, clock[0] + 10.0))
    save = run.training.checkpoints.save

    def slow_save(*args: Any) -> Path:
        clock[0] += 2.0  # 20 times that are 4 steps
        return save(*args)

    monkeypatch.setattr(Checkpoints, "save", lambda _self, *args: slow_save(*args))
    run.training.run()
    events = read_metrics(run.metrics_path)
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [1, 5]


def test_a_stop_without_a_new_step_writes_no_checkpoint(tmp_path: Path) -> None:
    run = Run(tiny_job(tmp_path), tmp_path / "run")
    run.stop.asked = True
    assert not run.training.run()
    assert checkpoint_names(tmp_path / "run") == []


def test_every_step_is_written_down(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, max_steps=3)
    run = Run(job, tmp_path / "run")
    run.training.run()
    steps = [event for event in read_metrics(run.metrics_path) if event["event"] == "step"]
    assert [event["step"] for event in steps] == [1, 2, 3]
    assert [event["learning_rate"] for event in steps] == [learning_rate(job, n, 3) for n in range(3)]
    assert [event["tokens"] for event in steps] == [run.batches.num_tokens(n) for n in range(3)]
    assert all(event["step_s"] > 0 and event["grad_norm"] > 0 and event["gpu_peak_bytes"] is None for event in steps)
    lengths = [[batch["input_ids"].shape[1] for batch in run.batches.step(n)] for n in range(3)]
    assert [event["predicted_step_s"] for event in steps] == [float(sum(of_step)) for of_step in lengths]
    assert set(steps[0]) == {
        "event",
        "time",
        "step",
        "loss",
        "learning_rate",
        "grad_norm",
        "step_s",
        "tokens",
        "gpu_peak_bytes",
        "waited_s",
        "metered",
        "predicted_step_s",
    }


def test_a_loss_that_is_not_finite_ends_the_run_at_its_last_checkpoint(tmp_path: Path) -> None:
    run = Run(tiny_job(tmp_path, save_steps=2), tmp_path / "run")

    def poison(done: int) -> None:
        if done == 4:
            run.engine.masters["model.norm.weight"].data.fill_(torch.nan)

    run.before_each_step(poison)
    with pytest.raises(UserError) as caught:
        run.training.run()
    assert str(caught.value) == (
        "The training has diverged: the loss is not finite at step 5.\n"
        f"  last checkpoint: {tmp_path}/run/checkpoints/step-4\n"
        "  hint: use a lower learning_rate, more warmup_steps, or max_grad_norm: 1.0   [non-finite]"
    )
    assert run.losses()[-1] is None


def test_a_last_step_that_is_not_finite_ends_the_run_too(tmp_path: Path) -> None:
    run = Run(tiny_job(tmp_path, save_steps=4, max_grad_norm=None), tmp_path / "run")
    step = run.engine.step

    def poisoned(*args: object, **kwargs: object) -> object:
        result = step(*args, **kwargs)
        if run.engine.steps_done == 6:  # the loss was fine, the update is not
            run.engine.masters["model.norm.weight"].data[3] = torch.inf
        return result

    run.engine.step = poisoned
    with pytest.raises(UserError) as caught:
        run.training.run()
    assert str(caught.value) == (
        "The training has diverged: master of model.norm.weight is not finite at step 6.\n"
        f"  last checkpoint: {tmp_path}/run/checkpoints/step-4\n"
        "  hint: use a lower learning_rate, more warmup_steps, or max_grad_norm: 1.0   [non-finite]"
    )


def test_seeds_are_stable_and_differ() -> None:
    assert micro_batch_seed(42, 7, 3) == 8731196651434596181
    seeds = {micro_batch_seed(s, n, k) for s in range(3) for n in range(10) for k in range(4)}
    assert len(seeds | {epoch_seed(s, n) for s in range(3) for n in range(10)}) == 150
    assert all(0 <= seed < 2**63 for seed in seeds)
