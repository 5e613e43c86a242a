"""The hours in which a job may have the GPU."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add them: jobs of before have none."""
    op.add_column("jobs", sa.Column("window", sa.String(128)))
