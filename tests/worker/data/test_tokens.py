"""Rows that are tokenized already are learned as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from planner.data.entry import DataEntry
from planner.errors import UserError
from planner.job.data_check import check_data
from planner.job.schema import Job
from tests.support.texts import byte_tokenizer, make_job, tiny_llama_folder, write_jsonl
from worker.data.corpus import load_corpus


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_folder(tmp_path_factory.mktemp("model"))


def learned(job: Job, folder: Path) -> list[tuple[list[int], list[int]]]:
    """Of each document its tokens, and the numbers of those that are learned."""
    check_data(job)
    corpus = load_corpus(job, byte_tokenizer(), folder / "data")
    pieces = zip(np.split(corpus.tokens, corpus.ends[:-1]), np.split(corpus.trained, corpus.ends[:-1]), strict=True)
    return [(tokens.tolist(), np.flatnonzero(trained).tolist()) for tokens, trained in pieces]


@pytest.mark.parametrize(
    ("more", "of_it"),
    [
        ({}, [0, 1, 2, 3]),
        ({"labels": [-100, -100, 7, 8]}, [2, 3]),
        ({"labels": [-100, -100, 7, 8], "completion_mask": [1, 1, 1, 1]}, [2, 3]),
        ({"completion_mask": [0, 1, 1, 1]}, [1, 2, 3]),
        ({"completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 0, 1, 1]}, [2, 3]),
        ({"position_ids": [0, 1, 2, 3]}, [0, 1, 2, 3]),
    ],
)
def test_tokens_are_taken_without_another_and_learned_where_they_say(
    more: dict[str, Any], of_it: list[int], model: Path, tmp_path: Path
) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [5, 6, 7, 8], **more}])
    assert learned(make_job(model, lines), tmp_path) == [([5, 6, 7, 8], of_it)]
    of_pairs = make_job(model, lines, train_on="pairs")
    assert learned(of_pairs, tmp_path) == [([5, 6, 7, 8], of_it)]


def test_prompts_are_learned_too_where_all_is_but_never_what_has_no_label(model: Path, tmp_path: Path) -> None:
    rows = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "completion_mask": [0, 0, 1], "assistant_masks": None},
        {"input_ids": [5, 6, 7], "labels": None, "completion_mask": [0, 0, 1], "assistant_masks": None},
        {"input_ids": [5, 6, 7], "labels": None, "completion_mask": [0, 0, 1], "assistant_masks": [0, 1, 1]},
    ]
    lines = write_jsonl(tmp_path / "a.jsonl", rows)
    found = learned(make_job(model, lines, train_on="all"), tmp_path)
    assert [numbers for _, numbers in found] == [[1, 2], [0, 1, 2], [1, 2]]


def test_of_tokens_beside_texts_it_must_be_said_which_are_meant(model: Path, tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [5, 6], "text": "hi"}])
    with pytest.raises(UserError, match="have input_ids, and text beside them") as refused:
        learned(make_job(model, lines), tmp_path)
    assert refused.value.code == "unknown-columns" and "type: tokens" in refused.value.hint
    for entry, tokens in (({"type": "tokens"}, [5, 6]), ({"columns": {"input_ids": ""}}, [71, 72, 256])):
        job = make_job(model, lines).model_copy(update={"dataset": (DataEntry(path=str(lines), **entry),)})
        assert learned(job, tmp_path)[0][0] == tokens


def test_padding_on_either_side_is_left_out(model: Path, tmp_path: Path) -> None:
    rows = [
        {"input_ids": [0, 5, 6], "labels": [-100, -100, 6], "attention_mask": [0, 1, 1]},
        {"input_ids": [5, 6, 257], "labels": [-100, 6, -100], "attention_mask": [1, 1, 0]},
        {"input_ids": [257], "labels": [-100], "attention_mask": [0]},
    ]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    assert learned(make_job(model, tmp_path / "saved"), tmp_path) == [([5, 6], [1])] * 2


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"input_ids": [5, 6], "labels": [5]}, "column labels has 1 numbers for 2 of input_ids"),
        ({"input_ids": [5, 6], "labels": [5, 7]}, "one is 7 for 6"),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, "attention_mask leaves out tokens that are no padding"),
        ({"input_ids": "5 6"}, 'column input_ids is a list of whole numbers, this is "5 6"'),
        ({"input_ids": [5, 6.0]}, "column input_ids is a list of whole numbers"),
        ({"input_ids": [5, 260]}, "input_ids has 260, and the tokenizer has the tokens 0 to 259"),
    ],
)
def test_tokens_that_cannot_be_learned_as_they_are_break_their_record(
    record: dict[str, Any], words: str, model: Path, tmp_path: Path
) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [5, 6]}, record])
    with pytest.raises(UserError) as refused:
        learned(make_job(model, lines), tmp_path)
    assert refused.value.code == "broken-record"
    assert refused.value.numbers[0].startswith("line 2 of a.jsonl: ") and words in refused.value.numbers[0]
    assert learned(make_job(model, lines, broken_rows="skip"), tmp_path) == [([5, 6], [0, 1])]
