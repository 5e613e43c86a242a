"""What is learned is what the file says, in every kind of file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict, load_dataset
from pyarrow import parquet

from planner.data.entry import DataEntry
from planner.data.local_data import local_data
from planner.data.reader import Reader
from planner.errors import UserError
from planner.job.data_check import check_data
from planner.job.frozen import freeze
from tests.support.random_records import TEMPLATE, differs, found_in
from tests.support.texts import byte_tokenizer, make_job, tiny_llama_folder, write_jsonl
from worker.data.corpus import load_corpus
from worker.data.documents import documents_of
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
        ["2024-03-05"],
        ["2024-03-06"],
    ]
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
    told = "has a value in a column of JSON that"
    assert [row.wrong for row in rows[1:5]] == [
        f"{told} is no JSON: Expecting ',' delimiter (character 8): {texts[1]}",
        f"{told} is JSON of more than one value: 1 2",
        f'{told} has the key "a" twice in one object: {texts[3]}',
        f"{told} has half of a surrogate pair, \\ud83d, which is no text: {texts[4]}",
    ]


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


def test_a_file_that_changes_while_it_is_read_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b"}])
    job = make_job(model, lines)

    def meanwhile(*given: Any) -> Iterator[Any]:
        lines.write_text('{"text": "c"}\n{"text": "b"}\n')
        yield from documents_of(*given)

    monkeypatch.setattr("worker.data.corpus.documents_of", meanwhile)
    with pytest.raises(UserError, match="other content") as refused:
        load_corpus(job, byte_tokenizer(), tmp_path / "run", freeze(job))
    assert refused.value.code == "data-changed" and not (tmp_path / "run").exists()


def test_a_byte_order_mark_is_no_text_and_line_ends_are_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert records_of(tmp_path / "a.txt") == [{"text": "one\r\ntwo\n"}]
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbftext,n\r\n"one\r\ntwo",007\r\nNA\r\n')
    assert records_of(tmp_path / "a.csv") == [{"text": "one\r\ntwo", "n": "007"}, {"text": "NA"}]


def test_a_cell_of_a_csv_file_may_be_longer_than_pythons_limit(tmp_path: Path) -> None:
    text = "long " * 50_000
    (tmp_path / "a.csv").write_text(f"text\n{text}\n")
    assert records_of(tmp_path / "a.csv") == [{"text": text}]


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
    with pytest.raises(UserError, match=r"record 1 of a\.json: column text is text, this is 4"):
        check_data(make_job(model, tmp_path / "a.json"))


def test_the_template_of_these_tests_shows_calls(model: Path, tmp_path: Path) -> None:
    assert "tool_calls" in TEMPLATE
    talk = [{"role": "user", "content": "go"}, call({"a": 1.0, "b": [None]})]
    (found,) = found_in(model, write_jsonl(tmp_path / "a.jsonl", [{"messages": talk}]))
    assert found[1] == ['CALL{"function": {"name": "f", "arguments": {"a": 1.0, "b": [null]}}}<|im_end|>']


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ("[" * 100_000, "which is nested too deeply"),
        ('[{"name": "\\ud800"}]', "which has half of a surrogate pair"),
        ('[{"name": "f", "name": "g"}]', 'which has the key "name" twice'),
        ('[{"name": "f"}] x', "which is JSON of more than one value"),
        ("[{", "which is no JSON"),
    ],
)
@pytest.mark.parametrize("column", ["tools", "function_call"])
def test_json_in_a_text_is_read_as_json_of_a_file_is(
    column: str, tools: str, words: str, model: Path, tmp_path: Path
) -> None:
    good = {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "yes"}]}
    called = {"messages": [*good["messages"], {"role": "function_call", "content": tools}]}
    broken = {**good, "tools": tools} if column == "tools" else called
    lines = write_jsonl(tmp_path / "a.jsonl", [good, broken])
    job = make_job(model, lines, chat_template=TEMPLATE, max_length=64)
    for read in (check_data, lambda its: load_corpus(its, byte_tokenizer(chat_template=TEMPLATE), tmp_path / "run")):
        with pytest.raises(UserError) as refused:
            read(job)
        assert refused.value.numbers[0].startswith("line 2 of a.jsonl: ") and words in refused.value.numbers[0]


def test_a_system_column_that_comes_late_is_read(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.job.data_check.MOST_BYTES", 200)
    talk = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    records = [*[{"conversations": talk}] * 9, {"conversations": talk, "system": "Be brief."}]
    found = found_in(model, write_jsonl(tmp_path / "a.jsonl", records))
    assert found[-1][0].startswith("<|im_start|>system\nBe brief.<|im_end|>") and len(found) == 10


def test_a_saved_dataset_has_the_columns_of_its_format(tmp_path: Path) -> None:
    saved = Dataset.from_dict({"text": ["a"], "messages": ["b"]})
    saved.set_format(columns=["text"])
    saved.save_to_disk(str(tmp_path / "saved"))
    assert open_source(DataEntry(path=str(tmp_path / "saved"))).columns == ("text",)
    assert records_of(tmp_path / "saved") == [{"text": "a"}]


def test_a_table_with_two_columns_of_one_name_is_refused(model: Path, tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
    with pytest.raises(UserError, match="a table has the column text twice"):
        check_data(make_job(model, tmp_path / "a.arrow"))


@pytest.mark.parametrize("listed", [pa.list_, pa.large_list, pa.list_view, pa.large_list_view])
def test_null_keys_are_absent_in_every_kind_of_list_of_a_table(listed: Any, tmp_path: Path) -> None:
    kind = pa.struct([("role", pa.dictionary(pa.int8(), pa.string())), ("content", pa.string()), ("name", pa.string())])
    talk = [{"role": "user", "content": "hi", "name": None}, {"role": "user", "content": None, "name": "x"}]
    few = pa.DictionaryArray.from_arrays(pa.array([0]), pa.array([talk[0]], kind))
    table = pa.table({"messages": pa.array([talk], listed(kind)), "one": few})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
    first, second = {"role": "user", "content": "hi"}, {"role": "user", "name": "x"}
    assert records_of(tmp_path / "a.arrow") == [{"messages": [first, second], "one": first}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_first_record_of_more_than_what_is_looked_at_is_read(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.job.data_check.MOST_BYTES", 1000)
    line = json.dumps({"prompt": "a" * 2000, "completion": "b"})
    (tmp_path / name).write_text(line if name == "a.jsonl" else f"[{line}]")
    assert found_in(model, tmp_path / name) == [("a" * 2000 + "b", ["b"])]
    (tmp_path / name).write_text(json.dumps({"other": "a" * 2000}))
    with pytest.raises(UserError, match="found: other"):
        check_data(make_job(model, tmp_path / name))


def test_calls_and_functions_as_openai_had_them_are_learned(model: Path, tmp_path: Path) -> None:
    called = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    talk = [{"role": "user", "content": "go"}, called, {"role": "function", "name": "f", "content": "1"}]
    lines = write_jsonl(tmp_path / "a.jsonl", [{"messages": talk, "functions": [{"name": "f"}]}])
    (found,) = found_in(model, lines)
    assert found[0].startswith('TOOLS[{"type": "function", "function": {"name": "f"}}]')
    assert found[1] == ['CALL{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}<|im_end|>']
    job = make_job(model, lines, chat_template="{% for m in messages %}{{ m.content }}<eos>{% endfor %}")
    with pytest.raises(UserError, match="does not show the tool_calls"):
        load_corpus(job, byte_tokenizer(chat_template=job.chat_template), tmp_path / "run")


@pytest.mark.parametrize("value", [date(2024, 3, 5), datetime(2024, 3, 5), Decimal("1.5"), b"x"])
def test_a_value_of_a_table_that_json_has_not_is_refused_in_calls_and_left_alone_elsewhere(
    value: object, model: Path, tmp_path: Path
) -> None:
    talk = [{"role": "user", "content": "go"}, call({"when": value})]
    parquet.write_table(pa.Table.from_pylist([{"messages": talk, "at": value}]), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="a message's tool_calls has a"):
        check_data(make_job(model, tmp_path / "a.parquet", chat_template=TEMPLATE))
    plain = [{"messages": [talk[0], {"role": "assistant", "content": "yes"}], "at": value, "more": {"at": value}}]
    parquet.write_table(pa.Table.from_pylist(plain), tmp_path / "a.parquet")
    assert found_in(model, tmp_path / "a.parquet")[0][1] == ["yes<|im_end|>"]


def test_a_call_that_a_template_leaves_out_is_refused(model: Path, tmp_path: Path) -> None:
    calls = [{"function": {"name": name, "arguments": {"a": name}}} for name in ("f", "g")]
    talk = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    lines = write_jsonl(tmp_path / "a.jsonl", [{"messages": talk}])
    for shown in ("m.tool_calls[0] | tojson", "m.tool_calls | map(attribute='function.name') | join"):
        said = f"{{{{ {shown} if m.tool_calls else m.content }}}}"
        template = f"{{% for m in messages %}}[{{{{ m.role }}}}]{said}{{% endfor %}}"
        for train_on in ("completions", "all"):
            job = make_job(model, lines, chat_template=template, train_on=train_on)
            with pytest.raises(UserError, match="does not show all calls of turn 2") as refused:
                load_corpus(job, byte_tokenizer(chat_template=template), tmp_path / "run")
            assert refused.value.code == "template-drops"


def test_a_part_of_an_answer_that_a_template_leaves_out_is_told(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")
    talk = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "<think>a</think>yes"}]
    lines = write_jsonl(tmp_path / "a.jsonl", [{"messages": talk}] * 3)
    job = make_job(model, lines, chat_template=template, train_on="all", max_length=512)
    load_corpus(job, byte_tokenizer(chat_template=template), tmp_path / "run")
    told = "data: the chat template leaves out a part of what answers say, which is not learned: of "
    assert [line for line in caplog.messages if "leaves out" in line] == [f'{told}"<think>a</think>yes"']
    caplog.clear()
    job = make_job(model, lines, chat_template="{{ messages | tojson }}")
    lines.write_text(json.dumps({"messages": [talk[0], talk[1] | {"content": 'say "yes"\nnow'}]}))
    load_corpus(job, byte_tokenizer(chat_template=job.chat_template), tmp_path / "another")
    assert [line for line in caplog.messages if "leaves out" in line] == [], "it is there as JSON"


def test_files_of_a_folder_that_would_be_left_out_or_are_of_other_splits_are_refused(
    model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.ndjson").write_text('{"text": "a"}\n')
    (folder / ".git").mkdir()
    for name in (".git/b.jsonl", ".hidden.jsonl", "dataset_infos.json"):
        (folder / name).write_text('{"text": "no"}\n')
    assert records_of(folder) == [{"text": "a"}]
    (folder / "b.jsonl.gz").write_bytes(b"")
    with pytest.raises(UserError, match=r"b\.jsonl\.gz, and packed files are not read"):
        check_data(make_job(model, folder))
    (folder / "b.jsonl.gz").rename(folder / "b.tsv")
    with pytest.raises(UserError, match=r"b\.tsv, and such tables are not read"):
        check_data(make_job(model, folder))
    (folder / "b.tsv").unlink()
    (folder / "test-00.jsonl").write_text('{"text": "held out"}\n')
    assert len(records_of(folder)) == 2, "nothing says that the others are to train on"
    (folder / "train-00.jsonl").write_text('{"text": "b"}\n')
    with pytest.raises(UserError, match=r"others by their names to test on: test-00\.jsonl"):
        check_data(make_job(model, folder))


def test_of_a_saved_dict_the_split_to_train_on_is_read(tmp_path: Path) -> None:
    parts = {name: Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    assert records_of(tmp_path / "saved") == [{"text": "train"}]


LOOK_AT = """
import re, sys
from pathlib import Path
from planner.data.local_data import local_data
from planner.data.reader import Reader
rows = sum(len(row.record["text"]) == 2**21 for row in Reader(local_data(Path(sys.argv[1]))))
print(rows, int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024)
"""


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_table_that_repeats_a_large_text_is_read_a_few_rows_at_a_time(name: str, tmp_path: Path) -> None:
    texts = pa.array(["x" * 2**21] * 600)
    if name == "a.parquet":
        parquet.write_table(pa.table({"text": texts}), tmp_path / name, compression="zstd")
    else:
        table = pa.table({"text": texts.dictionary_encode()})
        with pa.OSFile(str(tmp_path / name), "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
            file.write_table(table)
    assert (tmp_path / name).stat().st_size < 2**22, "it is small on the disk"
    done = subprocess.run(
        [sys.executable, "-c", LOOK_AT, str(tmp_path / name)], capture_output=True, text=True, check=True
    )
    rows, peak_bytes = map(int, done.stdout.split())
    assert rows == 600 and peak_bytes < 2**29, f"{peak_bytes / 2**20:.0f} MiB, where all rows have 1200"


def test_of_a_table_whose_beginning_is_enough_bytes_decide_and_not_rows(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": ["x" * 2**20] * 900}), tmp_path / "a.parquet")
    reader = Reader(local_data(tmp_path / "a.parquet"), 2**25)
    assert 32 <= sum(1 for _ in reader) < 64 and not reader.whole and list(reader.columns) == ["text"]
    parquet.write_table(pa.table({"text": ["x"] * 1500}), tmp_path / "a.parquet")
    assert sum(1 for _ in reader) == 1000 and not reader.whole
    parquet.write_table(pa.table({"text": ["x"] * 1000}), tmp_path / "a.parquet")
    assert sum(1 for _ in reader) == 1000


@pytest.mark.parametrize("group", [7, 100, 5000])
def test_a_parquet_file_has_each_row_once_however_large_its_rows_are(group: int, tmp_path: Path) -> None:
    texts = [str(number) + "x" * (2**21 if number % 1000 == 900 else number % 50) for number in range(3000)]
    parquet.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=group)
    assert [row.record for row in Reader(local_data(tmp_path / "a.parquet"))] == [{"text": text} for text in texts]
