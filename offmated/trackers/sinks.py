"""Sends points (a step's figures) to the trackers, each imported only when asked for, and finds out after a restart
what a tracker already has.

When a step is done again after a resume, its first numbers stay: the new ones are the same in every bit."""

from __future__ import annotations

import hashlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from planner.errors import Exit, UserError
from planner.keys.trackers import missing_package
from planner.run.events import PAIR_FIGURES
from planner.run.folder import RunFolder

_NAMES = {
    "step": {
        "loss": "train/loss",
        "learning_rate": "train/learning_rate",
        "grad_norm": "train/grad_norm",
        "step_s": "train/step_s",
        "tokens": "train/tokens",
        **{name: f"train/{name.replace('_', '/')}" for name in PAIR_FIGURES},
    },
    "eval": {"eval_loss": "eval/loss", **{f"eval_{name}": f"eval/{name.replace('_', '/')}" for name in PAIR_FIGURES}},
}
"""Event -> its figures that are told, and the names for them, which are those of transformers' Trainer and, for
preferences, of TRL's trainers."""
_LONGEST_SETTING = 250
_UNSURE_S = 30.0


@dataclass(frozen=True, slots=True)
class Point:
    """The figures of one step, to be sent to a tracker; `time` in seconds since 1970."""

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The job whose figures are sent to a tracker: its name, keys and run folder. `state`: the daemon's folder. `told`:
    all steps below this one have been sent; None before the first time."""

    name: str
    keys: Mapping[str, object]
    run: RunFolder
    state: Path
    told: int | None

    @property
    def key(self) -> str:
        """An identifier of this run that is the same at each start and differs from those of all other runs, also on
        other machines."""
        return "offmate-" + hashlib.sha256(self.run.token().encode()).hexdigest()[:16]

    def word(self, key: str, variable: str = "", default: str | None = None) -> str | None:
        """The job file's value of `key`, else the environment variable `variable`, else `default`."""
        value = self.keys.get(key)
        return str(value) if value else os.environ.get(variable) or default

    @property
    def settings(self) -> dict[str, str | int | float | bool]:
        """Those of the job's keys and values that are short, for the tracker's table of settings."""
        table: dict[str, str | int | float | bool] = {}
        for key, value in self.keys.items():
            if key == "mlflow_tracking_uri":  # the address is not for everybody who looks at the figures
                continue
            if isinstance(value, (int, float, bool)):
                table[key] = value
            elif isinstance(value, (str, list)) and value and len(text := str(value)) <= _LONGEST_SETTING:
                table[key] = text
        return table


class Sink(Protocol):
    """The interface of a tracker that receives points (a step's figures). `unsure_s`: for how many seconds sent points
    may still be lost if this process is killed; 0 where `tell` returns only when they are stored. `row_a_step`: the
    tracker keeps one row a step, and may lose figures of a step that are sent after the others of that step."""

    unsure_s: float
    row_a_step: bool

    def tell(self, points: Sequence[Point]) -> None:
        """Send these points (a step's figures each), in the order of their steps. Raises whatever the tracker
        raises."""

    def close(self, status: str | None) -> None:
        """End the connection to the tracker, as nothing more comes for now. `status`: how the run ended; None where it
        goes on later."""


def points(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Point]]:
    """Yield (kind, point) for each of the `events` (lines of metrics.jsonl) that has figures."""
    for event in events:
        step, at = event.get("step"), event.get("time")
        names = _NAMES.get(event["event"], {})
        values = {name: float(event[key]) for key, name in names.items() if isinstance(event.get(key), (int, float))}
        if values and isinstance(step, int) and isinstance(at, (int, float)):
            yield event["event"], Point(step, float(at), values)


def _rows(points: Sequence[Point]) -> Iterator[tuple[int, dict[str, float]]]:
    """Each step with all its values; `points` are in the order of their steps."""
    for step, of_it in groupby(points, key=lambda point: point.step):
        yield step, {name: value for point in of_it for name, value in point.values.items()}


def open_sink(tracker: str, target: Target) -> Sink:
    """Open the tracker called `tracker`, ready to receive the figures of `target`. Raises UserError `no-tracker` where
    its package is missing, and whatever the tracker raises."""
    if (problem := missing_package(tracker)) is not None:
        raise UserError(problem, code="no-tracker", exit_code=Exit.USAGE)
    sinks: dict[str, Callable[[Target], Sink]] = {
        "tensorboard": TensorBoard,
        "wandb": Wandb,
        "trackio": Trackio,
        "mlflow": Mlflow,
    }
    return sinks[tracker](target)


class TensorBoard:
    """Sends figures to TensorBoard: event files in the run folder. Each start writes from which step on earlier events
    are void, as a step may have been written without being noted: TensorBoard leaves the void events out."""

    unsure_s = 0.0
    row_a_step = False

    def __init__(self, target: Target) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(target.run.path / "tensorboard"))
        if target.told is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=target.told, session_log=start))

    def tell(self, points: Sequence[Point]) -> None:
        """Write one event for each point (the figures of a step) to the event file."""
        for point in points:
            values = [self._summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            summary = self._summary(value=values)
            self._writer.add_event(self._event(wall_time=point.time, step=point.step, summary=summary))
        self._writer.flush()

    def close(self, status: str | None) -> None:
        """Flush and close the event file."""
        self._writer.close()


class Wandb:
    """Sends figures to wandb, as one run that is continued by its id. wandb itself drops steps that it has."""

    unsure_s = _UNSURE_S
    row_a_step = True

    def __init__(self, target: Target) -> None:
        import wandb

        mode = target.word("wandb_mode")  # None: WANDB_MODE, which wandb reads by itself
        self._run = wandb.init(
            project=target.word("wandb_project", "WANDB_PROJECT", "offmate"),
            entity=target.word("wandb_entity"),
            name=target.name,
            id=target.key,
            resume="allow",
            mode=mode if mode in ("online", "offline") else None,
            dir=str(target.run.path / "trackers"),
            config=target.settings,
            settings=wandb.Settings(
                console="off",
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_save_requirements=False,
                silent=True,
            ),
        )

    def tell(self, points: Sequence[Point]) -> None:
        """Log the points in wandb by step, all values of a step as one row."""
        for step, values in _rows(points):
            self._run.log(values, step=step)

    def close(self, status: str | None) -> None:
        """Wait until wandb has sent everything."""
        self._run.finish(exit_code=0 if status in (None, "done", "stopped") else 1)


class Trackio:
    """Sends figures to trackio, as one run that is continued by its name."""

    unsure_s = _UNSURE_S
    row_a_step = True

    def __init__(self, target: Target) -> None:
        import trackio

        self._trackio = trackio
        run = trackio.init(
            project=target.word("trackio_project_name", default="offmate") or "offmate",
            resume="allow",
            name=f"{target.name}-{target.key[8:14]}",
            space_id=target.word("trackio_space_id"),
            config=target.settings,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        # Trackio would store a step twice, and offers no public name for the first step that it lacks.
        self._next = int(getattr(run, "_next_step", 0)) if target.told is not None else 0

    def tell(self, points: Sequence[Point]) -> None:
        """Log the points in trackio by step, without the steps that it has already."""
        for step, values in _rows(points):
            if step >= self._next:
                self._trackio.log(values, step=step)

    def close(self, status: str | None) -> None:
        """Wait until trackio has stored everything."""
        self._trackio.finish()


class Mlflow:
    """Sends figures to mlflow, as one run that is found again by a tag. At the start mlflow is asked which points it
    has."""

    unsure_s = 0.0
    row_a_step = False

    def __init__(self, target: Target) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        database = f"sqlite:///{target.state}/mlflow.db"
        self._client = client = MlflowClient(target.word("mlflow_tracking_uri", "MLFLOW_TRACKING_URI", database))
        name = target.word("mlflow_experiment_name", "MLFLOW_EXPERIMENT_NAME", "offmate")
        experiment = client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else client.create_experiment(name)
        runs = client.search_runs([number], f"tags.offmate = '{target.key}'")
        if runs:
            self._run = runs[0].info.run_id
            client.update_run(self._run, "RUNNING")
        else:
            self._run = client.create_run(number, tags={"offmate": target.key}, run_name=target.name).info.run_id
            settings = [Param(key, str(value)) for key, value in target.settings.items()]
            for first in range(0, len(settings), 100):
                client.log_batch(self._run, params=settings[first : first + 100])
        self._has = {
            (name, metric.step)
            for names in _NAMES.values()
            for name in names.values()
            if runs and target.told is not None
            for metric in client.get_metric_history(self._run, name)
            if metric.step >= target.told
        }

    def tell(self, points: Sequence[Point]) -> None:
        """Send the points to mlflow in batches, without those that it has already."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(1000 * point.time), point.step)
            for point in points
            for name, value in point.values.items()
            if (name, point.step) not in self._has
        ]
        for first in range(0, len(metrics), 500):
            self._client.log_batch(self._run, metrics=metrics[first : first + 500])

    def close(self, status: str | None) -> None:
        """Record in mlflow how the run ended."""
        ended = {None: "SCHEDULED", "done": "FINISHED", "stopped": "SCHEDULED"}.get(status, "FAILED")
        self._client.set_terminated(self._run, ended) if ended != "SCHEDULED" else self._client.update_run(
            self._run, ended
        )


def quiet() -> None:
    """Keep trackers from sending reports about themselves, from asking questions at the terminal, and from using the
    GPU. Changes this process's environment and stdin."""
    os.environ.setdefault("WANDB_DISABLE_SENTRY", "true")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # no tracker may take the GPU
    sys.stdin = io.StringIO()
