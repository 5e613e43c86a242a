"""What a job's model is like, found out once in a process for all tests that ask about it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.job.schema import Job
from planner.measure import analysis
from planner.measure.analysis import Analysis, analyse

_OF_NO_CONCERN = {
    "model",
    "tokenizer",
    "dataset",
    "eval_dataset",
    "output_dir",
    "gpu_budget",
    "cpu_budget",
    "train_batch_size",
    "gradient_accumulation_steps",
}
_known: dict[tuple[object, ...], Analysis] = {}


def analysed_once(job: Job, device: torch.device, *, arranged: bool = False, for_gpu: bool = False) -> Analysis:
    """As `planner.measure.analysis.analyse`, whose answer rests on the model's config and on keys of the job alone.
    What it refuses it refuses each time."""
    config = Path(job.model) if Path(job.model).is_file() else Path(job.model) / "config.json"
    keys = job.model_dump_json(exclude=_OF_NO_CONCERN)
    several = job.gradient_accumulation_steps > 1
    asked = (config.read_text("utf-8"), keys, several, device, arranged, for_gpu, analysis.skeleton_model)
    if asked not in _known:
        _known[asked] = analyse(job, device, arranged=arranged, for_gpu=for_gpu)
    return _known[asked]


def analyse_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all that plans for a job take `analysed_once`."""
    for place in ("whatif.batch_size", "whatif.trace", "commands.plan_job"):
        monkeypatch.setattr(f"planner.{place}.analyse", analysed_once)
