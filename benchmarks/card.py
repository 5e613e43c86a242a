"""What a card must be asked first, in one go and ten minutes: everything that the emulated device cannot say.

    python -m benchmarks.card [--minutes 10] [--layers 16] [--width 1024] [--json FILE]

Each question is a process of its own with its share of the time (card_questions.py), so that one which fails or hangs
leaves the others their answers; JSON is written after each, to results/card-DEVICE.json. The plan is for a quarter of
plain PyTorch's peak, in bf16 with fp32 masters, and in fp32. Last come `pytest -m gpu` and a short `gpu.py`, which has
peaks and times at shares of plain PyTorch's peak and at the least budget.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).with_name("results")
QUESTIONS = {
    "machine": 50, "copies": 30, "plain-fp32": 30, "plan-fp32": 45, "bits-fp32": 30, "engine-fp32": 45,
    "plain-bf16": 30, "plan-bf16": 70, "bits-bf16": 30, "engine-bf16": 45, "peaks-bf16": 60, "plan-small": 40,
    "engine-small": 30, "plan-compiled": 60, "engine-compiled": 40, "tests": 100, "budgets": 120,
}  # fmt: skip
"""Name -> seconds it may take at most. A plan is for a quarter of what plain PyTorch took; an engine runs it."""
_TAIL = 3000


def command_of(question: str, folder: Path, sizes: list[str]) -> list[str]:
    """What answers it."""
    if question == "tests":
        return [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--tb=short", "tests"]
    if question == "budgets":
        rest = ["--rounds", "2", "--steps", "2", "--planning-seconds", "5", "--shares", "1.0", "0.5", "0.25"]
        return [
            sys.executable, "benchmarks/gpu.py", "--dtype", "bf16", *sizes, *rest, "--json", str(folder / "gpu.json")
        ]  # fmt: skip
    return [sys.executable, "-m", "benchmarks.card_questions", question, str(folder)]


def ask(question: str, folder: Path, sizes: list[str], limit_s: float) -> dict[str, Any]:
    """The answer, or what became of it."""
    begin = time.monotonic()
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ, "PYTHONPATH": str(ROOT)}  # as certify has it
    with (folder / f"{question}.log").open("w+") as log:
        process = subprocess.Popen(
            command_of(question, folder, sizes), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            code: int | None = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        log.seek(0)
        text = log.read()
    made = folder / ("gpu.json" if question == "budgets" else f"{question}.json")
    answer = json.loads(made.read_text("utf-8")) if made.exists() else None
    found: dict[str, Any] = {"seconds": round(time.monotonic() - begin, 1), "exit_code": code, "answer": answer}
    if code != 0 or answer is None:
        found["said"] = text[-_TAIL:]
    return found


def main() -> int:
    """Ask everything; the exit status is 1 where an answer is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    for name, usual in (("layers", 16), ("width", 1024), ("length", 512), ("batch", 4), ("slices", 4)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only tries the script")
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=tuple(QUESTIONS))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="offmate-card-") as name:
        folder = Path(name)
        sizes = {n: getattr(given, n) for n in ("layers", "width", "length", "batch", "slices")}
        work = {**sizes, "vocabulary": 16384, "device": given.device}
        (folder / "work.json").write_text(json.dumps(work), "utf-8")
        words = [word for n, size in sizes.items() for word in (f"--{n}", str(size))] + ["--device", given.device]
        for question in given.only:
            left = end - time.monotonic()
            if left < 5:
                found[question] = {"said": "no time was left"}
                continue
            found[question] = answer = ask(question, folder, words, min(QUESTIONS[question], left))
            print(f"{question:12} {answer['seconds']:6.1f} s, exit {answer['exit_code']}", flush=True)
            device = ((found.get("machine") or {}).get("answer") or {}).get("device", "none")
            path = given.json or RESULTS / f"card-{re.sub('[^a-z0-9]+', '-', device.lower())}.json"
            path.write_text(json.dumps({"work": work, "found": found}, indent=1) + "\n", "utf-8")
    print(f"written: {path}")
    return int(any(one.get("exit_code") != 0 for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
