"""Exports a job's adapters and base as one model folder, or its model as one GGUF file: `python -m worker.export
RUN_DIR TARGET [--gguf=TYPE]`."""

from __future__ import annotations

import sys
from pathlib import Path

from planner.errors import Exit, UserError
from planner.job.base import check_base
from planner.job.output_dir import Place, delivered
from planner.job.schema import Job
from planner.run.ending import exit_code_of
from planner.run.folder import RunFolder
from planner.run.plain_streams import speak_plainly


def main(arguments: list[str]) -> int:
    """Export the trained model of the job in the run folder `arguments[0]` to `arguments[1]`: a model folder, or a GGUF
    file. Returns the exit code."""
    kind = arguments.pop().removeprefix("--gguf=") if arguments[-1:] and arguments[-1].startswith("--gguf=") else None
    if len(arguments) != 2 or not Path(arguments[0]).is_dir():
        print("usage: python -m worker.export RUN_DIR TARGET [--gguf=TYPE]", file=sys.stderr)
        return Exit.USAGE
    run, target = (Path(argument).absolute() for argument in arguments)
    return exit_code_of(lambda: _export(RunFolder(run), target, kind), None)


def _export(run: RunFolder, target: Path, kind: str | None) -> Exit:
    job = Job.from_resolved(run.resolved)
    end = run.last_event("end", 0) or {}
    # The event's line may be damaged.
    delivered_to = end.get("output") or delivered(job.output_dir, run.output, run.token())
    output = Path(delivered_to or job.output_dir or run.output)
    adapters = job.method == "lora" and (output / "adapter_config.json").is_file()
    model = (output / "config.json").is_file()
    if not (adapters or (model and kind)):
        place = f"its model is {output}" if model else f"there is nothing yet at {output}"
        raise UserError(
            "The job has no adapters to merge." if model else "The job has no model yet.",
            code="nothing-to-export" if kind else "nothing-to-merge",
            exit_code=Exit.USAGE,
            numbers=(place,),
            hint="copy that folder, which has all weights; only jobs with method: lora have adapters"
            if model
            else "jobs have one when they are done",
        )
    if job.rewards and kind is not None:
        raise UserError(
            "A reward model is not written as GGUF: llama.cpp's converter is for models that write text.",
            code="not-for-reward-models",
            exit_code=Exit.USAGE,
            numbers=(f"preference: {job.preference}",),
            hint="the README.md in the model's folder says how it is loaded to score texts",
        )
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if adapters:
        check_base(job, run.read_base(), run.path.parent, hint=f"merge the adapters in {output} by peft")
    if kind is not None:
        from worker.training.gguf import write_gguf

        write_gguf(job, output, target, kind)
        print(f"The model is in {target}.")
        return Exit.DONE
    from worker.training.merged import write_merged

    write_merged(job, output, target)
    _write_card(job, run, output, target)
    print(f"The model with its adapters merged into it is in {target}.")
    return Exit.DONE


def _write_card(job: Job, run: RunFolder, adapters: Path, merged: Path) -> None:
    """Write the README.md of a merged model, as training writes that of the adapters. A folder of adapters without the
    mark of its run does not say of which step it is; then there is none."""
    if (step := Place(folder=adapters, token=run.token()).published()) is None:
        return
    from planner.models.hf_model import pairs_of
    from planner.models.tokenizer import load_tokenizer
    from worker.training.card import model_card
    from worker.training.ends import Ends, ends_in_folder, ends_of_files
    from worker.training.metrics import read_metrics

    ends = Ends(taught=ends_in_folder(adapters), before=ends_of_files(job))
    stops = ends.line(job.model_copy(update={"method": "full"}), load_tokenizer(job)) if ends.new else None
    card = model_card(job, read_metrics(run.metrics), step, pairs=pairs_of(job), stops=stops, merged=True)
    (merged / "README.md").write_text(card, "utf-8")


if __name__ == "__main__":
    speak_plainly()
    sys.exit(main(sys.argv[1:]))
