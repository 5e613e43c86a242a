"""What people's data look like, and what of it is learned."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import datasets
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from planner.errors import Exit, UserError
from tests.support.texts import CHATML, byte_tokenizer, make_job, tiny_llama_folder, write_jsonl
from worker.data.batches import Batches

GENERATION = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}!{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
FORGETFUL = (  # shows the reasoning of the last turn only, as several published templates do
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "yes?"},
    {"role": "assistant", "content": "no"},
]


def chat_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(chat_template=template)
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def learn(
    tmp_path: Path, source: Path | list[dict], tokenizer: PreTrainedTokenizerFast | None = None, **keys: object
) -> Batches:
    path = source if isinstance(source, Path) else write_jsonl(tmp_path / "data.jsonl", source)
    job = make_job(tiny_llama_folder(tmp_path / "model"), path, **{"max_length": 512, **keys})
    return Batches(job, tokenizer or byte_tokenizer())


def test_text_is_learned_whole(tmp_path: Path) -> None:
    assert learn(tmp_path, [{"text": "hello"}]).sample() == "⟦hello<eos>⟧"


def test_completions_are_learned_and_prompts_are_not(tmp_path: Path) -> None:
    records = [{"prompt": "2+2=", "completion": "4"}]
    assert learn(tmp_path, records).sample() == "2+2=⟦4<eos>⟧"
    assert learn(tmp_path, records, train_on="all").sample() == "⟦2+2=4<eos>⟧"


def test_of_pairs_the_completion_is_learned_and_of_all_else_everything(tmp_path: Path) -> None:
    pairs = [{"prompt": "2+2=", "completion": "4"}]
    assert learn(tmp_path, pairs, train_on="pairs").sample() == "2+2=⟦4<eos>⟧"
    assert learn(tmp_path, [{"text": "hello"}], train_on="pairs").sample() == "⟦hello<eos>⟧"
    talk = learn(tmp_path, [{"messages": TALK[:2]}], chat_tokenizer(), train_on="pairs").sample()
    assert talk == "⟦<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n⟧"


def test_of_a_pair_of_conversations_all_is_learned_that_the_prompt_does_not_have(tmp_path: Path) -> None:
    records = [{"prompt": TALK[:1], "completion": TALK[1:]}]
    assert learn(tmp_path, records, chat_tokenizer(), train_on="pairs").sample() == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>\n"
        "<|im_start|>user\nyes?<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n⟧"
    )


def test_a_token_that_reaches_into_the_completion_is_learned(tmp_path: Path) -> None:
    alphabet = {character: number for number, character in enumerate("ab=4")}
    joined = Tokenizer(models.BPE(vocab={**alphabet, "=4": 4, "<eos>": 5}, merges=[("=", "4")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=joined, eos_token="<eos>")
    (batch,) = learn(tmp_path, [{"prompt": "ab=", "completion": "4"}], tokenizer, per_device_train_batch_size=1).step(0)
    assert batch["labels"][0, :5].tolist() == [-100, -100, 4, 5, -100]


def test_assistant_turns_are_learned_with_their_end_mark(tmp_path: Path) -> None:
    assert learn(tmp_path, [{"messages": TALK}], chat_tokenizer()).sample() == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n"
        "<|im_start|>user\nyes?<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧\n"
    )


def test_a_template_that_marks_generation_is_taken_at_its_word(tmp_path: Path) -> None:
    sample = learn(tmp_path, [{"messages": TALK}], chat_tokenizer(GENERATION)).sample()
    assert sample == "[user]hi[assistant]⟦yes!⟧[user]yes?[assistant]⟦no!⟧"


def test_turns_are_found_where_a_template_shows_past_ones_differently(tmp_path: Path) -> None:
    assert learn(tmp_path, [{"messages": TALK}], chat_tokenizer(FORGETFUL)).sample() == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n"
        "<|im_start|>user\nyes?<|im_end|>\n<|im_start|>assistant\n⟦<think></think>no<|im_end|>⟧\n"
    )


def test_a_turn_that_a_template_rewrites_is_an_error(tmp_path: Path) -> None:
    shown = "{{ m['content'] if m.role == 'user' or loop.last else '(cut)' }}"
    rewriting = FORGETFUL.replace("{{ m['content'] }}", shown)
    with pytest.raises(UserError, match="does not show what the assistant says") as caught:
        learn(tmp_path, [{"messages": TALK}], chat_tokenizer(rewriting))
    assert "line 1 of data.jsonl" in caught.value.numbers


def test_sharegpt_conversations_are_known(tmp_path: Path) -> None:
    records = [{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}], "system": "S"}]
    assert learn(tmp_path, records, chat_tokenizer()).sample() == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n"
    )


def test_a_turn_with_weight_zero_is_shown_and_not_learned(tmp_path: Path) -> None:
    for key in ({"weight": 0}, {"train": False}):
        talk = [TALK[0], TALK[1] | key, *TALK[2:]]
        assert learn(tmp_path, [{"messages": talk}], chat_tokenizer()).sample() == (
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
            "<|im_start|>user\nyes?<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧\n"
        )


def test_a_weight_between_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="A record of the dataset is broken") as caught:
        learn(tmp_path, [{"messages": [TALK[0], TALK[1] | {"weight": 0.5}]}], chat_tokenizer())
    said = "line 1 of data.jsonl: a message's weight is 0 or 1 (false or true), this is 0.5"
    assert caught.value.numbers == (said,)


CALLING = CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}{{ m['tool_calls'] | tojson if m['tool_calls'] }}")


def test_a_function_call_of_sharegpt_is_learned_as_a_tool_call(tmp_path: Path) -> None:
    call = {"name": "add", "arguments": {"a": 2}}
    turns = [
        {"from": "human", "value": "2+3?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "5"},
        {"from": "gpt", "value": "five"},
    ]
    sample = learn(tmp_path, [{"conversations": turns}], chat_tokenizer(CALLING)).sample()
    assert '⟦[{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]<|im_end|>⟧' in sample
    assert "<|im_start|>tool\n5<|im_end|>" in sample and "⟦five<|im_end|>⟧" in sample
    with pytest.raises(UserError, match="does not show the tool_calls"):
        learn(tmp_path, [{"conversations": turns}], chat_tokenizer())


def test_a_history_comes_before_its_instruction(tmp_path: Path) -> None:
    record = {"instruction": "yes?", "output": "no", "history": [["hi", "yes"]]}
    sample = learn(tmp_path, [record], chat_tokenizer()).sample()
    assert sample == learn(tmp_path, [{"messages": TALK}], chat_tokenizer()).sample()
    with pytest.raises(UserError, match=r"line 1 of data\.jsonl: a history of turns needs a chat template"):
        learn(tmp_path, [record])


def test_prompt_and_completion_may_be_messages(tmp_path: Path) -> None:
    records = [{"prompt": TALK[:3], "completion": TALK[3:]}]
    assert learn(tmp_path, records, chat_tokenizer()).sample() == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        "<|im_start|>user\nyes?<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧\n"
    )


def test_alpaca_goes_through_the_chat_template_where_there_is_one(tmp_path: Path) -> None:
    records = [{"instruction": "add", "input": "2, 2", "output": "4", "text": "all of it"}]
    assert learn(tmp_path, records, chat_tokenizer()).sample() == (
        "<|im_start|>user\nadd\n2, 2<|im_end|>\n<|im_start|>assistant\n⟦4<|im_end|>⟧\n"
    )


def test_alpaca_has_its_own_prompt_otherwise(tmp_path: Path) -> None:
    sample = learn(tmp_path, [{"instruction": "add {x}", "input": "", "output": "4"}]).sample()
    assert sample.endswith("### Instruction:\nadd {x}\n\n### Response:\n⟦4<eos>⟧")
    assert "### Input" not in sample


def test_the_columns_read_and_not_read_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    learn(tmp_path, [{"text": "hello", "id": 7}])
    assert "data.jsonl: 1 record read as text (columns text; not used: id)" in caplog.text


def test_a_chat_document_gets_no_second_end_token_when_packed(tmp_path: Path) -> None:
    records = [{"messages": TALK[:2]}] * 2
    sample = learn(tmp_path, records, chat_tokenizer(), packing="wrapped").sample()
    assert sample.count("<|im_end|>") == 4


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_files_of_every_type_give_the_same_data(tmp_path: Path, suffix: str) -> None:
    records = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "it is", "completion": "NA"}]
    path = tmp_path / f"data.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps(records))
    elif suffix == "jsonl":
        write_jsonl(path, records)
    else:
        getattr(datasets.Dataset.from_list(records), f"to_{suffix}")(str(path))
    data = learn(tmp_path, path, per_device_train_batch_size=1)
    step = data.step(0) + data.step(1)
    assert sorted(batch["input_ids"][0, :4].tolist() for batch in step) == sorted(
        byte_tokenizer()(text)["input_ids"] for text in ("2+2=", "it i")
    )
    assert data.num_items(step) == 2 + 3


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert learn(tmp_path, tmp_path / "a.txt").sample() == "⟦one\n\ntwo\n<eos>⟧"


def test_a_folder_is_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    for name in ("b", "a", "sub/c"):
        (folder / f"{name}.txt").write_text(f"file {name}.")
    assert learn(tmp_path, folder, packing="wrapped").sample() == "⟦file a.<eos>file b.<eos>file sub/c.<eos>⟧"


def test_a_folder_of_mixed_types_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    write_jsonl(folder / "b.jsonl", [{"text": "b"}])
    with pytest.raises(UserError) as caught:
        learn(tmp_path, folder)
    assert "mixes file types: 1 json, 1 text" in str(caught.value)


def test_unknown_columns_are_an_error_that_lists_them(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        learn(tmp_path, [{"question": "a", "answer": "b"}])
    assert str(caught.value) == (
        "The columns of data.jsonl are not a format that is known.\n"
        "  found: question, answer\n"
        "  known: text | messages | conversations | prompt, completion | instruction, (input,) output | segments | "
        "input_ids, (labels) | (prompt,) chosen, rejected | prompt, completion, label\n"
        "  hint: name them in the entry, such as type: instructions, columns: {instruction: question, output: answer}, "
        "or rename them"
        "   [unknown-columns]"
    )
    assert caught.value.exit_code is Exit.USAGE


@pytest.mark.parametrize(("suffix", "text"), [("jsonl", ""), ("json", "[]"), ("csv", "text\n"), ("txt", "")])
def test_a_file_without_records_is_an_error(tmp_path: Path, suffix: str, text: str) -> None:
    path = tmp_path / f"data.{suffix}"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        learn(tmp_path, path)
    assert caught.value.code in ("empty-dataset", "nothing-to-train")


def test_empty_records_are_left_out_and_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = learn(tmp_path, [{"text": ""}, {"text": None}, {"text": "hello"}])
    assert data.sample() == "⟦hello<eos>⟧"
    assert "2 of 3 records are empty and left out" in caplog.text


def test_broken_json_is_an_error_without_a_traceback_in_it(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(UserError, match=r"line 2 of data\.jsonl is no JSON: Expecting value") as caught:
        learn(tmp_path, tmp_path / "data.jsonl")
    assert caught.value.code == "dataset-unreadable"


def test_conversations_without_a_template_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        learn(tmp_path, [{"messages": TALK}])
    assert str(caught.value) == (
        "The data are conversations, and the tokenizer has no chat template.\n"
        "  hint: give chat_template in the job file: the path of a Jinja template, or a name such as chatml"
        "   [no-chat-template]"
    )


def test_a_broken_record_is_named(tmp_path: Path) -> None:
    records = [{"messages": TALK}, {"messages": [{"role": "narrator", "content": "x"}]}]
    with pytest.raises(UserError) as caught:
        learn(tmp_path, records, chat_tokenizer())
    assert str(caught.value) == (
        'A record of the dataset is broken.\n  line 2 of data.jsonl: unknown role "narrator"\n'
        "  hint: correct it, or take it out; broken_rows: skip leaves such records out   [broken-record]"
    )


def test_a_template_that_refuses_a_conversation_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        learn(tmp_path, [{"messages": TALK}], chat_tokenizer("{{ raise_exception('no thanks') }}"))
    assert caught.value.numbers == (
        "line 1 of data.jsonl",
        "TemplateError: no thanks",
        "roles: user, assistant, user, assistant",
        "the template: chat_template of the job",
    )


def test_a_file_of_ones_own_is_read_without_asking_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("datasets.config.HF_UPDATE_DOWNLOAD_COUNTS", True)
    monkeypatch.setattr("datasets.load.get_session", lambda: asked.append("a connection"))
    learn(tmp_path, [{"text": "one"}])
    assert asked == []
