"""Writes a run's numbers as a table for other programs (`offmate metrics`)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from typing import Any

from planner.run.events import EVAL_PAIR_FIGURES, PAIR_FIGURES

COLUMNS = (
    "step",
    "time",
    "loss",
    "eval_loss",
    "learning_rate",
    "grad_norm",
    "tokens",
    "step_s",
    "predicted_step_s",
    "gpu_peak_bytes",
)
_ALL = (*COLUMNS, *PAIR_FIGURES, *EVAL_PAIR_FIGURES)


def as_csv(events: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a CSV file with a row for each step, in order. Where a step was done again after a resume or a
    crash, the row has the last values. Columns beyond `COLUMNS` are there only where some row has a value for them."""
    rows: dict[int, dict[str, Any]] = {}
    for event in events:
        step = event.get("step")
        if event["event"] == "start":
            rows = {number: row for number, row in rows.items() if number <= event["step"]}
        elif event["event"] in ("step", "eval") and isinstance(step, int):
            row = rows.setdefault(step, {})
            row |= {name: event[name] for name in _ALL if event.get(name) is not None}
    columns = [name for name in _ALL if name in COLUMNS or any(name in row for row in rows.values())]
    yield _line(columns)
    for _, row in sorted(rows.items()):
        yield _line([row.get(name, "") for name in columns])


def _line(values: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(values)
    return text.getvalue()
