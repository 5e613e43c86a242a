"""Asks about a job on several machines, or on one machine with several amounts of GPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.cache.store import Cache
from planner.commands.ask import ask
from planner.commands.kept_traces import Traces
from planner.commands.tell import SILENT, Tell
from planner.job.schema import Job
from planner.machine.hardware import Hardware
from planner.reports.receipt import Receipt
from planner.units import format_bytes_down

_POINTS = 8  # of a frontier, the whole memory among them
_ROUND_BYTES = 2**27  # budgets between the least and the whole are multiples of this


def compare(
    job: Job, machines: Sequence[Hardware], *, traces: Traces, cache: Cache | None = None, tell: Tell = SILENT
) -> list[Receipt]:
    """The receipts of the job on each machine, without what would help. Raises UserError for a model that cannot be
    used."""
    receipts = []
    for hardware in machines:
        tell.doing(hardware.name)
        receipts.append(ask(job, hardware, traces=traces, cache=cache, helps=False))
    return receipts


def frontier(
    job: Job, hardware: Hardware, *, traces: Traces, cache: Cache | None = None, tell: Tell = SILENT
) -> list[Receipt]:
    """The receipts of the job with several budgets of GPU memory, the smallest first: from the least with which it fits
    to the most that its plan uses, and all that the job may use; without what would help. If it does not fit, there is
    one receipt, which says so. Raises UserError for a model that cannot be used."""
    tell.doing("all of the GPU's memory")
    whole = ask(job, hardware, traces=traces, cache=cache, helps=False)
    if whole.status == "infeasible" or whole.least_gpu_budget_bytes is None:
        return [whole]
    receipts: list[Receipt] = []
    for budget in _budgets(whole.least_gpu_budget_bytes, min(whole.gpu_budget_bytes, whole.gpu_peak_bytes)):
        tell.doing(f"{format_bytes_down(budget)} of GPU memory")
        changed = job.model_copy(update={"gpu_budget": budget})
        receipts.append(ask(changed, hardware, traces=traces, cache=cache, helps=False))
    return _never_slower([*(receipt for receipt in receipts if receipt.status != "infeasible"), whole])


def _never_slower(receipts: Sequence[Receipt]) -> list[Receipt]:
    """The receipts, with the plan of less memory where that is faster: it also fits more memory."""
    found: list[Receipt] = []
    for receipt in receipts:
        if found and found[-1].step_s < receipt.step_s:
            receipt = replace(found[-1], gpu_budget_bytes=receipt.gpu_budget_bytes)
        found.append(receipt)
    return found


def _budgets(least: int, most: int) -> list[int]:
    """Amounts of memory from `least` up to `most`, which is left out, each so many times the one before, in round
    numbers of bytes but for the first."""
    amounts = [least * (most / least) ** (number / (_POINTS - 1)) for number in range(1, _POINTS - 1)]
    rounded = {-(-int(amount) // _ROUND_BYTES) * _ROUND_BYTES for amount in amounts}
    return [least, *sorted(size for size in rounded if least < size < most)]
