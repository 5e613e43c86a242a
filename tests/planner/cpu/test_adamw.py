"""The CPU's AdamW against torch.optim.AdamW(fused=True): every bit, whatever the sizes, settings and threads."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from planner.cpu.adamw import CHUNK, ChunkedKernel, NativeKernel, Step, Target
from planner.cpu.build import CannotBuildError
from planner.cpu.meter import Meter
from planner.optimizers.adamw import update, update_in_lists

torch.set_num_threads(1)
FP32, BF16 = torch.float32, torch.bfloat16
LAYOUTS = {"fp32": (FP32, FP32), "mixed": (FP32, BF16), "bf16": (BF16, BF16)}
"""Dtypes of the master with its moments, and of gradient and working copy."""
SIZES = (1, 3, 7, 8, 9, 16, 23, 64, 77, 640, 1003)


@pytest.fixture(params=["native", "chunked"])
def kernel(request):
    return make_kernel(request.param)


@pytest.fixture(params=["native", "chunked", "lists"])
def way(request):
    """Also as a GPU does it."""
    return make_kernel(request.param)


def make_kernel(name):
    if name == "chunked":
        return ChunkedKernel()
    if name == "lists":
        return SimpleNamespace(update=update_in_lists)
    try:
        return NativeKernel()
    except CannotBuildError as error:
        pytest.skip(str(error))


def step_of(number, *, betas=(0.9, 0.95), rate=1e-2, eps=1e-8, coefficient=None):
    factor = None if coefficient is None else torch.tensor(coefficient)
    return Step(learning_rate=rate, betas=betas, eps=eps, count=torch.tensor(float(number)), coefficient=factor)


class Pair:
    """Targets for a kernel beside the same parameters under torch.optim; every other tensor decays."""

    def __init__(self, layout, sizes=SIZES, *, betas=(0.9, 0.95), eps=1e-8, decay=0.3, seed=0):
        self.draw = torch.Generator().manual_seed(seed)
        self.betas, self.eps = betas, eps
        master_dtype, self.dtype = LAYOUTS[layout]
        self.targets, self.parameters = [], []
        for number, size in enumerate(sizes):
            work = torch.randn(size, generator=self.draw).to(self.dtype)
            master = work if self.dtype == master_dtype else work.float()
            self.parameters.append(torch.nn.Parameter(master.clone()))
            moments = [torch.zeros(size, dtype=master_dtype) for _ in range(2)]
            gradient = torch.empty(size, dtype=self.dtype)
            self.targets.append(Target(f"{size}", decay * (number % 2), work, master, *moments, gradient))
        groups = [
            {"params": self.parameters[k::2], "weight_decay": k * decay} for k in range(min(2, len(self.targets)))
        ]
        self.adamw = torch.optim.AdamW(groups, betas=betas, eps=eps, fused=True)

    def step(self, kernel, number, *, rate=1e-2, coefficient=None, scale=1.0):
        for target, parameter in zip(self.targets, self.parameters, strict=True):
            target.gradient.copy_(torch.randn(target.gradient.shape, generator=self.draw) * scale)
            parameter.grad = target.gradient.to(parameter.dtype, copy=True)
            if coefficient is not None:
                parameter.grad.mul_(torch.tensor(coefficient))
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        kernel.update(self.targets, step_of(number, betas=self.betas, rate=rate, eps=self.eps, coefficient=coefficient))

    def assert_equal(self):
        for target, parameter in zip(self.targets, self.parameters, strict=True):
            state = self.adamw.state[parameter]
            assert torch.equal(target.master, parameter), target.name
            assert torch.equal(target.exp_avg, state["exp_avg"]), target.name
            assert torch.equal(target.exp_avg_sq, state["exp_avg_sq"]), target.name
            assert torch.equal(target.work, parameter.to(self.dtype)), target.name


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.3, 0.999)], ids=["slow", "fast"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_steps_equal_the_fused_optimizer_bitwise(way, layout, betas):
    pair = Pair(layout, betas=betas)
    for number in range(1, 61):
        pair.step(
            way,
            number,
            rate=0.01 / number,
            coefficient=None if number % 3 else 0.37,
            scale=(1.0, 1e-3, 30.0, 1e-7, 0.0)[number % 5],
        )
        pair.assert_equal()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_settings_of_any_size_give_the_same_bits(kernel, layout):
    choose = torch.Generator().manual_seed(1)

    def number(low, high):
        return low + (high - low) * float(torch.rand((), generator=choose, dtype=torch.float64))

    for seed in range(40):
        betas = number(0, 1), number(0.5, 0.9999)
        pair = Pair(layout, (1003,), betas=betas, eps=10 ** number(-12, -3), decay=number(0, 0.5), seed=seed)
        for count in (1, 2, 3):
            pair.step(kernel, count, rate=10 ** number(-6, -1), coefficient=number(0, 1))
        pair.assert_equal()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_last_elements_of_a_tensor_are_rounded_as_pytorch_does_it(kernel, layout):
    for seed in range(30):
        pair = Pair(layout, range(1, 40), seed=seed)
        for number in (1, 2):
            pair.step(kernel, number, scale=0.05)
        pair.assert_equal()


@pytest.mark.parametrize("layout", ["fp32", "mixed"])
def test_the_number_of_threads_changes_no_bit(kernel, layout):
    pair = Pair(layout, (CHUNK + 4099, 5, CHUNK // 2 + 1))
    try:
        for number, threads in enumerate((1, 2, 3, 2), 1):
            torch.set_num_threads(threads)
            pair.step(kernel, number, coefficient=0.5)
    finally:
        torch.set_num_threads(1)
    pair.assert_equal()


def test_infinities_and_what_is_no_number_go_where_pytorch_lets_them_go(kernel):
    pair = Pair("mixed", (1003,))
    target, parameter = pair.targets[0], pair.parameters[0]
    for number in (1, 2):
        target.gradient.normal_(generator=pair.draw)
        target.gradient[[0, 5, 700]], target.gradient[[6, 1001]] = torch.inf, torch.nan
        parameter.grad = target.gradient.float()
        pair.adamw.param_groups[0]["lr"] = 1e-2
        pair.adamw.step()
        kernel.update(pair.targets, step_of(number))
    state = pair.adamw.state[parameter]
    expected = (parameter.detach(), state["exp_avg"], state["exp_avg_sq"], parameter.detach().bfloat16())
    assert parameter.isnan().sum() == 5
    for ours, theirs in zip((target.master, target.exp_avg, target.exp_avg_sq, target.work), expected, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours[~ours.isnan()], theirs[~theirs.isnan()])


def test_gradients_stay_as_they_are(kernel):
    for layout in LAYOUTS:
        pair = Pair(layout)
        for target in pair.targets:
            target.gradient.fill_(1.0)
        kernel.update(pair.targets, step_of(1, coefficient=0.5))
        assert all((target.gradient == 1.0).all() for target in pair.targets)


def test_a_gradient_may_lie_where_the_working_copy_will_be(kernel):
    apart, together = Pair("mixed").targets, Pair("mixed").targets
    for target, other in zip(apart, together, strict=True):
        target.gradient.copy_(target.work.flip(0))
        other.work.copy_(target.gradient)
    shared = [Target(t.name, 0.3, t.work, t.master, t.exp_avg, t.exp_avg_sq, t.work) for t in together]
    kernel.update([Target(t.name, 0.3, *parts(t), t.gradient) for t in apart], step_of(1))
    kernel.update(shared, step_of(1))
    for target, other in zip(apart, together, strict=True):
        assert torch.equal(target.work, other.work) and torch.equal(target.master, other.master)


def parts(target):
    return target.work, target.master, target.exp_avg, target.exp_avg_sq


@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_that_is_read_elsewhere_stays_and_gives_the_same_bits(kernel, layout):
    pair = Pair(layout, (5, 77, CHUNK + 3))
    for number in (1, 2):
        kept = [target.exp_avg.clone() for target in pair.targets]
        old = [(t.master.clone(), t.exp_avg.clone(), t.exp_avg_sq.clone()) for t in pair.targets]
        for target in pair.targets:
            for tensor in (target.master, target.exp_avg, target.exp_avg_sq):
                tensor.fill_(torch.nan)
        pair.targets = [replace(target, before=before) for target, before in zip(pair.targets, old, strict=True)]
        pair.step(kernel, number, coefficient=0.5)
        pair.assert_equal()
        assert all(torch.equal(before[1], exp_avg) for before, exp_avg in zip(old, kept, strict=True))


def test_gradients_in_another_order_of_memory_or_another_dtype_are_taken_too(kernel):
    for gradient in (torch.randn(33, 7).t(), torch.randn(7, 33).half()):
        master = torch.ones(7, 33)
        expected = torch.nn.Parameter(master.clone())
        expected.grad = gradient.float().contiguous()
        torch.optim.AdamW([expected], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0, fused=True).step()
        state = torch.zeros(7, 33), torch.zeros(7, 33)
        kernel.update([Target("t", 0.0, master, master, *state, gradient)], step_of(1))
        assert torch.equal(master, expected)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_norms_are_those_of_the_converted_gradients(kernel, dtype):
    draw = torch.Generator().manual_seed(0)
    for scale in (1.0, 1e-6, 1e15, 1e30):
        sizes = (0, *range(1, 40), 1003, 65_537, 1_000_003)
        gradients = [(torch.randn(n, generator=draw) * scale).to(dtype) for n in sizes]
        gradients += [torch.zeros(9, dtype=dtype), torch.randn(33, 7, generator=draw).to(dtype).t()]
        for gradient, norm in zip(gradients, kernel.norms(gradients), strict=True):
            assert norm.dtype == FP32 and norm.shape == ()
            assert torch.equal(norm, torch.linalg.vector_norm(gradient.float())), gradient.shape
            assert torch.equal(norm, torch._foreach_norm([gradient], 2, FP32)[0]), gradient.shape
    for wrong in (torch.inf, torch.nan):
        for at in (5, 1002):
            gradient = torch.ones(1003, dtype=dtype)
            gradient[at] = wrong
            assert str(kernel.norms([gradient])[0].item()) == str(wrong)


def test_nothing_and_tensors_without_elements_are_no_error(way):
    way.update([], step_of(1))
    pair = Pair("mixed", (0, 5, 0, 3))
    pair.step(way, 1)
    pair.assert_equal()


def test_narrow_gradients_are_converted_within_the_memory_of_the_largest(way):
    pair, meter = Pair("mixed"), Meter()
    for target in pair.targets:
        for tensor in (*parts(target), target.gradient.fill_(0.1)):
            meter.add(tensor)
    before, step = meter.now, step_of(1)
    with meter.watch():
        way.update(pair.targets, step)
    assert meter.peak - before <= 4 * max(SIZES)


def test_the_engine_updates_tensors_in_host_memory_by_the_kernel():
    pair = Pair("mixed")
    for target in pair.targets:
        target.gradient.fill_(1.0)
    update(pair.targets, step_of(1, coefficient=0.5))
    assert all((target.gradient == 1.0).all() and (target.work != 0).all() for target in pair.targets)
    update([], step_of(1))
