"""A made-up migration, for tests: adds a column with how each job's last attempt ended, read from its history."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "endings"
down_revision = "initial"

JOBS = sa.table("jobs", sa.column("id", sa.Integer()), sa.column("history", sa.JSON()), sa.column("last_ending"))


def upgrade() -> None:
    """Add the column and its index, and fill it. It is null for jobs that have had no attempt or are in their first."""
    op.add_column("jobs", sa.Column("last_ending", sa.Text()))
    op.create_index("ix_jobs_last_ending", "jobs", ["last_ending"])
    connection = op.get_bind()
    for row in connection.execute(sa.select(JOBS.c.id, JOBS.c.history)).all():
        endings = [attempt["ending"] for attempt in row.history if attempt["ended_at"] is not None]
        if endings:
            connection.execute(sa.update(JOBS).where(JOBS.c.id == row.id).values(last_ending=endings[-1]))
