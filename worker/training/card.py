"""The README.md of a trained model: from what, on what and how it was trained, as the hub reads it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml

from planner.job.local_data import is_local
from planner.job.schema import Job
from planner.job.values import MUON
from worker.training.metrics import Event

_SAID = (
    "model_revision", "tokenizer_revision", "method", "trainable",
    "trainable_layers", "lora_r", "lora_alpha", "lora_dropout", "lora_target_parameters",
    "layers_to_transform", "use_rslora", "use_dora",
    "load_in_4bit", "load_in_8bit", "quantize_moe_experts", "max_length", "max_target_length", "packing", "optim",
    "muon_adjust_lr_fn",
    "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "label_smoothing_factor",
    "neftune_noise_alpha", "bf16", "exact", "seed",
)  # fmt: skip


def model_card(job: Job, events: Sequence[Event], step: int, *, pairs: bool = False) -> str:
    """The card of the model after `step` steps, whose run wrote down `events`. Of local files and folders it has the
    names alone, and no paths."""
    base = Path(job.model).name if is_local(job.model) else job.model
    data = [Path(entry.path).name if is_local(entry.path) else entry.path for entry in job.data]
    head: dict[str, object] = {"library_name": "peft" if job.method == "lora" else "transformers"}
    if not is_local(job.model):
        head["base_model"] = job.model
    if hub := [entry.path for entry in job.data if not is_local(entry.path)]:
        head["datasets"] = hub
    head["pipeline_tag"] = "text2text-generation" if pairs else "text-generation"
    head["tags"] = ["offmate", *(["lora"] if job.method == "lora" else [])]
    rows = job.slice_rows * job.gradient_accumulation_steps
    values = job.model_dump(mode="json")
    idle = () if job.optim == MUON else ("muon_adjust_lr_fn",)
    lines = [f"| {key} | {values[key]} |" for key in _SAID if values[key] not in (None, False) and key not in idle]
    found = {(event["event"], event["step"]): event for event in events}
    loss = found.get(("step", step), {}).get("loss")
    held_out = found.get(("eval", step), {}).get("eval_loss")
    results = [
        f"- {what}: {value:.4f}"
        for what, value in (("loss of the last step", loss), ("loss of the evaluation", held_out))
        if isinstance(value, (int, float))
    ]
    return "\n".join([
        "---", yaml.safe_dump(head, sort_keys=False, allow_unicode=True).rstrip(), "---", "",
        f"# {job.run_name or f'{base}, fine-tuned'}", "",
        f"{'Adapters for' if job.method == 'lora' else 'Made from'} {base}, trained on {', '.join(data)} "
        f"in {step} steps of {rows} rows by offmate{_version()}.", "", *results, *([""] if results else []),
        "| key | value |", "|---|---|", *lines, "",
    ])  # fmt: skip


def _version() -> str:
    try:
        return f" {version('offmate')}"
    except PackageNotFoundError:  # run from its folder
        return ""
