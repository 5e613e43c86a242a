"""Describes a model to the planner: blocks in order, with their tensors, sizes in bytes, times in seconds, and the ways
to treat their activations.

All classes are immutable values, checked when they are made.
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
    """A parameter, under its first name in `named_parameters()`. A tied parameter appears in each block that uses it.

    `bytes`: size of the working copy, the one that computes and is copied between host and device. `state_bytes`: size
    of all that the optimizer keeps for the tensor: moments, and an fp32 master copy if the working copy is narrower.
    `row_bytes`, for an embedding that is tied to the head: size of the gradient of one row; with several slices
    (micro-batches) the embedding's gradient is kept as rows, one for each token of the step
    (`planner.schedule.peak_moments.Rows`). `on_disk`: the host keeps no copy of the tensor. A frozen tensor on disk is
    read from the model's files each time it is copied to the device. A trained tensor on disk is updated by the CPU;
    its working copy, gradient and states are on a drive. `states_on_disk`, for a trained tensor: if the CPU updates it,
    its optimizer states are on a drive, are read for the update and written after it. `optimizer`: how the tensor is
    updated if it is trained.
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
        """Bytes of the tensor's weight, gradient or optimizer states; `kind` is WEIGHT, GRADIENT or STATES of
        `planner.schedule.items`."""
        return {WEIGHT: self.bytes, GRADIENT: self.gradient_bytes, STATES: self.state_bytes}[kind]

    @property
    def storable(self) -> bool:
        """Whether the tensor's optimizer states may be on disk if the CPU updates it."""
        return self.trainable and self.state_bytes >= LEAST_BYTES and self.optimizer.on_disk

    @property
    def wholly_on_disk(self) -> bool:
        """Whether the tensor is trained and the host keeps neither its working copy nor its gradient: both are on a
        drive, and pass through a few reused slots of host memory."""
        return self.on_disk and self.trainable

    def with_states(self, *, on_disk: bool) -> Tensor:
        """This tensor, with its optimizer states on disk or in host memory. With states in memory, a trained tensor's
        weight and gradient are in memory, too."""
        return replace(self, states_on_disk=on_disk, on_disk=self.on_disk and (on_disk or not self.trainable))

    @property
    def can_trail(self) -> bool:
        """Whether the tensor's optimizer states, if they are on disk, may be updated one step after its weight."""
        return self.has_master and not self.on_disk

    @property
    def has_master(self) -> bool:
        """Whether the optimizer keeps an fp32 master copy beside the moments; the working copy is then the master,
        rounded."""
        moments = sum(self.optimizer.moment_bytes(self.elements))
        return self.trainable and self.state_bytes == moments + 4 * self.elements

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Bytes of each of the tensor's optimizer states: its moments, then the fp32 master copy if there is one."""
        moments = self.optimizer.moment_bytes(self.elements) if self.state_bytes else ()
        return (*moments, *[4 * self.elements] * self.has_master)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of temporary memory that an update on the device needs beside weight, gradient and states; 0 if
        frozen."""
        return self.optimizer.scratch_bytes(self.elements, narrow=self._narrow) if self.trainable else 0

    @property
    def host_scratch_bytes(self) -> int:
        """Bytes of temporary memory that an update on the CPU needs beside weight, gradient and states; 0 if frozen."""
        return self.optimizer.host_scratch_bytes(self.elements, narrow=self._narrow) if self.trainable else 0

    @property
    def _narrow(self) -> bool:
        return self.gradient_bytes < 4 * self.elements

    def host_gradient_bytes(self, rounds: int) -> int:
        """Bytes that the host needs for the gradient in addition to the working copy, in a step of `rounds` rounds.

        0 for a tensor on disk. Also 0 if there is an fp32 master and only one round: no later round reads the weight,
        so the gradient overwrites the working copy, and the update computes the working copy anew from the master.
        """
        overwrites = self.has_master and rounds == 1 and self.gradient_bytes == self.bytes
        return 0 if overwrites or self.on_disk else self.gradient_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes that packing the master saves: the upper half of the fp32 master can be restored from the bf16 working
        copy, to which it was rounded (`planner.cpu.packed`). 0 if that is not possible."""
        halves = self.bytes == self.gradient_bytes == 2 * self.elements
        return self.bytes if self.has_master and halves and self.optimizer.packs else 0

    @property
    def master_bytes(self) -> int:
        """Bytes from which training can continue: the optimizer states, and the weight itself if it has no fp32
        master."""
        return self.state_bytes + (0 if self.has_master else self.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to treat a block's internal activations (keep, recompute, offload, …). All figures are per slice, that is
    per micro-batch.

    `saved_bytes` stay on the device from forward to backward; the block's own input is not counted. `offloaded_bytes`
    are copied to the host after forward and back before backward; they include the input if it is copied, too.
    `on_disk`: the offloaded bytes go on to a drive and come back from it, and the host holds only those on their way.
    `forward_peak_bytes`: the most memory in use during forward, beyond what was in use before it (outputs and saved
    tensors included). `backward_peak_bytes`: the most in use during backward, beyond the saved tensors and the existing
    sums of weight gradients. `backward_first_peak_bytes`: the same for the first slice, whose backward allocates these
    sums; they are included (None: `backward_peak_bytes` plus all gradient bytes of the block). For the head,
    `forward_peak_bytes` covers forward and backward, with the loss, the frame's tensors (those of the model's code
    around the blocks), and the gradients of one slice. `forward_s`, `backward_s`: seconds of computation alone, without
    transfers. `issue_forward_s`, `issue_backward_s`: seconds that the Python thread needs to launch the kernels, which
    it does ahead of the device; 0: not measured, or the device is the CPU.
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
    chunk_rows: int = 0  # the head computes its loss in chunks of this many rows; 0: all at once
    on_disk: bool = False
    compiled: bool = False  # slices of the largest shape run torch.compile's code; the peaks hold for both codes
    issue_forward_s: float = 0.0
    issue_backward_s: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.on_disk and not self.offloaded_bytes:
            raise ValueError(f"option {self.name} has nothing that could be on disk")

    @property
    def stored_bytes(self) -> int:
        """Bytes that one slice's activations take on a drive, rounded up to whole pages; 0 if they do not go to a
        drive."""
        return whole_pages(self.offloaded_bytes) if self.on_disk else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of the model that runs as one unit: the embedding, one layer, or the head with its loss. Blocks of one
    `kind` share generated code and measurements.

    The frame is the model's code around the blocks; its figures here are bytes on the device, per slice (micro-batch).
    `forward_held_bytes`: what the frame holds for a slice when that slice begins this block's forward (the block's
    input included). `forward_frame_bytes`: the most that the frame holds between the end of this forward and the
    slice's next block (this block's output included, tensors saved for backward excluded). `backward_held_bytes`,
    `backward_frame_bytes`: the same two around this block's backward, incoming gradients included. The last block (head
    and loss) has forward figures only. `frame_gradient_bytes`: gradients of the frame's own weights that arise after
    this block's backward. Those of the first slice are part of what the frame holds there, and stay as the sums to
    which later slices add.
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
        """The block's option called `name`. Raises KeyError if there is none."""
        for option in self.options:
            if option.name == name:
                return option
        raise KeyError(f"block {self.name} has no option {name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """The allocations and releases of device memory by a block of one `kind` under one `option`, in the order in which
    Python issues them. `forward` and `backward` are texts in the notation of `planner.graph.lifetimes`. `kept`: the
    indices of the block's tensor arguments that stay until backward has run. `sent`: the index of the argument that is
    offloaded last, after the block's other activations; None if no argument is offloaded."""

    kind: str
    option: str
    forward: str
    backward: str
    kept: tuple[int, ...] = ()
    sent: int | None = None


PIECES_OF = 1024
"""A piece of optimizer states on disk has a multiple of this many elements, so that no bit of an update depends on
where a tensor is cut."""


def slice_size(shapes: Mapping[str, Sequence[int]]) -> int:
    """The number of tokens in a slice (micro-batch) whose tensors have these shapes: the elements of `input_ids`, or of
    the largest tensor if there are no `input_ids`."""
    return math.prod(shapes["input_ids"]) if "input_ids" in shapes else max(map(math.prod, shapes.values()))


class _Derived:
    """What a chain computes from its fields when first asked. These are not dataclass fields: == and JSON ignore
    them."""

    __slots__ = ("_optimizers", "_pieces", "_users")
    _users: dict[str, tuple[int, ...]]
    _pieces: dict[str, tuple[Piece, ...]]
    _optimizers: Mapping[AnyOptimizer, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain(_Derived):
    """A model as the planner sees it: its blocks in order. The first takes the batch, the last is the head with its
    loss.

    A slice is one micro-batch. The frame is all of the model outside the blocks. `frame_bytes` are on the device all
    the time: the frame's weights, their optimizer states, buffers, and the workspace of matrix products for one
    computing thread. Each further thread adds `thread_bytes`. During a step, `staged_bytes` for the batch of each slice
    come on top. `start_bytes`: the most that a slice needs before it arrives at its first block. `slice_tokens`: the
    tokens of a slice. `distinct_tokens[k]`: the largest number of distinct tokens that slices 0 … k of a step have
    together; empty if the data are not known, so that every token may be a different one. `packs`: the CPU keeps fp32
    masters without their upper halves, which the bf16 working copies restore. `piece_elements`: optimizer states on
    disk are read, updated and written in pieces of this many elements; 0: none are on disk. `between_gpu_bytes`,
    `between_cpu_bytes`: memory that work between two steps takes, beside what is there then. `replaced_bytes`: frozen
    weights that such work replaces, so that checkpoints need them beside what is trained. `lifetimes`,
    `frame_lifetimes`: the device allocations of each block, and stage by stage those of the frame and the head
    (`planner.measure.frame_lifetimes`). Empty if nobody asks for the places of tensors in the device's memory.
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
    between_gpu_bytes: int = 0
    between_cpu_bytes: int = 0
    replaced_bytes: int = 0

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
        """Every tensor of the blocks once, in order of first use."""
        yield from {t.name: t for block in self.blocks for t in block.tensors}.values()

    def packed_bytes(self, tensor: Tensor, rounds: int, *, ahead: bool = False) -> int:
        """Bytes by which packing shortens the optimizer states of `tensor` on the host, where the CPU updates it; 0 if
        they are not packed.

        They are not packed if the gradient overwrites the working copy (`Tensor.host_gradient_bytes`), because then the
        master alone holds the weight. `rounds`: rounds of a step. `ahead`: the CPU updates the tensor before the
        gradient norm is known, and so the working copy must stay.
        """
        beside = ahead or tensor.host_gradient_bytes(rounds)
        return tensor.shared_bytes if self.packs and beside and not tensor.states_on_disk else 0

    def stored_bytes(self, updated: Collection[str]) -> int:
        """Bytes of optimizer states on disk if the CPU updates the tensors named in `updated`: one copy, not rounded to
        pages."""
        return sum(t.state_bytes for t in self.tensors() if t.states_on_disk and t.name in updated)

    def passing_bytes(self, updated: Collection[str]) -> int:
        """Bytes of working copies and gradients on a drive, of those tensors named in `updated` of which the host keeps
        no copy."""
        return sum(t.bytes + t.gradient_bytes for t in self.tensors() if t.wholly_on_disk and t.name in updated)

    @property
    def saved_bytes(self) -> int:
        """Bytes of a checkpoint: the masters and moments of all trained tensors, and the weights of those without a
        master."""
        return sum(t.master_bytes for t in (*self.tensors(), *self.frame_tensors) if t.trainable)

    def state_pieces(self, tensor: Tensor) -> tuple[Piece, ...]:
        """The pieces in which the optimizer states of `tensor` (moments, and the master if any) are read from disk and
        written. No piece is larger than the first."""
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
        """Maps each optimizer of the trained tensors to the number of parameters that it updates. Computed at the first
        call."""
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
        """How many parameters per second the machine's GPU and CPU update. If the chain has several optimizers, each
        rate is that of the slowest."""
        rates = [optimizer.rates(hardware) for optimizer in self.optimizers] or [ADAMW.rates(hardware)]
        return Rates(gpu=min(each.gpu for each in rates), cpu=min(each.cpu for each in rates))

    def users(self) -> Mapping[str, tuple[int, ...]]:
        """Maps each tensor name to the indices of the blocks that use it, in order; a tied tensor has more than one.
        Computed at the first call, because planning asks for this thousands of times."""
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
