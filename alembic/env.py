"""Alembic's entry: runs the migrations on the connection that offmated/migrate.py hands over."""

from __future__ import annotations

from alembic import context

from offmated import models
from planner import cachetables

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=[models.metadata, cachetables.metadata],
    render_as_batch=True,  # SQLite alters a table by making it anew
)
with context.begin_transaction():
    context.run_migrations()
