"""Handles LoRA adapters that take over a part of the model's own weights at the beginning of training. The model's
weight W then becomes W - scale B A.

They are PiSSA (Meng et al. 2024, eq. 2 to 4: the part of the largest singular values) and OLoRA (Büyükakyüz 2024: the
first columns of the QR decomposition), by peft's own functions. The trained adapters would fit only the reduced
weights, which nobody can rebuild without the initial A0 and B0. So they are written as an equal ordinary LoRA on the
published weights: with A and B at the end it adds B A - B0 A0, which has twice the rank.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from planner.disk import sync
from planner.errors import Exit, UserError, disk_full, first_line, is_disk_full


def check_parts(adapted: nn.Module, begin: object) -> None:
    """Raise UserError for a layer of `adapted` whose adapter cannot take over a part of its weight. `begin`: "pissa"
    or "olora", for the error."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import Linear

    names: dict[int, int] = {}
    for _, parameter in adapted.named_parameters(remove_duplicate=False):
        names[id(parameter)] = names.get(id(parameter), 0) + 1
    for name, module in adapted.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        layer, why = cast(Any, module), None
        weight = getattr(layer.get_base_layer(), "weight", None)
        if not isinstance(module, Linear) or not isinstance(weight, nn.Parameter) or not weight.is_floating_point():
            why = "it is no linear layer with a weight of its own in fp32 or 16 bits"
        elif names[id(weight)] > 1:
            why = "its weight is another layer's, too (embedding and head in one)"
        elif begin == "olora" and layer.fan_in_fan_out:
            why = "its weight lies transposed, which peft's olora does not know; pissa does"
        elif layer.r["default"] > min(weight.shape):
            why = f"its rank {layer.r['default']} is more than the {min(weight.shape)} of its weight"
        if why is not None:
            raise UserError(
                f"No adapter can begin with a part of {name.removeprefix('base_model.model.')}.",
                code="lora-targets",
                exit_code=Exit.USAGE,
                numbers=(f"init_lora_weights: {begin}", why),
                hint="init_lora_weights: true, or leave this layer out of lora_target_modules",
            )


def beginnings(adapted: nn.Module) -> dict[str, Tensor]:
    """The present LoRA matrices of all adapters in the model: parameter's name -> A or B."""
    return {
        name: parameter.detach().contiguous()
        for name, parameter in adapted.named_parameters()
        if ".lora_A." in name or ".lora_B." in name
    }


@torch.no_grad()
def take_parts(adapted: nn.Module, begun: Mapping[str, Tensor]) -> None:
    """Give the adapters the values in `begun` (name -> A or B), and subtract their scaled product B A from the weights
    of `adapted`, which are as published. The result equals that of peft's functions."""
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import transpose

    for name, module in adapted.named_modules():
        if isinstance(module, LoraLayer):
            layer, turned = cast(Any, module), getattr(module, "fan_in_fan_out", False)
            a, b = (begun[f"{name}.lora_{part}.default.weight"] for part in "AB")
            layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data = a.clone(), b.clone()
            weight = layer.get_base_layer().weight
            residual = transpose(weight.data.to(torch.float32), turned) - layer.scaling["default"] * b @ a
            weight.data = transpose(residual.to(weight.dtype), turned)


def lay_out(adapted: nn.Module) -> None:
    """Make all weights contiguous: peft leaves transposed weights of the model as views."""
    for parameter in adapted.parameters():
        parameter.data = parameter.data.contiguous()


def write_begun(file: Path, begun: Mapping[str, Tensor]) -> None:
    """Write `begun` (name -> initial A or B) into `file`, which is then either complete or absent. Raises OSError;
    UserError for a full disk."""
    draft = file.with_name(f"{file.name}.new")
    try:
        save_file(dict(begun), draft)
        sync(draft)
    except (OSError, SafetensorError) as error:
        if not is_disk_full(error):
            raise
        raise disk_full(error, "how the adapters began") from error
    draft.replace(file)
    sync(file.parent)


def read_begun(file: Path) -> dict[str, Tensor]:
    """The initial values of adapters that `write_begun` wrote: name -> A or B. Raises UserError."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(
            "The initial values of the job's adapters are lost, so what they add to the model is unknown.",
            code="beginning-gone",
            exit_code=Exit.USAGE,
            numbers=(f"{file}: {first_line(error)}",),
            hint="put the file back, or offmate rerun the job: it begins from the start",
        ) from error


def _as_ordinary(weights: Mapping[str, Tensor], begun: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The trained `weights` as LoRA of twice the rank on the model as published: [A; A0], [B, -B0], the rest as it is.

    peft's `path_initial_model_for_weight_conversion` writes the same, but drops modules trained as a whole.
    """
    ordinary = dict(weights)
    for name, beginning in begun.items():
        inner = ".lora_A." in name
        parts = (ordinary[name], (beginning if inner else -beginning).to(ordinary[name].dtype))
        ordinary[name] = torch.cat(parts, dim=0 if inner else 1)
    return ordinary


def trained_halves(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of `as_published`: the trained A and B, which are the first halves of those in `weights`; other
    weights as they are."""
    return {
        name: w[: len(w) // 2]
        if ".lora_A." in name
        else w[:, : w.shape[1] // 2].contiguous()
        if ".lora_B." in name
        else w
        for name, w in weights.items()
    }


@contextlib.contextmanager
def _config_of_ordinary(adapted: Any) -> Iterator[None]:
    """A context in which the config of `adapted` fits the weights that `as_published` gives: twice the rank, the same
    scale."""
    config = adapted.peft_config["default"]
    ordinary = copy.deepcopy(config)
    times = 2**0.5 if config.use_rslora else 2  # alpha / sqrt(r), alpha / r
    ordinary.init_lora_weights = True
    ordinary.r, ordinary.lora_alpha = 2 * config.r, times * config.lora_alpha
    ordinary.rank_pattern = {name: 2 * rank for name, rank in config.rank_pattern.items()}
    ordinary.alpha_pattern = {name: times * alpha for name, alpha in config.alpha_pattern.items()}
    adapted.peft_config["default"] = ordinary
    try:
        yield
    finally:
        adapted.peft_config["default"] = config


@contextlib.contextmanager
def as_published(begun: Path, adapted: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """A context that yields the trained adapter `weights` converted to an ordinary LoRA on the published model, with
    twice the rank. The file `begun` has their initial values. Inside, the config of `adapted` fits the converted
    weights. Raises UserError."""
    ordinary = _as_ordinary(weights, read_begun(begun))
    with _config_of_ordinary(adapted):
        yield ordinary
