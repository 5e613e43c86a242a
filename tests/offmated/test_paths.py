"""Where things are kept, and the daemon's settings."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from offmated.config import Config
from offmated.paths import Paths, traces_folder
from planner.errors import Exit, UserError
from tests.support.desks import short_paths

HOME = Path.home()


def test_everything_is_below_offmate_home_when_that_is_set() -> None:
    paths = Paths.from_environment(
        {"OFFMATE_HOME": "/data/om", "XDG_STATE_HOME": "/state", "XDG_RUNTIME_DIR": "/run/user/1"}
    )
    assert paths == Paths(state=Path("/data/om"), runtime=Path("/data/om/run"))


def test_sockets_do_not_lie_in_the_runtime_folder_which_goes_at_logout() -> None:
    paths = Paths.from_environment({"XDG_STATE_HOME": "/state", "XDG_RUNTIME_DIR": "/run/user/1"})
    assert paths == Paths(state=Path("/state/offmate"), runtime=Path("/state/offmate/run"))


def test_the_runtime_folder_serves_where_the_state_folder_is_too_deep() -> None:
    paths = Paths.from_environment({"XDG_STATE_HOME": f"/{'x' * 90}", "XDG_RUNTIME_DIR": "/run/user/1"})
    assert paths == Paths(state=Path(f"/{'x' * 90}/offmate"), runtime=Path("/run/user/1/offmate"))


def test_without_those_it_is_the_home_folder() -> None:
    state = HOME / ".local/state/offmate"
    assert Paths.from_environment({}) == Paths(state=state, runtime=state / "run")


def test_relative_xdg_folders_are_ignored() -> None:
    assert Paths.from_environment({"XDG_STATE_HOME": "here", "XDG_RUNTIME_DIR": "there"}) == Paths.from_environment({})


@pytest.mark.parametrize(
    "environment",
    [
        {"OFFMATE_HOME": "/data/om"},
        {"XDG_STATE_HOME": "/state", "XDG_RUNTIME_DIR": "/run/user/1"},
        {"XDG_STATE_HOME": f"/{'x' * 90}", "XDG_RUNTIME_DIR": "/run/user/1"},
        {"XDG_STATE_HOME": "/state"},
        {},
    ],
)
def test_a_child_process_comes_to_the_same_paths(environment: dict[str, str]) -> None:
    paths = Paths.from_environment(environment)
    assert Paths.from_environment({"OFFMATE_HOME": "/other", **paths.environment()}) == paths


def test_the_folders_are_closed_to_other_users(tmp_path: Path) -> None:
    paths = Paths(state=tmp_path / "s", runtime=tmp_path / "r")
    (tmp_path / "r").mkdir(mode=0o755)
    paths.create()
    for folder in (paths.state, paths.runtime, paths.runs, paths.broker):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_was_there_is_left_open_as_it_was(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    paths = Paths.at(tmp_path)
    paths.create()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    for folder in (paths.runtime, paths.runs, paths.broker):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_every_user_can_write_is_refused_unless_it_was_the_state_folder_before(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(UserError) as caught:
        Paths.at(tmp_path).create()
    assert (caught.value.code, caught.value.exit_code) == ("state-folder", Exit.USAGE)
    assert not list(tmp_path.iterdir())
    (tmp_path / "offmate.db").touch()
    Paths.at(tmp_path).create()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_what_is_made_is_closed_to_others_whatever_the_umask(umask: int) -> None:
    with short_paths() as short:
        paths = Paths.at(short.state / "share" / "state" / "offmate")
        before = os.umask(umask)
        try:
            paths.create()
        finally:
            os.umask(before)
        made = list(short.state.parent.rglob("*"))
        assert len(made) == 7
        assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}


def test_what_an_open_umask_left_before_is_closed(tmp_path: Path) -> None:
    paths = Paths.at(tmp_path)
    names = ("offmate.db", "offmate.db-wal", "daemon.log", "daemon.log.1", "daemon.lock", "config.toml")
    for folder in (paths.runs, paths.backups):
        folder.mkdir(mode=0o777)
        folder.chmod(0o777)
    for name in names:
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o666)
    (tmp_path / "my notes").touch()
    (tmp_path / "my notes").chmod(0o644)
    paths.create()
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in names} == {0o600}
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (paths.runs, paths.backups)} == {0o700}
    assert stat.S_IMODE((tmp_path / "my notes").stat().st_mode) == 0o644, "not offmate's"


@pytest.mark.parametrize("home", ["/dev/null/x", "~nobody-of-that-name/x"])
def test_a_state_folder_that_cannot_be_made_is_a_persons_error(home: str) -> None:
    with pytest.raises(UserError) as caught:
        Paths.from_environment({"OFFMATE_HOME": home}).create()
    assert str(caught.value).startswith("The state folder cannot be used.\n  ")
    assert caught.value.code == "state-folder"


def test_a_socket_path_the_system_cannot_take_is_a_persons_error() -> None:
    paths = Paths.at(Path("/tmp") / ("x" * 100))
    with pytest.raises(UserError) as caught:
        paths.create()
    assert caught.value.code == "socket-path-too-long"
    assert caught.value.numbers[1] == f"{len(str(paths.api_socket))} bytes, at most 107"
    assert not paths.state.exists()


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths.at(tmp_path)


def test_the_default_database_is_a_file_in_the_state_folder_and_the_broker_private(paths: Paths) -> None:
    assert Config.load(paths, {}) == Config(database_url=f"sqlite:///{paths.state}/offmate.db", redis_url=None)


def test_the_environment_stands_above_the_settings_file(paths: Paths) -> None:
    paths.config.write_text('database_url = "sqlite:///a.db"\nredis_url = "redis://a"\n')
    config = Config.load(paths, {"OFFMATE_REDIS_URL": "redis://b"})
    assert config == Config(database_url=f"sqlite:///{paths.state}/a.db", redis_url="redis://b")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("sqlite:///jobs/a.db", "sqlite:///{state}/jobs/a.db"),
        ("sqlite+pysqlite:///a.db?timeout=3", "sqlite+pysqlite:///{state}/a.db?timeout=3"),
        ("sqlite:////data/a.db", "sqlite:////data/a.db"),
        ("sqlite:///:memory:", "sqlite:///:memory:"),
        ("postgresql+psycopg://me@localhost/offmate", "postgresql+psycopg://me@localhost/offmate"),
    ],
)
def test_a_relative_database_file_is_the_same_for_every_process(paths: Paths, written: str, meant: str) -> None:
    assert Config.load(paths, {"OFFMATE_DATABASE_URL": written}).database_url == meant.format(state=paths.state)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('redis_ulr = "redis://a"', "unknown key redis_ulr\n  hint: did you mean redis_url?"),
        ("redis_url = 3", "redis_url is 3, not a text in quotes"),
        ("redis_url = 'caf\udce9'", "'utf-8' codec can't decode byte 0xe9"),
        ("redis_url = ,", "Invalid value (at line 1, column 13)"),
    ],
)
def test_mistakes_in_the_settings_file_are_named(paths: Paths, text: str, said: str) -> None:
    paths.config.write_text(text, errors="surrogateescape")
    with pytest.raises(UserError) as caught:
        Config.load(paths, {})
    assert str(caught.value).startswith(f"The settings file cannot be used.\n  {paths.config}\n  {said}")
    assert (caught.value.code, caught.value.exit_code) == ("bad-config", Exit.USAGE)


def test_traces_lie_in_the_cache_folder_or_with_all_else_in_one_home() -> None:
    assert traces_folder({"OFFMATE_HOME": "/data/om"}) == Path("/data/om/traces")
    assert traces_folder({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/offmate/traces")
    assert traces_folder({}) == Path.home() / ".cache" / "offmate" / "traces"
