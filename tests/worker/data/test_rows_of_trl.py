"""Rows of a file of TRL's: their tokens, and which of these are learned, are what TRL's trainer makes of the data."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from planner.errors import UserError
from planner.job.data_check import check_data
from planner.job.schema import Job
from planner.models.tokenizer import load_tokenizer
from tests.support.texts import byte_tokenizer, tiny_llama_folder, write_jsonl
from tests.support.tiny_models import make_model
from tests.worker.data.test_chat import FOLDER
from worker.data.batches import Batches

Row = tuple[tuple[int, ...], tuple[int, ...]]
TEMPLATES = ["qwen3", "qwen3_5_think", "llama3"]


def said(*contents: str) -> list[dict[str, str]]:
    """Turns of user and assistant, one after the other."""
    roles = ("user", "assistant") * len(contents)
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


TALK = said("hi", "yes", "so?", "no")
TALKS = [TALK, said("2+2?", "four"), [{"role": "system", "content": "Be brief."}, *TALK]]
DATA: dict[str, list[dict[str, Any]]] = {
    "conversations": [{"messages": talk} for talk in TALKS],
    "prompts and completions": [
        *({"prompt": talk[:-1], "completion": talk[-1:]} for talk in TALKS),
        {"prompt": TALK[:1], "completion": TALK[1:]},
    ],
    "pairs of texts": [{"prompt": "2+2=", "completion": "4"}, {"prompt": "so ", "completion": "no<eos>"}],
    "texts": [{"text": "hello"}, {"text": "once more<eos>"}, {"text": " a\n"}],
}


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(chat_template=(FOLDER / f"{template}.jinja").read_text("utf-8"))
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    return tokenizer


def rows_of_trl(tmp_path: Path, records: list[dict[str, Any]], template: str, **keys: Any) -> list[Row]:
    """What its trainer makes of the records. Raises what it raises for keys that it does not take together."""
    config = SFTConfig(output_dir=str(tmp_path / "trl"), use_cpu=True, report_to=[], bf16=False, **keys)
    model = make_model("llama", vocabulary=300, dropout=0.0)
    trainer = SFTTrainer(
        model, config, train_dataset=Dataset.from_list(records), processing_class=tokenizer_of(template)
    )
    return sorted((tuple(row["input_ids"]), tuple(row["labels"])) for row in trainer.train_dataset)


def job_of(tmp_path: Path, records: list[dict[str, Any]], template: str, **keys: Any) -> Job:
    tokenizer_of(template).save_pretrained(tiny_llama_folder(tmp_path / "model", vocabulary=300))
    write_jsonl(tmp_path / "data.jsonl", records)
    file = {"model_name_or_path": "model", "dataset_name": "data.jsonl", "bf16": False, **keys}
    return Job.parse(yaml.safe_dump(file), tmp_path)


def rows_here(job: Job) -> list[Row]:
    batches = Batches(job, load_tokenizer(job))
    rows: list[Row] = []
    for number in range(batches.rows):
        pieces = [*batches._rows.pieces(number)]
        ids, learned = ([value for piece in pieces for value in piece[k].tolist()] for k in (0, 1))
        rows.append((tuple(ids), tuple(i if there else -100 for i, there in zip(ids, learned, strict=True))))
    return sorted(rows)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("assistant", "completion"), [*product([False, True], [None, True, False])])
def test_what_is_learned_by_both_of_trls_keys_is_what_trl_learns_or_is_refused_as_there(
    tmp_path: Path, assistant: bool, completion: bool | None, data: str, template: str
) -> None:
    keys = {"assistant_only_loss": assistant, "completion_only_loss": completion}
    job = job_of(tmp_path, DATA[data], template, **keys)
    try:
        expected = rows_of_trl(tmp_path, DATA[data], template, **keys)
    except ValueError as error:
        assert assistant and "not conversational" in str(error)
        for look in (check_data, rows_here):
            with pytest.raises(UserError) as refused:
                look(job)
            assert refused.value.code == "no-turns" and f"train_on: {job.train_on}" in refused.value.what
        return
    check_data(job)
    assert rows_here(job) == expected and any(label != -100 for _, labels in expected for label in labels)


def test_the_prompts_answers_are_learned_where_trl_learns_them(tmp_path: Path) -> None:
    keys = {"assistant_only_loss": True, "completion_only_loss": False}
    (row,) = rows_here(job_of(tmp_path, DATA["prompts and completions"][:1], "qwen2_5", **keys))
    learned = "".join(byte_tokenizer().decode([label]) for label in row[1] if label != -100)
    assert learned == "\nyes<|im_end|>\n\nno<|im_end|>\n"


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
@pytest.mark.parametrize("data", ["conversations", "texts"])
def test_packed_rows_are_trls(tmp_path: Path, data: str, strategy: str) -> None:
    records = {
        "texts": [{"text": "a" * length} for length in (3, 5, 8, 13, 21, 30, 9, 17, 26)],
        "conversations": [{"messages": said("a" * length, "b" * length)} for length in (1, 3, 5, 8, 13, 2, 10)],
    }[data]
    longest = 32 if data == "texts" else 128
    keys = {"packing": True, "packing_strategy": strategy, "max_length": longest}
    expected = rows_of_trl(tmp_path, records, "qwen3", **keys)
    assert 1 < len(expected) < len(records)
    assert rows_here(job_of(tmp_path, records, "qwen3", **keys)) == expected
