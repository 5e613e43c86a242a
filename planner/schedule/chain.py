"""The model as the planner sees it: blocks in order, with tensors, sizes, times and options. Values, checked once."""

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

    `bytes` is the working copy that computes and travels; `state_bytes` everything the optimizer keeps for it
    (moments, and the fp32 master where the working copy is narrower). `row_bytes` is one row's gradient of an embedding
    that is tied to the head: with several slices the rows of the step's tokens are kept aside
    (`planner.schedule.peak_moments.Rows`). `on_disk`: the host keeps no copy of it.
    A frozen one is read from the model's files each time it travels; of a trained one, which the CPU updates, working
    copy and gradient are on a drive as its states are. `states_on_disk`, of a trained one: where the CPU updates it,
    the host keeps no optimizer states of it; they are read for the update, and written after it.
    `optimizer`: how it is updated, where it is trained.
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
        """Its states may be on disk, where the CPU updates it."""
        return self.trainable and self.state_bytes >= LEAST_BYTES and self.optimizer.on_disk

    @property
    def wholly_on_disk(self) -> bool:
        """It is trained, and the host has neither working copy nor gradient of it: both pass through a ring."""
        return self.on_disk and self.trainable

    def with_states(self, *, on_disk: bool) -> Tensor:
        """The same with its states on disk, or not; then it is not wholly there."""
        return replace(self, states_on_disk=on_disk, on_disk=self.on_disk and (on_disk or not self.trainable))

    @property
    def can_trail(self) -> bool:
        """Its states on disk may be updated in the step after that of its weight."""
        return self.has_master and not self.on_disk

    @property
    def has_master(self) -> bool:
        """The optimizer keeps an fp32 original beside the moments; the working copy is its rounding."""
        moments = sum(self.optimizer.moment_bytes(self.elements))
        return self.trainable and self.state_bytes == moments + 4 * self.elements

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Bytes of each of its states: moments and, where there is one, the master."""
        moments = self.optimizer.moment_bytes(self.elements) if self.state_bytes else ()
        return (*moments, *[4 * self.elements] * self.has_master)

    @property
    def scratch_bytes(self) -> int:
        """What an update on the device needs beside its items."""
        return self.optimizer.scratch_bytes(self.elements, narrow=self._narrow) if self.trainable else 0

    @property
    def host_scratch_bytes(self) -> int:
        """What an update on the CPU needs beside its items."""
        return self.optimizer.host_scratch_bytes(self.elements, narrow=self._narrow) if self.trainable else 0

    @property
    def _narrow(self) -> bool:
        return self.gradient_bytes < 4 * self.elements

    def host_gradient_bytes(self, rounds: int) -> int:
        """What the gradient's host copy takes beside the working copy. Where there is a master and no further round
        reads the weight, the gradient overwrites the working copy: the update makes that anew from the master."""
        overwrites = self.has_master and rounds == 1 and self.gradient_bytes == self.bytes
        return 0 if overwrites or self.on_disk else self.gradient_bytes

    @property
    def shared_bytes(self) -> int:
        """The master's upper half: a bf16 working copy is its rounding, and gives it back (`planner.cpu.packed`)."""
        halves = self.bytes == self.gradient_bytes == 2 * self.elements
        return self.bytes if self.has_master and halves and self.optimizer.packs else 0

    @property
    def master_bytes(self) -> int:
        """What the optimizer goes on from: the states, and the weight where it is its own original."""
        return self.state_bytes + (0 if self.has_master else self.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to treat a block's internal activations; all figures are per slice.

    `saved_bytes` stays on the device from forward to backward, the block's own input not counted.
    `offloaded_bytes` travels to the host after forward and back before backward, the input included where it does.
    `on_disk`: from there it goes on to a drive, and comes back from it; the host only has what is on its way.
    `forward_peak_bytes` is the most that exists while forward runs, above what existed before it (outputs and saved
    tensors included); `backward_peak_bytes` likewise for backward, above the saved tensors and the existing sums of
    weight gradients; `backward_first_peak_bytes` for the slice that makes these sums, the sums included (None: the
    former plus all gradient bytes of the block). For the head both directions count in `forward_peak_bytes`, with the
    loss, what its frame holds and the gradients of one slice.
    `forward_s` and `backward_s` are computation alone, without transfers; `issue_forward_s` and `issue_backward_s` what
    the issuing thread spends on it, which works ahead of the device; 0: not measured, or the device issues by itself.
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
    chunk_rows: int = 0  # of the head: it computes its loss in chunks of so many rows; 0: in one piece
    on_disk: bool = False
    compiled: bool = False  # slices of the largest shape run compiled; the peaks are enough for generated code, too
    issue_forward_s: float = 0.0
    issue_backward_s: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.on_disk and not self.offloaded_bytes:
            raise ValueError(f"option {self.name} has nothing that could be on disk")

    @property
    def stored_bytes(self) -> int:
        """What goes to a drive: whole pages."""
        return whole_pages(self.offloaded_bytes) if self.on_disk else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of the model run as one unit. Blocks of one `kind` share generated code and measurements.

    `forward_held_bytes`: what the frame of one slice holds when it arrives at this block's forward (the block's input
    included); `forward_frame_bytes`: the most it holds from the end of this forward to its next block (the block's
    output included, what is saved for backward not). `backward_*` likewise, incoming gradients included. The last block
    (head and loss) has forward figures only. `frame_gradient_bytes`: gradients of the frame's weights that the frame
    makes after this block's backward; the first slice's are part of what it holds there, and stay as sums.
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
    """The memory that a block of one `kind` allocates and lets go of under one `option`, in the host's order and in the
    words of `planner.graph.lifetimes`. `kept`: which of its tensor arguments stay until backward has run; `sent`: the
    one that travels with the offloaded activations, the last of them.
    """

    kind: str
    option: str
    forward: str
    backward: str
    kept: tuple[int, ...] = ()
    sent: int | None = None


PIECES_OF = 1024
"""Elements of a piece of states are a multiple of it: no bit of an update depends on where a tensor is cut."""


def slice_size(shapes: Mapping[str, Sequence[int]]) -> int:
    """Tokens of a slice with tensors of these shapes; where it has none, the elements of its largest tensor."""
    return math.prod(shapes["input_ids"]) if "input_ids" in shapes else max(map(math.prod, shapes.values()))


class _Derived:
    """What a chain works out from its fields when first asked: no field itself, of no interest to == or JSON."""

    __slots__ = ("_optimizers", "_pieces", "_users")
    _users: dict[str, tuple[int, ...]]
    _pieces: dict[str, tuple[Piece, ...]]
    _optimizers: Mapping[AnyOptimizer, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain(_Derived):
    """Blocks in order; the first takes the batch, the last is the head with its loss.

    `frame_bytes` is on the device all the time: the frame's weights, their optimizer states, buffers, and what matrix
    products keep there for a thread that computes; each further thread has `thread_bytes` of its own. In a step the
    batch of each slice is there too, `staged_bytes`, from the step's start.
    `start_bytes` is the most a slice needs before it arrives at its first block; `slice_tokens` the tokens of a slice.
    `distinct_tokens[k]`: the most distinct tokens that slices 0 … k of a step have together; empty where the data is
    not known, and every token may be another.
    `packs`: states that the CPU updates beside their working copies are kept without the masters' upper halves.
    `piece_elements`: states on disk are read, updated and written in pieces of so many elements; 0: none are there.
    `lifetimes`, `frame_lifetimes`: which memory turns allocate, tensor by tensor; the frame's and the head's stage by
    stage (`planner.measure.frame_lifetimes`). Empty where nobody asks where in the device's memory a tensor is.
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
        """What the states of a tensor that the CPU updates take less on the host than on the device. Where its gradient
        takes the working copy's place, nothing: the master is all there is of the weight."""
        beside = ahead or tensor.host_gradient_bytes(rounds)
        return tensor.shared_bytes if self.packs and beside and not tensor.states_on_disk else 0

    def stored_bytes(self, updated: Collection[str]) -> int:
        """Of the states that are on disk, where the CPU updates tensors of such names: once, in no whole pages."""
        return sum(t.state_bytes for t in self.tensors() if t.states_on_disk and t.name in updated)

    def passing_bytes(self, updated: Collection[str]) -> int:
        """Likewise, of working copies and gradients of what is wholly there."""
        return sum(t.bytes + t.gradient_bytes for t in self.tensors() if t.wholly_on_disk and t.name in updated)

    @property
    def saved_bytes(self) -> int:
        """What a checkpoint has of all that is trained: masters and moments."""
        return sum(t.master_bytes for t in (*self.tensors(), *self.frame_tensors) if t.trainable)

    def state_pieces(self, tensor: Tensor) -> tuple[Piece, ...]:
        """Of a tensor whose states are on disk: the moments, and the master where it has one. The largest first."""
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
        """The optimizers of what is trained, and how many parameters each updates. Made once, as `users`."""
        try:
            return self._optimizers
        except AttributeError:
            pass
        found: dict[AnyOptimizer, int] = {}
        for tensor in (t for t in (*self.tensors(), *self.frame_tensors) if t.trainable):
            found[tensor.optimizer] = found.get(tensor.optimizer, 0) + tensor.elements
        object.__setattr__(self, "_optimizers", found)
        return found

    def update_rates(self, hardware: Hardware) -> Rates:
        """How fast the machine updates: all updates are taken for as slow as those of the slowest optimizer."""
        rates = [optimizer.rates(hardware) for optimizer in self.optimizers] or [ADAMW.rates(hardware)]
        return Rates(gpu=min(each.gpu for each in rates), cpu=min(each.cpu for each in rates))

    def users(self) -> Mapping[str, tuple[int, ...]]:
        """Tensor name -> the blocks that use it, in order. More than one: a tied tensor. Made once: planning asks for
        it thousands of times.
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
