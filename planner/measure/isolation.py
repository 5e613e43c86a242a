"""Whether a model keeps packed documents apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import masking_utils

from planner.errors import Exit, UserError


@contextmanager
def watching_isolation(model: nn.Module) -> Iterator[None]:
    """Around forwards of `model` on rows of several documents, which their `position_ids` tell apart. Raises UserError
    at the end when the model never asked where documents begin, or carries state from token to token past its masks."""
    asked: list[bool] = []
    find = masking_utils.find_packed_sequence_indices

    def watched(position_ids: Tensor, *more: Any, **named: Any) -> Tensor | None:
        asked.append(True)
        return find(position_ids, *more, **named)

    masking_utils.find_packed_sequence_indices = watched
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find
    carries = [name for name, module in model.named_modules() if isinstance(module, nn.Conv1d)]
    if carries or not asked:
        cause = f"{carries[0]} mixes neighbouring tokens" if carries else "its attention does not look at position_ids"
        raise UserError(
            "The model does not keep packed documents apart.", code="packing-not-isolated", exit_code=Exit.USAGE,
            numbers=(f"{type(model).__name__}: {cause}",),
            hint="use packing: false, or packing: wrapped, in which documents see each other",
        )  # fmt: skip
