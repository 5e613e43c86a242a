"""The crash matrix: who dies (power, daemon, broker, workers, horse, the job's own process) x what a job is doing then.

`python -m benchmarks.crashes` prints it; docs/how-to/after-a-crash.md says what comes out. Each row is a house with a
daemon, a broker, workers and nine jobs that are in nine states when somebody is killed; afterwards every job is to be
there once, done, with the model of an undisturbed run, and no two trainers may have had the GPU at once. Planner and
trainer are stand-ins whose model depends on each step, or with `--real` the real ones with a tiny Llama.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offmated.cli.client import Json
from offmated.jobs.states import JobState
from offmated.jobs.store import Store
from offmated.jobs.table import JobRow
from planner.run.folder import RunFolder
from planner.run.processes import Process
from tests.support.daemons import HELD_AT, PATIENCE_S, House, house, until
from tests.support.disks import small_disk

STEPS, SAVE_STEPS = 30, 7
LAST_SAVED = HELD_AT - HELD_AT % SAVE_STEPS
JOB = f"""
model: ./model
dataset: text.jsonl
max_length: 32
per_device_train_batch_size: 2
learning_rate: 1e-3
max_steps: {STEPS}
save_steps: {SAVE_STEPS}
"""
ELSEWHEN = "00000000-0000-4000-8000-000000000000"  # a boot that was not this one
HALF_A_LINE = b'{"event": "step", "ti'
REAL_PATIENCE_S = 3 * PATIENCE_S

STATES = {
    "planning": [None],
    "queued": [None],
    "running": [None],
    "pausing": [None, HELD_AT],
    "paused": [None, HELD_AT],
    "waiting for its window": [None],
    "held": [None],
    "out of room": [None, LAST_SAVED],
    "ending": [None],
}
"""What a job is doing when somebody dies -> the checkpoints that its trainers would start from if nobody did."""


def text_of(name: str) -> str:
    """The file of a job that is called so: it says where the job stands still, see fakes/worker_trainer.py."""
    return f"{JOB}run_name: {name}\n"


def digest(home: House, number: int) -> str:
    """What tells a job's model from others, bit by bit."""
    found = sorted(Path(home.job(number)["output"]).glob("*.safetensors"))
    assert found, f"job {number} has no model"
    return hashlib.sha256(b"".join(file.read_bytes() for file in found)).hexdigest()


class Trial:
    """The jobs of one house, from their submission to the claims about them."""

    def __init__(self, home: House, real: bool) -> None:
        self.home = home
        self.jobs: dict[str, int] = {}
        self._patience_s = REAL_PATIENCE_S if real else PATIENCE_S
        self._store = Store(f"sqlite:///{home.paths.database}")
        self._whole = self.submit("undisturbed", "first")
        self.wait(self._whole, "done")

    def submit(self, state: str, name: str, **turn: object) -> int:
        """A new job, which is to be in `state`."""
        number: int = self.home.client.submit(text_of(name), str(self.home.home), turn={**turn} or None)["id"]
        self.jobs[state] = number
        return number

    def until(self, claim: Callable[[], object], what: str) -> None:
        """As `tests.support.daemons.until`."""
        until(claim, f"{what}; {self.home.log()}", self._patience_s)

    def wait(self, number: int, *states: str) -> Json:
        """The job, once it is in one of `states`; fails at once where it has failed."""
        over = {*states, "failed"}
        self.until(lambda: self.home.job(number)["state"] in over, f"job {number} is {' or '.join(states)}")
        job = self.home.job(number)
        assert job["state"] in states, f"{job}\n{''.join(self.home.client.logs(number))[-3000:]}"
        return job

    def wait_until_held(self, number: int) -> None:
        """Wait until its trainer stands still after a step."""
        self.until(
            lambda: ((self.home.job(number)["progress"] or {}).get("step") or 0) >= HELD_AT, f"job {number} is held"
        )

    def run(self, number: int) -> RunFolder:
        """Its run folder."""
        return RunFolder(self.home.paths.run_folder(number))

    def working(self) -> Sequence[JobRow]:
        """The jobs that a process works on."""
        return self._store.jobs(JobState.PLANNING, JobState.RUNNING)

    def owners(self) -> list[Process]:
        """The work horses of the jobs that are worked on."""
        return [Process.parse(row.owner) for row in self.working() if row.owner is not None]

    def own_processes(self) -> list[Process]:
        """The planners and trainers."""
        files = [self.run(row.id).process for row in self.working()]
        return [Process.parse(file.read_text()) for file in files if file.exists()]

    def check(self) -> None:
        """All jobs are there once and done, with the model of the undisturbed one, and never had two the GPU."""
        rows = self._store.jobs()
        assert [row.id for row in rows] == sorted(self.jobs.values()), "jobs were lost, or doubled"
        whole = digest(self.home, self._whole)
        for state, number in self.jobs.items():
            assert self.home.job(number)["state"] == "done", f"{state}: {self.home.job(number)}"
            ends = [event for event in self.home.events(number) if (event["event"], event.get("status")) == END]
            assert len(ends) == 1, f"{state}: it ended {len(ends)} times"
            assert digest(self.home, number) == whole, f"{state}: another model than without the accident"
        twice = self.home.paths.state / "twice"
        assert not twice.exists(), f"two had the GPU at once: {twice.read_text()}"

    def told(self, state: str) -> str:
        """What the accident did to the job, in a few words."""
        starts, expected = self.home.resumed_from(self.jobs[state]), STATES[state]
        if starts == expected:
            return "as if nothing"
        again = next((start for start in starts if start not in expected), None)
        if again is None:
            return "from the start"
        return "only the model folder" if again == STEPS else f"from step {again}"


END = ("end", "done")


def kill_daemon(trial: Trial) -> None:
    """The daemon, with all that is its; and a new one."""
    kill_all(trial)
    trial.home.up()


def cut_power(trial: Trial) -> None:
    """All that is there; files are torn as a disk without power leaves them, and the machine has been started anew."""
    home, this_boot = trial.home, Process.current().boot
    working = [trial.run(row.id) for row in trial.working()]
    kill_all(trial)
    for run in working:
        with run.metrics.open("ab") as file:
            file.write(HALF_A_LINE)
        (run.path / ".plan.json.new").write_text("{")
        if run.process.exists():  # else the run had just ended
            run.process.write_text(run.process.read_text().replace(this_boot, ELSEWHEN))
    for file in home.paths.broker.rglob("*"):
        if file.is_file():
            file.write_bytes(bytes(512))
    home.paths.lock.write_bytes(bytes(64))
    (home.paths.runs / f".new-{'0' * 32}").mkdir()
    with sqlite3.connect(home.paths.database) as connection:
        connection.execute("UPDATE jobs SET owner = replace(owner, ?, ?)", (this_boot, ELSEWHEN))
    connection.close()
    home.up()


def kill_all(trial: Trial) -> None:
    """The daemon, and with it all that is its."""
    home = trial.home
    there = [*trial.owners(), *trial.own_processes(), *(home.child(n) for n in ("broker", "plan-worker", "gpu-worker"))]
    assert home.daemon is not None
    home.daemon.kill()
    home.daemon.wait()
    trial.until(lambda: not any(process.alive() for process in there), "all are gone")


def kill_broker(trial: Trial) -> None:
    """The broker, and what it knew."""
    broker = trial.home.child("broker")
    broker.kill()
    trial.until(lambda: trial.home.child("broker") != broker, "a new broker")


def kill_workers(trial: Trial) -> None:
    """Both workers; their horses and those of these die with them."""
    workers = {name: trial.home.child(name) for name in ("plan-worker", "gpu-worker")}
    there = [*trial.owners(), *trial.own_processes()]
    for worker in workers.values():
        worker.kill()
    trial.until(lambda: not any(process.alive() for process in there), "horses and trainers are gone")
    trial.until(lambda: all(trial.home.child(name) != worker for name, worker in workers.items()), "new workers")


def kill_horses(trial: Trial) -> None:
    """The work horses."""
    owners, there = trial.owners(), trial.own_processes()
    for horse in owners:
        horse.kill()
    trial.until(lambda: not any(process.alive() for process in (*owners, *there)), "horses and trainers are gone")


def kill_own(trial: Trial) -> None:
    """The planner and the trainer themselves."""
    there = trial.own_processes()
    assert there
    for process in there:
        process.kill()
    trial.until(lambda: not any(process.alive() for process in there), "they are gone")


ACTORS: dict[str, Callable[[Trial], None]] = {
    "power": cut_power,
    "daemon": kill_daemon,
    "broker": kill_broker,
    "workers": kill_workers,
    "horse": kill_horses,
    "trainer": kill_own,
}


def closed_window() -> str:
    """Hours that begin in a while."""
    hour = time.localtime().tm_hour
    return f"{(hour + 8) % 24:02}:00-{(hour + 10) % 24:02}:00"


def try_out(trial: Trial, kill: Callable[[Trial], None], disk: Path) -> None:
    """Bring nine jobs into nine states, have `kill` kill, and have them all go on to their end."""
    home = trial.home
    kill_while_seven_are_there(trial, kill, disk)
    pausing = trial.submit("pausing", "firm")
    trial.wait_until_held(pausing)
    home.client.change(pausing, "pause")
    trial.until(lambda: home.job(pausing)["stop_reason"] == "pause", "it is told to save")
    kill(trial)
    home.release(pausing)
    trial.until(lambda: home.living_trainers(pausing) == [], "the trainer has ended")
    job = trial.wait(pausing, "waiting")
    assert job["hold"] == "paused", "the pause was forgotten"
    home.client.change(pausing, "resume")
    trial.wait(pausing, "done")
    ending = trial.submit("ending", "late")
    trial.until(
        lambda: list(trial.run(ending).trained.glob("step-*")) or home.job(ending)["state"] == "failed",
        "all but the model folder is done",
    )
    kill(trial)
    home.release(ending)
    trial.wait(ending, "done")
    trial.check()


def kill_while_seven_are_there(trial: Trial, kill: Callable[[Trial], None], disk: Path) -> None:
    """The states that a queue has at one time."""
    home = trial.home
    needy = trial.submit("out of room", "needy", held=True)
    ballast = disk / "somebody's"
    ballast.write_bytes(bytes(3 * 2**18))
    (home.paths.run_folder(needy) / "disk").write_text(str(disk))
    home.client.change(needy, "release")
    paused = trial.submit("paused", "held")
    trial.until(lambda: home.job(needy)["hold"] == "no-room", "it has no room")
    trial.wait_until_held(paused)
    home.client.change(paused, "pause")
    trial.until(lambda: home.living_trainers(paused) == [], "the paused one has left the GPU")
    trial.wait(paused, "waiting")
    window = trial.submit("waiting for its window", "windowed", window=closed_window())
    trial.wait(window, "waiting")
    held = trial.submit("held", "patient", held=True)
    running = trial.submit("running", "held")
    trial.wait_until_held(running)
    trial.wait(trial.submit("queued", "next"), "waiting")
    planning = trial.submit("planning", "slow-plan")
    trial.wait(planning, "planning")
    trial.until(lambda: trial.run(planning).process.exists(), "its planner is there")
    idle = {number: standing(home, number) for number in (paused, window, held, needy)}
    kill(trial)
    assert {number: standing(home, number) for number in idle} == idle, "one that waited was changed by it"
    for number in (running, paused, planning):
        home.release(number)
    for state in ("running", "queued", "planning"):
        trial.wait(trial.jobs[state], "done")
    ballast.unlink()
    for number, change in ((paused, "resume"), (window, "release"), (held, "release")):
        home.client.change(number, change)
    for number in idle:
        trial.wait(number, "done")


def standing(home: House, number: int) -> tuple[object, ...]:
    """What a job that waits is to keep."""
    job = home.job(number)
    return tuple(job[name] for name in ("state", "hold", "begin_at", "attempts", "crashes", "last_checkpoint_step"))


@contextmanager
def trial_house(real: bool, *, before: Callable[[House], None] = lambda _: None) -> Iterator[House]:
    """A house, with model and data where the programs are real ones."""
    with house(held=real, before=before) as home:
        if real:
            from tests.support.texts import sentences, tiny_llama_folder, write_jsonl

            tiny_llama_folder(home.home / "model")
            write_jsonl(home.home / "text.jsonl", sentences(40))
        yield home


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Who died, and for each state what became of the job."""

    actor: str
    cells: dict[str, str]


def row_of(actor: str, *, real: bool = False) -> Row:
    """One row of the matrix; raises AssertionError with what did not hold."""
    with small_disk(2**20) as disk, trial_house(real) as home:
        trial = Trial(home, real)
        try_out(trial, ACTORS[actor], disk)
        return Row(actor=actor, cells={state: trial.told(state) for state in STATES})
