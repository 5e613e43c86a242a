"""Checks the keys of a job that ask for evaluation."""

from __future__ import annotations

from typing import Any

from planner.keys.source import SWITCHED_OFF, Mistake, Source, shown

EVALUATED = ("eval_dataset", "val_size", "sample_prompts")
"""Keys that say what to evaluate on, or which prompts to answer."""
_TIMES = ("eval_strategy", "eval_steps", "eval_on_start")
_CHOICES = ("load_best_model_at_end", "early_stopping_patience")


def check_evaluation(values: dict[str, Any], names: dict[str, str], source: Source) -> list[Mistake]:
    """Return the mistakes of evaluation keys that contradict one another. `values`: canonical key -> value; `names`:
    canonical key -> the name that the file uses. Where `eval_strategy` is no, the evaluation keys are removed from
    `values`."""
    choices = [key for key in _CHOICES if values.get(key) not in SWITCHED_OFF]
    if choices and not any(values.get(key) not in SWITCHED_OFF for key in ("val_size", "eval_dataset")):
        text = "it compares the losses of evaluations; give val_size or eval_dataset, too"
        return [source.mistake(names[choices[0]], "bad-value", text)]
    if choices and values.get("eval_strategy", "steps") in SWITCHED_OFF[1:]:
        text = "it compares the losses of evaluations, and eval_strategy is no"
        return [source.mistake(names[choices[0]], "bad-value", text)]
    if "eval_strategy" in values and values["eval_strategy"] in SWITCHED_OFF[1:]:
        for key in (*EVALUATED, *_TIMES):
            values.pop(key, None)
    set_keys = {key for key in (*EVALUATED, *_TIMES) if key in values and values[key] not in SWITCHED_OFF}
    mistakes = [
        source.mistake(names[key], "bad-value", f"it is {shown(value)}; 1 or more must be a whole number")
        for key in ("val_size", "eval_steps")
        if isinstance(value := values.get(key), float) and value >= 1 and not value.is_integer()
    ]
    if {"eval_dataset", "val_size"} <= set_keys:
        text = "eval_dataset is given too; evaluate on a dataset or on a part of the training data"
        mistakes.append(source.mistake(names["val_size"], "bad-value", text))
    if set_keys and set_keys.isdisjoint(EVALUATED):
        first, *others = [key for key in _TIMES if key in set_keys]
        which = ", ".join(names[key] for key in (first, *others)) if others else "this key"
        text = f"there is nothing to evaluate on; give val_size, eval_dataset or sample_prompts, or leave {which} out"
        mistakes.append(source.mistake(names[first], "bad-value", text))
    return mistakes
