"""Checks a job, in a process of its own: `python -m worker.check CHECK ...`, where CHECK is one of

    certify JOB --folder FOLDER [--run RUN_DIR] [--steps N] [--layers N] [--device cpu|cuda] [--database URL]
    verify-resume JOB --folder FOLDER [--run RUN_DIR] [--steps N] [--device cpu|cuda] [--database URL] [--json]
    train-until RUN_DIR STEP [--refused OPERATION]...
    preview JOB [--rows N] [--color | --json] [--database URL] [--asks COMMAND]
    first-records RUN_DIR [FOLDER]

JOB is a resolved job file, that of RUN_DIR if the job is submitted. FOLDER is an empty folder; to `first-records` it is
the job file's, below which near names are looked for. COMMAND makes the job's plan. Only the answer goes to stdout, and
progress to stderr. Exit codes: 0 done, 1 something differs that may not, else those of `planner.errors`. `train-until`,
which `verify-resume` starts, and `first-records` write their error into RUN_DIR, too, as `worker.trainer` does.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from pathlib import Path

from planner.environment import before_torch
from planner.errors import Exit
from planner.fast_imports import lasting_imports
from planner.job.schema import Job
from planner.run.ending import exit_code_of, leaving_on_signals
from planner.run.folder import RunFolder
from planner.run.plain_streams import PlainStream, speak_plainly


def main(arguments: list[str]) -> int:
    """Run the check that the command line `arguments` names. Returns the process's exit code."""
    options = _parser().parse_args(arguments)
    level = logging.ERROR if options.check == "first-records" else logging.INFO
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    before_torch()  # so torch is imported below, not at the top
    # Only a preview leaves by `sys.exit`: where there is an engine, that might wait for ever for its threads.
    with leaving_on_signals() if options.check == "preview" else contextlib.nullcontext():
        return exit_code_of(lambda: _answered(options), options.own_run)


def _answered(options: argparse.Namespace) -> Exit:
    """Do the check and print its answer. Raises UserError."""
    job = Job.from_resolved(options.own_run.resolved if options.own_run else options.job)
    with contextlib.redirect_stdout(sys.stderr):  # for what libraries print
        with lasting_imports():  # of what the one check needs
            match options.check:
                case "certify":
                    from worker.check.certificate import answer
                case "verify-resume":
                    from worker.check.verify_resume import answer
                case "train-until":
                    from worker.check.train_until import train_until as answer
                case "preview":
                    from worker.check.preview import answer
                case _:
                    from worker.check.first_records import answer
        code, text = answer(job, options)
    try:
        if options.check == "preview" and options.color and isinstance(sys.stdout, PlainStream):
            sys.stdout.write_styled(f"{text}\n")  # print would take the colours for characters of the data
        elif text:
            print(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has all that it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again when it ends
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m worker.check")
    parser.set_defaults(own_run=None)
    checks = parser.add_subparsers(dest="check", required=True)
    certify, verify, preview = map(checks.add_parser, ("certify", "verify-resume", "preview"))
    leg, records = map(checks.add_parser, ("train-until", "first-records"))
    for check in (certify, verify, preview):
        check.add_argument("job", type=Path)
        check.add_argument("--database", metavar="URL", help="where plans are kept")
    for check, steps in ((certify, 5), (verify, 6)):
        check.add_argument("--folder", type=Path, required=True)
        check.add_argument("--run", type=lambda path: RunFolder(Path(path).absolute()))
        check.add_argument("--steps", type=int, default=steps)
        check.add_argument("--device", choices=("cpu", "cuda"))
    certify.add_argument("--layers", type=int)
    for check in (verify, preview):
        check.add_argument("--json", action="store_true", help="print one JSON object")
    preview.add_argument("--rows", type=int, default=3)
    preview.add_argument("--color", action="store_true")
    preview.add_argument("--asks", metavar="COMMAND", default="offmate plan job.yaml", help="what makes the job's plan")
    for check in (leg, records):
        check.add_argument("own_run", metavar="RUN_DIR", type=_run_folder)
    leg.add_argument("step", type=int, help="train to this step, and stop")
    leg.add_argument("--refused", action="append", default=[], help="an operation without a deterministic kernel")
    records.add_argument("folder", type=Path, nargs="?")
    return parser


def _run_folder(path: str) -> RunFolder:
    if not Path(path).is_dir():
        raise argparse.ArgumentTypeError(f"no folder {path}")
    return RunFolder(Path(path).absolute())


if __name__ == "__main__":
    speak_plainly()
    sys.exit(main(sys.argv[1:]))
