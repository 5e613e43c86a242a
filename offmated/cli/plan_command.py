"""Defines the commands `plan` and `plans`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from offmated.cli.output import Size, budget_options, console, json_option, print_json, say
from offmated.cli.pictures import drawn, picture_options
from planner.errors import Exit

_COUNT = click.IntRange(min=1)


@click.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@budget_options
@click.option("--measure", is_flag=True, help="Measure the blocks on this machine first, as training does.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Plan for this device.")
@click.option(
    "--hardware",
    metavar="NAME|FILE|list",
    help="Plan for another machine: a card (rtx3060, h100 …) or a YAML file; list shows all cards.",
)
@click.option("--compare", metavar="NAMES", help="Print one table for several machines: rtx3060,rtx4090,my-box.yaml.")
@click.option("--frontier", is_flag=True, help="With --hardware: step time over GPU memory; with --html as a picture.")
@click.option(
    "--cpu-memory",
    type=Size(),
    metavar="SIZE",
    help="With --hardware NAME or --compare: the host's memory (64GiB beside a home card).",
)
@click.option("--link", metavar="NAME|RATE", help="With --hardware NAME: pcie3x8 … pcie5x16, or bytes per second.")
@click.option(
    "--drive", metavar="NAME", help="With --hardware: a drive for optimizer states: pcie3, pcie4, pcie5, 2xpcie4 …"
)
@click.option("--model", metavar="ID|PATH", help="Ask about a model by its config: a hub id, a folder, a config.json.")
@click.option("--max-length", type=_COUNT, metavar="N", help="With --model: tokens in a row (1024).")
@click.option("--batch-size", metavar="N|auto", help="With --model: rows in a micro-batch (1); auto: the fastest.")
@click.option("--lora", type=_COUNT, metavar="RANK", help="With --model: LoRA on all linear layers.")
@click.option("--fp32", is_flag=True, help="With --model: train in fp32, not in bf16 with fp32 masters.")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="With FILE or --model: overrides the job's KEY."
)
@click.option("--chain", type=click.Path(path_type=Path), metavar="FILE", help="Plan a chain in JSON.")
@click.option("--slices", type=_COUNT, metavar="N", help="Micro-batches in a step: 8 with --model, 1 with --chain.")
@click.option(
    "--clip",
    type=click.Choice(["none", "exact"]),
    help="Gradient clipping; default: exact with --model, none with --chain.",
)
@click.option(
    "--gap",
    type=click.FloatRange(0, 1, max_open=True),
    metavar="SHARE",
    help="With --chain: the optimality gap at which the solver may stop (0.01).",
)
@click.option("--no-cpu-updates", is_flag=True, help="With --chain: all updates on the GPU.")
@click.option("--no-activation-offload", is_flag=True, help="With --chain: activations are kept or recomputed.")
@picture_options
@json_option
def plan(file: Path | None, as_json: bool, **options: object) -> None:
    """Show how a job would run, without running it: here, or on a machine that you do not have. Exits with 3 when it
    does not fit.

    \b
    offmate plan job.yaml
    offmate plan --hardware list
    offmate plan job.yaml --compare rtx3060,rtx4090,rtx5090
    offmate plan job.yaml --hardware rtx4090 --frontier --html frontier.html
    offmate plan job.yaml --hardware rtx4090 --cpu-memory 128GiB
    offmate plan --model meta-llama/Llama-3.1-8B --hardware rtx3060 --lora 16 --set exact=false
    offmate plan --chain chain.json --hardware hardware.json --gpu-budget 10GiB --json
    offmate plan job.yaml --html plan.html --trace plan.json
    """
    chosen = {name: value for name, value in options.items() if value not in (None, False, ())}
    if chosen.get("hardware") == "list":
        if file is not None or len(chosen) > 1:
            raise click.UsageError("--hardware list goes with --json alone")
        from offmated.cli import card_list

        print_json(card_list.as_json()) if as_json else console().print(card_list.as_table())
        return
    from offmated.cli import (  # late: importing them takes half of a command's start
        plan_progress,
        planner_process,
    )

    kind = planner_process.kind_of_question(file, chosen)
    with plan_progress.Screen() if not as_json else plan_progress.Quiet() as screen:
        if "compare" in chosen or "frontier" in chosen:
            code, answers = planner_process.ask_several(file, chosen, screen.news)
            screen.answers(answers, frontier="frontier" in chosen)
            if "html" in chosen and code == Exit.DONE and not as_json:
                say(f"The step over GPU memory is drawn in {chosen['html']}")
            sys.exit(code)
        if kind == "FILE" and file is not None:
            code, answer = int(Exit.DONE), planner_process.make_plan(file, chosen, screen.news)
        else:
            code, answer = planner_process.ask(file, chosen, screen.news)
        screen.answer(answer)
    for line in drawn(options["trace"], options["html"]) if code == Exit.DONE and not as_json else ():
        say(line)
    sys.exit(code)


@click.group()
def plans() -> None:
    """Show or remove kept plans. A kept plan is used again when the same plan is needed."""


@plans.command("list")
@json_option
def list_plans(as_json: bool) -> None:
    """List the kept plans, the one used last first."""
    from offmated.cli import planner_process, receipt_view

    rows = planner_process.kept_plans("list")
    print_json(rows) if as_json else console().print(receipt_view.kept(rows))


@plans.command("show")
@click.argument("key")
@json_option
def show_plan(key: str, as_json: bool) -> None:
    """Show the plan whose key begins with KEY."""
    from offmated.cli import planner_process, receipt_view

    entry = planner_process.kept_plans("show", key)
    print_json(entry) if as_json else console().print(receipt_view.kept_plan(entry))


@plans.command("forget")
@click.argument("key", required=False)
@click.option("--all", "everything", is_flag=True, help="Remove all plans.")
@json_option
def forget_plan(key: str | None, everything: bool, as_json: bool) -> None:
    """Remove the plan whose key begins with KEY, or all of them. The next job that needs it is planned again."""
    if (key is None) != everything:
        raise click.UsageError("give the KEY of one plan, or --all")
    from offmated.cli import planner_process

    done = planner_process.kept_plans("forget", *([key] if key else []))
    print_json(done) if as_json else click.echo(f"Forgotten: {done['forgotten']}")
