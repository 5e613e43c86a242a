"""Ten bytes of states a parameter: every bit of the master comes back, and updates are those of whole states."""

from __future__ import annotations

import pytest
import torch

from planner.cpu import packed
from planner.cpu.adamw import ChunkedKernel, NativeKernel, Step, Target, check
from planner.cpu.build import CannotBuildError
from planner.cpu.packed import pack, unpack

torch.set_num_threads(1)
SIZES = (1, 7, 8, 77, 1003)


@pytest.fixture(params=["native", "chunked"])
def kernel(request: pytest.FixtureRequest) -> NativeKernel | ChunkedKernel:
    if request.param == "chunked":
        return ChunkedKernel()
    try:
        return NativeKernel()
    except CannotBuildError as error:
        pytest.skip(str(error))


def all_masters() -> torch.Tensor:
    """Every finite upper half, with lower halves around ties and others."""
    lows = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xABCD])
    bits = ((torch.arange(1 << 16)[:, None] << 16) | lows).reshape(-1)
    values = bits.to(torch.int32).view(torch.float32)
    return values[torch.isfinite(values)].clone()


def test_every_master_and_its_second_moment_come_back_from_memory_that_they_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed, "_PIECE", 100_003)  # what is read must not have been written by the pieces before
    expected = all_masters()
    count = len(expected)
    master = expected.clone()
    gradient, low = master.view(torch.int16).chunk(2)
    moments = torch.rand(count, generator=torch.Generator().manual_seed(0))
    moments[::5] = 0
    work, exp_avg_sq = torch.empty(count, dtype=torch.bfloat16), moments.clone()
    pack(master, work, low, exp_avg_sq)
    assert torch.equal(work.view(torch.int16), expected.bfloat16().view(torch.int16))
    assert (exp_avg_sq.view(torch.int32) < 0).sum() > count // 4  # some were rounded up
    gradient.fill_(-1)
    unpack(work, low, exp_avg_sq, master)
    assert torch.equal(master.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(exp_avg_sq.view(torch.int32), moments.view(torch.int32))


def pairs(seed: int) -> tuple[list[Target], list[Target]]:
    """The same parameters with whole states and with packed ones, before the first step."""
    draw = torch.Generator().manual_seed(seed)
    whole, small = [], []
    for size in SIZES:
        work = torch.randn(size, generator=draw).bfloat16()
        gradient = torch.empty(size, dtype=torch.bfloat16)
        own = [torch.zeros(size) for _ in range(4)]
        whole.append(Target(f"{size}", 0.3, work, work.float(), own[0], own[1], gradient))
        low = torch.zeros(size, dtype=torch.int16)
        small.append(Target(f"{size}", 0.3, work.clone(), low, own[2], own[3], gradient))
    return whole, small


def assert_equal(whole: list[Target], small: list[Target]) -> None:
    for expected, got in zip(whole, small, strict=True):
        master, exp_avg_sq = torch.empty_like(expected.master), got.exp_avg_sq.clone()
        unpack(got.work, got.master, exp_avg_sq, master)
        assert torch.equal(got.work, expected.work) and torch.equal(got.exp_avg, expected.exp_avg), got.name
        assert torch.equal(master, expected.master) and torch.equal(exp_avg_sq, expected.exp_avg_sq), got.name


def step_of(number: int, coefficient: float | None, betas: tuple[float, float]) -> Step:
    factor = None if coefficient is None else torch.tensor(coefficient)
    return Step(
        learning_rate=0.01 / number, betas=betas, eps=1e-8, count=torch.tensor(float(number)), coefficient=factor
    )


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in place", "from other memory"])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.3, 0.999)], ids=["slow", "fast"])
def test_many_steps_on_packed_states_are_those_on_whole_ones(
    kernel: NativeKernel | ChunkedKernel, betas: tuple[float, float], elsewhere: bool
) -> None:
    whole, small = pairs(0)
    draw = torch.Generator().manual_seed(1)
    for number in range(1, 25):
        for target in whole:  # the gradient is one for both
            target.gradient.normal_(generator=draw).mul_((1.0, 1e-3, 30.0, 1e-7, 0.0)[number % 5])
        step = step_of(number, None if number % 3 else 0.37, betas)
        if elsewhere:
            old = [tuple(t.clone() for t in (s.master, s.exp_avg, s.exp_avg_sq, s.work)) for s in small]
            kept = [tuple(t.clone() for t in state) for state in old]
            small = [
                Target(
                    t.name,
                    0.3,
                    torch.zeros_like(t.work),
                    torch.zeros_like(t.master),
                    torch.zeros_like(t.exp_avg),
                    torch.zeros_like(t.exp_avg),
                    t.gradient,
                    before=state,
                )
                for t, state in zip(small, old, strict=True)
            ]
        kernel.update(small, step)
        kernel.update(whole, step)
        assert_equal(whole, small)
        if elsewhere:
            for now, was in zip(old, kept, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(now, was, strict=True))


def test_a_kernel_that_forgets_whether_it_rounded_up_is_not_used() -> None:
    class Forgetful(ChunkedKernel):
        def update(self, targets: list[Target], step: Step) -> None:  # type: ignore[override]
            super().update(targets, step)
            for target in targets:
                if target.packed:
                    target.exp_avg_sq.abs_()

    check(ChunkedKernel())
    with pytest.raises(ArithmeticError, match="differ from PyTorch's"):
        check(Forgetful())
