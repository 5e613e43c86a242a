"""Training from preferences under a plan has the bits of plain PyTorch, on the CPU and on a device that is late."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from planner.arrange.pack import with_places
from planner.job.schema import Job
from planner.measure.machine_rates import estimate_hardware
from planner.models.hf_model import sample_batch, skeleton_model
from planner.search.problem import Problem
from tests.support.arena import arena_on
from tests.support.cuda.device import Device
from tests.support.cuda.streams import Mood
from tests.support.engine_plans import chain_of
from tests.support.late_waits import a_step
from tests.support.lora_jobs import CPU, engine_of, finished_run, plan_of
from tests.support.preference_jobs import preference_job
from tests.support.texts import byte_tokenizer
from worker.check.comparison import Comparison, Outcome
from worker.data.batches import Batches
from worker.engine.engine import Engine
from worker.training.metrics import read_metrics
from worker.training.model import load_model

CUDA = torch.device("cuda")

CASES: list[dict[str, Any]] = [
    {},
    {"preference": "ipo", "bf16": True, "max_grad_norm": 0},
    {"preference": "orpo", "sft_on_prompt": True, "gradient_accumulation_steps": 3, "name": "qwen2"},
    {"preference": "simpo", "per_device_train_batch_size": 3, "gradient_accumulation_steps": 1},
    {"preference": "cpo", "loss_weighting": "documents", "name": "gpt2"},
    {"preference": "kto", "undesirable_weight": 1.5},
    {"method": "lora", "lora_r": 4, "name": "qwen2"},
    {"preference": "robust", "preference_smoothing": 0.2, "sft_weight": 0.3, "optim": "adamw_8bit"},
    {"preference": "hinge", "name": "mixtral", "router_aux_loss_coef": 0.01},
]


def job_of(tmp_path: Path, keys: dict[str, Any]) -> Job:
    return preference_job(tmp_path, **{"name": "llama", **keys})


def assert_no_difference(outcome: Outcome, *, referring: bool) -> None:
    assert {finding.what for finding in outcome.findings} >= {"losses", "parameters", "moments"}
    assert ("reference" in {finding.what for finding in outcome.findings}) == referring
    assert all(finding.equal == finding.count > 0 for finding in outcome.findings)


@pytest.mark.parametrize("keys", CASES, ids=str)
def test_each_bit_is_that_of_plain_pytorch(tmp_path: Path, keys: dict[str, Any]) -> None:
    job = job_of(tmp_path, keys)
    batches = Batches(job, byte_tokenizer())
    comparison = Comparison(job=job, batches=batches, steps=3, layers=3, device=CPU, folder=tmp_path)
    assert_no_difference(comparison.run(*plan_of(job)), referring=job.refers)


@pytest.mark.emulated
@pytest.mark.parametrize(("keys", "placed"), [(CASES[0], False), (CASES[1], True), (CASES[5], True)], ids=str)
def test_a_late_device_changes_no_bit_and_no_step_waits_for_it(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], placed: bool
) -> None:
    """`placed`: tensors have places in the device's memory."""
    for name, size in (("SMALL_BYTES", 2**8), ("PAGE_BYTES", 2**12)):
        monkeypatch.setattr(f"planner.schedule.places.{name}", size)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    job = job_of(tmp_path, keys)
    machine = replace(estimate_hardware(CUDA), min_transfer_bytes=0, cpu_bytes=2**30)
    chain = chain_of(load_model(job), sample_batch(job, skeleton_model(job)), CUDA, arranged=placed)
    clip = bool(job.max_grad_norm)
    problem = Problem(chain=chain, hardware=machine, gpu_budget_bytes=0, cpu_budget_bytes=2**30, slices=2, clip=clip)
    plan = replace(problem, gpu_budget_bytes=problem.least().gpu_bytes * 11 // 10).plan()
    plan = with_places(plan, chain) if placed else replace(plan, gpu_budget_bytes=0)
    assert bool(plan.offsets) == placed
    step, seen, watched_steps = Engine.step, set[torch.Size](), list[bool]()

    def watched(self: Engine, batches: list[dict[str, Tensor]], **kwargs: Any) -> Any:
        shapes = {batch["input_ids"].shape for batch in batches}
        known = shapes <= seen  # for others host memory is taken, and given back where it was for shorter slices
        seen.update(shapes)
        with a_step(device, second=self.steps_done == 1) if known else contextlib.nullcontext():
            watched_steps.append(known)
            return step(self, batches, **kwargs)

    monkeypatch.setattr(Engine, "step", watched)
    device.queues.set_mood(Mood.drawn(4))
    batches = Batches(job, byte_tokenizer())
    comparison = Comparison(job=job, batches=batches, steps=4, layers=3, device=CUDA, folder=tmp_path)
    with arena_on(device) if placed else contextlib.nullcontext():
        assert_no_difference(comparison.run(plan, chain), referring=job.refers)
    assert any(watched_steps)


@pytest.mark.parametrize("preference", ["dpo", "orpo", "kto"])
def test_in_chunks_of_rows_the_losses_are_the_same_within_rounding(tmp_path: Path, preference: str) -> None:
    exact = preference_job(tmp_path, preference=preference)
    losses = []
    for number, job in enumerate((exact, exact.model_copy(update={"exact": False, "compile": "off"}))):
        run = finished_run(job, tmp_path / f"run-{number}")
        losses.append([event["loss"] for event in read_metrics(run.metrics) if event["event"] == "step"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("keys", [{}, {"method": "lora", "lora_r": 4}, {"exact": False, "compile": "off"}], ids=str)
def test_a_step_needs_no_more_memory_than_planned(tmp_path: Path, keys: dict[str, Any]) -> None:
    job = preference_job(tmp_path, max_length=32, **keys)
    plan, chain = plan_of(job)
    engine, _ = engine_of(job, plan, chain)
    batches = Batches(job, byte_tokenizer())
    largest = {name: _stretched(tensor, 32) for name, tensor in batches.step(0)[0].items()}
    for _ in range(3):
        peak = engine.step(
            [largest, largest], seeds=[1, 2], learning_rate=1e-3, num_items_in_batch=torch.tensor(4)
        ).peak_bytes
        assert peak is not None and 0 < peak <= plan.gpu_peak_bytes
    engine.close()


def _stretched(tensor: Tensor, length: int) -> Tensor:
    """Rows of tokens repeated to so many."""
    return tensor.repeat(1, length)[:, :length].contiguous() if tensor.dim() == 2 else tensor


def test_before_the_first_step_the_model_is_its_reference(tmp_path: Path) -> None:
    run = finished_run(preference_job(tmp_path, "qwen2", gradient_accumulation_steps=1), tmp_path / "run")
    first = next(event for event in read_metrics(run.metrics) if event["event"] == "step")
    assert first["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert first["rewards_margins"] == pytest.approx(0.0, abs=1e-5)


def test_a_model_learns_to_prefer(tmp_path: Path) -> None:
    run = finished_run(preference_job(tmp_path, "qwen2", max_steps=40, learning_rate=2e-3), tmp_path / "run")
    steps = [event for event in read_metrics(run.metrics) if event["event"] == "step"]
    assert steps[-1]["rewards_accuracies"] == 1.0
    assert steps[-1]["loss"] < 0.4 < steps[0]["loss"]
