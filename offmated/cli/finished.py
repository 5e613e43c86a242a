"""Defines the commands for a finished job's model: `export` and `sample`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from offmated.cli.certify import answered
from offmated.cli.client import Client
from offmated.cli.output import ID, json_option
from offmated.cli.remote import only_here
from offmated.jobs.states import JobState
from offmated.paths import Paths
from planner.errors import Exit, UserError


@click.command()
@ID
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--gguf",
    metavar="TYPE",
    is_flag=False,
    flag_value="auto",
    help="Write one GGUF file with llama.cpp's converter: auto (16 bits), f32, f16, bf16, q8_0.",
)
@click.option("--merge", is_flag=True, help="Has no effect: adapters are always merged.")
def export(job_id: int, target: Path, gguf: str | None, merge: bool) -> None:
    """Write the model of job ID, with its adapters merged, to TARGET: a new folder, or a new file if the name ends in
    .gguf."""
    only_here("export")
    paths = Paths.from_environment()
    paths.check_outside("export to", target.absolute())
    run = Client(paths).job(job_id)["run_dir"]
    kind = gguf or ("auto" if target.suffix == ".gguf" else None)
    words = [run, str(target.absolute()), *([f"--gguf={kind}"] if kind else [])]
    sys.exit(subprocess.call([sys.executable, "-P", "-m", "worker.export", *words], stdin=subprocess.DEVNULL))


@click.command()
@ID
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPT...")
@click.option(
    "--tokens", type=click.IntRange(min=1), default=128, show_default=True, help="The most tokens in an answer."
)
@click.option("--text", is_flag=True, help="Continue the prompts as they are, without the chat template.")
@click.option("--raw", is_flag=True, help="Show special tokens, the end token among them.")
@json_option
def sample(job_id: int, prompts: tuple[str, ...], tokens: int, text: bool, raw: bool, as_json: bool) -> None:
    """Print the answer of job ID's finished model to each PROMPT, within the budgets of the job's plan. No job may have
    the GPU."""
    only_here("sample")
    client = Client(Paths.from_environment())
    run = client.job(job_id)["run_dir"]
    if at_work := next(iter(client.jobs(JobState.RUNNING)), None):
        raise UserError(
            f"Job {at_work['id']} has the GPU.",
            code="gpu-busy",
            exit_code=Exit.USAGE,
            hint=f"wait for it (offmate wait {at_work['id']}), or type offmate pause, and offmate resume afterwards",
        )
    flags = {"--text": text, "--raw": raw, "--json": as_json}
    words = [f"--tokens={tokens}", *(flag for flag, is_set in flags.items() if is_set), "--", *prompts]
    sys.exit(answered([sys.executable, "-P", "-m", "worker.sample", run, *words], as_json))
