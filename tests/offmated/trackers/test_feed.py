"""What trackers are told of a run: each step once, whatever dies, and TensorBoard by its own reader."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from offmated.jobs.migrate import upgrade
from offmated.jobs.queue_turns import AT_ONCE
from offmated.jobs.states import JobState
from offmated.jobs.store import Store
from offmated.jobs.table import JobRow
from offmated.paths import Paths
from offmated.trackers import feeder
from offmated.trackers.feed import Told, _Asking, follow, is_told, note_of, without_secrets
from offmated.trackers.feeder import Feeder
from offmated.trackers.sinks import Point, Target, Trackio, Wandb, points
from planner.keys.trackers import missing_package
from planner.run.events import PAIR_FIGURES
from planner.run.folder import RunFolder
from planner.run.processes import Process
from tests.support.daemons import until
from worker.training.metrics import Metrics

pytest.importorskip("tensorboard")


class Kept:
    """A tracker of the test's own: all it was told since it was opened for the first time."""

    def __init__(self, unsure_s: float = 0.0) -> None:
        self.unsure_s = unsure_s
        self.row_a_step = False
        self.opened: list[int | None] = []
        self.points: list[tuple[int, str]] = []
        self.status: list[str | None] = []

    def open(self, told: int | None) -> Kept:
        self.opened.append(told)
        if told is not None:  # as TensorBoard does
            self.points = [point for point in self.points if point[0] < told]
        return self

    def tell(self, points: Sequence[Point]) -> None:
        self.points += [(point.step, name) for point in points for name in point.values]

    def close(self, status: str | None) -> None:
        self.status.append(status)


def write(run: RunFolder, *steps: int, start: int | None = None, evaluated: int | None = None, end: str = "") -> None:
    with Metrics(run.metrics) as metrics:
        if start is not None:
            metrics.write("start", step=start, total_steps=9, resumed_from=start or None)
        for step in steps:
            metrics.write("step", step=step, loss=1 / step)
        if evaluated is not None:
            metrics.write("eval", step=evaluated, eval_loss=0.5)
        if end:
            metrics.write("end", step=steps[-1] if steps else 0, status=end)


def tell(run: RunFolder, kept: Kept) -> None:
    """One process, which tells what there is."""
    follow(run, "tensorboard", kept.open, lambda _: True)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    (tmp_path / "trackers").mkdir()
    return RunFolder(tmp_path)


def test_steps_that_are_done_again_are_told_once(run: RunFolder) -> None:
    kept = Kept()
    write(run, 1, 2, 3, 4, start=0)
    tell(run, kept)
    assert is_told(run, "tensorboard")
    write(run, 3, 4, 5, start=2, evaluated=5, end="done")
    assert not is_told(run, "tensorboard")
    tell(run, kept)
    assert kept.points == [(step, "train/loss") for step in (1, 2, 3, 4, 5)] + [(5, "eval/loss")]
    assert kept.status == [None, "done"]
    assert is_told(run, "tensorboard")


def test_who_dies_at_any_point_has_told_nothing_twice_in_the_end(run: RunFolder) -> None:
    """A tracker that takes points and then dies before that is noted, or in the midst of them, at each of its calls."""
    write(run, 1, 2, start=0, evaluated=2)
    write(run, 3, evaluated=3, end="done")
    whole = [(1, "train/loss"), (2, "train/loss"), (2, "eval/loss"), (3, "train/loss"), (3, "eval/loss")]
    for die_at in range(1, 5):
        note_of(run, "tensorboard").unlink(missing_ok=True)
        kept = Kept()
        left = [die_at]

        class Dying(Kept):
            def open(self, told: int | None) -> Kept:
                kept.open(told)  # noqa: B023
                return self

            def tell(self, points: Sequence[Point]) -> None:
                for point in points:
                    kept.tell([point])  # noqa: B023
                    left[0] -= 1  # noqa: B023
                    if left[0] == 0:  # noqa: B023
                        raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            follow(run, "tensorboard", Dying().open, lambda _: True)
        tell(run, kept)
        assert sorted(kept.points) == sorted(whole), die_at


def test_an_evaluation_that_comes_late_belongs_to_its_step(run: RunFolder) -> None:
    kept = Kept()
    write(run, 1, 2, start=0)
    later = iter([lambda: write(run, evaluated=2), lambda: write(run, 3)])

    def closing(_: float) -> bool:
        more: Callable[[], None] | None = next(later, None)
        if more is not None:
            more()
        return more is None

    follow(run, "tensorboard", kept.open, closing)
    assert kept.points == [(1, "train/loss"), (2, "train/loss"), (2, "eval/loss"), (3, "train/loss")]


def test_what_a_tracker_may_still_lose_is_not_noted_as_told(run: RunFolder) -> None:
    kept = Kept(unsure_s=1000.0)
    write(run, 1, 2, 3, start=0)

    def closing(_: float) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow(run, "wandb", kept.open, closing)
    assert Told.read(run, "wandb") == Told(0, 0)


def test_a_note_that_a_power_cut_emptied_doubles_nothing(run: RunFolder) -> None:
    kept = Kept()
    write(run, 1, 2, 3, start=0)
    tell(run, kept)
    note_of(run, "tensorboard").write_bytes(b"")
    write(run, 4)
    tell(run, kept)
    assert kept.opened == [None, 0]
    assert kept.points == [(step, "train/loss") for step in (1, 2, 3, 4)]


def test_a_last_line_that_is_cut_short_leaves_nothing_to_tell(run: RunFolder) -> None:
    write(run, 1, 2, start=0)
    with run.metrics.open("ab") as file:
        file.write(b'{"event": "step", "st')
    tell(run, Kept())
    assert is_told(run, "tensorboard")


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, set[str]]]:
    """What a trackio of the test's own has: it takes no step below the last that it has."""
    rows: list[tuple[int, set[str]]] = []
    fake = ModuleType("trackio")
    fake.init = lambda **_: SimpleNamespace(_next_step=rows[-1][0] + 1 if rows else 0)  # type: ignore[attr-defined]
    fake.log = lambda values, step: rows.append((step, set(values)))  # type: ignore[attr-defined]
    fake.finish = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", fake)
    return rows


def target(run: RunFolder, told: int | None, **keys: object) -> Target:
    return Target(name="night", keys=keys, run=run, state=run.path, told=told)


def test_an_evaluation_that_a_pause_cut_short_is_told_with_its_step(
    run: RunFolder, rows: list[tuple[int, set[str]]]
) -> None:
    write(run, 1, 2, 3, start=0, end="stopped")
    follow(run, "trackio", lambda told: Trackio(target(run, told)), lambda _: True)
    assert not is_told(run, "trackio")
    write(run, start=3, evaluated=3)
    write(run, 4, end="done")
    follow(run, "trackio", lambda told: Trackio(target(run, told)), lambda _: True)
    loss = {"train/loss"}
    assert rows == [(1, loss), (2, loss), (3, loss | {"eval/loss"}), (4, loss)]
    assert is_told(run, "trackio")


def test_the_last_step_of_a_job_that_was_killed_is_told(run: RunFolder, rows: list[tuple[int, set[str]]]) -> None:
    write(run, 1, 2, start=0)
    follow(run, "trackio", lambda told: Trackio(target(run, told)), lambda _: True)
    assert [step for step, _ in rows] == [1]
    follow(run, "trackio", lambda told: Trackio(target(run, told)), lambda _: True, lambda: True)
    assert [step for step, _ in rows] == [1, 2]
    assert is_told(run, "trackio")


def test_the_files_mode_of_wandb_wins_and_addresses_are_no_settings(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    fake = ModuleType("wandb")
    fake.init = lambda **options: asked.append(options)  # type: ignore[attr-defined]
    fake.Settings = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for mode in ("online", "offline", None):
        Wandb(target(run, None, wandb_mode=mode, mlflow_tracking_uri="http://box/", seed=1))
    assert [options["mode"] for options in asked] == ["online", "offline", None]
    assert asked[2]["config"] == {"seed": 1}


def test_a_process_knows_whether_its_job_has_ended_and_does_not_outlive_its_daemon(home: Home) -> None:
    row, run = home.running("tensorboard")
    feed = feeder.Feed(feeder.Wanted(row, None), "tensorboard", home.paths.state, {})
    for ended in (False, True):
        feed._closed_at = None
        feed._child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        feed.close(ended=ended)
        assert feed._child.stdout is not None
        asking = _Asking(feed._child.stdout.fileno())
        until(lambda: asking.closed(1.0), "it is closed")  # noqa: B023
        assert asking.over() is ended
        feed._child.wait()
    feed._child = None
    asked = {"tracker": "tensorboard", "run": str(run.path), "name": "n", "state": str(run.path), "first": True}
    left = subprocess.run(feeder._FEED, input=json.dumps(asked | {"daemon": 1}).encode() + b"\n", check=False)
    assert left.returncode == 128 + signal.SIGKILL
    private = {"OFFMATE_NOTIFY": "mailto://me:secret@example.org", "WANDB_API_KEY": "its own"}
    assert feeder._not_private(private) == {"WANDB_API_KEY": "its own"}


def test_nothing_that_opens_a_door_is_said_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    said = without_secrets("no answer from https://me:secret@box:5000/x\nwith 0123456789abcdef")
    assert said == "no answer from https://…@box:5000/x with …"


def test_a_package_that_is_not_there_is_said_with_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.keys.trackers.find_spec", lambda _: None)
    assert "pip install 'offmate[mlflow]'" in (missing_package("mlflow") or "")


class Home:
    """A state folder with its database, and the daemon's feeder."""

    def __init__(self, folder: Path) -> None:
        self.paths = Paths.at(folder)
        self.paths.runs.mkdir(parents=True)
        self.store = Store(f"sqlite:///{self.paths.database}")
        upgrade(self.store.engine, self.paths)
        self.feeder = self.again()

    def again(self) -> Feeder:
        return Feeder(self.store, self.paths.state, self.paths.environment())

    def running(self, report_to: str) -> tuple[JobRow, RunFolder]:
        def folder(number: int) -> Path:
            run = RunFolder(self.paths.run_folder(number))
            run.path.mkdir()
            run.resolved.write_text(f"model: /gone/since\nreport_to: [{report_to}]\n")
            return run.path

        me = Process.current()
        number = self.store.add("night", folder, AT_ONCE).id
        planned = self.store.take(number, JobState.PLANNING, me)
        assert planned is not None
        self.store.end(planned, 0)
        row = self.store.take(number, JobState.RUNNING, me)
        assert row is not None
        return row, RunFolder(self.paths.run_folder(number))

    def tick_until(self, claim: Callable[[], object], what: str) -> None:
        def ticked() -> object:
            self.feeder.tick(frozenset(self.store.living()))
            return claim()

        until(ticked, what)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    monkeypatch.setattr(feeder, "EVERY_S", 0.0)
    monkeypatch.setattr(feeder, "SELDOM_S", 0.0)
    monkeypatch.setattr(feeder, "FIRST_DELAY_S", 0.0)
    made = Home(tmp_path)
    yield made
    made.feeder.close()
    made.feeder.wait()


def scalars(run: RunFolder) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_has_each_step_once_after_its_process_and_the_daemon_died(home: Home) -> None:
    """Killed in the midst of a run, together with the daemon; the run resumes, does two steps again, and ends while no
    daemon is there."""
    row, run = home.running("tensorboard")
    write(run, 1, 2, 3, start=0)
    home.tick_until(lambda: (told := Told.read(run, "tensorboard")) is not None and told.step == 3, "three are told")
    (feed,) = home.feeder._feeds.values()
    assert feed._child is not None
    assert str(run.metrics) not in " ".join(map(str, feed._child.args)), "others see the command line"
    feed._child.kill()
    feed._child.wait()
    write(run, 2, 3, 4, start=1, evaluated=4, end="done")
    home.store.end(row, 0)
    home.feeder = home.again()
    home.tick_until(lambda: is_told(run, "tensorboard") and not home.feeder._feeds, "all is told")
    assert scalars(run) == {
        "train/loss": [(step, pytest.approx(1 / step)) for step in (1, 2, 3, 4)],
        "eval/loss": [(4, 0.5)],
    }
    home.feeder = home.again()
    home.feeder.tick(frozenset())
    assert not home.feeder._feeds, "what was told is begun again by the next daemon"


def test_a_tracker_that_fails_is_tried_again_and_the_job_never_knows(home: Home) -> None:
    row, run = home.running("tensorboard")
    (run.path / "tensorboard").write_text("in the way")
    write(run, 1, start=0)
    home.tick_until(lambda: "tensorboard was not told" in "".join(run.tail_of_log(5)), "it is said in the log")
    write(run, 2, end="done")
    home.store.end(row, 0)
    (run.path / "tensorboard").unlink()
    home.tick_until(lambda: is_told(run, "tensorboard"), "it is told once it can be")
    assert [step for step, _ in scalars(run)["train/loss"]] == [1, 2]
    assert home.store.job(row.id).state is JobState.DONE
    assert sum("was not told" in line for line in run.tail_of_log(50)) == 1, "it is said once"


def test_a_feeder_without_work_asks_nothing(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.feeder.tick(frozenset())
    monkeypatch.setattr(home.store, "jobs", lambda *_: pytest.fail("the database was asked"))
    home.feeder.tick(frozenset({JobState.WAITING}))


def test_figures_of_preferences_are_told_by_the_names_of_trl_and_only_where_there_are_some() -> None:
    figures = dict.fromkeys(PAIR_FIGURES, 0.5)
    events = [
        {"event": "step", "step": 1, "time": 1.0, "loss": 1.0, **figures},
        {"event": "eval", "step": 1, "time": 1.0, "eval_loss": 2.0, "eval_rewards_margins": 0.25, "eval_kl": None},
        {"event": "reference", "step": 0, "time": 1.0, "rows": 4, "seconds": 2.0},
        {"event": "step", "step": 2, "time": 1.0, "loss": 1.0},
    ]
    rewards = [f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")]
    pairs = [*rewards, "logps/chosen", "logps/rejected", "kl"]
    assert [set(point.values) for _, point in points(events)] == [
        {"train/loss", *(f"train/{name}" for name in pairs)},
        {"eval/loss", "eval/rewards/margins"},
        {"train/loss"},
    ]
