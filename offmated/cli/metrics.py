"""Writes a run's numbers as a table for other programs (`offmate metrics`)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from typing import Any

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


def as_csv(events: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a CSV file with a row for each step, in order. Where a step was done again after a resume or a
    crash, the row has the last values."""
    rows: dict[int, dict[str, Any]] = {}
    for event in events:
        step = event.get("step")
        if event["event"] == "start":
            rows = {number: row for number, row in rows.items() if number <= event["step"]}
        elif event["event"] in ("step", "eval") and isinstance(step, int):
            row = rows.setdefault(step, {})
            row |= {name: event[name] for name in COLUMNS if event.get(name) is not None}
    yield _line(COLUMNS)
    for _, row in sorted(rows.items()):
        yield _line([row.get(name, "") for name in COLUMNS])


def _line(values: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(values)
    return text.getvalue()
