"""Thoughts are split from answers as axolotl's `split_thinking` does it, and where that loses words it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.data.entry import DataEntry, with_thinking
from planner.job.schema import Job

AXOLOTL = """base_model: tiny
learning_rate: 0.0002
datasets: [{path: text.jsonl, type: chat_template, split_thinking: true%s}]
"""
KEY = "reasoning_content"


def split(content: str) -> tuple[str | None, str]:
    """The thought and the content of an answer."""
    found = with_thinking({"role": "gpt", "content": content}, KEY)
    return found.get(KEY), found["content"]


@pytest.mark.parametrize(
    ("content", "thought", "said"),
    [
        ("<think>\ntwo and two\n</think>\n\n4 \n", "two and two", "4 \n"),
        ("<reasoning>a<think></reasoning> b", "a<think>", "b"),
        ("<|begin_of_thought|> a <|end_of_thought|>\n<|begin_of_solution|>\nb\n<|end_of_solution|>", "a", "b"),
        ("<think></think>", "", ""),
        ("<think>a</think>b</think>", "a", "b</think>"),
        ("a</think>", None, "a</think>"),
        ("4", None, "4"),
    ],
)
def test_what_an_answer_thinks_and_says_is_what_axolotl_takes_for_it(
    content: str, thought: str | None, said: str
) -> None:
    """By axolotl 0.19's own `transform_message`, which was run on these."""
    assert split(content) == (thought, said)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("Well. <think>a</think>b", 'split_thinking leaves out "Well."'),
        ("<think>a</think>Well. <|begin_of_solution|>b<|end_of_solution|>", 'split_thinking leaves out "Well."'),
        ("<think>a</think><|begin_of_solution|>b<|end_of_solution|> Bye.", 'split_thinking leaves out "Bye."'),
        ("</think>a<think>", "an answer has </think> before <think>"),
    ],
)
def test_words_that_axolotl_would_leave_out_are_told(content: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        split(content)


def test_turns_of_others_keep_what_they_say() -> None:
    message = {"from": "human", "value": "<think>a</think>b"}
    assert with_thinking(message, KEY) == message
    assert with_thinking({**message, "from": "assistant"}, KEY) == {"from": "assistant", "value": "b", KEY: "a"}


@pytest.mark.parametrize(("more", "key"), [("", KEY), (", template_thinking_key: thinking", "thinking")])
def test_an_entry_of_axolotls_has_its_answers_split_and_keeps_that(more: str, key: str, folder: Path) -> None:
    job = Job.parse(AXOLOTL % more, folder)
    (entry,) = job.data
    record = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "gpt", "content": "<think>so</think>4"}]}
    assert entry.mapped(record)["messages"] == [
        {"role": "user", "content": "2+2?"},
        {"role": "gpt", "content": "4", key: "so"},
    ]
    (folder / "resolved.yaml").write_text(job.resolved_yaml())
    assert Job.from_resolved(folder / "resolved.yaml") == job


def test_of_two_system_turns_the_first_is_dropped_as_in_axolotl() -> None:
    system, user = {"role": "system", "content": "a"}, {"role": "user", "content": "b"}
    entry = DataEntry(path="/data", drop_system=True)
    assert entry.mapped({"messages": [system, system, user]})["messages"] == [system, user]
    assert entry.mapped({"messages": [user, system]})["messages"] == [user, system]
    assert entry.mapped({"messages": []})["messages"] == []
