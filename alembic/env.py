"""Runs the migrations, as Alembic's entry, on the connection that offmated/jobs/migrate.py hands over."""

from __future__ import annotations

from alembic import context

from offmated.jobs import table
from planner.cache import tables

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=[table.metadata, tables.metadata],
    render_as_batch=True,  # SQLite can alter a table only by making it anew
)
with context.begin_transaction():
    context.run_migrations()
