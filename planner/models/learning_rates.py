"""Finds, by their names, the weights that get a learning rate of their own."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from planner.errors import Exit, UserError
from planner.job.schema import Job

_SAVED = "modules_to_save.default.weight"
_ENDS = ("embed_tokens", "lm_head")


def embedding_names(model: nn.Module) -> frozenset[str]:
    """The names of the trained weights that get axolotl's `embedding_lr`: embedding, head and, with adapters, modules
    trained as a whole."""
    return frozenset(
        name
        for name, p in model.named_parameters()
        if p.requires_grad and (name.endswith(_SAVED) or any(end in name for end in _ENDS))
    )


def loraplus_names(model: nn.Module) -> tuple[frozenset[str], frozenset[str], frozenset[str], frozenset[str]]:
    """The names of trained weights in the four groups of LoRA+ (Hayou et al., 2024), as peft 0.21 makes them: (1)
    matrices A and modules trained as a whole; (2) adapters of embeddings, which earlier versions of peft put in no
    group; (3) matrices B and all weights of one dimension, if they have weight decay; (4) the same if they have none.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    embedding = frozenset(name for name in trained if ".lora_embedding_" in name)
    second = frozenset(n for n, p in trained.items() if n not in embedding and ("lora_B" in n or p.ndim == 1))
    still = frozenset(name for name in second if "bias" in name or name.rpartition(".")[0] in norms)
    return frozenset(trained) - embedding - second, embedding, second - still, still


def check_rates(model: nn.Module, job: Job) -> None:
    """Raise UserError if the job sets a learning rate for embedding and head, but no trained weight gets it."""
    key = next((key for key in ("embedding_lr", "embedding_lr_scale") if getattr(job, key) is not None), None)
    if key is None or embedding_names(model):
        return
    its = cast(Any, model)
    ends = [end for end in (its.get_input_embeddings(), its.get_output_embeddings()) if end is not None]
    names = [name for name, module in model.named_modules() if any(module is end for end in ends)]
    if job.method == "lora":
        hint = f"lora_modules_to_save: [{', '.join(name.rpartition('.')[2] for name in names)}], or without {key}"
    elif any(end.weight.requires_grad for end in ends):
        hint = f"leave {key} out: it goes by these names, as in axolotl"
    else:
        hint = f"let trainable have one of them, or leave {key} out"
    of = "embed_tokens, lm_head" + (", or one of lora_modules_to_save" if job.method == "lora" else "")
    raise UserError(
        f"{key} is set, but none of the weights that it is for is trained.",
        code="rate-of-nothing",
        exit_code=Exit.USAGE,
        numbers=(f"{key}: {getattr(job, key)} is for {of}; embedding and head are {', '.join(names)} here",),
        hint=hint,
    )
