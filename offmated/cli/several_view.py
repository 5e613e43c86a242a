"""Shows what a job costs on several machines, or with several amounts of GPU memory, as one table."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from offmated.cli.output import table
from offmated.cli.quality import quality
from offmated.cli.receipt_view import question
from planner.codec import from_json
from planner.reports.receipt import Receipt
from planner.units import format_bytes, format_bytes_down, format_seconds

_BAR = 30  # columns


def several(documents: list[dict[str, Any]], *, frontier: bool) -> RenderableType:
    """The table of receipts in JSON form: one line a machine or, for `frontier`, one line an amount of GPU memory."""
    receipts = [from_json(Receipt, document) for document in documents]
    return Group(
        question(receipts[0], on_machine=frontier), "", _frontier(receipts) if frontier else _machines(receipts)
    )


def _machines(receipts: list[Receipt]) -> RenderableType:
    names = ("MACHINE", "GPU", "HOST", "STEP", "TOKENS/S", "PLAN", "GPU PEAK", "HOST PEAK", "LIMIT")
    return table(names, [(receipt.hardware.name, *_memory(receipt), *_figures(receipt)) for receipt in receipts])


def _memory(receipt: Receipt) -> tuple[str, str]:
    return format_bytes_down(receipt.gpu_budget_bytes), format_bytes_down(receipt.cpu_budget_bytes)


def _figures(receipt: Receipt) -> tuple[str | Text, ...]:
    if receipt.status == "infeasible":
        return (Text("does not fit", style="red"), "", "", "", "", _needed(receipt))
    return (
        format_seconds(receipt.step_s),
        f"{receipt.tokens_per_s:.0f}",
        quality(receipt).partition(":")[0].partition(",")[0],
        format_bytes_down(receipt.gpu_peak_bytes),  # rounded as the budgets, which are no less
        format_bytes_down(receipt.cpu_peak_bytes),
        f"{receipt.loads[0].resource}, {receipt.loads[0].share:.0%}",
    )


def _needed(receipt: Receipt) -> str:
    """How much memory a job needs that does not fit."""
    gpu, host = receipt.least_gpu_budget_bytes, receipt.least_cpu_budget_bytes
    needs = [f"{format_bytes(gpu)} of GPU memory"] if gpu is not None else []
    needs += [f"{format_bytes(host)} of host memory"] if host is not None else []
    return f"needs {' or '.join(needs)}" if needs else "no more memory of one kind is enough"


def _frontier(receipts: list[Receipt]) -> RenderableType:
    if receipts[0].status == "infeasible":
        return _machines(receipts)
    fastest = min(receipt.step_s for receipt in receipts)
    rows = [
        (
            format_bytes(receipt.gpu_budget_bytes),  # rounded up, so that what is typed from here fits
            format_seconds(receipt.step_s),
            f"{receipt.tokens_per_s:.0f}",
            "█" * max(1, round(_BAR * fastest / receipt.step_s)),
        )
        for receipt in receipts
    ]
    return table(("GPU MEMORY", "STEP", "TOKENS/S", "SPEED"), rows)
