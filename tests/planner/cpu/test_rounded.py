"""AdamW with moments in 8 bits: one arithmetic on every way, and bitsandbytes' AdamW8bit within rounding."""

from __future__ import annotations

import pytest
import torch

from planner.cpu.adamw import ChunkedKernel, Target
from planner.cpu.eight_bits import moment_bytes, scratch_bytes
from planner.cpu.rounded import both_numbers, expand, numbers, rounded, split
from planner.optimizers.adamw import update_in_lists
from tests.planner.cpu.test_adamw import make_kernel, step_of

torch.set_num_threads(1)
FP32, BF16 = torch.float32, torch.bfloat16
SIZES = (1, 7, 255, 256, 257, 512, 1003, 4099)
PARTS = (("exp_avg", True), ("exp_avg_sq", False))


def in_lists(targets, step):
    """As a GPU does it."""
    update_in_lists(targets, step, both_numbers())


class Pair:
    """Targets with moments in 8 bits beside torch's AdamW(fused=True), whose moments are rounded after each step."""

    def __init__(self, dtype, sizes=SIZES, *, seed=0):
        self.draw, self.targets, self.parameters = torch.Generator().manual_seed(seed), [], []
        for size in sizes:
            work = torch.randn(size, generator=self.draw).to(dtype)
            master = work if dtype == FP32 else work.float()
            self.parameters.append(torch.nn.Parameter(master.clone()))
            moments = [torch.zeros(moment_bytes(size), dtype=torch.uint8) for _ in PARTS]
            self.targets.append(Target(f"{size}", 0.1, work, master, *moments, torch.empty(size, dtype=dtype)))
        self.adamw = torch.optim.AdamW(self.parameters, betas=(0.9, 0.95), weight_decay=0.1, lr=1e-2, fused=True)

    def gradients(self, scale):
        for target, parameter in zip(self.targets, self.parameters, strict=True):
            drawn = torch.randn(target.gradient.shape, generator=self.draw)
            target.gradient.copy_(drawn * scale * 10 ** (4 * torch.rand(drawn.shape, generator=self.draw) - 4))
            parameter.grad = target.gradient.to(FP32, copy=True)

    def plain_step(self, coefficient=None):
        for parameter in self.parameters:
            if coefficient is not None:
                parameter.grad.mul_(torch.tensor(coefficient))
        self.adamw.step()
        for parameter in self.parameters:
            state = self.adamw.state[parameter]
            for part, signed in PARTS:
                state[part].copy_(rounded(state[part], signed=signed))

    def assert_same(self):
        for target, parameter in zip(self.targets, self.parameters, strict=True):
            assert torch.equal(target.master, parameter.detach()), target.name
            assert torch.equal(target.work, parameter.detach().to(target.work.dtype)), target.name
            for moment, (part, signed) in zip((target.exp_avg, target.exp_avg_sq), PARTS, strict=True):
                found = expand(*split(moment, parameter.numel()), signed=signed)
                assert torch.equal(found, self.adamw.state[parameter][part]), (target.name, part)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", ["native", "chunked", "lists"])
def test_every_way_is_torchs_adamw_with_moments_rounded_after_each_step(way, dtype):
    pair, update = Pair(dtype), in_lists if way == "lists" else make_kernel(way).update
    for number, scale in enumerate((1e-3, 1.0, 0.0, 1e-20, 1e3, 1e-3), start=1):
        pair.gradients(scale)
        update(pair.targets, step_of(number, coefficient=0.7))
        pair.plain_step(0.7)
        pair.assert_same()


@pytest.mark.parametrize("way", ["native", "chunked"])
def test_what_was_before_may_be_read_from_other_memory(way):
    pair = Pair(BF16)
    for number in (1, 2):
        pair.gradients(1.0)
        others = []
        for target in pair.targets:
            before = tuple(t.clone() for t in (target.master, target.exp_avg, target.exp_avg_sq))
            for tensor in (target.master, target.exp_avg, target.exp_avg_sq):
                tensor.fill_(7)
            others.append(
                Target(
                    target.name,
                    0.1,
                    target.work,
                    target.master,
                    target.exp_avg,
                    target.exp_avg_sq,
                    target.gradient,
                    before,
                )
            )
        make_kernel(way).update(others, step_of(number))
        pair.plain_step()
        pair.assert_same()


def test_a_tensor_is_updated_alike_in_any_chunks(monkeypatch):
    monkeypatch.setattr("planner.cpu.adamw.CHUNK", 4 * 512)
    monkeypatch.setattr("planner.optimizers.adamw.CHUNK", 256)
    for update in (ChunkedKernel().update, in_lists):
        pair = Pair(BF16, (4099,))
        pair.gradients(1.0)
        update(pair.targets, step_of(1))
        pair.plain_step()
        pair.assert_same()


def test_threads_change_no_bit():
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            pair = Pair(BF16, (300_000, 5))
            pair.gradients(1.0)
            make_kernel("native").update(pair.targets, step_of(1))
            found.append(pair.targets[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0].exp_avg, found[1].exp_avg) and torch.equal(found[0].master, found[1].master)


@pytest.mark.parametrize("way", ["native", "chunked"])
@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_is_seen_in_the_scales(way, odd):
    pair = Pair(FP32, (600,))
    pair.gradients(1.0)
    pair.targets[0].gradient[300] = odd
    make_kernel(way).update(pair.targets, step_of(1))
    for moment in (pair.targets[0].exp_avg, pair.targets[0].exp_avg_sq):
        scales, _ = split(moment, 600)
        assert torch.isfinite(scales).tolist() == [True, False, True]


def test_a_moment_takes_a_byte_each_and_four_for_each_256():
    assert [moment_bytes(n) for n in (1, 256, 257, 2**20)] == [5, 260, 265, 2**20 + 2**14]
    assert scratch_bytes(256) == 16 * 256 + 4 and scratch_bytes(2**30) == scratch_bytes(2**22) < 2**26 + 2**17


def test_a_value_becomes_the_nearest_number_of_its_block_and_stays_it():
    for part, signed in PARTS:
        known = numbers(signed=signed).values
        assert known.tolist() == sorted(set(known.tolist())) and len(known) == 256 and known[-1] == 1, part
        drawn = torch.randn(1024, generator=torch.Generator().manual_seed(1))
        wide = drawn if signed else drawn.square()
        found, scales = rounded(wide, signed=signed).view(-1, 256), wide.view(-1, 256).abs().amax(1, keepdim=True)
        for decade in range(7):  # as docs/explanation/exactness.md has it
            its = torch.linspace(-(10.0**-decade) if signed else 0, 10.0**-decade, 10_001)
            off = (its.unsqueeze(1) - known).abs().amin(1).max()
            assert off <= 10**-decade * 0.00704 * 2**decade / (1 if signed else 2), (part, decade)
        gaps = (wide.view(-1, 256, 1) / scales.unsqueeze(2) - known).abs().amin(2)
        assert ((found / scales - wide.view(-1, 256) / scales).abs() <= gaps + 1e-6).all(), part


class TestBesideBitsandbytes:
    @pytest.fixture
    def bnb(self):
        return pytest.importorskip("bitsandbytes")

    def test_the_numbers_are_its_own(self, bnb):
        for signed in (True, False):
            assert torch.equal(numbers(signed=signed).values, bnb.functional.create_dynamic_map(signed=signed))

    def test_a_step_is_that_of_its_adamw8bit_within_rounding(self, bnb):
        """Which multiplies and adds in another order: where that moves a value over a halfway, it is the next one. Its
        kernel for the CPU sees values in steps of 2^-15, unlike that for CUDA: the small ones may be others."""
        draw = torch.Generator().manual_seed(3)
        weight = torch.nn.Parameter(torch.randn(64, 100, generator=draw))
        ours, size = weight.detach().clone(), weight.numel()
        moments = [torch.zeros(moment_bytes(size), dtype=torch.uint8) for _ in PARTS]
        theirs = bnb.optim.AdamW8bit([weight], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        differing = 0
        for number in range(1, 21):
            weight.grad = torch.randn(64, 100, generator=draw)
            make_kernel("native").update([Target("w", 0.1, ours, ours, *moments, weight.grad)], step_of(number))
            theirs.step()
            assert torch.allclose(ours, weight.detach(), rtol=0, atol=1e-6)
            for k, (moment, (_, signed)) in enumerate(zip(moments, PARTS, strict=True), start=1):
                (scales, places), its = split(moment, size), theirs.state[weight]
                assert torch.allclose(scales, its[f"absmax{k}"], rtol=1e-6, atol=0)
                known, others = numbers(signed=signed).values, its[f"state{k}"].view(-1).int()
                large = known[places.int()].abs() > 1e-4
                assert (places.int() - others)[large].abs().max() <= 1
                assert ((known[places.int()] - known[others])[~large].abs() < 2**-15).all()
                differing += int((places != others)[large].sum())
                its[f"state{k}"].copy_(places.view(64, 100))  # else what one has rounded up goes on and on
                its[f"absmax{k}"].copy_(scales)
            weight.data.copy_(ours)
        assert differing < 0.02 * 40 * size, differing / (40 * size)
