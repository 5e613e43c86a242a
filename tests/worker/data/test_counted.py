"""How long a plan takes rows to be: as long as they are, padding included, and not as long as they might be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from planner.job.rope_border import RopeBorder
from planner.job.schema import Job
from planner.models.hf_model import sample_batch
from planner.run.folder import RunFolder
from tests.support.texts import byte_tokenizer, make_job, tiny_llama_folder, write_jsonl
from worker.data.batches import Batches


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def texts(folder: Path, name: str, lengths: list[int]) -> Path:
    """Of so many tokens each, the end token among them."""
    return write_jsonl(folder / name, [{"text": "x" * (length - 1)} for length in lengths])


def job_of(folder: Path, **keys: Any) -> Job:
    data = texts(folder, "data.jsonl", [9, 45, 30, 12, 45, 20])
    model = tiny_llama_folder(folder / "model")
    return make_job(model, data, **{"max_length": 1024, "per_device_train_batch_size": 2, **keys})


def largest(data: Batches) -> tuple[int, int]:
    """The lengths of the largest slices that there are in two epochs and the evaluation."""
    steps = range(int(2 * data.steps_per_epoch) + 1)
    batches = [batch for step in steps for batch in data.step(step)]
    if data.evaluation is not None:
        batches += [data.evaluation.batch(number) for number in range(len(data.evaluation))]
    read, labels = (max(batch[key].shape[1] for batch in batches) for key in ("input_ids", "labels"))
    return read, labels


@pytest.mark.parametrize(
    ("keys", "longest", "length"),
    [
        ({}, 45, 64),
        ({"max_length": 40}, 40, 40),
        ({"max_length": 160}, 45, 60),
        ({"packing": True}, 161, 192),
        ({"packing": "wrapped"}, 161, 192),
        ({"max_length": 100, "packing": True}, 99, 100),
        ({"max_length": 20, "long_rows": "drop"}, 20, 20),
    ],
)
def test_a_plan_is_for_the_padding_of_the_longest_row(
    tmp_path: Path, keys: dict[str, Any], longest: int, length: int
) -> None:
    counted = (data := Batches(job_of(tmp_path, **keys), byte_tokenizer())).counted()
    assert (counted.longest, counted.lengths) == (longest, (length, length)) == (longest, largest(data))


@pytest.mark.parametrize("keys", [{"val_size": 1}, {"val_size": 0.5, "packing": True}])
def test_rows_that_are_held_out_count(tmp_path: Path, keys: dict[str, Any]) -> None:
    for seed in range(4):
        data = Batches(job_of(tmp_path, seed=seed, **keys), byte_tokenizer())
        assert data.counted().lengths == largest(data)


def test_rows_of_other_data_that_are_evaluated_on_count(tmp_path: Path) -> None:
    job = job_of(tmp_path, eval_dataset=[str(texts(tmp_path, "others.jsonl", [100]))])
    counted = (data := Batches(job, byte_tokenizer())).counted()
    assert (counted.longest, counted.lengths) == (100, (128, 128)) == (100, largest(data))


def test_padding_ends_where_the_models_frequencies_would_be_others(tmp_path: Path) -> None:
    for border, length in ((50, 50), (45, 45), (70, 64)):
        data = Batches(job_of(tmp_path), byte_tokenizer(), border=RopeBorder(border, by_length=True))
        assert data.counted().lengths == (length, length) == largest(data)


def test_of_pairs_the_longest_prompt_and_the_longest_completion_count_be_they_of_different_rows(tmp_path: Path) -> None:
    pairs = [{"prompt": "x" * a, "completion": "y" * b} for a, b in ((100, 3), (9, 60), (9, 9), (30, 30))]
    data = write_jsonl(tmp_path / "pairs.jsonl", pairs)
    keys = {"max_length": 1024, "max_target_length": 512, "per_device_train_batch_size": 4}
    job = make_job(tiny_llama_folder(tmp_path / "model"), data, **keys)
    lengths = (batches := Batches(job, byte_tokenizer(), pairs=True)).counted().lengths
    assert lengths == (128, 64) == largest(batches)
    shaped = job.with_lengths(lengths)
    assert (shaped.max_length, shaped.max_target_length) == lengths
    cut = Batches(job.model_copy(update={"max_length": 80, "max_target_length": 40}), byte_tokenizer(), pairs=True)
    assert cut.counted().lengths == (80, 40) == largest(cut)


def test_the_sample_that_is_planned_with_is_as_large_as_the_largest_slice(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    batch = sample_batch(job.with_lengths(Batches(job, byte_tokenizer()).counted().lengths))
    assert batch["input_ids"].shape == torch.Size([2, 64]) == batch["labels"].shape


def test_tokens_are_counted_where_a_step_may_have_several_slices(tmp_path: Path) -> None:
    data = Batches(job_of(tmp_path, gradient_accumulation_steps=2, max_steps=1), byte_tokenizer())
    assert data.counted().distinct_tokens == tuple(data.distinct_tokens()) != ()
    assert Batches(job_of(tmp_path), byte_tokenizer()).counted().distinct_tokens == ()


def test_what_an_earlier_version_counted_says_nothing_of_rows(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.read_counted() is None
    run.tokens.write_text('{"distinct_tokens": [20, 30]}\n')
    assert run.read_counted() is None
