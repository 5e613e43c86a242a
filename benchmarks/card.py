"""What a card must be asked first, in one go and ten minutes: everything that the emulated device cannot say.

    python -m benchmarks.card [--minutes 10] [--only QUESTION ...] [--layers 16] [--width 1024] [--json FILE]

Imports and weights are made once; each question is a process forked from this one, with its share of the time
(card_questions.py), so that one which fails or hangs leaves the others theirs, and itself what it has found by then.
They are asked in the order in which answers are missing. JSON is written after each, to results/card-DEVICE.json. Plans
are for a quarter of plain PyTorch's peak, in fp32, and in bf16 with fp32 masters; `budgets` is gpu.py with a larger
model at a tenth and a quarter, and at the least budget.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# What a question starts finds the project, and after it whatever is carried on PYTHONPATH.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["PYTHONPATH"] = os.pathsep.join((sys.path[0], *filter(None, [os.environ.get("PYTHONPATH")])))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as planner and trainer do, before torch starts its threads
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's begin with the import, and a fork has them no more

from benchmarks import card_questions, gpu
from benchmarks.card_engine import work_of
from benchmarks.card_tests import run_tests
from benchmarks.forked import Forks, said
from planner.machine.this_machine import driver_card

RESULTS = Path(__file__).with_name("results")
QUESTIONS = {
    "plain-fp32": 30,
    "plan-fp32": 45,
    "bits-fp32": 30,
    "engine-fp32": 45,
    "plain-bf16": 30,
    "plan-bf16": 45,
    "peaks-bf16": 60,
    "budgets": 160,
    "tests": 110,
    "bits-bf16": 30,
    "engine-bf16": 45,
    "plan-compiled": 60,
    "engine-compiled": 40,
    "plan-small": 40,
    "engine-small": 30,
    "machine": 50,
    "copies": 30,
}
"""Name -> seconds it may take at most, in order of value. A plan is for a quarter of what plain PyTorch took, or would
take by the planner's count; an engine runs it."""
SIZES = {"layers": 16, "width": 1024, "length": 512, "batch": 4, "slices": 4}
_TAIL = 8000


def answer(question: str, folder: Path, words: Sequence[str], _: Connection) -> None:
    """Answer it in `folder`, in this process. `words`: gpu.py's."""
    if question == "budgets":
        sys.exit(gpu.main([*words, "--json", str(folder / "budgets.json")]))
    if question == "tests":
        sys.exit(run_tests(folder / "tests.json"))
    card_questions.answer(question, folder)


def ask(forks: Forks, question: str, folder: Path, words: Sequence[str], limit_s: float) -> dict[str, Any]:
    """The answer, or what became of it; where bits are compared, the kernels that computed it."""
    begin = time.monotonic()
    log = folder / f"{question}.log"
    code = forks.start(partial(answer, question, folder, words), log).wait(limit_s)
    made = folder / f"{question}.json"
    given = json.loads(made.read_text("utf-8")) if made.exists() else None
    found: dict[str, Any] = {"seconds": round(time.monotonic() - begin, 1), "exit_code": code, "answer": given}
    if (kernels := folder / f"{question}.kernels").exists():
        found["kernels"] = kernels.read_text("utf-8")
    if code != 0 or given is None or question == "budgets":
        found["said"] = log.read_text("utf-8", "replace")[-_TAIL:]
    return found


def _device(asked: str) -> str:
    """Its name, for which CUDA need not begin."""
    try:
        return "cpu" if asked == "cpu" else driver_card().name
    except (OSError, subprocess.SubprocessError, ValueError):
        return "unknown"


def _of_gpu(given: argparse.Namespace) -> list[str]:
    """Words for gpu.py: 0.87 B parameters, 32,768 tokens a step, for which plain PyTorch takes about 28 GB."""
    tail = ["--dtype", "bf16", "--rounds", "2", "--steps", "2", "--planning-seconds", "8"]
    if given.device == "cpu":
        return ["--device", "cpu", *tail, "--shares", "0.5"]
    sizes = {"layers": 16, "width": 2048, "length": 1024, "batch": 8, "slices": 4}
    return [
        *(word for name, size in sizes.items() for word in (f"--{name}", str(size))),
        *tail,
        "--shares",
        "0.1",
        "0.25",
    ]


def main() -> int:
    """Ask everything; the exit status is 1 where an answer is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    for name, usual in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only tries the script")
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=tuple(QUESTIONS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    said("all is imported")
    device = _device(given.device)
    path = given.json or RESULTS / f"card-{re.sub('[^a-z0-9]+', '-', device.lower())}.json"
    forks, found = Forks(), dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="offmate-card-") as name:
        folder = Path(name)
        work = {**{name: getattr(given, name) for name in SIZES}, "vocabulary": 16384, "device": given.device}
        (folder / "work.json").write_text(json.dumps(work), "utf-8")
        for question in given.only:
            left = end - time.monotonic()
            if left < 5:
                found[question] = {"said": "no time was left"}
                continue
            if about := question.partition("-")[2]:
                work_of(folder, about).prepare()
            said(f"{question}: asked")
            found[question] = one = ask(forks, question, folder, _of_gpu(given), min(QUESTIONS[question], left))
            said(f"{question}: {one['seconds']:.1f} s, exit {one['exit_code']}")
            path.write_text(json.dumps({"device": device, "work": work, "found": found}, indent=1) + "\n", "utf-8")
    print(f"written: {path}")
    return int(any(one.get("exit_code") != 0 for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
