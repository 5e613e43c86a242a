"""How long blocks take, per kind and option: measured with the generated code on the device, or estimated."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from planner.graph import BlockCode, ChunkedHead
from planner.graph.sample import random_data
from planner.graph.work import Work
from planner.hardware import Hardware

log = logging.getLogger(__name__)

_REPEATS = 5
_LONG_S = 4.0  # no more repeats once a kind has taken that long
_UPDATE_BYTES = 28  # AdamW in fp32 reads weight, gradient and moments, writes weight and moments


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionTimes:
    """Seconds of one slice of a block of `kind` under `option`. The head's loss counts in its forward."""

    kind: str
    option: str
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Times of every kind and option of a model; `device` names the machine, `measured` is False for an estimate."""

    options: tuple[OptionTimes, ...]
    device: str
    measured: bool

    def of(self, kind: str, option: str) -> OptionTimes:
        """Raises KeyError when that kind and option is not there."""
        for times in self.options:
            if (times.kind, times.option) == (kind, option):
                return times
        raise KeyError(f"no times of kind {kind} under option {option}")


Pairs = Mapping[str, Mapping[str, BlockCode]]
"""Kind -> option -> pair."""


def estimate_pairs(pairs: Pairs, head: str, hardware: Hardware) -> Times:
    """Each operation takes as long as its arithmetic or its memory traffic, whichever is longer. `head`: the head's
    kind, whose loss is added."""
    options = []
    for kind, by_option in pairs.items():
        for option, pair in by_option.items():
            loss = _loss_work(pair) if kind == head else ()
            forward, backward = pair.work()
            forward_s, backward_s = _seconds([*forward, *loss], hardware), _seconds(backward, hardware)
            options.append(OptionTimes(kind=kind, option=option, forward_s=forward_s, backward_s=backward_s))
    return Times(options=tuple(options), device=hardware.name, measured=False)


def _seconds(work: Iterable[Work], hardware: Hardware) -> float:
    # What an update on the device reaches is its memory's rate: updates do nothing but move bytes.
    bytes_per_s = _UPDATE_BYTES * hardware.gpu_update_parameters_per_s
    flops_per_s = hardware.flops_per_s
    return sum(max(w.bytes / bytes_per_s, w.flops / flops_per_s if flops_per_s else 0.0) for w in work)


def _loss_work(pair: BlockCode) -> tuple[Work, ...]:
    """Cross entropy on the logits: to float, log-softmax, and their backward, each reading and writing them once."""
    logits = pair.output_values[0]
    return tuple(Work(0, logits.numel() * (4 + size)) for size in (logits.element_size(), 4, 4, logits.element_size()))


def measure_pairs(pairs: Pairs, head: str, device: torch.device, estimate: Times, *, chunk_rows: int = 0) -> Times:
    """Run every pair on random data: the median of a few runs after a warm-up. The options of a kind take turns,
    so that what else the machine does in between touches all alike; those with the same code share its time.
    `chunk_rows`: the head has its loss in chunks of so many rows, forward and backward in one.

    An option that does not fit the device's memory by itself gets the time of `estimate`; a plan cannot use it anyhow.
    """
    options = []
    for kind, by_option in pairs.items():
        if kind == head and chunk_rows:
            runs = {option: _measure_chunks(code, chunk_rows, device) for option, code in by_option.items()}
        else:
            codes = {code.recipe.saves: code for code in by_option.values()}
            by_code = _measure_kind(codes, device, with_loss=kind == head)
            runs = {option: by_code[code.recipe.saves] for option, code in by_option.items()}
        for option, seconds in runs.items():
            if not seconds:
                log.warning(
                    "option %s of %s does not fit the device: its time is estimated",
                    option,
                    by_option[option].name,
                )
                options.append(estimate.of(kind, option))
                continue
            counted = seconds[1:] or seconds
            forward_s, backward_s = (statistics.median(each) for each in zip(*counted, strict=True))
            options.append(OptionTimes(kind=kind, option=option, forward_s=forward_s, backward_s=backward_s))
    return Times(options=tuple(options), device=device_name(device), measured=True)


@torch.no_grad()
def _measure_kind(
    pairs: Mapping[str, BlockCode], device: torch.device, *, with_loss: bool
) -> dict[str, list[tuple[float, float]]]:
    """Per pair (forward, backward) seconds of each run, the warm-up first; nothing for one that does not fit."""
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
    pair = next(iter(pairs.values()))  # what goes in and what comes back is the same for all
    try:
        primals = [random_data(t, device) if t is not None else torch.empty(0) for t in pair.primal_values]
        tangents = [random_data(t, device) for t in pair.tangent_values]
    except torch.OutOfMemoryError:
        return runs
    fitting = dict(pairs)
    started = time.perf_counter()
    for _ in range(1 + _REPEATS):
        for option, pair in tuple(fitting.items()):
            try:
                runs[option].append(_run(pair, primals, tangents, device, with_loss=with_loss))
            except torch.OutOfMemoryError:
                del fitting[option]
        if time.perf_counter() - started > _LONG_S:
            break
    return runs


def _run(
    pair: BlockCode, primals: Sequence[Tensor], tangents: Sequence[Tensor], device: torch.device, *, with_loss: bool
) -> tuple[float, float]:
    watch = Stopwatch(device)
    made: list[tuple[list[Tensor], list[Tensor]]] = []
    forward_s = watch.seconds(lambda: made.append(pair.forward(list(primals))))
    results, states = made.pop()
    if with_loss:
        forward_s += watch.seconds(lambda: _loss(results[0]))
    values = [*results[pair.n_outputs :], *(primals[i] for i in pair.backward_primals), *tangents]
    results.clear()
    return forward_s, watch.seconds(lambda: pair.backward(values, states, _forget))


def _measure_chunks(code: BlockCode, chunk_rows: int, device: torch.device) -> list[tuple[float, float]]:
    """Seconds of the head and its loss in chunks, the warm-up first; nothing when it does not fit."""
    watch, vocabulary = Stopwatch(device), code.output_values[0].shape[-1]
    runs: list[tuple[float, float]] = []
    try:
        *weights, hidden = [random_data(t, device) for t in code.primal_values if t is not None]
        anchor = torch.zeros((), device=device, requires_grad=True)
        target = torch.zeros(hidden.numel() // hidden.shape[-1], dtype=torch.int64, device=device)

        def run() -> None:
            call = _TimedHead(code, [hidden.detach().requires_grad_()], chunk_rows, weights)
            logits = call.enter([hidden], anchor)
            F.cross_entropy(logits.float().view(-1, vocabulary), target, reduction="sum").backward()  # type: ignore[no-untyped-call]
            call.finish(_forget)
            call.clear()

        for _ in range(1 + _REPEATS):
            runs.append((watch.seconds(run), 0.0))
            if sum(seconds for seconds, _ in runs) > _LONG_S:
                break
    except torch.OutOfMemoryError:
        return []
    return runs


class _TimedHead(ChunkedHead):
    def __init__(self, code: BlockCode, tensors: Sequence[Tensor], chunk_rows: int, given: Sequence[Tensor]) -> None:
        super().__init__(code, tensors, chunk_rows)
        self.given = dict(zip(("weight", "bias"), given, strict=False))

    def weights(self) -> dict[str, Tensor]:
        return self.given


def device_name(device: torch.device) -> str:
    """What the machine calls the device; times measured on one say nothing about another."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"


class Stopwatch:
    """Seconds of a function on a device: by events where the device works by itself, else by the clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds(self, function: Callable[[], object]) -> float:
        """How long `function` keeps the device busy; returns when it is done."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            function()
            return time.perf_counter() - start
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record(torch.cuda.current_stream(self.device))
        function()
        after.record(torch.cuda.current_stream(self.device))
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3


def _forget(name: str, gradient: Tensor) -> None:
    pass


def _loss(logits: Tensor) -> None:
    """Cross entropy as transformers computes it, and its gradient."""
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        rows = leaf.float().view(-1, leaf.shape[-1])
        F.cross_entropy(rows, torch.zeros(rows.shape[0], dtype=torch.int64, device=leaf.device)).backward()  # type: ignore[no-untyped-call]
