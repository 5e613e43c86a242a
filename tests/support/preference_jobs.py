"""Jobs that learn a tiny model from preferences."""

from __future__ import annotations

from pathlib import Path

from planner.job.schema import Job
from tests.support.lora_jobs import model_folder
from tests.support.texts import make_job, write_jsonl

WORDS = ("red", "a much longer answer", "green and blue", "no", "perhaps tomorrow", "yes", "seven", "of course not")


def pairs(count: int) -> list[dict[str, str]]:
    return [
        {
            "prompt": f"Question {number}: {'why ' * (number % 3)}",
            "chosen": WORDS[number % len(WORDS)],
            "rejected": WORDS[(3 * number + 1) % len(WORDS)],
        }
        for number in range(count)
    ]


def answers(count: int) -> list[dict[str, object]]:
    return [
        {"prompt": pair["prompt"], "completion": pair["chosen"], "label": number % 3 != 1}
        for number, pair in enumerate(pairs(count))
    ]


def preference_job(tmp_path: Path, name: str = "llama", *, preference: str | None = "dpo", **keys: object) -> Job:
    small = {
        "preference": preference,
        "max_length": 48,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
    }
    records = answers(9) if preference == "kto" else pairs(9)
    data = write_jsonl(tmp_path / "data.jsonl", records)
    return make_job(model_folder(tmp_path / "model", name), data, **{**small, **keys})
