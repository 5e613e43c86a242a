"""What comes from disk or lies packed, on a device that is late: optimizer states, frozen weights, quantized bases.
Some tests take seconds: models are traced and trained on an emulated device."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from planner.job.schema import Job
from planner.measure.machine_rates import estimate_hardware
from planner.models.hf_model import sample_batch
from planner.schedule.chain import Chain
from planner.schedule.compile import Queue, compile_program
from planner.schedule.items import Item
from planner.schedule.plan import Plan
from planner.search.activations_on_disk import with_twins
from planner.search.problem import Problem
from tests.support.cuda.device import Device
from tests.support.cuda.streams import Mood
from tests.support.engine_plans import adamw, chain_of, mixed_plan, resident_plan
from tests.support.engines import data, learning_rate, own_threads
from tests.support.late_engines import CUDA
from tests.support.lora_jobs import steps_of
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import make_model
from tests.worker.engine.test_quantized import job_of
from tests.worker.engine.test_trailing_states import trailing
from worker.engine.engine import Engine
from worker.storage.activations import ActivationsOnDisk
from worker.storage.states import StatesOnDisk
from worker.training.learning_rate import optimizer_of
from worker.training.model import load_model
from worker.training.stored import passing_sizes, stored_tensors

pytestmark = pytest.mark.emulated

STEPS, SLICES, PIECE = 3, 2, 1024
MOODS = [Mood.drawn(seed) for seed in (0, 5, 6)]


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    assert own_threads() == []


def trained(engine: Engine | PlainEngine) -> list[Tensor]:
    """Losses and norms of a few steps, then the state."""
    found = []
    for step in range(STEPS):
        batches, rest = data(step, SLICES)
        result = engine.step(batches, learning_rate=learning_rate(step), **rest)
        found += [*result.losses, *([] if result.grad_norm is None else [result.grad_norm])]
    return [*(t.cpu() for t in found), *states_of(engine)]


def trained_in(mood: Mood, engine: Engine, device: Device) -> list[Tensor]:
    """Likewise, on a device in that mood; ends the engine."""
    device.queues.set_mood(mood)
    try:
        return trained(engine)
    finally:
        engine.close()
        device.queues.set_mood(Mood())


def states_of(engine: Engine | PlainEngine) -> list[Tensor]:
    return [parts[part].clone() for _, parts in engine.state() for part in sorted(parts)]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("dtype", "clip", "trails"),
    [
        (torch.bfloat16, 0.5, False),
        (torch.bfloat16, 0.5, True),
        (torch.float32, None, False),
    ],
    ids=["bf16-clipped", "bf16-trailing", "fp32"],
)
def test_steps_with_states_on_disk_are_plain_pytorchs(
    device: Device, tmp_path: Path, dtype: torch.dtype, clip: float | None, trails: bool
) -> None:
    chain = chain_of(make_model("llama", dtype), device=CUDA)
    blocks = [
        replace(b, tensors=tuple(replace(t, states_on_disk=t.trainable) for t in b.tensors)) for b in chain.blocks
    ]
    chain = replace(chain, blocks=tuple(blocks), piece_elements=PIECE)
    plan = replace(mixed_plan(chain, slices=SLICES, clip=clip is not None), gpu_budget_bytes=0)
    plan = trailing(plan) if trails else plan
    assert len(compile_program(plan, chain).queue(Queue.DISK_WRITE)) > 8
    plain = make_model("llama", dtype)
    wanted = trained(PlainEngine(plain.to(CUDA), device=CUDA, optimizer=adamw(plain), max_grad_norm=clip))
    codes: dict[Any, Any] = {}
    for number, mood in enumerate(MOODS):
        gc.collect()
        model = make_model("llama", dtype)
        stored = stored_tensors(plan, chain, model)
        store = StatesOnDisk([tmp_path / str(number)], stored, piece_elements=PIECE, homes=2)
        engine = Engine(
            model, plan=plan, chain=chain, device=CUDA, optimizer=adamw(model), max_grad_norm=clip, states=store
        )
        engine._rounds.codes = codes
        with closing(store):
            assert same(trained_in(mood, engine, device), wanted), mood


@pytest.mark.parametrize("slices", [1, SLICES])
def test_steps_with_activations_on_disk_are_plain_pytorchs(device: Device, tmp_path: Path, slices: int) -> None:
    chain = with_twins(chain_of(make_model("llama"), device=CUDA))
    plan = replace(mixed_plan(chain, slices=slices, rounds=SLICES // slices, clip=True), gpu_budget_bytes=0)
    names = [option.name for option in chain.blocks[1].options if option.on_disk]
    layers = [names[k % len(names)] for k in range(2, len(plan.options))]
    plan = replace(plan, options=(plan.options[0], *layers, plan.options[-1]))
    plain = make_model("llama")
    wanted = trained(PlainEngine(plain.to(CUDA), device=CUDA, optimizer=adamw(plain), max_grad_norm=0.5))
    codes: dict[Any, Any] = {}
    for mood in MOODS:
        gc.collect()
        model = make_model("llama")
        scratch = ActivationsOnDisk([tmp_path / "drive"], passing_sizes(plan, chain) or {Item("a:0.0"): 4096})
        engine = Engine(
            model, plan=plan, chain=chain, device=CUDA, optimizer=adamw(model), max_grad_norm=0.5, scratch=scratch
        )
        engine._rounds.codes = codes
        with closing(scratch):
            assert same(trained_in(mood, engine, device), wanted), mood
            assert (scratch.written_bytes > 0) == (slices > 1)  # with one slice all stay in the ring


def in_the_least(chain: Chain, *, slices: int) -> Plan:
    """A plan in the least memory, so that whatever may travel does; without its cap."""
    machine = replace(estimate_hardware(CUDA), min_transfer_bytes=0)
    setting = {"chain": chain, "hardware": machine, "cpu_budget_bytes": 2**30, "slices": slices, "clip": True}
    least = Problem(gpu_budget_bytes=0, **setting).least().gpu_bytes
    plan = Problem(gpu_budget_bytes=least, **setting).plan()
    return replace(plan, gpu_budget_bytes=0)


def test_steps_with_frozen_weights_read_from_their_files_are_plain_pytorchs(device: Device, tmp_path: Path) -> None:
    make_model("llama", torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")

    def model_of() -> nn.Module:
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers" not in name or parameter.dim() == 1)
        return model

    chain = chain_of(model_of(), device=CUDA)
    blocks = [replace(b, tensors=tuple(replace(t, on_disk=not t.trainable) for t in b.tensors)) for b in chain.blocks]
    plan = in_the_least(chain := replace(chain, blocks=tuple(blocks)), slices=SLICES)
    assert compile_program(plan, chain).queue(Queue.DISK_READ)
    plain = model_of()
    wanted = trained(PlainEngine(plain.to(CUDA), device=CUDA, optimizer=adamw(plain), max_grad_norm=0.5))
    codes: dict[Any, Any] = {}
    for mood in MOODS:
        gc.collect()
        model = model_of()
        engine = Engine(model, plan=plan, chain=chain, device=CUDA, optimizer=adamw(model), max_grad_norm=0.5)
        engine._rounds.codes = codes
        assert same(trained_in(mood, engine, device), wanted), mood


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_base_that_travels_has_the_numbers_of_one_that_stays(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    """That these are peft's and bitsandbytes' is shown on the CPU (tests/worker/engine/test_quantized.py)."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    job = job_of(tmp_path, load_in_8bit=bits == 8, bf16=True, gradient_accumulation_steps=SLICES)
    chain = chain_of(load_model(job), sample_batch(job), CUDA)
    plan = in_the_least(chain, slices=SLICES)
    assert any("packed" in str(item) for stage in plan.stages for item in stage.prefetch)
    stays = replace(resident_plan(chain, slices=SLICES, clip=True), gpu_budget_bytes=0)
    codes: dict[Any, Any] = {}
    wanted = adapters(job, stays, chain, codes)
    for mood in MOODS[1:]:
        gc.collect()
        device.queues.set_mood(mood)
        assert same(adapters(job, plan, chain, codes), wanted), mood
        device.queues.set_mood(Mood())


def adapters(job: Job, plan: Plan, chain: Chain, codes: dict[Any, Any]) -> list[Tensor]:
    """Losses and the state after a few steps."""
    model = load_model(job)
    engine = Engine(
        model, plan=plan, chain=chain, optimizer=optimizer_of(job, model), max_grad_norm=job.max_grad_norm, device=CUDA
    )
    engine._rounds.codes = codes
    losses: list[Tensor] = []
    try:
        for batches, seeds, items in steps_of(job, STEPS):
            result = engine.step(batches, seeds=seeds, learning_rate=job.learning_rate, num_items_in_batch=items)
            losses += result.losses
        return [*(loss.cpu() for loss in losses), *states_of(engine)]
    finally:
        engine.close()
