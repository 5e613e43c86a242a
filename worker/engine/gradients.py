"""Adds up weight gradients on the device in plain PyTorch's order; computes their norms and the factor for clipping."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from planner.cpu.adamw import cpu_kernel
from planner.schedule.items import Item
from planner.schedule.peak_moments import ROWS_AT_ONCE
from worker.engine.device_items import Device
from worker.runtime.arena import Memory
from worker.runtime.machine import Machine
from worker.runtime.step_values import StepValues


class Gradients:
    """Adds up the weight gradients of a step's slices (micro-batches) on the device, in the order in which plain
    PyTorch accumulates them.

    A weight in `by_rows` belongs to the first block (embedding) and to the last (head). Plain accumulation adds its
    gradients up as (h1 + e1) + (h2 + e2) …, with h from the last block's backward and e from the first's. Since each
    block runs all slices before the next block starts, they arrive as h1, h2, …, e1, e2, …. Only the rows of a slice's
    tokens have an e. So a row's h go straight into the sum until a slice has the row's token; from then on each h is
    kept aside until its e arrives."""

    def __init__(
        self,
        device: Device,
        machine: Machine,
        memory: Memory,
        frame: Mapping[str, nn.Parameter],
        *,
        order: Sequence[str],
        by_rows: Collection[str],
        max_norm: float | None,
    ) -> None:
        """`frame`: the frame's parameters, whose gradients autograd adds up. `order`: the names in the order of
        `named_parameters()`, in which norms are stacked. `by_rows`: see above."""
        self._items, self._machine, self._memory, self._frame = device.items, machine, memory, frame
        self._order, self._by_rows, self._max_norm = order, frozenset(by_rows), max_norm
        self._norms: dict[str, Tensor] = {}
        self._reached: set[str] = set()
        self._rows: Sequence[Tensor] = ()
        self._aside: dict[tuple[str, int], tuple[Tensor, Tensor | None]] = {}
        # One tensor for all steps: the next norm waits for the CPU updates that read this one.
        self._host_coefficient = machine.host_empty((), torch.float32)

    def begin_step(self, values: StepValues) -> None:
        """Begin a step. `values.reached` will collect the names of the weights for which a gradient arrives."""
        self._reached = values.reached

    def begin_round(self, rows: Sequence[Tensor]) -> None:
        """Begin a round, a group of slices that run together. `rows`: for each of its slices, the distinct token ids of
        all slices up to this one, in memory that the device can copy. Empty if no weight is shared by embedding and
        head."""
        self._norms.clear()
        self._rows = rows

    def clear(self) -> None:
        """Drop all sums and parts of sums, after an error in a step."""
        self._norms.clear()
        self._aside.clear()
        self._rows = ()
        for parameter in self._frame.values():
            parameter.grad = None  # an incomplete sum, to which the next step would add

    def add(self, name: str, k: int, gradient: Tensor, *, fresh: bool, last_block: bool) -> None:
        """Add `gradient`, that of slice `k` of the round, to the sum for the weight `name`. `fresh`: nothing else uses
        the memory of `gradient`, so it may become the sum itself. `last_block`: it comes from the last block's
        backward."""
        self._reached.add(name)
        by_rows = name in self._by_rows
        if by_rows and not last_block:
            self._take_up(name, k, gradient)
            return
        total = self._items.get(Item.gradient(name))
        if by_rows:
            rows = self._rows[k].to(gradient.device, non_blocking=True, copy=True)
            self._aside[name, k] = rows, None if total is None else gradient.index_select(0, rows)
            if total is not None:  # a product with 1 is exact, and so is a sum with 0
                others = gradient.new_ones(len(gradient), 1).index_fill_(0, rows, 0.0)
                total[0].addcmul_(gradient, others)
                return
        if total is not None:
            total[0].add_(gradient)
        elif fresh and gradient.is_contiguous():
            self._items[Item.gradient(name)] = [gradient]
        else:  # the sum has the weight's layout: the norm's bits depend on it
            self._memory.expect_sum(name)
            buffer = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)
            self._items[Item.gradient(name)] = [buffer.copy_(gradient)]

    def add_nothing(self, name: str) -> None:
        """Note that no gradient of this slice reaches the weight `name`. If it is the first slice, the sum is made of
        zeros, because the plan has memory for it all the same."""
        if Item.gradient(name) not in self._items:
            self._memory.expect_sum(name)
            self._items[Item.gradient(name)] = [torch.zeros_like(self._items[Item.weight(name)][0])]

    def _take_up(self, name: str, k: int, gradient: Tensor) -> None:
        """Add the first block's gradient and what was kept aside for slice `k`, in chunks that need little memory. No
        row comes twice, so the order of adding does not matter. (Under deterministic algorithms `index_add_` does the
        same on CUDA, with a copy of what is added.)"""
        total, (rows, aside) = self._items[Item.gradient(name)][0], self._aside.pop((name, k))
        for start in range(0, len(rows), ROWS_AT_ONCE):
            chunk = slice(start, start + ROWS_AT_ONCE)
            part = gradient.index_select(0, rows[chunk])
            total.index_put_((rows[chunk],), part if aside is None else aside[chunk].add_(part), accumulate=True)
            del part  # before the next one is allocated

    def of(self, name: str) -> Tensor | None:
        """The sum of the gradients of the weight `name`, on the device; None where no gradient of this step has reached
        it."""
        if name in self._frame:
            return self._frame[name].grad
        return self._items[Item.gradient(name)][0] if name in self._reached else None

    def norm(self, names: Sequence[str]) -> None:
        """Compute the norm of each of these weights' gradients, whose sums must be complete. On CUDA this uses the
        function that `clip_grad_norm_` uses there, in which a tensor's norm does not depend on the other tensors in the
        list. On the CPU one pass of offmate's own kernel computes them."""
        sums = {name: gradient for name in names if (gradient := self.of(name)) is not None}
        if self._machine.device.type == "cpu":
            self._norms.update(zip(sums, cpu_kernel().norms(list(sums.values())), strict=True))
            return
        for dtype in dict.fromkeys(gradient.dtype for gradient in sums.values()):  # its fast path wants one dtype
            chosen = [name for name, gradient in sums.items() if gradient.dtype == dtype]
            # A narrower gradient is converted first, as it is for the master's update.
            norms = torch._foreach_norm([sums[name] for name in chosen], 2, torch.float32)
            self._norms.update(zip(chosen, norms, strict=True))

    def clip(self, values: StepValues) -> None:
        """Compute the gradients' global norm and the factor by which clipping multiplies gradients, as
        `torch.nn.utils.clip_grad_norm_` does, and store both in `values`."""
        assert self._max_norm is not None
        norms = [self._norms[name] for name in self._order if name in self._norms]
        total = torch.linalg.vector_norm(torch.stack(norms), 2)
        coefficient: Tensor = torch.clamp(self._max_norm / (total + 1e-6), max=1.0)
        values.grad_norm, values.coefficient = total, coefficient
        values.coefficient_arrives = self._machine.to_host(self._host_coefficient, coefficient)
        values.host_coefficient = self._host_coefficient
