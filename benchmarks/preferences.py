"""What DPO costs beside fine-tuning: planned steps and peaks of 8 B, and the pass of the reference.

    nice python -m benchmarks.preferences --json benchmarks/results/preferences.json

A pair has two rows of 1024 tokens; fine-tuning beside it has one, the chosen answer's. Nothing runs on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks import questions
from benchmarks.lsp import head, line
from benchmarks.lsp_plans import LENGTH, MODEL, Asked, job_of
from planner.commands.ask import ask
from planner.commands.kept_traces import Traces
from planner.machine.presets import preset

CASES: tuple[tuple[str, int, dict[str, Any], int], ...] = (
    ("rtx3060", 32, {"method": "lora"}, 1),
    ("rtx3060", 32, {"method": "lora"}, 8),
    ("rtx4090", 32, {"method": "lora"}, 1),
    ("rtx4090", 128, {}, 1),
    ("rtx4090", 128, {}, 8),
)
"""Card, GiB of RAM, keys of the method, micro-batches of one pair or row."""
MOST = 2.1
"""A step of DPO is to take at most so many times that of fine-tuning."""


def reference(notes: Sequence[str]) -> str:
    """The share of an epoch's time that the reference pass takes, as a receipt's notes say it."""
    return next(found[1] for note in notes if (found := re.search(r"reference model.* about (\d+%)", note)))


def main() -> None:
    """Ask the planner and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    traces, rows = Traces(), []
    print(f"{MODEL}, bf16, micro-batches of one pair, or row, of {LENGTH} tokens")
    head(
        "card, RAM", "method", "micro-batches", "fine-tuning", "DPO", "DPO over it", "peak of budget", "reference pass"
    )
    with tempfile.TemporaryDirectory(prefix="offmate-preferences-") as scratch:
        questions.write_models(Path(scratch))
        for card, ram_gib, method, slices in CASES:
            machine = preset(card, bf16=True, cpu_memory_bytes=ram_gib * 2**30)
            receipts = [
                ask(
                    job_of(Asked(model=Path(scratch) / MODEL, keys={**method, **more}, length=LENGTH, slices=slices)),
                    machine,
                    traces=traces,
                    helps=False,
                )
                for more in ({}, {"preference": "dpo"})
            ]
            tuned, dpo = receipts
            ratio = dpo.step_s / tuned.step_s
            rows.append(
                {
                    "card": card,
                    "ram_gib": ram_gib,
                    "method": method.get("method", "full"),
                    "slices": slices,
                    "fine_tuning_s": tuned.step_s,
                    "dpo_s": dpo.step_s,
                    "ratio": ratio,
                    "peak_bytes": dpo.gpu_peak_bytes,
                    "budget_bytes": dpo.gpu_budget_bytes,
                    "reference": reference(dpo.notes),
                }
            )
            line(
                f"{card}, {ram_gib} GiB",
                method.get("method", "full"),
                slices,
                f"{tuned.step_s:.2f} s",
                f"{dpo.step_s:.2f} s",
                f"{ratio:.2f}{'' if ratio <= MOST else ' (too much)'}",
                f"{dpo.gpu_peak_bytes / dpo.gpu_budget_bytes:.1%}",
                reference(dpo.notes),
            )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
