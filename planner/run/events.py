"""Reads lines of metrics.jsonl as events, and skips lines that are none: no run needs an event in order to go on.

A power cut may leave zeros in a file, a full disk half a line, an editor or another program anything at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]

_NEEDED: dict[str, dict[str, type]] = {
    "start": {"total_steps": int},
    "sample": {"prompt": str, "text": str},
    "rehearsed": {"tried": str},
}
"""Fields that events of a kind must have beside their step, with their types."""
_NUMBERS = (
    "time",
    "resumed_from",
    "total_steps",
    "loss",
    "learning_rate",
    "grad_norm",
    "step_s",
    "waited_s",
    "predicted_step_s",
    "tokens",
    "gpu_peak_bytes",
    "predicted_gpu_peak_bytes",
    "measured_steps",
    "eval_loss",
    "eval_s",
)
"""Fields that are a number or null in every event that has them."""


def event_of(line: bytes) -> Event | None:
    """The event in a line; None where the line is no event. An event has "event", the name of its kind, and "step",
    from 0 on. Numbers that are not finite become null, which is also how they are written."""
    try:
        event = json.loads(line.decode("utf-8"), parse_constant=lambda _: None, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(kind := event.get("event"), str):
        return None
    is_whole = (
        _is(int, event.get("step"))
        and event["step"] >= 0
        and all(_is(needed, event.get(name)) for name, needed in _NEEDED.get(kind, {}).items())
        and all(_is((int, float), event[name]) for name in _NUMBERS if event.get(name) is not None)
    )
    return event if is_whole else None


def events_of(lines: Iterable[bytes]) -> list[Event]:
    """The events in `lines`; other lines are left out."""
    return [event for line in lines if (event := event_of(line)) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Successive lines of metrics.jsonl. `position`: the byte behind the last one. `lines`: how many there are.
    `broken`: the numbers of the lines that are no events, from 1 on."""

    events: list[Event]
    position: int
    lines: int = 0
    broken: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, lines: Sequence[bytes], position: int) -> Piece:
        """The piece of these lines, which end before byte `position`."""
        events = [event_of(line) for line in lines]
        broken = [number for number, event in enumerate(events, start=1) if event is None]
        return cls(events=[e for e in events if e is not None], position=position, lines=len(lines), broken=broken)


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _is(kind: type | tuple[type, ...], value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
