"""Who may import whom, read from the source; and what importing the command line loads, seen in a process."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests import ROOT

HOUSE = ("planner", "worker", "offmated", "offmate")
MAY_IMPORT = {
    # folder: the folders it may import; everyone may import the root of its package, which imports no folder
    "planner": (),
    "planner.error_codes": (),
    "planner.keys": ("planner.machine", "planner.optimizers"),
    "planner.data": ("planner.keys",),
    "planner.importers": ("planner.data", "planner.keys", "planner.machine", "planner.optimizers"),
    "planner.optimizers": ("planner.machine", "planner.cpu"),
    "planner.job": (
        "planner.importers",
        "planner.data",
        "planner.keys",
        "planner.machine",
        "planner.optimizers",
    ),
    "planner.run": (),
    "planner.machine": (),
    "planner.cpu": (),
    "planner.schedule": ("planner.machine", "planner.optimizers"),
    "planner.candidate": ("planner.schedule", "planner.machine"),
    "planner.ilp": ("planner.candidate", "planner.schedule", "planner.machine"),
    "planner.greedy": ("planner.candidate", "planner.schedule", "planner.machine"),
    "planner.arrange": ("planner.schedule", "planner.cpu"),
    "planner.search": (
        "planner.arrange",
        "planner.ilp",
        "planner.greedy",
        "planner.candidate",
        "planner.schedule",
        "planner.machine",
    ),
    "planner.graph": ("planner.cpu", "planner.machine"),
    "planner.models": (
        "planner.graph",
        "planner.cpu",
        "planner.job",
        "planner.importers",
        "planner.data",
        "planner.keys",
    ),
    "planner.measure": (
        "planner.models",
        "planner.optimizers",
        "planner.graph",
        "planner.cpu",
        "planner.job",
        "planner.importers",
        "planner.data",
        "planner.keys",
        "planner.schedule",
        "planner.machine",
    ),
    "planner.cache": ("planner.optimizers", "planner.schedule", "planner.machine"),
    "planner.reports": ("planner.schedule", "planner.machine"),
    "planner.picture": ("planner.reports", "planner.schedule", "planner.machine"),
    "planner.whatif": (
        "planner.models",
        "planner.optimizers",
        "planner.search",
        "planner.candidate",
        "planner.measure",
        "planner.reports",
        "planner.job",
        "planner.importers",
        "planner.data",
        "planner.keys",
        "planner.schedule",
        "planner.machine",
        "planner.run",
    ),
    "planner.commands": (
        "planner.models",
        "planner.optimizers",
        "planner.whatif",
        "planner.search",
        "planner.arrange",
        "planner.candidate",
        "planner.measure",
        "planner.cache",
        "planner.picture",
        "planner.reports",
        "planner.job",
        "planner.importers",
        "planner.data",
        "planner.keys",
        "planner.schedule",
        "planner.machine",
    ),
    "worker": (),
    "worker.runtime": ("planner.optimizers", "planner.schedule", "planner.cpu"),
    "worker.engine": (
        "worker.runtime",
        "planner.models",
        "planner.optimizers",
        "planner.schedule",
        "planner.cpu",
        "planner.graph",
        "planner.measure",
    ),
    "worker.data": (
        "planner.job",
        "planner.importers",
        "planner.data",
        "planner.keys",
    ),
    "worker.storage": (
        "planner.job",
        "planner.importers",
        "planner.data",
        "planner.keys",
        "planner.schedule",
        "planner.machine",
        "planner.cpu",
    ),
    "worker.subspace": ("planner.models", "planner.optimizers", "worker.storage", "planner.job"),
    "worker.training": (
        "planner.models",
        "planner.optimizers",
        "worker.engine",
        "worker.runtime",
        "worker.data",
        "worker.storage",
        "worker.subspace",
        "planner.measure",
        "planner.graph",
        "planner.job",
        "planner.importers",
        "planner.data",
        "planner.keys",
        "planner.run",
        "planner.schedule",
        "planner.machine",
    ),
    "worker.check": (
        "planner.models",
        "planner.optimizers",
        "worker.engine",
        "worker.runtime",
        "worker.data",
        "worker.storage",
        "worker.subspace",
        "worker.training",
        "planner.commands",
        "planner.search",
        "planner.cache",
        "planner.measure",
        "planner.reports",
        "planner.job",
        "planner.importers",
        "planner.data",
        "planner.keys",
        "planner.run",
        "planner.schedule",
        "planner.machine",
    ),
    # offmate.job_plan and offmate.questions; offmate itself and offmate.child are entries
    "offmate": ("planner.reports", "offmated.cli"),
    "offmated": ("planner.run",),
    "offmated.jobs": (
        "planner.job",
        "planner.importers",
        "planner.data",
        "planner.keys",
        "planner.run",
        "planner.machine",
    ),
    "offmated.api": ("offmated.jobs", "planner.run"),
    "offmated.trackers": (
        "offmated.jobs",
        "planner.job",
        "planner.importers",
        "planner.data",
        "planner.keys",
        "planner.run",
    ),
    "offmated.service": ("offmated.api", "offmated.jobs", "offmated.trackers", "planner.run"),
    "offmated.cli": (
        "offmated.jobs",
        "offmated.service",
        "planner.job",
        "planner.importers",
        "planner.data",
        "planner.keys",
        "planner.run",
        "planner.reports",
        "planner.schedule",
        "planner.machine",
    ),
}
ENTRIES = {
    "worker.api",
    "worker.export",
    "worker.prepare",
    "worker.sample",
    "worker.torch_optimizers",
    "worker.trainer",
    "offmated.command",
    "offmate",
    "offmate.child",
}
"""What people and processes start; beside these every `__main__` and `tasks`. They may import any folder of their
package and of the packages below it, and nothing imports them but another entry."""
BELOW = {
    "planner": ("planner",),
    "worker": ("worker", "planner"),
    "offmated": ("offmated",),
    "offmate": ("offmate", "offmated", "worker", "planner"),
}
EDGES = {"planner.tasks": "offmated.jobs", "worker.tasks": "offmated.jobs"}
"""The two modules that RQ runs, and what they may use of offmated."""
TORCH_FREE = (
    "planner",
    "planner.error_codes",
    "planner.optimizers",
    "planner.job",
    "planner.importers",
    "planner.data",
    "planner.keys",
    "planner.run",
    "planner.machine",
    "planner.schedule",
    "planner.reports",
)
"""The folders of the planner that offmated may use."""
SOLVERS = ("pulp", "highspy")
SOLVE = ("planner.ilp", "planner.search")
RARE = ("peft", "bitsandbytes", "transformers.integrations", "transformers.trainer")
"""Adapters and quantized weights; what stands beside transformers' Trainer loads both."""
HEAVY = ("torch", "transformers", "datasets", "pulp", "highspy", "numpy")


@cache
def modules() -> dict[str, Path]:
    """Every module of the house and its file."""
    found = {}
    for package in HOUSE:
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path, *, at_once: bool = False) -> Iterator[str]:
    """Every module that `path` imports, anywhere in it, or `at_once` when it is imported itself; for `from a import b`
    both `a` and `a.b`."""
    package, tree = name if path.name == "__init__.py" else name.rpartition(".")[0], ast.parse(path.read_text("utf-8"))
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def arrows() -> tuple[tuple[str, str], ...]:
    """Every import of one module of the house by another."""
    house = modules()
    return tuple(
        (name, target)
        for name, path in sorted(house.items())
        for target in imports(name, path)
        if target in house and target != name
    )


def folder(name: str) -> str:
    """The folder of a module; a package is its own."""
    return name if modules()[name].name == "__init__.py" else name.rpartition(".")[0]


def is_entry(name: str) -> bool:
    """Whether a module is started, not imported."""
    return name in ENTRIES or name.rpartition(".")[2] in ("__main__", "tasks")


def allowed(source: str, target: str) -> bool:
    """The rule for one arrow. A package's `__init__` is empty: importing it is as good as nothing."""
    here, there = folder(source), folder(target)
    if here == there or target in HOUSE or target == there:
        return True
    if is_entry(source):
        return there.split(".")[0] in BELOW[here.split(".")[0]] or there in TORCH_FREE or there == EDGES.get(source)
    if is_entry(target):
        return False
    root = there in HOUSE and there in (here.split(".")[0], "planner")
    return root or there in MAY_IMPORT[here]


def test_every_folder_has_its_rule() -> None:
    assert {folder(name) for name in modules()} == set(MAY_IMPORT)


def test_imports_follow_the_rules() -> None:
    found = list(arrows())
    assert ("offmated.cli.client", "planner.errors") in found, "the walk sees nothing"
    assert [f"{source} imports {target}" for source, target in found if not allowed(source, target)] == []


def test_the_rules_themselves_go_one_way() -> None:
    list(TopologicalSorter(MAY_IMPORT).static_order())  # raises CycleError
    assert all(
        there in TORCH_FREE
        for here, all_there in MAY_IMPORT.items()
        if here.startswith("offmated")
        for there in all_there
        if there.startswith("planner")
    )


def test_no_files_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for source, target in arrows():
        if modules()[target].name != "__init__.py":
            graph.setdefault(source, set()).add(target)
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_only_the_folders_that_solve_import_a_solver() -> None:
    users = {folder(name) for name, path in modules().items() if set(imports(name, path)) & set(SOLVERS)}
    assert users <= set(SOLVE)


def test_what_few_jobs_need_is_imported_by_those_that_need_it() -> None:
    early = {
        (name, target)
        for name, path in modules().items()
        for target in imports(name, path, at_once=True)
        if target.startswith(RARE)
    }
    assert early == set()
    assert any(target.startswith(RARE) for name, path in modules().items() for target in imports(name, path))


@pytest.mark.parametrize(
    ("source", "target", "verdict"),
    [
        ("planner.search.make_plan", "worker.engine.engine", False),
        ("planner.search.make_plan", "offmated.jobs.store", False),
        ("planner.tasks", "offmated.jobs.store", True),
        ("planner.tasks", "offmated.api.app", False),
        ("planner.schedule.plan", "planner.search.make_plan", False),
        ("planner.search.make_plan", "planner.schedule.plan", True),
        ("worker.engine.engine", "planner.schedule.plan", True),
        ("worker.engine.engine", "offmated.jobs.store", False),
        ("worker.runtime.cpu", "worker.engine.actions", False),
        ("worker.tasks", "offmated.jobs.store", True),
        ("offmated.api.app", "planner.job.schema", False),
        ("offmated.api.app", "planner.cpu.meter", False),
        ("offmated.api.app", "worker.trainer", False),
        ("offmated.jobs.store", "offmated.service.daemon", False),
        ("offmate.questions", "offmated.cli.planner_process", True),
        ("offmate.questions", "worker.api", False),
        ("offmate.child", "planner.commands.ask", True),
        ("offmated.cli.client", "offmate.questions", False),
        ("worker.api", "offmate.job_plan", False),
    ],
)
def test_the_rule_knows_right_from_wrong(source: str, target: str, verdict: bool) -> None:
    assert allowed(source, target) is verdict


def test_packages_do_nothing_when_imported() -> None:
    for package in ("planner", "worker", "offmated"):  # that of `offmate` gives names, and is tried below
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


def test_importing_offmate_loads_none_of_its_packages() -> None:
    assert loaded_by("import offmate").isdisjoint({*HEAVY, "planner", "worker", "offmated", "yaml"})


def test_what_asks_about_a_job_from_python_loads_nothing_heavy() -> None:
    names = "JobPlan, UserError, Certificate, plan, certify, __version__"
    loaded = loaded_by(f"from offmate import {names}")
    assert "planner" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_looking_at_a_model_and_its_data_loads_no_tracer() -> None:
    """Which takes as long as all else, for what a person waits for at each submission."""
    needed = "worker.check.__main__, worker.check.preview, worker.check.first_records, worker.data.documents"
    assert loaded_by(f"import {needed}\nassert 'torch._dynamo' not in sys.modules").isdisjoint({"peft", "sympy"})


def test_the_torch_free_part_of_the_planner_is_free_of_torch() -> None:
    present = [name for name in modules() if folder(name) in TORCH_FREE and not is_entry(name)]
    assert loaded_by(f"import {', '.join(present)}").isdisjoint(HEAVY)


def test_no_import_begins_cuda() -> None:
    """The first backward of a process does, even of tensors on the CPU; processes that are forked later could not use
    the device, and a trainer's memory could not be planned."""
    code = (
        "import torch\n"
        "def fails(*_, **__): raise AssertionError('a backward')\n"
        "torch.autograd._engine_run_backward = fails\n"
        "import planner.search.problem, planner.measure.analysis, worker.trainer, worker.check.certificate\n"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
