"""The crash matrix, as a table: who dies x what a job is doing then; and accidents of other kinds.

    python -m benchmarks.crashes            # stand-ins for planner and trainer: 5 minutes
    python -m benchmarks.crashes --real     # the real ones with a tiny Llama: half an hour

Each cell is one job; it is there once in the end, done, with the model of an undisturbed run in every bit, and no two
trainers had the GPU at once, or the table says what did not hold, and the exit code is 1. How it is done is in
`tests/support/crashes.py` and `tests/support/accidents.py`; docs/how-to/after-a-crash.md sums up what comes out.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from functools import partial

from tests.support.accidents import ACCIDENTS, full_disk, happen
from tests.support.crashes import ACTORS, STATES, Row, row_of

KILLED = {
    "power": "the power",
    "daemon": "the daemon",
    "broker": "the broker",
    "workers": "both workers",
    "horse": "the work horses",
    "trainer": "the planner and the trainer",
}
BROKEN = "**does not hold**"


def main(arguments: list[str]) -> int:
    """Print the tables; 1 where something did not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crashes")
    parser.add_argument("--real", action="store_true", help="the real planner and trainer, with a tiny Llama")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="what has the word in its name")
    asked = parser.parse_args(arguments)

    def wanted(name: str) -> bool:
        return not asked.only or any(part in name for part in asked.only)

    print("| state | " + " | ".join(f"{KILLED[actor]}" for actor in ACTORS if wanted(actor)) + " |", flush=True)
    rows = [_row(actor, real=asked.real) for actor in ACTORS if wanted(actor)]
    print("|---" * (1 + len(rows)) + "|")
    for state in STATES:
        print(f"| {state} | " + " | ".join(row.cells[state] for row in rows) + " |")
    print("\n| what happens | the job that ran |\n|---|---|")
    accidents: dict[str, Callable[[], str]] = {name: partial(happen, name, real=asked.real) for name in ACCIDENTS}
    accidents["a disk that gets full, also for the database and the broker"] = full_disk
    told = {name: _told(happens) for name, happens in accidents.items() if wanted(name)}
    for name, cell in told.items():
        print(f"| {name} | {cell} |", flush=True)
    whole = BROKEN not in {*told.values(), *(cell for row in rows for cell in row.cells.values())}
    return 0 if whole else 1


def _row(actor: str, *, real: bool) -> Row:
    try:
        return row_of(actor, real=real)
    except AssertionError:
        traceback.print_exc()
        return Row(actor=actor, cells=dict.fromkeys(STATES, BROKEN))


def _told(happens: Callable[[], str]) -> str:
    try:
        return happens()
    except AssertionError:
        traceback.print_exc()
        return BROKEN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
