"""What is learned is what the file says, in every kind of file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict, load_dataset
from pyarrow import parquet

from planner.errors import UserError
from planner.job.data_check import check_data
from planner.job.data_entry import DataEntry
from planner.job.local_data import local_data
from planner.job.reader import Reader
from tests.support.random_records import TEMPLATE, differs, found_in
from tests.support.texts import byte_tokenizer, make_job, tiny_llama_folder, write_jsonl
from worker.data.corpus import load_corpus
from worker.data.sources import open_source

SEEDS = 100
"""Of random data; `python -m tests.support.random_records` tries more."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_folder(tmp_path_factory.mktemp("model"))


def records_of(path: Path, split: str = "train") -> list[Any]:
    return [row.record for row in open_source(DataEntry(path=str(path), split=split)).rows()]


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    said = {"function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [said], **more}


def test_random_records_are_learned_as_they_are_written(model: Path) -> None:
    assert [found for seed in range(SEEDS) if (found := differs(seed, model)) is not None] == []


def test_answers_that_are_json_are_learned_with_their_quotes(model: Path, tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "hi"}]
    answers = ['[{"text": "Anna"}]', '"hi"', "3", "null"]
    records = [
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}
        for answer in answers
    ]
    found = found_in(model, write_jsonl(tmp_path / "a.jsonl", records))
    assert [learned for _, learned in found] == [[f"{answer}<|im_end|>"] for answer in answers]


def test_dates_are_text_where_all_are(model: Path, tmp_path: Path) -> None:
    records = [{"prompt": "When? ", "completion": f"2024-03-0{day}"} for day in (5, 6)]
    assert [learned for _, learned in found_in(model, write_jsonl(tmp_path / "a.jsonl", records))] == [
        ["2024-03-05"], ["2024-03-06"],
    ]  # fmt: skip
    chats = [{"messages": [{"role": "user", "content": "go"}, call({"date": f"2024-03-0{day}"})]} for day in (5, 6)]
    found = found_in(model, write_jsonl(tmp_path / "a.jsonl", chats))
    assert ['"date": "2024-03-05"' in found[0][1][0], '"date": "2024-03-06"' in found[1][1][0]] == [True, True]


@pytest.mark.parametrize("records", [1, 120_000])
def test_no_record_changes_another_in_whatever_file_or_piece_it_stands(
    records: int, model: Path, tmp_path: Path
) -> None:
    """`datasets` reads pieces of 10 MB, and takes a column's type from one of them."""
    plain = {"prompt": "a" * 100, "completion": 'b\n"c"', "n": None}
    lines = [*[json.dumps(plain)] * records, json.dumps({"prompt": "a", "completion": "d", "n": [1, "x"], "s": "t"})]
    (tmp_path / "data").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / "data" / name).write_text("\n".join(lines))
    rows = records_of(tmp_path / "data")
    assert len(rows) == 2 * (records + 1) and rows[-1] == json.loads(lines[-1])
    assert all(row == plain for row in (*rows[:records], *rows[records + 1 : -1]))


def test_keys_that_are_null_because_others_have_them_are_absent_in_tables(model: Path, tmp_path: Path) -> None:
    tools = [{"name": "f", "parameters": {"properties": {"city": {"type": "string"}}}}]
    others = [{"name": "g", "parameters": {"properties": {"path": {"type": "string", "enum": ["/a"]}}}}]
    records = [
        {"messages": [{"role": "user", "content": "go"}, call({"city": "Oslo"})], "tools": tools},
        {"messages": [{"role": "user", "content": "go"}, call({"path": "/a"})], "tools": others},
        {"messages": [{"role": "user", "content": "go"}, call({"path": "/b", "city": "Rome"})]},
    ]
    wanted = found_in(model, write_jsonl(tmp_path / "a.jsonl", records))
    table = pa.Table.from_pylist(records)
    parquet.write_table(table, tmp_path / "a.parquet")
    Dataset.from_list(records).save_to_disk(str(tmp_path / "saved"))
    for name in ("a.parquet", "saved"):
        found = found_in(model, tmp_path / name)
        assert found[:2] == wanted[:2]
        assert '{"city": "Rome", "path": "/b"}' in found[2][0], "a table has one order of keys"


def test_columns_of_json_in_tables_of_datasets_are_read_as_json(model: Path, tmp_path: Path) -> None:
    records = [
        {"messages": [{"role": "user", "content": "go"}, call({"city": "Oslo", "days": None, "n": 3})]},
        {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "yes"}]},
    ]
    lines = write_jsonl(tmp_path / "a.jsonl", records)
    made = load_dataset("json", data_files=str(lines), split="train", cache_dir=str(tmp_path / "cache"))
    made.to_parquet(str(tmp_path / "a.parquet"))
    made.save_to_disk(str(tmp_path / "saved"))
    assert "arrow.json" in str(parquet.read_schema(tmp_path / "a.parquet")), "else this says nothing"
    for name in ("a.parquet", "saved"):
        assert found_in(model, tmp_path / name) == found_in(model, lines)


def test_a_value_that_is_no_json_in_a_column_of_it_is_a_broken_record(model: Path, tmp_path: Path) -> None:
    texts = ['"a"', '{"a": 1', "1 2", '{"a": 1, "a": 2}', '"\\ud83d"', None]
    column = pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts))
    parquet.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    rows = list(Reader(local_data(tmp_path / "a.parquet")))
    assert [row.record for row in rows] == [{"text": "a"}, None, None, None, None, {}]
    assert [row.wrong.partition(":")[0] for row in rows[1:5]] == [
        "has a column of JSON with a value that is none", "has a column of JSON with more than one value",
        "has the key 'a' twice in one object", "has half of a surrogate pair, \\ud83d, which is no text",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt", "a.parquet"])
def test_a_file_that_is_written_anew_is_read_anew_whatever_its_time_of_change(
    name: str, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / name

    def learned(texts: list[str]) -> str:
        if name.endswith("parquet"):
            parquet.write_table(pa.table({"text": texts}), path)
        elif name.endswith("jsonl"):
            write_jsonl(path, [{"text": text} for text in texts])
        else:
            path.write_text("\n".join(texts if name.endswith("txt") else ["text", *texts]))
        os.utime(path, (1, 1))
        job, tokenizer = make_job(model, path, max_length=64), byte_tokenizer()
        corpus = load_corpus(job, tokenizer, tmp_path / "run" / str(len(texts)))
        return tokenizer.decode(corpus.tokens, skip_special_tokens=True)

    assert "Rome" in learned(["Rome"])
    said = learned(["Oslo", "Rome"])
    assert "Oslo" in said and said.index("Oslo") < said.index("Rome")


def test_a_byte_order_mark_is_no_text_and_line_ends_are_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert records_of(tmp_path / "a.txt") == [{"text": "one\r\ntwo\n"}]
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbftext,n\r\n"one\r\ntwo",007\r\nNA\r\n')
    assert records_of(tmp_path / "a.csv") == [{"text": "one\r\ntwo", "n": "007"}, {"text": "NA"}]


def test_parts_of_a_file_are_those_of_its_records(tmp_path: Path) -> None:
    lines = "".join(f'{{"text": "{number}"}}\n' + "{\n" * (number == 4) for number in range(10))
    (tmp_path / "a.jsonl").write_text(lines)

    def part(split: str) -> str:
        return "".join("!" if record is None else record["text"] for record in records_of(tmp_path / "a.jsonl", split))

    assert part("train") == "01234!56789"
    assert (part("train[:20%]"), part("train[3:6]"), part("train[-2:]")) == ("01", "34!5", "89")
    assert part("train[8:]+train[:2]") == "8901"


def test_a_saved_dataset_is_looked_at_when_it_is_handed_in(model: Path, tmp_path: Path) -> None:
    Dataset.from_dict({"body": ["a"]}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(UserError, match="found: body"):
        check_data(make_job(model, tmp_path / "saved"))
    DatasetDict({"train": Dataset.from_dict({"text": ["a"]})}).save_to_disk(str(tmp_path / "splits"))
    assert records_of(tmp_path / "splits" / "train") == [{"text": "a"}]


def test_records_of_a_file_that_is_an_array_are_looked_at_when_it_is_handed_in(model: Path, tmp_path: Path) -> None:
    records = [{"text": "a" * 1000}] * 40_000
    (tmp_path / "a.json").write_text(json.dumps([{"text": 4}, *records]))
    with pytest.raises(UserError, match=r"record 1 of a\.json: column text is text, this is '4'"):
        check_data(make_job(model, tmp_path / "a.json"))


def test_the_template_of_these_tests_shows_calls(model: Path, tmp_path: Path) -> None:
    assert "tool_calls" in TEMPLATE
    talk = [{"role": "user", "content": "go"}, call({"a": 1.0, "b": [None]})]
    (found,) = found_in(model, write_jsonl(tmp_path / "a.jsonl", [{"messages": talk}]))
    assert found[1] == ['CALL{"function": {"name": "f", "arguments": {"a": 1.0, "b": [null]}}}<|im_end|>']
