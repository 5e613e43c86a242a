"""The code under Python versions other than the one that runs the tests: it compiles there without a warning, and what
it takes from the standard library is there. Nothing of it is run, as PyTorch for each version would be gigabytes."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT

VERSIONS = ("3.12", "3.13", "3.14")
PRODUCT = ("offmate", "planner", "worker", "offmated", "alembic", "examples", "deploy")
CHECK = """
import importlib, json, sys, warnings
warnings.simplefilter("error")
question = json.load(sys.stdin)
for file in question["files"]:
    with open(file, "rb") as source:
        compile(source.read(), file, "exec", dont_inherit=True)
missing = []
for module, name in question["names"]:
    try:
        found = importlib.import_module(module)
        if name and not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
    except ImportError as error:
        missing.append(f"{module} {name}: {error}")
print(json.dumps(missing))
"""


def interpreter(version: str) -> str | None:
    """A Python of this version: on the PATH, or among those of pyenv; None where there is none."""
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [shutil.which(f"python{version}"), *map(str, sorted(root.glob(f"versions/{version}.*/bin/python")))]
    show = "import sys; print('%d.%d' % sys.version_info[:2])"
    for candidate in filter(None, candidates):  # pyenv puts a program on the PATH that may find no version to start
        if subprocess.run([candidate, "-c", show], capture_output=True, text=True).stdout.strip() == version:
            return candidate
    return None


def files() -> list[Path]:
    return sorted(path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py"))


def taken_from_the_standard_library(path: Path) -> Iterator[tuple[str, str]]:
    """Modules, and names in modules, that a file imports from the standard library."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            pairs = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            pairs = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        yield from (pair for pair in pairs if pair[0].partition(".")[0] in sys.stdlib_module_names)


def check(python: str, sources: list[Path], names: list[tuple[str, str]]) -> subprocess.CompletedProcess[str]:
    question = json.dumps({"files": list(map(str, sources)), "names": names})
    return subprocess.run([python, "-I", "-c", CHECK], input=question, capture_output=True, text=True, cwd="/")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_code_compiles_and_finds_its_standard_library(version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} on the PATH or in pyenv")
    sources = files()
    names = sorted({pair for path in sources for pair in taken_from_the_standard_library(path)})
    assert len(sources) > 300
    assert ("pathlib", "Path") in names
    done = check(python, sources, names)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_the_check_sees_a_warning_and_a_name_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1 is 1\n")
    warned = check(sys.executable, [tmp_path / "a.py"], [])
    assert warned.returncode == 1
    assert '"is" with' in warned.stderr
    missing = json.loads(check(sys.executable, [], [("json", "nothing"), ("json", "tool"), ("asyncore2", "")]).stdout)
    assert [line.split(":")[0] for line in missing] == ["json nothing", "asyncore2 "]
