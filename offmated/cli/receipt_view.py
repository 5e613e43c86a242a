"""Shows receipts and kept plans in words: does it fit, how fast, where each GiB goes, what would help."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from offmated.cli.job_view import moment
from offmated.cli.output import pairs, table
from offmated.cli.plan_view import option_runs, plan_rows
from planner.codec import from_json
from planner.reports.receipt import Receipt, Share, Solved
from planner.units import counted, format_bytes, format_bytes_down, format_part, format_seconds

Rows = list[tuple[str, str | Text]]


def answer(found: dict[str, Any]) -> RenderableType | None:
    """The output of `offmate plan --hardware`; None where the planner has printed it already."""
    if "asked" in found:
        return receipt(from_json(Receipt, found))
    if found["status"] == "infeasible":
        return None
    return pairs(_solved(from_json(Solved, found)))


def receipt(found: Receipt) -> RenderableType:
    """Everything about one job on one machine."""
    rows = list(_fitting(found) if found.status != "infeasible" else _too_large(found))
    verdict = Text(_verdict(found), style="green" if found.status != "infeasible" else "red")
    return Group(_question(found), verdict, pairs(rows))


def _question(found: Receipt) -> str:
    asked = found.asked
    model = asked.model.rstrip("/").removesuffix("/config.json").rpartition("/")[2]
    trained = "" if found.trained_parameters == found.parameters else f", {_billions(found.trained_parameters)} trained"
    return (
        f"{model} ({_billions(found.parameters)} parameters{trained}) in {asked.dtype} on {found.hardware.name}, "
        f"{counted(asked.slices, 'slice')} of {asked.rows} × {counted(asked.length, 'token')} a step"
    )


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 10**8 else f"{count / 1e6:.1f} million"


def _verdict(found: Receipt) -> str:
    if found.status == "infeasible":
        return "It does not fit."
    return f"It fits: {format_seconds(found.step_s)} a step, {found.tokens_per_s:.0f} tokens/s (estimated)."


def _fitting(found: Receipt) -> Iterator[tuple[str, str | Text]]:
    yield from _notes(found)
    yield "", ""
    if found.cut_short:
        yield "cut short", "the time limit ended the search for this plan, and it is not kept"
        yield "", "ask again for a better one, best on an idle machine"
    yield "proven", proof(found)
    yield "limit", f"{found.loads[0].resource}, busy {found.loads[0].share:.0%} of the step"
    yield "", " · ".join(f"{load.resource} {load.share:.0%}" for load in found.loads[1:])
    yield "updates", f"{found.cpu_update_share:.0%} of the parameters on the CPU"
    yield "blocks", " · ".join(option_runs(found.options))
    if any("-" in option for option in found.options):
        yield "", "(numbered options differ in which of a block's values stay, move or are recomputed)"
    full_rows = f", with full rows of {counted(found.asked.length, 'token')}"
    yield from _memory("GPU", format_part(found.gpu_peak_bytes, found.gpu_budget_bytes) + full_rows, found.gpu)
    yield from _memory("host", format_part(found.cpu_peak_bytes, found.cpu_budget_bytes), found.host)
    yield from _disk(found.disk)
    for line in () if found.disk_use is None else found.disk_use.lines():
        yield "", line
    yield "", ""
    if not found.changes:
        more = "; others, which may help, were not planned" if found.unplanned else ""
        yield "would help", f"none of the other machines and batches that were planned{more}"
    for number, change in enumerate(found.changes):
        yield "" if number else "would help", f"{change.text}: {change.factor:.3g}×, {change.tokens_per_s:.0f} tokens/s"
    for number, prospect in enumerate(found.unplanned):
        yield "" if number else "not planned", f"{prospect.text}: {math.ceil(100 * prospect.most) / 100:.2f}× at most"


def proof(found: Receipt | Solved) -> str:
    """How far the plan's step is at most above two bounds, in words and as far as proven: the time that any schedule
    takes, and the best that the planner's program allows."""
    proven = []
    if found.bound_s > 0:
        over = _rounded_up(found.step_s / found.bound_s - 1)
        proven.append(f"within {over:.1%} of what any schedule takes ({format_seconds(found.bound_s)})")
    if found.lp_step_s > 0 and found.solver_gap < 1:
        over = _rounded_up(found.step_s / (found.lp_step_s * (1 - found.solver_gap)) - 1)
        proven.append(f"within {over:.1%} of the best that the planner's program allows")
    return ", ".join(proven) or "nothing"


def _rounded_up(over: float) -> float:
    """`over` rounded up to a tenth of a percent, so that no more is claimed than was proven."""
    return max(0, math.ceil(1000 * over - 1e-6)) / 1000


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


def _notes(found: Receipt) -> Rows:
    return [("note", note) for note in found.notes]


def _too_large(found: Receipt) -> Iterator[tuple[str, str | Text]]:
    yield from _notes(found)
    yield "", ""
    gpu, host = format_bytes_down(found.gpu_budget_bytes), format_bytes_down(found.cpu_budget_bytes)
    yield "GPU", f"{gpu} for the job; {_least(found.least_gpu_budget_bytes, 'this host')}"
    yield "host", f"{host} for the job; {_least(found.least_cpu_budget_bytes, 'this GPU')}"
    yield from _disk(found.disk)
    yield "", ""
    if not found.fits_with:
        more = "; there was no time to try everything, and the rest may fit" if found.untried else ""
        yield "fits with", f"nothing that was tried{more}"
    for number, text in enumerate(found.fits_with):
        yield "" if number else "fits with", text
    for number, text in enumerate(found.untried):
        yield "" if number else "no time for", text


def _least(least: int | None, beside: str) -> str:
    return f"no size is enough with {beside}" if least is None else f"at least {format_bytes(least)} with {beside}"


def _solved(found: Solved) -> Rows:
    return [
        ("status", f"{found.status}, {found.source}, in {format_seconds(found.solve_s)}"),
        ("step", format_seconds(found.step_s)),
        ("proven", proof(found)),
        ("solver", f"{format_seconds(found.lp_step_s)} before rounding, gap {found.solver_gap:.2%}"),
        ("GPU memory", f"peak {format_bytes(found.gpu_peak_bytes)}"),
        ("host memory", f"peak {format_bytes(found.cpu_peak_bytes)}"),
        ("blocks", " · ".join(option_runs(found.options))),
        ("updates", f"{found.cpu_update_share:.0%} of the parameters on the CPU"),
        *(("" if number else "stages", str(stage)) for number, stage in enumerate(found.stages)),
    ]


def kept(rows: list[dict[str, Any]]) -> RenderableType:
    """The list of kept plans."""
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


def kept_plan(found: dict[str, Any]) -> RenderableType:
    """One kept plan."""
    origin = {"measured": True, "cached": True, "solve_s": found["solve_s"]}
    rows: Rows = [
        ("key", found["key"]),
        ("model", found["model"]),
        ("machine", found["machine"]),
        ("hits", str(found["hits"])),
        ("made", f"{moment(found['created_at'])}, in {format_seconds(found['solve_s'])}"),
        ("used", moment(found["used_at"])),
    ]
    return pairs(rows + [row for row in plan_rows({"plan": found["plan"], **origin}) if row[0] != "plan"])
