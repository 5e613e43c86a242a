"""The model as the planner sees it: blocks in order, with tensors, sizes, times and options.

All are immutable values, checked when they are made.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.checks import check_numbers
from planner.machine.hardware import Hardware
from planner.optimizers.base import Rates
from planner.optimizers.table import ADAMW, AnyOptimizer
from planner.schedule.items import GRADIENT, STATES, WEIGHT
from planner.schedule.state_pieces import LEAST_BYTES, Piece, StoredTensor, whole_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A parameter under its first name in `named_parameters()`; a tied one appears in each block that uses it.

    `bytes`: size of the working copy, which computes and travels. `state_bytes`: size of all that the optimizer keeps
    for the tensor (moments, and the fp32 master where the working copy is narrower). `row_bytes`, for an embedding that
    is tied to the head: size of one row's gradient; with several slices the gradient rows of the step's tokens are kept
    aside (`planner.schedule.peak_moments.Rows`). `on_disk`: the host keeps no copy of the tensor. A frozen tensor on
    disk is read from the model's files each time it travels. A trained tensor on disk is updated by the CPU, and its
    working copy and gradient are on a drive, as its states are. `states_on_disk`, for a trained tensor: where the CPU
    updates it, the host keeps no optimizer states of it; they are read for the update and written after it.
    `optimizer`: how the tensor is updated if it is trained.
    """

    name: str
    elements: int
    bytes: int
    gradient_bytes: int
    state_bytes: int
    trainable: bool = True
    row_bytes: int = 0
    on_disk: bool = False
    states_on_disk: bool = False
    optimizer: AnyOptimizer = ADAMW

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.on_disk and self.trainable and not (self.states_on_disk and self.has_master):
            raise ValueError(f"tensor {self.name} is trained: it is on disk with its states and its master, or not")
        if self.states_on_disk and not self.state_bytes:
            raise ValueError(f"tensor {self.name} has no optimizer states that could be on disk")
        master = 4 * self.elements * (self.bytes < 4 * self.elements)
        whole = self.state_bytes == sum(self.optimizer.moment_bytes(self.elements)) + master
        if not self.optimizer.on_disk and (self.states_on_disk or not whole):
            states = f"{self.state_bytes} bytes of {self.optimizer.states}"
            raise ValueError(f"tensor {self.name} cannot have {states}, or on disk")

    def item_bytes(self, kind: str) -> int:
        """Size of its weight, gradient or states (`planner.schedule.items`)."""
        return {WEIGHT: self.bytes, GRADIENT: self.gradient_bytes, STATES: self.state_bytes}[kind]

    @property
    def storable(self) -> bool:
        """Its states may be on disk if the CPU updates it."""
        return self.trainable and self.state_bytes >= LEAST_BYTES and self.optimizer.on_disk

    @property
    def wholly_on_disk(self) -> bool:
        """It is trained, and the host keeps neither its working copy nor its gradient: both pass through a ring."""
        return self.on_disk and self.trainable

    def with_states(self, *, on_disk: bool) -> Tensor:
        """The tensor with its states on disk, or in memory; in the latter case it is not wholly on disk either."""
        return replace(self, states_on_disk=on_disk, on_disk=self.on_disk and (on_disk or not self.trainable))

    @property
    def can_trail(self) -> bool:
        """Its states on disk may be updated one step after its weight."""
        return self.has_master and not self.on_disk

    @property
    def has_master(self) -> bool:
        """The optimizer keeps an fp32 master beside the moments; the working copy is the rounded master."""
        moments = sum(self.optimizer.moment_bytes(self.elements))
        return self.trainable and self.state_bytes == moments + 4 * self.elements

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Bytes of each of its states: moments and, where there is one, the master."""
        moments = self.optimizer.moment_bytes(self.elements) if self.state_bytes else ()
        return (*moments, *[4 * self.elements] * self.has_master)

    @property
    def scratch_bytes(self) -> int:
        """Bytes that an update on the device needs beside its items."""
        return self.optimizer.scratch_bytes(self.elements, narrow=self._narrow) if self.trainable else 0

    @property
    def host_scratch_bytes(self) -> int:
        """Bytes that an update on the CPU needs beside its items."""
        return self.optimizer.host_scratch_bytes(self.elements, narrow=self._narrow) if self.trainable else 0

    @property
    def _narrow(self) -> bool:
        return self.gradient_bytes < 4 * self.elements

    def host_gradient_bytes(self, rounds: int) -> int:
        """Bytes of the gradient's host copy beside the working copy; 0 for a tensor on disk. Also 0 where there is a
        master and no further round reads the weight: the gradient then overwrites the working copy, which the update
        makes anew from the master."""
        overwrites = self.has_master and rounds == 1 and self.gradient_bytes == self.bytes
        return 0 if overwrites or self.on_disk else self.gradient_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of the master's upper half, which can be restored from the bf16 working copy, its rounding
        (`planner.cpu.packed`); 0 where that is not possible."""
        halves = self.bytes == self.gradient_bytes == 2 * self.elements
        return self.bytes if self.has_master and halves and self.optimizer.packs else 0

    @property
    def master_bytes(self) -> int:
        """Bytes from which training can continue: the states, and the weight where it has no master."""
        return self.state_bytes + (0 if self.has_master else self.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to treat a block's internal activations; all figures are per slice.

    `saved_bytes` stay on the device from forward to backward, the block's own input not counted. `offloaded_bytes`
    travel to the host after forward and back before backward; they include the input where it travels. `on_disk`: the
    offloaded bytes go on to a drive and come back from it, and the host holds only those on their way.
    `forward_peak_bytes`: the most that exists while forward runs, above what existed before it (outputs and saved
    tensors included). `backward_peak_bytes`: the same for backward, above the saved tensors and the existing sums of
    weight gradients. `backward_first_peak_bytes`: the same for the slice that makes these sums, the sums included
    (None: `backward_peak_bytes` plus all gradient bytes of the block). For the head, `forward_peak_bytes` covers both
    directions, with the loss, what its frame holds and the gradients of one slice.
    `forward_s`, `backward_s`: seconds of computation alone, without transfers. `issue_forward_s`, `issue_backward_s`:
    seconds that the issuing thread, which works ahead of the device, spends on it; 0: not measured, or the device
    issues by itself.
    """

    name: str
    saved_bytes: int = 0
    offloaded_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    backward_first_peak_bytes: int | None = None
    reads_input: bool = True  # the block's input stays on the device from F to B: backward reads it
    reads_weights: tuple[str, ...] | None = None  # tensors backward reads; None: all of the block's
    recipe: str = "keep"
    chunk_rows: int = 0  # the head computes its loss in chunks of so many rows; 0: in one piece
    on_disk: bool = False
    compiled: bool = False  # slices of the largest shape run compiled; the peaks cover generated code, too
    issue_forward_s: float = 0.0
    issue_backward_s: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.on_disk and not self.offloaded_bytes:
            raise ValueError(f"option {self.name} has nothing that could be on disk")

    @property
    def stored_bytes(self) -> int:
        """Bytes that go to a drive, in whole pages."""
        return whole_pages(self.offloaded_bytes) if self.on_disk else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of the model run as one unit. Blocks of one `kind` share generated code and measurements.

    `forward_held_bytes`: what the frame of one slice holds when the slice arrives at this block's forward (the block's
    input included). `forward_frame_bytes`: the most the frame holds from the end of this forward to the slice's next
    block (this block's output included, tensors saved for backward not). `backward_held_bytes`, `backward_frame_bytes`:
    the same for backward, incoming gradients included. The last block (head and loss) has forward figures only.
    `frame_gradient_bytes`: gradients of the frame's weights that the frame makes after this block's backward. Those of
    the first slice are part of what the frame holds there, and stay as the sums.
    """

    name: str
    kind: str
    tensors: tuple[Tensor, ...]
    options: tuple[Option, ...]
    input_bytes: int = 0
    output_bytes: int = 0
    forward_held_bytes: int = 0
    forward_frame_bytes: int = 0
    backward_held_bytes: int = 0
    backward_frame_bytes: int = 0
    frame_gradient_bytes: int = 0

    def __post_init__(self) -> None:
        check_numbers(self)
        if not self.options:
            raise ValueError(f"block {self.name} has no option")
        names = [option.name for option in self.options]
        if len(set(names)) != len(names):
            raise ValueError(f"block {self.name} has two options of one name: {names}")

    def option(self, name: str) -> Option:
        """The option called `name`; KeyError when there is none."""
        for option in self.options:
            if option.name == name:
                return option
        raise KeyError(f"block {self.name} has no option {name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """The memory that a block of one `kind` allocates and releases under one `option`, in the host's order, written in
    the words of `planner.graph.lifetimes`. `kept`: the numbers of its tensor arguments that stay until backward has
    run. `sent`: the number of the argument that travels with the offloaded activations, as the last of them.
    """

    kind: str
    option: str
    forward: str
    backward: str
    kept: tuple[int, ...] = ()
    sent: int | None = None


PIECES_OF = 1024
"""A piece of states has a multiple of this many elements, so no bit of an update depends on where a tensor is cut."""


def slice_size(shapes: Mapping[str, Sequence[int]]) -> int:
    """Tokens of a slice with tensors of these shapes; without `input_ids`, the elements of its largest tensor."""
    return math.prod(shapes["input_ids"]) if "input_ids" in shapes else max(map(math.prod, shapes.values()))


class _Derived:
    """What a chain computes from its fields when first asked. These are not fields: == and JSON ignore them."""

    __slots__ = ("_optimizers", "_pieces", "_users")
    _users: dict[str, tuple[int, ...]]
    _pieces: dict[str, tuple[Piece, ...]]
    _optimizers: Mapping[AnyOptimizer, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain(_Derived):
    """Blocks in order; the first takes the batch, the last is the head with its loss.

    `frame_bytes` are on the device all the time: the frame's weights, their optimizer states, buffers, and what matrix
    products keep there for one computing thread. Each further thread adds `thread_bytes`. In a step, the batch of each
    slice (`staged_bytes`) is there too, from the step's start.
    `start_bytes`: the most a slice needs before it arrives at its first block. `slice_tokens`: the tokens of a slice.
    `distinct_tokens[k]`: the most distinct tokens that slices 0 … k of a step have together; empty where the data is
    not known, so that every token may be a different one.
    `packs`: states that the CPU updates beside their working copies are kept without the masters' upper halves.
    `piece_elements`: states on disk are read, updated and written in pieces of so many elements; 0: none are on disk.
    `lifetimes`, `frame_lifetimes`: the memory that turns allocate, tensor by tensor; the frame's and the head's stage
    by stage (`planner.measure.frame_lifetimes`). Empty where nobody asks where tensors lie in the device's memory.
    """

    blocks: tuple[Block, ...]
    frame_bytes: int = 0
    start_bytes: int = 0
    slice_tokens: int = 0
    distinct_tokens: tuple[int, ...] = ()
    frame_tensors: tuple[Tensor, ...] = ()
    packs: bool = False
    piece_elements: int = 0
    lifetimes: tuple[Lifetimes, ...] = ()
    frame_lifetimes: tuple[str, ...] = ()
    thread_bytes: int = 0
    staged_bytes: int = 0

    def __post_init__(self) -> None:
        check_numbers(self)
        if len(self.blocks) < 2:
            raise ValueError(f"a chain has at least two blocks, this one has {len(self.blocks)}")
        if not self.piece_elements and any(t.states_on_disk for block in self.blocks for t in block.tensors):
            raise ValueError("states are on disk, and nothing says in what pieces")
        if self.piece_elements % PIECES_OF:
            raise ValueError(f"piece_elements is {self.piece_elements}; it must be a multiple of {PIECES_OF}")
        seen: dict[str, Tensor] = {}
        for tensor in (t for block in self.blocks for t in block.tensors):
            if seen.setdefault(tensor.name, tensor) != tensor:
                raise ValueError(f"tensor {tensor.name} has two descriptions")

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of a block once, in order of first use."""
        yield from {t.name: t for block in self.blocks for t in block.tensors}.values()

    def packed_bytes(self, tensor: Tensor, rounds: int, *, ahead: bool = False) -> int:
        """How many bytes fewer the states of a tensor that the CPU updates take on the host than on the device. 0 where
        the gradient takes the working copy's place: then the master alone holds the weight. `ahead`: the update runs
        ahead of the norm."""
        beside = ahead or tensor.host_gradient_bytes(rounds)
        return tensor.shared_bytes if self.packs and beside and not tensor.states_on_disk else 0

    def stored_bytes(self, updated: Collection[str]) -> int:
        """Bytes of the states on disk if the CPU updates the tensors `updated`: one copy, not rounded to pages."""
        return sum(t.state_bytes for t in self.tensors() if t.states_on_disk and t.name in updated)

    def passing_bytes(self, updated: Collection[str]) -> int:
        """Bytes of the working copies and gradients of those tensors among `updated` that are wholly on disk."""
        return sum(t.bytes + t.gradient_bytes for t in self.tensors() if t.wholly_on_disk and t.name in updated)

    @property
    def saved_bytes(self) -> int:
        """Bytes that a checkpoint holds of all trained tensors: masters and moments."""
        return sum(t.master_bytes for t in (*self.tensors(), *self.frame_tensors) if t.trainable)

    def state_pieces(self, tensor: Tensor) -> tuple[Piece, ...]:
        """The pieces of a tensor whose states (moments, and the master if any) are on disk. The first is a largest."""
        try:
            pieces = self._pieces
        except AttributeError:
            object.__setattr__(self, "_pieces", pieces := {})
        if tensor.name not in pieces:
            widths = (4,) * (tensor.state_bytes // (4 * tensor.elements))
            stored = StoredTensor(name=tensor.name, shape=(tensor.elements,), widths=widths)
            pieces[tensor.name] = stored.pieces(self.piece_elements)
        return pieces[tensor.name]

    @property
    def optimizers(self) -> Mapping[AnyOptimizer, int]:
        """Each optimizer of the trained tensors -> how many parameters it updates. Computed once, as `users`."""
        try:
            return self._optimizers
        except AttributeError:
            pass
        counts: dict[AnyOptimizer, int] = {}
        for tensor in (t for t in (*self.tensors(), *self.frame_tensors) if t.trainable):
            counts[tensor.optimizer] = counts.get(tensor.optimizer, 0) + tensor.elements
        object.__setattr__(self, "_optimizers", counts)
        return counts

    def update_rates(self, hardware: Hardware) -> Rates:
        """How fast the machine updates. All updates are assumed to be as slow as those of the slowest optimizer."""
        rates = [optimizer.rates(hardware) for optimizer in self.optimizers] or [ADAMW.rates(hardware)]
        return Rates(gpu=min(each.gpu for each in rates), cpu=min(each.cpu for each in rates))

    def users(self) -> Mapping[str, tuple[int, ...]]:
        """Tensor name -> the blocks that use it, in order; a tied tensor has more than one. Computed once, because
        planning asks for it thousands of times.
        """
        try:
            return self._users
        except AttributeError:
            pass
        users: dict[str, tuple[int, ...]] = {}
        for index, block in enumerate(self.blocks):
            for tensor in block.tensors:
                users[tensor.name] = (*users.get(tensor.name, ()), index)
        object.__setattr__(self, "_users", users)
        return users
