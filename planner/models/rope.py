"""Finds models whose rotary position embeddings (RoPE) use frequencies that depend on a row's length, padding
included."""

from __future__ import annotations

from transformers import PreTrainedConfig

from planner.job.rope_border import RopeBorder
from planner.job.schema import Job
from planner.models.hf_model import model_config


def rope_border(job: Job) -> RopeBorder | None:
    """The row length, in tokens, above which the job's model uses other rotary frequencies; None if they never change.
    Raises UserError."""
    return border_of(model_config(job))


def border_of(config: PreTrainedConfig) -> RopeBorder | None:
    """The row length, in tokens, above which a model with this config uses other rotary frequencies; None if they
    never change. If kinds of layers have different borders, the smallest. As in transformers'
    `modeling_rope_utils.dynamic_rope_update`."""
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    borders: list[RopeBorder] = []
    for rope in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        kind = rope.get("rope_type", "")
        if kind == "longrope":
            borders.append(RopeBorder(int(rope["original_max_position_embeddings"]), by_length=False))
        elif "dynamic" in kind and not rope.get("alpha"):  # with alpha, as in Hunyuan, they are always the same
            borders.append(RopeBorder(int(text.max_position_embeddings), by_length=True))
    return min(borders, key=lambda border: border.tokens, default=None)
