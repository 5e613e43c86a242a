"""Reads the folder of an existing peft adapter that a job continues to train. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.keys.source import SWITCHED_OFF, shown

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PEFTS: dict[str, object] = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""peft's defaults for keys that an adapter's config lacks."""
_KEYS = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "modules_to_save": "lora_modules_to_save",
    "target_parameters": "lora_target_parameters",
    "exclude_modules": "exclude_modules",
    "layers_to_transform": "layers_to_transform",
    "layers_pattern": "layers_pattern",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
}
"""Key of peft's LoraConfig -> key of a job."""
_SAYS_NOTHING = frozenset(
    {
        "task_type",
        "base_model_name_or_path",
        "auto_mapping",
        "revision",
        "inference_mode",
        "peft_version",
        "peft_type",
        "fan_in_fan_out",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "runtime_config",
        "megatron_core",
        "qalora_group_size",
    }
)
"""Keys of peft's config that say how, or from what, the adapter was made. They have no effect once it exists."""
_FINE: dict[str, tuple[object, ...]] = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "eva", "orthogonal")}
"""Values of other keys that are accepted besides those that switch a key off. With other values of `init_lora_weights`,
such as pissa and olora, peft subtracts the adapter's starting weights from the model's own weights each time it loads
the adapter; offmate writes such adapters converted."""


def takes_from_base(begin: object) -> bool:
    """Return whether adapters with this value of `init_lora_weights` start from a part of the model's own weights
    (pissa, olora), which then become W - scale B A."""
    return isinstance(begin, str) and begin.startswith(("pissa", "olora"))


def local_adapter(text: object, folder: Path | None) -> str:
    """Return the absolute path of a folder with a peft adapter. `folder`: where relative paths start; None: `text`
    comes from `resolved.yaml` and is returned unchanged. Raises FileNotFoundError, TypeError."""
    if not isinstance(text, str) or not text:
        raise TypeError(f"it is {shown(text)}; it must be a folder with an adapter")
    if folder is None:
        return text
    path = (folder / Path(text).expanduser()).absolute()
    for name in (CONFIG, WEIGHTS):
        if (path / name).is_file():
            continue
        if "," in text:  # LLaMA-Factory merges all but the last into the model before it trains
            raise FileNotFoundError(
                f"it is {shown(text)}; several adapters are not supported yet: merge all but the last into the "
                "model (by peft's merge_and_unload), give what is saved then as the model, and the last alone"
            )
        raise FileNotFoundError(f"there is no {name} in {path}; give the folder of one adapter, as peft saves it")
    return str(path)


def adapter_revision(path: str) -> str | None:
    """Return the branch, tag or commit of the base model in the config of the adapter in the folder `path`; None where
    it has none, or where the config cannot be read (`adapter_keys` reports that)."""
    try:
        config = json.loads((Path(path) / CONFIG).read_text("utf-8"))
    except (ValueError, OSError):
        return None
    revision = config.get("revision") if isinstance(config, Mapping) else None
    return revision if isinstance(revision, str) and revision else None


def adapter_keys(path: str) -> dict[str, Any]:
    """Return the keys of a job that the adapter in the folder `path` decides: key -> value. Raises ValueError for an
    adapter that is not supported, OSError."""
    try:
        config = json.loads((Path(path) / CONFIG).read_text("utf-8"))
    except ValueError:
        config = None
    if not isinstance(config, Mapping):
        raise ValueError(f"{path}/{CONFIG} is no config of peft")
    if config.get("peft_type") != "LORA":
        raise ValueError(f"the adapter is {shown(config.get('peft_type'))}; only LORA is supported")
    for key, value in config.items():
        known = key in _KEYS or key in _SAYS_NOTHING or value in _FINE.get(key, ())
        if not known and value not in (*SWITCHED_OFF, {}):
            raise ValueError(f"the adapter has {key}: {shown(value)}, which is not supported yet")
    values = {ours: config.get(theirs, _PEFTS.get(theirs)) for theirs, ours in _KEYS.items()}
    targets, parameters = values["lora_target_modules"], values["lora_target_parameters"]
    if not targets and not parameters:
        raise ValueError(f"{path}/{CONFIG} has no target_modules")
    values["lora_target_modules"] = targets if isinstance(targets, str) else tuple(sorted(targets or ()))
    for key in ("lora_target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"):
        value = values[key]
        value = [value] if isinstance(value, int) or (isinstance(value, str) and key == "layers_pattern") else value
        values[key] = (tuple(sorted(value)) if isinstance(value, list) else value) or None
    modules = values["lora_modules_to_save"]
    if config.get("task_type") == "SEQ_CLS":  # peft names the head twice, and one that other families have
        modules = [module for module in dict.fromkeys(modules or ()) if module != "classifier"]
    values["lora_modules_to_save"] = tuple(modules) if modules else None
    values["rank_pattern"], values["alpha_pattern"] = values["rank_pattern"] or None, values["alpha_pattern"] or None
    values["use_rslora"], values["use_dora"] = bool(values["use_rslora"]), bool(values["use_dora"])
    return values
