"""Which tokens a step trains on."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers.trainer_pt_utils import LengthGroupedSampler

from planner.errors import UserError
from planner.models.hf_model import sample_batch
from tests.support.texts import byte_tokenizer, make_job, sentences, tiny_llama_folder, write_jsonl
from tests.support.tiny_models import make_model
from worker.data.batches import Batches
from worker.data.padding import IGNORED, buckets
from worker.data.seeds import epoch_seed


def batches(tmp_path: Path, records: list[dict], **keys: object) -> Batches:
    model = tiny_llama_folder(tmp_path / "model")
    return Batches(make_job(model, write_jsonl(tmp_path / "data.jsonl", records), **keys), byte_tokenizer())


def rows(data: Batches, step: int) -> list[tuple[int, ...]]:
    """The rows of a step without their padding."""
    return [
        tuple(ids[: int((labels != IGNORED).nonzero()[-1]) + 1].tolist())
        for batch in data.step(step)
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]


def encoded(record: dict[str, str]) -> tuple[int, ...]:
    return (*byte_tokenizer()(record["text"])["input_ids"], 256)


def test_short_documents_and_those_that_came_before_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    texts = ["aaaa", "bb", "aaaa", "aaaax", "aaaay", "bb", "cccc"]
    keys = {"min_sample_len": 4, "dataset_exact_deduplication": True, "per_device_train_batch_size": 1}
    data = batches(tmp_path, [{"text": text} for text in texts], max_length=8, **keys)
    whole = sorted(encoded({"text": text}) for text in ("aaaa", "aaaax", "aaaay", "cccc"))
    assert sorted(rows(data, step)[0] for step in range(4)) == whole and data.rows == 4
    assert "2 of 7 documents have fewer than 4 tokens" in caplog.text
    assert "1 of 7 documents came before" in caplog.text
    cut = batches(tmp_path, [{"text": text} for text in texts], max_length=4, **keys)
    assert sorted(rows(cut, step)[0] for step in range(2)) == sorted(
        encoded({"text": text})[:4] for text in ("aaaa", "cccc")
    ), "as they are once they are cut"
    assert batches(tmp_path, [{"text": text} for text in texts], per_device_train_batch_size=1).rows == 7


def test_every_epoch_shows_every_row_once_in_its_own_order(tmp_path: Path) -> None:
    records = sentences(12)
    data = batches(tmp_path, records, max_length=64, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    first = [row for step in range(3) for row in rows(data, step)]
    second = [row for step in range(3, 6) for row in rows(data, step)]
    assert sorted(first) == sorted(second) == sorted(map(encoded, records))
    assert first != second


def test_long_documents_are_cut_left_out_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = [{"text": "short"}, {"text": "much too long"}]
    keys = {"max_length": 8, "per_device_train_batch_size": 1}
    assert len(batches(tmp_path, records, **keys)._rows) == 2
    caplog.set_level(logging.WARNING)
    left = batches(tmp_path, records, long_rows="drop", **keys)
    assert [rows(left, step) for step in range(2)] == [[encoded(records[0])]] * 2
    assert "1 of 2 documents are longer than max_length 8 and left out (long_rows: drop)" in caplog.text
    with pytest.raises(UserError, match="longer than max_length") as refused:
        batches(tmp_path, records, long_rows="refuse", **keys)
    assert refused.value.code == "rows-too-long"
    assert refused.value.numbers == ("1 of 2, the longest 14 tokens; max_length is 8",)


def test_a_step_is_the_same_whatever_was_asked_before(tmp_path: Path) -> None:
    keys = {"max_length": 64, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    one, other = (batches(tmp_path, sentences(7), **keys) for _ in range(2))
    in_order = [rows(one, step) for step in range(6)]
    assert [rows(other, step) for step in reversed(range(6))] == in_order[::-1]


def test_the_distinct_tokens_are_the_most_that_any_step_has(tmp_path: Path) -> None:
    keys = {"max_length": 64, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "num_train_epochs": 2}
    data = batches(tmp_path, sentences(20), **keys)
    steps = [[batch["input_ids"] for batch in data.step(step)] for step in range(data.total_steps)]
    wanted = [max(len(torch.cat([*map(torch.flatten, ids[: k + 1])]).unique()) for ids in steps) for k in range(3)]
    assert data.distinct_tokens() == wanted


def test_another_seed_gives_another_order(tmp_path: Path) -> None:
    one, other = (batches(tmp_path, sentences(12), max_length=64, seed=seed) for seed in (1, 2))
    assert rows(one, 0) != rows(other, 0)


def test_a_step_that_an_epoch_cannot_fill_goes_on_into_the_next(tmp_path: Path) -> None:
    data = batches(tmp_path, sentences(5), max_length=64, per_device_train_batch_size=2, num_train_epochs=2)
    assert (data.steps_per_epoch, data.total_steps) == (2.5, 5)
    seen = [row for step in range(5) for row in rows(data, step)]
    assert sorted(seen) == sorted([encoded(r) for r in sentences(5)] * 2)


def test_a_dataset_smaller_than_a_step_fills_it_by_repeating(tmp_path: Path) -> None:
    data = batches(tmp_path, sentences(1), max_length=64, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert rows(data, 0) == [encoded(sentences(1)[0])] * 4


@pytest.mark.parametrize(("epochs", "steps"), [(1, 8), (0.1, 1), (0.3, 3), (3.0, 23)])
def test_total_steps_are_what_the_epochs_need(tmp_path: Path, epochs: float, steps: int) -> None:
    data = batches(tmp_path, sentences(30), max_length=64, per_device_train_batch_size=4, num_train_epochs=epochs)
    assert data.total_steps == steps


def test_max_steps_decides_the_length(tmp_path: Path) -> None:
    assert batches(tmp_path, sentences(3), max_length=64, max_steps=17).total_steps == 17


def test_padding_is_on_the_right_and_never_learned(tmp_path: Path) -> None:
    data = batches(tmp_path, [{"text": "abc"}, {"text": "a longer one"}], max_length=64, per_device_train_batch_size=2)
    (batch,) = data.step(0)
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 16)
    assert batch["input_ids"][1].tolist() == [*byte_tokenizer()("abc")["input_ids"], 256, *[257] * 12]
    assert batch["labels"][1].tolist() == [*byte_tokenizer()("abc")["input_ids"], 256, *[IGNORED] * 12]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64


def test_an_attention_mask_has_a_one_for_each_token_and_a_zero_for_padding(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [{"text": "abc"}, {"text": "a longer one"}])
    job = make_job(tiny_llama_folder(tmp_path / "model"), data, max_length=64, per_device_train_batch_size=2)
    (batch,) = Batches(job, byte_tokenizer(), masked=True).step(0)
    tokens = [len(byte_tokenizer()(text)["input_ids"]) + 1 for text in ("a longer one", "abc")]
    assert batch["attention_mask"].tolist() == [[1] * count + [0] * (16 - count) for count in tokens]


def test_lengths_are_few_and_a_third_of_one_at_most_is_padding() -> None:
    assert (buckets(64), buckets(10), buckets(2)) == ((16, 24, 32, 48, 64), (3, 4, 5, 8, 10), (1, 2))
    assert buckets(512) == (64, 96, 128, 192, 256, 384, 512)
    for most in (64, 1000, 4096, 100_000):
        found = buckets(most)
        assert found[-1] == most and len(found) < 24
        for size in range(found[0], most + 1, 7):
            length = next(length for length in found if length >= size)
            assert 3 * (length - size) <= length + 3


def test_a_slice_of_short_rows_is_as_long_as_they_need(tmp_path: Path) -> None:
    records = [{"text": "x" * size} for size in (50, 58, 30, 70)]
    data = batches(tmp_path, records, max_length=4096, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert [batch["input_ids"].shape[1] for batch in data.step(0)] == [96, 64]


def test_rows_of_like_length_follow_each_other_in_the_order_of_transformers(tmp_path: Path) -> None:
    records = [{"text": "x" * (1 + number * 7 % 50)} for number in range(40)]
    keys = {"max_length": 64, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    data = batches(tmp_path, records, group_by_length=True, **keys)
    lengths = [len(encoded(record)) for record in records]
    for epoch in range(2):
        generator = torch.Generator().manual_seed(epoch_seed(42, epoch))
        order = list(LengthGroupedSampler(4, lengths=lengths, generator=generator))
        for step in range(10):
            wanted = sorted((lengths[row] for row in order[4 * step : 4 * step + 4]), reverse=True)
            assert [len(row) for row in rows(data, 10 * epoch + step)] == wanted
    mixed = batches(tmp_path, records, **keys)
    padded = [sum(b["input_ids"].numel() for step in range(10) for b in its.step(step)) for its in (data, mixed)]
    assert padded[0] < padded[1]


def test_short_rows_share_a_slice(tmp_path: Path) -> None:
    records = [{"text": "x" * size} for size in (3, 60, 4, 58)]
    data = batches(tmp_path, records, max_length=64, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert [batch["input_ids"].shape[1] for batch in data.step(0)] == [64, 16]


def test_long_documents_are_cut_and_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    data = batches(tmp_path, [{"text": "x" * 100}, {"text": "short"}], max_length=32)
    assert max(len(row) for row in rows(data, 0)) == 32
    assert "1 of 2 documents are longer than max_length 32 and cut; 69 of 107 tokens are not seen" in caplog.text


def test_packing_puts_whole_documents_into_rows_and_loses_none(tmp_path: Path) -> None:
    records = [{"text": "a" * length} for length in (19, 12, 11, 9, 8, 7, 5)]  # each with its end token one more
    data = batches(tmp_path, records, max_length=20, packing=True, per_device_train_batch_size=1)
    pieces = []
    assert data.steps_per_epoch == 4
    for step in range(4):
        (batch,) = data.step(step)
        starts = torch.nonzero(batch["position_ids"][0] == 0).flatten().tolist()
        assert all(batch["labels"][0, start] == IGNORED for start in starts)  # there is nothing before it to see
        pieces.append([end - start for start, end in pairwise([*starts, 20])])
    assert sorted(pieces) == [[10, 9, 1], [12, 8], [13, 6, 1], [20]]  # the ones are padding


def test_a_packed_rows_loss_is_that_of_its_documents_alone(tmp_path: Path) -> None:
    records = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "a", "completion": "bcd"}]
    packed = batches(tmp_path, records, max_length=16, packing=True, per_device_train_batch_size=1)
    alone = batches(tmp_path, records, max_length=16, per_device_train_batch_size=1)
    losses = {}
    for name, data, steps in (("packed", packed, 1), ("alone", alone, 2)):
        model = make_model("llama", vocabulary=260).eval()
        found = [batch for step in range(steps) for batch in data.step(step)]
        items = torch.tensor(data.num_items(found))
        loss = sum(model(**batch, num_items_in_batch=items).loss for batch in found)
        loss.backward()
        losses[name] = [float(loss), *(float(p.grad.norm()) for p in model.parameters())]
        assert len(found) == steps
    assert losses["packed"] == pytest.approx(losses["alone"], rel=1e-6)


def test_a_packed_row_has_the_labels_and_positions_of_trls(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    records = [{"prompt": "q" * (2 + k % 3), "completion": "abcdefghijk"[: 3 + 5 * k % 7]} for k in range(11)]
    data = batches(tmp_path, records, max_length=24, packing=True, per_device_train_batch_size=1)
    given = []
    for record in records:
        prompt, answer = (byte_tokenizer()(record[key])["input_ids"] for key in ("prompt", "completion"))
        ids = [*prompt, *answer, 256]
        given.append({"input_ids": ids, "labels": [IGNORED] * len(prompt) + ids[len(prompt) :]})
    packed = pack_dataset(Dataset.from_list(given), seq_length=24, strategy="bfd")
    collator = DataCollatorForLanguageModeling(pad_token_id=257, padding_free=True)

    def pieces(batch: dict[str, torch.Tensor]) -> list[tuple[object, ...]]:
        """Its documents: tokens, labels, positions; padding is none."""
        flat = {key: batch[key][0].tolist() for key in ("input_ids", "labels", "position_ids")}
        starts = [i for i, at in enumerate(flat["position_ids"]) if at == 0] + [len(flat["labels"])]
        cut = [tuple(tuple(values[a:b]) for values in flat.values()) for a, b in pairwise(starts)]
        return [piece for piece in cut if set(piece[1]) != {IGNORED}]

    theirs = [pieces(collator([row])) for row in packed]
    ours = [pieces(batch) for step in range(int(data.steps_per_epoch)) for batch in data.step(step)]
    assert len(ours) == len(theirs) and max(map(len, ours)) > 1
    assert sorted(piece for row in ours for piece in row) == sorted(piece for row in theirs for piece in row)


def test_wrapped_packing_cuts_all_documents_in_a_row_into_pieces(tmp_path: Path) -> None:
    records = sentences(9)
    data = batches(tmp_path, records, max_length=32, packing="wrapped", per_device_train_batch_size=1)
    stream = [token for record in records for token in encoded(record)]
    chunks = {tuple(stream[start : start + 32]) for start in range(0, len(stream), 32)}
    assert {row for step in range(len(chunks)) for row in rows(data, step)} == chunks


def test_items_are_the_labels_that_have_a_token_before_them(tmp_path: Path) -> None:
    data = batches(tmp_path, [{"text": "abc"}, {"text": "defgh"}], max_length=64, per_device_train_batch_size=2)
    assert data.num_items(data.step(0)) == 3 + 5  # each with its end token, less the first


def test_tokens_are_counted_without_padding(tmp_path: Path) -> None:
    data = batches(tmp_path, [{"text": "abc"}, {"text": "defgh"}], max_length=64, per_device_train_batch_size=2)
    assert data.num_tokens(0) == 4 + 6


def test_the_largest_shape_is_the_one_the_planner_sees(tmp_path: Path) -> None:
    job = make_job(tiny_llama_folder(tmp_path / "m"), write_jsonl(tmp_path / "d.jsonl", sentences(9)), max_length=20)
    largest = {tuple(b["input_ids"].shape) for b in Batches(job, byte_tokenizer()).step(0)}
    assert largest == {tuple(sample_batch(job)["input_ids"].shape)}


def test_the_sample_shows_what_is_learned(tmp_path: Path) -> None:
    data = batches(tmp_path, [{"prompt": "2+2=", "completion": "four"}], max_length=64)
    assert data.sample() == "2+2=⟦four<eos>⟧"


def test_other_data_have_another_fingerprint(tmp_path: Path) -> None:
    one, other = (batches(tmp_path, sentences(count), max_length=64) for count in (5, 6))
    assert one.fingerprint != other.fingerprint


def test_rows_with_nothing_to_learn_are_left_out_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = [{"prompt": "p" * 100, "completion": "never seen"}, {"prompt": "p", "completion": "c"}]
    data = batches(tmp_path, records, max_length=32)
    assert data.steps_per_epoch == 1 / 8
    assert "1 of 2 rows have nothing to learn and are left out" in caplog.text


def test_data_without_a_learned_token_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        batches(tmp_path, [{"prompt": "p" * 100, "completion": "never seen"}], max_length=32)
    assert str(caught.value) == (
        "The dataset has nothing to train on.\n"
        "  1 document, 111 tokens, 11 of them to be learned\n"
        "  1 row of at most 32 tokens, none with a learned token after its first\n"
        "  hint: use a larger max_length, data with completions, or train_on: all   [nothing-to-train]"
    )


def held_out(data: Batches) -> list[tuple[int, ...]]:
    """The rows to evaluate on, without their padding."""
    assert data.evaluation is not None
    found = [data.evaluation.batch(k) for k in range(len(data.evaluation))]
    for batch in found:
        assert int(batch["num_items_in_batch"]) == int((batch["labels"][:, 1:] != IGNORED).sum())
    return [
        tuple(row[mask].tolist()) for b in found for row, mask in zip(b["labels"], b["labels"] != IGNORED, strict=True)
    ]


@pytest.mark.parametrize(("size", "count"), [(3, 3), (0.25, 3), (0.01, 1)])
def test_held_out_rows_are_never_trained_on_and_the_same_every_time(tmp_path: Path, size: float, count: int) -> None:
    records = sentences(12)
    keys = {"max_length": 64, "per_device_train_batch_size": 1}
    one, other = (batches(tmp_path, records, val_size=size, **keys) for _ in range(2))
    assert len(held_out(one)) == count
    assert held_out(one) == held_out(other)
    trained = [row for step in range(12 - count) for row in rows(one, step)]
    assert sorted(trained + held_out(one)) == sorted(map(encoded, records))
    assert held_out(batches(tmp_path, records, val_size=size, seed=1, **keys)) != held_out(one)
    assert one.fingerprint != batches(tmp_path, records, **keys).fingerprint


def test_documents_that_are_packed_are_held_out_whole_and_never_trained_on(tmp_path: Path) -> None:
    records = [{"text": f"document {number:02}"} for number in range(20)]
    data = batches(tmp_path, records, val_size=6, packing=True, max_length=64, per_device_train_batch_size=1)

    def documents(packed: list[tuple[int, ...]]) -> list[int]:
        """Those of which all tokens lie in one of the rows, each as often as it lies there."""
        ids = [encoded(record)[1:] for record in records]  # the first one of a row, and of a document, is not learned
        return [
            number
            for row in packed
            for at in range(len(row))
            for number, its in enumerate(ids)
            if row[at : at + len(its)] == its
        ]

    steps = round(data.steps_per_epoch)
    trained = documents([row for step in range(steps) for row in rows(data, step)])
    evaluated = documents(held_out(data))
    assert len(evaluated) == 6 and sorted(trained + evaluated) == [*range(20)]


def test_a_dataset_to_evaluate_on_leaves_the_training_data_as_it_was(tmp_path: Path) -> None:
    other = write_jsonl(tmp_path / "other.jsonl", [{"text": "of its own kind"}, {"text": "short"}])
    plain = batches(tmp_path, sentences(6), max_length=64)
    data = batches(tmp_path, sentences(6), max_length=64, eval_dataset=str(other))
    assert held_out(data) == [encoded({"text": "of its own kind"}), encoded({"text": "short"})]
    assert data.fingerprint == plain.fingerprint


def test_a_val_size_that_takes_all_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)leaves nothing to train on.*6 rows, 6 of them.*val-size-too-large"):
        batches(tmp_path, sentences(6), val_size=6)
