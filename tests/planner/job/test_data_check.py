"""Data that cannot be trained on is told when a job is handed in; what the trainer can read is never refused."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from planner.data.local_data import local_data
from planner.data.reader import Reader
from planner.errors import Exit, SeveralErrors, UserError
from planner.job import data_check
from planner.job.data_check import check_data
from planner.job.schema import Job
from tests.support.texts import CHATML, byte_tokenizer, make_job, tiny_llama_folder, write_jsonl
from worker.data.batches import Batches

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_folder(tmp_path_factory.mktemp("model"))


def job_of(model: Path, tmp_path: Path, name: str, content: str | bytes, **keys: object) -> Job:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return make_job(model, path, **{"max_length": 64, **keys})


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


WRONG = [
    ("a.jsonl", "", "empty-dataset", "The dataset "),
    ("a.jsonl", "\n\n", "empty-dataset", "0 records"),
    ("a.csv", "text\n", "empty-dataset", "0 records"),
    ("a.txt", "", "nothing-to-train", "1 record, all of them empty"),
    ("a.jsonl", lines({"text": ""}, {"text": None}), "nothing-to-train", "2 records, all of them empty"),
    ("a.jsonl", lines({"body": "a"}), "unknown-columns", "found: body"),
    ("a.csv", 'text,n\n"",1\n,2\n', "nothing-to-train", "2 records, all of them empty"),
    ("a.csv", "\n", "empty-dataset", "0 records"),
    ("a.csv", "text,n,text\na,1,b\n", "dataset-unreadable", "the header of a.csv has the column text twice"),
    ("a.csv", ",\ntext,n\na,1\n", "unknown-columns", "found: "),
    ("a.csv", 'text\na\n"b\n', "dataset-unreadable", "the quote that line 3 opens is not closed"),
    ("a.csv", 'id,messages\n1,"[]"\n', "broken-record", "line 2 of a.csv: a conversation is a list of messages"),
    (
        "a.csv",
        "prompt,completion\nHello, world,hi\n",
        "dataset-unreadable",
        "line 2 of a.csv has 3 fields for 2",
    ),
    ("a.csv", 'n,text\n1,"a\nb"\n\n2,b,c\n', "dataset-unreadable", "line 5 of a.csv has 3 fields"),
    ("a.csv", "question,answer\na,b\n", "unknown-columns", "found: question, answer"),
    ("a.jsonl", '{"text": "a"}\n{"text": \n', "dataset-unreadable", "line 2 of a.jsonl is no JSON: Expecting value"),
    ("a.jsonl", '{"text": "a"},\n{"text": "b"},\n', "dataset-unreadable", "line 1 of a.jsonl is no JSON"),
    ("a.jsonl", "{'text': 'a'}\n", "dataset-unreadable", "line 1 of a.jsonl is no JSON: Expecting property name"),
    ("a.jsonl", '{"text": "a"}\n[1, 2]\n', "dataset-unreadable", "line 2 of a.jsonl is no JSON object: [1, 2]"),
    ("a.json", '[{"text": "a"}, {"text"]', "dataset-unreadable", "Expecting ':' delimiter"),
    ("a.txt", b"\xff\xfe abc", "dataset-unreadable", "a.txt is not UTF-8: byte 0 is 0xff"),
    ("a.jsonl", b'{"text": "caf\xe9"}\n', "dataset-unreadable", "a.jsonl is not UTF-8: byte 13 is 0xe9"),
    ("a.parquet", "no parquet", "dataset-unreadable", "Parquet magic bytes not found"),
    (
        "a.jsonl",
        lines({"text": "a"}, {"text": 4}),
        "broken-record",
        "line 2 of a.jsonl: column text is text, this is 4",
    ),
    ("a.jsonl", lines({"messages": TALK}), "no-chat-template", "line 1 of a.jsonl"),
    ("a.jsonl", lines({"messages": "hi"}), "broken-record", 'a conversation is a list of messages, this is "hi"'),
    (
        "a.jsonl",
        lines({"messages": [{"role": "narrator", "content": "x"}]}),
        "broken-record",
        'unknown role "narrator"',
    ),
    (
        "a.jsonl",
        lines({"messages": [{"role": "user", "text": "a"}, {"role": "assistant", "content": "x"}]}),
        "broken-record",
        "line 1 of a.jsonl: a message has no content; what it has is role, text",
    ),
    ("a.jsonl", lines({"prompt": "a", "completion": ["b"]}), "broken-record", "column completion is text"),
]


@pytest.mark.parametrize(("name", "content", "code", "words"), WRONG)
def test_wrong_data_is_refused_with_its_place(
    name: str, content: str | bytes, code: str, words: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        check_data(job_of(model, tmp_path, name, content))
    error = caught.value
    assert (error.code, error.exit_code, words in str(error)) == (code, Exit.USAGE, True), str(error)


@pytest.mark.parametrize(("name", "content"), [(name, content) for name, content, *_ in WRONG])
def test_what_is_refused_at_once_the_trainer_would_refuse(
    name: str, content: str | bytes, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError):
        Batches(job_of(model, tmp_path, name, content), byte_tokenizer())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'\xef\xbb\xbf{"text": "a"}\n'),
        ("a.jsonl", '\n{"text": "a"}{"text": "b"}\n\n'),
        ("a.jsonl", '{"text": "a"}\n{\n"text": "b"\n}\n{"text": "c"}\n'),
        ("a.json", '{\n"text": "a"\n}\n'),
        ("a.json", ' [{"text": "a"}]'),
        ("a.json", '["a", "b"]'),
        ("a.jsonl", lines({"prompt": "a"}, {"prompt": "a", "completion": "b"})),
        ("a.jsonl", lines({"text": "a\u2028b", "score": float("nan")}, {"text": ""})),
        ("a.csv", 'text,n\n"a\nb",1\n'),
        ("a.csv", "\ufeffprompt,completion,,\n1,0\n\n2\n"),
        ("a.csv", "text\n \t\n"),
        ("a.csv", ' \ntext\n" "\n'),
        ("a.csv", 'text\n"a\n \nb"\n'),
        ("a.csv", "text\n" + "a" * 200_000 + "\n"),
        ("a.txt", " "),
    ],
)
def test_what_the_trainer_reads_is_not_refused(name: str, content: str | bytes, model: Path, tmp_path: Path) -> None:
    job = job_of(model, tmp_path, name, content, train_on="all")
    assert check_data(job) == ()
    assert Batches(job, byte_tokenizer()).total_steps > 0


def test_an_entry_of_empty_records_passes_beside_one_to_learn_from(model: Path, tmp_path: Path) -> None:
    empty = [write_jsonl(tmp_path / f"empty-{n}.jsonl", [{"text": ""}] * n) for n in (1, 2)]
    good = write_jsonl(tmp_path / "good.jsonl", [{"text": "a"}])
    job = make_job(model, [empty[0], good, empty[1]], max_length=64)
    assert check_data(job) == ()
    assert Batches(job, byte_tokenizer()).total_steps > 0
    for wrong in (make_job(model, empty), make_job(model, good, eval_dataset=[str(path) for path in empty])):
        with pytest.raises(UserError) as caught:
            check_data(wrong)
        assert (caught.value.code, len(caught.value.numbers)) == ("nothing-to-train", 2)
        with pytest.raises(UserError, match="nothing to train on"):
            Batches(wrong, byte_tokenizer())
    assert check_data(wrong.model_copy(update={"eval_dataset": (str(empty[0]), "owner/set")})) == ("owner/set",)


def test_conversations_pass_with_a_template_of_the_job_or_of_the_tokenizer(model: Path, tmp_path: Path) -> None:
    assert check_data(job_of(model, tmp_path, "a.jsonl", lines({"messages": TALK}), chat_template=CHATML)) == ()
    own = tiny_llama_folder(tmp_path / "own", chat_template=CHATML)
    assert check_data(job_of(own, tmp_path, "a.jsonl", lines({"messages": TALK}))) == ()


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"text": ["a"]}, None),
        ({"body": ["a"]}, "found: body"),
        ({"text": [4]}, r"row 1 of a\.parquet: column text is text, this is 4"),
        ({"text": ["", None]}, "2 records, all of them empty"),
        ({"text": pa.array([], pa.string())}, "is empty"),
    ],
)
def test_a_parquet_file_is_refused_where_the_trainer_would(
    columns: dict[str, list[object]], words: str | None, model: Path, tmp_path: Path
) -> None:
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    job = make_job(model, tmp_path / "a.parquet", max_length=64)
    if words is None:
        assert check_data(job) == ()
        return
    with pytest.raises(UserError, match=words):
        check_data(job)
    with pytest.raises(UserError):
        Batches(job, byte_tokenizer())


def test_a_folder_of_mixed_types_is_refused_and_each_of_its_files_read(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [{"text": "a"}])
    (folder / "b.jsonl").write_text('{"text": }\n')
    with pytest.raises(UserError, match=r"line 1 of b\.jsonl is no JSON"):
        check_data(make_job(model, folder))
    (folder / "b.jsonl").rename(folder / "b.txt")
    with pytest.raises(UserError, match="data mixes file types: 1 json, 1 text"):
        check_data(make_job(model, folder))


def csv_folder(tmp_path: Path, **files: str) -> Path:
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / ("sub" if name == "c" else "") / f"{name}.csv").write_text(content)
    return folder


def test_each_csv_file_of_a_folder_has_columns_of_its_own(model: Path, tmp_path: Path) -> None:
    files = {"a": "instruction,output\na,1\n", "c": "output,input,instruction\n2,IN,b\n"}
    job = make_job(model, csv_folder(tmp_path, **files), packing=True, max_length=512)
    assert check_data(job) == ()
    sample = Batches(job, byte_tokenizer()).sample()
    assert "### Instruction:\na\n\n### Response:\n⟦1<eos>⟧" in sample
    assert "### Instruction:\nb\n\n### Input:\nIN\n\n### Response:\n⟦2<eos>⟧" in sample


def test_csv_files_of_a_folder_may_differ_in_the_order_of_columns(model: Path, tmp_path: Path) -> None:
    job = make_job(model, csv_folder(tmp_path, a="text,n\na,1\n", c="n,text,\n2,b\n"), packing=True, max_length=64)
    assert check_data(job) == ()
    assert Batches(job, byte_tokenizer()).sample() == "⟦a<eos>⟧⟦b<eos>⟧"


def test_a_file_that_is_cut_costs_the_files_before_no_row(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(model, csv_folder(tmp_path, a='id,messages\n1,"[]"\n', b="id,messages\n", c="id,messages\n"))
    for left in range(3):  # of the second file, whose lines are longer
        monkeypatch.setattr(data_check, "MOST_BYTES", len('id,messages\n1,"[]"\n') + left)
        with pytest.raises(UserError, match=r"line 2 of a\.csv: a conversation is a list"):
            check_data(job)


def test_of_a_large_file_the_beginning_is_read(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = lines(*({"text": f"{n}"} for n in range(100)))
    job = job_of(model, tmp_path, "a.jsonl", good + '{"text": }\n')
    with pytest.raises(UserError, match="line 101"):
        check_data(job)
    monkeypatch.setattr(data_check, "MOST_BYTES", len(good) - 5)
    assert check_data(job) == ()
    for rows in ('a,\n"b\nc",d\n', "a,b\nc,d,e\n"):
        job = job_of(model, tmp_path, "a.csv", "text,n\n" + rows)
        for bytes_read in range(1, 15):  # wherever it is cut
            monkeypatch.setattr(data_check, "MOST_BYTES", bytes_read)
            assert check_data(job) == ()


def test_of_many_short_records_no_more_are_looked_at_than_take_half_a_second(model: Path, tmp_path: Path) -> None:
    """They once took more processor time than a look has, and good data were refused for it."""
    job, data = job_of(model, tmp_path, "many.jsonl", '{"text": "a"}\n' * 100_000), tmp_path / "many.jsonl"
    reader = Reader(local_data(data), 2**30)
    assert (reader.count(), reader.whole) == (100_000, True)
    with data.open("a") as file:
        file.write('{"body": "b"}\n' * 100_000)
    reader = Reader(local_data(data), 2**30)
    assert (reader.count(), reader.whole, [*reader.columns]) == (100_000, False, ["text"])
    assert Reader(local_data(data)).count() == 200_000
    assert check_data(job) == ()


def test_the_data_to_evaluate_on_is_looked_at_too_and_the_hubs_is_named(model: Path, tmp_path: Path) -> None:
    job = job_of(model, tmp_path, "a.jsonl", lines({"text": "a"}))
    assert check_data(job.model_copy(update={"dataset": (*job.dataset, "owner/set")})) == ("owner/set",)
    (tmp_path / "b.jsonl").write_text(lines({"body": "a"}))
    with pytest.raises(UserError, match="found: body"):
        check_data(job.model_copy(update={"eval_dataset": (str(tmp_path / "b.jsonl"),)}))


def test_a_record_of_another_kind_is_a_broken_one_and_no_empty_one(model: Path, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    records = lines({"messages": TALK}, {"conversations": turns}, {"messages": []}, {"id": 1})
    job = job_of(model, tmp_path, "mix.jsonl", records, chat_template=CHATML)
    for read in (check_data, lambda job: Batches(job, byte_tokenizer(chat_template=CHATML))):
        with pytest.raises(UserError) as refused:
            read(job)
        assert refused.value.code == "broken-record"
        assert "line 2 of mix.jsonl: it has no messages, but conversations" in str(refused.value.numbers)


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ("prompt;completion\na;b\n", "seem to be separated by semicolons"),
        ("prompt\tcompletion\na\tb\n", "seem to be separated by tabs"),
        ("What is it?,A thing.\nAnd this?,Another.\n", "the first line of a csv file must name its columns"),
    ],
)
def test_a_csv_file_without_header_or_with_other_signs_than_commas_gets_a_hint_that_fits(
    tmp_path: Path, content: str, hint: str
) -> None:
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(UserError) as refused:
        check_data(make_job(tiny_llama_folder(tmp_path / "model"), tmp_path / "a.csv"))
    assert refused.value.code == "unknown-columns" and hint in refused.value.hint
    assert not isinstance(refused.value, SeveralErrors)


def test_a_separator_is_told_and_not_the_fields_of_each_row_that_come_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt;completion\na, b;c\n")
    with pytest.raises(UserError) as refused:
        check_data(make_job(tiny_llama_folder(tmp_path / "model"), tmp_path / "a.csv"))
    assert refused.value.code == "unknown-columns" and not isinstance(refused.value, SeveralErrors)
