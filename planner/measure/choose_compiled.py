"""Chooses the layers that run compiled: those that compile, agree with the generated code, and were measured to be
faster."""

from __future__ import annotations

import functools
import logging
import math
import operator
import statistics
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, fx

from planner.cpu.meter import Meter
from planner.errors import first_line
from planner.graph import RECIPES, BlockCode, CannotCompileError, CompiledPair, Pair, why_not_compilable
from planner.graph.sample import random_data
from planner.measure.times import CompiledBytes, OptionTimes, Pairs, Run, Times, measure_kind, turn_s
from planner.out_of_memory import as_one_error

log = logging.getLogger(__name__)
_T = TypeVar("_T")

BOUND = 1e-5
"""How far a compiled layer's results and gradients may be off, relative to the greatest number in each tensor."""
ROUNDINGS = 4
"""The bound for a layer that computes in less than fp32: how many times as large the norm of the difference may be as
the change that one more rounding of all inputs makes. Compiled code rounds at other places, mostly less often, so the
differences of large numbers cannot be foretold."""


def why_off(setting: str, device: torch.device, *, exact: bool, deterministic: bool = False) -> str | None:
    """Why no layer is compiled, in words for the log; None if compilation is tried. `setting`: "auto" or "off".
    `exact`, `deterministic`: those settings of the job."""
    if setting == "off":
        return "so it is set"
    if exact:
        return "exact: true keeps the bits of plain PyTorch"
    if deterministic:
        return "the compiler chooses among kernels by their times, and deterministic: true has the same ones each time"
    return why_not_compilable(device)


@torch.no_grad()
def with_compiled(pairs: Pairs, layers: Collection[str], times: Times, device: torch.device, *, adds: bool) -> Times:
    """`times` with the times of compiled code wherever it is faster than generated code. `layers`: the kinds of blocks
    to compile. `adds`: gradients are added to those of an earlier micro-batch. The outcome of each is logged."""
    better: dict[tuple[str, str], OptionTimes] = {}
    for kind in layers:
        # Options share code. Compiling a set of saved values (such as keep-2) takes longer than it is worth.
        named = [pair for option, pair in pairs[kind].items() if option in RECIPES and isinstance(pair, Pair)]
        codes = {pair.recipe.saves: pair for pair in named}
        for saves, pair in codes.items():
            options = [option for option, its in pairs[kind].items() if its.recipe.saves == saves]
            label = f"layers like {pair.name} ({', '.join(options)})"
            try:
                compiled = CompiledPair(pair)
                with as_one_error():
                    peaks = tried(pair, compiled, device)
            except (CannotCompileError, torch.OutOfMemoryError) as error:
                log.info("compile: %s run as generated: %s", label, first_line(error))
                continue
            runs = measure_kind({"generated": pair, "compiled": compiled}, device, adds=adds)
            counted = list(zip(runs["generated"][1:], runs["compiled"][1:], strict=False))
            ratio = statistics.median(turn_s(new) / turn_s(old) for old, new in counted) if counted else 1.0
            faster = ratio < 1
            log.info("compile: %s run %s: %.2f of the time", label, "compiled" if faster else "as generated", ratio)
            if faster:
                # Scale the times of all options, which were measured side by side.
                for its in (times.of(kind, option) for option in options):
                    better[kind, its.option] = replace(_scaled(its, counted), compiled=peaks)
    return replace(times, options=tuple(better.get((t.kind, t.option), t) for t in times.options))


def _scaled(times: OptionTimes, runs: Sequence[tuple[Run, Run]]) -> OptionTimes:
    """`times` scaled by how much shorter the second run of each pair in `runs` is than the first."""
    shares = [statistics.median(new[i] / old[i] if old[i] else 1.0 for old, new in runs) for i in range(4)]
    return replace(
        times,
        forward_s=times.forward_s * shares[0],
        backward_s=times.backward_s * shares[1],
        issue_forward_s=times.issue_forward_s * shares[2],
        issue_backward_s=times.issue_backward_s * shares[3],
    )


def tried(pair: Pair, compiled: CompiledPair, device: torch.device) -> CompiledBytes:
    """Run a block's compiled code on random data and return its peak bytes. Raises CannotCompileError if its results
    differ from those of the generated code `pair` by more than the bound, or have other strides."""
    room = _Room(device)
    primals = [random_data(t, device) if t is not None else torch.empty(0) for t in pair.primal_values]
    tangents = [random_data(t, device) for t in pair.tangent_values]

    def backward(
        code: BlockCode, inputs: Sequence[Tensor], saved: list[Tensor], first: bool
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        values = [*saved, *inputs]
        saved.clear()
        sums: dict[str, Tensor] = {}

        def sink(name: str, gradient: Tensor | None) -> None:
            assert gradient is not None
            if first:
                sums[name] = gradient if pair.adoptable[name] else gradient.clone()

        grads = code.backward(values, states, sink)
        return [t for t in grads if t is not None], sums

    def read(primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Tensor]:
        return [*(primals[i] for i in pair.backward_primals), *tangents]

    rounded = [[_rounded(t) for t in tensors] for tensors in (primals, tangents)]
    near, states = pair.forward(list(rounded[0]))
    wanted, states = pair.forward(list(primals))
    allowed = _distances(near, wanted)
    results, forward_bytes = room.peak(lambda: compiled.forward(list(primals))[0])
    borrowed = {t.untyped_storage().data_ptr() for t in primals}
    if any(t.untyped_storage().data_ptr() in borrowed for t in results):
        raise CannotCompileError("it returns what it was given")
    seeds = {pair.n_outputs + i for i, node in enumerate(pair.saved) if _is_unused_seed(node)}
    read_later = [i for i in range(len(wanted)) if i not in seeds]
    _compare([results[i] for i in read_later], [wanted[i] for i in read_later], [allowed[i] for i in read_later])
    results.clear()

    del near[: pair.n_outputs]
    near_grads, near_sums = backward(pair, read(*rounded), near, True)
    rounded.clear()
    grads, sums = backward(pair, read(primals, tangents), wanted[pair.n_outputs :], True)
    wanted.clear()
    allowed = _distances(near_grads, grads)
    allowed_of = dict(zip(sums, _distances([near_sums.pop(name) for name in sums], list(sums.values())), strict=True))
    near_grads.clear()
    peaks = {}
    for first in (True, False):
        # Saved values are made under the meter, so that those that die in backward count as freed there.
        saved, _ = room.peak(lambda: compiled.forward(list(primals))[0])
        del saved[: pair.n_outputs]
        (new_grads, new_sums), peaks[first] = room.peak(
            functools.partial(backward, compiled, read(primals, tangents), saved, first)
        )
        if first:
            names = list(new_sums)
            _compare(list(new_sums.values()), [sums[name] for name in names], [allowed_of[name] for name in names])
            _compare(new_grads, grads, allowed)
        del new_grads, new_sums
    return CompiledBytes(forward=forward_bytes, backward=peaks[False], backward_first=peaks[True])


def _rounded(tensor: Tensor) -> Tensor:
    """A copy in the same layout, each number changed by up to half an eps and rounded again; fp32 stays as it is."""
    if tensor.dtype not in (torch.bfloat16, torch.float16):
        return tensor
    whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    moved = whole * (1 + torch.finfo(tensor.dtype).eps * (torch.rand(whole.shape, device=whole.device) - 0.5))
    return moved.to(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _distances(results: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[float]:
    """The 2-norm of the difference between each result and the wanted tensor; 0.0 for tensors that are not floating
    point."""
    pairs = zip(results, wanted, strict=True)
    return [float(torch.dist(new.float(), old.float())) if old.is_floating_point() else 0.0 for new, old in pairs]


def _compare(results: Sequence[Tensor], wanted: Sequence[Tensor], rounding: Sequence[float]) -> None:
    """Raise CannotCompileError if results differ too much from the wanted tensors. `rounding`: for each, the norm of
    the change that one more rounding of the inputs makes."""
    for new, old, noise in zip(results, wanted, rounding, strict=True):
        if _layout(new) != _layout(old):
            raise CannotCompileError("its results are laid out otherwise")
        if not old.is_floating_point():
            if not torch.equal(new, old):
                raise CannotCompileError("its results differ")
            continue
        most, off = float(old.abs().max()), float((new.double() - old.double()).abs().max())
        if not off <= BOUND * most and not (math.isfinite(noise) and _distances([new], [old])[0] <= ROUNDINGS * noise):
            raise CannotCompileError(f"its results are off by {off:.2g} where the greatest is {most:.2g}")


def _is_unused_seed(node: fx.Node) -> bool:
    """Whether the node is the random state that fused attention on a GPU hands to its backward. Layers that draw random
    numbers are not compiled. Where attention draws none, PyTorch leaves that memory unwritten, so any two calls
    differ."""
    if node.target is not operator.getitem or node.meta["val"].is_floating_point():
        return False
    made_by = node.args[0]
    return isinstance(made_by, fx.Node) and "attention" in str(made_by.target)


def _layout(tensor: Tensor) -> tuple[object, ...]:
    """The properties in which results must agree: dtype, shape, strides and bytes of the storage. Strides of
    dimensions of one element mean nothing and are left out."""
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tensor.dtype, tensor.shape, strides, tensor.untyped_storage().nbytes()


class _Room:
    """Measures peak bytes on the device: by PyTorch's allocator on a GPU, by a meter on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.meter = device, Meter()

    def peak(self, function: Callable[[], _T]) -> tuple[_T, int]:
        """The result of `function`, which runs compiled code, and its peak: the most bytes alive above those that were
        alive before. Raises CannotCompileError if `function` fails."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            start = torch.cuda.memory_allocated(self.device)
        else:
            self.meter.reset_peak()
            start = self.meter.now
        try:
            with nullcontext() if on_gpu else self.meter.watch(), as_one_error():
                result = function()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # any error of a kernel: its text goes to the log
            raise CannotCompileError(f"{type(error).__name__}: {first_line(error)}") from error
        if on_gpu:
            torch.cuda.synchronize(self.device)
        return result, (torch.cuda.max_memory_allocated(self.device) if on_gpu else self.meter.peak) - start
