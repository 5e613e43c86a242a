"""The keys of a job that say which parts of the model are trained, by which method, and at which learning rate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from planner.keys.base import Keys
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


class MethodKeys(Keys):
    """These keys say which method trains the model, and which parameters are trained."""

    method: Annotated[Literal["full", "lora", "lsp"], Field(description="full, lora or lsp")] = "full"
    """The method of training: `full` trains every parameter. `lora` trains adapters on the model's linear layers. `lsp`
    trains a small matrix at each linear layer ([who should choose it](../how-to/lsp.md))."""
    trainable: _Patterns = None
    """The weights that are trained, as regular expressions such as `[model.layers.1[0-5].mlp, lm_head]`: with `method:
    full` a weight is trained if the beginning of its name matches one of them, and all others are frozen and written
    with the rest. With `method: lsp` these weights are trained whole, beside the cores; with `method: lora` the
    patterns must match all parameters of the adapters by their names in peft (`trainable-beside-adapters`). A pattern
    that matches nothing is refused, and so is `lm_head` if embedding and head are one weight: use the embedding's name.
    In axolotl's `unfrozen_parameters` a dot means a dot, and rows of a weight (`[:32000]`) are refused."""
    trainable_layers: Annotated[
        Annotated[int, Field(ge=-MOST, le=MOST)] | None,
        BeforeValidator(nothing),
        Field(description="a whole number of layers, below 0 for the first ones, or null"),
    ] = None
    """With `method: full` only the last layers are trained, as many as this number says; a number below 0 means the
    first ones. In a pattern of `trainable`, `{layers}` then stands for the numbers of those layers, as in
    `.*{layers}.mlp`. The two keys together are LLaMA-Factory's `finetuning_type: freeze`. With `method: lsp` this key
    is refused."""


class LoraKeys(Keys):
    """These keys are for `method: lora`, which needs `pip install 'offmate[lora]'` and a model that has weights."""

    lora_r: Annotated[Count | None, Field(description="a whole number from 1 to 10^9")] = None
    """The rank of the adapters. With null it is 16."""
    lora_alpha: Annotated[Positive | None, Field(description="a number above 0")] = None
    """The output of the adapters is scaled by `lora_alpha / lora_r`. With null `lora_alpha` is 32."""
    lora_dropout: Annotated[Beta | None, Field(description="a number from 0 up to, not including, 1")] = None
    """The dropout before the adapters. With null it is 0.05; with `lora_target_parameters` or `preference` it is 0."""
    lora_target_modules: Annotated[
        tuple[Text, ...] | Text | None,
        Field(description="all-linear, peft-default, a list of modules' names, or a pattern of names"),
    ] = None
    """The layers that get an adapter. `all-linear`, which null means, is every linear layer but the head; a list may
    add the head (`[all-linear, lm_head]`), and if only some of its names are in the model, a note says which are not.
    `peft-default` is peft's own choice for the type of model, such as `[q_proj, v_proj]`. A pattern is a regular
    expression that must match the whole name of a module."""
    lora_target_parameters: Annotated[Modules, Field(description="a list of parameters' names, or null")] = None
    """Parameters that get an adapter although they are not layers: the experts of a mixture of experts, such as
    `[experts.gate_up_proj, experts.down_proj]` (peft's `target_parameters`). As in peft, a block makes the adapted
    weight of all its experts, which the plan counts. The key cannot be used with a dropout above 0, `use_dora` or
    `init_lora_weights: orthogonal`. If no layer should have an adapter, add `lora_target_modules: []`."""
    exclude_modules: _ModulesOrPattern = None
    """Layers among `lora_target_modules` that get no adapter, as in peft."""
    layers_to_transform: _Layers = None
    """The numbers of the model's layers that get adapters, as in peft. `lora_target_modules` must then be a list of
    names."""
    layers_pattern: Modules = None
    """The name of the list of layers that `layers_to_transform` counts, if the model has several lists of layers."""
    rank_pattern: _Ranks = None
    """Another `lora_r` for some adapters, such as `{down_proj: 32}`. A name or pattern that matches no adapter is
    refused."""
    alpha_pattern: _Alphas = None
    """Another `lora_alpha` for some adapters, in the form of `rank_pattern`."""
    init_lora_weights: Annotated[
        bool | Literal["gaussian", "orthogonal", "pissa", "olora"] | _PissaByIterations,
        Field(description="true, false, gaussian, orthogonal, pissa, pissa_niter_N (N from 1 to 999) or olora"),
    ] = True
    """The first values of the adapters, as in peft and under `seed`: with `true` A is random and B zero, with
    `gaussian` A is normal and B zero, with `false` both are random, so the model differs from the start; with
    `orthogonal` both are random with orthogonal rows (`lora_r` must be even, and the base not in 4 or 8 bits). With
    `pissa`, `pissa_niter_N` (by N iterations) and `olora` the adapters begin as the largest part of each weight, which
    is taken out of the model's own weight; the output is LoRA of twice the rank for the model as published. These three
    cannot be used with a quantized base, `use_dora`, `lora_target_parameters` or `adapter_name_or_path`;
    LLaMA-Factory's `pissa_init` has 16 iterations, or as many as `pissa_iter` says. Other ways that change the model's
    own weights (LoftQ, CorDA and others) are not supported."""
    lora_modules_to_save: Modules = None
    """Modules that are trained in full beside the adapters and saved with them, such as `embed_tokens` and `lm_head`,
    as in peft."""
    adapter_name_or_path: Annotated[Text | None, Field(description="a folder with an adapter, or null")] = None
    """An adapter in peft's format from which training continues, with new optimizer states; for example another job's
    `output/`. Rank, alpha, dropout, targets, layers and fully trained modules are the adapter's, and other values in
    the file are refused. An adapter is refused if peft changes the model's own weights when it loads it (`pissa`,
    `olora`, `corda`, `loftq`, `lora_ga`), or if its file has embeddings that are not the model's."""
    loraplus_lr_ratio: _Rate = None
    """LoRA+: the matrices B, and all parameters with one dimension, are trained at `learning_rate` times this number.
    Parameters are grouped and decayed as in peft's `create_loraplus_optimizer` with `loraplus_weight_decay`. This needs
    AdamW."""
    loraplus_lr_embedding: Positive = 1e-6
    """With LoRA+, the learning rate of adapters on embeddings, for both matrices, as in peft 0.21. LLaMA-Factory
    applies it to B alone; a note says so. Without `loraplus_lr_ratio` this key is refused."""
    use_rslora: Switch = False
    """True: the output of the adapters is scaled by `lora_alpha / √lora_r`."""
    use_dora: Switch = False
    """True: DoRA, which also trains the magnitude of the weights. It is not supported on a quantized base."""


class QuantizedKeys(Keys):
    """These keys are for LoRA on a base in 4 or 8 bits (QLoRA), which needs `pip install 'offmate[qlora]'`."""

    load_in_4bit: Switch = False
    """With `method: lora`, bitsandbytes quantizes the model's linear layers, except the head, to 4 bits. The frozen
    weights stay in host memory in these 4 bits, and the GPU unpacks each weight for one product
    ([more](../how-to/lora-on-4-bits.md))."""
    load_in_8bit: Switch = False
    """The same as `load_in_4bit` with bitsandbytes' int8 weights: one byte for each weight and four for each row. In a
    file of LLaMA-Factory `quantization_bit: 8` means this key, and `quantization_bit: 4` means `load_in_4bit`."""
    quantize_moe_experts: Switch = False
    """With `load_in_4bit: true`, the experts of a mixture (MoE), which are parameters and not linear layers, are
    quantized as they are read, too. A mixture of 30 billion parameters then takes 17 GB of host memory; otherwise its
    experts alone take 57 GB in bf16. A layer unpacks all its experts at once, which the plan counts. Experts may have
    adapters (`lora_target_parameters`)."""
    bnb_4bit_quant_type: Annotated[Literal["nf4", "fp4"], Field(description="nf4 or fp4")] = "nf4"
    """The 16 numbers that 4 bits stand for."""
    bnb_4bit_use_double_quant: Switch = True
    """True: the scales, one for 64 weights, are quantized, too, so a weight takes 0.52 bytes instead of 0.56."""


class EmbeddingRateKeys(Keys):
    """These keys give the embedding and the head a learning rate of their own."""

    embedding_lr: _Rate = None
    """The learning rate of the embedding and the head (`embed_tokens`, `lm_head`) and of matrices of
    `lora_modules_to_save`. These weights then do not decay, as in axolotl. The key is refused if no trained weight has
    such a name. It needs AdamW and cannot be used with `loraplus_lr_ratio`."""
    embedding_lr_scale: _Rate = None
    """The same as `embedding_lr`, as a factor of `learning_rate`."""


class AdapterKeys(EmbeddingRateKeys, QuantizedKeys, LoraKeys, MethodKeys):
    """The keys of a job file for what is trained, by which method, and at which rates of its own."""
