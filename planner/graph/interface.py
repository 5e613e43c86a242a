"""The interface of a block's code: the planner reads its figures, the engine calls it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from planner.graph.recipes import Recipe
from planner.graph.result import Result
from planner.graph.tangents import Layout
from planner.graph.work import Work

Sink = Callable[[str, Tensor | None], None]
"""Takes a weight's local name and its gradient, as soon as that exists; None: no gradient reached the weight."""


class BlockCode(ABC):
    """One block's forward and backward under one recipe, with the bytes they will allocate.

    result                 how the value that the block returns nests
    output_values          tensors without data, laid out as those that the block makes
    input_grad_values      tensors without data, laid out as the gradient of each tensor argument; None: no gradient
    primal_values          tensors without data, for [*parameters, *buffers, *inputs]; None: the block does not read it
    tangent_values         tensors without data, for the gradients of the differentiable outputs, then for those of
                           arguments that have begun elsewhere
    saved_bytes            device bytes of what forward hands to backward (weights, buffers and inputs not counted)
    output_bytes           bytes of the results
    forward_peak           most bytes alive in forward above its start, results and saved tensors included
    backward_peak[first]   most bytes alive in backward above its start (where the saved tensors exist already).
                           True: a first slice, whose weight gradients become the sums and are counted; False: a later
                           slice, whose gradients are added to sums that exist
    interface              index of the input whose gradient leads to the block before; None: there is none
    interface_bytes        bytes of the storage under that input
    reads_interface        whether backward reads that input. Llama in bf16 casts it first: with everything kept,
                           backward does not
    backward_primals       indices into [*parameters, *buffers, *inputs] of the tensors that backward reads
    backward_weights       local names of the parameters among them
    param_grads            local names of the parameters that get a gradient
    adoptable              local name -> its gradient may become the sum itself: nothing else sees its storage
    """

    name: str
    recipe: Recipe
    result: Result
    n_params: int
    n_buffers: int
    output_values: Sequence[Tensor]
    input_grad_values: Sequence[Tensor | None]
    primal_values: Sequence[Tensor | None]
    tangent_values: Sequence[Tensor]
    saved_bytes: int
    output_bytes: int
    forward_peak: int
    backward_peak: Mapping[bool, int]
    interface: int | None
    interface_bytes: int
    reads_interface: bool
    backward_primals: Sequence[int]
    backward_weights: Sequence[str]
    param_grads: Sequence[str]
    adoptable: Mapping[str, bool]

    @property
    def keeps_interface(self) -> bool:
        """Whether the block's input stays on the device from forward to backward."""
        return self.reads_interface and not self.recipe.offloads_input

    @property
    def n_outputs(self) -> int:
        """How many tensors the block makes for its result."""
        return len(self.output_values)

    @abstractmethod
    def for_tangents(self, layout: Layout) -> BlockCode:
        """The code for gradients that arrive with `layout`. Its forward, and what its backward reads, are the same."""

    def lifetimes(self) -> tuple[str, str]:
        """The memory that forward and backward allocate, as two lines of `planner.graph.lifetimes`. This method serves
        code of which only the peaks are known: one area (`~`) stands for all that it needs while it runs."""
        outputs = [t.untyped_storage().nbytes() for t in self.output_values]
        sizes = [0 if t is None else t.untyped_storage().nbytes() for t in self.input_grad_values]
        working = max(0, self.forward_peak - sum(outputs) - self.saved_bytes)
        forward = [f"+{j}:{size}" for j, size in enumerate(outputs)]
        saved, area = len(outputs), len(outputs) + 1
        forward += ([f"+{saved}:{self.saved_bytes}"] if self.saved_bytes else []) + [f"~{area}:{working}", f"-{area}"]
        forward += [f"={','.join(map(str, range(len(outputs))))}", f"^{saved}" if self.saved_bytes else "^"]
        working = max(0, self.backward_peak[False] - sum(sizes))
        backward = [f"+{area + 1 + j}:{size}" for j, size in enumerate(sizes) if size] + [f"~{area}:{working}"]
        backward += [f"?{k}:{size}" for k, size in enumerate(self._gradient_bytes()) if size]
        backward += [f"-{saved}"] if self.saved_bytes else []
        backward += [f"-t{j}" for j in range(len(self.tangent_values))]
        backward += [
            f"-{area}",
            "=" + ",".join(str(area + 1 + j) if size else "-" for j, size in enumerate(sizes)),
        ]
        return " ".join(forward), " ".join(backward)

    def _gradient_bytes(self) -> Sequence[int]:
        """Bytes of each parameter's gradient, 0 where the block does not read it; empty if nothing is trained."""
        values = self.primal_values[: self.n_params]
        return [v.numel() * v.element_size() if v is not None else 0 for v in values] if self.param_grads else ()

    @abstractmethod
    def work(self) -> tuple[Sequence[Work], Sequence[Work]]:
        """The operations of forward and of backward."""

    @abstractmethod
    def forward(self, values: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """`values` = [*parameters, *buffers, *inputs], emptied. Returns [*outputs, *saved] and the random states that
        backward replays (host memory). The order of the saved tensors is fixed."""

    @abstractmethod
    def backward(self, values: list[Tensor], states: Sequence[Tensor], sink: Sink) -> list[torch.Tensor | None]:
        """`values` = [*saved, *primals at `backward_primals`, *tangents], emptied. Returns the gradient of each input,
        None where there is none. `sink` gets each weight's gradient as soon as it exists, so that at most one is alive
        beside the sums."""
