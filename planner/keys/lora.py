"""Checks the keys of a job that say what LoRA trains, and fills in their defaults."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from planner.keys.adapter import CONFIG, adapter_keys, adapter_revision, takes_from_base
from planner.keys.adapter_keys import AdapterKeys
from planner.keys.patterns import SIMPLER, too_slow
from planner.keys.source import SWITCHED_OFF, Mistake, Source, shown

ALL_LINEAR = "all-linear"
"""peft's word for all linear layers except the head."""
PEFTS_OWN = "peft-default"
"""The word for the target modules that peft itself chooses for a model of this type."""

DEFAULTS: dict[str, object] = {
    "lora_r": 16,
    "lora_alpha": 32.0,
    "lora_dropout": 0.05,
    "lora_target_modules": ALL_LINEAR,
}
"""The defaults under `method: lora`, which are TRL's."""
KINDS = ("use_rslora", "use_dora", "load_in_4bit", "load_in_8bit", "quantize_moe_experts")
"""Keys that switch on other kinds of LoRA or a quantized base model."""
ADAPTER, MODULES, PARAMETERS = "adapter_name_or_path", "lora_modules_to_save", "lora_target_parameters"
WHERE = ("exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern")
"""Keys that say which layers get an adapter, and its rank and alpha there."""
BEGIN, PLUS, PLUS_EMBEDDING = "init_lora_weights", "loraplus_lr_ratio", "loraplus_lr_embedding"
_SETS = ("lora_target_modules", PARAMETERS, MODULES, *WHERE[:3])
"""Keys whose lists mean the same in any order."""
_PATTERN = re.compile(r"[\\^$*+?()\[\]|]")


def check_lora(
    values: dict[str, Any], names: dict[str, str], source: Source, *, decided: bool = False
) -> list[Mistake]:
    """Return the mistakes in the keys of LoRA. `values`: canonical key -> value; `names`: canonical key -> the name
    that the file uses. With `method: lora` defaults are filled into `values`; otherwise LoRA keys that are switched off
    are removed. `decided`: the values come from `resolved.yaml` and are complete, so the folder of an adapter that the
    job continues is not read again."""
    sets_embedding_rate = values.get(PLUS_EMBEDDING) not in (None, AdapterKeys.model_fields[PLUS_EMBEDDING].default)
    if not decided and sets_embedding_rate and values.get(PLUS) in SWITCHED_OFF:
        text = f"it has no effect without {PLUS}: give that too, or leave this key out"
        return [source.mistake(names[PLUS_EMBEDDING], "bad-value", text)]
    if values.get("method") != "lora":
        lora_keys = [key for key in DEFAULTS if key in values and values[key] not in SWITCHED_OFF]
        lora_keys += [key for key in KINDS if values.get(key) is True]
        lora_keys += [key for key in (ADAPTER, MODULES, PARAMETERS, PLUS) if values.get(key) not in SWITCHED_OFF]
        lora_keys += [key for key in WHERE if values.get(key) not in (None, "", [], {})]
        lora_keys += [BEGIN] if values.get(BEGIN, True) is not True else []
        for key in (*DEFAULTS, *KINDS, ADAPTER, MODULES, PARAMETERS, *WHERE, BEGIN, PLUS):
            values.pop(key, None)
        if values.get("method") not in (None, "full", "lsp"):  # reported elsewhere
            return []
        text = "it is for method: lora; give that too"
        if values.get("method") == "lsp":
            text = "it is for method: lora; leave it out, or give that in place of lsp"
            if lora_keys[:1] in (["load_in_4bit"], ["load_in_8bit"]):
                text = "the base changes under method: lsp, so it cannot be in 4 or 8 bits; leave this key out"
        return [source.mistake(names[key], "bad-value", text) for key in lora_keys[:1]]
    mistakes = [] if decided else _as_the_adapter(values, names, source)
    targets = values.get("lora_target_modules")
    values["lora_target_modules"] = _targets(targets)
    if values.get(PARAMETERS) and source.values.get(names.get("lora_dropout", "lora_dropout")) is None:
        values["lora_dropout"] = 0.0  # adapters on parameters have no dropout
    for key, default in DEFAULTS.items():
        if values.get(key) is None:
            values[key] = default
    quantized = [key for key in ("load_in_4bit", "load_in_8bit") if values.get(key) is True]
    if len(quantized) > 1:
        text = "load_in_4bit is given too; a base is in 4 or in 8 bits: leave one of them out"
        mistakes.append(source.mistake(names["load_in_8bit"], "bad-value", text))
    elif quantized and values.get("use_dora") is True:
        text = "DoRA on a base in 4 or 8 bits is not supported yet; leave one of them out"
        mistakes.append(source.mistake(names["use_dora"], "not-there", text))
    if values.get("quantize_moe_experts") is True and values.get("load_in_4bit") is not True:
        text = "it needs a base in 4 bits: give load_in_4bit: true, or leave this key out"
        mistakes.append(source.mistake(names["quantize_moe_experts"], "bad-value", text))
    if isinstance(values["lora_target_modules"], str) and (wrong := _broken(values["lora_target_modules"])):
        mistakes.append(source.mistake(names["lora_target_modules"], "bad-value", wrong))
    mistakes += list(_apart(values, names, source))
    if alone := _alone_among(values["lora_target_modules"]):
        text = f"{alone} stands alone; {ALL_LINEAR} may have other names beside it"
        mistakes.append(source.mistake(names["lora_target_modules"], "bad-value", text))
    if values["lora_target_modules"] == () and not values.get(PARAMETERS):
        text = f"it is {shown(targets)}; it must be {ALL_LINEAR}, or a list of modules' names"
        mistakes.append(source.mistake(names["lora_target_modules"], "bad-value", text))
    return mistakes


def _apart(values: Mapping[str, Any], names: Mapping[str, str], source: Source) -> Iterator[Mistake]:
    """Yield the mistakes of keys that peft does not combine."""

    def bad(key: str, text: str, code: str = "bad-value") -> Mistake:
        return source.mistake(names.get(key, key), code, text)

    rank, begin = values["lora_r"], values.get(BEGIN)
    if values.get(PARAMETERS):
        what = f"adapters on parameters ({names.get(PARAMETERS, PARAMETERS)})"
        if values["lora_dropout"] not in SWITCHED_OFF:
            yield bad("lora_dropout", f"it is {shown(values['lora_dropout'])}; {what} have none: give lora_dropout: 0")
        if values.get("use_dora") is True:
            yield bad("use_dora", f"DoRA is for layers, and {what} are given too; leave one of them out")
        if begin == "orthogonal":
            yield bad(BEGIN, f"it is orthogonal, which is for layers, and {what} are given too; leave one of them out")
    targets = values["lora_target_modules"]
    named = isinstance(targets, tuple) and ALL_LINEAR not in targets
    if values.get("layers_to_transform") not in (None, "", []) and not named:
        text = "with it lora_target_modules must be a list of modules' names (a pattern can name layers itself)"
        yield bad("layers_to_transform", text)
    if values.get("layers_pattern") not in SWITCHED_OFF and values.get("layers_to_transform") in (None, "", []):
        yield bad("layers_pattern", "it says where layers_to_transform counts; give that too")
    if begin == "orthogonal" and isinstance(rank, int) and rank % 2:
        yield bad(BEGIN, f"it is orthogonal, which needs an even lora_r, and that is {rank}")
    if begin == "orthogonal" and any(values.get(key) is True for key in ("load_in_4bit", "load_in_8bit")):
        yield bad(BEGIN, "orthogonal on a base in 4 or 8 bits is not supported; leave one of them out", "not-there")
    if takes_from_base(begin):
        yield from _apart_from_parts(values, bad)
    exclude = values.get("exclude_modules")
    if isinstance(exclude, str) and (wrong := _broken(exclude)):
        yield bad("exclude_modules", wrong)
    for key in ("layers_pattern", MODULES):  # peft uses these as parts of patterns
        listed = values.get(key)
        parts = listed if isinstance(listed, (list, tuple)) else [listed]
        if wrong := next(filter(None, (_broken(part) for part in parts if isinstance(part, str))), None):
            yield bad(key, wrong)
    for key in WHERE[3:]:
        patterns = values.get(key)
        if isinstance(patterns, dict) and (wrong := next(filter(None, map(_broken, map(str, patterns))), None)):
            yield bad(key, wrong)


def _apart_from_parts(values: Mapping[str, Any], bad: Callable[..., Mistake]) -> Iterator[Mistake]:
    """Yield the mistakes of keys that do not work with adapters that start from a part of the model's own weights
    (pissa, olora)."""
    begin = values[BEGIN]
    if quantized := [key for key in ("load_in_4bit", "load_in_8bit") if values.get(key) is True]:
        bits = quantized[0].removeprefix("load_in_").removesuffix("bit")
        yield bad(BEGIN, f"{begin} on a base in {bits} bits is not supported; leave one of them out", "not-there")
    if values.get("use_dora") is True:
        yield bad(BEGIN, f"{begin} together with DoRA is not supported; leave one of them out", "not-there")
    if values.get(PARAMETERS):
        yield bad(BEGIN, f"it is {begin}, which is for layers, and {PARAMETERS} are given too; leave one of them out")
    if values.get(ADAPTER) not in SWITCHED_OFF:
        yield bad(BEGIN, f"it is {begin}, and the job begins with the adapter in {ADAPTER}; leave one of them out")


def _as_the_adapter(values: dict[str, Any], names: dict[str, str], source: Source) -> list[Mistake]:
    """Set the keys in `values` to those of the adapter that the job continues. Returns mistakes in the adapter, and
    those of keys in the file that contradict it."""
    path = values.get(ADAPTER)
    if not isinstance(path, str) or not (Path(path) / CONFIG).is_file():  # reported where its path is checked
        return []
    try:
        adapter = adapter_keys(path)
    except (ValueError, OSError) as error:
        return [source.mistake(names[ADAPTER], "not-there", str(error))]
    named_keys = [key for key in adapter if source.values.get(names.get(key, key)) is not None]
    file_values = {key: values[key] for key in named_keys if values.get(key) is not None}
    values |= adapter
    return [
        source.mistake(names[key], "bad-value", f"it is {shown(value)}; the adapter has {shown(adapter[key])}")
        for key, value in file_values.items()
        if not _same(key, value, adapter[key])
    ]


def _same(key: str, file_value: object, adapter_value: object) -> bool:
    """Return whether the file's value agrees with the adapter's. A word such as all-linear agrees with any layers that
    the adapter was made for."""
    if key not in _SETS:
        return file_value == adapter_value
    file_value = (file_value,) if isinstance(file_value, int) and key == "layers_to_transform" else _targets(file_value)
    adapter_value = () if adapter_value is None else adapter_value
    if file_value is False or _by_a_word(file_value):
        named = [name for name in file_value if name != ALL_LINEAR] if isinstance(file_value, tuple) else []
        return not named or (isinstance(adapter_value, tuple) and all(name in adapter_value for name in named))
    return (
        set(file_value) == set(adapter_value)
        if isinstance(file_value, tuple) and isinstance(adapter_value, tuple)
        else file_value == adapter_value
    )


def _alone_among(targets: object) -> str | None:
    """Return a word for targets (all, peft-default) that is an element of a list, where peft would take it for a
    module's name; None where there is none."""
    return next((word for word in ("all", PEFTS_OWN) if isinstance(targets, tuple) and word in targets), None)


def _by_a_word(targets: object) -> bool:
    """Return whether the targets leave the choice to the model, wholly or in part: all linear layers, or peft's own
    choice."""
    return targets in (ALL_LINEAR, PEFTS_OWN) or (isinstance(targets, tuple) and ALL_LINEAR in targets)


def of_the_adapter(values: dict[str, Any], source: Source, name: str) -> Iterator[str]:
    """Yield notes for the user on the adapter that the job continues: that it decides the layers where the file leaves
    them to the model, and that it was made for another revision of the base model. `name`: the name that the file uses
    for `lora_target_modules`."""
    if values.get(ADAPTER) in SWITCHED_OFF:
        return
    targets = values.get("lora_target_modules")
    if _by_a_word(file_targets := _targets(source.values.get(name))) and targets != file_targets:
        text = ", ".join(targets) if isinstance(targets, tuple) else str(targets)
        yield f"{name}: the adapter that the job continues is at {text}, so only these are trained"
    made_for, base = adapter_revision(str(values[ADAPTER])), values.get("model_revision")
    if made_for is not None and made_for != (base or "main"):
        origin = f"the adapter that the job continues was made for {shown(made_for)}"
        yield f"model_revision: it is {shown(base)}; {origin}"


def check_weights(values: dict[str, Any], names: dict[str, str], source: Source) -> list[Mistake]:
    """Return a mistake if the job is for LoRA or LSP and its model folder has no weights; else []. `values`: canonical
    key -> value; `names`: canonical key -> the name that the file uses."""
    method, model = values.get("method"), values.get("model")
    if method in ("lora", "lsp") and isinstance(model, str) and has_no_weights(model):
        text = f"{method} needs a model with weights, and {model} has none"
        return [source.mistake(names["method"], "bad-value", text)]
    return []


def _broken(pattern: str) -> str | None:
    """Return what is wrong with a regular expression for module names; None where nothing is."""
    try:
        re.compile(pattern)
    except re.error as error:
        return f"it is {shown(pattern)}, and that is no pattern: {error}"
    if too_slow([pattern]) is not None:
        return f"it is {shown(pattern)}, which takes too long to match: {SIMPLER}"
    return None


def has_no_weights(model: str) -> bool:
    """Return whether `model` is a local folder without weight files. A folder with an index of weight files counts as
    having weights: its files are missing because a download is incomplete."""
    folder = Path(model)
    return folder.is_dir() and not any(any(folder.glob(f"*{end}")) for end in (".safetensors", ".bin", ".index.json"))


def _targets(value: object) -> object:
    """Return a value of `lora_target_modules` as peft has it: a word, a pattern, or a tuple of module names. Accepted
    are also axolotl's `lora_target_linear: true`, LLaMA-Factory's "all" and "a,b", and a list whose only element is one
    of peft's words or a pattern."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        targets = _targets(value[0])
        return targets if isinstance(targets, str) else tuple(value)
    if value in (True, "all", ALL_LINEAR):
        return ALL_LINEAR
    if isinstance(value, str) and (value == PEFTS_OWN or _PATTERN.search(value)):
        return value  # as in peft: a pattern must match the whole name of a module
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return tuple(value) if isinstance(value, list) else value
