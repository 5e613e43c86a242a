"""Draws the seconds of a step over the GPU memory that a job may use, as a page with one picture."""

from __future__ import annotations

import html
from collections.abc import Sequence

from planner.reports.receipt import Receipt
from planner.units import format_seconds

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _ROOM = 760, 420, 70, 50, 30
_GIB = 2**30


def frontier_page(receipts: Sequence[Receipt], *, title: str) -> str:
    """An HTML page that needs no other file. `receipts`: those of one job with several budgets of GPU memory, the
    smallest first."""
    points = [(receipt.gpu_budget_bytes / _GIB, receipt.step_s) for receipt in receipts]
    most_gib, most_s = max(x for x, _ in points), max(y for _, y in points)

    def place(gib: float, seconds: float) -> tuple[float, float]:
        x = _LEFT + gib / most_gib * (_WIDTH - _LEFT - _ROOM)
        y = _HEIGHT - _BOTTOM - seconds / most_s * (_HEIGHT - _BOTTOM - _ROOM)
        return x, y

    placed = [place(*point) for point in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{gib:.1f} GiB: {format_seconds(seconds)}</title></circle>'
        f'<text x="{x:.1f}" y="{y - 10:.1f}" text-anchor="middle">{format_seconds(seconds)}</text>'
        for (x, y), (gib, seconds) in zip(placed, points, strict=True)
    )
    marks = "".join(
        f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{gib:.1f}</text>'
        for (x, _), (gib, _) in zip(placed, points, strict=True)
    )
    (left, base), (right, top) = place(0, 0), place(most_gib, most_s)
    name = html.escape(title)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>
body {{ font-family: sans-serif; margin: 2em; }} svg text {{ font-size: 12px; }}
svg polyline, svg path {{ fill: none; stroke: #2a6fdb; stroke-width: 2; }} svg path {{ stroke: #888; stroke-width: 1; }}
svg circle {{ fill: #2a6fdb; }}
</style></head><body><h1>{name}</h1><p>Seconds of a step over the GPU memory that the job may use.</p>
<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">
<path d="M{left:.1f} {top:.1f} V{base:.1f} H{right:.1f}"/><polyline points="{line}"/>{dots}{marks}
<text x="{(left + right) / 2:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">GiB of GPU memory</text>
</svg></body></html>
"""
