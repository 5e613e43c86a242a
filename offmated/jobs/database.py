"""How a database is opened: SQLite with the care it needs, anything else as SQLAlchemy does."""

from __future__ import annotations

import sqlite3
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from planner.errors import Exit, UserError

BUSY_TIMEOUT_MS = 30_000
_ONLY_READS = "offmate_only_reads"
LAST_BROKEN_WAL = (3, 51, 2)  # SQLite 3.7.0 to 3.51.2 can corrupt a write-ahead log under two writers


def open_engine(url: str) -> Engine:
    """An engine for `url`. Raises UserError when the URL is not one, or its driver is not installed."""
    try:
        engine = create_engine(url, pool_pre_ping=not url.startswith("sqlite"))
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
        raise UserError(
            "The database URL cannot be used.",
            numbers=(str(error),),
            hint="write it like sqlite:////home/me/offmate.db, and install its driver if it needs one",
            code="bad-database-url",
            exit_code=Exit.USAGE,
        ) from None
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _prepare)
        event.listen(engine, "begin", _begin)
    return engine


def reading(engine: Engine) -> Engine:
    """`engine`, for transactions that only read."""
    return engine.execution_options(**{_ONLY_READS: True})


def sqlite_file(url: str) -> str | None:
    """The file of an SQLite URL; None for other databases and for one in memory."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or parsed.database in (None, "", ":memory:"):
        return None
    return parsed.database


def journal_mode(version: tuple[int, ...] = sqlite3.sqlite_version_info) -> str:
    """The journal this SQLite may be trusted with."""
    return "WAL" if version > LAST_BROKEN_WAL else "DELETE"


def _prepare(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # the driver must not begin transactions of its own, see _begin
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    cursor.execute(f"PRAGMA journal_mode = {journal_mode()}")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin(connection: Connection) -> None:
    """Take the write lock at once: a transaction that reads first and writes later fails when another wrote between.
    Those of `reading()` never write, and wait for nobody who does."""
    only_reads = connection.get_execution_options().get(_ONLY_READS, False)
    connection.exec_driver_sql("BEGIN" if only_reads else "BEGIN IMMEDIATE")
