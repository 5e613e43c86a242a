"""Model folders as a run ends with them, from the state of any engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from planner.job.output_dir import Place, new_token
from worker.storage.checkpoint import Origin
from worker.storage.model_folder import Output
from worker.storage.trained import TrainedWeights


def write_model(
    folder: Path,
    output: Output,
    model: nn.Module,
    tokenizer: Any,
    state: Iterable[tuple[str, Mapping[str, Tensor]]],
    *,
    dtype: torch.dtype,
) -> Path:
    """The model folder of `state`, by way of its trained weights."""
    origin = Origin(job={"exact": False}, data="", total_steps=1, plan="")
    trained = TrainedWeights(folder.parent / "trained", origin=origin)
    found = trained.write(((name, {"weight": parts["master"].to(dtype)}) for name, parts in state), step=1)
    weights = {name: parts["weight"] for name, parts in found.tensors()}
    try:
        place = Place(folder=folder, token=new_token())
        return output.write(place, model, tokenizer, weights, run="run 1", step=1)
    finally:
        del weights
        trained.remove()
