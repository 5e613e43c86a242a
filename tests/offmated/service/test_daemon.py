"""The daemon as a whole: real processes, broker, database and workers; only planner and trainer are stand-ins. Some
tests take seconds: they start a daemon, its broker and its workers."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys

import pytest
import redis

from offmated.cli import launcher
from offmated.cli.launcher import start_in_background
from offmated.jobs.store import Store
from planner.errors import Exit, UserError
from planner.run.events import Piece
from planner.run.processes import Process
from tests.support.daemons import House, until


def horse(house: House, number: int) -> Process:
    """The work horse that works on a job."""
    owner = Store(f"sqlite:///{house.paths.database}").job(number).owner
    assert owner is not None
    return Process.parse(owner)


def test_a_submitted_job_is_planned_measured_trained_and_done(shared: House) -> None:
    number = shared.submit("first", steps=3)
    job = shared.wait_for(number, "done", "failed")
    assert (job["state"], job["name"], job["exit_code"], job["attempts"]) == ("done", "first", 0, 1)
    assert job["plan"]["options"] == {"keep": 2, "recompute": 1}
    assert job["plan"]["measured"] is True
    assert job["progress"]["step"] == job["progress"]["total_steps"] == 3
    assert job["predicted"] == {"step_s": 0.1, "gpu_peak_bytes": 900}
    assert job["measured"] == {"step_s": 0.02, "steps": 3, "gpu_peak_bytes": 800}
    assert job["output"] == str(shared.paths.run_folder(number) / "output")


def test_a_run_folder_holds_the_job_as_handed_in_and_as_understood(shared: House) -> None:
    number = shared.submit("files")
    folder = shared.paths.run_folder(number)
    assert (folder / "job.yaml").read_text().startswith("model: ./model\n")
    assert f"model: {shared.home / 'model'}\n" in (folder / "resolved.yaml").read_text()
    shared.wait_for(number, "done")


def test_sockets_and_folders_are_closed_to_other_users(shared: House) -> None:
    modes = {
        path: stat.S_IMODE(path.stat().st_mode)
        for path in (
            shared.paths.state,
            shared.paths.runtime,
            shared.paths.api_socket,
            shared.paths.broker_socket,
        )
    }
    assert list(modes.values()) == [0o700, 0o700, 0o600, 0o600]


def test_a_second_start_says_that_one_runs(shared: House) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "offmated"],
        cwd=shared.paths.state,
        env=shared.environment,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert shared.daemon is not None
    assert second.returncode == Exit.USAGE
    assert second.stderr == (
        "A daemon runs already.\n"
        f"  process {shared.daemon.pid}, state folder {shared.paths.state}\n"
        "  hint: offmate status, or offmate down to end it   [already-running]\n"
    )
    assert start_in_background(shared.paths) is False
    assert shared.client.running()


def test_a_job_that_cannot_be_run_as_written_leaves_nothing_behind(shared: House) -> None:
    before = [job["id"] for job in shared.client.jobs()], sorted(shared.paths.runs.iterdir())
    with pytest.raises(UserError) as caught:
        shared.client.submit("model: ./model\ndataset: text.jsonl\nmax_stepz: 3\n", str(shared.home))
    assert (caught.value.code, caught.value.exit_code) == ("unknown-key", Exit.USAGE)
    assert "did you mean max_steps?" in str(caught.value)
    assert ([job["id"] for job in shared.client.jobs()], sorted(shared.paths.runs.iterdir())) == before


def test_a_job_that_does_not_fit_fails_with_the_planners_words(shared: House) -> None:
    job = shared.wait_for(shared.submit("too-big"), "done", "failed")
    assert (job["state"], job["exit_code"], job["reason"]) == ("failed", 3, "No schedule fits this memory budget.")
    assert job["error"]["code"] == "budget-too-small"
    assert job["attempts"] == 0


def test_the_queue_goes_on_after_a_failure(shared: House) -> None:
    wrong, right = shared.submit("wrong"), shared.submit("right")
    assert shared.wait_for(right, "done", "failed")["state"] == "done"
    job = shared.job(wrong)
    assert (job["state"], job["exit_code"], job["error"]["code"]) == ("failed", 1, "trainer-failed")
    assert any("it went wrong" in line for line in job["error"]["numbers"])


def test_a_followed_log_ends_with_the_job(shared: House) -> None:
    number = shared.submit("logged", steps=10)
    log = "".join(shared.client.logs(number, follow=True))
    assert "planner here" in log
    assert '"plan"' not in log  # what the planner prints is for programs
    assert "trainer here, from step 0\n" in log
    assert log.count("the first plan was an estimate") == 1 and log.index("the first plan") < log.index("training, ")
    assert log.endswith("the trainer is done\n")
    assert log == "".join(shared.client.logs(number))


def test_events_can_be_read_from_where_one_stopped(shared: House) -> None:
    number = shared.submit("metered", steps=3)
    shared.wait_for(number, "done")
    found = shared.client.events(number)
    told, position = found.events, found.position
    assert [event["event"] for event in told] == ["start", "step", "step", "step", "end"]
    for end in (position, 10**18):
        assert shared.client.events(number, end) == Piece(events=[], position=end)
    first_line = (shared.paths.run_folder(number) / "metrics.jsonl").read_text().index("\n") + 1
    rest = shared.client.events(number, first_line)
    assert (rest.events, rest.position, rest.lines) == (told[1:], position, 4)
    assert shared.events(number) == told


@pytest.mark.parametrize("ask", ["job", "cancel", "events", "logs"])
def test_a_job_that_is_not_there_is_said_by_every_question(shared: House, ask: str) -> None:
    with pytest.raises(UserError) as caught:
        list(getattr(shared.client, ask)(999))
    assert (caught.value.code, caught.value.exit_code) == ("no-such-job", Exit.NO_SUCH_JOB)


def test_a_running_job_is_cancelled_without_a_checkpoint(shared: House) -> None:
    number = shared.submit("stubborn", steps=5000)
    shared.wait_for_step(number, 2)
    shared.client.cancel(number)
    job = shared.wait_for(number, "cancelled", "done")
    assert (job["state"], job["last_checkpoint_step"], job["stop_reason"]) == ("cancelled", None, "cancel")
    assert "".join(shared.client.logs(number)).endswith(" cancelled\n")
    assert shared.living_trainers(number) == []


def test_a_waiting_job_is_cancelled_at_once_and_its_turn_passes(shared: House) -> None:
    running, waiting = shared.submit("long", steps=5000), shared.submit("idle")
    shared.wait_for_step(running, 1)
    shared.wait_for(waiting, "waiting")
    assert shared.job(waiting)["reason"] == f"waits for job {running}"
    assert shared.client.cancel(waiting)["state"] == "cancelled"
    shared.client.cancel(running)
    shared.wait_for(running, "cancelled")
    assert shared.trainer_pids(waiting) == []


def test_a_job_being_planned_is_cancelled(shared: House) -> None:
    number = shared.submit("slow-plan")
    shared.wait_for(number, "planning")
    shared.client.cancel(number)
    assert shared.wait_for(number, "cancelled", "failed")["state"] == "cancelled"


def test_a_job_that_is_over_cannot_be_cancelled(shared: House) -> None:
    number = shared.submit("over", steps=1)
    shared.wait_for(number, "done")
    with pytest.raises(UserError) as caught:
        shared.client.cancel(number)
    assert str(caught.value) == f"Job {number} is over: done.\n  hint: offmate show {number}   [job-ended]"


def test_a_killed_trainer_goes_on_from_its_last_checkpoint(shared: House) -> None:
    number = shared.submit("held", steps=200, save_steps=10)
    shared.wait_until_held(number)
    (pid,) = shared.living_trainers(number)
    trainer = Process.of(pid)
    assert trainer is not None
    trainer.kill()
    until(lambda: len(shared.resumed_from(number)) == 2, "a second start")
    assert shared.resumed_from(number) == [None, 10], "it was held before the checkpoint of step 20"
    assert len(shared.trainer_pids(number)) == 2
    (killed, _) = shared.job(number)["history"]
    assert (killed["reached_step"], killed["checkpoint_step"]) == (20, 10)
    shared.client.cancel(number)
    shared.wait_for(number, "cancelled")


def test_a_cancelled_job_that_is_tried_again_goes_on_from_its_checkpoint_under_its_plan(shared: House) -> None:
    number = shared.submit("held", steps=60, save_steps=10)
    shared.wait_until_held(number)
    shared.client.cancel(number)
    step = shared.wait_for(number, "cancelled")["last_checkpoint_step"]
    shared.release(number)
    assert shared.client.retry(number)["state"] in ("waiting", "running")
    job = shared.wait_for(number, "done", "failed")
    assert (job["state"], job["attempts"], job["stop_reason"]) == ("done", 2, None)
    assert shared.resumed_from(number) == [None, step]
    assert [attempt["ending"] for attempt in job["history"]] == ["cancelled", "the trainer is done"]
    assert "".join(shared.client.logs(number)).count("planner here") == 2, "an estimate and a measurement, at first"
    with pytest.raises(UserError, match=f"Job {number} is done; only a job that failed"):
        shared.client.retry(number)


def test_a_job_that_is_tried_again_under_another_budget_is_planned_anew(shared: House) -> None:
    number = shared.submit("wrong", steps=5)
    shared.wait_for(number, "failed")
    shared.client.retry(number, gpu_budget=2**30)
    job = shared.wait_for(number, "failed", "done")
    assert job["attempts"] == 2
    assert "gpu_budget: 1073741824\n" in (shared.paths.run_folder(number) / "resolved.yaml").read_text()
    assert "".join(shared.client.logs(number)).count("planner here") == 4


def test_a_job_that_dies_three_times_at_one_place_has_failed(shared: House) -> None:
    number = shared.submit("mortal", steps=100)
    job = shared.wait_for(number, "failed", "done")
    assert (job["state"], job["attempts"], job["crashes"]) == ("failed", 3, 3)
    assert job["error"]["what"] == "The trainer died 3 times without a new checkpoint."
    assert (job["error"]["code"], job["error"]["hint"]) == ("crashed", "see the job's log")


def test_an_emptied_broker_loses_no_waiting_job(shared: House) -> None:
    numbers = [shared.submit(name, steps=30) for name in ("held", "flushed", "flushed")]
    shared.wait_until_held(numbers[0])
    with redis.Redis(unix_socket_path=str(shared.paths.broker_socket)) as broker:
        broker.flushall()
    shared.release(numbers[0])
    assert [shared.wait_for(number, "done", "failed")["state"] for number in numbers] == ["done"] * 3
    assert [shared.job(number)["attempts"] for number in numbers] == [1, 1, 1]


@pytest.mark.parametrize("name", ["broker", "plan-worker", "gpu-worker"])
def test_a_killed_child_is_started_again_and_jobs_still_run(shared: House, name: str) -> None:
    child = shared.child(name)
    child.kill()
    until(lambda: shared.child(name) != child, f"a new {name}")
    assert shared.wait_for(shared.submit("after", steps=1), "done", "failed")["state"] == "done"


@pytest.mark.parametrize("who", ["gpu-worker", "horse"])
def test_no_trainer_outlives_its_worker_and_the_job_goes_on(shared: House, who: str) -> None:
    number = shared.submit("held", steps=100, save_steps=10)
    shared.wait_until_held(number)
    (pid,) = shared.living_trainers(number)
    (shared.child("gpu-worker") if who == "gpu-worker" else horse(shared, number)).kill()
    until(lambda: Process.of(pid) is None, "the trainer is dead")
    until(lambda: len(shared.trainer_pids(number)) == 2, "a second trainer")
    assert len(shared.living_trainers(number)) <= 1
    shared.release(number)
    job = shared.wait_for(number, "done", "failed")
    assert (job["state"], job["attempts"]) == ("done", 2)


def test_sockets_that_are_deleted_are_made_again(shared: House) -> None:
    number = shared.submit("held", steps=100)
    log = shared.client.logs(number, follow=True)
    said = next(log)
    shutil.rmtree(shared.paths.runtime)
    assert launcher.runs(shared.paths), "a daemon whose socket is gone counts as running"
    shared.release(number)
    assert shared.wait_for(shared.submit("after", steps=1), "done", "failed")["state"] == "done"
    assert (said + "".join(log)).endswith("the trainer is done\n"), "who was connected stays so"
    sockets = (shared.paths.runtime, shared.paths.api_socket, shared.paths.broker_socket)
    assert [stat.S_IMODE(path.stat().st_mode) for path in sockets] == [0o700, 0o600, 0o600]
