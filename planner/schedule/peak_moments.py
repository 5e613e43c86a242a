"""Lists the moments of each stage at which device memory may peak, as linear functions of the blocks' options, for
`planner.ilp.program` and `planner.ilp.lower_bound`.

`planner.schedule.memory_use` walks through a finished program and counts to the byte. A solver needs the same before
there is a program: for each stage, a few moments of which one is its peak. Weights, states and gradients that may be
elsewhere are left out. Slices (micro-batches) run one after another, and from slice to slice each figure changes by an
equal or a growing amount, so the first and the last slices of a stage decide. Only the gradient rows of a tied
embedding decrease in another way.

Symbols: L blocks, m slices, T = 2L - 1 stages, i the block of a stage, k the running slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from planner.schedule.chain import Block, Chain, Option, Tensor
from planner.schedule.plan import Direction, stage_order

LOSS_BYTES = 4  # what a finished slice leaves: its loss
NORM_BYTES = 4
_INDEX_BYTES = 8
_WORD_BYTES = 16  # a staged tensor takes whole words of this size
ROWS_AT_ONCE = 1024  # rows of a tied embedding's gradient that are added together


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The bytes on the device at one moment of stage number `stage`, as a linear function of the chosen options.

    They are the sum of `fixed_bytes`, of `bytes_of[block, option]` for each chosen option, and of what the options of
    blocks 0 … `before` keep for all slices. The gradient sums that the stage makes are included. `update`: the
    optimizer runs at this moment, and also needs scratch for the largest tensor that it may have to update.
    """

    stage: int
    before: int
    fixed_bytes: int
    update: bool = False
    bytes_of: dict[tuple[int, int], int] = field(default_factory=dict)


def kept_bytes(block: Block, option: Option) -> int:
    """Bytes that one slice (micro-batch) of this block keeps on the device from forward to backward under this
    option."""
    return option.saved_bytes + (block.input_bytes if option.reads_input else 0)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a tied embedding's gradient that the head's backward leaves, kept until the embedding's backward adds
    them up; sizes in bytes.

    With several slices (micro-batches), slice k keeps a row, with its number, for each distinct token of slices 0 … k
    of its round: `counts[k]` rows. The first slice of a step keeps only the numbers, since its gradient begins the sum
    (`worker.engine.gradients`). `all_rows`: rows of the embedding. `begun`: an earlier round has begun the sum.
    """

    row_bytes: int
    element_bytes: int
    counts: tuple[int, ...]
    all_rows: int
    begun: bool

    def aside_bytes(self, k: int) -> int:
        """Bytes of the gradient rows that slice `k` keeps from the head's backward to the embedding's."""
        return self.counts[k] * (_INDEX_BYTES + (self.row_bytes if k or self.begun else 0))

    def masking_bytes(self, k: int) -> int:
        """Bytes that the head's backward on slice `k` needs in addition, to add the rows that are not kept to
        the sum."""
        return self.all_rows * self.element_bytes if k or self.begun else 0

    def taking_bytes(self, k: int) -> int:
        """Bytes that the embedding's backward on slice `k` needs in addition, to add the rows that were kept."""
        return min(self.counts[k], ROWS_AT_ONCE) * self.row_bytes


def tied_rows(chain: Chain, slices: int, rounds: int, *, begun: bool) -> dict[str, Rows]:
    """Maps the name of each tied embedding whose gradient is added by rows to its `Rows`. Empty if a step has only one
    slice (micro-batch). `begun`: whether the round is not the first of a step."""
    users = chain.users()
    rows = {}
    for tensor in chain.tensors():
        if slices * rounds > 1 and tensor.row_bytes and tensor.trainable and len(users[tensor.name]) > 1:
            all_rows = tensor.gradient_bytes // tensor.row_bytes
            counts = tuple(min(all_rows, count) for count in distinct_tokens(chain, slices))
            element_bytes = tensor.gradient_bytes // tensor.elements
            rows[tensor.name] = Rows(tensor.row_bytes, element_bytes, counts, all_rows, begun)
    return rows


def distinct_tokens(chain: Chain, slices: int) -> tuple[int, ...]:
    """For each slice k of a round, the largest number of distinct tokens that slices 0 … k have together. The chain's
    own numbers are for a step of one round; for several rounds the result is an upper limit made from them. If the data
    are not known, every token may be a different one."""
    if len(chain.distinct_tokens) == slices:
        return chain.distinct_tokens
    most = max(chain.distinct_tokens, default=slices * chain.slice_tokens)
    return tuple(min(most, (k + 1) * chain.slice_tokens) for k in range(slices))


def staged_bytes(chain: Chain, slices: int, rounds: int) -> int:
    """Bytes brought to the device before a step begins: the batches of all its slices (micro-batches), and, for
    embeddings whose weight is also the head's, the numbers of the rows that get a gradient."""
    if not chain.staged_bytes:  # nothing is staged
        return 0
    rows = tied_rows(chain, slices, rounds, begun=False).values()
    index = sum(staged_size(_INDEX_BYTES * count) for its in rows for count in its.counts)
    return rounds * (slices * chain.staged_bytes + index)


def lasting_bytes(chain: Chain, slices: int, rounds: int) -> int:
    """Bytes on the device from a step's start to its end: weights and states outside the blocks, the batches, and, with
    several slices per round, the workspace of matrix products for the thread of each slice. These threads are others
    than the one that runs backward."""
    threads = slices if slices > 1 else 0
    return chain.frame_bytes + staged_bytes(chain, slices, rounds) + threads * chain.thread_bytes


def staged_size(size: int) -> int:
    """Bytes that a tensor of `size` bytes takes among those brought to the device before a step: rounded up to whole
    words, since the next one may have any dtype."""
    return -(-size // _WORD_BYTES) * _WORD_BYTES


def standing_bytes(chain: Chain, slices: int, clip: bool, rounds: int = 1) -> list[int]:
    """Bytes per stage that are on the device whatever is decided: the frame (the model outside its blocks), norms,
    losses of earlier rounds, and gradients of tied tensors and of the frame.

    These gradients count from the stage after the one that makes them to their last use; with several rounds, in all
    stages except the one that adds to them.
    """
    last, rows = len(chain.blocks) - 1, tied_rows(chain, slices, rounds, begun=rounds > 1)
    fixed = lasting_bytes(chain, slices, rounds)
    bytes_at = [fixed + (rounds - 1) * slices * LOSS_BYTES] * (2 * last + 1)
    for index, block in enumerate(chain.blocks):
        complete_stage = 2 * last - index
        for stage in (*range(complete_stage if rounds > 1 else 0), *range(complete_stage + 1, 2 * last + 1)):
            bytes_at[stage] += block.frame_gradient_bytes
    tensors = {t.name: t for t in chain.tensors()}
    for name, blocks in chain.users().items():
        if not tensors[name].trainable:
            continue
        complete_stage, used = 2 * last - blocks[-1], 2 * last - blocks[0]
        for stage in range(complete_stage + 1, used + 1):
            aside = sum(rows[name].aside_bytes(k) for k in range(slices)) if name in rows else 0
            bytes_at[stage] += tensors[name].gradient_bytes + aside
        for stage in (*range(complete_stage), *range(used + 1, 2 * last + 1)) if rounds > 1 and len(blocks) > 1 else ():
            bytes_at[stage] += tensors[name].gradient_bytes
        for stage in range(used + 1, 2 * last + 1) if clip else ():
            bytes_at[stage] += NORM_BYTES
    return bytes_at


@dataclass(frozen=True, slots=True)
class _Made:
    """The gradients that a stage makes: the sums, those of the frame (the model outside its blocks) after it, and rows
    of tied embeddings that its slices keep for later or add up. `begun`: these sums exist from an earlier round."""

    begun: bool
    sums: int
    frame: int
    put: tuple[Rows, ...]
    taken: tuple[Rows, ...]

    @classmethod
    def of(cls, chain: Chain, index: int, rounds: int, rows: dict[str, Rows]) -> _Made:
        users = chain.users()
        tensors = [t for t in chain.blocks[index].tensors if t.trainable]
        return cls(
            begun=rounds > 1,
            sums=sum(t.gradient_bytes for t in tensors if users[t.name][-1] == index),
            frame=chain.blocks[index].frame_gradient_bytes,
            put=tuple(rows[t.name] for t in tensors if t.name in rows and users[t.name][-1] == index),
            taken=tuple(rows[t.name] for t in tensors if t.name in rows and users[t.name][0] == index),
        )

    def during(self, k: int) -> int:
        """Bytes of kept gradient rows and of the frame's sums while slice `k` runs. Rows that an earlier stage kept
        count relative to those of all slices."""
        beside = sum(r.masking_bytes(k) for r in self.put) + sum(r.taking_bytes(k) for r in self.taken)
        put = sum(r.aside_bytes(j) for r in self.put for j in range(k + 1))
        return beside + put - self._gone(k - 1) + self.frame - self.new(k)

    def after(self, k: int) -> int:
        """Bytes of kept gradient rows and of the frame's sums after slice `k`, without sums that this slice begins."""
        put = sum(r.aside_bytes(j) for r in self.put for j in range(k + 1))
        return put - self._gone(k) + self.frame - self.new(k)

    def new(self, k: int) -> int:
        """Bytes of the frame's gradient sums that slice `k` begins. Until the next block runs, they count to what the
        frame holds."""
        return 0 if k or self.begun else self.frame

    def _gone(self, k: int) -> int:
        return sum(r.aside_bytes(j) for r in self.taken for j in range(k + 1))


def moments(chain: Chain, slices: int, clip: bool, rounds: int = 1) -> Iterator[Moment]:
    """All moments of a step's stages at which device memory may peak, stage by stage. `slices`: micro-batches of a
    round.

    With several rounds, the moments are those of a round after the first, when sums of gradients exist. Sums that other
    stages make are in `standing_bytes`.
    """
    rows = tied_rows(chain, slices, rounds, begun=rounds > 1)
    for stage, (direction, index) in enumerate(stage_order(len(chain.blocks))):
        made = _Made.of(chain, index, rounds, rows)
        ends = {0, min(1, slices - 1), max(0, slices - 2), slices - 1}
        for k in range(slices) if made.taken else sorted(ends):
            if direction is Direction.FORWARD:
                yield _forward(chain, stage, index, slices, k)
            elif direction is Direction.HEAD:
                yield _head(chain, stage, index, slices, k, made)
            else:
                yield _backward(chain, stage, index, slices, k, made)
        if direction is not Direction.FORWARD:
            yield _update(chain, stage, index, slices, made, clip)


def _forward(chain: Chain, stage: int, i: int, m: int, k: int) -> Moment:
    block, following = chain.blocks[i], chain.blocks[i + 1]
    not_begun = i == 0  # waiting slices hold nothing yet
    fixed = k * following.forward_held_bytes + (0 if not_begun else (m - 1 - k) * block.forward_held_bytes)
    bytes_of: dict[tuple[int, int], int] = {}
    for o, option in enumerate(block.options):
        kept = kept_bytes(block, option)
        running = max(
            block.forward_held_bytes + option.forward_peak_bytes,
            kept + option.offloaded_bytes + max(block.forward_frame_bytes, following.forward_held_bytes),
            chain.start_bytes if i == 0 else 0,
        )
        leaving = option.offloaded_bytes if k else 0  # the slice before is still being copied
        bytes_of[i, o] = k * kept + leaving + running
    if k == 0 and i:
        _add_offloaded(bytes_of, chain, i - 1)
    return Moment(stage=stage, before=i - 1, fixed_bytes=fixed, bytes_of=bytes_of)


def _head(chain: Chain, stage: int, i: int, m: int, k: int, made: _Made) -> Moment:
    block, below = chain.blocks[i], chain.blocks[i - 1]
    fixed = k * below.backward_held_bytes + (m - 1 - k) * block.forward_held_bytes
    bytes_of = {
        (i, o): max(
            block.forward_held_bytes,
            option.forward_peak_bytes + (made.sums if k or made.begun else 0) + made.during(k),
            made.sums + made.after(k) + max(block.forward_frame_bytes, below.backward_held_bytes + made.new(k)),
        )
        for o, option in enumerate(block.options)
    }
    if k == 0 or k == m - 1:  # activations of the forward before still leave, or those of the next backward come
        _add_offloaded(bytes_of, chain, i - 1)
    return Moment(stage=stage, before=i - 1, fixed_bytes=fixed, bytes_of=bytes_of)


def _backward(chain: Chain, stage: int, i: int, m: int, k: int, made: _Made) -> Moment:
    block = chain.blocks[i]
    below = chain.blocks[i - 1].backward_held_bytes if i else LOSS_BYTES
    fixed = k * below + (m - 1 - k) * block.backward_held_bytes
    bytes_of: dict[tuple[int, int], int] = {}
    for o, option in enumerate(block.options):
        first = option.backward_first_peak_bytes
        peak = made.sums + option.backward_peak_bytes
        if not k and made.sums and first is not None:
            peak = max(first, peak) if made.begun else first
        kept, offloaded = kept_bytes(block, option), option.offloaded_bytes
        running = max(
            kept + offloaded + block.backward_held_bytes + peak + made.during(k),
            made.sums + made.after(k) + max(block.backward_frame_bytes, below + made.new(k)),
        )
        coming = offloaded if k < m - 1 else 0  # the next slice comes back while this one runs
        bytes_of[i, o] = (m - 1 - k) * kept + coming + running
    if k == m - 1 and i:
        _add_offloaded(bytes_of, chain, i - 1)
    return Moment(stage=stage, before=i - 1, fixed_bytes=fixed, bytes_of=bytes_of)


def _update(chain: Chain, stage: int, i: int, m: int, made: _Made, clip: bool) -> Moment:
    """The moment at the end of a backward stage: all slices wait for the next block while the optimizer works.

    With clipping this is only at the end of block 0's backward, for all tensors that the device updates.
    """
    held = m * (chain.blocks[i - 1].backward_held_bytes if i else LOSS_BYTES)
    norms = _norm_bytes(chain, i) if clip else 0
    updated: list[Tensor] = [] if i and clip else list(chain.tensors() if clip else chain.blocks[i].tensors)
    if i == 0:
        updated += chain.frame_tensors
    scratch = max((tensor.scratch_bytes for tensor in updated), default=0)
    bytes_of: dict[tuple[int, int], int] = {}
    if i:
        _add_offloaded(bytes_of, chain, i - 1)
    fixed = held + made.sums + made.after(m - 1) + made.new(m - 1) + scratch + norms
    return Moment(stage=stage, before=i - 1, fixed_bytes=fixed, bytes_of=bytes_of, update=True)


def _norm_bytes(chain: Chain, i: int) -> int:
    """Bytes of the norms of gradients that block i's backward completes; for block 0, also those of the frame."""
    complete = [t for t in chain.blocks[i].tensors if t.trainable and chain.users()[t.name][0] == i]
    return NORM_BYTES * (len(complete) + (0 if i else len(chain.frame_tensors)))


def _add_offloaded(bytes_of: dict[tuple[int, int], int], chain: Chain, i: int) -> None:
    for o, option in enumerate(chain.blocks[i].options):
        if option.offloaded_bytes:
            bytes_of[i, o] = bytes_of.get((i, o), 0) + option.offloaded_bytes
