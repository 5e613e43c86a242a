"""Adds the fingerprint, which tells whether two jobs do the same on the same data."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add the column. Older jobs have no fingerprint."""
    op.add_column("jobs", sa.Column("fingerprint", sa.String(32)))
    op.create_index("ix_jobs_fingerprint", "jobs", ["fingerprint"])
