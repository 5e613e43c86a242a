"""What a job teaches its model to end with: what its template or tokenizer ends texts with, as far as it is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner.data.entry import DataEntry
from planner.importers.templates import named_template
from tests.support.texts import CHATML, byte_tokenizer, make_job, tiny_llama_folder, write_jsonl
from worker.data.batches import Batches

TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "no"},
]
UNENDED = CHATML.replace(
    "{{ m['content'] }}<|im_end|>",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}"
    "{{ m['content'] }}{% endif %}<|im_end|>",
)
GPT_OSS = (  # what it says once is past ends with the token that ends what it thinks
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% if m['thinking'] %}<|start|>analysis{{ m['thinking'] }}<|end|>{% endif %}"
    "<|start|>assistant{{ m['content'] }}{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}"
    "{% else %}<|start|>user{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def ends(tmp_path: Path, record: dict[str, Any], template: str | None = CHATML, **keys: Any) -> list[str]:
    """The end tokens of a job on these data, by name."""
    tokenizer = byte_tokenizer(chat_template=template)
    tokenizer.add_tokens(["<|start|>", "<|end|>", "<|return|>", "<|user|>"], special_tokens=True)
    data = write_jsonl(tmp_path / "data.jsonl", [record])
    entry = DataEntry(path=str(data), **keys.pop("entry", {}))
    job = make_job(tiny_llama_folder(tmp_path / "model"), data, max_length=512, **keys)
    job = job.model_copy(update={"dataset": (entry,)})
    return tokenizer.convert_ids_to_tokens(list(Batches(job, tokenizer).ends))


@pytest.mark.parametrize(
    ("record", "template", "keys", "found"),
    [
        ({"messages": TALK}, CHATML, {}, ["<|im_end|>"]),
        ({"messages": TALK}, CHATML, {"packing": "wrapped", "train_on": "all"}, ["<|im_end|>"]),
        ({"messages": TALK}, CHATML, {"entry": {"train_on_eos": "none"}}, []),
        ({"messages": TALK}, UNENDED, {}, []),
        ({"messages": TALK}, CHATML.replace("<|im_end|>", "{{ eos_token }}"), {}, ["<eos>"]),
        ({"messages": TALK}, GPT_OSS, {}, ["<|return|>"]),
        ({"text": "once"}, CHATML, {}, ["<eos>"]),
        ({"text": "once"}, None, {}, ["<eos>"]),
        ({"text": "<|im_start|>assistant\nyes<|im_end|>"}, CHATML, {}, ["<|im_end|>", "<eos>"]),
        ({"prompt": "2+2=", "completion": "4"}, CHATML, {}, ["<eos>"]),
        ({"segments": [{"text": "Q", "label": False}, {"text": "A", "label": True}]}, CHATML, {}, []),
        ({"messages": TALK}, named_template("phi_3"), {"chat_template": "phi_3"}, ["<|end|>"]),
    ],
    ids=[
        "chatml",
        "chatml-wrapped",
        "marks-not-learned",
        "generation-without-the-mark",
        "own-end-token",
        "gpt-oss",
        "text",
        "no-template",
        "text-of-chatml",
        "pairs",
        "segments",
        "phi-3",
    ],
)
def test_what_ends_answers_and_is_learned_is_an_end(
    tmp_path: Path, record: dict[str, Any], template: str | None, keys: dict[str, Any], found: list[str]
) -> None:
    assert ends(tmp_path, record, template, **keys) == found


def test_the_form_of_a_template_that_trl_trains_with_says_what_ends_answers(tmp_path: Path) -> None:
    from importlib.resources import files

    template = (files("trl") / "chat_templates" / "glm4moe.jinja").read_text("utf-8")
    assert ends(tmp_path, {"messages": TALK}, template) == ["<|user|>"]
