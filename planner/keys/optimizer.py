"""Checks the optimizer of a job against its learning rates and its disks."""

from __future__ import annotations

from collections.abc import Mapping

from planner.keys.source import SWITCHED_OFF, Mistake, Source
from planner.optimizers.adamw import AdamW
from planner.optimizers.table import OPTIMIZERS

RATES = ("loraplus_lr_ratio", "embedding_lr", "embedding_lr_scale")
"""Keys that give some weights another learning rate."""


def check_optimizer(values: Mapping[str, object], names: Mapping[str, str], source: Source) -> list[Mistake]:
    """Return the mistakes of a job whose optimizer cannot have its states on disk although it asks for that, or whose
    learning-rate keys exclude one another. `values`: canonical key -> value; `names`: canonical key -> the name that
    the file uses."""
    apart = [key for key in RATES if values.get(key) not in SWITCHED_OFF]
    if apart and values.get("decay_all") is True:
        text = f"{names[apart[0]]} says which weights decay; leave one of the two out"
        return [source.mistake(names["decay_all"], "bad-value", text)]
    optimizer = OPTIMIZERS.get(str(values.get("optim")), AdamW)
    if apart and optimizer.one_rate:
        text = f"optim is {optimizer.kind}, under which all weights have learning_rate; leave one of the two out"
        return [source.mistake(names[apart[0]], "not-there", text)]
    if len(apart) > 1:
        both = "both set another learning rate for some weights"
        text = f"{names[apart[1]]} is given too, and {both}; keep one"
        return [source.mistake(names[apart[0]], "bad-value", text)]
    if optimizer.on_disk or not values.get("disk_paths"):
        return []
    text = f"disk_paths are given too, and {optimizer.states} stay in memory: use adamw_torch, or leave disk_paths out"
    return [source.mistake(names["optim"], "bad-value", text)]
