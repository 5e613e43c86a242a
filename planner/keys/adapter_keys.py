"""The keys of a job that say which parts of the model are trained, by which method, and at which learning rate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from planner.keys.fields import MOST, Beta, Count, Modules, Positive, Switch, Text, listed, nothing


def _numbers(value: object) -> object:
    """Return a number or a list of numbers as a tuple."""
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else listed(value)


_Layers = Annotated[
    tuple[Annotated[int, Field(ge=0, le=MOST)], ...] | None,
    BeforeValidator(_numbers),
    Field(description="the number of a layer, from 0, a list of them, or null for all"),
]
_Patterns = Annotated[
    tuple[Text, ...] | None,
    BeforeValidator(lambda value: (value,) if isinstance(value, str) and value else listed(value)),
    Field(description="a list of patterns of parameters' names, or null"),
]
_ModulesOrPattern = Annotated[
    tuple[Text, ...] | Text | None,
    BeforeValidator(listed),
    Field(description="a list of modules' names, a pattern of names, or null"),
]
_Ranks = Annotated[
    dict[Text, Count] | None,
    BeforeValidator(nothing),
    Field(description="a mapping of modules' names, or patterns, to whole numbers from 1 to 10^9, or null"),
]
_Alphas = Annotated[
    dict[Text, Positive] | None,
    BeforeValidator(nothing),
    Field(description="a mapping of modules' names, or patterns, to numbers above 0, or null"),
]


_PissaByIterations = Annotated[str, Field(pattern="^pissa_niter_[1-9][0-9]{0,2}$")]
_Rate = Annotated[Positive | None, BeforeValidator(nothing), Field(description="a number above 0, or null")]


class AdapterKeys(BaseModel):
    """The keys of a job file for what is trained and by which method (full, LoRA or LSP); a base class
    of `planner.job.schema.Job`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    method: Annotated[Literal["full", "lora", "lsp"], Field(description="full, lora or lsp")] = "full"
    trainable: _Patterns = None
    trainable_layers: Annotated[
        Annotated[int, Field(ge=-MOST, le=MOST)] | None,
        BeforeValidator(nothing),
        Field(description="a whole number of layers, below 0 for the first ones, or null"),
    ] = None
    lora_r: Annotated[Count | None, Field(description="a whole number from 1 to 10^9")] = None
    lora_alpha: Annotated[Positive | None, Field(description="a number above 0")] = None
    lora_dropout: Annotated[Beta | None, Field(description="a number from 0 up to, not including, 1")] = None
    lora_target_modules: Annotated[
        tuple[Text, ...] | Text | None,
        Field(description="all-linear, peft-default, a list of modules' names, or a pattern of names"),
    ] = None
    lora_target_parameters: Annotated[Modules, Field(description="a list of parameters' names, or null")] = None
    exclude_modules: _ModulesOrPattern = None
    layers_to_transform: _Layers = None
    layers_pattern: Modules = None
    rank_pattern: _Ranks = None
    alpha_pattern: _Alphas = None
    init_lora_weights: Annotated[
        bool | Literal["gaussian", "orthogonal", "pissa", "olora"] | _PissaByIterations,
        Field(description="true, false, gaussian, orthogonal, pissa, pissa_niter_N (N from 1 to 999) or olora"),
    ] = True
    lora_modules_to_save: Modules = None
    adapter_name_or_path: Annotated[Text | None, Field(description="a folder with an adapter, or null")] = None
    loraplus_lr_ratio: _Rate = None
    loraplus_lr_embedding: Positive = 1e-6
    use_rslora: Switch = False
    use_dora: Switch = False
    load_in_4bit: Switch = False
    load_in_8bit: Switch = False
    quantize_moe_experts: Switch = False
    bnb_4bit_quant_type: Annotated[Literal["nf4", "fp4"], Field(description="nf4 or fp4")] = "nf4"
    bnb_4bit_use_double_quant: Switch = True
    embedding_lr: _Rate = None
    embedding_lr_scale: _Rate = None
