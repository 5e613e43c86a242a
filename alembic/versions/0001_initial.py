"""Creates the tables: jobs, wishes, and the planner's kept plans, measurements and answers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "initial"
down_revision = None


def upgrade() -> None:
    """Create the tables and their indices."""
    op.create_table(
        "jobs",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("stop_reason", sa.String(16)),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("run_dir", sa.Text(), nullable=False),
        sa.Column("owner", sa.String(128)),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("started_at", sa.Float()),
        sa.Column("ended_at", sa.Float()),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("crashes", sa.Integer(), nullable=False),
        sa.Column("last_checkpoint_step", sa.Integer()),
        sa.Column("exit_code", sa.Integer()),
        sa.Column("error", sa.JSON()),
        sa.Column("result", sa.JSON()),
        sa.Column("history", sa.JSON(), nullable=False, server_default="[]"),
        sa.Column("submission_key", sa.String(64)),
        sa.Column("notes", sa.JSON(), nullable=False, server_default="[]"),
        sa.Column("output_dir", sa.Text()),
        sa.Column("position", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("label", sa.String(64)),
        sa.Column("hold", sa.String(16)),
        sa.Column("after_id", sa.Integer()),
        sa.Column("begin_at", sa.Float()),
        sa.Column("window", sa.String(128)),
        sa.Column("fingerprint", sa.String(32)),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_jobs_submission_key", "jobs", ["submission_key"], unique=True)
    op.create_index("ix_jobs_output_dir", "jobs", ["output_dir"])
    op.create_index("ix_jobs_queue", "jobs", ["state", "priority", "position", "hold", "begin_at", "after_id"])
    op.create_index("ix_jobs_position", "jobs", ["position"])
    op.create_index("ix_jobs_label", "jobs", ["label"])
    op.create_index("ix_jobs_fingerprint", "jobs", ["fingerprint"])
    op.create_table("wishes", sa.Column("name", sa.String(32), primary_key=True), sa.Column("since", sa.Float()))
    op.create_table(
        "plans",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("key", sa.String(64), nullable=False, unique=True),
        sa.Column("model", sa.String(1024), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("solve_s", sa.Float(), nullable=False),
        sa.Column("hits", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_table(
        "measurements",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("key", sa.String(64), nullable=False, unique=True),
        sa.Column("device", sa.String(255), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("hits", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_table(
        "answers",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("key", sa.String(64), nullable=False, unique=True),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("hits", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=False),
    )
