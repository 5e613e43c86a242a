"""Jobs that train cores of a tiny model by LSP."""

from __future__ import annotations

from pathlib import Path

from planner.job.schema import Job
from tests.support.lora_jobs import model_folder
from tests.support.texts import make_job, sentences, write_jsonl


def lsp_job(tmp_path: Path, name: str = "llama", **keys: object) -> Job:
    small = {
        "max_length": 16,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "method": "lsp",
        "lsp_size": 32,
        "lsp_nonzeros": 4,
        "lsp_check_steps": 3,
        "lsp_threshold": 0.0,
        "lsp_samples": 3,
    }
    data = write_jsonl(tmp_path / "data.jsonl", sentences(9))
    return make_job(model_folder(tmp_path / "model", name), data, **{**small, **keys})
