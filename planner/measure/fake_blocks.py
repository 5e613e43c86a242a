"""Stand-ins for blocks, used while the memory of the frame (the model's code outside the blocks) is measured. They
compute nothing, but allocate the fake tensors that the blocks would."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from planner.cpu.meter import Meter
from planner.errors import UserError
from planner.graph import BlockCall, BlockCode, ChunkedHead
from planner.graph.call import Given
from planner.graph.fake import FakeMode


class Shared:
    """What the stand-ins of one measured run share.

    keep_input  whether blocks keep their input for backward
    given       the tensors that blocks got as arguments so far
    disordered  how many gradients are added up in another order than autograd's
    sums        sums of the gradients of the head's weights
    """

    def __init__(self, mode: FakeMode, meter: Meter, *, keep_input: bool) -> None:
        self.mode, self.meter, self.keep_input = mode, meter, keep_input
        self.given: Given = Given()
        self._disordered = 0
        self.sums: list[Tensor] = []

    @property
    def disordered(self) -> int:
        return self._disordered + self.given.disordered

    def add_up(self, old: Tensor) -> Tensor:
        """A new fake tensor for the sum of two gradients, laid out as `old`. Also counts the sum as one that autograd
        would add up in another order."""
        self._disordered += 1
        return self.fresh([old])[0]

    def fresh(self, values: Sequence[Tensor]) -> list[Tensor]:
        """New fake tensors with the layout of `values`, counted by the meter."""
        fakes = self.mode.fresh(values)
        for tensor in fakes:
            self.meter.add(tensor)
        return fakes


def not_profiled(cause: str) -> UserError:
    return UserError(
        f"The model's forward outside its blocks cannot be profiled: {cause}",
        code="frame-not-traceable",
        hint="offmate trains models whose forward runs modules with weights one after the other, each of them once",
    )


class StandIn(BlockCall):
    """A stand-in for a block: it computes nothing, makes fake outputs and gradients of the traced shapes, and keeps
    those of its arguments that the block keeps for backward."""

    def __init__(self, shared: Shared, name: str, pairs: Sequence[BlockCode], tensors: Sequence[Tensor]) -> None:
        super().__init__(pairs[0], tensors, shared.given)
        self.shared, self.pairs, self.name = shared, pairs, name
        self.x: Tensor | None = None
        self.others: list[Tensor] = []

    def zeros(self, output: Tensor) -> Tensor:
        return self.shared.fresh([output])[0]

    def take_tangents(self) -> list[Tensor]:
        if self.tangents is None and any(self.pair.result.differentiable):
            raise not_profiled(f"the loss does not depend on what the block {self.name} computes")
        return super().take_tangents()

    def sum(self, output: int, old: Tensor, new: Tensor) -> Tensor:
        return self.shared.add_up(old)

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        first = self.pair.n_params + self.pair.n_buffers
        read = {i - first for pair in self.pairs for i in pair.backward_primals if i >= first}
        self.others = [tensors[i] for i in sorted(read) if i != self.pair.interface]
        if self.shared.keep_input and self.pair.interface in read:
            self.x = tensors[self.pair.interface]
        tensors.clear()
        return self.shared.fresh(self.pair.output_values)

    def backward(self, tangents: list[Tensor]) -> list[Tensor | None]:
        """Fake gradients of the block's arguments. Releases the arguments that were kept for backward."""
        self.others, self.x = [], None
        values = self.pair.input_grad_values
        gradients = iter(self.shared.fresh([value for value in values if value is not None]))
        return [next(gradients) if value is not None else None for value in values]


class HeadStandIn(StandIn):
    """A stand-in for the head that runs the head's generated code on fake tensors: the head's peak depends on what the
    loss keeps meanwhile."""

    def __init__(
        self, shared: Shared, name: str, module: nn.Module, pairs: Sequence[BlockCode], tensors: Sequence[Tensor]
    ) -> None:
        super().__init__(shared, name, pairs, tensors)
        self.primals = [*(p.detach() for p in module.parameters()), *module.buffers()]

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        primals = [*self.primals, *tensors]
        tensors.clear()
        self.kept = [primals[i] for i in self.pair.backward_primals]
        results, self.states = self.pair.forward(primals)
        outputs, self.saved = results[: self.pair.n_outputs], results[self.pair.n_outputs :]
        return outputs

    def backward(self, tangents: list[Tensor]) -> list[Tensor | None]:
        values = [*self.saved, *self.kept, *tangents]
        self.saved, self.primals = [], []
        tangents.clear()
        grads = self.pair.backward(values, self.states, self.add)
        self.kept = []  # only here, because the call in a training step releases it here
        return grads

    def add(self, name: str, gradient: Tensor | None) -> None:
        assert gradient is not None
        self.shared.sums.append(gradient if self.pair.adoptable[name] else self.shared.fresh([gradient])[0])


class ChunkedStandIn(ChunkedHead):
    """A stand-in for the head with its loss in chunks of rows. It does on fake tensors what the
    head does in training."""

    def __init__(
        self, shared: Shared, module: nn.Module, pairs: Sequence[BlockCode], tensors: Sequence[Tensor], chunk_rows: int
    ) -> None:
        super().__init__(pairs[0], tensors, chunk_rows, shared.given)
        self.shared = shared
        self.x: Tensor | None = None
        self.given = {name: p.detach() for name, p in module.named_parameters()}

    def weights(self) -> dict[str, Tensor]:
        return self.given

    def take_tangents(self) -> list[Tensor]:
        return []

    def backward(self, tangents: list[Tensor]) -> list[Tensor | None]:
        """Fake gradients of the head's arguments. Releases what was kept for backward."""
        return self.finish(lambda name, gradient: self.shared.sums.append(gradient))
