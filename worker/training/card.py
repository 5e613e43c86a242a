"""Writes the README.md of a trained model as the hub reads it: its base, its data, and how it was trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml

from planner.data.local_data import is_local
from planner.job.schema import Job
from planner.keys.preference import Preference
from planner.keys.source import shown
from planner.optimizers.table import OPTIMIZER_KEYS, OPTIMIZERS
from planner.run.events import Event, pair_words
from planner.units import counted

_ALWAYS = frozenset(
    {
        "method",
        "lora_r",
        "lora_alpha",
        "max_length",
        "optim",
        "learning_rate",
        "lr_scheduler_type",
        "max_grad_norm",
        "exact",
        "seed",
    }
)
_NEVER = frozenset(
    {
        # told in words above the table
        "model",
        "dataset",
        "eval_dataset",
        "run_name",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "train_batch_size",
        # about the machine and its owners
        "tokenizer",
        "chat_template",
        "output_dir",
        "disk_paths",
        "disk_budget",
        "disk_rated_writes",
        "gpu_budget",
        "cpu_budget",
        "schedule",
        "gradient_checkpointing",
        "report_to",
        "wandb_project",
        "wandb_entity",
        "wandb_mode",
        "trackio_project_name",
        "trackio_space_id",
        "mlflow_experiment_name",
        "mlflow_tracking_uri",
        # about what happens during training
        "save_steps",
        "save_minutes",
        "save_total_limit",
        "eval_on_start",
        "per_device_eval_batch_size",
        "sample_prompts",
        "sample_tokens",
    }
)
"""Keys that are never in the table. Of the others, those in `_ALWAYS` and those not at their default are."""

_LOSSES: dict[Preference, str] = {
    "dpo": "DPO",
    "hinge": "the hinge loss of SLiC",
    "ipo": "IPO",
    "robust": "robust DPO",
    "orpo": "ORPO",
    "cpo": "CPO",
    "simpo": "SimPO",
    "kto": "KTO",
}


_LOADS_REWARDS = (
    ('model = AutoModelForSequenceClassification.from_pretrained("this folder")',),
    (
        "# one label, as without it the base would get two",
        'base = AutoModelForSequenceClassification.from_pretrained("the base", num_labels=1)',
        'model = PeftModel.from_pretrained(base, "this folder")',
    ),
)
"""How a reward model is loaded: a whole one, and adapters."""


def model_card(
    job: Job,
    events: Sequence[Event],
    step: int,
    *,
    pairs: bool = False,
    stops: str | None = None,
    merged: bool = False,
) -> str:
    """The text of the README.md for the model after `step` steps of a run with these `events` (lines of metrics.jsonl).
    It names local files and folders without their paths. `pairs`: the model is an encoder-decoder. `stops`: a sentence
    on the tokens at which the model stops, if these are new. `merged`: the job's adapters are merged into the base."""
    adapters = job.method == "lora" and not merged
    base = Path(job.model).name if is_local(job.model) else job.model
    data = [Path(entry.path).name if is_local(entry.path) else entry.path for entry in job.data]
    head: dict[str, object] = {"library_name": "peft" if adapters else "transformers"}
    if not is_local(job.model):
        head["base_model"] = job.model
    if hub := [entry.path for entry in job.data if not is_local(entry.path)]:
        head["datasets"] = hub
    head["pipeline_tag"] = (
        "text-classification" if job.rewards else "text2text-generation" if pairs else "text-generation"
    )
    head["tags"] = [
        "offmate",
        *(["lora"] if job.method == "lora" else []),
        *([job.preference] if job.preference is not None else []),
    ]
    rows = job.slice_rows * job.gradient_accumulation_steps
    event_at = {(event["event"], event["step"]): event for event in events}
    last, evaluation = event_at.get(("step", step), {}), event_at.get(("eval", step), {})
    results = [
        ", ".join((f"- {label}: {value:.4f}", *pair_words(event, prefix)))
        for label, event, prefix in (
            ("loss of the last step", last, ""),
            ("loss of the evaluation", evaluation, "eval_"),
        )
        if isinstance(value := event.get(f"{prefix}loss"), (int, float))
    ]
    return "\n".join(
        [
            "---",
            yaml.safe_dump(head, sort_keys=False, allow_unicode=True).rstrip(),
            "---",
            "",
            f"# {job.run_name or f'{base}, fine-tuned'}",
            "",
            f"{'Adapters for' if adapters else 'Made from'} {base}, trained on {', '.join(data)} "
            f"in {counted(step, 'step')} of {counted(rows, job.unit)} by offmate{_version()}.",
            "",
            *([_preferences(job, adapters), ""] if job.preference is not None else []),
            *([stops, ""] if stops else []),
            *results,
            *([""] if results else []),
            "| key | value |",
            "|---|---|",
            *_lines(job),
            "",
        ]
    )


def _preferences(job: Job, adapters: bool) -> str:
    """A sentence on how the job learned from preferences. `adapters`: the model's folder has adapters alone."""
    assert job.preference is not None
    if job.rewards:
        return "\n".join(
            (
                "It is a reward model: a sequence classifier whose one number says how good a text is. Give it a "
                "prompt with an answer as it was trained, with the end token.",
                "",
                "```python",
                *_LOADS_REWARDS[adapters],
                "```",
            )
        )
    text = f"It learned from preferences by {_LOSSES[job.preference]} with beta {job.preference_beta:g}"
    if not job.refers:
        return f"{text}, without a reference model."
    if job.ref_model is None:
        return f"{text}; the reference is the model as it was before this training."
    return f"{text}; the reference is {Path(job.ref_model).name if is_local(job.ref_model) else job.ref_model}."


def _lines(job: Job) -> Iterator[str]:
    """The lines of the table of the job's keys."""
    optimizer_keys = frozenset(OPTIMIZERS[job.optim].keys)
    always, never = _ALWAYS | optimizer_keys, _NEVER | (OPTIMIZER_KEYS - optimizer_keys)
    for key, value in job.model_dump(mode="json").items():
        default = Job.model_fields[key].default
        if key in never or not (getattr(job, key) != default or (key in always and value is not None)):
            continue
        if key == "adapter_name_or_path" or (key == "ref_model" and is_local(value)):
            value = Path(value).name
        text = " ".join((value if isinstance(value, str) else shown(value)).split()).replace("|", "\\|")
        yield f"| {key} | {text} |"


def _version() -> str:
    try:
        return f" {version('offmate')}"
    except PackageNotFoundError:  # run from its folder
        return ""
