"""The entry point of the command line."""

from __future__ import annotations

import os
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


ORDER = """
import os, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "offmated.cli":
            sys.exit(os.environ["CUDA_DEVICE_ORDER"])
sys.meta_path.insert(0, Finder())
from offmated.command import main
main()
"""


@pytest.mark.parametrize(
    ("said", "order"), [({}, "PCI_BUS_ID"), ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "FASTEST_FIRST")]
)
def test_cuda_counts_cards_as_the_drivers_tools_do_in_all_that_it_starts(said: dict[str, str], order: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_ORDER"} | said
    done = subprocess.run([sys.executable, "-c", ORDER], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stderr == f"{order}\n"


def test_the_daemons_own_module_takes_no_command() -> None:
    done = subprocess.run([sys.executable, "-m", "offmated", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (Exit.USAGE, "") and "offmate --help" in done.stderr
