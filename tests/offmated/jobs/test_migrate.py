"""Databases that cannot be used: each is one error for people, and stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from offmated.config import Config
from offmated.jobs.database import open_engine
from offmated.jobs.migrate import upgrade
from offmated.jobs.store import Store
from offmated.paths import Paths
from planner.errors import Exit, UserError
from tests.support.disks import no_room_beyond
from tests.support.next_version import REVISION, migrations_in


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(state=tmp_path / "state", runtime=Path("/tmp/unused-by-these-tests"))


def refused(url: str, paths: Paths, scripts: Path | None = None) -> UserError:
    with pytest.raises(UserError) as caught:
        upgrade(open_engine(Config.load(paths, {"OFFMATE_DATABASE_URL": url}).database_url), paths, scripts)
    return caught.value


def make_database(paths: Paths) -> None:
    """The database of this version in a new state folder, without jobs."""
    paths.runs.mkdir(parents=True)
    engine = open_engine(f"sqlite:///{paths.database}")
    upgrade(engine, paths)
    engine.dispose()


@pytest.mark.parametrize(
    "url",
    [
        "offmate.db",
        "://",
        "sqlite",
        "access://x",
        "sqlite://host/x.db",
        "postgresql+psycopg://me@localhost:port/x",
        "postgresql://[::1",
        "sqlite:///a\0b.db",
        "sqlite:////tmp/a\0b.db",
        "sqlite:////tmp/x.db?timeout=soon",
        "sqlite:////tmp/x.db?check_same_thread=maybe",
        "sqlite:////tmp/x.db?cached_statements=many",
        "nobodys+driver://localhost/x",
        "sqlite:///:memory:",
        "sqlite://",
        "sqlite:///",
        "x" * 4000,
    ],
)
def test_a_url_that_is_none_is_said_to_be_none(url: str, paths: Paths) -> None:
    paths.runs.mkdir(parents=True)
    error = refused(url, paths)
    assert (error.code, error.exit_code) == ("bad-database-url", Exit.USAGE)
    assert error.what == "The database URL cannot be used."


def test_a_state_folder_may_have_a_name_that_is_no_text(tmp_path: Path) -> None:
    paths = Paths(state=tmp_path / "caf\udce9", runtime=Path("/tmp/unused-by-these-tests"))
    paths.runs.mkdir(parents=True)
    store = Store(Config.load(paths, {}).database_url)
    upgrade(store.engine, paths)
    assert store.jobs() == []


def damage_all(file: Path) -> None:
    file.write_bytes(b"not a database at all\n" * 400)


def damage_header(file: Path) -> None:
    file.write_bytes(b"\0" * 100 + file.read_bytes()[100:])


def damage_pages(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))


def damage_end(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:5000])


@pytest.mark.parametrize("damage", [damage_all, damage_header, damage_pages, damage_end])
@pytest.mark.parametrize("version", ["earlier", "now"])
def test_a_damaged_database_is_found_before_it_is_written(
    version: str, damage: object, paths: Paths, tmp_path: Path
) -> None:
    assert callable(damage)
    make_database(paths)
    damage(paths.database)
    before = paths.database.read_bytes()
    error = refused("", paths, migrations_in(tmp_path / "next") if version == "earlier" else None)
    assert (error.code, error.what) == ("database-damaged", "The database is damaged.")
    assert error.numbers[0] == f"sqlite:///{paths.database}"
    assert f"sqlite3 {paths.database} .recover" in error.hint
    assert paths.database.read_bytes() == before


def test_an_upgrade_without_room_leaves_the_database_as_it_was_and_no_half_copy(paths: Paths, tmp_path: Path) -> None:
    make_database(paths)
    scripts = migrations_in(tmp_path / "next")
    before = paths.database.read_bytes()
    with no_room_beyond(len(before) // 2):
        error = refused("", paths, scripts)
    assert (error.code, error.numbers[1]) == ("database-not-upgraded", f"from initial to {REVISION}")
    assert paths.database.read_bytes() == before
    assert list(paths.backups.iterdir()) == []
    upgrade(open_engine(f"sqlite:///{paths.database}"), paths, scripts)
