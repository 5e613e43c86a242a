"""Updates ahead of the norm: as if it did not clip, and once more where it does. The numbers are plain PyTorch's."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from planner.cpu.adamw import ChunkedKernel, Step, Target, cpu_kernel
from planner.schedule.compile import OpKind, compile_program
from planner.schedule.memory_use import cpu_parts
from tests.support.engine_plans import adamw, chain_of, mixed_plan
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import batch_of, make_model
from worker.engine.actions import Actions
from worker.engine.engine import Engine

torch.set_num_threads(1)
CPU = torch.device("cpu")
STEPS, SLICES = 6, 2


def data(step, count=SLICES):
    batches = [batch_of(100 * step + k, length=16) for k in range(count)]
    tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    rest = {"seeds": [1000 * step + k for k in range(count)], "learning_rate": 1e-3, "num_items_in_batch": tokens}
    return batches, rest


def norms(name, dtype):
    """The norms of a run that is not clipped."""
    model = make_model(name, dtype)
    plain = PlainEngine(model, optimizer=adamw(model), max_grad_norm=1e9)
    return [float(plain.step(batches, **rest).grad_norm) for batches, rest in map(data, range(STEPS))]


@pytest.fixture
def make():
    engines = []

    def build(name, *, clip, dtype=torch.float32, **shape):
        plain, model = make_model(name, dtype), make_model(name, dtype)
        chain = chain_of(model)
        plan = mixed_plan(chain, clip=True, ahead=True, **shape)
        settings = {"optimizer": adamw(model), "max_grad_norm": clip}
        engine = Engine(model, plan=plan, chain=chain, device=CPU, **settings)
        engine.plan, engine.chain = plan, chain
        engines.append(engine)
        return engine, PlainEngine(plain, **settings)

    yield build
    for engine in engines:
        engine.close()


@pytest.fixture
def renewed(monkeypatch):
    """Counts the updates ahead, replays among them."""
    count = Counter()
    renew = Actions._renew

    def counted(self, names, values, coefficient):
        count["replays" if coefficient is not None else "ahead"] += len(names)
        renew(self, names, values, coefficient)

    monkeypatch.setattr(Actions, "_renew", counted)
    return count


def assert_equal(engine, plain, steps, count=SLICES):
    """Also the norms of the steps."""
    found = []
    for batches, rest in (data(step, count) for step in steps):
        got, expected = engine.step(batches, **rest), plain.step(batches, **rest)
        found.append(float(got.grad_norm))
        assert all(torch.equal(a, b) for a, b in zip(got.losses, expected.losses, strict=True))
        assert torch.equal(got.grad_norm, expected.grad_norm)
    wanted = dict(plain.state())
    for name, parts in engine.state():
        assert all(torch.equal(t, wanted[name][key]) for key, t in parts.items()), name
    return found


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_updates_ahead_equal_plain_pytorch_whether_the_norm_clips_or_not(make, renewed, name, dtype):
    found = sorted(norms(name, dtype))
    clip = (found[STEPS // 2 - 1] + found[STEPS // 2]) / 2  # clips about every other step
    engine, plain = make(name, slices=SLICES, clip=clip, dtype=dtype)
    clipped = [norm > clip for norm in assert_equal(engine, plain, range(STEPS))]
    turns = list(zip([False, *clipped], clipped, strict=False))  # did the last norm clip, does this one
    tensors = len(engine.plan.ahead())
    assert renewed["ahead"] == tensors * sum(not before for before, _ in turns) > 0
    assert renewed["replays"] == tensors * turns.count((False, True)) > 0
    assert (True, False) in turns or (True, True) in turns


def test_where_the_norm_always_clips_nothing_is_done_twice_but_in_the_first_step(make, renewed):
    engine, plain = make("llama", slices=SLICES, clip=1e-3, dtype=torch.bfloat16)
    assert_equal(engine, plain, range(3))
    assert renewed["ahead"] == renewed["replays"] == len(engine.plan.ahead())


def test_where_the_norm_never_clips_nothing_is_done_twice(make, renewed):
    engine, plain = make("llama", slices=SLICES, clip=1e6)
    assert_equal(engine, plain, range(3))
    assert renewed["ahead"] == 3 * len(engine.plan.ahead()) and not renewed["replays"]


def test_updates_ahead_in_rounds_equal_plain_pytorch(make):
    engine, plain = make("llama", slices=2, rounds=2, clip=0.5)
    assert_equal(engine, plain, range(3), 4)


def test_saving_and_loading_between_updates_ahead_changes_no_bit(make):
    first, plain = make("llama", slices=SLICES, clip=0.5)
    second, _ = make("llama", slices=SLICES, clip=0.5)
    assert_equal(first, plain, range(2))
    second.load_state([(name, {k: t.clone() for k, t in parts.items()}) for name, parts in first.state()], step=2)
    assert_equal(second, plain, range(2, 4))


def test_what_is_kept_for_a_replay_is_what_the_plan_charges(make):
    engine, _ = make("llama", slices=SLICES, clip=0.5, dtype=torch.bfloat16)
    batches, rest = data(0)
    engine.step(batches, **rest)
    engine.drain()
    spare = engine._weights.host._spare
    kept = sum(t.nbytes for tensors in spare.values() for t in tensors)
    assert kept == cpu_parts(engine.plan, engine.chain).kept_bytes > 0


def test_an_update_ahead_waits_for_no_norm_and_its_replay_does():
    chain = chain_of(make_model("llama"))
    program = compile_program(mixed_plan(chain, clip=True, ahead=True), chain)
    ahead = [op for op in program.ops if op.kind is OpKind.CPU_AHEAD]
    replays = [op for op in program.ops if op.kind is OpKind.CPU_REPLAY]
    assert {op.stage for op in ahead} == {"B1"} and len(ahead) == len(replays) > 0
    assert any("clip@B0:all" in op.waits for op in program.ops if op.queue is ahead[0].queue)
    assert not any("clip@B0:all" in op.waits for op in ahead)


@pytest.mark.parametrize("layout", ["fp32", "mixed", "bf16"])
@pytest.mark.parametrize("kernel", [cpu_kernel, ChunkedKernel])
def test_an_update_from_other_memory_has_the_bits_of_one_in_place_and_leaves_that_memory_alone(layout, kernel):
    draw = torch.Generator().manual_seed(1)
    wide = torch.bfloat16 if layout == "bf16" else torch.float32
    narrow = torch.float32 if layout == "fp32" else torch.bfloat16
    master, exp_avg, exp_avg_sq = (torch.rand(1003, generator=draw).to(wide) for _ in range(3))
    gradient = torch.randn(1003, generator=draw).to(narrow)
    step = Step(learning_rate=1e-2, betas=(0.9, 0.95), eps=1e-8, count=torch.tensor(3.0), coefficient=None)

    def target(state, **more):
        work = torch.empty(1003, dtype=narrow) if layout == "mixed" else state[0]
        return Target("x", 0.1, work, *state, gradient, **more)

    before = (master, exp_avg, exp_avg_sq)
    copies = [t.clone() for t in before]
    in_place = target([t.clone() for t in before])
    elsewhere = target([torch.full_like(t, torch.nan) for t in before], before=before)
    for each in (in_place, elsewhere):
        kernel().update([each], step)
    for part in ("master", "exp_avg", "exp_avg_sq", "work"):
        assert torch.equal(getattr(in_place, part), getattr(elsewhere, part)), part
    assert all(torch.equal(a, b) for a, b in zip(copies, before, strict=True))
