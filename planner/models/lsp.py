"""Gives linear layers the trained cores of LSP-Offload: W = W0 + P S Qᵀ, of which only the core S is trained.

Between two changes of its projectors P and Q, LSP-Offload (Chen et al. 2024, algorithm 2) equals this adapter: its
compressed gradient Pᵀ G Q is the gradient of S, and its decompressed update P Δ Qᵀ is what a change of S by Δ adds to
the layer. So W0 is never written in a step, and no gradient of its shape is made.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.errors import Exit, UserError
from planner.job.schema import Job

log = logging.getLogger(__name__)

Parts = Mapping[str, Tensor]
"""The tensors of a projector by name: {"dense"}, or {"columns", "values"} and perhaps "rotation"."""

_IN_LAYER = re.compile(r"\.\d+\.")
"""In names of modules that are parts of a numbered layer: what is outside of layers is no block's."""
CORE, LEFT, RIGHT = "core", "left", "right"
"""The names of S, P and Q in a layer with a core."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The kind of a layer's projectors. `size`: the side s of its core. `nonzeros`: d, the nonzeros in each row of a
    sparse projector, one in each of d groups of s / d columns; None: dense projectors with orthonormal columns.
    `rotated`: a sparse projector is followed by an s × s matrix that makes its columns orthonormal."""

    size: int
    nonzeros: int | None
    rotated: bool

    def projector(self, rows: int, like: Tensor) -> dict[str, Tensor]:
        """The tensors of a projector of `rows` × s, filled with zeros, with the dtype and device of `like`."""
        s, d = self.size, self.nonzeros
        if d is None:
            return {"dense": like.new_zeros(rows, s)}
        parts = {"columns": like.new_zeros(rows, d, dtype=torch.int16), "values": like.new_zeros(rows, d)}
        return parts | ({"rotation": like.new_zeros(s, s)} if self.rotated else {})


class Projector(nn.Module):
    """A frozen projector of m × s, such as P: `dense`; or sparse, with the nonzeros `values[i, k]` in the columns
    `columns[i, k]` of row i, perhaps followed by `rotation`, s × s."""

    def __init__(self, shape: Shape, rows: int, like: Tensor) -> None:
        super().__init__()
        self.size = shape.size
        for name, tensor in shape.projector(rows, like).items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def into(self, x: Tensor) -> Tensor:
        """x P: the last dimension of `x` goes from m to s."""
        parts = cast(Parts, self._parameters)
        x = x @ spread(parts, self.size)
        return x @ parts["rotation"] if "rotation" in parts else x

    def out_of(self, h: Tensor) -> Tensor:
        """h Pᵀ: the last dimension of `h` goes from s to m."""
        parts = cast(Parts, self._parameters)
        h = functional.linear(h, parts["rotation"]) if "rotation" in parts else h
        return functional.linear(h, spread(parts, self.size))


def spread(parts: Parts, size: int) -> Tensor:
    """A projector without its rotation as one matrix of m × `size`."""
    if "dense" in parts:
        return parts["dense"]
    values = parts["values"]
    return values.new_zeros(len(values), size).scatter(1, parts["columns"].long(), values)


def whole(parts: Parts, size: int) -> Tensor:
    """A projector as one matrix of m × `size` in fp32, its rotation included."""
    matrix = spread({name: part if name == "columns" else part.float() for name, part in parts.items()}, size)
    return matrix @ parts["rotation"].float() if "rotation" in parts else matrix


class LinearWithCore(nn.Linear):
    """A linear layer with the weight W0 + P S Qᵀ: `weight` is W0 (m × n), `core` is S (s × s), `left` is P (m × s) and
    `right` is Q (n × s). All but S is frozen."""

    def __init__(self, linear: nn.Linear, shape: Shape) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.shape = shape
        self.left = Projector(shape, linear.out_features, linear.weight.detach())
        self.right = Projector(shape, linear.in_features, linear.weight.detach())
        self.core = nn.Parameter(linear.weight.detach().new_zeros(shape.size, shape.size))

    def forward(self, x: Tensor) -> Tensor:
        """x (W0 + P S Qᵀ)ᵀ, with the layer's bias."""
        moved = self.left.out_of(functional.linear(self.right.into(x), self.core))
        return functional.linear(x, self.weight, self.bias) + moved


def layers_with_cores(model: nn.Module) -> Iterator[tuple[str, LinearWithCore]]:
    """Yield (name, layer) of each layer of `model` that has a core."""
    for name, module in model.named_modules():
        if isinstance(module, LinearWithCore):
            yield name, module


def with_cores(model: nn.Module, job: Job) -> nn.Module:
    """Give each linear module in a layer of `model` a core, but the head, layers whose weight is used at several
    places, and those whose weight a pattern of `job.trainable` matches. All other parameters are frozen. Returns
    `model`. Raises UserError if no layer gets a core."""
    wanted = [re.compile(pattern) for pattern in job.trainable or ()]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    head = cast(Any, model).get_output_embeddings()
    places = Counter(
        id(module.weight) for _, module in model.named_modules(remove_duplicate=False) if _is_linear(module)
    )
    linear = [
        (name, module)
        for name, module in model.named_modules()
        if _is_linear(module)
        and module is not head
        and _IN_LAYER.search(name)
        and places[id(module.weight)] == 1  # a change would be one of all its places
        and not any(pattern.match(f"{name}.weight") for pattern in wanted)
    ]
    shapes = {name: _shape_of(module, job) for name, module in linear}
    for name, module in linear:
        if (shape := shapes[name]) is not None:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, LinearWithCore(module, shape))
    if not any(shapes.values()):
        kinds = "its layers have no nn.Linear of their own" if not linear else "its linear modules are too narrow"
        raise UserError(
            f"No layer of this model can have a core: {kinds}.",
            code="lsp-no-layer",
            exit_code=Exit.USAGE,
            numbers=(f"lsp_size: {job.lsp_size}, lsp_nonzeros: {job.lsp_nonzeros}",),
            hint="method: lora" + (", or a smaller lsp_nonzeros" if linear else ""),
        )
    if narrow := [name for name, shape in shapes.items() if shape is None]:
        log.info("model: too narrow for a core, and frozen: %s", ", ".join(narrow[:5]))
    if smaller := {shape.size for shape in shapes.values() if shape is not None} - {job.lsp_size}:
        sides = ", ".join(map(str, sorted(smaller)))
        log.info("model: cores of side %s where half of a weight's shorter side is less than lsp_size", sides)
    return model


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear


def _shape_of(linear: nn.Linear, job: Job) -> Shape | None:
    """The shape of the layer's projectors: their size is at most half of the weight's shorter side, and a multiple of
    the nonzeros in a row. None if the layer is too small."""
    size, nonzeros = min(job.lsp_size, min(linear.weight.shape) // 2), job.lsp_nonzeros
    size -= size % (nonzeros or 1)
    return Shape(size, nonzeros, rotated=nonzeros is not None and not job.lsp_fit_steps) if size else None


@contextlib.contextmanager
def requiring_gradients(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """A context in which just the parameters in `names` require gradients."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in names)
        yield
    finally:
        for parameter, trained in before:
            parameter.requires_grad_(trained)


def merged(weight: Tensor, left: Tensor, core: Tensor, right: Tensor) -> Tensor:
    """W0 + P S Qᵀ in fp32. `weight`: W0 in any dtype, m × n; `left` m × s, `core` s × s and `right` n × s in fp32, all
    on one device."""
    return weight.to(torch.float32, copy=True).addmm_(left @ core, right.T)


def sketch_columns(count: int) -> int:
    """The columns of the random sketch from which `count` singular vectors of a gradient are found."""
    return count + min(count, 32)


def change_scratch_bytes(rows: int, columns: int, shape: Shape, *, fit_steps: int) -> int:
    """The most bytes that a change of one layer's projectors needs on the device beside the gradient in fp32. `rows`
    and `columns`: the sides m and n of the layer's weight. Tensors are counted, and a few more than there are at a
    time."""
    matrix, sides, s = 4 * rows * columns, 4 * (rows + columns), shape.size
    sketch = sketch_columns(s if shape.nonzeros is None else shape.nonzeros)
    learning = 5 * matrix + 10 * sides * s if fit_steps else 0
    return max(learning, matrix + 4 * sides * sketch) + 4 * sides * s + 64 * s * s
