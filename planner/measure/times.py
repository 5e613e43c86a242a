"""Measures how long blocks take, per kind and option, with the generated code on the device, or estimates it."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from planner.graph import BlockCode, EagerPair, Sink
from planner.graph.sample import random_data
from planner.graph.work import Work
from planner.machine.hardware import Hardware
from planner.machine.traffic import UPDATE_TRAFFIC_BYTES
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
    """Peaks of compiled code: the most bytes alive above those before it ran; as in `planner.graph.BlockCode`."""

    forward: int
    backward: int
    backward_first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionTimes:
    """Seconds of one slice of a block of `kind` under `option`. The head's `forward_s` includes the loss and, where it
    was measured, the head's backward and the frame. `compiled`: the peaks of compiled code, where the times are those
    of compiled code. `issue_forward_s`, `issue_backward_s`: what the host spends on issuing; 0 where the host computes,
    or where it was not measured."""

    kind: str
    option: str
    forward_s: float
    backward_s: float
    compiled: CompiledBytes | None = None
    issue_forward_s: float = 0.0
    issue_backward_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTimes:
    """The `optimizer`, which holds the seconds of an update, of tensors with so many `elements`."""

    optimizer: AnyOptimizer
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Times of every kind and option of a model; `device` names the machine, `measured` is False for an estimate."""

    options: tuple[OptionTimes, ...]
    device: str
    measured: bool
    updates: tuple[UpdateTimes, ...] = ()

    def of(self, kind: str, option: str) -> OptionTimes:
        """The times of this kind and option. Raises KeyError where there are none."""
        for times in self.options:
            if (times.kind, times.option) == (kind, option):
                return times
        raise KeyError(f"no times of kind {kind} under option {option}")

    def of_update(self, tensor: ChainTensor) -> ChainTensor:
        """The tensor with its update's seconds, where its optimizer has such. Raises KeyError where none are known."""
        if not tensor.optimizer.own_seconds:
            return tensor
        for times in self.updates:
            if (untimed(times.optimizer), times.elements) == (untimed(tensor.optimizer), tensor.elements):
                return replace(tensor, optimizer=times.optimizer)
        raise KeyError(f"no times of an update of {tensor.name}")


Run = tuple[float, float, float, float]
"""Seconds of a forward and of its backward on the device, then the seconds of issuing each."""
Pairs = Mapping[str, Mapping[str, BlockCode]]
"""Kind -> option -> code."""


def estimate_pairs(pairs: Pairs, head: str, hardware: Hardware) -> Times:
    """Estimate the times of all kinds and options: each operation takes as long as its arithmetic or its memory
    traffic, whichever is longer. `head`: the head's kind, to whose forward the loss is added."""
    options = []
    for kind, by_option in pairs.items():
        for option, pair in by_option.items():
            loss = _loss_work(pair) if kind == head else ()
            forward, backward = pair.work()
            forward_s, backward_s = _seconds([*forward, *loss], hardware), _seconds(backward, hardware)
            options.append(OptionTimes(kind=kind, option=option, forward_s=forward_s, backward_s=backward_s))
    return Times(options=tuple(options), device=hardware.name, measured=False)


def _seconds(work: Iterable[Work], hardware: Hardware) -> float:
    # The device's memory rate is the rate of its updates, which do nothing but move bytes.
    bytes_per_s = UPDATE_TRAFFIC_BYTES * hardware.gpu_update_parameters_per_s
    flops_per_s = hardware.flops_per_s
    return sum(max(w.bytes / bytes_per_s, w.flops / flops_per_s if flops_per_s else 0.0) for w in work)


def _loss_work(pair: BlockCode) -> tuple[Work, ...]:
    """Cross entropy: to float, log-softmax and the backward of both, each reading and writing the logits once."""
    logits = pair.output_values[0]
    return tuple(Work(0, logits.numel() * (4 + size)) for size in (logits.element_size(), 4, 4, logits.element_size()))


def measure_pairs(pairs: Pairs, device: torch.device, estimate: Times, *, adds: bool) -> tuple[OptionTimes, ...]:
    """Time every pair on random data: the median of a few runs after a warm-up. The options of a kind alternate, so
    that other work on the machine disturbs all of them alike. Options with the same code share its time. `adds`:
    gradients are added to those of an earlier slice.

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
    """Seconds of both turns. Each takes as long as computing it or as issuing it, whichever is longer."""
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
    """The times of the head `name` and of all that is in no other block: see `planner.measure.head_time`. The times are
    those of `estimate` where the head does not fit the device."""
    watch, runs, issuing = Stopwatch(device), list[float](), list[float]()  # no `behind`: the frame may wait
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
    """The runs of each pair, the warm-up first; none for a pair that does not fit the device."""
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
    """A sink that adds up gradients, as the slices of a step do."""
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
    """A sink that drops gradients: a single slice has nothing to add them to."""


def device_name(device: torch.device) -> str:
    """The device's name. Times measured on one device say nothing about another."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"
