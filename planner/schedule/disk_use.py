"""Computes what a run writes to its drives, and how much of their rated life that takes. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.errors import UserError
from planner.machine.drives import RATED_SIZES, rated_bytes
from planner.schedule.activation_turns import stored_activations
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan
from planner.units import counted

ACCEPT = "accept"
_UNITS = (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6))
MOST_WORN = 0.1
"""Share of a drive's rated life that a run may use without the job's explicit consent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """How a run uses its drives. `written_bytes`: bytes written in each step; as many are read. Of these are
    `activation_bytes` of activations, and `weight_bytes` of gradients and working copies of weights (the working copies
    are read in each pass). `again_bytes`: optimizer states that are read twice, because they are updated a step after
    their weight. `rated_bytes`: bytes that may be written until the first drive is worn out; 0: not known. `stated`:
    the job states that number; otherwise it is estimated from the drives' sizes. `accepted`: the job accepts any wear.
    `steps`: steps of the whole run; None: not known yet."""

    written_bytes: int
    rated_bytes: int = 0
    stated: bool = False
    accepted: bool = False
    steps: int | None = None
    activation_bytes: int = 0
    again_bytes: int = 0
    weight_bytes: int = 0

    @property
    def share(self) -> float | None:
        """The share of the drives' rated life that the run uses, from 0; None if it is not known."""
        return self.written_bytes * self.steps / self.rated_bytes if self.rated_bytes and self.steps else None

    @property
    def steps_of_life(self) -> int | None:
        """The number of steps after which the drives' rated bytes are written; None if those are not known."""
        return self.rated_bytes // self.written_bytes if self.rated_bytes else None

    def check(self) -> None:
        """Raise UserError "disk-worn" if the run uses more than a tenth of the drives' rated life and the job does not
        accept that."""
        if self.accepted or self.share is None or self.share <= MOST_WORN:
            return
        raise UserError(
            f"The run would wear the drive: more than {MOST_WORN:.0%} of its rated life.",
            code="disk-worn",
            numbers=tuple(self.lines()),
            hint="submit it with disk_rated_writes: accept, or with what the drive's data sheet has"
            " (disk_rated_writes: 1200TB), or with a larger cpu_budget",
        )

    def lines(self) -> Iterator[str]:
        """Lines of text for the user that describe the disk use, with sizes in powers of ten, as makers of drives
        count."""
        states = self.written_bytes - self.activation_bytes - self.weight_bytes
        twice = f" ({_decimal(self.again_bytes)} read twice)" if self.again_bytes else ""
        each = {
            f"optimizer states{twice}": states,
            "gradients and weights (read in each pass)": self.weight_bytes,
            "activations": self.activation_bytes,
        }
        *first, last = [f"{_decimal(size)} of {contents}" for contents, size in each.items() if size]
        yield f"each step reads and writes {' and '.join([', '.join(first)] * bool(first) + [last])}"
        if self.steps_of_life is None:
            yield "how much may be written to the drive is not known: its data sheet has it (TBW)"
            return
        if self.share is not None and self.steps is not None:
            written = _decimal(self.steps * self.written_bytes)
            share = f"{self.share:.2%}" if self.share >= 1e-4 else "less than 0.01%"
            writes = f"{counted(self.steps, 'step')} {'writes' if self.steps == 1 else 'write'} {written}"
            yield f"the run's {writes}, {share} of the drive's rated life"
        guessed = f"{RATED_SIZES} times its size; a data sheet's figure goes into disk_rated_writes"
        how = "as stated" if self.stated else guessed
        worn = counted(self.steps_of_life, "step")
        yield f"the drive is worn after {worn}: {_decimal(self.rated_bytes)} rated, {how}"


def disk_use(
    plan: Plan,
    chain: Chain,
    folders: Sequence[str],
    rated_writes: int | str | None,
    *,
    steps: int | None,
    parts: Callable[[], Sequence[float]] | None = None,
) -> DiskUse | None:
    """How a run of `steps` steps uses this machine's drives, with optimizer states or activations in `folders`; None if
    the run writes nothing there.

    `rated_writes`: the job's key `disk_rated_writes`. `parts`: called only if that is not a number; returns the
    relative share of the writes that each of `folders` gets; None: equal shares.
    """
    activations, weights = step_activation_bytes(plan, chain), step_weight_bytes(plan, chain)
    written = chain.stored_bytes(plan.cpu_updated()) + weights + activations
    if not written:
        return None
    stated = isinstance(rated_writes, int)
    rated = rated_writes if isinstance(rated_writes, int) else _rated(folders, parts)
    return DiskUse(
        written_bytes=written,
        rated_bytes=rated,
        stated=stated,
        accepted=rated_writes == ACCEPT,
        steps=steps,
        activation_bytes=activations,
        again_bytes=chain.stored_bytes(plan.trailing()),
        weight_bytes=weights,
    )


def step_activation_bytes(plan: Plan, chain: Chain) -> int:
    """Bytes of activations that a step of the plan writes to disk, all its rounds together."""
    return plan.rounds * sum(stored_activations(plan, chain).values())


def step_weight_bytes(plan: Plan, chain: Chain) -> int:
    """Bytes that a step writes to disk of tensors that are entirely there: their working copies once, and their
    gradients in each round."""
    stored = [t for t in chain.tensors() if t.wholly_on_disk and t.name in plan.cpu_updated()]
    return sum(t.bytes + plan.rounds * t.gradient_bytes for t in stored)


def most_written_bytes(
    folders: Sequence[str],
    rated_writes: int | str | None,
    *,
    steps: int | None,
    parts: Callable[[], Sequence[float]] | None = None,
) -> int | None:
    """Bytes that each of `steps` steps may write to disk before the job must accept the wear explicitly; None if the
    job accepts any wear, or if the limit is not known. The other arguments are those of `disk_use`."""
    if not steps or rated_writes == ACCEPT:
        return None
    rated = rated_writes if isinstance(rated_writes, int) else _rated(folders, parts)
    return int(MOST_WORN * rated) // steps if rated else None


def _rated(folders: Sequence[str], parts: Callable[[], Sequence[float]] | None) -> int:
    try:
        return rated_bytes([Path(folder) for folder in folders], None if parts is None else parts())
    except OSError:
        return 0


def _decimal(count: float) -> str:
    unit, factor = next(((unit, by) for unit, by in _UNITS if count >= by), ("kB", 1e3))
    return f"{count / factor:.3g} {unit}" if count < 999.5 * factor else f"{count / factor:.0f} {unit}"
