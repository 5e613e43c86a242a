"""Opens a database: SQLite with the settings it needs, any other as SQLAlchemy does by default."""

from __future__ import annotations

import logging
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from planner.errors import Exit, UserError

log = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""The seconds to wait for a busy database: fewer than clients wait for their answer, so that they get one."""
WORKERS_PATIENCE_S = 600.0
"""The seconds for which workers wait for a busy database: they record how a job ended, and nobody waits for them."""
_ONLY_READS = "offmate_only_reads"
_SOUND_LOGS = ((3, 44, 6), (3, 50, 7), (3, 51, 3))
"""The versions of SQLite with a repaired log: SQLite from 3.7.0 on can corrupt a write-ahead log under two writers.
These patch releases of their series, later ones of the same series, and all series after the last do not
(sqlite.org/wal.html, "The WAL-Reset Bug")."""


def open_engine(url: str, *, patience_s: float = PATIENCE_S) -> Engine:
    """A SQLAlchemy engine for the database `url`. Writers wait `patience_s` seconds for their turn, readers never
    longer than `PATIENCE_S`. Raises UserError when the URL is not valid, or its driver is not installed."""
    try:
        parsed = make_url(url)
        memory = parsed.get_backend_name() == "sqlite" and sqlite_file(url) is None
        # As many connections as there are threads: a thread without one would wait for others that wait, too.
        pool: dict[str, Any] = {} if memory else {"max_overflow": -1}
        engine = create_engine(parsed, pool_pre_ping=parsed.get_backend_name() != "sqlite", **pool)
    except (ArgumentError, NoSuchModuleError, ImportError, ValueError, TypeError) as error:
        raise bad_url(str(error)) from None
    if engine.dialect.name == "sqlite":

        def begin(connection: Connection) -> None:
            _begin(connection, patience_s)

        event.listen(engine, "connect", _prepare)
        event.listen(engine, "begin", begin)
    return engine


def bad_url(why: str) -> UserError:
    """Make the UserError for a database URL that cannot be used; `why` says what is wrong with it."""
    return UserError(
        "The database URL cannot be used.",
        numbers=(why,),
        hint="write it like sqlite:////home/me/offmate.db, and install its driver if it needs one",
        code="bad-database-url",
        exit_code=Exit.USAGE,
    )


def reading(engine: Engine) -> Engine:
    """A variant of `engine` whose transactions only read."""
    return engine.execution_options(**{_ONLY_READS: True})


def sqlite_file(url: str | URL) -> str | None:
    """The path of the file that an SQLite URL names; None for other databases and for a database in memory."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or parsed.database in (None, "", ":memory:"):
        return None
    return parsed.database


def has_sound_log(version: tuple[int, int, int] = sqlite3.sqlite_version_info) -> bool:
    """Whether the write-ahead log of this SQLite `version` is free of a known fault, so that it may be used."""
    patches = {sound[:2]: sound[2] for sound in _SOUND_LOGS}
    return version > _SOUND_LOGS[-1] or version[2] >= patches.get(version[:2], version[2] + 1)


def choose_journal(engine: Engine) -> None:
    """Set the journal mode of an SQLite file, and log which it is and why. It is the write-ahead log, with which
    readers and a writer do not wait for each other, if this SQLite and the file's disk can be trusted with it. Called
    at the daemon's start: the file keeps its journal mode, whoever opens it."""
    file = sqlite_file(engine.url)
    if file is None:
        return
    version = ".".join(map(str, sqlite3.sqlite_version_info))
    if not has_sound_log():
        wanted, why = "DELETE", f"SQLite {version} can lose what two writers write to its log; 3.51.3 does not"
    elif (trouble := _log_trouble(Path(file).parent)) is not None:
        wanted, why = "DELETE", f"the disk of {file} cannot have a log: {trouble}"
    else:
        wanted, why = "WAL", f"SQLite {version}"
    try:
        with closing(sqlite3.connect(file, timeout=PATIENCE_S)) as connection:
            (got,) = connection.execute(f"PRAGMA journal_mode = {wanted}").fetchone()
    except sqlite3.Error as error:  # another process has it open; a file that cannot be opened fails when it is used
        log.warning("the database keeps its journal: %s", error)
        return
    log.info("the database's journal is %s: %s", str(got).upper(), why)


def _log_trouble(folder: Path) -> str | None:
    """Why SQLite cannot have a write-ahead log in `folder`, in its own words; None where it can. Two connections try
    one there in a file of their own, as it is too late to ask once the database itself is changed. Network and foreign
    file systems lack the shared memory."""
    try:
        with (
            tempfile.TemporaryDirectory(prefix=".journal-", dir=folder) as place,
            closing(sqlite3.connect(f"{place}/try.db", timeout=0)) as one,
            closing(sqlite3.connect(f"{place}/try.db", timeout=0)) as other,
        ):
            (got,) = one.execute("PRAGMA journal_mode = WAL").fetchone()
            if got != "wal":
                return f"it keeps the journal {got}"
            with one:
                one.execute("CREATE TABLE tried (x)")
            other.execute("SELECT count(*) FROM tried").fetchone()
    except (sqlite3.Error, OSError) as error:
        return str(error)
    return None


def _prepare(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # the driver must not begin transactions of its own, see _begin
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {1000 * PATIENCE_S:.0f}")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin(connection: Connection, patience_s: float) -> None:
    """Begin a transaction, with the write lock at once: a transaction that reads first and writes later fails when
    another one wrote in between. Transactions of `reading()` never write, and with a write-ahead log they do not wait
    for writers."""
    only_reads = connection.get_execution_options().get(_ONLY_READS, False)
    if patience_s != PATIENCE_S:
        waits_s = min(patience_s, PATIENCE_S) if only_reads else patience_s
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {1000 * waits_s:.0f}")
    connection.exec_driver_sql("BEGIN" if only_reads else "BEGIN IMMEDIATE")
