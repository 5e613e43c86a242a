"""Fake results are laid out as a kernel lays out real ones, whatever the layouts and dtypes of the arguments."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.nn import functional as F

from planner.graph.fake import FakeMode

_aten = torch.ops.aten
SIZE = (3, 4, 6)
LAYOUTS = {
    "in order": torch.rand(3, 4, 6),
    "turned": torch.rand(3, 6, 4).transpose(1, 2),
    "the other way round": torch.rand(6, 4, 3).permute(2, 1, 0),
    "expanded": torch.rand(3, 4, 1).expand(SIZE),
    "turned and expanded": torch.rand(3, 6, 4).transpose(1, 2)[..., :1].expand(SIZE),
    "expanded in the middle": torch.rand(6, 1, 3).permute(2, 1, 0).expand(SIZE),
    "with gaps": torch.rand(3, 6, 8).transpose(1, 2)[:, ::2],
    "a row": torch.rand(6),
    "a column": torch.rand(4, 1),
}
TWO = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "pow": torch.pow,
    "atan2": torch.atan2,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "less": torch.lt,
    "equal": torch.eq,
    "xlogy": torch.xlogy,
    "logaddexp": torch.logaddexp,
    "and": torch.logical_and,
    "copysign": torch.copysign,
    "where": lambda a, b: torch.where(a > 0.5, a, b),
    "where not": lambda a, b: torch.where(b > 0.5, 0.0, a),
    "addcmul": lambda a, b: torch.addcmul(a, a, b),
}
BACKWARD = {
    "tanh": _aten.tanh_backward,
    "sigmoid": _aten.sigmoid_backward,
    "gelu": _aten.gelu_backward,
    "silu": _aten.silu_backward,
    "logit": _aten.logit_backward,
    "relu": lambda grad, made: _aten.threshold_backward(grad, made, 0.0),
    "leaky relu": lambda grad, x: _aten.leaky_relu_backward(grad, x, 0.1, False),
    "elu": lambda grad, made: _aten.elu_backward(grad, 1.0, 1.0, 1.0, True, made),
    "softplus": lambda grad, x: _aten.softplus_backward(grad, x, 1.0, 20.0),
    "mish": _aten.mish_backward,
    "hard tanh": lambda grad, x: _aten.hardtanh_backward(grad, x, 0.2, 0.8),
    "hard sigmoid": _aten.hardsigmoid_backward,
    "hard swish": _aten.hardswish_backward,
    "smooth L1": lambda grad, x: _aten.smooth_l1_loss_backward(grad, x, x, 0, 1.0),
    "mean square": lambda grad, x: _aten.mse_loss_backward(grad, x, x, 0),
    "huber": lambda grad, x: _aten.huber_loss_backward(grad, x, x, 0, 1.0),
    "dropout": lambda grad, x: _aten.native_dropout_backward(grad, x > 0.5, 2.0),
}
ONE = {
    "exp": torch.exp,
    "a power of two": lambda x: 2.0**x,
    "square": lambda x: x**2,
    "sum": lambda x: x + 1,
    "gelu": F.gelu,
    "silu": F.silu,
    "clamp": lambda x: x.clamp(min=0.2),
    "filled": lambda x: x.masked_fill(x > 0.5, 0),
    "copied": torch.clone,
    "cast": lambda x: x.double(),
    "rounded": torch.round,
    "not": torch.logical_not,
}
WIDE, NARROW = torch.float32, torch.bfloat16
AT_MOST = 12  # pairs of layouts that are tried; any number finds nothing else


def laid_out(name, dtype):
    """A tensor of random numbers, laid out as that one."""
    like = LAYOUTS[name]
    return torch.rand(like.untyped_storage().nbytes() // 4).to(dtype).as_strided(like.shape, like.stride())


def as_fake_and_real(mode, operation, *tensors):
    """Sizes, strides (of what there is more than one of), dtype and bytes of the result, of fakes and of real ones."""
    fakes, said = [mode.like(tensor) for tensor in tensors], []
    for given in (fakes, tensors):
        made = operation(*given)
        strides = [stride for stride, size in zip(made.stride(), made.shape, strict=True) if size > 1]
        said.append((made.shape, strides, made.dtype, made.untyped_storage().nbytes()))
    return said


@pytest.mark.sweep(5)
@pytest.mark.parametrize("dtypes", [(WIDE, WIDE), (NARROW, NARROW), (WIDE, NARROW)], ids=["fp32", "bf16", "both"])
@pytest.mark.parametrize("name", TWO)
def test_what_is_made_of_two_is_laid_out_as_real_ones_are(name, dtypes):
    check(TWO[name], dtypes, list(itertools.permutations(LAYOUTS, 2)))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", [WIDE, NARROW], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", BACKWARD)
def test_the_gradient_of_an_operation_is_laid_out_as_a_real_one_is(name, dtype):
    whole = [layout for layout in LAYOUTS if not layout.startswith("a ")]
    check(BACKWARD[name], (dtype, dtype), list(itertools.permutations(whole, 2)))


@pytest.mark.parametrize("dtype", [WIDE, NARROW], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ONE)
def test_what_is_made_of_one_is_laid_out_as_a_real_one_is(name, dtype):
    check(ONE[name], (dtype,), [(layout,) for layout in LAYOUTS])


def check(operation, dtypes, layouts):
    mode, wrong = FakeMode(), {}
    for names in random.Random(len(layouts)).sample(layouts, min(len(layouts), AT_MOST)):
        fake, real = as_fake_and_real(mode, operation, *map(laid_out, names, dtypes))
        if fake != real:
            wrong[names] = (fake, real)
    assert wrong == {}
