"""A real daemon with real workers, broker and database, below a folder of its own, for tests.

Only the planner, the data reader and the trainer are stand-ins (fakes/), unless `real` ones are asked for: packages of
links to the real modules, with those replaced, come first on the module path of the daemon's processes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from offmated.cli.client import Client, Json
from offmated.cli.follow import events
from offmated.paths import Paths
from planner.run.processes import Process
from tests import ROOT

FAKES = {
    "planner/__main__.py": "planner_main.py",
    "worker/prepare.py": "worker_prepare.py",
    "worker/trainer.py": "worker_trainer.py",
}
HELD = {"planner/__main__.py": "held_planner_main.py", "worker/trainer.py": "held_worker_trainer.py"}
"""The real ones, which stand still where a job's name says so."""
PATIENCE_S = 120.0
HELD_AT = 20  # the step after which a job of the fakes that is called so waits, see fakes/worker_trainer.py


def until(
    claim: Callable[[], object], what: str, patience_s: float = PATIENCE_S, *, every_s: float | None = None
) -> None:
    """Wait until `claim()` holds, looked at that often; fail with `what` when it does not in time.

    Without `every_s` it is looked at less and less often: a daemon that is asked all the time does little else.
    """
    began = time.monotonic()
    while not claim():
        waited_s = time.monotonic() - began
        assert waited_s < patience_s, f"not within {patience_s:.0f} s: {what}"
        time.sleep(every_s or min(max(0.02, waited_s / 20), 0.2))


def link_fakes(folder: Path, fakes: Mapping[str, str]) -> None:
    """Packages `planner` and `worker` in `folder`: the real ones, but for the programs of `fakes`."""
    for package in ("planner", "worker"):
        (folder / package).mkdir(parents=True)
        for real in (ROOT / package).iterdir():
            if real.name == "__pycache__":  # or a fake and the real module have one .pyc
                continue
            (folder / package / real.name).symlink_to(real)
    for target, fake in fakes.items():
        (folder / target).unlink(missing_ok=True)
        (folder / target).symlink_to(ROOT / "tests" / "support" / "fakes" / fake)


class House:
    """One installation in a folder, its daemon in the background. The jobs' model and data are for the tests to make
    where the programs are `real`, or the real ones `held` where a job's name says so."""

    def __init__(self, home: Path, *, real: bool = False, held: bool = False) -> None:
        self.home = home
        self.paths = Paths.at(home / "state")
        self.client = Client(self.paths)
        self.environment = {
            **os.environ,
            **self.paths.environment(),
            "PYTHONPATH": str(ROOT) if real else f"{home / 'fakes'}:{ROOT}",
            "OMP_NUM_THREADS": "1",
        }
        self.daemon: subprocess.Popen[bytes] | None = None
        if real:
            return
        link_fakes(home / "fakes", HELD if held else FAKES)
        if held:
            return
        model = home / "model"
        model.mkdir()
        (model / "config.json").write_text(
            '{"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 32,'
            ' "num_hidden_layers": 2, "num_attention_heads": 2}'
        )
        (model / "tokenizer.json").write_text("{}")
        (home / "text.jsonl").write_text('{"text": "one"}\n' * 8)

    def up(self) -> None:
        """Start the daemon and wait until it answers."""
        self.paths.create()
        with self.paths.log.open("ab") as log:
            self.daemon = subprocess.Popen(
                [sys.executable, "-m", "offmated"],
                cwd=self.paths.state,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until(self._answers, "the daemon answers")

    def _answers(self) -> bool:
        assert self.daemon is not None
        assert self.daemon.poll() is None, f"the daemon ended:\n{self.log()}"
        return self.client.running()

    def down(self) -> None:
        """Stop the daemon in good order."""
        assert self.daemon is not None
        self.client.shutdown(wait=False)
        assert self.daemon.wait(PATIENCE_S) == 0, self.log()

    def submit(self, name: str = "", *, steps: int = 3, save_steps: int = 1000) -> int:
        """Hand in a job of the fakes; returns its number."""
        text = f"model: ./model\ndataset: text.jsonl\nmax_steps: {steps}\nsave_steps: {save_steps}\n"
        if name:
            text += f"run_name: {name}\n"
        number: int = self.client.submit(text, str(self.home))["id"]
        return number

    def job(self, number: int) -> Json:
        """The job as the API shows it."""
        return self.client.job(number)

    def resumed_from(self, number: int) -> list[int | None]:
        """The checkpoints from which the job's trainers started."""
        return [event["resumed_from"] for event in self.events(number) if event["event"] == "start"]

    def events(self, number: int) -> list[Json]:
        """The events of the job's trainers."""
        return list(events(self.client, number, following=False))

    def wait_for(self, number: int, *states: str) -> Json:
        """The job, once it is in one of `states`."""
        until(lambda: self.job(number)["state"] in states, f"job {number} is {' or '.join(states)}; {self.log()}")
        return self.job(number)

    def wait_for_step(self, number: int, step: int) -> None:
        """Wait until the trainer has done `step`."""
        until(lambda: ((self.job(number)["progress"] or {}).get("step") or 0) >= step, f"step {step} of job {number}")

    def wait_until_held(self, number: int) -> None:
        """Wait until the trainer of a job called "held" stands still."""
        self.wait_for_step(number, HELD_AT)

    def release(self, number: int) -> None:
        """Let a job that is held go on, and never hold it again."""
        (self.paths.run_folder(number) / "go").touch()

    def child(self, name: str) -> Process:
        """A living child of the daemon."""
        found: list[Process] = []

        def there() -> bool:
            pid = self.client.health()["children"][name]["pid"]
            found[:] = [process] if pid is not None and (process := Process.of(pid)) else []
            return bool(found)

        until(there, f"{name} lives")
        return found[0]

    def trainer_pids(self, number: int) -> list[int]:
        """The trainers this job ever had."""
        file = self.paths.run_folder(number) / "pids"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def living_trainers(self, number: int) -> list[int]:
        """Those of them that live."""
        return [pid for pid in self.trainer_pids(number) if Process.of(pid) is not None]

    def log(self) -> str:
        """The end of the daemon's log."""
        return self.paths.log.read_text()[-3000:] if self.paths.log.exists() else ""


def more_daemons(home: House, count: int) -> list[subprocess.Popen[str]]:
    """Start so many daemons in the foreground on the house's folder, at once. Their errors are read from `stderr`."""
    return [
        subprocess.Popen(
            [sys.executable, "-m", "offmated"],
            cwd=home.paths.state,
            env=home.environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]


@contextmanager
def house(
    *, real: bool = False, held: bool = False, before: Callable[[House], None] = lambda _: None
) -> Iterator[House]:
    """A house with its daemon up, after `before`; ended, and removed, at the end."""
    home = Path(tempfile.mkdtemp(prefix="offmate-", dir="/tmp"))  # sockets have short paths
    built = House(home, real=real, held=held)
    try:
        before(built)
        built.up()
        yield built
    finally:
        if built.daemon is not None and built.daemon.poll() is None:
            built.daemon.send_signal(signal.SIGKILL)  # its children die with it
            built.daemon.wait()
        shutil.rmtree(home)
