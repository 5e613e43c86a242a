"""Prints what a finished job's model answers: `python -m worker.sample RUN_DIR PROMPT… [--tokens N] [--text] [--raw]`.

The model, or its base with the adapters, generates greedily under the job's own plan: within its budgets, and with
weights that travel as they do in training. Exit codes and errors are those of `worker.trainer`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from planner.environment import before_torch
from planner.errors import Exit, UserError
from planner.fast_imports import lasting_imports
from planner.job.base import check_base
from planner.job.output_dir import delivered
from planner.job.schema import Job
from planner.keys.adapter import takes_from_base
from planner.out_of_memory import told_to_people
from planner.run.ending import exit_code_of
from planner.run.folder import RunFolder
from planner.run.plain_streams import speak_plainly
from planner.units import escaped, printable

if TYPE_CHECKING:
    from worker.training.samples import Samples


def main(arguments: list[str]) -> int:
    """Run the command line `arguments` and print the model's answers. Returns the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m worker.sample")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--text", action="store_true", help="continue the prompts as they are, without chat template")
    parser.add_argument("--raw", action="store_true", help="show special tokens, the end token among them")
    parser.add_argument("--json", action="store_true", help="print a JSON list, in one line")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR, format="%(message)s", stream=sys.stderr)
    before_torch()  # so torch is imported only below
    run = RunFolder(options.run_dir.absolute())
    return exit_code_of(lambda: _say(run, tuple(options.prompts), options), None)


def _say(run: RunFolder, prompts: tuple[str, ...], options: argparse.Namespace) -> Exit:
    samples, generated = _generated(run, prompts, options.tokens, as_text=options.text)
    replies = [samples.text(answer, raw=options.raw) for answer in generated]
    if options.json:
        pairs = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, replies, strict=True)]
        print(escaped(json.dumps(pairs, ensure_ascii=False)), flush=True)
    else:
        for prompt, answer in zip(prompts, replies, strict=True):
            if len(prompts) > 1:
                print(f"> {printable(prompt)}")
            print(printable(answer), flush=True)
    if cut := [f"{number}" for number, answer in enumerate(generated, 1) if samples.is_cut(answer)]:
        which = f"answer {', '.join(cut)}" if len(prompts) > 1 else "the answer"
        print(f"note: {which} stopped at the limit of --tokens {options.tokens}", file=sys.stderr)
    return Exit.DONE


def answers(
    run: RunFolder, prompts: tuple[str, ...], tokens: int, *, as_text: bool = False, raw: bool = False
) -> list[str]:
    """Generate with the trained model of the job in `run`: for each of `prompts`, the text that follows it, of at most
    `tokens` tokens. If the tokenizer has a chat template, a prompt is taken as a user's message, unless `as_text`.
    `raw`: keep special tokens in the text. Raises UserError."""
    samples, generated = _generated(run, prompts, tokens, as_text=as_text)
    return [samples.text(answer, raw=raw) for answer in generated]


def _generated(
    run: RunFolder, prompts: tuple[str, ...], tokens: int, *, as_text: bool
) -> tuple[Samples, list[list[int]]]:
    """The prompts as samples of the job, and the token ids that follow each of them. See `answers`."""
    job = Job.from_resolved(run.resolved)
    if job.rewards:
        raise UserError(
            "A reward model writes no text.",
            code="not-for-reward-models",
            exit_code=Exit.USAGE,
            numbers=(f"preference: {job.preference}",),
            hint="the README.md in the model's folder says how it is loaded to score texts",
        )
    end = run.last_event("end", 0) or {}
    # The event's line may be damaged.
    delivered_to = end.get("output") or delivered(job.output_dir, run.output, run.token())
    output = Path(delivered_to or job.output_dir or run.output)
    lora = job.method == "lora"
    if end.get("status") != "done" and delivered_to is None:
        raise UserError(
            "The job has no model yet.",
            code="no-model",
            exit_code=Exit.USAGE,
            hint="a job has one when it is done; sample_prompts in its file has texts written on the way",
        )
    if not (config := output / ("adapter_config.json" if lora else "config.json")).is_file():
        raise UserError(
            "The job's model is not where it was.",
            code="no-model",
            exit_code=Exit.USAGE,
            numbers=(f"there is no {config}",),
            hint="put the folder back where it was when the job was done",
        )
    with lasting_imports():
        import torch
        from transformers.utils import logging as transformers_logging

        from planner.models.peft_lora import load_adapter
        from planner.models.tokenizer import load_tokenizer
        from worker.engine.engine import Engine
        from worker.runtime.arena import take_over
        from worker.training.ends import take_ends
        from worker.training.learning_rate import optimizer_of
        from worker.training.model import load_model, tell_special_tokens
        from worker.training.run import read_plan
        from worker.training.samples import Samples
        from worker.training.stored import open_scratch, passing_store

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    plan, chain, _ = read_plan(run)
    cuda = torch.cuda.is_available()
    if cuda:
        take_over()
    its = {"adapter_name_or_path": None} if lora else {"model": str(output), "model_revision": None}
    beside = {"tokenizer": str(output), "tokenizer_revision": None}
    job = job.model_copy(update={**its, **beside, "sample_tokens": tokens})
    tokenizer = load_tokenizer(job)
    chat = tokenizer.chat_template is not None and not as_text
    sample_prompts = tuple(({"role": "user", "content": prompt},) if chat else prompt for prompt in prompts)
    job = job.model_copy(update={"sample_prompts": sample_prompts})
    if lora:
        hint = f"load the adapters in {output} by peft"
        check_base(job, run.read_base(), run.path.parent, parts=("config", "weights"), hint=hint)
    model = load_model(job, begun=run.begun)
    if lora:
        load_adapter(model, str(output), as_ordinary=takes_from_base(job.init_lora_weights))
        take_ends(model, output, tokenizer)  # else a model with adapters would end its texts where the base does
    tell_special_tokens(job, model, tokenizer)
    samples = Samples.of(job, tokenizer, model)
    assert samples is not None
    hint = "another program may have its memory: wait for it, or offmate pause"
    with (
        told_to_people("The device has no room for the job's plan now.", hint=hint),
        passing_store(job, plan, chain, model) as states,
        open_scratch(job, plan, chain) as scratch,
    ):
        engine = Engine(
            model,
            plan=plan,
            chain=chain,
            optimizer=optimizer_of(job, model),
            max_grad_norm=job.max_grad_norm,
            device=torch.device("cuda" if cuda else "cpu"),
            metered=True,
            states=states,
            scratch=scratch,
        )
        try:
            engine.check_generation(samples.tokens, new_tokens=samples.new_tokens)
            generated = engine.generate(samples.tokens, new_tokens=samples.new_tokens, pad=samples.pad)
        finally:
            engine.close()
    return samples, generated


if __name__ == "__main__":
    speak_plainly()
    sys.exit(main(sys.argv[1:]))
