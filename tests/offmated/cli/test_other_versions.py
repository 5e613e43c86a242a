"""Commands against daemons of other versions: what these answered, on a real socket."""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

import pytest
from click.testing import CliRunner, Result

from offmated.cli import main
from offmated.version import API, release
from planner.errors import Exit

COMMANDS = (["status"], ["status", "--json"], ["show", "1"], ["show", "2"], ["show", "6"], ["show", "1", "--json"])
_NO_FIGURES = {"step_s": None, "gpu_peak_bytes": None}
_JOB = {
    "id": 1,
    "name": "done",
    "state": "done",
    "run_dir": "/runs/1",
    "created_at": 1795331591.0,
    "started_at": 1795331614.0,
    "ended_at": 1795331657.0,
    "error": None,
    "reason": "",
    "output": "/runs/1/output",
    "plan": None,
    "progress": None,
    "predicted": _NO_FIGURES,
    "measured": _NO_FIGURES,
}
_ERROR = {"what": "No schedule fits.", "numbers": [], "hint": "", "code": "budget-too-small", "exit_code": 3}
_JOBS = [_JOB, _JOB | {"id": 2, "name": "does-not-fit", "state": "failed", "error": _ERROR}]
_SHOWN = {f"/jobs/{job['id']}": job for job in _JOBS}
EARLIER = {
    "no version and a plain list": {"/health": {"state": "running"}, "/jobs": _JOBS, **_SHOWN},
    "a version and jobs of fewer fields": {
        "/health": {"state": "running", "api": API - 1, "version": "0.0.9"},
        "/jobs": {"jobs": _JOBS, "total": 2, "before": 0},
        **_SHOWN,
    },
    "no jobs": {"/health": {"state": "running"}},
}
"""What a daemon of an earlier version may answer, by what it lacks."""


class Answering(BaseHTTPRequestHandler):
    """GET from a table, 404 for the rest."""

    answers: dict[str, Any]

    def do_GET(self) -> None:
        """Answer."""
        path = self.path.partition("?")[0]
        found = path in self.answers
        body = json.dumps(self.answers.get(path, {"detail": "Not Found"})).encode()
        self.send_response(200 if found else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def address_string(self) -> str:
        """Of a unix socket there is none."""
        return "a client"

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


class Daemon:
    """Stands where a daemon does, and answers what one of another version did."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.socket = home / "run" / "offmated.sock"
        self.socket.parent.mkdir()
        self._handler = type("Handler", (Answering,), {"answers": {}})
        self._server = ThreadingUnixStreamServer(str(self.socket), self._handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, answers: dict[str, Any]) -> None:
        """From now on."""
        self._handler.answers = answers  # type: ignore[attr-defined]

    def close(self) -> None:
        """End."""
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    home = Path(tempfile.mkdtemp(prefix="offmate-", dir="/tmp"))  # sockets have short paths
    monkeypatch.setenv("OFFMATE_HOME", str(home))
    daemon = Daemon(home)
    yield daemon
    daemon.close()
    shutil.rmtree(home)


def offmate(*words: str) -> Result:
    return CliRunner().invoke(main, words)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("version", EARLIER)
def test_a_daemon_of_an_earlier_version_is_understood_or_said_to_be_one(
    daemon: Daemon, version: str, words: list[str]
) -> None:
    daemon.answer(EARLIER[version])
    result = offmate(*words)
    if result.exit_code == 0:
        assert words == ["show", "1", "--json"]
        assert '"id": 1' in result.output
        return
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.stderr.splitlines()[0] in (
        "The daemon is of another version of offmate.",
        "The daemon could not answer.",
    ), result.stderr


def test_the_words_for_another_version_say_what_to_type(daemon: Daemon) -> None:
    daemon.answer(EARLIER["no version and a plain list"])
    result = offmate("show", "1")
    assert result.exit_code == 1
    assert result.stderr == (
        "The daemon is of another version of offmate.\n"
        "  the daemon is older, its API 1\n"
        f"  this command is {release()}, its API {API}\n"
        "  hint: offmate down, then offmate up; jobs go on from a checkpoint   [other-version]\n"
    )


def test_a_daemon_of_a_version_to_come_is_said_to_be_one(daemon: Daemon) -> None:
    daemon.answer({"/health": {"api": API + 1, "version": "9.0"}, "/jobs": {"rows": []}, "/jobs/1": []})
    for words in (["status"], ["show", "1"], ["logs", "1"], ["cancel", "1"]):
        result = offmate(*words)
        assert (result.exit_code, result.stderr.splitlines()[1].strip()) == (
            1,
            f"the daemon is 9.0, its API {API + 1}",
        ), words


def test_an_older_daemon_does_not_begin_from_the_start_a_job_that_is_to_go_on(daemon: Daemon) -> None:
    """It ignored fields that it did not know: to a plain `rerun` it says yes."""
    daemon.answer({"/health": {"api": 5, "version": "0.1"}, "/jobs/1/rerun": {"id": 2}})
    for words in (["--epochs", "5"], ["--max-steps", "900"]):
        result = offmate("rerun", "1", *words)
        assert (result.exit_code, result.stderr.splitlines()[0]) == (1, "The daemon is of another version of offmate.")
    assert offmate("rerun", "1", "--epochs", "nan").exit_code == Exit.USAGE


def test_our_own_mistakes_are_not_blamed_on_the_daemon(daemon: Daemon) -> None:
    daemon.answer({"/health": {"api": API, "version": "0.1"}, "/jobs": {}, "/queue": {}})
    assert isinstance(offmate("status").exception, KeyError)


def test_nobody_there_is_not_another_version(daemon: Daemon) -> None:
    daemon.close()
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(str(daemon.socket))
    assert "[daemon-not-running]" in offmate("status").stderr


def test_a_submission_to_an_older_daemon_is_not_followed_into_a_traceback(daemon: Daemon, tmp_path: Path) -> None:
    """It does not say whether the job is kept from its turn."""
    (tmp_path / "job.yaml").write_text("model: m")
    job = {
        "id": 1,
        "name": "m",
        "state": "waiting",
        "hold": None,
        "notes": [],
        "place": 1,
        "run_dir": "/runs/1",
        "plan": None,
        "progress": None,
        "reason": "",
    }
    daemon.answer({"/health": {"api": 6, "version": "0.1"}, "/jobs": job, "/jobs/1": job})
    result = offmate("submit", str(tmp_path / "job.yaml"), "--follow")
    assert (result.exit_code, result.stderr.splitlines()[0]) == (1, "The daemon is of another version of offmate.")
