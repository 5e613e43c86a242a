"""Reads lines of metrics.jsonl (the trainer's events) and skips lines that are no events: no run needs an event in
order to continue.

A power cut may leave zeros in the file, a full disk half a line, an editor or another program anything at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]

PAIR_FIGURES = (
    "rewards_chosen",
    "rewards_rejected",
    "rewards_margins",
    "rewards_accuracies",
    "logps_chosen",
    "logps_rejected",
    "kl",
)
"""Fields of a `step` in a job that learns from preferences; an `eval` has them with the prefix eval_. Which of them
there are depends on the loss and, for KTO, on the step: see `worker.training.pair_figures`."""
EVAL_PAIR_FIGURES = tuple(f"eval_{name}" for name in PAIR_FIGURES)
_SAID = {"margin": "rewards_margins", "accuracy": "rewards_accuracies", "kl": "kl"}
"""Word -> that of `PAIR_FIGURES` which it stands for, where a loss is told in a line of text."""

_NEEDED: dict[str, dict[str, type]] = {
    "start": {"total_steps": int},
    "reference": {"rows": int},
    "sample": {"prompt": str, "text": str},
    "rehearsed": {"tried": str},
}
"""Per kind of event: the fields that it must have in addition to its step, with their types."""
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
    "seconds",
    *PAIR_FIGURES,
    *EVAL_PAIR_FIGURES,
)
"""Fields that are a number or null in every event that has them."""


def event_of(line: bytes) -> Event | None:
    """The event in a line of metrics.jsonl; None if the line is not a valid event. An event has the fields "event" (its
    kind) and "step" (counted from 0). Numbers that are not finite become null, which is also how the trainer writes
    them."""
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
    """The events in `lines` of metrics.jsonl; lines that are no valid event are left out."""
    return [event for line in lines if (event := event_of(line)) is not None]


def pair_words(figures: Mapping[str, Any], prefix: str = "") -> tuple[str, ...]:
    """What is told beside a loss, such as ("margin 0.512", "accuracy 0.875"): those of the figures whose names begin
    with `prefix`, "" or "eval_". Empty for a job without preferences."""
    values = {word: figures.get(f"{prefix}{name}") for word, name in _SAID.items()}
    return tuple(f"{word} {value:.3f}" for word, value in values.items() if value is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive lines of metrics.jsonl, read in one go. `position`: byte offset after the last line. `lines`: their
    number. `broken`: the numbers (from 1) of the lines that are no events."""

    events: list[Event]
    position: int
    lines: int = 0
    broken: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, lines: Sequence[bytes], position: int) -> Piece:
        """The events in `lines`, the last of which ends before byte `position` of the file."""
        events = [event_of(line) for line in lines]
        broken = [number for number, event in enumerate(events, start=1) if event is None]
        return cls(events=[e for e in events if e is not None], position=position, lines=len(lines), broken=broken)


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _is(kind: type | tuple[type, ...], value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
