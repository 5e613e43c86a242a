"""The daemon as a whole: real processes, broker, database and workers; only planner and trainer are stand-ins."""

from __future__ import annotations

import io
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import redis
from rich.console import Console

from offmated.cli import client as client_module
from offmated.cli import launcher
from offmated.cli.client import Client
from offmated.cli.follow import events, follow
from offmated.cli.launcher import start_in_background
from offmated.jobs.store import Store
from offmated.paths import Paths
from planner.errors import Exit, UserError
from planner.run.processes import Process
from tests.support.daemons import HELD_AT, PATIENCE_S, ROOT, House, house, until


@pytest.fixture(scope="module")
def shared() -> Iterator[House]:
    """One daemon for the tests that leave it as it was."""
    with house() as built:
        yield built


@pytest.fixture
def own() -> Iterator[House]:
    """A daemon for tests that end or hurt it."""
    with house() as built:
        yield built


def horse(house: House, number: int) -> Process:
    """The work horse that works on a job."""
    owner = Store(f"sqlite:///{house.paths.database}").job(number).owner
    assert owner is not None
    return Process.parse(owner)


def resumed_from(house: House, number: int) -> list[int | None]:
    """The checkpoints from which the job's trainers started."""
    return [event["resumed_from"] for event in house.events(number) if event["event"] == "start"]


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
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (
        shared.paths.state, shared.paths.runtime, shared.paths.api_socket, shared.paths.broker_socket,
    )}  # fmt: skip
    assert list(modes.values()) == [0o700, 0o700, 0o600, 0o600]


def test_a_second_start_says_that_one_runs(shared: House) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "offmated"], cwd=shared.paths.state, env=shared.environment, capture_output=True,
        text=True, timeout=30,
    )  # fmt: skip
    assert shared.daemon is not None
    assert second.returncode == Exit.FAILED
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
    assert log.endswith("the trainer is done\n")
    assert log == "".join(shared.client.logs(number))


def test_events_can_be_read_from_where_one_stopped(shared: House) -> None:
    number = shared.submit("metered", steps=3)
    shared.wait_for(number, "done")
    told, position = shared.client.events(number)
    assert [event["event"] for event in told] == ["start", "step", "step", "step", "end"]
    assert shared.client.events(number, position) == ([], position)
    assert shared.client.events(number, 10**18) == ([], 10**18)
    first_line = (shared.paths.run_folder(number) / "metrics.jsonl").read_text().index("\n") + 1
    assert shared.client.events(number, first_line) == (told[1:], position)
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
    until(lambda: len(resumed_from(shared, number)) == 2, "a second start")
    assert resumed_from(shared, number) == [None, 10], "it was held before the checkpoint of step 20"
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
    assert resumed_from(shared, number) == [None, step]
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
    assert "out-of-memory" in job["error"]["hint"]


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


def test_without_a_socket_for_the_api_jobs_go_on_and_are_saved_at_the_end(own: House) -> None:
    first, second = (own.submit("held", steps=60) for _ in range(2))
    own.wait_until_held(first)
    own.paths.api_socket.unlink()
    own.paths.api_socket.mkdir()
    own.release(first)
    store = Store(f"sqlite:///{own.paths.database}")
    until(lambda: own.living_trainers(second), "the second job runs")
    assert own.daemon is not None
    own.daemon.terminate()
    assert own.daemon.wait(PATIENCE_S) == 0, own.log()
    rows = [store.job(number) for number in (first, second)]
    assert [(row.state, row.stop_reason) for row in rows] == [("done", None), ("waiting", "shutdown")]
    assert own.log().count("listening did not work") == 1


def test_down_saves_a_running_job_which_goes_on_after_up(own: House) -> None:
    number = own.submit("held", steps=60)
    idle = own.submit("next", steps=1)
    own.wait_until_held(number)
    own.down()
    assert not own.paths.api_socket.exists()
    assert own.living_trainers(number) == []
    row = Store(f"sqlite:///{own.paths.database}").job(number)
    assert (row.state, row.stop_reason, row.exit_code, row.crashes) == ("waiting", "shutdown", 75, 0)
    assert row.last_checkpoint_step == HELD_AT
    own.up()
    job = own.wait_for(number, "done", "failed")
    assert (job["state"], job["attempts"]) == ("done", 2)
    assert resumed_from(own, number) == [None, HELD_AT]
    own.wait_for(idle, "done")


def test_a_killed_daemon_leaves_nothing_running_and_its_jobs_go_on(own: House) -> None:
    number = own.submit("held", steps=60, save_steps=10)
    own.wait_until_held(number)
    children = [own.child(name) for name in ("broker", "plan-worker", "gpu-worker")]
    (pid,) = own.living_trainers(number)
    assert own.daemon is not None
    own.daemon.kill()
    own.daemon.wait()
    until(lambda: not any(child.alive() for child in children) and Process.of(pid) is None, "all are gone")
    own.release(number)
    own.up()
    job = own.wait_for(number, "done", "failed")
    assert (job["state"], job["attempts"], job["crashes"]) == ("done", 2, 0)


def test_a_damaged_file_of_the_broker_does_not_keep_the_daemon_from_starting(own: House) -> None:
    own.down()
    folder = own.paths.broker / "appendonlydir"
    for file in folder.iterdir():
        file.write_bytes(b"not a command\r\n" * 10)
    own.up()
    assert own.wait_for(own.submit("after", steps=1), "done", "failed")["state"] == "done"


def test_ctrl_c_at_a_daemon_in_front_stops_it_in_good_order(own: House) -> None:
    number = own.submit("front", steps=5000)
    own.wait_for_step(number, 2)
    assert own.daemon is not None
    own.daemon.send_signal(signal.SIGINT)
    assert own.daemon.wait(PATIENCE_S) == 0
    row = Store(f"sqlite:///{own.paths.database}").job(number)
    assert (row.state, row.exit_code) == ("waiting", 75)


def test_a_second_signal_does_not_wait_for_checkpoints(own: House) -> None:
    number = own.submit("stubborn", steps=5000)  # its trainer ignores the first
    own.wait_for_step(number, 2)
    assert own.daemon is not None
    own.daemon.send_signal(signal.SIGTERM)
    until(lambda: own.client.health()["state"] == "stopping", "the daemon is stopping")
    own.daemon.send_signal(signal.SIGTERM)
    assert own.daemon.wait(PATIENCE_S) == 0
    row = Store(f"sqlite:///{own.paths.database}").job(number)
    assert (row.state, row.last_checkpoint_step, row.crashes) == ("waiting", None, 0)
    assert own.living_trainers(number) == []


def test_up_waits_for_a_daemon_that_is_stopping_and_starts_the_next(
    own: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = own.submit("stubborn", steps=5000)  # its trainer stops when it is let go
    own.wait_for_step(number, 2)
    monkeypatch.setenv("PYTHONPATH", own.environment["PYTHONPATH"])
    assert own.daemon is not None
    own.client.shutdown(wait=False)
    assert own.client.health()["state"] == "stopping"
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(start_in_background, own.paths)
        own.release(number)
        assert started.result() is True
    assert own.daemon.wait(PATIENCE_S) == 0
    health = own.client.health()
    assert (health["state"], health["pid"] != own.daemon.pid) == ("running", True)
    own.client.cancel(number)
    own.wait_for(number, "cancelled")
    own.client.shutdown()


def test_a_daemon_that_hangs_without_a_socket_is_named(own: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "OTHER_PATIENCE_S", 0.5)
    monkeypatch.setenv("PYTHONPATH", own.environment["PYTHONPATH"])
    assert own.daemon is not None
    own.daemon.send_signal(signal.SIGSTOP)
    own.paths.api_socket.unlink()
    for reach in (start_in_background, launcher.runs):
        with pytest.raises(UserError) as caught:
            reach(own.paths)
        assert caught.value.code == "daemon-silent"
        assert caught.value.numbers[0] == f"process {own.daemon.pid}, socket {own.paths.api_socket}"
        assert f"kill {own.daemon.pid}, then offmate up" in caught.value.hint
    own.daemon.send_signal(signal.SIGCONT)
    monkeypatch.undo()
    assert launcher.runs(own.paths), "it listens anew"


def test_a_daemon_that_hangs_is_not_called_away_and_nothing_is_told_twice(
    own: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = own.submit("held", steps=100)
    own.wait_until_held(number)
    monkeypatch.setattr(client_module, "PATIENCE_S", 0.5)
    told = events(Client(own.paths), number, following=True)
    assert any(event.get("step") == HELD_AT for event in told)
    assert own.daemon is not None
    own.daemon.send_signal(signal.SIGSTOP)
    with pytest.raises(UserError, match="daemon-silent"):
        next(told)
    with pytest.raises(UserError) as caught:
        Client(own.paths).running()
    own.daemon.send_signal(signal.SIGCONT)
    assert (caught.value.code, caught.value.numbers[1]) == ("daemon-silent", "no answer within 0.5 s")
    monkeypatch.undo()
    until(Client(own.paths).running, "it answers again")


def test_following_goes_on_after_a_daemon_that_did_not_answer(own: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PATIENCE_S", 0.5)
    daemon, number = own.daemon, own.submit("followed", steps=50)
    assert daemon is not None
    daemon.send_signal(signal.SIGSTOP)
    waker = threading.Timer(1.5, daemon.send_signal, (signal.SIGCONT,))
    waker.start()
    assert follow(Client(own.paths), number, Console(file=io.StringIO()))["state"] == "done"
    waker.join()


def test_a_daemon_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with tempfile.TemporaryDirectory(prefix="offmate-", dir="/tmp") as home:
        paths = Paths.at(Path(home))
        paths.config.write_text("redis_ulr = 'redis://localhost'\n")
        with pytest.raises(UserError) as caught:
            start_in_background(paths)
        assert str(caught.value) == (
            "The daemon did not start.\n"
            "  it ended with exit code 2\n"
            "  The settings file cannot be used.\n"
            f"    {paths.config}\n"
            "    unknown key 'redis_ulr'\n"
            "    hint: did you mean redis_url?   [bad-config]\n"
            f"  hint: the log is {paths.log}   [daemon-did-not-start]"
        )


def test_a_log_that_has_grown_long_is_put_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LOG_BYTES", 10)
    with tempfile.TemporaryDirectory(prefix="offmate-", dir="/tmp") as home:
        paths = Paths.at(Path(home))
        paths.config.write_text("redis_ulr = 'redis://localhost'\n")
        paths.log.write_text("a long story\n")
        with pytest.raises(UserError):
            start_in_background(paths)
        assert (Path(home) / "daemon.log.1").read_text() == "a long story\n"
        assert "a long story" not in paths.log.read_text()


def test_two_starts_at_once_give_one_daemon_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with tempfile.TemporaryDirectory(prefix="offmate-", dir="/tmp") as home:
        paths = Paths.at(Path(home))
        together = Barrier(2)

        def start(_: int) -> bool:
            together.wait()
            return start_in_background(paths)

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(start, range(2))) == [True, True]
        until(lambda: "[already-running]" in paths.log.read_text(), "the later one gives way")
        Client(paths).shutdown()
        assert not Client(paths).running()


def test_nobody_answering_is_said_with_the_command_to_type(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        Client(Paths.at(tmp_path)).jobs()
    assert caught.value.exit_code is Exit.DAEMON_NOT_RUNNING
    assert str(caught.value).startswith("The daemon is not running.\n  socket ")
    assert str(caught.value).endswith("\n  hint: offmate up   [daemon-not-running]")
