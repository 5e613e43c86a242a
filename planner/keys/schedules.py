"""The learning-rate schedules, which are those of transformers, and the checks of their keys. Does not import torch."""

from __future__ import annotations

from typing import Any, Literal, get_args

from planner.keys.source import SWITCHED_OFF, Mistake, Source, shown

Schedule = Literal[
    "linear",
    "cosine",
    "constant",
    "constant_with_warmup",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
_FLOOR = ("num_cycles", "min_lr", "min_lr_rate")
_TAKES: dict[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": _FLOOR,
    "cosine_warmup_with_min_lr": (*_FLOOR, "warmup_lr_rate"),
    "warmup_stable_decay": (
        "num_decay_steps",
        "num_stable_steps",
        "warmup_type",
        "decay_type",
        "min_lr_ratio",
        "num_cycles",
    ),
}
"""Schedule -> its keys in `lr_scheduler_kwargs`."""
_WANTS = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}
"""Schedule -> the keys of which at least one must be given."""
_WHOLE = ("timescale", "num_decay_steps", "num_stable_steps")
_SHAPES = ("linear", "cosine", "1-sqrt")


def check_schedule(values: dict[str, Any], names: dict[str, str], source: Source) -> list[Mistake]:
    """Return the mistakes in the keys of the learning-rate schedule. `values`: canonical key -> value; `names`:
    canonical key -> the name that the file uses. axolotl's `cosine_min_lr_ratio` is replaced in `values` by the
    schedule that it means."""
    ratio = source.values.get("cosine_min_lr_ratio")
    if ratio not in SWITCHED_OFF:
        if values.get("lr_scheduler_type", "cosine") != "cosine":
            return [source.mistake("cosine_min_lr_ratio", "bad-value", "it is for lr_scheduler: cosine")]
        values |= {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": ratio}}
    schedule, options = values.get("lr_scheduler_type", "linear"), values.get("lr_scheduler_kwargs")
    if options in SWITCHED_OFF:
        values.pop("lr_scheduler_kwargs", None)
        options = {}
    key = names.get("lr_scheduler_kwargs", "lr_scheduler_kwargs") if ratio in SWITCHED_OFF else "cosine_min_lr_ratio"
    if not isinstance(options, dict) or schedule not in SCHEDULES:
        return []  # the check of types reports it
    takes, wants = _TAKES.get(schedule, ()), _WANTS.get(schedule, ())
    if other := [name for name in options if name not in takes]:
        text = f"{schedule} has no {other[0]}; " + (f"it has {', '.join(takes)}" if takes else "leave this key out")
        return [source.mistake(key, "bad-value", text)]
    if wants and not set(wants) & options.keys():
        text = f"{schedule} needs lr_scheduler_kwargs with {' or '.join(wants)}"
        return [source.mistake(names.get("lr_scheduler_type", "lr_scheduler_type"), "missing-key", text)]
    if {"min_lr", "min_lr_rate"} <= options.keys():
        return [source.mistake(key, "bad-value", "min_lr and min_lr_rate are two ways of saying one thing; keep one")]
    highest = values.get("learning_rate", 5e-5)
    above = [name for name in ("lr_end", "min_lr") if _fits(name, options.get(name)) and options[name] >= highest]
    if above and isinstance(highest, (int, float)):
        return [source.mistake(key, "bad-value", f"{above[0]} is {options[above[0]]}; it must be below learning_rate")]
    wrong = [name for name, value in options.items() if not _fits(name, value)]
    return [
        source.mistake(key, "bad-value", f"{name} is {shown(options[name])}; it must be {_phrase(name)}")
        for name in wrong[:1]
    ]


def _phrase(name: str) -> str:
    """Return what the option `name` of a schedule must be, as words that follow "it must be"."""
    if name.endswith("_type"):
        return f"one of {', '.join(_SHAPES)}"
    return "a whole number, 1 or more" if name in _WHOLE else "a number, 0 or more"


def _fits(name: str, value: object) -> bool:
    if name.endswith("_type"):
        return value in _SHAPES
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        return False
    return name not in _WHOLE or (isinstance(value, int) and value >= 1)
