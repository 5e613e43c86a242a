"""Documents that are cut as LLaMA-Factory cuts them."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from planner.job.schema import Job
from tests.support.texts import byte_tokenizer, make_job, tiny_llama_folder, write_jsonl
from worker.check.first_records import look
from worker.data.batches import Batches
from worker.data.sharing import Sharing, shares


def job(tmp_path: Path, records: list[dict[str, object]], **keys: object) -> Job:
    data = write_jsonl(tmp_path / "data.jsonl", records)
    return make_job(tiny_llama_folder(tmp_path / "model"), data, **{"long_rows": "share", **keys})


@pytest.mark.parametrize(
    ("prompt", "answer", "room", "kept"),
    [
        (100, 20, 80, (60, 20)),  # a short answer is whole
        (20, 100, 80, (20, 60)),  # a short prompt is
        (100, 300, 80, (20, 60)),  # of two long ones each has its part
        (100, 50, 80, (54, 26)),  # 26.67 of the answer, rounded down
        (100, 40, 80, (58, 22)),  # an answer of half the room is not short
        (40, 100, 80, (23, 57)),
        (30, 40, 80, (30, 40)),
        (0, 100, 80, (0, 80)),
        (100, 0, 80, (80, 0)),
        (100, 100, 1, (1, 0)),
        (0, 0, 0, (0, 0)),
    ],
)
def test_prompt_and_answer_share_the_room(prompt: int, answer: int, room: int, kept: tuple[int, int]) -> None:
    assert shares(prompt, answer, room) == kept


def test_turns_share_what_those_before_have_left(tmp_path: Path) -> None:
    learned = np.repeat([False, True, False, True, False, True, False], [3, 2, 30, 4, 5, 6, 1])
    ids = np.arange(len(learned), dtype=np.int32)
    sharing = Sharing(job(tmp_path, [{"text": "a"}], max_length=20))
    kept, trained = sharing.cut(ids, learned)
    assert kept.tolist() == [*range(5), *range(5, 16), *range(35, 39)]
    assert trained.tolist() == learned[kept].tolist() and len(kept) == 20
    for whole in (ids[:20], ids[:3]):
        assert sharing.cut(whole, learned[: len(whole)])[0] is whole


def test_the_answer_to_a_long_prompt_is_learned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    records: list[dict[str, object]] = [{"prompt": "p" * 100, "completion": "yes"}, {"prompt": "p", "completion": "c"}]
    its = job(tmp_path, records, max_length=32, per_device_train_batch_size=1)
    found = Batches(its, byte_tokenizer())
    assert {found.sample(), found.shown(1).marked(999)} == {"p" * 28 + "⟦yes<eos>⟧", "p⟦c<eos>⟧"}
    said = "1 of 2 documents are longer than max_length 32 and cut, prompts and answers (long_rows: share); 72 tokens"
    assert said in caplog.text
    assert Batches(its.model_copy(update={"long_rows": "cut"}), byte_tokenizer()).rows == 1
    look(job(tmp_path, records[:1], max_length=32), its.data, byte_tokenizer())


def test_tokens_that_were_kept_are_those_of_another_length_no_more(tmp_path: Path) -> None:
    records: list[dict[str, object]] = [{"prompt": "p" * 100, "completion": "yes"}]
    for length in (32, 64):
        found = Batches(job(tmp_path, records, max_length=length), byte_tokenizer(), tmp_path / "kept")
        assert found.shown(0).tokens == length


@pytest.mark.parametrize("packing", [True, "wrapped"])
def test_packed_documents_are_cut_and_a_stream_is_not(tmp_path: Path, packing: bool | str) -> None:
    records: list[dict[str, object]] = [{"prompt": "p" * 19, "completion": "yes"}, {"prompt": "p", "completion": "c"}]
    found = Batches(job(tmp_path, records, max_length=20, packing=packing), byte_tokenizer())
    assert found.tokens == (20 + 3 if packing is True else 23 + 3)


LLAMA_FACTORY = "model_name_or_path: model\nstage: sft\nfinetuning_type: full\ndataset: text.jsonl\n"


def test_long_rows_of_llama_factory_share_their_room_where_prompts_are_told_from_answers(tmp_path: Path) -> None:
    tiny_llama_folder(tmp_path / "model")
    write_jsonl(tmp_path / "text.jsonl", [{"text": "a"}])
    said = "with train_on_prompt long rows are cut at their end; LLaMA-Factory cuts prompt and answer in proportion"
    for lines, long_rows, told in (
        ("", "share", False),
        ("long_rows: cut\n", "cut", False),
        ("train_on_prompt: true\n", "share", True),
        ("train_on_prompt: true\nlong_rows: cut\n", "cut", False),
    ):
        job, notes = Job.parse_with_notes(LLAMA_FACTORY + lines, tmp_path)
        assert (job.long_rows, any(said in note for note in notes)) == (long_rows, told)
    assert Job.parse(LLAMA_FACTORY.replace("sft", "pt"), tmp_path).long_rows == "cut"
