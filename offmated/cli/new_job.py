"""Chooses what `offmate init` writes into a job file, by the data, the machine and plans of the model on it."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import yaml

from offmated.cli import planner_process
from planner.codec import from_json
from planner.errors import Exit, UserError, check_linux
from planner.hub import NOT_REACHED, OFFLINE, check_reached, is_downloaded
from planner.job.at_hand import why_not_at_hand
from planner.job.named_files import local_model
from planner.job.schema import Job
from planner.job.survey import Survey, of_pair, survey
from planner.keys.batch import DEFAULT_ROWS
from planner.machine.card_names import card_named, find_card
from planner.machine.cards import CARDS, HOSTS
from planner.machine.presets import preset
from planner.machine.this_machine import device_bytes, driver_card, ram_bytes
from planner.reports.receipt import Receipt
from planner.system import IS_LINUX
from planner.units import counted, format_bytes, format_bytes_down, format_part, printable

NIGHT = "23:00-07:00"
_METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"method": "lora"},
    "qlora": {"method": "lora", "load_in_4bit": True},
}
"""The methods in the order in which they are tried, each with its keys of the job file."""
_CALLED = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "LoRA on a base in 4 bits (QLoRA)"}
_SUGGESTED = (
    (11, ("Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen3-4B")),
    (20, ("Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct")),
    (math.inf, ("Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct", "openai/gpt-oss-20b")),
)
"""Below how many GiB of a card -> the models of the hub that are suggested for it."""
_ROUND = 64  # tokens: `max_length` is a multiple of this
_ANY_LENGTH = 10**6  # tokens: while lengths are counted nothing is cut
_BYTES = 3  # of a token: in English text it has about four bytes, in Chinese text three, as one character has
_HELD_OUT, _ENOUGH = 0.05, 200  # the share of rows to evaluate on, where there are so many
_COMMENTS_AT, _WIDTH = 40, 118  # the column where comments begin behind keys; a longer line has its comment above

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine that a job file is written for. `card`: the card's short name; None for this machine where it has
    none, or one that is not in the list of cards. `ram`: the host's memory in bytes; `is_here`: it is this machine;
    `unlisted`: the name of a card that is not in the list."""

    card: str | None
    ram: int
    is_here: bool
    unlisted: str | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether jobs run on the CPU there."""
        return self.card is None and self.unlisted is None

    @property
    def device(self) -> str:
        """What jobs run on, in words: a card by its name, or the CPU."""
        if self.is_cpu:
            return "this machine's CPU"
        return f"a {self.unlisted if self.card is None else CARDS[self.card].name}"

    def __str__(self) -> str:
        where = "" if self.is_cpu else ", this machine" if self.is_here else ", a usual machine with it"
        ram = format_bytes_down(self.ram).replace(".0 ", " ")
        return f"{self.device} and {ram} of RAM{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The planner's answer for one method. `why_not`: why the job does not fit, in words; "" if it fits. A plan that
    fits has peaks, and the GPU memory that the job may use."""

    why_not: str = ""
    gpu_peak_bytes: int = 0
    cpu_peak_bytes: int = 0
    gpu_budget_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A key of the job file with its value, and why it has that."""

    key: str
    value: Any
    why: str


@dataclass(slots=True, kw_only=True)
class NewJob:
    """A job file to be written: its `lines`, what was found out about the data, the `plans` that were made (method ->
    the planner's answer, or why there is none), and `said`, what the user should know beside it."""

    machine: Machine
    data: Survey
    tokens: Mapping[str, Any] | None
    plans: dict[str, Told | str]
    lines: list[Line] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text of the job file."""
        first = (f"Made by offmate init for {self.machine}.", *self.said)
        comments = (line for text in first for line in _comment(text))
        return "\n".join([*comments, *map(_written, self.lines), "# `offmate keys` lists all keys"]) + "\n"

    def to_json(self) -> dict[str, Any]:
        """What was chosen and why, as a JSON object."""
        plans = {
            method: {"why_not": told}
            if isinstance(told, str)
            else {
                "fits": not told.why_not,
                "gpu_peak_bytes": told.gpu_peak_bytes,
                "cpu_peak_bytes": told.cpu_peak_bytes,
            }
            for method, told in self.plans.items()
        }
        return {
            "machine": {
                "card": self.machine.card or self.machine.unlisted,
                "ram_bytes": self.machine.ram,
                "is_here": self.machine.is_here,
            },
            "data": {
                "kind": self.data.kind,
                "records": self.data.records,
                "broken": self.data.broken,
                "longest_bytes": None if self.data.kind == "tokens" else self.data.longest,
                "longest_tokens": self.data.longest
                if self.data.kind == "tokens"
                else (self.tokens or {}).get("longest"),
                "whole": self.data.whole,
            },
            "plans": plans,
            "keys": {line.key: {"value": line.value, "why": line.why} for line in self.lines},
            "said": self.said,
        }


def card_here() -> str | None:
    """The short name of this machine's card; None if it has none, or one that is not in the list of cards."""
    own = _own_card()
    return None if own is None else find_card(own)


def _own_card() -> str | None:
    """The name of the card on which jobs run here, as its driver gives it; None if they run on the CPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    try:
        return driver_card().name
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def here_called() -> str | None:
    """What a question calls this machine; None where it runs no jobs, as on macOS and Windows."""
    return _called(_own_card()) if IS_LINUX else None


def _called(own: str | None) -> str:
    return "this machine's CPU; no card was found" if own is None else f"this machine's {own}"


def machine_with(name: str | None) -> Machine:
    """The machine with the card called `name`. It is this machine with None, with its own card's name, with words such
    as "this machine", and with "cpu" where it has no card. Raises UserError for a name that no card has, and for None
    where this machine runs no jobs."""
    if name is None:
        check_linux()
    own = _own_card()
    listed = None if own is None else find_card(own)
    words = ("this machine", "here", _called(own).lower(), *(("cpu",) if own is None else ()))
    if IS_LINUX and (name is None or name.strip().lower() in words):
        card, is_here = listed, True
    else:
        card = card_named(str(name))
        is_here = card == listed
    if is_here:
        return Machine(card=card, ram=ram_bytes(), is_here=True, unlisted=own if card is None else None)
    return Machine(card=card, ram=HOSTS[CARDS[str(card)].host].memory_bytes, is_here=False)


def suggestions(card: str | None) -> tuple[str, ...]:
    """The hub ids of some models for a card, the smallest first. None: a CPU, or a card that is not in the list."""
    gib = 0.0 if card is None else CARDS[card].memory_bytes / 2**30
    return next(names for below, names in _SUGGESTED if gib < below)


def model_named(text: str) -> str:
    """The absolute path of the model folder that `text` names from here, or a hub id unchanged. Raises UserError."""
    try:
        return local_model(text, Path.cwd())
    except (OSError, TypeError) as error:
        raise UserError(
            "The model cannot be used.",
            code="missing-file",
            exit_code=Exit.USAGE,
            numbers=(str(error),),
            hint="give a model folder, or a name on the Hugging Face hub like Qwen/Qwen3-4B",
        ) from error


def new_job(model: str, data: Path, machine: Machine, *, night: bool, output: Path, tell: Tell) -> NewJob:
    """Choose the keys of a job that trains `model`, a folder's absolute path or a hub id, on the file or folder `data`.
    `output`: where the job file will be. `tell` is told of what is done.

    Raises UserError where the data cannot be trained on, and where no method fits; `click.exceptions.Exit` where
    another process has said on stderr what is wrong."""
    tell("reading the data")
    data = Path(os.path.normpath(data.absolute()))
    found = survey(data)
    why_not = _why_not_read(model)
    draft: dict[str, Any] = {"model": model, "dataset": _entry(str(data), found)}
    if found.preference is not None:
        draft["preference"] = found.preference
    if found.broken:
        draft["broken_rows"] = "skip"
    tokens = None
    if why_not is None:
        tell("counting tokens")
        tokens = _tokens(draft)
    job = NewJob(machine=machine, data=found, tokens=tokens, plans={})
    length, why_length = _max_length(model, found, tokens)
    rows = tokens["rows"] if tokens is not None else found.records - found.broken
    if why_not is None:
        _plan(job, {**draft, "max_length": length}, min(rows, DEFAULT_ROWS), tell)
    else:
        job.said.append(f"No plan was made: {why_not}")
        job.said.append("offmate plan tells whether it fits once the model is there; if not, give method: lora.")
    _fill(job, draft, data, length, why_length, rows, night=night, output=output)
    return job


def commands(job: NewJob, output: Path) -> Iterator[str]:
    """The commands that come next for the file `output`."""
    name = quoted(str(output))
    other = "" if job.machine.is_here else f" --hardware {job.machine.card}"
    yield from (f"offmate preview {name}", f"offmate plan {name}{other}", f"offmate submit {name}")


def quoted(name: str) -> str:
    """A file's name as this system's shell reads it."""
    return subprocess.list2cmdline([name]) if sys.platform == "win32" else shlex.quote(name)


def _why_not_read(model: str) -> str | None:
    """Why neither the model's config nor its tokenizer can be read here; None if they can."""
    from huggingface_hub import constants

    if Path(model).is_absolute() or is_downloaded(model):
        return None
    if constants.HF_HUB_OFFLINE:
        return f"{model} is not on this machine, and HF_HUB_OFFLINE says not to ask the hub."
    try:
        check_reached(model, model)
    except UserError as error:
        return f"{model} is not on this machine. {error.what}"
    return None


def _tokens(draft: Mapping[str, Any]) -> dict[str, Any] | None:
    """The figures of `offmate preview` for a job with the keys `draft`; None where the data are too large to be read
    at once, or the tokenizer is not here. Raises `click.exceptions.Exit` after the preview's error is printed."""
    job = Job.parse(_dumped({**draft, "max_length": _ANY_LENGTH}), Path("/"), name="The job")
    if why_not_at_hand(job) is not None:
        return None
    with planner_process.resolved(job) as path:
        command = [sys.executable, "-P", "-m", "worker.check", "preview", str(path), "--rows=0", "--json"]
        done = planner_process.run_child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode != Exit.DONE:
        if any(f"[{code}]" in done.stderr for code in (NOT_REACHED, OFFLINE)):
            return None
        lines = done.stderr.splitlines()
        click.echo("\n".join(line for line in lines if not line.startswith("data: ")), err=True)
        raise click.exceptions.Exit(done.returncode if done.returncode > 0 else Exit.FAILED)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def _max_length(model: str, found: Survey, tokens: Mapping[str, Any] | None) -> tuple[int, str]:
    """The value of `max_length`, and why."""
    if tokens is not None:
        longest, most = tokens["longest"], tokens["percentile_99"]
        rounded = _up(longest)
        why = f"the longest row has {counted(longest, 'token')}, 99% have {most} at most"
        positions = _positions(model)
        if positions is not None and longest > positions:
            return positions, f"the most that the model knows: {why}, and longer rows are cut"
        return min(rounded, positions or rounded), why
    if found.kind == "tokens":
        return _up(found.longest), f"the longest row has {counted(found.longest, 'token')}"
    guess = -(-found.longest // _BYTES)
    what = f"the longest record has {counted(found.longest, 'byte')} of text, about {counted(guess, 'token')}"
    return _up(guess), f"a guess: {what}; offmate preview counts"


def _up(tokens: int) -> int:
    return -(-tokens // _ROUND) * _ROUND


def _positions(model: str) -> int | None:
    """How many tokens a row of the model in a folder may have, by its config; None if that does not say."""
    try:
        config = json.loads((Path(model) / "config.json").read_text("utf-8"))
        found = config.get("max_position_embeddings", config.get("text_config", {}).get("max_position_embeddings"))
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, int) and found > 1 else None


def _entry(path: str, found: Survey) -> str | list[dict[str, Any]]:
    """The value of `dataset` for data at `path`."""
    return [{"path": path, **found.entry}] if found.entry else path


def _plan(job: NewJob, asked: Mapping[str, Any], rows: int, tell: Tell) -> None:
    """Ask the planner for one method after another, until one fits. `asked`: keys of the job; `rows`: of a step. Raises
    UserError if none fits."""
    for method, keys in _METHODS.items():
        tell(f"planning {_CALLED[method]} on {job.machine.device}")
        # The smallest micro-batches: if they do not fit, no others do.
        split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": rows}
        job.plans[method] = told = _asked({**asked, **keys, **split}, job.machine)
        if isinstance(told, Told) and not told.why_not:
            return
    whys = ((method, told.why_not if isinstance(told, Told) else told) for method, told in job.plans.items())
    lines = tuple(f"{_CALLED[method]}: {why}" for method, why in whys)
    if all(isinstance(told, str) for told in job.plans.values()):
        raise UserError(
            f"The planner can make no plan of {asked['model']}.",
            code="not-planned",
            exit_code=Exit.USAGE,
            numbers=lines,
            hint="offmate plan --model … --hardware … shows the whole error",
        )
    raise UserError(
        f"No method fits on {job.machine.device}, with rows of {counted(asked['max_length'], 'token')}.",
        code="does-not-fit",
        exit_code=Exit.DOES_NOT_FIT,
        numbers=lines,
        hint="give a smaller model, data with shorter rows, or another card",
    )


def _asked(keys: Mapping[str, Any], machine: Machine) -> Told | str:
    """The planner's answer for a job with these keys; or why it makes none, such as a base that this method cannot
    train. Without a card of the list it is the answer of `offmate plan FILE` for this machine."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="offmate-") as scratch:
        file = Path(scratch) / "job.yaml"
        file.write_text(_dumped(keys), "utf-8")
        try:
            with contextlib.redirect_stderr(said):
                if machine.card is None:
                    plan = planner_process.make_plan(file, {}, lambda _: None)["plan"]
                    sizes = ("gpu_peak_bytes", "cpu_peak_bytes", "gpu_budget_bytes")
                    return Told(**{size: plan[size] for size in sizes})
                options = {"compare": machine.card, "cpu_memory": f"{machine.ram}B"}
                _, answers = planner_process.ask_several(file, options, lambda _: None)
        except UserError as error:
            return "; ".join((error.what.removesuffix("."), *error.numbers))
        except click.exceptions.Exit as ended:
            lines = [line.strip() for line in said.getvalue().splitlines() if line.strip()]
            if ended.exit_code == Exit.DOES_NOT_FIT and len(lines) > 1:
                return Told(why_not=f"does not fit ({lines[1]})")  # the sizes; the first says that nothing fits
            return lines[0] if lines else "the planner gave no answer"
    receipt = from_json(Receipt, answers[0])
    return Told(
        why_not=_why_not(receipt) if receipt.status == "infeasible" else "",
        gpu_peak_bytes=receipt.gpu_peak_bytes,
        cpu_peak_bytes=receipt.cpu_peak_bytes,
        gpu_budget_bytes=receipt.gpu_budget_bytes,
    )


def _why_not(receipt: Receipt) -> str:
    """Why a plan that does not fit does not, in words."""
    needs, has = receipt.least_cpu_budget_bytes, receipt.cpu_budget_bytes
    if needs is not None and needs > has:
        return f"needs {format_bytes(needs)} of host memory, and a job may use {format_bytes_down(has)}"
    needs, has = receipt.least_gpu_budget_bytes, receipt.gpu_budget_bytes
    if needs is None:
        return "does not fit with any amount of GPU memory"
    return f"needs {format_bytes(needs)} of GPU memory, and a job may use {format_bytes_down(has)}"


def _fill(
    job: NewJob,
    draft: Mapping[str, Any],
    data: Path,
    length: int,
    why_length: str,
    rows: int,
    *,
    night: bool,
    output: Path,
) -> None:
    """Add the lines of the file to `job`."""
    found, folder, add = job.data, Path(os.path.normpath(output.absolute())).parent, job.lines.append
    model: str = draft["model"]
    if job.machine.is_cpu:
        job.said.insert(0, "The job runs on the CPU: a counted part of the memory stands for the GPU's.")
    add(Line(key="model", value=_from(folder, model), why=""))
    many = f"{counted(found.records, 'record')}, read as {found.kind}"
    dataset = _entry(_from(folder, str(data)), found)
    add(Line(key="dataset", value=dataset, why=many if found.whole else f"over {many}"))
    if found.entry:
        question, answer = found.entry["columns"].values()
        template = "under the chat template, or in the Alpaca prompt where the model has none"
        job.said.append(f"The columns {question} and {answer} are read as instructions and outputs, {template}.")
    if found.as_they_are:
        entry = {"path": _from(folder, str(data)), **of_pair("prompt", "completion")}
        instead = f"to use the model's, write dataset: {_flow([entry])}"
        job.said.append(f"Prompts and completions are joined as they are, without a chat template; {instead}")
    if found.broken:
        first = f"{counted(found.broken, 'broken record')} left out; {found.lines[0]}"
        add(Line(key="broken_rows", value="skip", why=f"{first}; without this key the job is refused"))
        job.said += [f"Left out as broken: {line}" for line in found.lines]
    for column in found.ignored:
        job.said.append(f"The column {column} is not read; with preference: kto a job learns from it.")
    if found.preference is not None:
        why = "the data are pairs of a chosen and a rejected answer"
        add(Line(key="preference", value=found.preference, why=why))
    method = _method_lines(job)
    job.lines += method
    add(Line(key="max_length", value=length, why=why_length))
    batch = min(rows, DEFAULT_ROWS)
    unit = "pair" if found.preference else "row"
    add(Line(key="train_batch_size", value=batch, why=f"{unit}s of a step; the planner splits them"))
    # As a question: the weights need not be here.
    defaults = Job.question(_dumped({**draft, **{line.key: line.value for line in method}}), Path("/"), name="The job")
    add(Line(key="learning_rate", value=defaults.learning_rate, why="the default; the highest of the schedule"))
    add(Line(key="num_train_epochs", value=defaults.num_train_epochs, why="the default; passes over the data"))
    if (budget := _gpu_budget(job)) is not None:
        why = f"what a job may use of {job.machine.device}, which is not this machine's card"
        add(Line(key="gpu_budget", value=budget, why=why))
    held_out = _HELD_OUT if rows >= _ENOUGH else 0.0
    if held_out:
        why = f"this share of the {unit}s is not trained on, and shows overfitting"
        add(Line(key="val_size", value=held_out, why=why))
    if night:
        add(Line(key="schedule", value=NIGHT, why="it trains at night, and goes on the next night"))
    name = f"{Path(model).name}-{data.stem}"
    add(
        Line(
            key="output_dir", value=_from(folder, str(_free(folder / name))), why="a new folder, for the trained model"
        )
    )


def _method_lines(job: NewJob) -> list[Line]:
    """The lines of the method that fits, if anything was planned. Says of the methods before it why they do not."""
    if not job.plans:
        return []
    *others, (method, told) = job.plans.items()
    assert isinstance(told, Told)
    unit = "pair" if job.data.preference else "row"
    memory = "the memory that stands for the GPU's" if job.machine.is_cpu else "GPU memory"
    room = f"{format_part(told.gpu_peak_bytes, told.gpu_budget_bytes)} of {memory}"
    why = [f"{_CALLED[other]} {its.why_not}" for other, its in others if isinstance(its, Told)]
    why += [f"{_CALLED[other]} was refused: {said}" for other, said in others if isinstance(said, str)]
    job.said += [f"{line}." for line in why]
    lines = []
    for key, value in ({"method": "full"} | _METHODS[method]).items():
        because = f"it fits: {room} in micro-batches of one {unit}" if key == "method" else "the base in 4 bits"
        lines.append(Line(key=key, value=value, why=because))
    return lines


def _gpu_budget(job: NewJob) -> str | None:
    """The value of `gpu_budget` where the file is for another card than this machine's: what a job may use of that
    card. None where this machine has less, as it would refuse such a budget."""
    if job.machine.is_here or job.machine.card is None:
        return None
    usable, here = preset(job.machine.card, bf16=True).gpu_bytes, device_bytes()
    return f"{usable // 2**20}MiB" if here is not None and usable <= here else None


def _free(folder: Path) -> Path:
    """The folder itself if there is nothing of that name, else the first of folder-2, folder-3 …"""
    names = (folder if number == 1 else folder.with_name(f"{folder.name}-{number}") for number in range(1, 10**6))
    return next(path for path in names if not os.path.lexists(path))


def _from(folder: Path, name: str) -> str:
    """A path as a file in `folder` names it: relative if it is inside. A hub id is returned unchanged."""
    path = Path(name)
    if not path.is_absolute() or not path.is_relative_to(folder):
        return name
    inside = str(path.relative_to(folder))
    if inside == ".":
        return inside
    return inside if Path(inside).suffix and path.is_file() else f"./{inside}"


def _dumped(keys: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(keys), sort_keys=False, allow_unicode=True)


def _flow(value: list[Any]) -> str:
    """The value as YAML in one line."""
    options: dict[str, Any] = {"default_flow_style": True, "sort_keys": False, "allow_unicode": True}
    written: str = yaml.safe_dump(value, width=math.inf, **options)
    return written.strip()


def _written(line: Line) -> str:
    text = f"{line.key}: {_flow([line.value])[1:-1]}"
    if not line.why:
        return text
    comment = " ".join(printable(line.why).split())
    beside = f"{text:{_COMMENTS_AT}} # {comment}"
    return beside if len(beside) <= _WIDTH else "\n".join([*_comment(comment), text])


def _comment(text: str) -> list[str]:
    """The text as lines of comments."""
    return [f"# {line}" for line in textwrap.wrap(printable(text), _WIDTH - 2, break_on_hyphens=False)]
