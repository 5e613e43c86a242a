"""Tokens of a run's first start, used again, or made again."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from planner.errors import UserError
from planner.job.frozen import freeze
from tests.support.texts import byte_tokenizer, make_job, sentences, tiny_llama_folder, write_jsonl
from worker.data.batches import Batches


def rows(data: Batches) -> list[list[int]]:
    """The rows of the first step."""
    return [row.tolist() for batch in data.step(0) for row in batch["input_ids"]]


def test_tokens_of_the_first_start_are_used_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    job = make_job(tiny_llama_folder(tmp_path / "m"), write_jsonl(tmp_path / "d.jsonl", sentences(6)), max_length=64)
    first = Batches(job, byte_tokenizer(), tmp_path / "data")
    write_jsonl(tmp_path / "d.jsonl", [{"text": "something else"}])
    second = Batches(job, byte_tokenizer(), tmp_path / "data")
    assert rows(first) == rows(second)
    assert first.fingerprint == second.fingerprint
    assert "as tokenized at the first start" in caplog.text


def test_damaged_tokens_are_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = make_job(tiny_llama_folder(tmp_path / "m"), write_jsonl(tmp_path / "d.jsonl", sentences(6)), max_length=64)
    first = rows(Batches(job, byte_tokenizer(), tmp_path / "data"))
    file = tmp_path / "data/tokens.npy"
    file.write_bytes(file.read_bytes()[:-3] + b"\xff\xff\xff")
    assert rows(Batches(job, byte_tokenizer(), tmp_path / "data")) == first
    assert "is damaged; tokenizing again" in caplog.text


def test_tokens_of_another_revision_are_not_taken(tmp_path: Path) -> None:
    folder = tiny_llama_folder(tmp_path / "model")
    data = write_jsonl(tmp_path / "data.jsonl", sentences(6))
    for key in ("model_revision", "tokenizer_revision"):
        job, kept = make_job(folder, data, max_length=64), tmp_path / key
        Batches(job, byte_tokenizer(), kept)
        write_jsonl(data, sentences(5))
        other = Batches(job.model_copy(update={key: "0" * 40}), byte_tokenizer(), kept)
        assert other.fingerprint == Batches(job, byte_tokenizer(), tmp_path / "anew").fingerprint
        write_jsonl(data, sentences(6))


def test_damaged_tokens_are_made_again_from_the_same_data_or_not_at_all(tmp_path: Path) -> None:
    folder = tiny_llama_folder(tmp_path / "model")
    data = write_jsonl(tmp_path / "data.jsonl", sentences(4))
    other = write_jsonl(tmp_path / "other.jsonl", sentences(2))
    job = make_job(folder, data, eval_dataset=str(other), max_length=64, per_device_train_batch_size=2)
    before, kept = freeze(job), tmp_path / "run" / "data"

    def made() -> str:
        return Batches(job, byte_tokenizer(), kept, before).fingerprint

    fingerprint = made()
    (kept / "tokens.npy").write_bytes(b"torn")
    assert made() == fingerprint
    write_jsonl(data, sentences(5))
    assert made() == fingerprint, "the tokens are there: nobody reads the files"
    (kept / "trained.npy").unlink()
    with pytest.raises(UserError) as refused:
        made()
    assert refused.value.code == "data-changed" and refused.value.numbers[0].startswith(f"{data}: ")
    write_jsonl(data, sentences(4))
    assert made() == fingerprint
    data.unlink()
    (kept.with_name("eval-data") / "ends.npy").unlink()
    assert made() == fingerprint, "only what is damaged is read again"
