"""`offmate plan` and `offmate plans`: the planner in a process of its own, as it needs torch and a solver."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from offmated.cli import pictures
from offmated.cli.jobtext import read_job
from offmated.config import Config
from offmated.paths import Paths
from planner.errors import Exit, UserError
from planner.job import Job

_MACHINE = {"hardware", "cpu_memory", "link", "gpu_budget", "cpu_budget"}
_KINDS = {
    "FILE": {"gpu_budget", "cpu_budget", "measure", "device"},
    "FILE --hardware": _MACHINE,
    "--model --hardware": _MACHINE | {"model", "max_length", "batch_size", "slices", "clip", "fp32"},
    "--chain --hardware": _MACHINE
    | {"chain", "slices", "clip", "time_limit", "gap", "no_cpu_updates", "no_activation_offload"},
}
"""What can be asked, and the options that belong to it."""


def kind_of_question(file: Path | None, given: Mapping[str, Any]) -> str:
    """Which of `_KINDS` the command line asks; `given` has the options that are on it. Raises UserError."""
    subjects = [
        name for name, there in (("FILE", file), ("--model", "model" in given), ("--chain", "chain" in given)) if there
    ]
    if len(subjects) != 1:
        raise _usage("Give one thing to plan: a job FILE, --model or --chain.", "offmate plan job.yaml")
    kind = subjects[0] if subjects == ["FILE"] and "hardware" not in given else f"{subjects[0]} --hardware"
    if subjects != ["FILE"] and "hardware" not in given:
        raise _usage(f"{subjects[0]} needs a machine.", f"offmate plan {subjects[0]} … --hardware rtx3060")
    for name in given:
        if name not in _KINDS[kind] | pictures.NAMES:
            raise _usage(f"--{name.replace('_', '-')} does not go with offmate plan {kind}.", "offmate plan --help")
    return kind


def make_plan(file: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """plan.json, less its chain, of the job in `file`. Uses the daemon's caches where there are any.

    Raises UserError for a file that is wrong, and `click.exceptions.Exit` with the planner's exit code when the planner
    refuses: it has said why on stderr by then.
    """
    with resolved(file, given) as job:
        url = database()
        known = ["--database", url] if url else []
        code, answer = _planner("plan", "--job", str(job), *known, *_words(_without_budgets(given)))
    if code != Exit.DONE:
        raise click.exceptions.Exit(code)
    found: dict[str, Any] = answer
    return found


def ask(file: Path | None, given: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Exit code and `planner.receipt.Receipt` of a job or a model on a machine by name, or `Solved` of a chain."""
    if file is None:
        return _planner("solve" if "chain" in given else "ask", *_words(given))
    with resolved(file, given) as job:
        return _planner("ask", "--job", str(job), *_words(_without_budgets(given)))


def kept_plans(verb: str, *words: str) -> Any:
    """What the plan cache says: a list, a plan, or how many were forgotten. Nothing is kept before the first `up`."""
    url = database()
    if url is None and verb == "list":
        return []
    if url is None:
        raise UserError("No plans are kept yet.", code="no-such-plan", exit_code=Exit.NO_SUCH_JOB)
    code, answer = _planner("plans", verb, *words, "--database", url)
    if code != Exit.DONE:
        raise click.exceptions.Exit(code)
    return answer


def database() -> str | None:
    """The URL of the daemon's database, if that has been made: opening an SQLite file that is not there makes one."""
    paths = Paths.from_environment()
    url = Config.load(paths).database_url
    return url if paths.database.exists() or url != f"sqlite:///{paths.database}" else None


@contextmanager
def resolved(file: Path, given: Mapping[str, Any]) -> Iterator[Path]:
    """The job in a file with the budgets given, all defaults and absolute paths. Raises UserError."""
    text, folder = read_job(file, given.get("gpu_budget"), given.get("cpu_budget"))
    job = Job.parse(text, folder, name=file.name)
    with tempfile.TemporaryDirectory(prefix="offmate-") as scratch:
        path = Path(scratch) / "job.yaml"
        path.write_text(job.resolved_yaml(), "utf-8")
        yield path


def _without_budgets(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in ("gpu_budget", "cpu_budget")}


def _words(given: Mapping[str, Any]) -> Iterator[str]:
    for name, value in given.items():
        yield f"--{name.replace('_', '-')}" if value is True else f"--{name.replace('_', '-')}={value}"


def _planner(*words: str) -> tuple[int, Any]:
    """Exit code and answer of the planner process; without an answer it has said why on stderr, and we leave."""
    done = subprocess.run([sys.executable, "-P", "-m", "planner", *words], stdout=subprocess.PIPE, text=True)
    code = done.returncode if done.returncode >= 0 else int(Exit.FAILED)
    if not done.stdout.strip():
        raise click.exceptions.Exit(code or Exit.FAILED)
    return code, json.loads(done.stdout.splitlines()[-1])


def _usage(what: str, hint: str) -> UserError:
    return UserError(what, code="usage", hint=hint, exit_code=Exit.USAGE)
