"""How a daemon ends, in good order and in bad, and what goes on after it. Some tests take seconds: they start a
daemon, its broker and its workers."""

from __future__ import annotations

import signal

from offmated.jobs.store import Store
from planner.run.processes import Process
from tests.support.daemons import HELD_AT, PATIENCE_S, House, until


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
    assert own.resumed_from(number) == [None, HELD_AT]
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
