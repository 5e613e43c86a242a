"""Run folders of small jobs, as the planner leaves them."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from planner.codec import to_json
from planner.cpu.adamw import cpu_kernel
from planner.job.schema import Job
from planner.measure.machine_rates import estimate_hardware
from planner.models.hf_model import sample_batch
from planner.run.folder import RunFolder
from planner.schedule.chain import Chain
from tests.support.engine_plans import chain_of, mixed_plan
from tests.support.texts import make_job, sentences, tiny_llama_folder, write_jsonl
from tests.support.tiny_models import config_of
from worker.training.model import load_model

STEPS = 10
_CHAINS: dict[str, Chain] = {}
_TRAINING_ALONE = {
    "model",
    "tokenizer",
    "dataset",
    "output_dir",
    "run_name",
    "max_steps",
    "gradient_accumulation_steps",
    "max_grad_norm",
    "learning_rate",
    "weight_decay",
    "warmup_steps",
    "save_steps",
    "save_dtype",
    "save_total_limit",
    "val_size",
    "eval_steps",
    "load_best_model_at_end",
}
"""Keys that no chain depends on."""


def chain_of_job(job: Job) -> Chain:
    """The chain of the model of `job`, a local one. Jobs that differ only in how they train share it: making one takes
    a second."""
    model = [(path.name, path.read_text("utf-8")) for path in sorted(Path(job.model).glob("*.json"))]
    strict = torch.are_deterministic_algorithms_enabled()
    key = repr((model, job.model_dump(exclude=_TRAINING_ALONE), strict, cpu_kernel().packs))
    if key not in _CHAINS:
        _CHAINS[key] = chain_of(load_model(job), sample_batch(job), chunk_rows=0 if job.exact else 16)
    return _CHAINS[key]


def make_run(tmp_path: Path, model: str, at: Path | None = None, **keys: object) -> tuple[Job, RunFolder]:
    """A job of `STEPS` steps, and its run folder, `at` or beside its data."""
    folder = tiny_llama_folder(tmp_path / "model")
    if model != "llama":
        config_of(model, vocabulary=260).save_pretrained(folder)
    small = {
        "max_length": 16,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "max_steps": STEPS,
        "save_steps": 4,
    }
    job = make_job(folder, write_jsonl(tmp_path / "data.jsonl", sentences(20)), **{**small, **keys})
    run = RunFolder(at or tmp_path / "run")
    run.path.mkdir()
    run.resolved.write_text(job.resolved_yaml(), "utf-8")
    chain = chain_of_job(job)
    plan = mixed_plan(chain, slices=job.gradient_accumulation_steps, clip=job.max_grad_norm is not None)
    parts = {
        "plan": to_json(plan),
        "chain": to_json(chain),
        "hardware": to_json(estimate_hardware(torch.device("cpu"))),
    }
    run.plan.write_text(json.dumps({"format": 1, **parts}))
    return job, run
