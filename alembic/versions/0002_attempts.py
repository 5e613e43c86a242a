"""Adds the history of a job: what became of each attempt."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the column."""
    op.add_column("jobs", sa.Column("history", sa.JSON(), nullable=False, server_default="[]"))
