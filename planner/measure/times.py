"""Measures or estimates how many seconds each block of a model takes, under each way to treat its activations.

A block is a part of the model that runs as one unit, as a decoder layer. Blocks of one `kind` share generated code. An
`option` is one way to treat a block's activations: keep, recompute, offload and others.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from planner.graph import BlockCode, EagerPair, Sink
from planner.graph.sample import random_data
from planner.machine.hardware import Hardware
from planner.machine.work import OptionWork, Work, seconds_of
from planner.measure.stopwatch import Stopwatch, warm_up
from planner.optimizers.base import untimed
from planner.optimizers.table import AnyOptimizer
from planner.out_of_memory import as_one_error
from planner.schedule.chain import Tensor as ChainTensor

log = logging.getLogger(__name__)

_REPEATS = 5
_LONG_S = 4.0  # once a kind has taken this long, it is not repeated any more


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledBytes:
    """Peak bytes of a block's compiled code: the most bytes alive above those that were alive before it ran.
    `backward_first`: for the first micro-batch of a step, whose weight gradients stay as the sums; `backward`: for a
    later one."""

    forward: int
    backward: int
    backward_first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionTimes:
    """Seconds that one block of `kind` takes for one micro-batch under `option`. `issue_forward_s`,
    `issue_backward_s`: seconds that the host spends issuing the operations; 0 where the host itself computes, or where
    they were not measured. `compiled`: the peaks of compiled code, if the times are those of compiled code.

    The head's `forward_s` includes the loss. If it was measured, it also includes the head's backward and the model's
    code outside the blocks.
    """

    kind: str
    option: str
    forward_s: float
    backward_s: float
    compiled: CompiledBytes | None = None
    issue_forward_s: float = 0.0
    issue_backward_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTimes:
    """How long the optimizer step of a tensor with `elements` elements takes: `optimizer` holds the seconds."""

    optimizer: AnyOptimizer
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The times of every kind of block and every option of a model. `device` names the machine; `measured` is False
    for an estimate; `updates` has the seconds of optimizer steps that depend on a tensor's size."""

    options: tuple[OptionTimes, ...]
    device: str
    measured: bool
    updates: tuple[UpdateTimes, ...] = ()

    def of(self, kind: str, option: str) -> OptionTimes:
        """The times of blocks of `kind` under `option`. Raises KeyError if there are none."""
        for times in self.options:
            if (times.kind, times.option) == (kind, option):
                return times
        raise KeyError(f"no times of kind {kind} under option {option}")

    def of_update(self, tensor: ChainTensor) -> ChainTensor:
        """The tensor with the seconds of its optimizer step filled in, if its optimizer has such. Raises KeyError if
        they are not known."""
        if not tensor.optimizer.own_seconds:
            return tensor
        for times in self.updates:
            if (untimed(times.optimizer), times.elements) == (untimed(tensor.optimizer), tensor.elements):
                return replace(tensor, optimizer=times.optimizer)
        raise KeyError(f"no times of an update of {tensor.name}")


Run = tuple[float, float, float, float]
"""Seconds that forward and backward take on the device, then the seconds that the host takes to issue each."""
Pairs = Mapping[str, Mapping[str, BlockCode]]
"""Kind of block -> option -> generated code for forward and backward."""


def estimate_pairs(pairs: Pairs, head: str, hardware: Hardware) -> Times:
    """Estimate the seconds of all kinds and options from their operations: each takes as long as its arithmetic or its
    memory traffic, whichever is longer. `head`: the kind of the head, to whose forward the loss is added."""
    options = []
    for its in works_of(pairs, head):
        forward_s, backward_s = seconds_of(its.forward, hardware), seconds_of(its.backward, hardware)
        options.append(OptionTimes(kind=its.kind, option=its.option, forward_s=forward_s, backward_s=backward_s))
    return Times(options=tuple(options), device=hardware.name, measured=False)


def works_of(pairs: Pairs, head: str) -> tuple[OptionWork, ...]:
    """The operations of all kinds and options. `head`: the kind of the head, to whose forward the loss is added."""
    works = []
    for kind, by_option in pairs.items():
        for option, pair in by_option.items():
            loss = _loss_work(pair) if kind == head else ()
            forward, backward = pair.work()
            works.append(OptionWork(kind=kind, option=option, forward=(*forward, *loss), backward=tuple(backward)))
    return tuple(works)


def _loss_work(pair: BlockCode) -> tuple[Work, ...]:
    """The work of cross entropy: conversion to fp32 and log-softmax, both again for backward (`loss_by_rows`), and the
    backward of both. Each reads and writes the logits once."""
    logits = pair.output_values[0]
    size = logits.element_size()
    return tuple(Work(0, logits.numel() * (4 + other)) for other in (size, 4, size, 4, 4, size))


def measure_pairs(pairs: Pairs, device: torch.device, estimate: Times, *, adds: bool) -> tuple[OptionTimes, ...]:
    """Time all kinds and options on random data: the median of a few runs after a warm-up. The options of a kind
    alternate, so that other work on the machine disturbs all of them alike. Options with the same code share its time.
    `adds`: gradients are added to those of an earlier micro-batch.

    An option that does not fit the device's memory by itself gets its time from `estimate`; no plan can use it anyhow.
    """
    options = []
    warm_up(device, torch.float32)
    for kind, by_option in pairs.items():
        codes = {code.recipe.saves: code for code in by_option.values()}
        by_code = measure_kind(codes, device, adds=adds)
        for option, code in by_option.items():
            seconds = by_code[code.recipe.saves]
            if not seconds:
                options.append(_estimated(estimate.of(kind, option), code.name))
                continue
            options.append(_option_times(kind, option, seconds[1:] or seconds))
    return tuple(options)


def turn_s(run: Run) -> float:
    """Seconds of a block's forward and backward together. Each counts as long as computing it or issuing it takes,
    whichever is longer."""
    forward_s, backward_s, issue_forward_s, issue_backward_s = run
    return max(forward_s, issue_forward_s) + max(backward_s, issue_backward_s)


def _option_times(kind: str, option: str, runs: Sequence[Run]) -> OptionTimes:
    forward_s, backward_s, *issuing = (statistics.median(each) for each in zip(*runs, strict=True))
    return OptionTimes(
        kind=kind,
        option=option,
        forward_s=forward_s,
        backward_s=backward_s,
        issue_forward_s=issuing[0],
        issue_backward_s=issuing[1],
    )


def measure_rest(
    estimate: OptionTimes, rehearsal: AbstractContextManager[Callable[[], None]], device: torch.device, name: str
) -> OptionTimes:
    """The times of the head called `name` together with the model's code outside the blocks. `rehearsal`: a context
    that yields a function to time, which runs one micro-batch without the layers (`planner.measure.head_time`).
    Returns `estimate` if the head does not fit the device's memory."""
    watch, runs, issuing = Stopwatch(device), list[float](), list[float]()  # no `behind`: model code may wait
    try:
        with rehearsal as once:
            while len(runs) <= _REPEATS and sum(runs) < _LONG_S:
                runs.append(watch.seconds(once))
                issuing.append(watch.issued_s)
    except torch.OutOfMemoryError:
        return _estimated(estimate, name)
    forward_s, issue_s = (statistics.median(each[1:] or each) for each in (runs, issuing))
    return replace(estimate, forward_s=forward_s, backward_s=0.0, issue_forward_s=issue_s)


def _estimated(times: OptionTimes, name: str) -> OptionTimes:
    log.warning("option %s of %s does not fit the device: its time is estimated", times.option, name)
    return times


@torch.no_grad()
def measure_kind(pairs: Mapping[str, BlockCode], device: torch.device, *, adds: bool) -> dict[str, list[Run]]:
    """The timed runs of each block's code in `pairs`, the warm-up first; an empty list for code that does not fit the
    device's memory. `adds`: gradients are added to those of an earlier micro-batch."""
    runs: dict[str, list[Run]] = {name: [] for name in pairs}
    pair = next(iter(pairs.values()))  # inputs and incoming gradients are the same for all
    try:
        with as_one_error():
            primals = [random_data(t, device) if t is not None else torch.empty(0) for t in pair.primal_values]
            tangents = [random_data(t, device) for t in pair.tangent_values]
    except torch.OutOfMemoryError:
        return runs
    fitting, sink = dict(pairs), sums() if adds else forget
    # A layer's own code may wait for the device: then it would also wait for the work that keeps the device busy.
    watch = Stopwatch(device, behind=not any(isinstance(code, EagerPair) for code in pairs.values()))
    started = time.perf_counter()
    for _ in range(1 + _REPEATS):
        for option, pair in tuple(fitting.items()):
            try:
                runs[option].append(_run(pair, primals, tangents, watch, sink))
            except torch.OutOfMemoryError:
                del fitting[option]
        if time.perf_counter() - started > _LONG_S:
            break
    return runs


def _run(pair: BlockCode, primals: Sequence[Tensor], tangents: Sequence[Tensor], watch: Stopwatch, sink: Sink) -> Run:
    runs: list[tuple[list[Tensor], list[Tensor]]] = []
    forward_s = watch.seconds(lambda: runs.append(pair.forward(list(primals))))
    issue_forward_s = watch.issued_s
    results, states = runs.pop()
    values = [*results[pair.n_outputs :], *(primals[i] for i in pair.backward_primals), *tangents]
    results.clear()
    backward_s = watch.seconds(lambda: pair.backward(values, states, sink))
    return forward_s, backward_s, issue_forward_s, watch.issued_s


def sums() -> Sink:
    """A function that takes a weight's name and gradient and adds the gradients of each weight up, as the
    micro-batches of a step do."""
    so_far: dict[str, Tensor] = {}

    def add(name: str, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        if name in so_far:
            so_far[name].add_(gradient)
        else:
            so_far[name] = gradient.clone()

    return add


def forget(name: str, gradient: Tensor | None) -> None:
    """Takes a weight's name and gradient and drops them: a single micro-batch has nothing to add a gradient to."""


def device_name(device: torch.device) -> str:
    """A name for the device (of a CPU: with its number of threads). Times measured on one device say nothing about
    another."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"
