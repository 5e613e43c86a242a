"""Alembic's entry: runs the migrations on the connection that offmated/jobs/migrate.py hands over."""

from __future__ import annotations

from alembic import context

from offmated.jobs import table
from planner.cache import tables

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=[table.metadata, tables.metadata],
    render_as_batch=True,  # SQLite alters a table by making it anew
)
with context.begin_transaction():
    context.run_migrations()
