"""The interface of a block's generated code. The planner reads its byte counts; the engine of the trainer calls it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from planner.graph.recipes import Recipe
from planner.graph.result import Result
from planner.graph.tangents import Layout
from planner.machine.work import Work

Sink = Callable[[str, Tensor | None], None]
"""Takes a weight's name within its block and its gradient, as soon as the gradient exists. None: no gradient reached
the weight."""


class BlockCode(ABC):
    """One block's forward and backward, with the bytes that they will allocate. A block is a part of the model that
    runs as one unit, as a decoder layer. `recipe` says which values forward saves for backward. "Tensors without data"
    are fake tensors: they have shape, strides, dtype and device only.

    result                 how the value that the block returns nests
    output_values          tensors without data, laid out as the block's outputs
    input_grad_values      tensors without data, laid out as the gradient of each tensor argument; None: no gradient
    primal_values          tensors without data, for [*parameters, *buffers, *inputs]; None: the block does not read it
    tangent_values         tensors without data, for the gradients that backward gets: those of the differentiable
                           outputs, then the parts of arguments' gradients that other readers have computed before
    saved_bytes            device bytes of what forward hands to backward (weights, buffers and inputs not counted)
    output_bytes           bytes of the outputs
    gives_outputs_away     whether the outputs' memory is theirs alone, so that who gets them may overwrite them
    forward_peak           most bytes alive in forward above its start, outputs and saved tensors included
    backward_peak[first]   most bytes alive in backward above its start (where the saved tensors exist already).
                           True: for the first micro-batch of a step, whose weight gradients become the sums and are
                           counted; False: for a later one, whose gradients are added to sums that exist
    interface              index of the input that the block before has computed, and whose gradient goes back to it;
                           None: there is none
    interface_bytes        bytes of the storage under that input
    reads_interface        whether backward reads that input. Llama in bf16 casts it first: with everything saved,
                           backward does not read it
    backward_primals       indices into [*parameters, *buffers, *inputs] of the tensors that backward reads
    backward_weights       names within the block of the parameters among them
    param_grads            names within the block of the parameters that get a gradient
    adoptable              name of a parameter -> whether its gradient may itself become the sum over micro-batches,
                           because nothing else uses its storage
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
    gives_outputs_away: bool
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
        """Whether the block's input stays on the device from forward to backward: backward reads it, and it is not
        offloaded."""
        return self.reads_interface and not self.recipe.offloads_input

    @property
    def n_outputs(self) -> int:
        """The number of tensors among the block's outputs."""
        return len(self.output_values)

    @abstractmethod
    def for_tangents(self, layout: Layout) -> BlockCode:
        """The code for gradients of outputs that arrive with the strides `layout`. Its forward, and what its backward
        reads, are the same as here."""

    def lifetimes(self) -> tuple[str, str]:
        """The memory that forward and backward allocate and free, each as a line of text in the form that
        `planner.graph.lifetimes` describes. This implementation is for code of which only the peaks are known. It gives
        one allocation (`~`) of the peak's bytes for all that the code needs while it runs."""
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
        """Bytes of each parameter's gradient, 0 for a parameter that the block does not read; empty if nothing is
        trained."""
        values = self.primal_values[: self.n_params]
        return [v.numel() * v.element_size() if v is not None else 0 for v in values] if self.param_grads else ()

    @abstractmethod
    def work(self) -> tuple[Sequence[Work], Sequence[Work]]:
        """The operations of forward and of backward, each as its FLOPs and bytes of memory traffic."""

    @abstractmethod
    def forward(self, values: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Compute the block's outputs from `values` = [*parameters, *buffers, *inputs]; empties the list. Returns
        [*outputs, *saved], always in this order, and the random states (on the host) under which backward repeats
        random operations."""

    @abstractmethod
    def backward(self, values: list[Tensor], states: Sequence[Tensor], sink: Sink) -> list[torch.Tensor | None]:
        """Compute the gradient of each input, None where there is none. `values` = [*saved, *primals at
        `backward_primals`, *tangents]; the list is emptied. `states`: the random states that forward returned. `sink`
        gets each weight's gradient as soon as it exists, so that at most one is alive beside the sums."""
