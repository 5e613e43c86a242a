"""Conversations under axolotl's named templates: the text and what of it is learned are axolotl's own.

`axolotl_0_19.json` has what axolotl 0.19 makes of some conversations: its `ChatTemplateStrategy` (`roles_to_train:
[assistant]`, `train_on_eos: turn`) was run under each of its templates, with a tokenizer of one token a byte, whose
first token is `<s>` and whose end token is the template's end mark. Learned tokens stand between ⟦ and ⟧; what rows
begin with, those without tools and those with them, stands apart. `{"text": …}`: it renders, and axolotl then fails
to find the turns; null: it fails to render; "leaves out": the template leaves calls, tools or thoughts out in
silence.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from planner.data.entry import LearnedTurns
from planner.errors import UserError
from planner.importers.axolotl_templates import TEMPLATES as OURS
from planner.importers.templates import NAMES, named_template
from tests.support.texts import byte_tokenizer
from worker.data.chat import ChatTemplate

FACTS: dict[str, Any] = json.loads(Path(__file__).with_name("axolotl_0_19.json").read_text("utf-8"))
TEMPLATES, TALKS = FACTS["templates"], FACTS["conversations"]
ANSWERS = frozenset({"assistant"})


def tokenizer_of(name: str, end: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(chat_template=named_template(name))
    tokenizer.add_special_tokens({"additional_special_tokens": [*FACTS["marks"], "<eos>"]})
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": end})
    return tokenizer


def marked(tokenizer: PreTrainedTokenizerFast, text: str, spans: tuple[tuple[int, int], ...]) -> str:
    """The text with the learned tokens between ⟦ and ⟧."""
    shown, before = "", False
    for start, end in tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]:
        learned = any(start < past and end > first for first, past in spans)
        shown += ("⟦" if learned > before else "⟧" if learned < before else "") + text[start:end]
        before = learned
    return shown + ("⟧" if before else "")


def theirs(name: str, talk: str) -> str | None:
    """What axolotl makes of a conversation; None where it fails."""
    fact = TEMPLATES[name]["rows"][talk]
    if fact is None:
        return None
    text = fact["text"] if isinstance(fact, dict) else TEMPLATES[name]["begins"][fact[0]] + fact[1]
    return str(text).replace("{today}", datetime.date.today().isoformat())


def test_each_template_that_is_taken_under_a_name_of_axolotls_is_compared() -> None:
    assert set(TEMPLATES) <= set(NAMES) and len(TEMPLATES) == 30
    pictures = {"llava", "pixtral", "qwen2_vl", "llama3_2_vision"}
    assert not {*pictures, "command_a_rag", "command_a_tool_use"} & set(NAMES), "these are refused by their name"


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_what_is_learned_under_a_named_template_is_axolotls(name: str) -> None:
    tokenizer = tokenizer_of(name, TEMPLATES[name]["end"])
    for talk, fact in TEMPLATES[name]["rows"].items():
        said, only_text = TALKS[talk], isinstance(fact, dict)
        chat = ChatTemplate(tokenizer, everything=only_text, learned=None if only_text else LearnedTurns(roles=ANSWERS))
        expected = theirs(name, talk) if fact != "leaves out" else None
        contents = [message["content"].strip() for message in said["messages"] if message["role"] != "tool"]
        hides = expected is not None and not all(text in expected for text in contents if "think" not in text)
        if fact == "leaves out" or hides:
            with pytest.raises(UserError) as refused:
                chat.render(said["messages"], said.get("tools"))
            assert refused.value.code == "template-drops", talk
        elif expected is not None:
            text, spans = chat.render(said["messages"], said.get("tools"))
            assert (text if only_text else marked(tokenizer, text, spans)) == expected, talk


@pytest.mark.parametrize("name", [name for name, fact in TEMPLATES.items() if fact["end"] != "<eos>"])
def test_end_marks_of_templates_are_learned_as_eot_tokens_of_tokenizers_that_end_otherwise(name: str) -> None:
    tokenizer = tokenizer_of(name, "<pad>")
    learned = LearnedTurns(roles=ANSWERS, marks=(TEMPLATES[name]["end"],))
    text, spans = ChatTemplate(tokenizer, learned=learned).render(TALKS["two turns"]["messages"])
    assert marked(tokenizer, text, spans) == theirs(name, "two turns")


@pytest.mark.parametrize("name", list(OURS))
def test_our_templates_ask_for_an_answer_where_the_next_one_begins(name: str) -> None:
    """So samples and prompts go on from what was learned."""
    chat = ChatTemplate(tokenizer_of(name, TEMPLATES[name]["end"]), everything=True)
    messages = TALKS["two turns"]["messages"]
    whole, asked = chat.render(messages)[0], chat.prompt(messages[:3])
    assert whole.startswith(asked) and whole[len(asked) :].lstrip().startswith("no")


@pytest.mark.parametrize("name", list(OURS))
def test_our_templates_mark_what_is_an_answer_for_files_that_are_not_axolotls(name: str) -> None:
    tokenizer = tokenizer_of(name, TEMPLATES[name]["end"])
    text, spans = ChatTemplate(tokenizer).render(TALKS["two turns"]["messages"])
    past, last = (text[start:end] for start, end in spans)
    ends = {"command_a": "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"}.get(name, TEMPLATES[name]["end"])
    assert (past, last) == ("yes" if name == "metharme" else f"yes{ends}", f"no{ends}")
