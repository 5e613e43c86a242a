"""Runs the planner for `offmate plan` and `offmate plans`, in a process of its own, as it needs torch and a solver."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
import psutil
import yaml

from offmated.cli import pictures
from offmated.config import Config
from offmated.jobs.job_text import keys_of, read_job, with_budgets, with_settings
from offmated.jobs.looking import check_here, look_at
from offmated.paths import Paths, traces_folder
from planner.data.local_data import is_local
from planner.errors import Errors, Exit, UserError, check_linux
from planner.hub import NOT_REACHED, OFFLINE, is_downloaded
from planner.job.at_hand import why_not_at_hand
from planner.job.schema import CANONICAL, Job
from planner.keys.source import read_text, read_yaml
from planner.machine.card_names import find_card
from planner.machine.presets import computes_bf16
from planner.run.ending import leaving_on_signals
from planner.run.folder import RunFolder
from planner.units import counted

_MACHINE = {"hardware", "compare", "frontier", "cpu_memory", "link", "drive", "gpu_budget", "cpu_budget"}
_JOB = {"gpu_budget", "cpu_budget", "settings"}
_SHORT = {"model", "max_length", "batch_size", "slices", "clip", "fp32", "lora"}
_KINDS = {
    "FILE": _JOB | {"measure", "device"},
    "FILE --hardware": _JOB | _MACHINE,
    "--model --hardware": _JOB | _MACHINE | _SHORT,
    "--chain --hardware": _MACHINE | {"chain", "slices", "clip", "gap", "no_cpu_updates", "no_activation_offload"},
}
"""Kind of a question to the planner -> the options of the command line that belong to it."""
_END_S = 5.0
"""The seconds that a child process has, when asked to end, to remove its temporary folders."""
NEWS = frozenset({"doing", "so_far"})
"""The keys by which a line of the planner's process tells how far it is (`planner.commands.tell`)."""
News = Callable[[Mapping[str, Any]], None]
_NAMED = 3  # so many files are named; more are called "the data"


def kind_of_question(file: Path | None, options: Mapping[str, Any]) -> str:
    """The kind, one of `_KINDS`, of the question that the command line of `offmate plan` asks. `options`: the options
    given there. Raises UserError for options that do not go together."""
    subjects = [
        name
        for name, is_given in (("FILE", file), ("--model", "model" in options), ("--chain", "chain" in options))
        if is_given
    ]
    if len(subjects) != 1:
        raise _usage("Give one thing to plan: a job FILE, --model or --chain.", "offmate plan job.yaml")
    has_machine = "hardware" in options or "compare" in options
    kind = subjects[0] if subjects == ["FILE"] and not has_machine else f"{subjects[0]} --hardware"
    if subjects != ["FILE"] and not has_machine:
        raise _usage(f"{subjects[0]} needs a machine.", f"offmate plan {subjects[0]} … --hardware rtx3060")
    for name in options:
        if name not in _KINDS[kind] | pictures.NAMES:
            option = "--set" if name == "settings" else f"--{name.replace('_', '-')}"
            raise _usage(f"{option} does not go with offmate plan {kind}.", "offmate plan --help")
    if "compare" in options and not options.keys().isdisjoint({"hardware", "frontier", "html", "trace"}):
        raise _usage("--compare does not go with --hardware, --frontier, --html or --trace.", "offmate plan --help")
    if "frontier" in options and "trace" in options:
        raise _usage(
            "--frontier does not go with --trace: it makes several plans.", "--html draws the step over memory"
        )
    if "chain" in options and not options.keys().isdisjoint({"compare", "frontier"}):
        raise _usage("--compare and --frontier are for a job FILE or --model.", "offmate plan --help")
    return kind


def make_plan(file: Path, options: Mapping[str, Any], news: News) -> dict[str, Any]:
    """Make a plan for the job in `file` in a planner process; `news` hears how far it is. Returns plan.json without its
    chain, and with `planned_for`: how long the job's rows are, in a line of text. Uses the daemon's caches where there
    are any.

    Raises UserError for a job that the daemon would refuse, and `click.exceptions.Exit` with the planner's exit code
    when the planner refuses: by then it has said why on stderr."""
    check_linux()
    job = job_of(file, options)
    check_as_submitted(job, file.absolute().parent)
    with resolved(job) as path:
        news({"doing": "reading the data"})
        counted, planned_for = count_rows(job, path)
        url = database()
        known = [*(["--database", url] if url else []), *(["--counted", json.dumps(counted)] if counted else [])]
        try:
            code, answer = _planner("plan", "--job", str(path), *known, *_words(options, _JOB), news=news)
        except click.exceptions.Exit:
            click.echo(planned_for, err=True)  # so that people know which rows were refused
            raise
    if code != Exit.DONE:
        raise click.exceptions.Exit(code)
    document: dict[str, Any] = answer
    return document | {"planned_for": planned_for}


def check_as_submitted(job: Job, folder: Path) -> None:
    """Raise the UserError with which the daemon would refuse the job, since a plan of it would be useless. Data of the
    hub need not be at hand, as rows of `max_length` are planned then. `folder`: the folder of the job file."""
    wrong = Errors()
    with resolved(check_here(job, Paths.from_environment(), wrong)) as path, wrong.apart():
        look_at(RunFolder(path.parent), folder)
    if all(is_local(name) or is_downloaded(name) for name in (job.model, job.tokenizer)):
        wrong.found = [error for error in wrong.found if error.code not in (NOT_REACHED, OFFLINE)]
    wrong.refuse()


def count_rows(job: Job, path: Path) -> tuple[dict[str, Any] | None, str]:
    """The counts of the job's data, None where the data are not at hand or cannot be read; and in words, for which rows
    the job is planned."""
    why = why_not_at_hand(job)
    if why is None:
        command = [sys.executable, "-P", "-m", "worker.prepare", "--job", str(path)]
        done = run_child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if done.returncode == Exit.DONE:
            of_data: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return of_data, _planned_for(job, **of_data)
        why = next(iter(done.stderr.splitlines()), f"they were not counted: exit code {done.returncode}")
    return None, f"planned for rows of max_length, {counted(job.max_length, 'token')}; the data were not counted: {why}"


def _planned_for(job: Job, *, longest: int, lengths: tuple[int, int], cut: int | None = None, **_: object) -> str:
    read, labels = lengths
    rows = counted(read, "token") + ("" if labels == read else f" and {counted(labels, 'label')}")
    names = dict.fromkeys(Path(entry.path).name for entry in (*job.data, *job.eval_data))
    data = ", ".join(names) if len(names) <= _NAMED else "the data"
    longest_row = f"the longest row of {data} has {counted(longest, 'token')}"
    if labels == read and read != longest:
        longest_row += f", and rows are padded to {read}"
    limit = f"max_length is {job.max_length}" if cut is None else f"{cut} cut at max_length {job.max_length}"
    return f"planned for rows of {rows}: {longest_row}; {limit}"


def ask(file: Path | None, options: Mapping[str, Any], news: News) -> tuple[int, dict[str, Any]]:
    """Ask a planner process; `news` hears how far it is. Returns its exit code and its answer as JSON: the
    `planner.reports.receipt.Receipt` of a job or a model on a named machine, or the `Solved` of a chain."""
    if "chain" in options:
        return _planner("solve", *_words(options), news=news)
    return _asked("ask", file, options, news)


def ask_several(file: Path | None, options: Mapping[str, Any], news: News) -> tuple[int, list[dict[str, Any]]]:
    """Ask a planner process about several machines (`compare` in `options`), or about several amounts of GPU memory
    (`frontier`). Returns its exit code and a receipt in JSON form for each."""
    words = {name: value for name, value in options.items() if name != "compare"}
    code, receipts = _asked(
        "several", file, words | {"hardware": options.get("compare", options.get("hardware"))}, news
    )
    return code, receipts


def _asked(command: str, file: Path | None, options: Mapping[str, Any], news: News) -> tuple[int, Any]:
    job = question(file, options)
    if "drive" in options and "save_total_limit" not in job.model_fields_set:
        job = job.model_copy(update={"save_total_limit": 1})  # as in a job that uses a drive
    with resolved(job) as path:
        url = database()
        known = [f"--traces={traces_folder()}", *([f"--database={url}"] if url else [])]
        return _planner(command, "--job", str(path), *known, *_words(options, _JOB | _SHORT), news=news)


def job_of(file: Path, options: Mapping[str, Any]) -> Job:
    """Read the job in `file`, with the budgets and settings of the command line `options` in place of the file's.
    Raises UserError."""
    text, folder = read_job(file, options.get("gpu_budget"), options.get("cpu_budget"))
    settings = options.get("settings", ())
    return Job.parse(with_settings(text, settings), folder, name=file.name, told=keys_of(settings))


def question(file: Path | None, options: Mapping[str, Any]) -> Job:
    """The job that `offmate plan` is asked about: that in `file`, or the one that the options describe for a model.
    Raises UserError."""
    budgets, settings = (options.get("gpu_budget"), options.get("cpu_budget")), options.get("settings", ())
    if file is not None:
        text, folder = read_job(file, *budgets)
        return Job.question(
            with_settings(text, settings),
            folder,
            name=file.name,
            told=keys_of(settings),
            machine_bf16=machine_computes_bf16(options),
        )
    text = with_settings(with_budgets(short_form(options), *budgets), settings)
    try:
        return Job.question(text, Path.cwd(), name="The question", in_lines=False, told=keys_of(settings))
    except UserError as error:
        hint = "offmate plan --help; `offmate keys` lists the keys for --set"
        raise UserError(
            error.what, code=error.code, numbers=error.numbers, hint=hint, exit_code=error.exit_code
        ) from None


def short_form(options: Mapping[str, Any]) -> str:
    """The text of the job file that `--model` stands for: by default full fine-tuning in bf16, or in fp32 on a card
    without bf16, in steps of 8 micro-batches of one row."""
    bf16 = "fp32" not in options and machine_computes_bf16(options)
    values: dict[str, Any] = {"model": options["model"], "bf16": bf16}
    rows = yaml.safe_load(options.get("batch_size", "1"))
    total = any(CANONICAL.get(text.partition("=")[0]) == "train_batch_size" for text in options.get("settings", ()))
    if total or not isinstance(rows, int):  # "auto", or a mistake that is reported later
        values |= {"gradient_accumulation_steps": options["slices"]} if "slices" in options else {}
        values |= {"per_device_train_batch_size": rows} if "batch_size" in options else {}
    else:
        values |= {"per_device_train_batch_size": rows, "gradient_accumulation_steps": options.get("slices", 8)}
    if options.get("clip") == "none":
        values["max_grad_norm"] = 0
    if "lora" in options:
        values |= {"method": "lora", "lora_r": options["lora"]}
    if "max_length" in options:
        values["max_length"] = options["max_length"]
    return yaml.safe_dump(values, sort_keys=False)


def machine_computes_bf16(options: Mapping[str, Any]) -> bool:
    """Whether the machine that `--hardware` names computes in bf16, or all that `--compare` names. For a file that is
    the card's matter that it names; a file without one, or with a mistake, of which the planner's process tells, counts
    as one that does."""
    return all(_computes_bf16(name.strip()) for name in options.get("compare", options.get("hardware", "")).split(","))


def _computes_bf16(name: str) -> bool:
    if find_card(name) is None and Path(name).is_file():
        try:
            name = str(read_yaml(read_text(Path(name)), name).values.get("card"))
        except UserError:
            return True
    return computes_bf16(name)


def kept_plans(verb: str, *words: str) -> Any:
    """Ask the cache of plans: `verb` is "list", or the action on the plan whose key is in `words`. Returns a list, a
    plan, or how many were forgotten. Before the first `offmate up` nothing is kept: `no-such-plan` is then raised as
    UserError, unless `verb` is "list"."""
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
    """The URL of the daemon's database. None if it is the default SQLite file and that does not exist yet, as opening
    it would create it."""
    paths = Paths.from_environment()
    url = Config.load(paths).database_url
    return url if paths.database.exists() or url != f"sqlite:///{paths.database}" else None


@contextmanager
def resolved(job: Job) -> Iterator[Path]:
    """A context that gives the path of a temporary job file for `job`, with all defaults and absolute paths written
    out."""
    with leaving_on_signals(), tempfile.TemporaryDirectory(prefix="offmate-") as scratch:
        path = RunFolder(Path(scratch)).resolved
        path.write_text(job.resolved_yaml(), "utf-8")
        yield path


def run_child(
    command: Sequence[str],
    *,
    stdout: int | None = None,
    stderr: int | None = None,
    hear: Callable[[str], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the child process `command` to its end. It may have temporary folders or processes of its own: if this
    process is to end meanwhile, the child is first asked to end, and can clean up; after `_END_S` seconds it is killed
    together with its processes. `hear` gets each line of the child's stdout, a pipe, as it comes; the lines of a piped
    stderr are then written to this process's, which may be showing what is being done."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, text=True) as child:
        try:
            if hear is None or child.stdout is None:
                output, errors = child.communicate()
            else:
                others = threading.Thread(target=_pass_on, args=(child.stderr,), daemon=True)
                others.start()
                for line in child.stdout:
                    hear(line)
                output, errors = None, None
                others.join()
                child.wait()
        except BaseException:
            _end(child)
            raise
    return subprocess.CompletedProcess(command, child.returncode, output, errors)


def _pass_on(stream: Iterable[str] | None) -> None:
    for line in stream or ():
        print(line, end="", file=sys.stderr)  # not click.echo, which writes past what Rich has put in its place


def _end(child: subprocess.Popen[str]) -> None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(child.pid)
        child.terminate()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            everyone = process.children(recursive=True)  # before it ends, as they are no longer its children then
            child.kill()
            for other in everyone:
                with suppress(psutil.NoSuchProcess):
                    other.kill()
    child.wait()


def _words(options: Mapping[str, Any], in_job: Collection[str] = ()) -> Iterator[str]:
    """The options for the planner's process, without those in `in_job`, which the job itself has."""
    for name, value in options.items():
        if name not in in_job:
            yield f"--{name.replace('_', '-')}" if value is True else f"--{name.replace('_', '-')}={value}"


def _planner(*words: str, news: News = lambda document: None) -> tuple[int, Any]:
    """Exit code and answer of the planner's process; `news` hears how far it is. Without an answer the process has said
    why on stderr, and this raises `click.exceptions.Exit` with its exit code."""
    command = [sys.executable, "-P", "-m", "planner", *words]
    last: list[Any] = []

    def hear(line: str) -> None:
        try:
            document = json.loads(line)
        except ValueError:  # a library has printed it
            print(line, end="", file=sys.stderr)
            return
        if isinstance(document, dict) and not document.keys().isdisjoint(NEWS):
            news(document)
        else:
            last[:] = [document]

    done = run_child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, hear=hear)
    code = done.returncode if done.returncode >= 0 else int(Exit.FAILED)
    if not last:
        raise click.exceptions.Exit(code or Exit.FAILED)
    return code, last[0]


def _usage(what: str, hint: str) -> UserError:
    return UserError(what, code="usage", hint=hint, exit_code=Exit.USAGE)
