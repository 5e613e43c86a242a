"""Adds LoRA adapters to a model with peft: the adapters are trained, the model's own weights are frozen."""

from __future__ import annotations

import difflib
import logging
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MethodType
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from planner.errors import Exit, UserError, first_line
from planner.fast_imports import compiled_when_called
from planner.job.schema import Job
from planner.keys.adapter import WEIGHTS, adapter_keys, takes_from_base
from planner.keys.lora import ALL_LINEAR, PEFTS_OWN
from planner.models.encoder_decoder import has_pairs
from planner.models.packed_experts import Unpacking, experts_shown, unpack_where_read
from planner.models.peft_parts import check_parts, lay_out, take_parts, trained_halves
from planner.models.quantized import compute_in, computes_in, is_quantized, pack
from planner.models.trainable import check_patterns, none_kept

log = logging.getLogger(__name__)


def with_adapters(
    model: nn.Module, job: Job, *, layers: int | None = None, begun: Mapping[str, Tensor] | None = None
) -> nn.Module:
    """`model` wrapped by peft, with new LoRA adapters as the job says and all else frozen. The adapters are
    initialized under `job.seed`, in fp32 as peft does.

    `layers`: the number of layers of the whole model if `model` has only the first ones; then names and patterns in
    the job may be about the others. `begun`: the initial values of adapters that took over a part of the model's
    weights (PiSSA, OLoRA), to start from again. Raises UserError if peft is missing, or a target is not in the model.
    """
    try:
        with compiled_when_called():  # peft loads bitsandbytes
            from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UserError(
            "LoRA needs the package peft.",
            code="peft-missing",
            numbers=(first_line(error),),
            hint="pip install 'offmate[lora]'",
            exit_code=Exit.USAGE,
        ) from error
    assert job.lora_r is not None and job.lora_alpha is not None and job.lora_dropout is not None
    takes = takes_from_base(job.init_lora_weights)
    takes_now = takes and begun is None and not any(parameter.is_meta for parameter in model.parameters())
    config = LoraConfig(
        r=job.lora_r,
        lora_alpha=cast(int, job.lora_alpha),
        lora_dropout=job.lora_dropout,
        target_modules=targets_of(job),
        target_parameters=_listed(job.lora_target_parameters),
        exclude_modules=_listed(job.exclude_modules),
        layers_to_transform=_listed(job.layers_to_transform),
        layers_pattern=_listed(job.layers_pattern),
        rank_pattern=dict(job.rank_pattern or {}),
        alpha_pattern=cast(dict[str, int], dict(job.alpha_pattern or {})),
        init_lora_weights=cast(bool, job.init_lora_weights if takes_now or not takes else True),
        modules_to_save=_listed(job.lora_modules_to_save),
        use_rslora=job.use_rslora,
        use_dora=job.use_dora,
        # peft trains the head of a SEQ_CLS in full, and gives it no adapter
        task_type="SEQ_CLS" if job.rewards else "SEQ_2_SEQ_LM" if has_pairs(model) else "CAUSAL_LM",
        base_model_name_or_path=job.model,
        revision=job.model_revision,
    )
    if quantized := is_quantized(model):
        if takes:
            raise UserError(
                f"init_lora_weights: {job.init_lora_weights} takes a part of the model's own weights, and those of "
                f"{job.model} are quantized.",
                code="base-quantized",
                exit_code=Exit.USAGE,
                hint="init_lora_weights: true",
            )
        compute_in(model, computes_in(job))
    matched = _matched(job)
    check_patterns(matched.values(), matched, [name for name, _ in model.named_modules()])
    torch.manual_seed(job.seed)
    try:
        with experts_shown(model, computes_in(job)), warnings.catch_warnings():
            # peft uses a name of transformers that transformers is about to drop
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            # peft adds patterns of its own for experts of some models. Those of the job are checked below.
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
            add_others(config, model, job)
            adapted = cast(nn.Module, get_peft_model(cast(Any, model), config))
    except ValueError as error:
        no_dropout = "lora_dropout" in str(error)
        if layers is not None and not no_dropout:  # the whole model would have been refused before
            raise none_kept(model, layers) from error
        if (unknown := no_such_target(job, model)) is not None:
            raise unknown from error
        zero = "lora_dropout: 0 (experts' adapters have none); for offmate plan: --set lora_dropout=0"
        hint = zero if no_dropout else "lora_target_modules: all-linear"
        raise UserError(
            "The LoRA adapters cannot be added to this model.",
            code="lora-targets",
            numbers=(first_line(error),),
            hint=hint,
            exit_code=Exit.USAGE,
        ) from error
    if takes:
        check_parts(adapted, job.init_lora_weights)
        if begun is not None:
            take_parts(adapted, begun)
        lay_out(adapted)
    if layers is None:
        _check_matches(adapted, job)
    names = [name for name, _ in adapted.named_modules()]
    for wanted in job.lora_modules_to_save or ():
        if layers is None and not any(name.endswith(f"{wanted}.modules_to_save") for name in names):
            raise UserError(
                f"There is no module {wanted} in this model to train as a whole.",
                code="lora-modules",
                hint="lora_modules_to_save: [embed_tokens, lm_head], or what these are called in this model",
                exit_code=Exit.USAGE,
            )
    keep_modules(adapted)
    if quantized:
        pack(adapted, computes_in(job))
    if job.quantize_moe_experts and not unpack_where_read(adapted, job):
        log.info("model: quantize_moe_experts finds no experts that are weights of their own")
    return adapted


def _matched(job: Job) -> dict[str, str]:
    """The patterns that peft matches with module names: pattern as peft builds it -> the text in the job."""
    whole = [text for text in (job.lora_target_modules, job.exclude_modules) if isinstance(text, str)]
    layers = [job.layers_pattern] if isinstance(job.layers_pattern, str) else job.layers_pattern or ()
    return {
        **{text: text for text in whole},
        **{rf"(?:^|.*?\.){text}\.(?P<idx>\d+)\.": text for text in layers},
        **{rf"(.*\.)?({text})$": text for text in (*(job.rank_pattern or ()), *(job.alpha_pattern or ()))},
        **{rf"(^|.*\.){text}($|\..*)": text for text in job.lora_modules_to_save or ()},
    }


def _listed(value: Any) -> Any:
    """`value` as peft's config wants it: a list for a tuple."""
    return list(value) if isinstance(value, tuple) else value


def _check_matches(adapted: nn.Module, job: Job) -> None:
    """Raise UserError for a parameter name or a pattern of the job that matches nothing in the model: peft ignores
    these with a warning or silently. Names in lora_target_modules that match nothing are only logged: one list often
    serves several models."""
    from peft.tuners.lora import LoraLayer

    layers = {n: module for n, module in adapted.named_modules() if isinstance(module, LoraLayer)}
    parameters = {
        f"{plain_name(name)}.{m.parameter_name}" for name, m in layers.items() if hasattr(m, "parameter_name")
    }
    places = {plain_name(name) for name in layers} | parameters
    for name in job.lora_target_modules if isinstance(job.lora_target_modules, tuple) else ():
        if name != ALL_LINEAR and not any(f".{place}".endswith(f".{name}") for place in places):
            meant = f"; did you mean {near}?" if (near := near_target(name, adapted)) else ""
            log.warning(
                "model: lora_target_modules: no layer of this model that gets an adapter is called %s%s", name, meant
            )
    wanted = [
        ("lora_target_parameters", name, parameters, re.escape(name)) for name in job.lora_target_parameters or ()
    ]
    for key in ("rank_pattern", "alpha_pattern"):
        wanted += [(key, pattern, places, pattern) for pattern in getattr(job, key) or ()]
    for key, name, known, pattern in wanted:
        if not any(re.fullmatch(rf"(.*\.)?({pattern})", place) for place in known):
            raise UserError(
                f"No layer or parameter of this model that gets an adapter matches {name}.",
                code="lora-targets",
                exit_code=Exit.USAGE,
                numbers=(f"{key}: {name}",),
                hint=f"adapters are at {', '.join(sorted({place.rpartition('.')[2] for place in places}))}",
            )


def plain_name(name: str) -> str:
    """The name that a module of peft's wrapped model has in the plain model. If an adapter is on a parameter, peft
    wraps a module several times."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def check_adapter(job: Job) -> None:
    """Raise UserError if the settings of the adapter that the job continues have changed since the job was submitted:
    its weights would be trained under the old settings."""
    folder = job.adapter_name_or_path
    assert folder is not None
    try:
        settings = adapter_keys(folder)
    except OSError as error:
        raise _not_readable(folder, error) from error
    except ValueError as error:
        raise _not_usable(folder, str(error)) from error
    pairs = {key: (value, getattr(job, key)) for key, value in settings.items()}
    if changed := [
        f"{key}: {now}, at the submission {before}"
        for key, (now, before) in pairs.items()
        if _sorted(now) != _sorted(before)
    ]:
        raise UserError(
            f"The adapter in {folder} is not the one that the job was submitted with.",
            code="adapter-changed",
            exit_code=Exit.USAGE,
            numbers=tuple(changed),
            hint="submit the job again, or put the adapter back",
        )


def _sorted(value: object) -> object:
    return tuple(sorted(value)) if isinstance(value, tuple) else value


def load_adapter(adapted: nn.Module, folder: str, *, layers: int | None = None, as_ordinary: bool = False) -> None:
    """Load the adapter in `folder` into `adapted`, a model that `with_adapters` made. `layers`: `adapted` has only the
    first so many layers of the model. `as_ordinary`: the adapter's file was written for the published model by
    `planner.models.peft_parts`, with twice the rank.

    Raises UserError if the adapter cannot be read or belongs to another model. Also if its file has weights of the
    model itself that differ from the model's: training would use them, but no file that it writes would hold them.
    peft writes such weights with `save_embedding_layers`; equal ones are fine.
    """
    from peft import set_peft_model_state_dict

    try:
        weights = load_file(Path(folder) / WEIGHTS)
    except OSError as error:
        raise _not_readable(folder, error) from error
    except SafetensorError as error:
        raise _not_usable(folder, first_line(error)) from error
    weights = trained_halves(weights) if as_ordinary else weights
    parameters = dict(adapted.named_parameters(remove_duplicate=False))
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    if layers is not None:
        weights = {name: weight for name, weight in weights.items() if not _is_beyond(name, layers, adapted)}
    frozen = {name: weights.pop(name) for name in sorted(weights.keys() & (parameters.keys() - trained))}
    if other := [
        name for name, weight in frozen.items() if not torch.equal(weight.to(parameters[name]), parameters[name])
    ]:
        raise UserError(
            f"The adapter in {folder} brings weights that differ from the model's own.",
            code="adapter-not-usable",
            exit_code=Exit.USAGE,
            numbers=(f"{other[0]} is another than the model's",),
            hint="save these weights into the folder of the model, and give that folder as model",
        )
    try:
        result: Any = set_peft_model_state_dict(adapted, weights)
    except (RuntimeError, KeyError, ValueError, TypeError) as error:  # TypeError: peft and transformers do not fit
        raise _not_usable(folder, first_line(error)) from error
    if wrong := [*result.unexpected_keys, *sorted(trained & set(result.missing_keys))]:
        raise _not_usable(folder, f"{wrong[0]} is not in both")


def _is_beyond(name: str, layers: int, adapted: nn.Module) -> bool:
    """Whether the weight `name` belongs to a layer beyond the first `layers`, which are all that `adapted` has."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdecimal() and int(part) >= layers:
            modules = adapted.get_submodule(".".join(parts[:place]))
            return isinstance(modules, nn.ModuleList) and len(modules) == layers
    return False


def _not_readable(folder: str, error: OSError) -> UserError:
    return UserError(
        f"The adapter in {folder} cannot be read.",
        code="adapter-not-readable",
        exit_code=Exit.USAGE,
        numbers=(first_line(error),),
        hint="put it back, then offmate retry",
    )


def _not_usable(folder: str, cause: str) -> UserError:
    return UserError(
        f"The adapter in {folder} is not one of this model.",
        code="adapter-not-usable",
        exit_code=Exit.USAGE,
        numbers=(cause,),
        hint="give the model that it was trained on, or leave adapter_name_or_path out",
    )


# ---- makes peft's LoRA work on parameters that are no layers of their own, such as the experts of a mixture


def keep_modules(adapted: nn.Module) -> None:
    """Let peft's adapters on parameters (such as the experts of a mixture) compute the same results without changing
    the modules that they wrap.

    peft's own code turns each such weight into a parametrization during a forward, and back into a plain parameter
    after it. In a trace other tensors stand in for weights, and peft's code would put them back as buffers. Also torch
    computes a parametrization once more when it is registered.
    """
    from peft.tuners.lora.layer import ParamWrapper

    for module in adapted.modules():
        if isinstance(module, ParamWrapper):
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`ParamWrapper.forward` for an active, unmerged adapter: the wrapped module runs with the adapted weight."""
    name = self.parameter_name
    if (packed := Unpacking.of(self.get_base_layer(), name)) is not None:
        with packed.followed_by(lambda weight: _adapted(self, weight)):
            return self.base_layer(x, *args, **kwargs)
    inside = self.get_base_layer()._parameters
    weight = inside[name]
    inside[name] = _adapted(self, weight)
    try:
        return self.base_layer(x, *args, **kwargs)
    finally:
        inside[name] = weight


def _adapted(layer: Any, weight: Tensor) -> Tensor:
    """The weight with its adapter added, by peft's own operation: since peft 0.21 one operation for all experts at
    once."""
    from peft.tuners.lora import layer as peft_layer

    untyped: Any = peft_layer
    (adapter,) = layer.active_adapters
    if layer.num_experts > 1 and hasattr(layer, "get_delta_factors"):
        adapted: Tensor = untyped._LoraFactorsProxy(*layer.get_delta_factors(adapter))(weight)
    else:
        adapted = untyped._LoraParameterProxy(layer.get_delta_weight(adapter))(weight)
    return adapted


# ---- translates a job's words for the layers that get an adapter into peft's words


def targets_of(job: Job) -> Any:
    """The value of `target_modules` for a peft config; None: peft's own choice for the model's type. If a job names
    all linear layers and others, only all linear layers: `add_others` adds the others."""
    targets = job.lora_target_modules
    if targets == PEFTS_OWN:
        return None
    if isinstance(targets, tuple):
        return ALL_LINEAR if ALL_LINEAR in targets else list(targets)
    return targets


def add_others(config: Any, model: nn.Module, job: Job) -> None:
    """Add to peft's `config` the modules that the job names beside "all-linear", which stands for all linear layers of
    `model`. `config` was made with `targets_of`."""
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers  # as in get_peft_model

    if isinstance(job.lora_target_modules, tuple) and ALL_LINEAR in job.lora_target_modules:
        _maybe_include_all_linear_layers(config, cast(Any, model))
        config.target_modules = {*config.target_modules, *job.lora_target_modules} - {ALL_LINEAR}


def no_such_target(job: Job, model: nn.Module) -> UserError | None:
    """The error for a job whose `lora_target_modules` (names or a pattern) fit no module in
    `model`; None if one fits."""
    targets, places = job.lora_target_modules, [name for name, _ in model.named_modules()]
    if isinstance(targets, str) and targets not in (ALL_LINEAR, PEFTS_OWN):
        if any(re.fullmatch(targets, place) for place in places):
            return None
        shown, meant = targets, ""
    elif isinstance(targets, tuple) and targets and ALL_LINEAR not in targets:
        if any(f".{place}".endswith(f".{name}") for place in places for name in targets):
            return None
        shown = ", ".join(targets)
        meant = ", ".join(dict.fromkeys(near for name in targets if (near := near_target(name, model))))
    else:
        return None
    return UserError(
        f"No module of this model {'is called' if isinstance(targets, tuple) else 'matches'} {shown}.",
        code="lora-targets",
        exit_code=Exit.USAGE,
        numbers=(f"its layers are {', '.join(_weighted(model))}",),
        hint=(f"did you mean {meant}? " if meant else "") + "lora_target_modules: all-linear takes all linear layers",
    )


def near_target(name: str, model: nn.Module) -> str | None:
    """The name of a layer of `model` that is similar to `name`; None if there is none."""
    return next(iter(difflib.get_close_matches(name, _weighted(model), n=1)), None)


def _weighted(model: nn.Module) -> list[str]:
    """The last part of the names of all modules that have a matrix of their own, in the model's order."""
    matrices = [name for name, parameter in model.named_parameters() if parameter.dim() == 2]
    return list(dict.fromkeys(name.split(".")[-2] for name in matrices if name.count(".")))
