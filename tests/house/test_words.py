"""How the product's texts are written: a number and its noun agree, whatever the number is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOUNS = """batch block character checkpoint column conversation day document entry epoch evaluation field file group
    hour job key layer mark message micro-batch minute mistake night operation pair piece prompt record round row sample
    second segment share shard slice step tensor text time token turn weight"""
PLURALS = "|".join(sorted({f"{noun}s" for noun in NOUNS.split()} | {"batches", "entries", "micro-batches"}))
AFTER_VALUE = re.compile(rf" (?:more |other )?(?:{PLURALS})\b(?!/)")
IN_LOG = re.compile(rf"(?<!of )%d (?:more |other )?(?:{PLURALS})\b")
SEVERAL = {
    ("offmated/cli/doctor.py", "times"),
    ("offmated/cli/job_view.py", "steps"),
    ("offmated/service/notifier.py", "jobs"),
    ("planner/commands/ask.py", "rows"),
    ("planner/graph/detect.py", "times"),
    ("planner/data/broken_rows.py", "records"),
    ("planner/importers/axolotl_data.py", "entries"),
    ("planner/measure/analysis.py", "micro-batches"),
    ("planner/picture/headline.py", "rounds"),
    ("planner/picture/headline.py", "slices"),
    ("planner/schedule/measured.py", "turns"),
    ("planner/whatif/what_helps.py", "slices"),
    ("worker/api.py", "batches"),
    ("worker/api.py", "micro-batches"),
    ("worker/check/certificate.py", "layers"),
    ("worker/data/hub_files.py", "files"),
    ("worker/data/chat_turns.py", "tokens"),
    ("worker/check/first_records.py", "records"),
    ("worker/data/batches.py", "tokens"),
}
"""Told of several only, or of a factor; one is told in other words."""
FOR_PROGRAMMERS = (
    "planner/schedule/chain.py",
    "planner/schedule/compile.py",
    "planner/schedule/plan.py",
    "planner/schedule/verify.py",
    "worker/engine/engine.py",
)
"""What stands in them is raised for whoever calls them otherwise than they are meant."""


def plurals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the words of each value in a text with a noun behind it that says that it is several."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            for value, text in zip(node.values, node.values[1:], strict=False):
                if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant) and not _is_fixed(value):
                    found = AFTER_VALUE.match(str(text.value))
                    yield from [] if found is None else [(node.lineno, found[0].split()[-1])]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((node.lineno, found.split()[-1]) for found in IN_LOG.findall(node.value))


def _is_fixed(value: ast.FormattedValue) -> bool:
    """A constant's name, or a number with decimals or a unit's format."""
    return value.format_spec is not None or (isinstance(value.value, ast.Name) and value.value.id.isupper())


def test_no_text_writes_a_plural_behind_a_number_that_may_be_one() -> None:
    found = set()
    for package in ("offmated", "planner", "worker"):
        for file in sorted((ROOT / package).rglob("*.py")):
            name = str(file.relative_to(ROOT))
            for line, noun in plurals(ast.parse(file.read_text("utf-8"))):
                if (name, noun) not in SEVERAL and name not in FOR_PROGRAMMERS:
                    found.add(f"{name}:{line}: {noun}")
    assert not found, f"planner.units.counted says 1 row and 2 rows: {sorted(found)}"


def test_a_plural_behind_a_number_is_found() -> None:
    found = """f"{n} rows"; log.info("%d more steps", n)"""
    right = """f"{n} tokens/s"; f"{MOST} rows"; f"{n} rowser"; log.info("%d of %d rows", a, b)"""
    assert list(plurals(ast.parse(found))) == [(1, "rows"), (1, "steps")]
    assert list(plurals(ast.parse(right))) == []
