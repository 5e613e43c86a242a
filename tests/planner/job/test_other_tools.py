"""Keys of other tools' files, one cause at a time: honoured, said to have no effect, or refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import UserError
from planner.job.schema import Job
from tests.support.texts import write_jsonl

START = {
    "axolotl": "base_model: model\ndatasets: [{path: text.jsonl, type: completion}]\nlearning_rate: 0.0002\n",
    "axolotl alone": "base_model: model\nlearning_rate: 0.0002\n",
    "LLaMA-Factory": "model_name_or_path: model\nstage: sft\ndataset: text.jsonl\n",
    "TRL": "model_name_or_path: model\ndataset_name: text.jsonl\n",
    "TRL alone": "model_name_or_path: model\n",
}


@pytest.fixture
def place(folder: Path) -> Path:
    (folder / "tiny").rename(folder / "model")
    (folder / "model" / "model.safetensors").touch()
    write_jsonl(folder / "more.jsonl", [{"text": "b"}])
    return folder


@pytest.mark.parametrize(
    ("tool", "lines", "told"),
    [
        (
            "axolotl alone", "pretraining_dataset: [{path: text.jsonl, skip: 3, split: 'train[5:]'}]\nmax_steps: 5",
            ["pretraining_dataset: skip is given, and split names a part, too; keep one of them"],
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_told_in_one_line_per_cause(
    tool: str, lines: str, told: list[str], place: Path
) -> None:  # fmt: skip
    with pytest.raises(UserError) as refused:
        Job.parse(f"{START[tool]}{lines}\n", place)
    numbers = [line.partition(": ")[2] if line.startswith("line ") else line for line in refused.value.numbers]
    assert numbers == told


@pytest.mark.parametrize(
    ("tool", "lines", "means"),
    [
        (
            "axolotl", "model_config: {output_router_logits: true, router_aux_loss_coef: null}",
            {"router_aux_loss_coef": "auto"},
        ),
        ("TRL", "use_peft: true\nlora_target_modules: [all-linear]", {"lora_target_modules": "all-linear"}),
    ],
)  # fmt: skip
def test_what_is_asked_for_is_what_the_job_has(tool: str, lines: str, means: dict[str, object], place: Path) -> None:
    job = Job.parse(f"{START[tool]}{lines}\n", place)
    assert {key: getattr(job, key) for key in means} == means
