"""Checks that, in models whose rotary positions depend on row length, no row is computed by another row's length."""

from __future__ import annotations

from planner.errors import Exit, UserError
from planner.job.rope_border import RopeBorder
from planner.job.schema import Job
from planner.units import counted
from worker.data.padding import Rows


def check_sides(job: Job, rows: Rows, border: RopeBorder | None) -> None:
    """Raise UserError "rope-by-length" where rows, or documents of a packed row, would be computed by the length of
    others: all of a micro-batch get the frequencies of its longest one."""
    if border is None:
        return
    lengths = rows.layout.pieces[:, 1] if rows.layout.isolated else rows.lengths
    beyond = lengths > border.tokens
    alone = job.slice_rows == 1 and not rows.layout.isolated
    if not beyond.any() or (not border.by_length and (alone or beyond.all())):
        return
    what = "documents" if rows.layout.isolated else "rows"
    if border.by_length:
        then, least = "beyond it, the rope (dynamic) has other frequencies for every length, padding included", ""
    else:
        then = "beyond it, the rope (longrope) has other frequencies, and all of a micro-batch have the same"
        least = "; or per_device_train_batch_size: 1 with packing: false"
    raise UserError(
        f"The model computes {what} differently when others in the micro-batch are longer.", code="rope-by-length",
        exit_code=Exit.USAGE,
        numbers=(
            f"{int(beyond.sum())} of {len(beyond)} {what} are longer than {counted(border.tokens, 'token')}; {then}",
        ),
        hint=f"use max_length: {border.tokens}{least}",
    )  # fmt: skip
