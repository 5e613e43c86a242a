"""The commands, run as people run them, against a real daemon. Some tests take seconds: they start a daemon, its
broker and its workers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from offmated.cli import main
from offmated.version import release
from tests.offmated.jobs.conftest import CONFIG

COMMAND = [sys.executable, "-P", "-c", "from offmated.cli import main; main(prog_name='offmate')"]


class Shell:
    """A folder with a model, data and job files, and a state folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "OFFMATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}
        (folder / "tiny").mkdir()
        (folder / "tiny" / "config.json").write_text(CONFIG)
        (folder / "tiny" / "tokenizer.json").write_text("{}")
        (folder / "text.jsonl").write_text('{"text": "a"}\n')
        (folder / "job.yaml").write_text("# mine\nmodel: tiny\ndataset: text.jsonl\nrun_name: mine\n")
        (folder / "wrong.yaml").write_text("model: tiny\ndatset: text.jsonl\n")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`offmate words…` in the folder; a traceback is always a failure."""
        done = subprocess.run(
            [*COMMAND, *words], cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=120
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def json(self, *words: str) -> object:
        """What `offmate words… --json` says."""
        done = self.run(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@contextmanager
def shell_in_a_folder() -> Iterator[Shell]:
    folder = Path(tempfile.mkdtemp(prefix="offmate-"))  # sockets have short paths
    yield Shell(folder)
    shutil.rmtree(folder)


@pytest.fixture
def shell() -> Iterator[Shell]:
    with shell_in_a_folder() as built:
        yield built


@pytest.fixture(scope="module")
def running() -> Iterator[Shell]:
    """A shell whose daemon is up, for all tests that leave it so."""
    with shell_in_a_folder() as built:
        assert built.run("up").returncode == 0
        try:
            yield built
        finally:
            built.run("down")


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_the_version_is_told(flag: str) -> None:
    told = CliRunner().invoke(main, [flag], prog_name="offmate")
    assert told.exit_code == 0 and told.output == f"offmate, version {release()}\n"


def test_up_starts_one_daemon_and_down_ends_it(shell: Shell) -> None:
    assert shell.run("up").stdout == f"The daemon runs; its state is in {shell.folder / 'state'}\n"
    try:
        assert shell.run("up").stdout.startswith("The daemon was running already")
        assert shell.run("up", "--foreground").stderr.startswith("A daemon runs already.")
        assert shell.json("status") == []
        answer = shell.json("up")
        assert isinstance(answer, dict)
        assert (answer["started"], answer["state"]) == (False, "running")
        assert shell.run("up", "--foreground", "--json").returncode == 2
    finally:
        assert shell.run("down").stdout == "The daemon has ended.\n"
    assert shell.run("down").stdout == "The daemon was not running.\n"
    assert shell.json("down") == {"ended": False}


@pytest.mark.parametrize(
    "words", [["status"], ["show", "1"], ["logs", "1"], ["cancel", "1"], ["retry", "1"], ["submit", "job.yaml"]]
)
def test_without_a_daemon_commands_say_how_to_start_one(words: list[str], shell: Shell) -> None:
    done = shell.run(*words)
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr.splitlines()[0] == "The daemon is not running."
    assert done.stderr.splitlines()[-1] == "  hint: offmate up   [daemon-not-running]"


@pytest.mark.parametrize(
    "words",
    [
        ["show"],
        ["show", "one"],
        ["show", "0"],
        ["show", "99999999999999999999"],
        ["submit"],
        ["submit", "job.yaml", "--gpu-budget", "10XB"],
        ["submit", "job.yaml", "--gpu-budget", "0"],
        ["submit", "job.yaml", "--gpu-budget", "6"],
        ["submit", "job.yaml", "--cpu-budget", "99999999999TiB"],
        ["go"],
    ],
)
def test_wrong_words_exit_with_2(words: list[str], shell: Shell) -> None:
    assert shell.run(*words).returncode == 2


@pytest.mark.parametrize("command", ["show", "logs", "cancel", "retry"])
def test_what_is_no_number_of_a_job_is_told_in_one_sentence(command: str, shell: Shell) -> None:
    done = shell.run(command, "abc")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "abc is not the number of a job.\n  hint: offmate status lists the jobs with their numbers   [no-job-number]\n"
    )


def test_a_wrong_job_is_refused_and_nothing_is_enqueued(running: Shell) -> None:
    runs = running.folder / "state" / "runs"
    before = sorted(runs.iterdir())
    for words in (["submit", "wrong.yaml"], ["run", "wrong.yaml"], ["plan", "wrong.yaml"]):
        done = running.run(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("wrong.yaml has 2 mistakes.\n")
        assert "  line 2: datset: unknown key; did you mean dataset?\n" in done.stderr
    missing = running.run("submit", "nowhere.yaml")
    assert (missing.returncode, "Cannot read the job file nowhere.yaml" in missing.stderr) == (2, True)
    jobs = running.json("status")
    assert isinstance(jobs, list)
    assert sorted(runs.iterdir()) == before == sorted(runs / str(job["id"]) for job in jobs)


def test_a_job_that_is_not_there_exits_with_4(running: Shell) -> None:
    for command in ("show", "logs", "cancel", "retry"):
        for number in ("7", str(2**31 - 1)):
            done = CliRunner().invoke(main, [command, number], env=running.environment)
            assert (done.exit_code, done.stderr.splitlines()[0]) == (4, f"There is no job {number}.")


def test_budgets_of_the_command_line_stand_above_the_file(running: Shell) -> None:
    done = running.run("submit", "job.yaml", "--gpu-budget", "1GiB", "--cpu-budget", "1GB")
    assert done.returncode == 0, done.stderr
    number = max(job["id"] for job in running.json("status"))
    assert done.stdout.startswith(f"Job {number} (mine) is submitted, place 1 in the queue.\n")
    assert running.run("cancel", str(number)).returncode == 0, "nobody needs its plan"
    run = running.folder / "state" / "runs" / str(number)
    resolved = yaml.safe_load((run / "resolved.yaml").read_text())
    assert (resolved["gpu_budget"], resolved["cpu_budget"]) == (2**30, 10**9)
    assert (run / "job.yaml").read_text().startswith("# mine\nmodel: tiny\n")
    assert (running.folder / "job.yaml").read_text() == "# mine\nmodel: tiny\ndataset: text.jsonl\nrun_name: mine\n"


def test_help_names_every_command(shell: Shell) -> None:
    text = shell.run("--help").stdout
    for command in ("run", "submit", "plan", "status", "show", "logs", "cancel", "retry", "up", "down", "doctor"):
        assert f"\n  {command} " in text
        assert CliRunner().invoke(main, [command, "--help"]).exit_code == 0


def test_doctor_gives_a_verdict_for_each_thing_jobs_need(running: Shell) -> None:
    found = running.json("doctor")
    assert isinstance(found, list)
    verdicts = {check["name"]: check["verdict"] for check in found}
    assert verdicts.keys() >= {
        "python",
        "offmate",
        "memory",
        "disk",
        "sqlite",
        "broker",
        "daemon",
        "torch",
        "gpu",
        "cpu updates",
    }
    assert (verdicts["daemon"], verdicts["broker"], verdicts["torch"]) == ("ok", "ok", "ok")
    assert all(check["advice"] for check in found if check["verdict"] != "ok")
