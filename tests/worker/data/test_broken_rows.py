"""Records that are no rows: counted, told with line and reason, and refused or left out. Some tests take seconds:
they count Python's memory."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from planner.data.entry import DataEntry
from planner.errors import SeveralErrors, UserError
from planner.job.data_check import check_data, first_rows
from planner.job.frozen import freeze
from planner.job.schema import Job
from tests.support.texts import CHATML, byte_tokenizer, make_job, tiny_llama_folder, write_jsonl
from worker.check.first_records import look
from worker.data.batches import Batches
from worker.data.sources import open_source

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
STRANGE = {"messages": [{"role": "narrator", "content": "x"}]}
REFUSES = "{{ raise_exception('no thanks') if messages[0]['content'] == 'bad' }}" + CHATML
BAD = {"messages": [{"role": "user", "content": "bad"}, TALK[1]]}


def job(tmp_path: Path, records: list[Any], **keys: object) -> Job:
    text = "".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records)
    (tmp_path / "data.jsonl").write_text(text)
    keys = {"max_length": 512, "per_device_train_batch_size": 1, **keys}
    return make_job(tiny_llama_folder(tmp_path / "model", chat_template=REFUSES), tmp_path / "data.jsonl", **keys)


def made(its: Job, folder: Path | None = None) -> Batches:
    return Batches(its, byte_tokenizer(chat_template=REFUSES), folder, freeze(its))


def refused(what: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        what()
    return caught.value


def test_each_mistake_is_told_once_with_how_many_records_and_the_first_at_submission_and_in_the_run(
    tmp_path: Path,
) -> None:
    records = [{"messages": TALK}, "", *([STRANGE] * 12), {"messages": [5]}, {"messages": [6]}]
    its = job(tmp_path, records)
    lines = (
        'line 3 of data.jsonl: unknown role "narrator" (the first of 12 such records)',
        "line 15 of data.jsonl: a message is an object with role and content, this is 5 (the first of 2 such records)",
    )
    for what in (lambda: check_data(its), lambda: made(its)):
        told = refused(what)
        assert told.numbers == ("14 of the first 15 records", *lines)
        assert told.code == "broken-record" and "broken_rows: skip leaves such records out" in told.hint
    endless = job(tmp_path, [STRANGE] * 1100)
    assert refused(lambda: made(endless)).numbers[0] == "1000 of the first 1000 records", "no more are looked for"
    many = job(tmp_path, [{"messages": [{"role": f"r{chr(97 + number)}", "content": ""}]} for number in range(14)])
    told = refused(lambda: check_data(many))
    assert told.numbers[0] == "14 of the first 14 records"
    assert told.numbers[-2:] == ('line 10 of data.jsonl: unknown role "rj"', "and 4 records with other mistakes")


def test_one_broken_record_does_not_hide_what_else_is_wrong_with_the_file(tmp_path: Path) -> None:
    lacking = "line 2 of data.jsonl has no text, and counts as empty (the first of 3 such records)"
    its = job(tmp_path, [{"text": 5}, *[{"foo": "x"}] * 3])
    for what in (lambda: check_data(its), lambda: look(its, its.data, byte_tokenizer(chat_template=REFUSES))):
        assert lacking in refused(what).numbers
    told = refused(lambda: check_data(job(tmp_path, ["{", *[{"foo": "x"}] * 3])))
    assert isinstance(told, SeveralErrors)
    assert [error.code for error in told.errors] == ["unknown-columns", "dataset-unreadable"]
    its = job(tmp_path, [STRANGE, {"messages": TALK}, "7"])
    shutil.rmtree(tmp_path / "model")
    tiny_llama_folder(tmp_path / "model")
    told = refused(lambda: check_data(its))
    assert isinstance(told, SeveralErrors)
    assert [error.code for error in told.errors] == ["no-chat-template", "broken-record"]


def test_the_first_of_few_are_told_with_line_and_reason(tmp_path: Path) -> None:
    few = job(tmp_path, [BAD, {"messages": TALK}, STRANGE])
    reasons = (
        "line 1 of data.jsonl: The chat template refuses a conversation (TemplateError: no thanks)",
        'line 3 of data.jsonl: unknown role "narrator"',
    )
    for what in (lambda: made(few), lambda: look(few, few.data, byte_tokenizer(chat_template=REFUSES))):
        assert refused(what).numbers == ("2 of the first 3 records", *reasons)


def test_what_is_wrong_is_told_together_whatever_finds_it(tmp_path: Path) -> None:
    records = [{"messages": TALK}, "{", BAD, "[1]", STRANGE, *["x"] * 10]
    its = job(tmp_path, records)
    told = refused(lambda: check_data(its))
    assert told.numbers[0] == "13 of the first 15 records"
    assert told.numbers[-1].endswith("(the first of 10 such records)")
    lines = (
        "line 2 of data.jsonl is no JSON: Expecting property name enclosed in double quotes (character 2)",
        "line 3 of data.jsonl: The chat template refuses a conversation (TemplateError: no thanks)",
        "line 4 of data.jsonl is no JSON object: [1]",
        'line 5 of data.jsonl: unknown role "narrator"',
    )
    assert told.numbers[1:4] == (lines[0], *lines[2:]), "the template is not asked here"
    for what in (lambda: made(its), lambda: look(its, its.data, byte_tokenizer(chat_template=REFUSES))):
        told = refused(what)
        assert told.code == "broken-record" and told.numbers[1:5] == lines
    line = "line 1 of data.jsonl is no JSON object: 7 (the first of 2 such records)"
    told = refused(lambda: check_data(job(tmp_path, [7, {"text": "a"}, 7])))
    assert told.code == "dataset-unreadable" and told.numbers == ("2 of the first 3 records", line)


def test_a_completion_whose_prompt_is_null_or_missing_is_broken_unlike_an_empty_prompt(tmp_path: Path) -> None:
    pair = {"prompt": "a", "completion": "b"}
    its = job(tmp_path, [pair, pair | {"prompt": None}, {"completion": "b"}, pair | {"prompt": ""}])
    reason = 'column prompt is null or missing, and there is a completion; write "" for an empty prompt'
    line = f"line 2 of data.jsonl: {reason} (the first of 2 such records)"
    for what in (lambda: check_data(its), lambda: made(its)):
        assert refused(what).numbers[1:] == (line,)
    assert made(job(tmp_path, [pair, pair | {"prompt": ""}])).rows == 2


def test_what_is_wrong_far_behind_is_told_with_what_the_template_refuses_at_the_beginning(tmp_path: Path) -> None:
    its = job(tmp_path, [BAD, *[{"messages": TALK}] * 500, STRANGE])
    told = refused(lambda: look(its, its.data, byte_tokenizer(chat_template=REFUSES)))
    assert told.numbers[0] == "2 of the first 502 records" and told.numbers[2].startswith("line 502 of data.jsonl")


def test_they_are_left_out_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = [{"messages": TALK}, '{"messages": [', STRANGE, "", "7", BAD, {"messages": []}, {"messages": TALK}]
    its = job(tmp_path, records, broken_rows="skip")
    check_data(its)
    look(its, its.data, byte_tokenizer(chat_template=REFUSES))
    assert "4 records are broken and left out" in caplog.text, "lines that are none, too, as the run tells"
    caplog.clear()
    found = made(its)
    assert found.rows == 2 and found.fingerprint == made(job(tmp_path, [{"messages": TALK}] * 2)).fingerprint
    said = [line.removeprefix("data: ") for line in caplog.messages]
    assert "4 records are broken and left out (broken_rows: skip)" in said
    assert [line.partition(": ")[2][:50] for line in said if line.startswith("left out: ")] == [
        "line 2 of data.jsonl is no JSON: Expecting value (",
        'line 3 of data.jsonl: unknown role "narrator"',
        "line 5 of data.jsonl is no JSON object: 7",
        "line 6 of data.jsonl: The chat template refuses a ",
    ]
    assert "data.jsonl: 1 of 5 records are empty and left out" in said


def test_what_is_left_out_is_kept_for_a_later_start_and_of_the_same_file_only(tmp_path: Path) -> None:
    its = job(tmp_path, [{"messages": TALK}, STRANGE, '{"', {"messages": TALK}], broken_rows="skip")
    before, kept = freeze(its), tmp_path / "run" / "data"
    first = Batches(its, byte_tokenizer(chat_template=REFUSES), kept, before).fingerprint
    (kept / "tokens.npy").write_bytes(b"torn")
    again = Batches(its, byte_tokenizer(chat_template=REFUSES), kept, before)
    assert again.fingerprint == first
    write_jsonl(tmp_path / "data.jsonl", [{"messages": TALK}] * 2)
    (kept / "tokens.npy").write_bytes(b"torn")
    assert refused(lambda: Batches(its, byte_tokenizer(chat_template=REFUSES), kept, before)).code == "data-changed"


def test_broken_records_of_a_mixture_are_counted_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", [{"messages": TALK}] * 9)
    its = job(tmp_path, [{"messages": TALK}, STRANGE], broken_rows="skip", mix_strategy="interleave_over")
    its = its.model_copy(update={"dataset": (str(good), str(tmp_path / "data.jsonl"))})
    made(its)
    assert "1 record is broken and left out" in caplog.text and "empty" not in caplog.text
    its = its.model_copy(update={"broken_rows": "refuse"})
    assert refused(lambda: made(its)).numbers == ('line 2 of data.jsonl: unknown role "narrator"',)


def test_data_that_are_all_broken_are_refused_at_submission_and_in_the_run(tmp_path: Path) -> None:
    its = job(tmp_path, ["{", *[STRANGE] * 3], broken_rows="skip")
    told = refused(lambda: made(its))
    line = 'line 2 of data.jsonl: unknown role "narrator" (the first of 3 such records)'
    assert told.code == "nothing-to-train" and told.numbers[0] == "4 of 4 are broken" and line in told.numbers
    told = refused(lambda: check_data(its))
    assert told.code == "nothing-to-train" and line in told.numbers
    assert told.numbers[0] == f"{tmp_path}/data.jsonl: 3 records, all of them broken or empty"
    its = job(tmp_path, ["{", BAD], broken_rows="skip")
    check_data(its)  # which has no tokenizer
    told = refused(lambda: look(its, its.data, byte_tokenizer(chat_template=REFUSES)))
    assert told.code == "nothing-to-train" and told.numbers[0] == "2 of 2 are broken"
    for records in (["{", "7"], ['{"']):
        its = job(tmp_path, records, broken_rows="skip")
        for what in (check_data, made):
            told = refused(partial(what, its))
            left_out = f"{len(records)} broken and left out (broken_rows: skip)"
            assert (told.code, told.numbers) == ("empty-dataset", ("0 records", left_out))


MIXED = [
    ("a.json", b'{"text": "a"}\n{"text":\n{"text": "b"}\n', ["a", "b"]),
    ("a.json", b'[{"text": "a"}, 7, {"text": "b"}]', ["a", "b"]),
    ("a.jsonl", b'{"text": "a"}{"text": "b"}\n{"text": "c"}\n{\n"text": "d"\n}\n', ["a", "b", "c", "d"]),
    ("a.jsonl", b'{"text": "a"}{"text": "b"}\n7\n{\n"text": "d"\n}\n{"text": "e"},\n', ["a", "b", "d"]),
    ("a.jsonl", b'{"text": "a"}\n{"text": ' + b"[" * 5000 + b"]" * 5000 + b"}\n", ["a"]),
    ("a.jsonl", b'{"text": "a"}\n{"text": "caf\xe9"}\n', ["a"]),
    ("a.jsonl", b'null\n{"text": "a"}\n', ["a"]),
    ("a.jsonl", b'{"text": "a"}\n{"text": ' + b"1" * 5000 + b"}\n", ["a"]),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud83d"}\n{"text": "b", "text": "c"}\n{"text": "d"}', ["a", "d"]),
    ("a.csv", b"text,n\na,1\nb,2,3\ncaf\xe9,4\nd\n", ["a", "d"]),
]


@pytest.mark.parametrize(("name", "content", "texts"), MIXED)
def test_submission_and_the_run_leave_out_the_same(tmp_path: Path, name: str, content: bytes, texts: list[str]) -> None:
    (tmp_path / name).write_bytes(content)
    entry = DataEntry(path=str(tmp_path / name))
    first = first_rows(entry, 99)
    assert first is not None and [row.record["text"] for row in first.rows if row.record is not None] == texts
    assert read(entry) == texts


def read(entry: DataEntry) -> list[str]:
    return [str(row.record["text"]) for row in open_source(entry).rows() if row.record is not None]


def test_records_over_several_lines_are_read_however_many_there_are(tmp_path: Path) -> None:
    texts = [f"the text of record {number}" for number in range(5000)]
    (tmp_path / "a.json").write_text("\n".join(json.dumps({"id": 1, "text": text}, indent=2) for text in texts))
    assert read(DataEntry(path=str(tmp_path / "a.json"))) == texts


def test_a_record_is_found_where_it_is_whatever_a_line_has(tmp_path: Path) -> None:
    good, strange = (json.dumps(record) for record in ({"messages": TALK}, STRANGE))
    content = f"{good}{good}\n{good[:1]}\n{good[1:]}\n{strange}\n"
    for name in ("a.jsonl", "a.json"):
        (tmp_path / name).write_text(content)
        its = job(tmp_path, []).model_copy(update={"dataset": (str(tmp_path / name),)})
        for what in (check_data, made):
            assert refused(partial(what, its)).numbers == (f'line 4 of {name}: unknown role "narrator"',)


def test_a_record_of_any_depth_is_left_out_and_no_other(tmp_path: Path) -> None:
    for depth in (150, 600, 60_000):
        deep = '{"a":' * depth + "1" + "}" * depth
        its = job(tmp_path, [{"text": "a"}, f'{{"text": "b", "more": {deep}}}', {"text": "c"}], broken_rows="skip")
        assert made(its).rows == 2


def test_reading_keeps_no_record_in_memory(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text("{}\n")
    assert [*open_source(DataEntry(path=str(tmp_path / "one.jsonl"))).rows()], "what reading imports is there"
    count, peaks = 40_000, []  # as Python objects all rows are 16 and 8 MiB
    for name, text in (("a.jsonl", '{"text": "abc"}\n' * count), ("a.json", f"[{'[1],' * count}1]")):
        (tmp_path / name).write_text(text)
        tracemalloc.start()
        rows = sum(1 for _ in open_source(DataEntry(path=str(tmp_path / name))).rows())
        assert rows == count + (name == "a.json")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 5 * 2**20


def test_what_is_wrong_with_the_job_is_no_broken_record(tmp_path: Path) -> None:
    records = [{"prompt": TALK[:1], "completion": TALK[1:]}]
    its = job(tmp_path, records, broken_rows="skip")
    assert refused(lambda: Batches(its, byte_tokenizer())).code == "no-chat-template"
