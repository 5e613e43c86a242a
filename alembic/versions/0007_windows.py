"""Adds the window of a job: the hours in which it may have the GPU."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the column. Older jobs have no window."""
    op.add_column("jobs", sa.Column("window", sa.String(128)))
