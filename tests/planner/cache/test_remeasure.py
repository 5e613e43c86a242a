"""A measurement that was taken on a busy machine does not decide for ever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from planner.cache.store import Cache
from planner.cache.tables import metadata
from planner.run.folder import RunFolder
from worker.tasks import forget_if_wrong
from worker.training.metrics import Metrics

PREDICTED_S = 2.0


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A database with one measurement, "m"."""
    url = f"sqlite:///{tmp_path / 'offmate.db'}"
    metadata.create_all(create_engine(url))
    Cache(url).keep_measurement("m", {}, device="here")
    return url


def finished(folder: Path, step_s: float, *, steps: int = 10, measurement: str | None = "m") -> RunFolder:
    """A run whose steps took that long, after two cold ones."""
    run = RunFolder(folder)
    # The plan is for full rows, and these are shorter: that alone drops no measurement.
    run.plan.write_text(json.dumps({"plan": {"step_s": 3 * PREDICTED_S}, "measurement": measurement}))
    with Metrics(run.metrics) as metrics:
        metrics.write("start", step=0, resumed_from=None)
        for step in range(1, steps + 1):
            metrics.write(
                "step",
                step=step,
                step_s=99.0 if step <= 2 else step_s,
                gpu_peak_bytes=None,
                predicted_step_s=PREDICTED_S,
            )
    return run


@pytest.mark.parametrize("step_s", [PREDICTED_S * 1.6, PREDICTED_S / 1.6])
def test_a_prediction_that_was_far_off_drops_its_measurement_and_says_so(
    tmp_path: Path, url: str, step_s: float
) -> None:
    run = finished(tmp_path, step_s)
    assert forget_if_wrong(run, url)
    assert Cache(url).find_measurement("m") is None
    assert "predicted were 2.0 s: what was measured for this plan is dropped" in run.log.read_text("utf-8")


@pytest.mark.parametrize("step_s", [PREDICTED_S * 1.4, PREDICTED_S / 1.4])
def test_a_prediction_that_was_near_keeps_it(tmp_path: Path, url: str, step_s: float) -> None:
    assert not forget_if_wrong(finished(tmp_path, step_s), url)
    assert Cache(url).find_measurement("m") is not None


def test_a_run_of_few_steps_says_nothing(tmp_path: Path, url: str) -> None:
    assert not forget_if_wrong(finished(tmp_path, 50.0, steps=4), url)
    assert not forget_if_wrong(finished(tmp_path, 50.0, measurement=None), url)
    assert Cache(url).find_measurement("m") is not None
