"""Shows the graphics cards that `offmate plan --hardware` knows by name."""

from __future__ import annotations

from rich.table import Table

from offmated.cli.output import table
from planner.codec import Json, to_json
from planner.machine.cards import CARDS, HOSTS, Card, Host

_GIB = 2**30


def as_table() -> Table:
    """All cards, one a line: memory, bandwidth and rates of the card, its link, and memory and bandwidth of the host
    around it."""
    lines = table(("name", "GiB", "GB/s", "FP32", "BF16", "link", "host"), [_row(*each) for each in CARDS.items()])
    lines.caption, lines.caption_justify = (
        "FP32 and BF16 in TFLOP/s; none: bf16 is emulated, at the rate of FP32",
        "left",
    )
    return lines


def as_json() -> Json:
    """All cards as JSON objects, each with its short name as `hardware`, and its `host`."""
    return [{"hardware": name, **_fields(card), "host": _fields(HOSTS[card.host])} for name, card in CARDS.items()]


def _fields(value: Card | Host) -> dict[str, Json]:
    fields = to_json(value)
    assert isinstance(fields, dict)
    return fields


def _row(name: str, card: Card) -> tuple[str, ...]:
    host = HOSTS[card.host]
    return (
        name,
        str(card.memory_bytes // _GIB),
        f"{card.memory_bytes_per_s / 1e9:.0f}",
        _teraflops(card.fp32_flops_per_s),
        "none" if card.bf16_flops_per_s is None else _teraflops(card.bf16_flops_per_s),
        card.link,
        f"{host.memory_bytes // _GIB} GiB, {host.bytes_per_s / 1e9:.1f} GB/s",
    )


def _teraflops(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.{1 if flops_per_s < 100e12 else 0}f}"
