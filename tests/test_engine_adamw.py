from __future__ import annotations

import pytest
import torch

from planner.meter import Meter
from worker.adamw import Target, update
from worker.optimizer import AdamW

torch.set_num_threads(1)
SIZES = {"small": 3, "large": 1003, "odd": 77, "matrix": 640}
SETTINGS = AdamW(betas=(0.9, 0.95), eps=1e-6, weight_decay=0.3, decay_names=frozenset({"large", "matrix"}))


def make(dtype):
    generator = torch.Generator().manual_seed(0)
    work = {name: torch.randn(size, generator=generator).to(dtype) for name, size in SIZES.items()}
    gradients = [
        {name: torch.randn(size, generator=generator).to(dtype) for name, size in SIZES.items()} for _ in "123"
    ]
    return work, gradients


def targets(work, gradients, states):
    return [Target(name, w, *states[name], gradients[name]) for name, w in work.items()]


@pytest.mark.parametrize("coefficient", [None, 0.37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_one_call_for_many_tensors_equals_the_fused_optimizer_bitwise(dtype, coefficient):
    work, gradients = make(dtype)
    masters = {name: torch.nn.Parameter(w.float().clone()) for name, w in work.items()}
    decayed = [masters[n] for n in masters if n in SETTINGS.decay_names]
    others = [masters[n] for n in masters if n not in SETTINGS.decay_names]
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, betas=SETTINGS.betas, eps=SETTINGS.eps, fused=True)
    states = {
        name: (w if dtype == torch.float32 else w.float(), torch.zeros(w.shape), torch.zeros(w.shape))
        for name, w in work.items()
    }
    for step, grads in enumerate(gradients, 1):
        rate = 0.01 / step
        for group in reference.param_groups:
            group["lr"] = rate
        for name, master in masters.items():
            master.grad = grads[name].float() * (1.0 if coefficient is None else torch.tensor(coefficient))
        reference.step()
        factor = None if coefficient is None else torch.tensor(coefficient)
        count = torch.tensor(float(step))
        update(targets(work, grads, states), SETTINGS, learning_rate=rate, count=count, coefficient=factor)
        for name, master in masters.items():
            assert torch.equal(states[name][0], master), f"{name} after step {step}"
            assert torch.equal(work[name], master.to(dtype))


def test_narrow_gradients_are_converted_within_the_memory_of_the_largest():
    work, gradients = make(torch.bfloat16)
    states = {name: (w.float(), torch.zeros(w.shape), torch.zeros(w.shape)) for name, w in work.items()}
    meter = Meter()
    given = targets(work, gradients[0], states)
    with meter.watch():
        update(given, SETTINGS, learning_rate=0.1, count=torch.tensor(1.0), coefficient=None)
    # What the optimizer changes in place is counted when an operation returns it: the working copies.
    assert meter.peak - sum(w.nbytes for w in work.values()) <= 4 * SIZES["large"]


def test_nothing_to_update_is_no_error():
    update([], SETTINGS, learning_rate=0.1, count=torch.tensor(1.0), coefficient=None)
