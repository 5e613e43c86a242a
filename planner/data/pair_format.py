"""Reads the records of axolotl's data of preferences: which of their columns are the prompt and the answers, and the
text around these. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from planner.data.records import Record
from planner.keys.source import shown

Places = tuple[str, ...]
"""Where a value stands: a column, or a way such as "chosen.1.content": the content of the second message of `chosen`.
Of several places the first one counts that a record has."""
SIDES = ("chosen", "rejected")
_NOT_WRITTEN = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")


class PairFormat(BaseModel):
    """How records become a prompt and answers, as axolotl's `type` of the same data does it.

    Where `written` is None, these are texts. `system`: the column of a system text; where a record has one,
    `system_text` stands before the prompt. `turn_text`: is written for each message of the list at `prompt` but the
    last. In the texts the name of a place in braces ({prompt}, {system}, {chosen}, …) stands for what is there.
    `needs_system`: a record without a system text is broken.

    Otherwise they are messages, and `written` says how the chat template writes an answer: "apart", after a message of
    the user's with other words, without what the template writes before the answer; "together", after the prompt;
    "whole", as one text with the prompt, whose tokens must begin with those of the prompt."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    written: Literal["apart", "together", "whole"] | None = None
    prompt: Places = ("prompt",)
    system: str = "system"
    chosen: Places = ("chosen",)
    rejected: Places = ("rejected",)
    completion: Places = ("completion",)
    label: str = "label"
    system_text: str = ""
    turn_text: str = ""
    prompt_text: str = "{prompt}"
    chosen_text: str = "{chosen}"
    rejected_text: str = "{rejected}"
    completion_text: str = "{completion}"
    needs_system: bool = False

    @property
    def columns(self) -> frozenset[str]:
        """All columns that may be read."""
        places = (*self.prompt, *self.chosen, *self.rejected, *self.completion)
        return frozenset({self.system, self.label, *places, *(place.split(".")[0] for place in places)})

    def read(self, record: Record, kind: str, read_message: Callable[[Any], Any]) -> dict[str, Any]:
        """Return the record in TRL's form, with the columns prompt, chosen and rejected, or, where `kind` is
        "unpaired", prompt, completion and label. `read_message`: gives the keys and roles of a message offmate's names.
        Raises ValueError for a broken record."""
        if self.written == "together":
            return self._together(record)
        if self.written == "apart":
            return self._apart(record, read_message)
        if self.written == "whole":
            return self._whole(record)
        sides = SIDES if kind == "preference" else ("completion",)
        formats = {"chosen": self.chosen_text, "rejected": self.rejected_text, "completion": self.completion_text}
        places = {"chosen": self.chosen, "rejected": self.rejected, "completion": self.completion}
        read = {side: formats[side].format(**{side: _answer(record, places[side])}) for side in sides}
        more = {} if kind == "preference" else {"label": record.get(self.label)}
        return {"prompt": self._prompt(record), **read, **more}

    def _prompt(self, record: Record) -> str:
        if self.turn_text:
            turns = _found(record, self.prompt)[1]
            if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
                raise ValueError(f"column {self.prompt[0]} is a list of messages, this is {shown(turns, 80)}")
            written = [
                self.turn_text.format(role=_text(turn, ("role",)), content=_text(turn, ("content",)))
                for turn in turns[:-1]
            ]
            return "".join(written) + self.prompt_text
        system = self._system(record)
        if not system and self.needs_system:
            raise ValueError(f"it has no {self.system}, for which prompt_format has a place")
        before = self.system_text.format(system=system) if system else ""
        return before + self.prompt_text.format(prompt=_text(record, self.prompt), system=system or "")

    def _system(self, record: Record) -> str | None:
        system = record.get(self.system) if self.system else None
        if system is not None and not isinstance(system, str):
            raise ValueError(f"column {self.system} is text, this is {shown(system, 80)}")
        return system

    def _apart(self, record: Record, read_message: Callable[[Any], Any]) -> dict[str, Any]:
        sides = {}
        for side, places in (("chosen", self.chosen), ("rejected", self.rejected)):
            value = _found(record, places)[1]
            last = value[-1] if isinstance(value, list) and value else value
            sides[side] = [
                _said({"role": "assistant", "content": last} if isinstance(last, str) else read_message(last))
            ]
        asked = _found(record, self.prompt or self.chosen)[1]
        if isinstance(asked, str) and self.prompt:
            asked = [{"role": "user", "content": asked}]
        if not isinstance(asked, list):
            raise ValueError(f"{(self.prompt or self.chosen)[0]} is a list of messages, this is {shown(asked, 80)}")
        asked = asked if self.prompt else asked[:-1]
        return {"prompt": [_said(read_message(message)) for message in asked], **sides}

    def _together(self, record: Record) -> dict[str, Any]:
        chosen = record.get("chosen")
        if not isinstance(chosen, list) or not chosen or len(chosen) % 2:
            raise ValueError(f"column chosen has a question and an answer in turn, this is {shown(chosen, 80)}")
        prompt: list[dict[str, Any]] = []
        if system := record.get("system"):
            prompt.append({"role": "system", "content": system})
        for place in range(0, len(chosen), 2):
            asks = ("prompt",) if "prompt" in record else (f"chosen.{place}.content",)
            prompt.append({"role": "user", "content": _text(record, asks)})
            if place + 2 < len(chosen):
                prompt.append({"role": "assistant", "content": _text(record, (f"chosen.{place + 1}.content",))})
        answers = {side: _answer(record, (f"{side}.-1.content",)) for side in SIDES}
        return {"prompt": prompt, **{k: [{"role": "assistant", "content": text}] for k, text in answers.items()}}

    def _whole(self, record: Record) -> dict[str, Any]:
        system = self._system(record)
        # axolotl writes an empty system text, too.
        before = [] if system is None else [{"role": "system", "content": system}]
        answers = {"chosen": _answer(record, self.chosen), "rejected": _answer(record, self.rejected)}
        prompt = [*before, {"role": "user", "content": _text(record, self.prompt)}]
        return {"prompt": prompt, **{k: [{"role": "assistant", "content": text}] for k, text in answers.items()}}


def _found(record: Record, places: Places) -> tuple[str, Any]:
    """Return the first of `places` whose column the record has, and the value there. Raises ValueError where it has no
    such column."""
    for place in places:
        column, *way = [place] if place in record else place.split(".")
        if column not in record:
            continue
        value: Any = record[column]
        for step in way:
            try:
                value = value[int(step) if isinstance(value, list) else step]
            except (IndexError, KeyError, TypeError, ValueError):
                raise ValueError(f"it has nothing at {place}, this is {shown(record[column], 80)}") from None
        return place, value
    raise ValueError(f"it has no {' or '.join(places)}")


def _text(record: Mapping[str, Any], places: Places) -> str:
    place, value = _found(record, places)
    if not isinstance(value, str):
        raise ValueError(f"{place} is text, this is {shown(value, 80)}")
    return value


def _answer(record: Record, places: Places) -> str:
    if not (text := _text(record, places)):
        raise ValueError(f"{_found(record, places)[0]} is empty, and there is nothing to score")
    return text


def _said(message: Any) -> dict[str, Any]:
    """Return what axolotl reads of a message. Raises ValueError where the message says more than that."""
    if not isinstance(message, Mapping):
        raise ValueError(f"a message is an object with role and content, this is {shown(message, 80)}")
    if more := next((key for key in _NOT_WRITTEN if message.get(key)), None):
        raise ValueError(f"a message has {more}, which axolotl does not read in data of preferences")
    return {key: message.get(key) for key in ("role", "content")}
