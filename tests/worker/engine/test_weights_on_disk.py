"""Frozen weights read from the model's own files in every pass: plain PyTorch's numbers, and no copy on the host."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from planner.cpu.direct import OpenFile
from planner.errors import UserError
from planner.measure.machine_rates import estimate_hardware
from planner.schedule.compile import OpKind, compile_program
from planner.schedule.memory_use import cpu_parts
from planner.search.problem import Problem
from tests.support.engine_plans import adamw, chain_of
from tests.support.engines import CPU, assert_same, assert_same_state, data, run
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import make_model
from worker.engine.engine import Engine

torch.set_num_threads(1)
BF16 = torch.bfloat16
SLICES, CLIP = 2, 0.5
HOST_BYTES = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("llama", BF16).save_pretrained(path, max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


def model_of(folder: Path):
    """Mapped from its files; of the layers only the norms are trained."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=BF16).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers" not in name or parameter.dim() == 1)
    return model


@pytest.fixture(scope="module")
def planned(folder: Path):
    """A plan near the least budget, of a chain whose frozen weights are on disk."""
    chain = chain_of(model_of(folder))
    blocks = [replace(b, tensors=tuple(replace(t, on_disk=not t.trainable) for t in b.tensors)) for b in chain.blocks]
    chain = replace(chain, blocks=tuple(blocks))
    hardware = replace(estimate_hardware(CPU), min_transfer_bytes=0)
    setting = {"cpu_budget_bytes": HOST_BYTES, "slices": SLICES, "clip": True}
    budget = int(1.05 * Problem(chain=chain, hardware=hardware, gpu_budget_bytes=0, **setting).least().gpu_bytes)
    return Problem(chain=chain, hardware=hardware, gpu_budget_bytes=budget, **setting).plan(), chain


@pytest.fixture
def make(planned):
    engines = []

    def build(model, *, metered=False):
        plan, chain = planned
        settings = {"optimizer": adamw(model), "max_grad_norm": CLIP, "metered": metered}
        engine = Engine(model, plan=plan, chain=chain, device=CPU, **settings)
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.close()


def reads(planned) -> list:
    plan, chain = planned
    return [op for op in compile_program(plan, chain).ops if op.kind is OpKind.READ]


def test_steps_evaluations_and_what_is_restored_are_plain_pytorchs(folder, make, planned, monkeypatch):
    read = []
    from_file = OpenFile.read
    monkeypatch.setattr(OpenFile, "read", lambda *args: read.append(args[2]) or from_file(*args))
    model, same = model_of(folder), model_of(folder)
    plain = PlainEngine(same, optimizer=adamw(same), max_grad_norm=CLIP)
    engine = make(model)
    read.clear()  # a look at both ends of each
    assert_same(run(engine, range(3), SLICES), run(plain, range(3), SLICES))
    engine.drain()
    assert len(read) == 3 * len(reads(planned)) > 3 * 8
    assert_same_state(engine, plain)
    weights = dict(same.named_parameters())
    still = {name: parts["master"] for name, parts in engine.frozen()}
    assert still and all(torch.equal(t, weights[name]) for name, t in still.items())
    before = len(read)
    batches, _ = data(9, SLICES)
    evaluated = engine.evaluate(batches)
    assert len(read) > before
    same.eval()
    with torch.no_grad():
        expected = [same(**batch).loss for batch in batches]
    assert all(torch.equal(a, b) for a, b in zip(evaluated.losses, expected, strict=True))
    restored = dict(engine.restore().named_parameters())
    assert all(torch.equal(t, weights[name]) for name, t in restored.items())


def test_host_and_device_have_what_the_plan_says_the_host_the_ring_and_no_copy(folder, make, planned):
    engine = make(model_of(folder), metered=True)
    batches, rest = data(0, SLICES)
    assert engine.step(batches, learning_rate=1e-3, **rest).peak_bytes <= planned[0].gpu_peak_bytes
    engine.drain()
    host = engine._weights.host
    names = {op.subject for op in reads(planned)}
    own = [t for item, tensors in host.items.items() if item not in names for t in tensors]
    slabs = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*own, *host._slots)}
    parts = cpu_parts(*planned)
    assert parts.ring_bytes == sum(t.nbytes for t in host._slots) > 0
    assert parts.total_bytes <= sum(slabs.values()) <= parts.total_bytes + mmap.PAGESIZE * len(slabs)


def test_a_disk_that_fails_ends_the_step_with_an_error_for_people(folder, make, monkeypatch):
    engine = make(model_of(folder))
    run(engine, range(1), SLICES)

    def failing(*args):
        raise OSError(5, os.strerror(5), "model.safetensors")

    monkeypatch.setattr(OpenFile, "read", failing)
    with pytest.raises(UserError, match="cannot be read from disk") as raised:
        run(engine, range(1, 2), SLICES)
    assert raised.value.code == "disk-failed"


def test_a_model_that_is_not_mapped_from_files_is_refused(make):
    model = make_model("llama", BF16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers" not in name or parameter.dim() == 1)
    with pytest.raises(UserError) as raised:
        make(model)
    assert raised.value.code == "weights-not-in-files"


def test_a_file_that_is_another_one_by_now_is_seen(tmp_path, make):
    make_model("llama", BF16).save_pretrained(tmp_path)
    model = model_of(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    size = path.stat().st_size
    path.unlink()
    path.write_bytes(bytes(size))
    with pytest.raises(UserError, match="cannot be read") as raised:
        make(model)
    assert raised.value.code == "weights-not-in-files"
