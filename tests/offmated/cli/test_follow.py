"""`offmate run`: following a job to its end, and leaving it. Planner and trainer are stand-ins. Some tests take
seconds: they start a daemon, its broker and its workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from offmated.cli.client import Client
from offmated.cli.follow import LOOKING, hand_in
from offmated.cli.output import console
from planner.run.folder import RunFolder
from tests.support.daemons import PATIENCE_S, House, house, until
from tests.support.texts import tiny_llama_folder, write_jsonl

# Where the tests themselves run in a shell's background, Ctrl-C is ignored, and would be by their children.
START = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from offmated.cli import main
main(prog_name='offmate')
"""
COMMAND = [sys.executable, "-P", "-c", START]


@pytest.fixture(scope="module")
def home() -> Iterator[House]:
    with house() as built:
        yield built


SECOND_PLAN = (
    "the first plan was an estimate, made without measuring, to tell early whether the job fits; a plan from measured "
    "blocks replaces it (a step: 100.0 ms by the estimate, 100.0 ms by measurements)"
)


def job_file(home: House, name: str, steps: int) -> Path:
    path = home.home / f"{name}.yaml"
    path.write_text(f"model: ./model\ndataset: text.jsonl\nrun_name: {name}\nmax_steps: {steps}\n")
    return path


def offmate(home: House, *words: str) -> subprocess.Popen[str]:
    """`offmate words…` as a shell would start it, Ctrl-C included."""
    return subprocess.Popen(
        [*COMMAND, *words], env=home.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_run_tells_states_plan_and_loss_and_ends_with_the_model_folder(home: House) -> None:
    process = offmate(home, "run", str(job_file(home, "short", 5)))
    said, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (0, "")
    lines = [line.rstrip() for line in said.splitlines()]
    assert lines[0].startswith("Job ") and lines[0].endswith(" (short) is submitted, place 1 in the queue.")
    assert "blocks       0 keep · 1 recompute · 2 keep" in lines
    assert [line for line in lines if "estimate" in line and "plan " not in line[:6]] == [SECOND_PLAN]
    assert lines[-3:-1] == ["step 5 of 5, loss 1.000", "done"]
    assert lines[-1].startswith("Job ") and lines[-1].endswith("/output")


def test_run_tells_evaluations_and_samples(home: House) -> None:
    process = offmate(home, "run", str(job_file(home, "evaluated", 5)))
    lines = process.communicate(timeout=PATIENCE_S)[0].splitlines()
    told = [line for line in lines if "eval loss" in line or "sample" in line]
    assert told == [
        "tried before the first step: an evaluation, samples",
        "step 2 of 5, eval loss 2.000",
        "step 2 of 5, sample: Why? ⟦So \N{REPLACEMENT CHARACTER}[31mit is⟧",
        "step 4 of 5, eval loss 1.000",
        "step 4 of 5, sample: Why? ⟦So \N{REPLACEMENT CHARACTER}[31mit is⟧",
    ]


def test_run_as_json_keeps_stdout_for_the_job(home: House) -> None:
    process = offmate(home, "run", str(job_file(home, "short", 3)), "--json")
    said, told = process.communicate(timeout=PATIENCE_S)
    job = json.loads(said)
    assert (process.returncode, job["state"], job["progress"]["step"]) == (0, "done", 3)
    assert "is submitted" in told


@pytest.mark.parametrize(("name", "code", "words"), [("wrong", 1, "exit code 1"), ("too-big", 3, "[budget-too-small]")])
def test_run_exits_with_the_jobs_exit_code(name: str, code: int, words: str, home: House) -> None:
    process = offmate(home, "run", str(job_file(home, name, 5)))
    said, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, errors
    assert words in said


def test_submit_follows_a_job_to_its_tenth_step_where_that_is_asked_and_the_gpu_is_free(home: House) -> None:
    file = job_file(home, "long", 100_000)
    script = offmate(home, "submit", str(file))
    said, _ = script.communicate(timeout=PATIENCE_S)
    assert (script.returncode, said.splitlines()[-1].split()[0]) == (0, "next"), said
    first = home.client.page(limit=1)["jobs"][0]["id"]
    home.wait_for_step(first, 1)

    waits = offmate(home, "submit", str(file), "--follow")
    said, errors = waits.communicate(timeout=PATIENCE_S)
    second = home.client.page(limit=1)["jobs"][0]["id"]
    assert (waits.returncode, errors) == (0, "")
    told = f"Job {second} is queued and starts by itself later: waits for job {first}."
    assert said.splitlines()[-1].startswith(told), said
    home.client.cancel(first)

    home.wait_for_step(second, 1)
    home.client.cancel(second)
    home.wait_for(second, "cancelled")
    follower = offmate(home, "submit", str(file), "--follow", "--json")
    said, told = follower.communicate(timeout=PATIENCE_S)
    job = json.loads(said)
    assert (follower.returncode, job["state"]) == (0, "running"), told
    assert job["progress"]["step"] >= 10
    assert "goes on" not in said
    home.client.cancel(job["id"])


def test_submit_ends_as_a_job_that_fails_in_its_first_steps(home: House) -> None:
    process = offmate(home, "submit", str(job_file(home, "wrong", 50)), "--follow")
    said, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (1, "")
    assert "exit code 1" in said


def test_ctrl_c_while_a_job_is_looked_at_takes_it_back(home: House) -> None:
    tiny_llama_folder(home.home / "chats-model")
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    write_jsonl(home.home / "chats.jsonl", [{"messages": talk}])
    file = home.home / "chats.yaml"
    file.write_text("model: ./chats-model\ndataset: chats.jsonl\nchat_template: chatml\nmax_steps: 100000\n")
    process = offmate(home, "submit", str(file))
    until(lambda: list(home.paths.runs.glob(".new-*")), "the daemon is at it")
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=PATIENCE_S)
    number = home.client.page(limit=1)["jobs"][0]["id"]
    assert (process.returncode, errors) == (130, "")
    assert said.splitlines()[0] == "Taking the job back.  Ctrl-C again leaves it in the queue: offmate status"
    assert said.splitlines()[1].startswith(f"Job {number} is "), said
    home.wait_for(number, "cancelled")


def test_what_takes_long_of_a_submission_is_said_where_a_person_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules[hand_in.__module__], "SLOW_S", 0.01)

    def handed_in() -> tuple[str, str]:
        hand_in(cast(Client, None), console(), lambda key: {"id": time.sleep(0.3)})
        said = capsys.readouterr()
        return said.out, said.err

    assert handed_in() == ("", ""), "a script"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert handed_in() == ("", f"{LOOKING}\n"), "with what it prints in a pipe"


def test_ctrl_c_leaves_the_job_running_and_says_so(home: House) -> None:
    before = home.client.page(limit=1)["total"]
    process = offmate(home, "run", str(job_file(home, "long", 100_000)))
    until(lambda: home.client.page(limit=1)["total"] > before, "the job is submitted")
    number = home.client.page(limit=1)["jobs"][0]["id"]
    home.wait_for_step(number, 1)
    assert process.stdout is not None
    assert any(line.startswith("running") for line in process.stdout), "it follows"
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, errors
    assert f"Job {number} goes on without you.  offmate logs -f {number} · offmate cancel {number}" in said
    assert "Traceback" not in errors
    step = home.job(number)["progress"]["step"]
    home.wait_for_step(number, step + 3)

    follower = offmate(home, "logs", "-f", str(number))
    cancel = offmate(home, "cancel", str(number), "--json")
    answer, _ = cancel.communicate(timeout=PATIENCE_S)
    assert json.loads(answer)["id"] == number
    log, _ = follower.communicate(timeout=PATIENCE_S)
    assert follower.returncode == 0
    assert "trainer here, from step 0" in log
    assert home.job(number)["state"] == "cancelled"


def test_a_job_that_two_shells_try_again_at_once_is_tried_once(home: House) -> None:
    number = home.submit("long", steps=100_000)
    home.wait_for_step(number, 1)
    home.client.cancel(number)
    home.wait_for(number, "cancelled")
    shells = [offmate(home, "retry", str(number)) for _ in range(2)]
    told = sorted(shell.communicate(timeout=PATIENCE_S)[::-1] for shell in shells)
    assert sorted(shell.returncode for shell in shells) == [0, 2], told
    assert told[1][0].startswith(f"Job {number} is ") and told[1][0].endswith("[not-to-retry]\n")
    home.wait_for(number, "running")
    home.client.cancel(number)
    assert [attempt["number"] for attempt in home.wait_for(number, "cancelled")["history"]] == [1, 2]


def test_events_of_a_job_are_told_as_they_come_one_object_a_line(home: House) -> None:
    number = home.submit("brief", steps=40)
    follower = offmate(home, "logs", "-f", "--json", str(number))
    said, errors = follower.communicate(timeout=PATIENCE_S)
    assert (follower.returncode, errors) == (0, "")
    told = [json.loads(line) for line in said.splitlines()]
    assert [event["event"] for event in told] == ["start", *40 * ["step"], "end"]
    once = offmate(home, "logs", "--json", str(number))
    assert [json.loads(line) for line in once.communicate(timeout=PATIENCE_S)[0].splitlines()] == told
    assert offmate(home, "logs", "--json", "999").wait(PATIENCE_S) == 4


def test_a_closed_pipe_ends_a_command_quietly(home: House) -> None:
    number = home.submit("again")
    home.wait_for(number, "done")
    read, write = os.pipe()
    process = subprocess.Popen(
        [*COMMAND, "logs", str(number)], env=home.environment, stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(read)
    os.close(write)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in errors


def test_down_says_for_which_job_it_waits_who_follows_is_told_and_logs_are_there_without_it() -> None:
    with house() as home:
        before = home.client.page(limit=1)["total"]
        followers = [offmate(home, "run", str(job_file(home, "long", 100_000)))]
        until(lambda: home.client.page(limit=1)["total"] > before, "the job is submitted")
        number = home.client.page(limit=1)["jobs"][0]["id"]
        followers += [offmate(home, "logs", "-f", *more, str(number)) for more in ((), ("--json",))]
        home.wait_for_step(number, 1)
        assert all(follower.stdout is not None and follower.stdout.readline() for follower in followers), "all follow"
        down = offmate(home, "down", "--json")
        said, told = down.communicate(timeout=PATIENCE_S)
        assert (down.returncode, told) == (0, f"Job {number} saves a checkpoint first.\n")
        assert json.loads(said) == {"ended": True}
        for follower in followers:
            _, told = follower.communicate(timeout=PATIENCE_S)
            assert (follower.returncode, told) == (
                69,
                f"The daemon has ended; job {number} goes on at its next start.\n"
                f"  hint: offmate up, then offmate logs -f {number}   [daemon-ended]\n",
            )

        run = RunFolder(home.paths.run_folder(number))
        asked = [offmate(home, "logs", *more, str(number)) for more in ((), ("--json",), ("-f",))]
        (log, where), (events, _), (followed, why) = (shell.communicate(timeout=PATIENCE_S) for shell in asked)
        assert [shell.returncode for shell in asked] == [0, 0, 69]
        assert log == followed == run.log.read_text()
        assert where == f"The daemon is not running. This is from {run.path}.\n"
        assert [json.loads(line) for line in events.splitlines()] == run.read_metrics()
        assert why.endswith("hint: offmate up   [daemon-not-running]\n")


@pytest.mark.parametrize("words", [("metrics",), ("logs", "--json")])
def test_lines_of_the_metrics_that_cannot_be_read_are_counted_on_stderr_and_the_others_shown(
    home: House, words: tuple[str, ...]
) -> None:
    number = home.submit("noisy", steps=4)
    home.wait_for(number, "done")
    shown, told = offmate(home, *words, str(number)).communicate(timeout=PATIENCE_S)
    assert told == ""
    metrics = RunFolder(home.paths.run_folder(number)).metrics
    first, *others = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join([first, b"\0\0\0\n", *others, b"half a li\n"]))
    process = offmate(home, *words, str(number))
    assert process.communicate(timeout=PATIENCE_S) == (
        shown,
        "2 lines of the job's metrics.jsonl could not be read and are left out; the first is line 2.\n",
    )
    assert process.returncode == 0
