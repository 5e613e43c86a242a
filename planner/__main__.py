"""The planner process: `python -m planner plan RUN_DIR [--measure] [--database URL] [--device cpu|cuda]`.

It writes RUN_DIR/plan.json and prints the same object without its chain as one line. With `--job FILE` instead of a run
folder it only prints, and lines before the last say how far it is (`planner.commands.tell`). `--trace FILE` and `--html
FILE` draw the plan, too. Exit codes are those of `planner.errors`. Errors for people go to stderr and into
RUN_DIR/error.json. The other subcommands are those of `planner.commands.parser`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from planner.codec import from_json
from planner.commands import parser as questions
from planner.commands.tell import SILENT, InLines, Tell
from planner.counted import Counted
from planner.environment import before_torch
from planner.errors import Exit
from planner.fast_imports import lasting_imports
from planner.hub import speak_for_a_job
from planner.job.base import keep_base
from planner.job.output_dir import Place
from planner.job.pins import pin
from planner.job.room import check_room, checkpoint_bytes
from planner.job.schema import Job
from planner.picture.basis import Basis
from planner.picture.files import Pictures, add_options
from planner.run.ending import exit_code_of, leaving_on_signals
from planner.run.folder import RunFolder
from planner.run.plain_streams import speak_plainly
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan

if TYPE_CHECKING:
    from planner.commands.answer import Answer


def main(arguments: list[str] | None = None) -> int:
    """Run the planner with the command line `arguments` (None: the process's own); returns the exit code."""
    options = _parser().parse_args(arguments)
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print must not mix with the answer
        if options.command != "plan":
            with leaving_on_signals():
                return questions.answer(options, answers)
        run = RunFolder(options.run_dir) if options.run_dir else None
        if run is not None:
            speak_for_a_job()
            if arguments is None:  # otherwise the caller sets up the loggers
                _log_to_the_job()
        # The watcher of a job's process ends it, and needs the exit code that the signal itself gives.
        with leaving_on_signals() if run is None else contextlib.nullcontext():
            return exit_code_of(lambda: _plan_and_say(options, run, answers), run)


def _log_to_the_job() -> None:
    """Send the planner's log records to stderr, and so to the job's log; of libraries only warnings."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    logging.getLogger("planner").setLevel(logging.INFO)


def _plan_and_say(options: argparse.Namespace, run: RunFolder | None, answers: TextIO) -> Exit:
    print(json.dumps(_answer(options, run, answers).to_json(with_chain=False)), file=answers)
    return Exit.DONE


def _answer(options: argparse.Namespace, run: RunFolder | None, answers: TextIO) -> Answer:
    """Make the answer, write it into the run folder, and draw it where pictures are wanted."""
    pictures = Pictures.wanted(options)
    job = pin(run) if run else Job.load(options.job)
    if run is not None:
        keep_base(job, run)
    tell = SILENT if run else InLines(answers)
    answer = _plan(job, options, run.read_counted() if run else options.counted, tell)
    if answer.disk is not None and (run is None or run.last_checkpoint_step() is None):
        answer.disk.check()  # a run with a checkpoint goes on: what was written to its drive shall not be wasted
    if run is not None:
        if not run.has_saved():
            _check_room(job, answer.plan, answer.chain, run)
        if options.measure and not job.is_split:  # first: a run goes on with its plan's batch size
            run.write_resolved(job.with_slices(answer.rows).resolved_yaml())
        run.write_plan(answer.to_json())
        run.error.unlink(missing_ok=True)
    title = job.run_name or Path(job.model).name
    pictures.write(answer.plan, answer.chain, answer.hardware, title=title, basis=Basis.of(answer.measured))
    return answer


def _check_room(job: Job, plan: Plan, chain: Chain, run: RunFolder) -> None:
    """Raise UserError where the disks have no room for what the job will write, now instead of hours later."""
    from planner.models.written import written_dtype

    tensors = (*chain.tensors(), *chain.frame_tensors)
    elements = sum(tensor.elements for tensor in tensors if tensor.trainable or job.method != "lora")
    stored = chain.stored_bytes(plan.cpu_updated())
    check_room(
        run.path,
        Place(folder=Path(job.output_dir or run.output), token=run.token()),
        checkpoint_bytes=checkpoint_bytes(job, chain.saved_bytes, stored) + chain.replaced_bytes,
        weight_bytes=elements * written_dtype(job).itemsize,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m planner")
    commands = parser.add_subparsers(dest="command", required=True)
    questions.add_parsers(commands)
    plan = commands.add_parser("plan", help="plan a job")
    source = plan.add_mutually_exclusive_group(required=True)
    source.add_argument("run_dir", nargs="?", type=Path, metavar="RUN_DIR", help="run folder with resolved.yaml")
    source.add_argument("--job", type=Path, metavar="FILE", help="a job file; nothing is written")
    plan.add_argument(
        "--counted",
        type=lambda text: from_json(Counted, json.loads(text)),
        metavar="JSON",
        help="with --job: what was counted of its data (python -m worker.prepare --job)",
    )
    plan.add_argument("--measure", action="store_true", help="measure the blocks on the device: the plan is final")
    plan.add_argument("--database", metavar="URL", help="where plans and measurements are kept")
    plan.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add_options(plan)
    return parser


def _plan(job: Job, options: argparse.Namespace, counted: Counted | None, tell: Tell) -> Answer:
    # Measure with the trainer's settings: without them times on a busy machine are several times too long, and uneven.
    before_torch()
    # torch takes seconds to import: errors in the job file come before that.
    with lasting_imports():
        from planner.cache.store import Cache
        from planner.commands.plan_job import plan_job
        from planner.measure.target import device_of

    cache = Cache(options.database) if options.database else None
    return plan_job(job, device_of(options.device), cache=cache, measure=options.measure, counted=counted, tell=tell)


if __name__ == "__main__":
    speak_plainly()
    sys.exit(main())
