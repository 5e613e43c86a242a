"""The process of `offmate certify`: `python -m worker.certify JOB --folder FOLDER [--run RUN_DIR] [--steps N]
[--layers N] [--device cpu|cuda] [--database URL]`.

JOB is a resolved job file; of a submitted job it is the one in RUN_DIR. FOLDER is an empty folder. Prints the
certificate as one JSON object, in the last line; progress goes to stderr. Exit codes: 0 where no difference is greater
than allowed, 1 where one is, else those of `planner.errors`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from pathlib import Path
from typing import TextIO

from planner.codec import to_json
from planner.environment import before_torch
from planner.errors import Exit
from planner.fast_imports import lasting_imports
from planner.job.schema import Job
from planner.out_of_memory import told_to_people
from planner.reports.certificate import Certificate
from planner.run.ending import exit_code_of
from planner.run.folder import RunFolder
from planner.run.plain_streams import speak_plainly


def main(arguments: list[str]) -> int:
    """Run the command line; returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m worker.certify")
    parser.add_argument("job", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--database", metavar="URL")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    before_torch()  # so torch is imported below, not at the top
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the certificate alone, not for what libraries print
        return exit_code_of(lambda: _certify(options, answers), None)


def _certify(options: argparse.Namespace, answers: TextIO) -> Exit:
    job = Job.from_resolved(options.job)
    with lasting_imports():
        from transformers.utils import logging as transformers_logging

        from planner.cache.store import Cache
        from planner.measure.repeatable import Kernels, with_fallback
        from planner.measure.target import device_of
        from worker.certify.certificate import certify
        from worker.certify.its_plan import its_plan
        from worker.runtime.arena import take_over

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    device = device_of(options.device)
    if device.type == "cuda" and job.exact:  # other jobs need PyTorch's own allocator to measure compiled layers
        take_over()
    cache = Cache(options.database) if options.database else None
    run = RunFolder(options.run) if options.run else None

    def compare(kernels: Kernels) -> Certificate:
        hint = "give it fewer layers, like --layers 2, or close other programs that use the device"
        with told_to_people("The device ran out of memory as the certificate was made.", hint=hint):
            found = its_plan(job, run, device, options.folder / "data", cache, anew=bool(kernels.refused))
            return certify(
                found, steps=options.steps, layers=options.layers, device=device, folder=options.folder, kernels=kernels
            )

    certificate = with_fallback(compare, asked=job.deterministic)
    print(json.dumps(to_json(certificate)), file=answers)
    return Exit.DONE if certificate.holds else Exit.FAILED


if __name__ == "__main__":
    speak_plainly()
    sys.exit(main(sys.argv[1:]))
