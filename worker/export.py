"""A job's adapters and its base as one model folder: `python -m worker.export RUN_DIR FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.run.ending import exit_code_of
from planner.run.folder import RunFolder
from planner.run.plain_streams import speak_plainly


def main(arguments: list[str]) -> int:
    """Export the job in the folder `arguments[0]` to `arguments[1]`; returns the exit code."""
    if len(arguments) != 2 or not Path(arguments[0]).is_dir():
        print("usage: python -m worker.export RUN_DIR FOLDER", file=sys.stderr)
        return Exit.USAGE
    run, folder = (Path(argument).absolute() for argument in arguments)
    return exit_code_of(lambda: _export(RunFolder(run), folder), None)


def _export(run: RunFolder, folder: Path) -> Exit:
    job = Job.from_resolved(run.resolved)
    end = run.last_event("end", 0) or {}
    output = Path(end.get("output") or job.output_dir or run.output)
    if job.method != "lora" or not (output / "adapter_config.json").is_file():
        what = f"its model is {output}" if (output / "config.json").is_file() else f"there is nothing yet at {output}"
        raise UserError(
            "The job has no adapters to merge.", code="nothing-to-merge", exit_code=Exit.USAGE, numbers=(what,),
            hint="jobs with method: lora have some when they are done",
        )  # fmt: skip
    from worker.training.merged import write_merged

    write_merged(job, output, folder)
    print(f"The model with its adapters merged into it is in {folder}.")
    return Exit.DONE


if __name__ == "__main__":
    speak_plainly()
    sys.exit(main(sys.argv[1:]))
