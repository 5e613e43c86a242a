"""Shows a plan in a few lines: what each block does, where the memory goes, how long a step takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.text import Text

from offmated.cli.quality import quality
from planner.codec import from_json
from planner.schedule.disk_use import DiskUse
from planner.schedule.earlier import plan_of
from planner.schedule.items import GRADIENT, STATES, WEIGHT, Item
from planner.schedule.plan import Plan
from planner.units import counted, format_part, format_seconds


def plan_rows(answer: dict[str, Any]) -> list[tuple[str, str | Text]]:
    """The plan as pairs of name and value, for `pairs()`. `answer`: plan.json, with or without its chain (the model's
    sizes and times). For a plan in another version's form, one line says that it cannot be shown."""
    try:
        return _rows(plan_of(answer["plan"]), answer)
    except (KeyError, TypeError, ValueError):
        return [("plan", "written by another version of offmate; this version cannot show it")]


def _rows(plan: Plan, answer: dict[str, Any]) -> list[tuple[str, str | Text]]:
    return [
        ("plan", _origin(plan, answer)),
        ("batch", _batch(plan, answer)),
        *(("", text) for text in _compared(answer)),
        *((("", answer["planned_for"]),) if "planned_for" in answer else ()),
        ("step", f"{format_seconds(plan.step_s)} predicted for full rows"),
        *((("", answer["reference"]),) if answer.get("reference") else ()),
        *((("", quality(plan)),) if plan.bound_s > 0 or plan.lp_step_s > 0 else ()),
        ("GPU memory", f"peak {format_part(plan.gpu_peak_bytes, plan.gpu_budget_bytes)}, with full rows"),
        ("host memory", f"peak {format_part(plan.cpu_peak_bytes, plan.cpu_budget_bytes)}"),
        ("blocks", " · ".join(option_runs(plan.options))),
        ("updates", _updates(plan)),
        *(("" if number else "disk", line) for number, line in enumerate(_disk(answer))),
        ("transfers", _transfers(plan)),
    ]


def _disk(answer: dict[str, Any]) -> Iterator[str]:
    """What a step reads and writes on the drives, and how that wears them. Plans of older versions and kept plans do
    not say it."""
    if use := answer.get("disk"):
        yield from from_json(DiskUse, use).lines()


def option_runs(options: Sequence[str]) -> Iterator[str]:
    """Yield a text for each run of neighbouring blocks with the same option for their activations: "0 keep", "1–6
    recompute"."""
    for option, run in groupby(enumerate(options), key=lambda pair: pair[1]):
        numbers = [number for number, _ in run]
        span = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"
        yield f"{span} {option}"


def _origin(plan: Plan, answer: dict[str, Any]) -> str:
    known = "measured on this machine" if answer["measured"] else "an estimate: the blocks are measured before training"
    origin = "from the cache" if answer["cached"] else f"made in {format_seconds(answer['solve_s'])}"
    return f"{plan.source}, {origin}; {known}"


def _batch(plan: Plan, answer: dict[str, Any]) -> str:
    """The micro-batches of a step, and how they go through the model. Kept plans do not say how large their slices are,
    and neither do some plans of older versions."""
    count = plan.slices * plan.rounds
    text = counted(count, "micro-batch", "micro-batches")
    rows, length = answer.get("rows"), answer.get("length")
    if rows is not None and length is not None:
        unit = answer.get("unit", "row")
        lines = 1 if unit == "row" else 2  # an answer of KTO is beside one to another prompt
        all_tokens = counted(count * rows * lines * length, "token")
        text += (
            f" × {counted(rows, unit)}{' × 2' * (lines - 1)} × {counted(length, 'token')} = {all_tokens} a step at most"
        )
    if count > 1:
        of = "of all" if plan.rounds == 1 else "of"
        text += f"; through each block in {counted(plan.rounds, 'round')} {of} {counted(plan.slices, 'slice')}"
    return text


def _compared(answer: dict[str, Any]) -> Iterator[str]:
    """Where the planner chose how the batch is split: the splits it compared, with the estimated time of a step."""
    if splits := answer.get("splits"):
        others = (
            f"{s['slices']} × {s['rows']} ({format_seconds(s['step_s'])})"
            for s in splits
            if s["rows"] != answer["rows"]
        )
        shown = ", ".join(others)
        yield "the split is the planner's choice" + (f"; compared by estimate: {shown}" if shown else "")


def _updates(plan: Plan) -> str:
    on_cpu = sum(len(stage.cpu_update) for stage in plan.stages)
    on_gpu = sum(len(stage.gpu_update) for stage in plan.stages)
    text = f"{counted(on_cpu, 'tensor')} on the CPU, {on_gpu} on the GPU"
    text += ", after the norm of all gradients is known" if plan.clip else ""
    trailing = len(plan.trailing())
    return text + (f"; the states of {trailing} on disk in the next step" if trailing else "")


_SORTS = {WEIGHT: "weight", GRADIENT: "gradient", STATES: "optimizer state"}


def _transfers(plan: Plan) -> str:
    """What is transferred in a step, by kind: "up 12 weights, 3 optimizer states; down 12 gradients"."""
    up = _sorts(item for stage in plan.stages for item in stage.prefetch)
    down = _sorts(item for stage in plan.stages for item in stage.offload)
    return f"up {up or 'nothing'}; down {down or 'nothing'}"


def _sorts(items: Iterator[Item]) -> str:
    counts = Counter(item.kind for item in items)
    sorts = [(counts[sort], name) for sort, name in _SORTS.items() if counts[sort]]
    return ", ".join(counted(count, name) for count, name in sorts)
