"""Which tokens of preferences stand in which line of a batch, what is cut, and what is left out."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from planner.errors import UserError
from tests.support.preference_jobs import preference_job
from tests.support.texts import byte_tokenizer, write_jsonl
from worker.data.batches import Batches


def batches_of(tmp_path: Path, records: list[dict[str, object]], **keys: object) -> Batches:
    job = preference_job(tmp_path, **keys)
    write_jsonl(tmp_path / "data.jsonl", records)
    return Batches(job, byte_tokenizer())


def lines(batches: Batches) -> list[tuple[str, str]]:
    """The text and the scored text of each line of all rows: first lines, then second ones."""
    (rows, *_), tokenizer = batches.preferences, byte_tokenizer()
    batch = rows.batch(np.arange(len(rows)))
    found = []
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        scored = [label for label in labels if label >= 0]
        found.append(tuple(tokenizer.decode(tokens, skip_special_tokens=True) for tokens in (ids, scored)))
    return found


def test_chosen_lines_come_before_rejected_ones_and_answers_alone_are_scored(tmp_path: Path) -> None:
    records = [{"prompt": f"{n}? ", "chosen": f"yes{n}", "rejected": f"no{n}"} for n in range(2)]
    assert lines(batches_of(tmp_path, records)) == [
        ("0? yes0", "yes0"),
        ("1? yes1", "yes1"),
        ("0? no0", "no0"),
        ("1? no1", "no1"),
    ]


def test_a_prompt_with_its_answer_is_cut_at_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = [{"prompt": "Say: ", "chosen": "abcdefgh", "rejected": "xy"}]
    with caplog.at_level(logging.WARNING):
        assert lines(batches_of(tmp_path, records, max_length=8)) == [("Say: abc", "abc"), ("Say: xy", "xy")]
    assert "1 of 2 answers are longer than max_length 8, with their prompts, and cut" in caplog.text


def test_a_pair_whose_prompt_fills_the_row_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = [
        {"prompt": "A prompt that is long: ", "chosen": "a", "rejected": "b"},
        {"prompt": "? ", "chosen": "c", "rejected": "d"},
    ]
    with caplog.at_level(logging.WARNING):
        assert lines(batches_of(tmp_path, records, max_length=16)) == [("? c", "c"), ("? d", "d")]
    assert "1 of 2 pairs, with an answer that begins after max_length 16, are left out" in caplog.text
    assert "cut" not in caplog.text


def test_long_rows_drop_and_refuse(tmp_path: Path) -> None:
    records = [
        {"prompt": "? ", "chosen": "abcdefghijkl", "rejected": "b"},
        {"prompt": "? ", "chosen": "c", "rejected": "d"},
    ]
    assert lines(batches_of(tmp_path, records, max_length=8, long_rows="drop")) == [("? c", "c"), ("? d", "d")]
    with pytest.raises(UserError) as caught:
        batches_of(tmp_path, records, max_length=8, long_rows="refuse")
    assert caught.value.code == "rows-too-long"
    with pytest.raises(UserError) as caught:
        batches_of(tmp_path, records[:1], max_length=8, long_rows="drop")
    assert caught.value.code == "nothing-to-train"


def answers(batches: Batches) -> list[tuple[str, str]]:
    """The answer of each row, and the other one behind its prompt."""
    texts = [scored for _, scored in lines(batches)]
    return list(zip(texts[: len(texts) // 2], texts[len(texts) // 2 :], strict=True))


def test_other_answers_of_kto_are_those_of_the_row_before_in_groups_of_a_micro_batch(tmp_path: Path) -> None:
    records = [{"prompt": f"{n}? ", "completion": "abcde"[n], "label": n % 2 == 0} for n in range(5)]
    job = {"preference": "kto", "per_device_train_batch_size": 3}
    assert answers(batches_of(tmp_path, records, **job)) == [("a", "c"), ("b", "a"), ("c", "b"), ("d", "e"), ("e", "d")]
    one = {**job, "per_device_train_batch_size": 1}
    assert answers(batches_of(tmp_path, records, **one)) == [("a", "e"), ("b", "a"), ("c", "b"), ("d", "c"), ("e", "d")]


def test_with_kto_the_chosen_answers_of_pairs_come_before_the_rejected_ones(tmp_path: Path) -> None:
    records = [{"prompt": f"{n}? ", "chosen": "abc"[n], "rejected": "xyz"[n]} for n in range(3)]
    batches = batches_of(tmp_path, records, preference="kto")
    assert answers(batches) == [("a", "b"), ("b", "a"), ("c", "x"), ("x", "c"), ("y", "z"), ("z", "y")]
    (rows,) = batches.preferences
    assert rows.batch(np.arange(6))["desirable"].tolist() == [1, 1, 1, 0, 0, 0]


def test_the_shown_row_says_which_answer_is_which(tmp_path: Path) -> None:
    shown = batches_of(tmp_path, [{"prompt": "? ", "chosen": "yes", "rejected": "no"}]).shown(0)
    assert shown.marked(1000) == "[chosen] ? ⟦yes<eos>⟧\n[rejected] ? ⟦no<eos>⟧"
    assert (shown.tokens, shown.learned) == (2 * 2 + 4 + 3, 4 + 3)


def test_pairs_with_equal_answers_are_counted_and_refused_if_there_are_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = [{"prompt": "? ", "chosen": "yes", "rejected": other} for other in ("yes", "no")]
    with caplog.at_level(logging.WARNING):
        batches_of(tmp_path, records)
    assert "1 of 2 pairs have the same tokens as both answers" in caplog.text
    with pytest.raises(UserError) as caught:
        batches_of(tmp_path, records[:1])
    assert caught.value.code == "nothing-to-train"


def test_good_and_bad_answers_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = [{"prompt": "? ", "completion": "yes", "label": True}] * 3
    with caplog.at_level(logging.INFO):
        batches_of(tmp_path, records, preference="kto")
    assert "3 good answers and 0 bad" in caplog.text and "all answers are good" in caplog.text


@pytest.mark.parametrize("preference", ["dpo", "kto"])
def test_of_equal_records_the_first_is_kept(tmp_path: Path, preference: str) -> None:
    records = [
        {"prompt": "? ", "chosen": "yes", "rejected": "no"},
        {"prompt": "? ", "chosen": "no", "rejected": "yes"},
        {"prompt": "? ", "chosen": "yes", "rejected": "no"},
    ]
    batches = batches_of(tmp_path, records, preference=preference, dataset_exact_deduplication=True)
    assert batches.rows == (2 if preference == "dpo" else 4)
    (rows,) = batches.preferences
    if preference == "kto":
        assert rows.batch(np.arange(4))["desirable"].tolist() == [1, 1, 0, 0]
