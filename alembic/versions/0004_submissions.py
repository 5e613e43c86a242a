"""Adds a submission's key, its notes, and where its model goes; and an index in the order of the queue."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import yaml
from alembic import op

revision = "0004"
down_revision = "0003"

JOBS = sa.table("jobs", sa.column("id"), sa.column("state"), sa.column("run_dir"), sa.column("output_dir"))


def upgrade() -> None:
    """Add the columns and the index. Jobs that are not done, or can be tried again, keep their output folders."""
    op.add_column("jobs", sa.Column("submission_key", sa.String(64)))
    op.add_column("jobs", sa.Column("notes", sa.JSON(), nullable=False, server_default="[]"))
    op.add_column("jobs", sa.Column("output_dir", sa.Text()))
    op.create_index("ix_jobs_submission_key", "jobs", ["submission_key"], unique=True)
    op.create_index("ix_jobs_output_dir", "jobs", ["output_dir"])
    op.create_index("ix_jobs_queue", "jobs", ["state", "priority", "id"])
    op.drop_index("ix_jobs_state", "jobs")
    connection = op.get_bind()
    for row in connection.execute(sa.select(JOBS).where(JOBS.c.state != "done")).all():
        if (output_dir := _output_dir(Path(row.run_dir) / "resolved.yaml")) is not None:
            place = os.path.realpath(output_dir)
            connection.execute(sa.update(JOBS).where(JOBS.c.id == row.id).values(output_dir=place))


def _output_dir(resolved: Path) -> str | None:
    try:
        job: Any = yaml.safe_load(resolved.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # the job will fail before it writes anything
        return None
    found = job.get("output_dir") if isinstance(job, dict) else None
    return found if isinstance(found, str) else None
