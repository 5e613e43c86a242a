"""Full fine-tuning of some weights: the others are frozen."""

from __future__ import annotations

import re
from typing import Any, cast

from torch import nn

from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.job.trainable import PLACE


def freeze_others(model: nn.Module, job: Job, *, layers: int | None = None) -> None:
    """Freeze all parameters of `model` but those whose names begin with one of `job.trainable`. A tied one goes by its
    first name. `layers`: so many has the model of which this one has the first, and patterns may be of the others.

    Raises UserError for a pattern of no parameter, and where none is left.
    """
    if not job.trainable:
        return
    count = layers or int(cast(Any, model).config.get_text_config().num_hidden_layers)
    chosen = "|".join(map(str, _layers(job, count)))
    patterns = {text: re.compile(text.replace(PLACE, f"(?:{chosen})")) for text in job.trainable}
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for text, pattern in patterns.items():
        if layers is None and not any(map(pattern.match, names)):
            numbers = (f"trainable: {text}", f"some that it has: {', '.join(names[:1] + names[-2:])}")
            raise UserError(
                "A pattern of what is trained matches no parameter of this model.", code="trainable-not-there",
                exit_code=Exit.USAGE, numbers=numbers,
                hint="a pattern is to match a name from its beginning: 'model.layers.1[0-5].', or '.*mlp'",
            )  # fmt: skip
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(pattern.match(name) for pattern in patterns.values()))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            "Nothing of this model would be trained.", code="trainable-not-there", exit_code=Exit.USAGE,
            numbers=(f"trainable: {', '.join(job.trainable)}",),
            hint="an embedding that is the head, too, goes by the embedding's name",
        )  # fmt: skip


def _layers(job: Job, count: int) -> range:
    """The numbers of those `count` layers that the job means: the last so many, or with a number below 0 the first."""
    asked = job.trainable_layers
    if asked is None:
        return range(0)
    return range(max(0, count - asked), count) if asked > 0 else range(min(-asked, count))
