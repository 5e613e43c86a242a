"""Completes histories, so that the code can go on writing them.

A job that was running when its database was upgraded to 0002 got an empty history, but its end is written to its last
attempt. And attempts that ended before the reached step was kept have "step" for their checkpoint's step.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

JOBS = sa.table(
    "jobs",
    sa.column("id", sa.Integer()),
    sa.column("state", sa.String()),
    sa.column("started_at", sa.Float()),
    sa.column("attempts", sa.Integer()),
    sa.column("last_checkpoint_step", sa.Integer()),
    sa.column("history", sa.JSON()),
)


def upgrade() -> None:
    """Give running jobs their current attempt, and rename "step" to "checkpoint_step" in attempts. Earlier attempts
    from before 0002 stay unknown: nobody wrote down how they ended."""
    connection = op.get_bind()
    for row in connection.execute(sa.select(JOBS).where(JOBS.c.attempts > 0)).all():
        history = [_attempt(**attempt) for attempt in row.history or ()]
        if row.state == "running" and not (history and history[-1]["number"] == row.attempts):
            history.append(
                {
                    "number": row.attempts,
                    "started_at": row.started_at,
                    "from_step": row.last_checkpoint_step,
                    "ended_at": None,
                }
            )
        if history != row.history:
            connection.execute(sa.update(JOBS).where(JOBS.c.id == row.id).values(history=history))


def _attempt(**attempt: Any) -> dict[str, Any]:
    if "step" in attempt:
        attempt = {"reached_step": None, "checkpoint_step": attempt.pop("step")} | attempt
    return attempt
