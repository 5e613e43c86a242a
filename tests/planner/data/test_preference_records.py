"""Records of preferences: what is a prompt and what an answer, and what is wrong with a record or a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trl.data_utils import extract_prompt

from planner.data.preference_records import Talks, Texts, answers_of
from planner.data.records import kind_of
from planner.errors import UserError
from planner.job.data_check import check_data, is_rendered
from planner.job.schema import Job
from tests.support.texts import make_job, tiny_llama_folder, write_jsonl

USER = {"role": "user", "content": "2+2?"}
FOUR, FIVE = ({"role": "assistant", "content": text} for text in ("four", "five"))
PAIR = {"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE]}


def job_of(folder: Path, records: list[dict[str, Any]], **keys: Any) -> Job:
    model = tiny_llama_folder(folder / "model", chat_template="x")
    return make_job(model, write_jsonl(folder / "data.jsonl", records), **keys)


def error_of(folder: Path, records: list[dict[str, Any]], **keys: Any) -> UserError:
    with pytest.raises(UserError) as refused:
        check_data(job_of(folder, records, **keys))
    return refused.value


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ("The sky is blue.", "The sky is green."),
        ("The sky is", "The sky is green."),
        ("The sky", "The sky"),
        ([USER, FOUR], [USER, FIVE]),
        ([USER, FOUR], [USER, FOUR]),
        ([USER, FOUR, USER, FOUR], [USER, FOUR, USER, FIVE]),
        ([USER, FOUR, USER, FOUR], [USER, FIVE]),
    ],
)
def test_an_implicit_prompt_is_what_trl_takes_for_it(chosen: Any, rejected: Any) -> None:
    found = answers_of("preference", {"chosen": chosen, "rejected": rejected})
    kind = Texts if isinstance(chosen, str) else Talks
    assert found == kind(**extract_prompt({"chosen": chosen, "rejected": rejected}))


def test_a_label_says_on_which_side_an_answer_is() -> None:
    record = {"prompt": "a", "completion": "b"}
    assert answers_of("unpaired", {**record, "label": True}) == Texts(prompt="a", chosen="b")
    assert answers_of("unpaired", {**record, "label": 0}) == Texts(prompt="a", rejected="b")
    found = answers_of("unpaired", {"prompt": [USER], "completion": [FOUR], "label": 1})
    assert found == Talks(prompt=[USER], chosen=[FOUR])


def test_a_prompt_that_is_text_beside_conversations_is_in_them() -> None:
    record = {"prompt": "2+2?", "chosen": [USER, FOUR], "rejected": [USER, FIVE]}
    assert answers_of("preference", record) == Talks(prompt=[USER], chosen=[FOUR], rejected=[FIVE])
    with pytest.raises(ValueError, match="no message with which both answers begin is the text of column prompt"):
        answers_of("preference", {**record, "prompt": "3+3?"})


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "a", "chosen": "b"}, "column rejected is null or missing"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "column rejected is empty, and there is nothing to score"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "column rejected is text or a list of messages, this is 3"),
        (
            {"prompt": "a", "chosen": [FOUR], "rejected": "b"},
            "one of chosen and rejected is text, and the other one is",
        ),
        ({"prompt": [USER], "chosen": "a", "rejected": "b"}, "the answer is text, so column prompt is, too; this is"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, "the answer is text, so column prompt is, too; this is 3"),
        (
            {"chosen": "a", "rejected": "b"},
            'chosen and rejected have no common beginning, which would be the prompt; ""',
        ),
        ({"chosen": [FOUR], "rejected": [FIVE]}, "chosen and rejected have no common beginning"),
        (
            {"question": "q", "chosen": "ab", "rejected": "ac"},
            "the column question would not be read: give columns: {prompt: question}",
        ),
        ({**PAIR, "prompt": [USER, FOUR]}, "the prompt ends with a message of the assistant; an answer follows one of"),
        ({**PAIR, "rejected": [USER]}, "the rejected answer begins with a message of the user, not of the assistant"),
        ({**PAIR, "chosen": [{"role": "who"}]}, 'unknown role "who"'),
        ({**PAIR, "prompt": []}, "a conversation is a list of messages"),
        ({**PAIR, "prompt": [USER | {"train": True}]}, "a message of the prompt is marked as learned"),
        ({**PAIR, "chosen": [FOUR | {"weight": 0}]}, "a message of an answer is marked as not learned"),
        ({**PAIR, "tools": "no JSON"}, "tools are a list, or JSON of one"),
    ],
)
def test_a_broken_pair_says_what_is_wrong(record: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refused:
        answers_of("preference", record)
    assert words in str(refused.value)
    error = error_of(tmp_path, [PAIR, record], preference="dpo")
    assert error.code == "broken-record" and error.numbers[0].startswith(("line 2 of", "1 of"))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "a", "completion": "b", "label": None}, "column label is true or false (1 or 0), this is "),
        ({"prompt": "a", "completion": "b", "label": "true"}, 'column label is true or false (1 or 0), this is "true"'),
        ({"prompt": "a", "completion": "b", "label": 2}, "column label is true or false (1 or 0), this is 2"),
        ({"prompt": None, "completion": "b", "label": True}, 'column prompt is null or missing; write "" for an empty'),
        ({"prompt": "a", "completion": [FOUR], "label": True}, "the answer is a list of messages, so column prompt is"),
    ],
)
def test_a_broken_answer_with_a_label_says_what_is_wrong(record: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        answers_of("unpaired", record)
    assert words in str(refused.value)


def test_which_format_columns_show_depends_on_whether_preferences_are_wanted() -> None:
    pairs, labels = ("prompt", "chosen", "rejected"), ("prompt", "completion", "label")
    for columns, plain, preferred in (
        (pairs, "preference", "preference"),
        (labels, "prompt", "unpaired"),
        ((*pairs, "messages"), "messages", "preference"),
        ((*pairs, *labels), "prompt", "preference"),
        (("text",), "text", "text"),
    ):
        assert kind_of(columns, "data") == plain
        assert kind_of(columns, "data", preferred=True) == preferred


def test_data_and_job_must_both_be_of_preferences(tmp_path: Path) -> None:
    label = {"prompt": "a", "completion": "b", "label": True}
    error = error_of(tmp_path, [PAIR])
    assert "are pairs of a chosen and a rejected answer" in error.what and "give preference: dpo" in str(error.hint)
    check_data(job_of(tmp_path, [label]))  # a completion that is learned
    error = error_of(tmp_path, [label], preference="dpo")
    assert "are answers with a label, and preference: dpo learns from pairs" in error.what
    for records in ([{"text": "a"}], [{"messages": [USER, FOUR]}], [{"instruction": "a", "output": "b"}]):
        error = error_of(tmp_path, records, preference="dpo")
        assert "are no preferences, and preference: dpo learns from these alone" in error.what
        assert error.code == "other-records"
    for records in ([PAIR], [label]):
        job = job_of(tmp_path, records, preference="kto")
        check_data(job)
        assert is_rendered(job)


def test_a_type_says_what_columns_are(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "data.jsonl", [{"q": "a", "good": "b", "bad": "c"}])
    columns = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    entry = {"path": str(path), "type": "preference", "columns": columns}
    head = f"model: {tiny_llama_folder(tmp_path / 'model')}\nbf16: false\npreference: dpo\n"
    job = Job.parse(f"{head}dataset: [{entry}]\n", Path("/"))
    check_data(job)
    assert answers_of("preference", job.data[0].mapped({"q": "a", "good": "b", "bad": "c"})) == Texts(
        prompt="a", chosen="b", rejected="c"
    )
    entry["columns"] = {**columns, "chosen": "best"}
    with pytest.raises(UserError) as refused:
        check_data(Job.parse(f"{head}dataset: [{entry}]\n", Path("/")))
    assert refused.value.code == "unknown-columns" and "there is no column best" in refused.value.numbers[0]


def test_conversations_need_a_chat_template_and_texts_do_not(tmp_path: Path) -> None:
    model = tiny_llama_folder(tmp_path / "model")
    for record in (PAIR, {"chosen": [USER, FOUR], "rejected": [USER, FIVE]}):
        with pytest.raises(UserError) as refused:
            check_data(make_job(model, write_jsonl(tmp_path / "data.jsonl", [record]), preference="dpo"))
        assert refused.value.code == "no-chat-template"
    texts = write_jsonl(tmp_path / "data.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    check_data(make_job(model, texts, preference="dpo"))
