"""The entry point of the command line."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from planner.errors import Exit
from tests import ROOT

INTERRUPTED = """
import sys
class Finder:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("module", ["offmated.cli", "click", "planner.errors", "offmated.cli.service"])
def test_an_interrupt_while_modules_are_imported_ends_with_its_code_and_no_traceback(module: str) -> None:
    """As the script that pip makes of pyproject.toml's entry point."""
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]["offmate"]
    where, _, name = entry.partition(":")
    code = f"{INTERRUPTED}\nfrom {where} import {name}\nsys.exit({name}())"
    done = subprocess.run([sys.executable, "-c", code, module], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (Exit.INTERRUPTED, "", "")


def test_the_daemons_own_module_takes_no_command() -> None:
    done = subprocess.run([sys.executable, "-m", "offmated", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (Exit.USAGE, "") and "offmate --help" in done.stderr
