"""Changes the projectors of LSP-Offload between two steps (Chen et al. 2024, algorithm 2).

A change looks at the gradient of sampled rows for each layer with a core. Where the projectors keep too little of it,
the layer gets new ones: W0 takes P S Qᵀ, S begins at 0 again, and Adam's moments are projected.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from planner.job.schema import Job
from planner.models.lsp import CORE, LEFT, RIGHT, Parts, Shape, layers_with_cores, merged, whole
from planner.optimizers.table import OPTIMIZERS
from planner.units import counted, format_bytes, format_seconds
from worker.storage.checkpoint import non_finite
from worker.storage.shards import Item
from worker.subspace.projectors import bias, new_projectors, projected

log = logging.getLogger(__name__)

Batch = Mapping[str, Tensor]
Revise = Callable[[str, Tensor, Mapping[str, Tensor]], Mapping[str, Tensor]]


class Trains(Protocol):
    """The methods of an engine that a change calls: see worker.engine.engine.Engine."""

    def revise(
        self,
        batches: Sequence[Batch],
        names: Collection[str],
        revise: Revise,
        states: Callable[[], Iterable[Item]],
        **model_kwargs: Any,
    ) -> int | None:
        """Replace frozen weights by what `revise` makes of their gradients over `batches`, then trained tensors by what
        `states` gives."""

    def state(self) -> Iterator[Item]:
        """Yield (name, {"master", moments}) of every trained tensor, in fp32."""


class HasWeights(Protocol):
    """The methods of an engine that give its weights: see worker.engine.engine.Engine."""

    def masters(self) -> Iterator[Item]:
        """Yield (name, {"master"}) of every trained tensor, in fp32."""

    def frozen(self, names: Collection[str]) -> Iterator[Item]:
        """Yield (name, {"master": weight}) of these frozen tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """What a change has done. `before`, `after`: layer -> the bias of its projectors before and after; equal where they
    stayed. `seconds`: how long it took. `peak_bytes`: the most device bytes in use meanwhile, None if not counted."""

    before: Mapping[str, float]
    after: Mapping[str, float]
    changed: int
    seconds: float
    peak_bytes: int | None

    def __str__(self) -> str:
        mean = [sum(biases.values()) / max(1, len(biases)) for biases in (self.before, self.after)]
        held = "" if self.peak_bytes is None else f", {format_bytes(self.peak_bytes)} on the device"
        return (
            f"new projectors for {self.changed} of {counted(len(self.before), 'layer')} in "
            f"{format_seconds(self.seconds)}{held}; bias {mean[0]:.3f} before, {mean[1]:.3f} after (means)"
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer with a core: its name, the kind of its projectors, and the names of their tensors in the layer."""

    name: str
    shape: Shape
    parts: tuple[str, ...]

    def side(self, side: str, here: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the projector `side`, taken from `here`: parameter -> tensor."""
        return {part: here[f"{self.name}.{side}.{part}"] for part in self.parts}


class Projectors:
    """The projectors of a model's layers with cores, and when they change. Make this object before an engine takes over
    the model."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        self._job = job
        self._layers = {
            f"{name}.weight": _Layer(name, layer.shape, tuple(local for local, _ in layer.left.named_parameters()))
            for name, layer in layers_with_cores(model)
        }
        self.names = tuple(
            name
            for weight, layer in self._layers.items()
            for name in (weight, *(f"{layer.name}.{side}.{part}" for side in (LEFT, RIGHT) for part in layer.parts))
        )
        """The names of the frozen tensors that changes replace."""
        parameters = dict(model.named_parameters())
        self.bytes = sum(parameters[name].nbytes for name in self.names)
        """Their bytes."""
        cores = (f"{layer.name}.{CORE}" for layer in self._layers.values())
        self.added = frozenset(self.names).difference(self._layers).union(cores)
        """The names of the parameters that the trained model does not have: cores and projectors."""

    def due(self, step: int) -> bool:
        """Whether projectors may change after `step` steps."""
        return step % self._job.lsp_check_steps == 0

    def last_due(self, step: int) -> int:
        """The number of steps after which the last change came that a checkpoint of `step` (1 or more) contains."""
        every = self._job.lsp_check_steps
        return (step - 1) // every * every

    def change(self, trains: Trains, step: int, batches: Sequence[Batch], items: int) -> Changed:
        """Look at the gradients over `batches`, one slice each, and change projectors where the bias is at least
        `lsp_threshold`, or where there are none yet. `step`: the steps done. `items`: the number of tokens that the
        loss divides by."""
        began, job, kind = time.perf_counter(), self._job, OPTIMIZERS[self._job.optim]()
        states = {
            name: {part: tensor.clone() for part, tensor in kind.in_fp32(parts).items()}
            for name, parts in trains.state()
            if name.removesuffix(CORE) + "weight" in self._layers
        }
        before: dict[str, float] = {}
        after: dict[str, float] = {}
        changed: list[str] = []

        def revise(name: str, gradient: Tensor, here: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            layer = self._layers[name]
            size = layer.shape.size
            old = [whole(layer.side(side, here), size) for side in (LEFT, RIGHT)]
            before[layer.name] = after[layer.name] = lost = bias(old[0], old[1], gradient)
            if not math.isfinite(lost):
                raise non_finite(f"the gradient of {name}", step, None)
            if step and lost < job.lsp_threshold:
                return {}
            sides = new_projectors(
                gradient,
                layer.shape,
                seed=(job.seed, name, step),
                dtype=here[name].dtype,
                fit_steps=job.lsp_fit_steps,
            )
            left, right = (whole(side, size) for side in sides)
            after[layer.name] = bias(left, right, gradient)
            core = f"{layer.name}.{CORE}"
            state = states[core]
            weight = merged(here[name], old[0], state["master"].to(gradient.device), old[1])
            turns = (left.T @ old[0]).cpu(), (old[1].T @ right).cpu()
            first, second = projected((state["exp_avg"], state["exp_avg_sq"]), *turns)
            moved = {"master": torch.zeros_like(state["master"]), "exp_avg": first, "exp_avg_sq": second}
            states[core] = {**state, **moved}
            changed.append(core)
            return {name: weight, **self._named(layer, LEFT, sides[0]), **self._named(layer, RIGHT, sides[1])}

        peak_bytes = trains.revise(
            batches,
            self._layers,
            revise,
            lambda: ((core, states[core]) for core in changed),
            num_items_in_batch=torch.tensor(items),
        )
        return Changed(
            before=before,
            after=after,
            changed=len(changed),
            seconds=time.perf_counter() - began,
            peak_bytes=peak_bytes,
        )

    def merged(self, trains: HasWeights, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The `weights` of the trained model (name -> {"weight"}), with W0 + P S Qᵀ, computed in fp32 and rounded once,
        in place of each W0. One layer at a time, on the CPU."""
        cores = {name: parts["master"].clone() for name, parts in trains.masters() if name.endswith(f".{CORE}")}
        for name, parts in weights:
            if (layer := self._layers.get(name)) is None:
                yield name, parts
                continue
            named = [f"{layer.name}.{side}.{part}" for side in (LEFT, RIGHT) for part in layer.parts]
            here = {own: its["master"] for own, its in trains.frozen([name, *named])}
            left, right = (whole(layer.side(side, here), layer.shape.size) for side in (LEFT, RIGHT))
            sum_ = merged(here[name], left, cores[f"{layer.name}.{CORE}"], right)
            yield name, {"weight": sum_.to(parts["weight"].dtype)}

    @staticmethod
    def _named(layer: _Layer, side: str, parts: Parts) -> dict[str, Tensor]:
        return {f"{layer.name}.{side}.{part}": tensor for part, tensor in parts.items()}
