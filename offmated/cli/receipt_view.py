"""Shows receipts (the planner's answers about a job on a machine) and kept plans in words: does it fit, how fast, where
each GiB goes, what would help."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from offmated.cli.job_view import moment
from offmated.cli.output import pairs, table
from offmated.cli.plan_view import option_runs, plan_rows
from offmated.cli.quality import quality
from planner.codec import from_json
from planner.reports.receipt import Receipt, Share, Solved
from planner.units import counted, format_bytes, format_bytes_down, format_part, format_seconds

Rows = list[tuple[str, str | Text]]
_NAMES = len("not planned")  # the longest name of a row


def answer(document: dict[str, Any]) -> RenderableType | None:
    """The text that `offmate plan --hardware` prints for the planner's answer `document`; None where the planner has
    printed it already."""
    if "asked" in document:
        return receipt(from_json(Receipt, document))
    if document["status"] == "infeasible":
        return None
    return pairs(_solved(from_json(Solved, document)))


def receipt(receipt: Receipt) -> RenderableType:
    """The planner's whole answer about one job on one machine, as text."""
    return Group(figures(receipt), changes(receipt))


def figures(receipt: Receipt) -> RenderableType:
    """The first part of the answer: whether the job fits, how fast it is, and the bytes."""
    rows = list(_fitting(receipt) if receipt.status != "infeasible" else _too_large(receipt))
    verdict = Text(_verdict(receipt), style="green" if receipt.status != "infeasible" else "red")
    return Group(question(receipt), verdict, pairs(rows, width=_NAMES))


def changes(receipt: Receipt) -> RenderableType:
    """The second part of the answer: what would help, or what would make the job fit."""
    return pairs(list(_helps(receipt) if receipt.status != "infeasible" else _fits_with(receipt)), width=_NAMES)


def question(receipt: Receipt, *, on_machine: bool = True) -> str:
    """The question in one line: the model, with `on_machine` the machine, and the step."""
    asked = receipt.asked
    model = asked.model.rstrip("/").removesuffix("/config.json").rpartition("/")[2]
    trained = (
        "" if receipt.trained_parameters == receipt.parameters else f", {_billions(receipt.trained_parameters)} trained"
    )
    machine = f" on {receipt.hardware.name}" if on_machine else ""
    rows = asked.rows if asked.unit == "row" else f"{counted(asked.rows, asked.unit)} × 2"
    return (
        f"{model} ({_billions(receipt.parameters)} parameters{trained}) in {asked.dtype}{machine}, "
        f"{counted(asked.slices, 'slice')} of {rows} × {counted(asked.length, 'token')} a step"
    )


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 10**8 else f"{count / 1e6:.1f} million"


def _verdict(receipt: Receipt) -> str:
    if receipt.status == "infeasible":
        return "It does not fit."
    return f"It fits: {format_seconds(receipt.step_s)} a step, {receipt.tokens_per_s:.0f} tokens/s (estimated)."


def _fitting(receipt: Receipt) -> Iterator[tuple[str, str | Text]]:
    yield from _notes(receipt)
    yield "", ""
    yield "plan", quality(receipt)
    yield "limit", f"{receipt.loads[0].resource}, busy {receipt.loads[0].share:.0%} of the step"
    yield "", " · ".join(f"{load.resource} {load.share:.0%}" for load in receipt.loads[1:])
    yield "updates", f"{receipt.cpu_update_share:.0%} of the trained parameters on the CPU"
    yield "blocks", " · ".join(option_runs(receipt.options))
    if any("-" in option for option in receipt.options):
        yield "", "(numbered options differ in which of a block's values stay, move or are recomputed)"
    full_rows = f", with full rows of {counted(receipt.asked.length, 'token')}"
    yield from _memory("GPU", format_part(receipt.gpu_peak_bytes, receipt.gpu_budget_bytes) + full_rows, receipt.gpu)
    yield from _memory("host", format_part(receipt.cpu_peak_bytes, receipt.cpu_budget_bytes), receipt.host)
    yield from _disk(receipt.disk)
    for line in () if receipt.disk_use is None else receipt.disk_use.lines():
        yield "", line
    yield "", ""


def _helps(receipt: Receipt) -> Iterator[tuple[str, str | Text]]:
    if not receipt.changes:
        more = "; others, which may help, were not planned" if receipt.unplanned else ""
        yield "would help", f"none of the other machines and batches that were planned{more}"
    for number, change in enumerate(receipt.changes):
        yield "" if number else "would help", f"{change.text}: {change.factor:.3g}×, {change.tokens_per_s:.0f} tokens/s"
    for number, prospect in enumerate(receipt.unplanned):
        yield "" if number else "not planned", f"{prospect.text}: {math.ceil(100 * prospect.most) / 100:.2f}× at most"


def _memory(name: str, used: str, shares: Sequence[Share]) -> Rows:
    rows: Rows = [("", ""), (name, used)]
    return rows + _shares(shares)


def _disk(shares: Sequence[Share]) -> Rows:
    rows: Rows = [("", ""), ("disk", format_bytes(sum(share.bytes for share in shares)))]
    return rows + _shares(shares)


def _shares(shares: Sequence[Share]) -> Rows:
    """One share a line; those below half a percent of the total are added up in the last line."""
    least = sum(share.bytes for share in shares) // 200
    small = sum(share.bytes for share in shares if share.bytes < least)
    shown = [(share.bytes, share.name) for share in shares if share.bytes >= least]
    shown += [(small, "other")] if small else []
    return [("", f"{format_bytes(size):>10}  {name}") for size, name in shown]


def _notes(receipt: Receipt) -> Rows:
    return [("note", note) for note in receipt.notes]


def _too_large(receipt: Receipt) -> Iterator[tuple[str, str | Text]]:
    yield from _notes(receipt)
    yield "", ""
    gpu, host = format_bytes_down(receipt.gpu_budget_bytes), format_bytes_down(receipt.cpu_budget_bytes)
    yield "GPU", f"{gpu} for the job; {_least(receipt.least_gpu_budget_bytes, 'this host')}"
    yield "host", f"{host} for the job; {_least(receipt.least_cpu_budget_bytes, 'this GPU')}"
    yield from _disk(receipt.disk)
    yield "", ""


def _fits_with(receipt: Receipt) -> Iterator[tuple[str, str | Text]]:
    if not receipt.fits_with:
        yield "fits with", "nothing that was tried"
    for number, text in enumerate(receipt.fits_with):
        yield "" if number else "fits with", text


def _least(least: int | None, beside: str) -> str:
    return (
        f"more alone is not enough, with {beside}" if least is None else f"at least {format_bytes(least)} with {beside}"
    )


def _solved(solved: Solved) -> Rows:
    return [
        ("status", f"{solved.status}, {solved.source}, in {format_seconds(solved.solve_s)}"),
        ("step", format_seconds(solved.step_s)),
        ("plan", quality(solved)),
        ("solver", f"{format_seconds(solved.lp_step_s)} before rounding, gap {solved.solver_gap:.2%}"),
        ("GPU memory", f"peak {format_bytes(solved.gpu_peak_bytes)}"),
        ("host memory", f"peak {format_bytes(solved.cpu_peak_bytes)}"),
        ("blocks", " · ".join(option_runs(solved.options))),
        ("updates", f"{solved.cpu_update_share:.0%} of the trained parameters on the CPU"),
        *(("" if number else "stages", str(stage)) for number, stage in enumerate(solved.stages)),
    ]


def kept(rows: list[dict[str, Any]]) -> RenderableType:
    """A table of the plans in the cache."""
    if not rows:
        return Text("No plans are kept yet.")
    names = ("KEY", "MODEL", "MACHINE", "GPU", "HOST", "SLICES", "STEP", "HITS", "USED")
    return table(names, [_kept_row(row) for row in rows])


def _kept_row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["key"][:12],
        row["model"],
        row["machine"],
        format_bytes_down(row["gpu_budget_bytes"]),
        format_bytes_down(row["cpu_budget_bytes"]),
        str(row["slices"]),
        format_seconds(row["step_s"]),
        str(row["hits"]),
        moment(row["used_at"]),
    )


def kept_plan(entry: dict[str, Any]) -> RenderableType:
    """One plan of the cache, as text."""
    origin = {"measured": True, "cached": True, "solve_s": entry["solve_s"]}
    rows: Rows = [
        ("key", entry["key"]),
        ("model", entry["model"]),
        ("machine", entry["machine"]),
        ("hits", str(entry["hits"])),
        ("made", f"{moment(entry['created_at'])}, in {format_seconds(entry['solve_s'])}"),
        ("used", moment(entry["used_at"])),
    ]
    return pairs(rows + [row for row in plan_rows({"plan": entry["plan"], **origin}) if row[0] != "plan"])
