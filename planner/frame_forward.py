"""The bytes of a forward without gradients: the model's own code, blocks and frame, on fake tensors under a meter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from planner.forward import ForwardBytes
from planner.frame import frame_alone
from planner.graph import BlockNames
from planner.graph.fake import FAKE_TYPES, FakeMode
from planner.meter import Meter


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode and records no gradients."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def measure_forward(
    model: nn.Module, names: BlockNames, run: Callable[[FakeMode], object], tensors: Sequence[Tensor],
    device: torch.device,
) -> ForwardBytes:  # fmt: skip
    """The bytes of `run`, which calls the model once; what it returns is still held in the end. Weights may be
    anywhere, on meta too. `tensors`: what the caller has on the host or counts elsewhere. Raises UserError."""
    mode, meter = FakeMode(), Meter(device.type, counted=FAKE_TYPES)
    held: list[int] = []
    peaks: list[int] = []

    def enter(index: int, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        peaks.append(meter.mark())
        held.append(meter.now)
        return module.forward(*args, **kwargs)  # hooks of the module have run: they are the frame's

    with frame_alone(model, names, mode, device, enter), eval_mode(model):
        with meter.host():
            for tensor in (*model.parameters(), *model.buffers(), *tensors):
                meter.add(tensor)
        with meter.watch():
            result = run(mode)
            peaks.append(meter.mark())
            held.append(meter.now)
        del result
    start, *each = peaks
    return ForwardBytes(start=start, held=tuple(held), peak=tuple(each))
