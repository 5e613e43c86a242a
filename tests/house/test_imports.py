"""Who may import whom, read from the source; and what importing the command line loads, seen in a process."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

HOUSE = ("planner", "worker", "offmated")
TORCH_FREE = {
    "planner.job.schema", "planner.job.source", "planner.job.paths", "planner.errors", "planner.units",
    "planner.schedule.chain", "planner.machine.hardware", "planner.schedule.plan", "planner.codec",
    "planner.run.processes", "planner.job.output_dir", "planner.run.folder", "planner.run.watch",
    "planner.reports.receipt", "planner.reports.certificate", "planner.job.evaluation", "planner.job.lora",
    "planner.job.data_check", "planner.machine.memory", "planner.run.step_times",
}  # fmt: skip
"""The part of the planner that offmated may use."""
JOBS = {"offmated.jobs.table", "offmated.jobs.states", "offmated.jobs.store"}
EDGES = {"planner.tasks": JOBS, "worker.tasks": JOBS}
"""The two modules that RQ runs, and what they may use of offmated."""
HEAVY = ("torch", "transformers", "datasets", "pulp", "highspy", "numpy")


def modules() -> dict[str, Path]:
    """Every module of the house and its file."""
    found = {}
    for package in HOUSE:
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path) -> Iterator[str]:
    """Every module that `path` imports, anywhere in it; for `from a import b` both `a` and `a.b`."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def arrows() -> Iterator[tuple[str, str]]:
    """Every import of one module of the house by another."""
    house = modules()
    for name, path in sorted(house.items()):
        for target in imports(name, path):
            if target in house and target != name:
                yield name, target


def allowed(source: str, target: str) -> bool:
    """The design's rule for one arrow. Importing a package itself is as good as nothing: they are empty."""
    here, there = source.split(".")[0], target.split(".")[0]
    if here == there or target in EDGES.get(source, ()):
        return True
    if here == "worker":
        return there == "planner"
    if here == "offmated":
        return target in TORCH_FREE or target == "planner"
    return False


def test_imports_follow_the_design() -> None:
    found = list(arrows())
    assert ("offmated.cli.client", "planner.errors") in found, "the walk sees nothing"
    assert [f"{source} imports {target}" for source, target in found if not allowed(source, target)] == []


@pytest.mark.parametrize(
    ("source", "target", "verdict"),
    [
        ("planner.search.make_plan", "worker.engine.engine", False),
        ("planner.search.make_plan", "offmated.jobs.store", False),
        ("planner.tasks", "offmated.jobs.store", True),
        ("planner.tasks", "offmated.api.app", False),
        ("worker.engine.engine", "planner.schedule.plan", True),
        ("worker.engine.engine", "offmated.jobs.store", False),
        ("worker.tasks", "offmated.jobs.store", True),
        ("offmated.api.app", "planner.job.schema", True),
        ("offmated.api.app", "planner.cpu.meter", False),
        ("offmated.api.app", "worker.trainer", False),
    ],
)
def test_the_rule_knows_right_from_wrong(source: str, target: str, verdict: bool) -> None:
    assert allowed(source, target) is verdict


def test_packages_do_nothing_when_imported() -> None:
    for package in ("planner", "worker", "offmated"):
        tree = ast.parse((ROOT / package / "__init__.py").read_text("utf-8"))
        assert not list(imports(package, ROOT / package / "__init__.py"))
        assert all(isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign) for node in tree.body)


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in memory after `statement`, in a process of its own."""
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(answer.stdout.splitlines()[-1]))


def test_the_command_line_loads_nothing_heavy() -> None:
    command_line = [name for name in modules() if name == "offmated.cli" or name.startswith("offmated.cli.")]
    loaded = loaded_by(f"import {', '.join(command_line)}")
    assert {"offmated", "click"} <= loaded
    assert loaded.isdisjoint(HEAVY)


def test_the_torch_free_part_of_the_planner_is_free_of_torch() -> None:
    present = sorted(TORCH_FREE & modules().keys())
    assert loaded_by(f"import {', '.join(present)}").isdisjoint(HEAVY)
