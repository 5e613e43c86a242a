"""How a daemon starts where something is wrong, and what it makes is closed to others."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from offmated.cli import main
from offmated.cli.client import Client
from offmated.cli.launcher import start_in_background
from offmated.jobs.database import open_engine
from offmated.jobs.migrate import upgrade
from offmated.paths import Paths
from tests.support.daemons import PATIENCE_S, ROOT, house
from tests.support.desks import short_paths


@pytest.fixture
def paths() -> Iterator[Paths]:
    with short_paths() as paths:
        yield paths


def offmate(paths: Paths, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command as a person gives it."""
    return subprocess.run(
        [sys.executable, "-P", "-c", "from offmated.cli import main; main(prog_name='offmate')", *words],
        cwd=paths.state.parent,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        env={**os.environ, **paths.environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )


def garbage(paths: Paths) -> dict[str, str]:
    paths.state.mkdir()
    paths.database.write_bytes(b"not a database\n" * 1000)
    return {}


def half_gone(paths: Paths) -> dict[str, str]:
    paths.create()
    upgrade(open_engine(f"sqlite:///{paths.database}"), paths)
    paths.database.write_bytes(paths.database.read_bytes()[:9000])
    return {}


def port_that_is_none(paths: Paths) -> dict[str, str]:
    return {"OFFMATE_DATABASE_URL": "postgresql+psycopg://me@localhost:port/offmate"}


def timeout_that_is_none(paths: Paths) -> dict[str, str]:
    return {"OFFMATE_DATABASE_URL": f"sqlite:///{paths.state}/x.db?timeout=soon"}


def broker_that_is_none(paths: Paths) -> dict[str, str]:
    return {"OFFMATE_REDIS_URL": "redis://localhost:port"}


def settings_that_are_no_text(paths: Paths) -> dict[str, str]:
    paths.state.mkdir()
    paths.config.write_bytes(b"\xff\xfe")
    return {}


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (garbage, "database-damaged"),
        (half_gone, "database-damaged"),
        (port_that_is_none, "bad-database-url"),
        (timeout_that_is_none, "bad-database-url"),
        (broker_that_is_none, "bad-redis-url"),
        (settings_that_are_no_text, "bad-config"),
    ],
)
def test_what_is_wrong_at_the_start_is_said_in_a_few_lines(paths: Paths, wrong: object, code: str) -> None:
    assert callable(wrong)
    environment = wrong(paths)
    done = offmate(paths, "up", **environment)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "Traceback" not in done.stderr + paths.log.read_text()
    assert done.stderr.startswith("The daemon did not start.\n  it ended with exit code ")
    assert f"[{code}]" in done.stderr
    assert len(done.stderr.splitlines()) <= 8
    again = CliRunner().invoke(main, ["down"], env={**paths.environment(), **environment})
    assert (again.exit_code, again.stdout) == (0, "The daemon was not running.\n")


def test_a_number_in_the_environment_that_is_none_is_not_read(paths: Paths) -> None:
    """Uvicorn takes its count of processes from there, as other servers do."""
    done = offmate(paths, "up", WEB_CONCURRENCY="many", UVICORN_PORT="none", COLUMNS="wide")
    try:
        assert (done.returncode, done.stderr) == (0, "")
    finally:
        assert offmate(paths, "down").returncode == 0


def test_nothing_in_the_state_folder_is_open_to_others_whatever_the_umask(monkeypatch: pytest.MonkeyPatch) -> None:
    with house() as built:
        built.down()
        monkeypatch.setenv("PYTHONPATH", built.environment["PYTHONPATH"])
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        leftover = built.paths.runs / f".new-{'0' * 32}"
        leftover.mkdir()
        built.paths.log.unlink()
        before = os.umask(0)
        try:
            assert start_in_background(built.paths)
        finally:
            os.umask(before)
        try:
            number = built.submit("first", steps=2)
            assert built.wait_for(number, "done", "failed")["state"] == "done"
            assert not leftover.exists()
            open_to_others = {
                str(path.relative_to(built.paths.state)): oct(path.stat().st_mode)
                for path in (built.paths.state, *built.paths.state.rglob("*"))
                if stat.S_IMODE(path.stat().st_mode) & 0o077
            }
            assert open_to_others == {}
        finally:
            Client(built.paths).shutdown()
