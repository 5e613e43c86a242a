"""Upgrades the database to the tables of this version, after making a copy of it."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config as AlembicConfig
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from offmated.jobs.database import bad_url, reading, sqlite_file
from offmated.paths import Paths
from planner.errors import UserError, first_line

log = logging.getLogger(__name__)


def scripts_folder() -> Path:
    """The folder with the database migrations: inside the package in a wheel, `alembic/` beside it in a checkout."""
    package = Path(__file__).parent.parent
    shipped = package / "migrations"
    return shipped if shipped.is_dir() else package.parent / "alembic"


def upgrade(engine: Engine, paths: Paths, scripts: Path | None = None) -> None:
    """Run those migrations in the folder `scripts` that the database of `engine` lacks; None: this version's. Raises
    UserError for a database written by a newer offmate, for one that cannot be reached or is damaged, and where the
    upgrade fails; the database then stays as it was."""
    if engine.dialect.name == "sqlite" and sqlite_file(engine.url) is None:
        raise bad_url("a database in memory is another one for every process")
    configuration = AlembicConfig()
    configuration.set_main_option("script_location", str(scripts or scripts_folder()).replace("%", "%%"))
    migrations = ScriptDirectory.from_config(configuration)
    with _told(engine):
        revision = _revision(engine)
    if revision == migrations.get_current_head():
        return
    if revision is not None and revision not in {script.revision for script in migrations.walk_revisions()}:
        raise UserError(
            "The database was made by a newer offmate.",
            numbers=(f"its revision is {revision}, this offmate knows {migrations.get_current_head()}",),
            hint=f"install the newer offmate again, or go back to a copy in {paths.backups}",
            code="database-too-new",
        )
    try:
        if revision is not None:
            _copy(engine, revision, paths)
        with engine.begin() as connection:
            configuration.attributes["connection"] = connection
            command.upgrade(configuration, "head")
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        raise UserError(
            "The database could not be upgraded, and is as it was.",
            numbers=(
                _name(engine),
                f"from {revision or 'nothing'} to {migrations.get_current_head()}",
                _cause(error),
                *_statement(error),
            ),
            hint="does its disk have room? otherwise go back to the version you had before, and report this",
            code="database-not-upgraded",
        ) from error


def _revision(engine: Engine) -> str | None:
    """The revision of the database; None for an empty one. Raises UserError `database-damaged` where SQLite finds
    damage, before anything is written."""
    with reading(engine).connect() as connection:
        if engine.dialect.name == "sqlite":
            findings = connection.exec_driver_sql("PRAGMA quick_check(3)").scalars().all()
            if findings != ["ok"]:
                raise _damaged(engine, "; ".join(map(str, findings)))
        return MigrationContext.configure(connection).get_current_revision()


@contextmanager
def _told(engine: Engine) -> Iterator[None]:
    """Turn the errors of the first query to a database into UserErrors."""
    try:
        yield
    except OperationalError as error:
        raise UserError(
            "The database cannot be used.",
            numbers=(_name(engine), _cause(error)),
            hint="does its folder exist? does its server run? see OFFMATE_DATABASE_URL and config.toml",
            code="database-unreachable",
        ) from None
    except SQLAlchemyError as error:
        raise _damaged(engine, _cause(error)) from None
    except (ValueError, TypeError) as error:  # raised by the driver because of a part of the URL
        raise bad_url(str(error)) from None


def _damaged(engine: Engine, finding: str) -> UserError:
    file = sqlite_file(engine.url)
    saves = f"sqlite3 {file} .recover | sqlite3 saved.db saves what can be read of it; " if file else ""
    return UserError(
        "The database is damaged.",
        numbers=(_name(engine), finding),
        hint=f"{saves}without it offmate up begins with an empty queue, and run folders stay where they are",
        code="database-damaged",
    )


def _name(engine: Engine) -> str:
    file = sqlite_file(engine.url)  # the file's name need not be valid in a URL
    return f"sqlite:///{file}" if file else engine.url.render_as_string()


def _cause(error: Exception) -> str:
    return first_line(error.orig if isinstance(error, DBAPIError) and error.orig is not None else error)


def _statement(error: Exception) -> tuple[str, ...]:
    statement = error.statement if isinstance(error, DBAPIError) else None
    return (statement.partition("\n")[0][:300],) if statement else ()


def _copy(engine: Engine, revision: str, paths: Paths) -> None:
    file = sqlite_file(engine.url)
    if file is None:
        log.warning("upgrading the database from %s without a copy: it is not an SQLite file", revision)
        return
    paths.backups.mkdir(mode=0o700, exist_ok=True)
    target = paths.backups / f"{Path(file).stem}-{revision}-{time.strftime('%Y%m%d-%H%M%S')}.db"
    try:
        with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(target)) as copy:
            source.backup(copy)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    log.info("copied the database to %s before upgrading it", target)
