"""Processes told apart, children that die with their parent, and stops passed on. With real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from planner.run.folder import RunFolder
from planner.run.processes import Process, spawn
from planner.run.watch import end_leftover
from tests.support.daemons import ROOT, until

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_process_is_found_again_by_its_text() -> None:
    me = Process.current()
    assert Process.parse(str(me)) == me
    assert me.alive()


def test_another_process_with_the_same_pid_is_another_process() -> None:
    me = Process.current()
    assert not replace(me, started=me.started + 1).alive()
    assert not replace(me, boot="another").alive()
    assert not replace(me, started=me.started + 1).send(signal.SIGKILL)


def test_a_process_whose_number_a_thread_has_now_is_gone() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    assert thread.native_id is not None
    gone = replace(Process.current(), pid=thread.native_id, started=1)
    try:
        assert not gone.alive() and not gone.send(signal.SIGKILL)
        gone.kill()
    finally:
        over.set()
        thread.join()


def test_a_zombie_is_not_alive(tmp_path: Path) -> None:
    child = subprocess.Popen(SLEEP)
    process = Process.of(child.pid)
    assert process is not None
    process.kill()
    assert not process.alive()
    assert child.wait() == -signal.SIGKILL
    assert Process.of(child.pid) is None


def test_a_child_runs_in_its_folder_with_nothing_to_read_and_a_clear_signal_mask(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; print(os.getcwd(), repr(sys.stdin.read()), signal.pthread_sigmask(0, ()),"
        " os.getsid(0) == os.getpid(), os.environ['COLOUR'])"
    )
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        child = spawn(
            [sys.executable, "-c", code], folder=tmp_path, output=subprocess.PIPE, environment={"COLOUR": "red"}
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    said, _ = child.communicate(timeout=20)
    assert said.decode().strip() == f"{tmp_path} '' set() True red"


PARENT = """
import sys, time
from pathlib import Path
from planner.run.processes import spawn
child = spawn([sys.executable, "-c", "import time; time.sleep(60)"], folder=Path.cwd())
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_child_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    child = Process.of(int(parent.stdout.readline()))
    assert child is not None
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not child.alive(), "the child is dead")


WATCHER = """
import sys
from pathlib import Path
from planner.run.folder import RunFolder
from planner.run.watch import Watch
folder = RunFolder(Path(sys.argv[1]))
cancel = lambda: (folder.path / "cancel").exists()
with Watch(cancel) as watch:
    (folder.path / "watching").touch()
    if sys.argv[2] == "late":
        import time
        while not (folder.path / "go").exists():
            time.sleep(0.01)
    print(watch.run([sys.executable, "-c", sys.argv[3]], folder), flush=True)
    print(watch.run([sys.executable, "-c", "print('second')"], folder), flush=True)
"""
COUNTS_SIGNALS = """
import signal, sys, time
from pathlib import Path
got = []
signal.signal(signal.SIGTERM, lambda *_: got.append(1))
Path("ready").touch()
deadline = time.monotonic() + 60
while len(got) < {enough} and time.monotonic() < deadline:
    time.sleep(0.01)
    if len(got) == 1 and Path("answer").exists():
        sys.exit(75)
sys.exit(len(got))
"""


class Watched:
    """A process that watches a child, as a work horse does."""

    def __init__(self, folder: Path, code: str, when: str = "now") -> None:
        self.run = RunFolder(folder)
        self.process = subprocess.Popen(
            [sys.executable, "-c", WATCHER, str(folder), when, code], stdout=subprocess.PIPE, cwd=ROOT
        )

    def wait_for(self, name: str) -> None:
        until((self.run.path / name).exists, f"{name} is there")

    def touch(self, name: str) -> None:
        (self.run.path / name).touch()

    def codes(self) -> list[int]:
        """The exit codes of the first child and of the second, which only prints a word."""
        said, _ = self.process.communicate(timeout=30)
        return [int(word) for word in said.split()]


def test_exit_codes_and_output_of_the_children_are_kept(tmp_path: Path) -> None:
    assert Watched(tmp_path, "import sys; print('first'); sys.exit(3)").codes() == [3, 0]
    assert (tmp_path / "log.txt").read_text() == "first\nsecond\n"
    assert not RunFolder(tmp_path).process.exists()


def test_a_child_that_a_signal_ends_has_a_negative_code(tmp_path: Path) -> None:
    assert Watched(tmp_path, "import os; os.kill(os.getpid(), 9)").codes() == [-9, 0]


def test_a_stop_reaches_the_child_once_however_often_it_is_asked_for(tmp_path: Path) -> None:
    watched = Watched(tmp_path, COUNTS_SIGNALS.format(enough=2))
    watched.wait_for("ready")
    for _ in range(5):
        watched.process.terminate()
    watched.touch("answer")
    assert watched.codes() == [75, -signal.SIGTERM]  # and the next child does not start


def test_a_stop_for_good_insists(tmp_path: Path) -> None:
    watched = Watched(tmp_path, COUNTS_SIGNALS.format(enough=3))
    watched.wait_for("ready")
    watched.touch("cancel")
    watched.process.terminate()
    assert watched.codes()[0] == 3


def test_a_stop_for_good_insists_however_fast_it_is_asked_for(tmp_path: Path) -> None:
    watched = Watched(tmp_path, COUNTS_SIGNALS.format(enough=3))
    watched.wait_for("ready")
    watched.touch("cancel")

    def asked_until_over() -> bool:
        watched.process.terminate()
        return watched.process.poll() is not None

    until(asked_until_over, "the child has counted three")
    assert watched.codes()[0] == 3


def test_a_stop_for_good_may_follow_a_gentle_one(tmp_path: Path) -> None:
    watched = Watched(tmp_path, COUNTS_SIGNALS.format(enough=2))
    watched.wait_for("ready")
    watched.process.terminate()
    watched.touch("cancel")
    watched.process.terminate()
    assert watched.codes()[0] == 2


def test_a_stop_that_comes_before_the_child_keeps_it_from_starting(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "print('first')", when="late")
    watched.wait_for("watching")
    watched.process.terminate()
    watched.touch("go")
    assert watched.codes() == [-signal.SIGTERM, -signal.SIGTERM]
    assert not (tmp_path / "log.txt").exists()


def test_a_process_left_over_in_a_run_folder_is_ended(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    leftover = subprocess.Popen(SLEEP)
    run.process.write_text(str(Process.of(leftover.pid)))
    end_leftover(run)
    assert leftover.wait(10) == -signal.SIGKILL
    assert not run.process.exists()


@pytest.mark.parametrize("text", ["", "12:34", "{pid}:1:another"])
def test_a_stranger_is_never_taken_for_a_leftover(tmp_path: Path, text: str) -> None:
    run = RunFolder(tmp_path)
    run.process.write_text(text.format(pid=os.getpid()))
    end_leftover(run)
    assert not run.process.exists()
