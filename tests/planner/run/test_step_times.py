"""Which steps of a run are the ones whose time is told."""

from __future__ import annotations

from typing import Any

import pytest

from planner.run.step_times import step_times


def start(step: int) -> dict[str, Any]:
    return {"event": "start", "step": step}


def steps(first: int, *step_s: float, **values: Any) -> list[dict[str, Any]]:
    """Steps from number `first` on that took so long."""
    return [
        {"event": "step", "step": number, "step_s": taken, "gpu_peak_bytes": None, **values}
        for number, taken in enumerate(step_s, start=first)
    ]


def test_a_steps_time_is_the_median_without_the_first_two_after_each_start() -> None:
    events = [start(0), *steps(1, 9.0, 8.0, 1.0, 2.0, 3.0), start(5), *steps(6, 7.0, 6.0, 4.0)]
    found = step_times(events)
    assert (found.step_s, found.steps, found.steady) == (2.5, 4, True)


def test_the_end_of_a_long_series_is_enough() -> None:
    found = step_times([start(0), *steps(4000, 1.0, 2.0, 3.0)])
    assert (found.step_s, found.steps) == (2.0, 3)


def test_what_comes_between_steps_is_not_counted() -> None:
    between = [{"event": "eval", "step": 4, "eval_loss": 1.0}, {"event": "checkpoint", "step": 4, "path": ""}]
    assert step_times([start(0), *steps(3, 1.0, 2.0), *between, *steps(5, 3.0)]).step_s == 2.0


def test_metered_steps_count_only_where_there_are_no_others() -> None:
    cold, metered = steps(1, 9.0, 9.0, metered=True), steps(3, 5.0, 4.0, 3.0, metered=True)
    free = steps(6, 2.0, 1.0, 1.5, metered=False)
    assert step_times([start(0), *cold, *metered, *free]).step_s == 1.5
    only = step_times([start(0), *cold, *metered])
    assert (only.step_s, only.steps, only.steady) == (4.0, 3, False)


def test_few_steps_are_better_than_none() -> None:
    nothing = step_times([start(0)])
    assert (nothing.step_s, nothing.predicted_step_s, nothing.steps) == (None, None, 0)
    found = step_times([start(0), *steps(1, 0.5)])
    assert (found.step_s, found.steps, found.steady) == (0.5, 1, False)


def test_the_largest_peak_of_any_step_is_told() -> None:
    events = [start(0), *steps(1, 1.0, gpu_peak_bytes=90), *steps(2, 1.0, 1.0), *steps(4, 1.0, gpu_peak_bytes=80)]
    assert step_times(events).gpu_peak_bytes == 90
    evaluated = {"event": "eval", "step": 4, "eval_loss": 1.0, "gpu_peak_bytes": 95}
    assert step_times([*events, evaluated]).gpu_peak_bytes == 95
    assert step_times([start(0)]).gpu_peak_bytes is None


def test_the_prediction_told_is_that_for_the_same_steps() -> None:
    full, short = {"predicted_step_s": 8.0}, {"predicted_step_s": 2.0}
    found = step_times([start(0), *steps(1, 9.0, 9.0, **full), *steps(3, 8.5, **full), *steps(4, 2.5, 2.5, **short)])
    assert (found.step_s, found.predicted_step_s) == (2.5, 2.0)


@pytest.mark.parametrize("count", [2, 3])
def test_three_steps_are_enough_to_rest_on(count: int) -> None:
    assert step_times([start(0), *steps(3, *[1.0] * count)]).steady == (count >= 3)
