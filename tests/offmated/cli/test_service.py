"""`offmate service`: the unit that systemd gets, and what is left when systemd does not take it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from offmated.cli import main
from offmated.cli.service import quoted, start_installed, unit_file, unit_text
from offmated.paths import Paths
from planner.run.processes import Process
from tests.support.desks import short_paths

ODD = Path("/tmp/odd %n $HOME 'one' \"two\" \\three")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home whose `systemctl` writes down what it is asked, and refuses what stands in the file `refuse`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "systemctl"
    script.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\n'
        f'if grep -qxF -- "$2" {tmp_path}/refuse 2>/dev/null; then echo "not this one" >&2; exit 1; fi\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with short_paths() as paths:
        monkeypatch.setenv("OFFMATE_HOME", str(paths.state))
        yield tmp_path


def offmate(*words: str) -> tuple[int, str]:
    answer = CliRunner().invoke(main, words)
    return answer.exit_code, answer.output


def asked(home: Path) -> list[str]:
    return (home / "asked").read_text().splitlines()


def test_the_service_is_written_for_this_user_alone_started_and_removed(home: Path) -> None:
    code, said = offmate("service", "install")
    assert code == 0, said
    assert stat.S_IMODE(unit_file().stat().st_mode) == 0o600
    assert asked(home) == ["--user daemon-reload", "--user enable offmate.service", "--user restart offmate.service"]
    assert offmate("service", "install")[0] == 0, "again, as after an upgrade"
    code, said = offmate("service", "uninstall")
    assert code == 0, said
    assert not unit_file().exists()
    assert asked(home)[-2:] == ["--user disable --now offmate.service", "--user daemon-reload"]
    code, said = offmate("service", "uninstall")
    assert (code, "[no-service]" in said) == (2, True)


def test_up_has_systemd_start_an_installed_service_and_no_other(home: Path) -> None:
    systemctl = home / "bin" / "systemctl"
    daemon = f'if [ "$2" = start ]; then {sys.executable} -P -m offmated > {home}/log 2>&1 & fi\n'
    systemctl.write_text(systemctl.read_text() + daemon)
    assert offmate("service", "install")[0] == 0
    assert not start_installed(Paths.at(home / "another")), "the service is another installation's"
    assert "--user start offmate.service" not in asked(home)
    try:
        code, said = offmate("up")
        assert (code, said.startswith("The daemon runs")) == (0, True), said
        assert asked(home)[-1] == "--user start offmate.service"
        assert offmate("up")[1].startswith("The daemon was running already")
        assert asked(home).count("--user start offmate.service") == 1
        assert "ready" in (home / "log").read_text(), "it is the one that systemd has started"
    finally:
        assert offmate("down")[0] == 0


def test_what_systemd_refuses_leaves_what_was_there(home: Path) -> None:
    (home / "refuse").write_text("enable\n")
    code, said = offmate("service", "install")
    assert code == 1 and "not this one" in said and "[systemd-failed]" in said
    assert list(unit_file().parent.iterdir()) == []
    assert asked(home)[-3:] == [
        "--user disable --now offmate.service",
        "--user reset-failed offmate.service",
        "--user daemon-reload",
    ]
    unit_file().write_text("mine\n")
    assert offmate("service", "install")[0] == 1
    assert unit_file().read_text() == "mine\n"


def test_the_service_is_not_started_beside_a_daemon(home: Path) -> None:
    paths = Paths.from_environment()
    paths.create()
    paths.lock.write_text(str(Process.current()))
    (home / "refuse").write_text("is-active\n")
    code, said = offmate("service", "install")
    assert (code, "[already-running]" in said) == (2, True)
    assert not unit_file().exists()
    (home / "refuse").unlink()
    assert offmate("service", "install")[0] == 0, "the daemon is the service's own: it starts again"


def test_without_systemd_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, said = offmate("service", "install")
    assert (code, "[no-systemd]" in said) == (2, True)


def test_what_the_shell_had_set_reaches_the_daemon_and_passwords_do_not() -> None:
    paths = Paths.at(Path("/data/om"))
    text = unit_text(paths, {"PATH": "/a:/b", "HF_HOME": "/c", "HF_TOKEN": "secret", "HOME": "/home/me"})
    assert 'Environment="HF_HOME=/c"\nEnvironment="OFFMATE_HOME=/data/om"\nEnvironment="PATH=/a:/b"\n' in text
    assert "secret" not in text and "HOME=/home/me" not in text


def test_words_of_a_unit_are_quoted() -> None:
    assert quoted('a "b" \\ 100% $x') == '"a \\"b\\" \\\\ 100%% $x"'


def verified(unit: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", "verify", "--user", "--recursive-errors=no", unit],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(unit.parent)},
    )


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    python = tmp_path / "odd $HOME %n"
    python.symlink_to(sys.executable)
    unit = tmp_path / "offmate.service"
    text = unit_text(Paths.at(ODD), {"PATH": os.environ["PATH"], "HF_HOME": str(ODD)})
    unit.write_text(text.replace(quoted(sys.executable), quoted(str(python))))
    found = verified(unit)
    assert (found.returncode, "offmate.service" in found.stderr) == (0, False), found.stderr
    unit.write_text(text.replace("Type=notify", "Type=none-such"))
    assert "none-such" in verified(unit).stderr, "it does look"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_their_completions(shell: str) -> None:
    code, said = offmate("completions", shell)
    assert code == 0 and f"_OFFMATE_COMPLETE={shell}_complete" in said
