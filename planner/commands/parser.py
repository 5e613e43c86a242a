"""Parses and answers the planner process's commands except `plan`: chains from files, other machines, kept plans.

    solve   a chain and a machine from files
    ask     a job on a machine by name, from its model's config
    several a job on several machines, or on one with several amounts of GPU memory
    plans   list, show and forget the plans in the plan cache
    picture draw a plan.json

Each prints its answer in JSON as one line. That a job does not fit is an answer, too, with exit code 3.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, cast

from planner.cache.store import Cache, answer_key
from planner.codec import Json, to_json
from planner.commands.chain_files import load_chain
from planner.commands.machine_file import load_hardware
from planner.commands.question import config_text, title_of
from planner.errors import Exit, UserError
from planner.fast_imports import lasting_imports
from planner.job.schema import Job
from planner.keys.source import read_text
from planner.machine.card_names import find_card
from planner.machine.hardware import Hardware
from planner.machine.presets import preset, with_drives
from planner.optimizers.table import OPTIMIZERS
from planner.picture.basis import Basis
from planner.picture.files import NO_PICTURES, Pictures, add_options, redraw
from planner.schedule.chain import Chain
from planner.units import parse_bytes


def add_parsers(commands: Any) -> None:
    """Add the subcommands of this module to `commands`, a result of `ArgumentParser.add_subparsers`."""
    solve = commands.add_parser("solve", help="plan a chain on a machine, both from files")
    solve.add_argument("--chain", type=Path, required=True, metavar="FILE")
    _machine(solve)
    solve.add_argument("--gpu-budget", type=parse_bytes, metavar="SIZE")
    solve.add_argument("--cpu-budget", type=parse_bytes, metavar="SIZE")
    solve.add_argument("--slices", type=_count, default=1)
    solve.add_argument("--clip", choices=("none", "exact"), default="none")
    solve.add_argument("--gap", type=_share, default=0.01)
    solve.add_argument("--no-cpu-updates", action="store_true")
    solve.add_argument("--no-activation-offload", action="store_true")
    add_options(solve)
    ask = commands.add_parser("ask", help="a job on some machine")
    ask.add_argument("--job", type=Path, required=True, metavar="FILE", help="only what a plan depends on is read")
    _machine(ask)
    ask.add_argument("--database", metavar="URL", help="where plans and answers are kept")
    ask.add_argument("--traces", type=Path, metavar="DIR", help="where traces of models are kept")
    add_options(ask)
    several = commands.add_parser("several", help="a job on several machines, or with several amounts of GPU memory")
    several.add_argument("--job", type=Path, required=True, metavar="FILE", help="only what a plan depends on is read")
    _machine(several)
    several.add_argument("--frontier", action="store_true", help="one machine, several amounts of GPU memory")
    several.add_argument("--database", metavar="URL", help="where plans are kept")
    several.add_argument("--traces", type=Path, metavar="DIR", help="where traces of models are kept")
    several.add_argument("--html", type=Path, metavar="FILE", help="with --frontier: draw it into a page")
    plans = commands.add_parser("plans", help="the kept plans")
    plans.add_argument("verb", choices=("list", "show", "forget"))
    plans.add_argument("key", nargs="?", help="a plan's key or how it begins; forget takes all without one")
    plans.add_argument("--database", required=True, metavar="URL")
    picture = commands.add_parser("picture", help="draw a plan")
    picture.add_argument("plan", type=Path, metavar="PLAN_JSON")
    picture.add_argument("--title", default="")
    add_options(picture)


def _machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hardware", required=True, metavar="NAME_OR_FILE")
    parser.add_argument("--cpu-memory", type=parse_bytes, metavar="SIZE")
    parser.add_argument("--link", metavar="NAME_OR_RATE")
    parser.add_argument("--drive", metavar="NAME", help="for optimizer states: pcie3, pcie4, pcie5, 2xpcie4 …")


def answer(options: argparse.Namespace, answers: TextIO) -> int:
    """Write the answer to the parsed command line to `answers`, as one line of JSON; returns the exit code.
    A question about a machine by name writes lines before it that say how far it is (`planner.commands.tell`)."""
    try:
        if options.command in ("ask", "several"):
            code, document = {"ask": _ask, "several": _several}[options.command](options, answers)
        else:
            code, document = {"solve": _solve, "plans": _plans, "picture": _picture}[options.command](options)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps(document), file=answers)
    return code


def _solve(options: argparse.Namespace) -> tuple[Exit, Json]:
    from planner.reports.make_receipt import solved
    from planner.search.problem import Problem

    pictures = Pictures.wanted(options)
    chain, hardware = load_chain(options.chain), _hardware(options, bf16=True)
    start = time.monotonic()
    try:
        plan = Problem(
            chain=chain,
            hardware=hardware,
            gpu_budget_bytes=_given(options.gpu_budget, hardware.gpu_bytes),
            cpu_budget_bytes=_given(options.cpu_budget, hardware.cpu_bytes),
            slices=options.slices,
            clip=options.clip == "exact",
            cpu_updates=not options.no_cpu_updates,
            activation_offload=not options.no_activation_offload,
        ).plan(gap=options.gap)
    except UserError as error:
        if error.exit_code is not Exit.DOES_NOT_FIT:
            raise
        return Exit.DOES_NOT_FIT, _infeasible(chain, hardware, options, error) | {"solve_s": time.monotonic() - start}
    document = to_json(solved(plan, chain, gap=options.gap, solve_s=time.monotonic() - start))
    pictures.write(plan, chain, hardware, title=options.chain.stem, basis=Basis.GIVEN)
    return Exit.DONE, document


def _infeasible(chain: Chain, hardware: Hardware, options: argparse.Namespace, error: UserError) -> dict[str, Json]:
    """The answer for a chain that does not fit. For people, the error goes to stderr, with a hint for this command."""
    from planner.search.make_plan import round_up
    from planner.search.problem import Problem

    least = None
    try:
        least = (
            Problem(
                chain=chain,
                hardware=hardware,
                gpu_budget_bytes=0,
                cpu_budget_bytes=_given(options.cpu_budget, hardware.cpu_bytes),
                slices=options.slices,
                clip=options.clip == "exact",
                cpu_updates=not options.no_cpu_updates,
                activation_offload=not options.no_activation_offload,
            )
            .least()
            .gpu_bytes
        )
        hint = f"offmate plan … --gpu-budget {round_up(least)}"
    except UserError as host_error:  # the host is too small, whatever the device
        hint = host_error.hint
    shown = UserError(error.what, code=error.code, numbers=error.numbers, hint=hint, exit_code=error.exit_code)
    print(shown, file=sys.stderr)
    return {"status": "infeasible", "code": error.code, "least_gpu_budget_bytes": least}


def _ask(options: argparse.Namespace, answers: TextIO) -> tuple[Exit, Json]:
    pictures = Pictures.wanted(options)
    job = Job.question(read_text(options.job), options.job.absolute().parent)
    hardware = machine_for(job, options)
    cache = _cache(options.database)
    config = config_text(job.model) if cache is not None else None
    key = answer_key(job.resolved_yaml(), config, hardware) if config is not None else None
    document = cache.find_answer(key) if cache is not None and key is not None else None
    if document is None or not _drawn_again(document, pictures, cache, title=title_of(job)):
        # torch takes seconds to import: kept answers, and errors in the command line, come before that.
        with lasting_imports():
            from planner.commands.ask import ask
        from planner.commands.kept_traces import Traces
        from planner.commands.tell import InLines

        receipt = ask(
            job, hardware, tell=InLines(answers), pictures=pictures, cache=cache, traces=Traces(options.traces)
        )
        document = cast(dict[str, Any], to_json(receipt))
        if cache is not None and key is not None:
            cache.keep_answer(key, document)
    return Exit.DOES_NOT_FIT if document["status"] == "infeasible" else Exit.DONE, document


def _several(options: argparse.Namespace, answers: TextIO) -> tuple[Exit, Json]:
    from planner.commands.kept_traces import Traces
    from planner.commands.several import compare, frontier
    from planner.commands.tell import InLines

    job = Job.question(read_text(options.job), options.job.absolute().parent)
    names = [name.strip() for name in options.hardware.split(",") if name.strip()]
    if not names:
        raise UserError("No machine is named.", code="usage", hint="offmate plan --help", exit_code=Exit.USAGE)
    machines = [machine_for(job, argparse.Namespace(**{**vars(options), "hardware": name})) for name in names]
    pictures = Pictures.wanted(argparse.Namespace(trace=None, html=options.html))
    traces, cache, tell = Traces(options.traces), _cache(options.database), InLines(answers)
    if options.frontier:
        receipts = frontier(job, machines[0], traces=traces, cache=cache, tell=tell)
        if receipts[0].status != "infeasible":
            pictures.write_frontier(receipts, title=f"{title_of(job)} on {machines[0].name}")
    else:
        receipts = compare(job, machines, traces=traces, cache=cache, tell=tell)
    fits = any(receipt.status != "infeasible" for receipt in receipts)
    return Exit.DONE if fits else Exit.DOES_NOT_FIT, [to_json(receipt) for receipt in receipts]


def machine_for(job: Job, options: argparse.Namespace) -> Hardware:
    """The machine that `options` name or give as a file, as the job uses it. Raises UserError."""
    hardware = _hardware(options, bf16=job.bf16)
    if not (optimizer := OPTIMIZERS[job.optim]).on_disk:
        if options.drive is not None:
            raise UserError(
                f"--drive is for optimizer states, and {optimizer.states} stay in memory.",
                code="bad-value",
                numbers=(f"optim: {job.optim}",),
                hint="leave --drive out, or add: --set optim=adamw_torch",
                exit_code=Exit.USAGE,
            )
        hardware = replace(hardware, disk_bytes=0)  # a machine's file may give some
    if missing := [field for field in ("flops_per_s", "launch_s") if not getattr(hardware, field)]:
        raise UserError(
            "A model's times cannot be estimated without the GPU's flops_per_s and launch_s.",
            code="bad-file",
            exit_code=Exit.USAGE,
            numbers=(f"{options.hardware} has no {' and no '.join(missing)}",),
            hint="docs/reference/plan-files.md lists the fields",
        )
    return hardware


def _cache(database: str | None) -> Cache | None:
    """The plan cache, if this version has prepared the database; None otherwise: then the answer is not kept."""
    if database is None:
        return None
    cache = Cache(database)
    try:
        cache.find_answer("")
    except UserError as error:
        print(f"This answer is not kept: {error}", file=sys.stderr)
        return None
    return cache


def _drawn_again(document: dict[str, Any], pictures: Pictures, cache: Cache | None, *, title: str) -> bool:
    """Draw the plan of a kept receipt, where pictures are wanted. Returns False where the plan is no longer kept."""
    if pictures == NO_PICTURES or document["status"] == "infeasible":
        return True
    plan = cache.find_plan(document["plan_key"]) if cache is not None else None
    if plan is None:
        return False
    pictures.write(plan.plan, plan.chain, plan.hardware, title=title)
    return True


def _hardware(options: argparse.Namespace, *, bf16: bool) -> Hardware:
    """The machine that `options` name or give as a file, with the drives they ask for. Raises UserError."""
    hardware = _machine_of(options, bf16=bf16)
    return hardware if options.drive is None else with_drives(hardware, options.drive)


def _machine_of(options: argparse.Namespace, *, bf16: bool) -> Hardware:
    path = Path(options.hardware)
    is_file = path.exists() or path.suffix.lower() in (".json", ".yaml", ".yml")
    if find_card(options.hardware) is not None or not is_file:
        return preset(options.hardware, bf16=bf16, cpu_memory_bytes=options.cpu_memory, link=options.link)
    if options.cpu_memory is not None or options.link is not None:
        raise UserError(
            "--cpu-memory and --link are for machines given by name.",
            code="two-machines",
            numbers=(f"{path} is a file",),
            hint="change them in the file",
            exit_code=Exit.USAGE,
        )
    return load_hardware(path, bf16=bf16)


def _plans(options: argparse.Namespace) -> tuple[Exit, Json]:
    cache = Cache(options.database)
    if options.verb == "list":
        return Exit.DONE, to_json(cache.plans())
    if options.verb == "show":
        return Exit.DONE, cache.show_plan(options.key)
    if options.key is None:
        return Exit.DONE, {"forgotten": cache.forget_plans()}
    cache.forget_plan(options.key)
    return Exit.DONE, {"forgotten": 1}


def _picture(options: argparse.Namespace) -> tuple[Exit, Json]:
    redraw(options.plan, Pictures.wanted(options), title=options.title)
    return Exit.DONE, {"drawn": [str(path) for path in (options.trace, options.html) if path is not None]}


def _given(budget: int | None, default: int) -> int:
    return default if budget is None else budget


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 <= number < 1:
        raise ValueError(text)
    return number
