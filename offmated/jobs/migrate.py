"""Brings the database to this version's tables, with a copy of it kept first."""

from __future__ import annotations

import logging
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from alembic import command
from alembic.config import Config as AlembicConfig
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from offmated.jobs.database import sqlite_file
from offmated.paths import Paths
from planner.errors import UserError

log = logging.getLogger(__name__)


def scripts_folder() -> Path:
    """The migrations: inside the package in a wheel, `alembic/` beside it in a checkout."""
    package = Path(__file__).parent.parent
    shipped = package / "migrations"
    return shipped if shipped.is_dir() else package.parent / "alembic"


def upgrade(engine: Engine, paths: Paths) -> None:
    """Run the migrations that `engine`'s database lacks. Raises UserError for one written by a newer offmate, and for
    one that cannot be reached."""
    configuration = AlembicConfig()
    configuration.set_main_option("script_location", str(scripts_folder()).replace("%", "%%"))
    scripts = ScriptDirectory.from_config(configuration)
    revision = _revision(engine)
    if revision == scripts.get_current_head():
        return
    if revision is not None:
        if revision not in {script.revision for script in scripts.walk_revisions()}:
            raise UserError(
                "The database was made by a newer offmate.",
                numbers=(f"its revision is {revision}, this offmate knows {scripts.get_current_head()}",),
                hint=f"install the newer offmate again, or go back to a copy in {paths.backups}",
                code="database-too-new",
            )
        _copy(engine, revision, paths)
    with engine.begin() as connection:
        configuration.attributes["connection"] = connection
        command.upgrade(configuration, "head")


def _revision(engine: Engine) -> str | None:
    try:
        with engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()
    except OperationalError as error:
        raise UserError(
            "The database cannot be used.",
            numbers=(engine.url.render_as_string(), str(error.orig)),
            hint="does its folder exist, does its server run? see OFFMATE_DATABASE_URL and config.toml",
            code="database-unreachable",
        ) from None


def _copy(engine: Engine, revision: str, paths: Paths) -> None:
    file = sqlite_file(engine.url.render_as_string(hide_password=False))
    if file is None:
        log.warning("upgrading the database from %s without a copy: it is not an SQLite file", revision)
        return
    paths.backups.mkdir(mode=0o700, exist_ok=True)
    target = paths.backups / f"{Path(file).stem}-{revision}-{time.strftime('%Y%m%d-%H%M%S')}.db"
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(target)) as copy:
        source.backup(copy)
    log.info("copied the database to %s before upgrading it", target)
