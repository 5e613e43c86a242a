"""Splits answers that begin with the assistant's thoughts into thoughts and answer: axolotl's `split_thinking`."""

from __future__ import annotations

from typing import Any

from planner.job.records import role_of
from planner.job.source import shown

_THOUGHTS = (
    ("<think>", "</think>"), ("<reasoning>", "</reasoning>"), ("<|begin_of_thought|>", "<|end_of_thought|>"),
)  # fmt: skip
_SOLUTION = ("<|begin_of_solution|>", "<|end_of_solution|>")


def with_thinking(message: dict[str, Any], key: str) -> dict[str, Any]:
    """The message. In an answer of the assistant's, the text between the marks of thoughts goes under `key`, stripped;
    the content becomes the text behind it, or the solution in that text. Raises ValueError where words would be lost,
    which axolotl drops silently."""
    name = "content" if message.get("content") is not None else "value"
    said = message.get(name)
    if role_of(str(message.get("role") or message.get("from"))) != "assistant" or not isinstance(said, str):
        return message
    begin, end = next((marks for marks in _THOUGHTS if marks[0] in said and marks[1] in said), ("", ""))
    if not begin:
        return message
    before, _, behind = said.partition(begin)
    thought, ended, answer = behind.partition(end)
    answer = answer.lstrip()
    lost = [before]
    if all(mark in answer for mark in _SOLUTION):
        before, _, behind = answer.partition(_SOLUTION[0])
        answer, closed, behind = behind.partition(_SOLUTION[1])
        ended, lost, answer = ended and closed, [*lost, before, behind], answer.strip()
    if not ended:
        turned = f"an answer has {end} before {begin}, or a solution that ends before it begins"
        raise ValueError(f"{turned}: {shown(said, 80)}")
    if words := next((words.strip() for words in lost if words.strip()), None):
        raise ValueError(f"split_thinking leaves out {shown(words, 80)}, which stands outside of thought and solution")
    return {**message, key: thought.strip(), name: answer}
