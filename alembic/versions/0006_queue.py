"""Adds what people ask of the queue (places, labels, holds, what a job waits for) and of the whole machine."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the columns and the table. Jobs keep their order: their positions are their numbers."""
    op.add_column("jobs", sa.Column("position", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("label", sa.String(64)))
    op.add_column("jobs", sa.Column("hold", sa.String(16)))
    op.add_column("jobs", sa.Column("after_id", sa.Integer()))
    op.add_column("jobs", sa.Column("begin_at", sa.Float()))
    op.execute("UPDATE jobs SET position = id")
    op.drop_index("ix_jobs_queue", "jobs")
    op.create_index("ix_jobs_queue", "jobs", ["state", "priority", "position", "hold", "begin_at", "after_id"])
    op.create_index("ix_jobs_position", "jobs", ["position"])
    op.create_index("ix_jobs_label", "jobs", ["label"])
    op.create_table("wishes", sa.Column("name", sa.String(32), primary_key=True), sa.Column("since", sa.Float()))
