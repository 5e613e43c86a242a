"""Conversations under chat templates: what is learned is what TRL learns, and nothing said is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import trl
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import get_training_chat_template

from planner.errors import UserError
from planner.importers.templates import _FILES, named_template
from tests.support.texts import byte_tokenizer
from worker.data.chat import ChatTemplate

FOLDER = Path(trl.__file__).parent / "chat_templates"
KNOWN = sorted(
    file.stem.removesuffix("_training")
    for file in FOLDER.glob("*_training.jinja")
    if (FOLDER / f"{file.stem.removesuffix('_training')}.jinja").exists()
)
CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
TALKS = {
    "two turns": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "yes?"},
        {"role": "assistant", "content": "yes"},
    ],
    "system": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "no\nno"},
    ],
    "reasoning": [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "two and two"},
        {"role": "user", "content": "5?"},
        {"role": "assistant", "content": "no", "reasoning_content": "it is not"},
    ],
    "calls": [
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": "", "tool_calls": CALL},
        {"role": "tool", "name": "add", "content": "5"},
        {"role": "assistant", "content": "5"},
    ],
}


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|end|>", "<|user|>"]})
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text("utf-8")
    return tokenizer


def learned(text: str, spans: tuple[tuple[int, int], ...]) -> list[str]:
    return [text[start:end] for start, end in spans]


def test_trl_has_a_form_of_each_template_that_people_named() -> None:
    named = {"phi3", "phi3_5", "qwen3", "qwen2_5", "llama3", "gemma", "gemma3", "glm4moe", "gptoss", "deepseekv3"}
    assert named | {"qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "nemotron_3_nano"} <= set(KNOWN)
    assert set(_FILES.values()) - {"gemma4"} <= set(KNOWN), "each that a job file may name is compared"


TURNS = [*TALKS["two turns"][:2], {"role": "user", "content": "why?"}, {"role": "assistant", "content": "no"}]


@pytest.mark.parametrize(
    ("name", "written", "answers"),
    [
        (
            "alpaca",
            "<s>### Instruction:\nhi\n\n### Response:\nyes</s>\n\n### Instruction:\nwhy?\n\n### Response:\nno</s>",
            ["yes</s>", "no</s>"],
        ),
        (
            "alpaca_with_system",
            "Below is an instruction that describes a task. Write a response that appropriately "
            "completes the request.\n\n### Instruction:\nhi\n\n### Response:\nyes</s>\n\n"
            "### Instruction:\nwhy?\n\n### Response:\nno</s>\n\n",
            ["yes</s>\n\n", "no</s>\n\n"],
        ),
        (
            "default",
            "Human: hi</s>\nAssistant:yes</s>\nHuman: why?</s>\nAssistant:no</s>\n",
            ["yes</s>\n", "no</s>\n"],
        ),
        (
            "vicuna",
            "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
            "helpful, detailed, and polite answers to the user's questions.USER: hi ASSISTANT:yes</s>"
            "USER: why? ASSISTANT:no</s>",
            ["yes</s>", "no</s>"],
        ),
        (
            "zephyr",
            "<|system|>\nYou are Zephyr, a helpful assistant.</s><|user|>\nhi</s><|assistant|>\nyes</s>"
            "<|user|>\nwhy?</s><|assistant|>\nno</s>",
            ["yes</s>", "no</s>"],
        ),
    ],
)
def test_templates_of_base_models_are_those_of_the_tools(name: str, written: str, answers: list[str]) -> None:
    tokenizer = byte_tokenizer(chat_template=named_template(name))
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    text, spans = ChatTemplate(tokenizer).render(TURNS)
    assert (text, learned(text, spans)) == (written, answers)
    system = {"role": "system", "content": "Be brief."}
    text, _ = ChatTemplate(tokenizer).render([system, *TURNS])
    assert "Be brief." in text and "Below is" not in text and "A chat" not in text and "You are" not in text


def test_gemma4_of_which_trl_has_no_form_is_learned_by_its_turns() -> None:
    tokenizer = byte_tokenizer(chat_template=named_template("gemma4"))
    tokenizer.add_tokens(["<turn|>"], special_tokens=True)
    assert learned(*ChatTemplate(tokenizer).render(TALKS["two turns"])) == ["yes<turn|>", "yes<turn|>"]


def test_calls_of_gemma4_are_learned_whatever_is_said_beside_them_and_behind() -> None:
    tokenizer = byte_tokenizer(chat_template=named_template("gemma4"))
    tokenizer.add_tokens(["<turn|>"], special_tokens=True)
    call, (asked, calling, result, answer) = "<|tool_call>call:add{a:2,b:3}<tool_call|><|tool_response>", TALKS["calls"]
    talk = [asked, calling | {"content": "I add."}, result, answer]
    assert learned(*ChatTemplate(tokenizer).render(talk, TOOLS)) == [call, "I add.<turn|>", "5<turn|>"]
    thought = calling | {"reasoning_content": "a sum"}  # which is shown until the user speaks again
    talk = [asked, thought, result, answer, asked, thought, result, answer]
    shown = [call, "5<turn|>", f"<|channel>thought\na sum\n<channel|>{call}", "5<turn|>"]
    assert learned(*ChatTemplate(tokenizer).render(talk, TOOLS)) == shown


@pytest.mark.parametrize("talk", list(TALKS))
@pytest.mark.parametrize("name", KNOWN)
def test_what_is_learned_is_what_trl_learns(name: str, talk: str) -> None:
    tokenizer, messages, tools = tokenizer_of(name), TALKS[talk], TOOLS if talk == "calls" else None
    try:
        form = get_training_chat_template(tokenizer)
        theirs = tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=form, return_dict=True, return_assistant_tokens_mask=True
        )
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        with pytest.raises(UserError):
            ChatTemplate(tokenizer).render(messages, tools)
        pytest.skip(f"the template itself refuses this: {error}")
    try:
        text, spans = ChatTemplate(tokenizer).render(messages, tools)
    except UserError as error:
        assert error.code == "template-drops"  # TRL trains on what is left
        assert talk in ("reasoning", "calls") or name in ("idefics3", "smolvlm")  # which show nothing that is a text
        return
    ours = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert ours["input_ids"] == theirs["input_ids"]
    mask = [int(any(s < end and e > start for start, end in spans)) for s, e in ours["offset_mapping"]]
    assert mask == theirs["assistant_masks"] and any(mask)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "nemotron_3_nano"])
@pytest.mark.parametrize("thinks", [False, True])
def test_a_templates_values_are_told_as_trl_tells_them(name: str, thinks: bool) -> None:
    tokenizer = tokenizer_of(name)
    asked, answer = TALKS["system"][:-1], TALKS["system"][-1:]
    text, _ = ChatTemplate(tokenizer, values={"enable_thinking": thinks}).pair(asked, answer)
    options = {"tokenize": False, "enable_thinking": thinks}
    assert text == tokenizer.apply_chat_template([*asked, *answer], **options)
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, **options)
    assert ChatTemplate(tokenizer, values={"enable_thinking": thinks}).prompt(asked) == prompt
    assert ChatTemplate(tokenizer).told({"enable_thinking": thinks}).prompt(asked) == prompt
    options["enable_thinking"] = not thinks
    assert prompt != tokenizer.apply_chat_template(asked, add_generation_prompt=True, **options)


@pytest.mark.parametrize("key", ["tool_calls", "reasoning_content"])
def test_what_a_template_leaves_out_is_refused_by_name(key: str) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", key: CALL}]
    with pytest.raises(UserError, match=f"does not show the {key}") as refused:
        ChatTemplate(tokenizer_of("phi3")).render(talk)
    assert refused.value.code == "template-drops"


def test_turns_that_say_so_are_not_learned() -> None:
    talk = [m | {"train": False} if i == 1 else m for i, m in enumerate(TALKS["two turns"])]
    text, spans = ChatTemplate(tokenizer_of("qwen3")).render(talk)
    assert len(spans) == 1 and spans[0][0] > text.index("yes?")


PHI_LIKE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<eos>{% endif %}"
)


def test_every_turn_of_a_template_nobody_knows_is_learned_with_its_end_mark() -> None:
    tokenizer = tokenizer_of("phi3")
    tokenizer.chat_template = PHI_LIKE
    assert learned(*ChatTemplate(tokenizer).render(TALKS["two turns"])) == ["yes<|end|>", "yes<|end|>\n<eos>"]


def test_equal_answers_are_told_apart() -> None:
    tokenizer = tokenizer_of("phi3")
    loud = "{{ m['content'] if loop.last else m['content'].upper() }}"
    tokenizer.chat_template = PHI_LIKE.replace("{{ m['content'] }}", loud)
    with pytest.raises(UserError, match="does not show what the assistant says"):
        ChatTemplate(tokenizer).render(TALKS["two turns"])
    shown_late = "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] }}"
    tokenizer.chat_template = PHI_LIKE.replace("{{ m['content'] }}", shown_late)
    talk = [*TALKS["two turns"], {"role": "user", "content": "yes"}, {"role": "assistant", "content": "yes"}]
    text, spans = ChatTemplate(tokenizer).render(talk)
    assert learned(text, spans) == ["yes<|end|>", "yes<|end|>", "<think></think>yes<|end|>\n<eos>"]
    assert all(text[:start].endswith("<|assistant|>\n") for start, _ in spans)


SPACED, CLOSE = '{"a": 2, "b": 3}', '{"a":2,"b":3}'


@pytest.mark.parametrize("said", [SPACED, CLOSE])
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_arguments_that_are_json_are_not_written_as_json_of_it(name: str, said: str) -> None:
    """OpenAI's form. Qwen 2.5's template writes whatever they are as JSON, Qwen 3's a text as it is."""
    template = ChatTemplate(tokenizer_of(name))
    call = {"type": "function", "function": {"name": "add", "arguments": said}}
    asked, calling, *rest = TALKS["calls"]
    talk = [asked, {**calling, "tool_calls": [call]}, *rest]
    shown = f'"arguments": {said if name == "qwen3" else SPACED}'
    assert shown in "".join(learned(*template.render(talk, TOOLS)))
    assert shown in "".join(learned(*template.pair(talk[:1], talk[1:2], TOOLS)))
    assert call["function"] == {"name": "add", "arguments": said}, "the data stay as they are"
