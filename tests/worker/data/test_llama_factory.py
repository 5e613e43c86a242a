"""Files of LLaMA-Factory: which records are learned, which tokens of them and with which labels, from file to batch."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from planner.errors import UserError
from planner.importers.llama_factory_records import Conversation, LeftOut, Turn, read
from planner.job.data_check import check_data
from planner.job.schema import Job
from planner.models.tokenizer import load_tokenizer
from tests.support.texts import write_jsonl
from worker.check.first_records import look
from worker.data.batches import Batches
from worker.data.corpus import Corpus
from worker.data.padding import IGNORED

SHAREGPT = {
    "formatting": "sharegpt",
    "columns": {"messages": "talk", "system": "system", "tools": "tools"},
    "tags": {
        "role_tag": "from",
        "content_tag": "value",
        "user_tag": "human",
        "assistant_tag": "gpt",
        "observation_tag": "observation",
        "function_tag": "function_call",
        "system_tag": "system",
    },
}
TEXTS = {"columns": {"prompt": "text"}}
MARKS = ("<|end_of_text|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>")


def model(folder: Path, *, bos: bool = False, chat_template: str | None = None) -> None:
    """A model folder whose tokenizer makes one token of two newlines, and else one of each byte."""
    alphabet = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**alphabet, "ĊĊ": 256}, merges=[("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=[*MARKS],
    )
    fast.chat_template = chat_template
    LlamaConfig(vocab_size=len(fast), hidden_size=32, num_hidden_layers=1).save_pretrained(folder)
    fast.save_pretrained(folder)
    said = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**said, "add_bos_token": bos}))
    (folder / "model.safetensors").touch()


def job_of(folder: Path, rows: list[dict[str, Any]], info: dict[str, Any], lines: str) -> Job:
    write_jsonl(folder / "d.jsonl", rows)
    (folder / "dataset_info.json").write_text(json.dumps({"d": {"file_name": "d.jsonl", **info}}))
    head = f"model_name_or_path: model\nfinetuning_type: full\ndataset: d\ndataset_dir: .\nbf16: false\n{lines}"
    return Job.parse(head if "stage" in lines else f"{head}stage: sft\n", folder)


def batch_of(job: Job) -> list[tuple[str, list[str | None]]]:
    """Text and labels of each row of the job, in the order of the data."""
    tokenizer = load_tokenizer(job)
    batches = Batches(job, tokenizer)
    found = []
    for number in range(batches.rows):
        batch = batches._rows.batch(np.array([number]))
        length = int(batches._rows.lengths[number])
        labels = batch["labels"][0, :length].tolist()
        shown = [None if label == IGNORED else tokenizer.decode(label) for label in labels]
        found.append((str(tokenizer.decode(batch["input_ids"][0, :length])), shown))
    return found


def learned(labels: list[str | None]) -> str:
    return "".join(label or "·" for label in labels).strip("·")


def talk(*turns: str, **more: Any) -> dict[str, Any]:
    """The user, the assistant, the user and so on."""
    said = [{"from": "gpt" if place % 2 else "human", "value": text} for place, text in enumerate(turns)]
    return {"talk": said, "system": None, "tools": None, **more}


def test_the_newline_behind_assistant_is_the_prompts_and_one_that_an_answer_begins_with_its_own(tmp_path: Path) -> None:
    model(tmp_path / "model")
    job = job_of(tmp_path, [talk("2+2?", "\n4", system="Be brief.")], SHAREGPT, "template: qwen\n")
    ((text, labels),) = batch_of(job)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n\n4<|im_end|>\n"
    )
    assert [label for label in labels if label is not None] == ["\n", "4", "<|im_end|>", "\n"], "one newline"


def test_tools_are_wrapped_and_calls_are_learned(tmp_path: Path) -> None:
    model(tmp_path / "model")
    turns = [
        ("human", "2+2?"),
        ("function_call", '{"name": "add", "arguments": {"a": 2}}'),
        ("observation", "4"),
        ("gpt", "four"),
    ]
    row = {"talk": [{"from": role, "value": text} for role, text in turns], "tools": '[{"name": "add"}]', "system": "s"}
    ((text, labels),) = batch_of(job_of(tmp_path, [row], SHAREGPT, "template: qwen\n"))
    assert '\n<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>\n' in text
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>\n'
    assert [piece for piece in learned(labels).split("·") if piece] == [call, "four<|im_end|>\n"]


def test_where_it_ends_once_the_end_token_is_learned_in_place_of_the_next_turns_first(tmp_path: Path) -> None:
    model(tmp_path / "model")
    rows = [talk("a", "b", "c", "d"), talk("e" * 40, "f" * 40)]
    job = job_of(tmp_path, rows, SHAREGPT, "template: glm4\ncutoff_len: 40\n")
    (short, long) = batch_of(job)
    assert short[0] == "[gMASK]<sop><|user|>\na<|assistant|>\nb<|user|>\nc<|assistant|>\nd</s>"
    assert learned(short[1]) == "\nb</s>···\nd</s>", "of <|user|>, behind b, the label is the end token"
    assert len(long[1]) == 40 and long[0].endswith("f</s>") and long[1][-1] == "</s>", "for which there is always room"


def seen_first(job: Job) -> Corpus:
    found = look(job, job.data, load_tokenizer(job))
    assert found is not None
    return found


def test_what_llama_factory_leaves_out_is_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model(tmp_path / "model")
    twice = ({"talk": [{"from": role, "value": "a"}] * 2} for role in ("human", "user"))
    rows = [talk("a", "b"), talk("a", "b", "c"), talk(), talk("a"), *twice]
    job = job_of(tmp_path, rows, SHAREGPT, "template: qwen3_nothink\n")
    check_data(job)
    for see in (lambda: len(batch_of(job)), lambda: len(seen_first(job).ends)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert see() == 1
        assert [line for line in caplog.messages if "left out" in line] == [
            f"data: {name}: {count} conversations left out, as LLaMA-Factory does: {why}"
            for name in {line.split(": ")[1] for line in caplog.messages if "left out" in line}
            for count, why in (
                (3, "their turns are not in pairs of the user's and the assistant's"),
                (2, "the user and the assistant do not speak in turn"),
            )
        ]


def test_a_tag_that_the_dataset_info_leaves_out_is_no_role(tmp_path: Path) -> None:
    model(tmp_path / "model")
    tags = {key: tag for key, tag in SHAREGPT["tags"].items() if key != "system_tag"}
    rows = [talk("a", "b"), {"talk": [{"from": "system", "value": "s"}, *talk("a", "b")["talk"]]}]
    job = job_of(tmp_path, rows, {**SHAREGPT, "tags": tags}, "template: qwen3_nothink\n")
    assert len(batch_of(job)) == 1


def test_openais_form_is_read_as_there() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    asked = {"role": "user", "content": "a"}
    result = {"role": "tool", "content": "1"}
    messages = [
        asked,
        {"role": "assistant", "content": None, "tool_calls": calls},
        result,
        result,
        {"role": "assistant", "content": "b"},
        result,
    ]
    found = read("messages", {"messages": messages, "tools": [{"name": "f"}]}, "openai")
    assert found == Conversation(
        turns=(
            Turn(role="user", content="a"),
            Turn(role="calls", content='[{"name": "f", "arguments": "{\\"a\\": 1}"}]'),
            Turn(role="results", content="1\n</tool_response>\n<tool_response>\n1"),
            Turn(role="assistant", content="b"),
        ),
        tools='[{"name": "f"}]',
    )
    said = [asked, {"role": "assistant", "content": "b"}]
    for system, expected in (
        ("", "detailed thinking off"),
        ("s", "s\ndetailed thinking off"),
        ("detailed thinking on", "detailed thinking on"),
    ):
        found = read("messages", {"messages": [{"role": "system", "content": system}, *said]}, "openai")
        assert isinstance(found, Conversation) and found.system == expected
    found = read("messages", {"messages": said, "system": "s", "tools": "[]"}, "openai")
    assert isinstance(found, Conversation) and (found.system, found.tools) == ("s\n", "[]")


def test_instructions_are_learned_also_where_an_answer_is_empty_and_left_out_without_any() -> None:
    row = {"instruction": "a", "input": "b", "output": "", "system": None, "history": [["c", "d"]]}
    assert read("alpaca", row, "alpaca") == Conversation(
        turns=(
            Turn(role="user", content="c"),
            Turn(role="assistant", content="d"),
            Turn(role="user", content="a\nb"),
            Turn(role="assistant", content=""),
        ),
    )
    assert isinstance(read("alpaca", {**row, "output": None}, "alpaca"), LeftOut)


@pytest.mark.parametrize(
    ("bos", "lines", "rows"),
    [
        (False, "", ["one</s>tw", "o</s></s>"]),
        (True, "", ["<s>ne</s>tw", "<s></s></s>"]),
        (False, "packing: false\n", ["one</s>", "two</s>", "</s>"]),
        (True, "packing: false\n", ["<s>one</s>", "<s>two</s>", "<s></s>"]),
        (False, "packing: false\ntemplate: qwen3\n", ["one<|im_end|>", "two<|im_end|>"]),
        (False, "packing: false\ntemplate: llama3\n", ["one<|end_of_text|>", "two<|end_of_text|>"]),
    ],
)
def test_texts_are_those_of_the_data_with_an_end_token_and_where_there_is_one_rows_begin_with_the_first(
    bos: bool, lines: str, rows: list[str], tmp_path: Path
) -> None:
    model(tmp_path / "model", bos=bos)
    text = f"stage: pt\ncutoff_len: 6\n{lines}"
    job = job_of(tmp_path, [{"text": said} for said in ("one", "two", "")], TEXTS, text)
    found = batch_of(job)
    expected = [row for row in rows if "packing" not in lines or row != "</s>"]  # alone it has nothing before it
    assert [shown for shown, _ in found] == expected
    assert all(label is not None for _, labels in found for label in labels)
    with pytest.raises(UserError, match=r"has no token <\|end\|>"):
        batch_of(job_of(tmp_path, [{"text": "one"}], TEXTS, "stage: pt\ntemplate: phi\n"))


def test_texts_that_are_given_by_their_path_are_learned_likewise(tmp_path: Path) -> None:
    model(tmp_path / "model", bos=True)
    write_jsonl(tmp_path / "t.jsonl", [{"text": "one"}])
    text = "model_name_or_path: model\nstage: pt\nfinetuning_type: full\ndataset: t.jsonl\nbf16: false\n"
    assert [shown for shown, _ in batch_of(Job.parse(text, tmp_path))] == ["<s>ne</s>"]


OWN = "{{ 'own' }}"


@pytest.mark.parametrize(
    ("template", "own", "gets"),
    [("qwen3", OWN, OWN), ("chatml", OWN, "replaced"), ("qwen3", None, "replaced")],
)
def test_a_tokenizer_keeps_its_own_chat_template_where_llama_factory_leaves_it(
    template: str, own: str | None, gets: str, tmp_path: Path
) -> None:
    model(tmp_path / "model", chat_template=own)
    found = load_tokenizer(job_of(tmp_path, [talk("a", "b")], SHAREGPT, f"template: {template}\n")).chat_template
    assert found == own if gets == OWN else found != own and "<|im_start|>user" in str(found)


STERN = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages }}"
KIND = (
    "{% if messages[0]['role'] != 'system' %}<|system|>Be kind.{% endif %}{% for m in messages %}<|{{ m['role'] }}|>"
    "{{ m['content'] }}{% if m['role'] == 'assistant' %}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_without_a_template_its_parts_are_taken_from_the_tokenizers_own(tmp_path: Path) -> None:
    model(tmp_path / "model", chat_template=KIND)
    call = [{"from": "human", "value": "a"}, {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}]
    rows = [talk("a", "b", "c", "d", system="s"), talk("a", "b", "c"), talk("a", "b"), {"talk": call}]
    job = job_of(tmp_path, rows, SHAREGPT, "")
    assert [(text, learned(labels)) for text, labels in batch_of(job)] == [
        ("<|system|>s<|user|>a<|assistant|>b</s>\n<|user|>c<|assistant|>d</s>\n", "b</s>\n···d</s>\n"),
        ("<|system|>Be kind.<|user|>a<|assistant|>b</s>\n", "b</s>\n"),
        (
            "<|system|>Be kind.<|user|>a<|assistant|>Action: f\nAction Input: {}</s>\n",
            "Action: f\nAction Input: {}</s>\n",
        ),
    ]
    model(tmp_path / "model", chat_template=STERN)
    with pytest.raises(UserError, match="LLaMA-Factory cannot derive a template from the tokenizer's chat") as told:
        batch_of(job)
    assert told.value.code == "no-chat-template" and "TemplateError: no system" in told.value.numbers
    (tmp_path / "model" / "chat_template.jinja").unlink()
    assert [(text, learned(labels)) for text, labels in batch_of(job)][1] == ("ab", "b"), "its empty template"


def test_thoughts_are_learned_empty_or_shown_or_taken_out(tmp_path: Path) -> None:
    model(tmp_path / "model")
    rows = [talk("a", "b"), talk("a", "<think>\nhm\n</think>\n\nb")]
    for lines, expected in (
        ("", ["<think>\n\n</think>\n\nb<|im_end|>\n", "<think>\nhm\n</think>\n\nb<|im_end|>\n"]),
        ("enable_thinking: false\n", ["b<|im_end|>\n", "b<|im_end|>\n"]),
    ):
        found = batch_of(job_of(tmp_path, rows, SHAREGPT, f"template: qwen3\n{lines}"))
        assert [learned(labels) for _, labels in found] == expected
        assert "assistant\n<think>\n\n</think>\n\nb" in found[0][0]
    with pytest.raises(UserError, match="enable_thinking: it is null; it must be true or false"):
        job_of(tmp_path, rows, SHAREGPT, "template: qwen3\nenable_thinking: null\n")
