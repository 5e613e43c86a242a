"""What is learned of data whose entries say what their columns are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import interleave_datasets, load_dataset
from pyarrow import parquet

from planner.data.entry import DataEntry
from planner.errors import UserError
from planner.job.data_check import check_data
from planner.job.schema import Job
from tests.support.texts import CHATML, byte_tokenizer, make_job, tiny_llama_folder, write_jsonl
from worker.data.batches import Batches
from worker.data.corpus import load_corpus
from worker.data.documents import mixture
from worker.data.sources import open_source


def learn(tmp_path: Path, records: list[dict[str, Any]], entry: str, lines: str = "") -> Batches:
    write_jsonl(tmp_path / "data.jsonl", records)
    tiny_llama_folder(tmp_path / "model", chat_template=CHATML)
    job = Job.parse(f"model: model\ndataset: [{{path: data.jsonl, {entry}}}]\nmax_length: 512\n{lines}", tmp_path)
    check_data(job)
    return Batches(job, byte_tokenizer(chat_template=job.chat_template or CHATML))


def test_a_mapped_conversation_is_learned_as_one_in_our_words(tmp_path: Path) -> None:
    records = [{"talk": [{"by": "customer", "says": "hi"}, {"by": "bot", "says": "yes"}]}]
    entry = """type: chat_template, field_messages: talk, message_property_mappings: {role: by, content: says},
        roles: {user: [customer], assistant: [bot]}"""
    mapped = learn(tmp_path, records, entry).sample()
    plain = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}]
    assert mapped == learn(tmp_path, plain, "type: messages").sample()
    assert mapped == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n"


def test_turns_of_other_roles_are_learned_where_the_entry_says_so(tmp_path: Path) -> None:
    records = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}]
    marks = "eot_tokens: [<|im_end|>], roles_to_train: "
    shown = "<|im_start|>user\n%s\n<|im_start|>assistant\n%s\n"
    found = learn(tmp_path, records, f"{marks} [user, assistant], train_on_eos: last")
    assert found.sample() == shown % ("⟦hi⟧<|im_end|>", "⟦yes<|im_end|>⟧")
    found = learn(tmp_path, records, f"{marks} [user]")
    assert found.sample() == shown % ("⟦hi<|im_end|>⟧", "yes<|im_end|>")
    found = learn(tmp_path, records, "train_on_eos: none", "train_on: all\n")
    assert found.sample() == shown % ("⟦hi⟧<|im_end|>", "⟦yes⟧<|im_end|>"), "but not what the template writes"
    with pytest.raises(UserError, match="has nothing to train on"):
        learn(tmp_path, records, f"{marks} []")


def test_an_answer_of_axolotls_is_learned_without_what_its_template_writes_before_it(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    write_jsonl(tmp_path / "data.jsonl", [{"messages": talk, "system": "Be brief."}])
    tiny_llama_folder(tmp_path / "model", chat_template=CHATML)
    text = "datasets: [{path: data.jsonl, type: chat_template}]\nchat_template: qwen3\nsequence_len: 512\n"
    job = Job.parse(f"base_model: model\n{text}learning_rate: 1e-4\n", tmp_path)
    check_data(job)
    found = Batches(job, byte_tokenizer(chat_template=job.chat_template)).sample()
    assert found == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n⟦yes<|im_end|>⟧\n"
    )


def test_nulls_and_texts_of_json_are_read_as_axolotl_reads_them(tmp_path: Path) -> None:
    asking = (
        "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{% set said = call.function.arguments %}{{ said if said is string else said | tojson }}{% endfor %}<|im_end|>"
        "{% endfor %}"
    )
    job = f"chat_template: {json.dumps(asking)}\n"
    entry = "type: chat_template, message_property_mappings: {tool_calls: calls}, roles_to_train: [assistant]"
    calls = [
        {"function": {"name": "f", "arguments": said}} for said in ({"a": None, "b": [None]}, '{"a":null,"b":1.10}')
    ]
    tools = [{"name": "f", "function": {"enum": None, "parameters": '{"x":null}'}}]
    talk = [{"role": "user", "content": "go"}, {"role": "assistant", "content": None, "calls": calls}]
    without = "<|im_start|>go<|im_end|>"
    go = f"{without}<|im_start|>"
    assert learn(tmp_path, [{"messages": talk, "tools": tools}], entry, job).sample() == (
        f'[{{"name": "f", "function": {{"parameters": {{"x": null}}}}}}]{go}'
        '⟦{"b": [null]}{"a": null, "b": 1.1}<|im_end|>⟧'
    )
    texts = {"messages": json.dumps(talk), "tools": json.dumps(tools)}
    assert learn(tmp_path, [texts], entry, job).sample() == (
        f'[{{"name": "f", "function": {{"enum": null, "parameters": {{"x": null}}}}}}]{go}'
        '⟦{"a": null, "b": [null]}{"a": null, "b": 1.1}<|im_end|>⟧'
    ), "nulls of a text are no nulls of the record"
    ours = [{"messages": [talk[0], {"role": "assistant", "tool_calls": calls}], "tools": tools}]
    assert learn(tmp_path, ours, "type: messages", job).sample() == (
        f'[{{"name": "f", "function": {{"enum": null, "parameters": "{{\\"x\\":null}}"}}}}]{without}'
        '⟦<|im_start|>{"a": null, "b": [null]}{"a":null,"b":1.10}<|im_end|>⟧'
    ), "an entry of ours is as it is written"
    wrong = [talk[0], {**talk[1], "calls": [{"function": {"name": "f", "arguments": "{"}}]}]
    with pytest.raises(UserError, match=r'axolotl reads arguments of a call as JSON, and "{" is no JSON: Expecting'):
        learn(tmp_path, [{"messages": wrong}], entry, job)


def test_a_chat_template_is_told_values_of_the_job_the_entry_and_the_conversation(tmp_path: Path) -> None:
    asking = "{% for m in messages %}<|im_start|>{{ m.content }} {{ mood | default('-') }}{{ think | default('-') }}"
    asking += "<|im_end|>{% endfor %}"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    records = [{"messages": talk, "chat_template_kwargs": said} for said in (None, {"mood": "gay"}, '{"mood": "low"}')]
    job = f"chat_template_kwargs: {{mood: calm, think: false}}\nchat_template: {json.dumps(asking)}\n"
    found = learn(tmp_path, records, "type: messages", job + "train_on: all\n")
    written = [found.shown(row).pieces for row in range(3)]
    texts = ["".join(piece for piece, _ in pieces) for pieces in written]
    assert sorted(texts) == sorted(
        f"<|im_start|>a {mood}False<|im_end|><|im_start|>b {mood}False<|im_end|>" for mood in ("calm", "gay", "low")
    )
    found = learn(tmp_path, records[:1], "chat_template_kwargs: {mood: odd, think: null}", job + "train_on: all\n")
    assert "".join(piece for piece, _ in found.shown(0).pieces).startswith("<|im_start|>a oddFalse<|im_end|>")
    with pytest.raises(UserError, match="tools, which is not the template's own"):
        learn(tmp_path, [{"messages": talk, "chat_template_kwargs": {"tools": []}}], "type: messages")


def test_alpaca_is_its_own_prompt_and_instructions_are_the_chat_templates(tmp_path: Path) -> None:
    records = [{"instruction": "Add.", "input": "1 2", "output": "3"}]
    assert learn(tmp_path, records, "type: alpaca").sample() == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n⟦3<eos>⟧"
    )
    chat = learn(tmp_path, records, "type: instructions").sample()
    assert chat == "<|im_start|>user\nAdd.\n1 2<|im_end|>\n<|im_start|>assistant\n⟦3<|im_end|>⟧\n"


def test_a_column_that_is_not_to_be_taken_is_told_as_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    records = [{"instruction": "Add.", "input": "", "output": "3", "system": "Be odd.", "id": 1}]
    sample = learn(tmp_path, records, "type: alpaca").sample()
    assert sample.startswith("Below is an instruction") and "odd" not in sample
    assert "(columns instruction, input, output; not used: system, id)" in caplog.text
    renamed = [{"messages": 1, "talk": [{"role": "user", "content": ""}, {"role": "assistant", "content": "b"}]}]
    learn(tmp_path, renamed, "columns: {messages: talk}")
    assert "(columns messages; not used: messages)" in caplog.text


def test_an_instruction_without_a_text_is_its_input_alone(tmp_path: Path) -> None:
    records = [{"instruction": "", "input": "1 + 2", "output": "3"}]
    assert learn(tmp_path, records, "type: instructions").sample().startswith("<|im_start|>user\n1 + 2<|im_end|>")


def test_a_prompt_of_ones_own(tmp_path: Path) -> None:
    entry = """type: {field_instruction: q, field_output: a, no_input_format: 'Q: {instruction} A: '}"""
    assert learn(tmp_path, [{"q": "2+2", "a": "4"}], entry).sample() == "Q: 2+2 A: ⟦4<eos>⟧"


def test_completions_are_texts_of_any_column_and_long_ones_are_split(tmp_path: Path) -> None:
    data = learn(tmp_path, [{"body": "long ago"}], "type: completion, field: body")
    assert data.sample() == "⟦long ago<eos>⟧"
    keys = "max_length: 4\nlong_rows: split\nper_device_train_batch_size: 3\n"
    write_jsonl(tmp_path / "data.jsonl", [{"text": "long ago"}, {"text": "now"}])
    job = Job.parse(f"model: model\ndataset: data.jsonl\n{keys}", tmp_path)
    split = Batches(job, byte_tokenizer())
    rows = [split._rows.pieces(number) for number in range(len(split._rows))]
    texts = [byte_tokenizer().decode(tokens) for row in rows for tokens, _ in row]
    assert texts == ["long", " ago", "now<eos>"], "the end mark of the first, a row by itself, has nothing before it"


def test_segments_are_learned_by_their_label(tmp_path: Path) -> None:
    records = [{"segments": [{"label": False, "text": "<s>Q "}, {"label": True, "text": "A</s>"}]}]
    assert learn(tmp_path, records, "type: input_output").sample() == "<s>Q ⟦A</s>⟧"


def test_a_part_of_a_file_is_its_first_records(tmp_path: Path) -> None:
    records = [{"text": f"text {number}"} for number in range(40)]
    data = learn(tmp_path, records, "split: 'train[:10%]'", "per_device_train_batch_size: 4\n")
    assert len(data._rows) == 4


def test_an_arrow_file_is_read_as_any_other(tmp_path: Path) -> None:
    table = pa.table({"text": ["hello"]})
    with pa.OSFile(str(tmp_path / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    tiny_llama_folder(tmp_path / "model")
    job = Job.parse("model: model\ndataset: data.arrow\nmax_length: 64\n", tmp_path)
    check_data(job)
    assert Batches(job, byte_tokenizer()).sample() == "⟦hello<eos>⟧"


@pytest.mark.parametrize(
    ("strategy", "shares", "counts"),
    [
        ("concat", None, (12, 4)),
        ("interleave_under", None, (4, 4)),
        ("interleave_over", None, (12, 12)),
        ("interleave_once", None, (12, 4)),
        ("interleave_once", (0.75, 0.25), (12, 4)),
        ("interleave_under", (0.75, 0.25), None),
        ("interleave_over", (0.5, 0.5), None),
    ],
)
def test_entries_are_mixed_as_llama_factory_mixes_them(
    tmp_path: Path, strategy: str, shares: tuple[float, ...] | None, counts: tuple[int, int] | None
) -> None:
    one = write_jsonl(tmp_path / "one.jsonl", [{"text": f"one {n}"} for n in range(12)])
    two = write_jsonl(tmp_path / "two.jsonl", [{"text": f"two {n}"} for n in range(4)])
    job = make_job(tiny_llama_folder(tmp_path / "model"), one, max_length=16, seed=3).model_copy(
        update={"dataset": (str(one), str(two)), "mix_strategy": strategy, "interleave_probs": shares}
    )
    tokenizer = byte_tokenizer()
    corpus = load_corpus(job, tokenizer, tmp_path / "data")
    pieces = np.split(corpus.tokens, corpus.ends[:-1])
    found = [tokenizer.decode(piece, skip_special_tokens=True) for piece in pieces]
    if strategy == "concat":
        wanted = [*(f"one {n}" for n in range(12)), *(f"two {n}" for n in range(4))]
    else:
        loaded = [load_dataset("json", data_files=str(file), split="train") for file in (one, two)]
        stop = {
            "interleave_under": "first_exhausted",
            "interleave_over": "all_exhausted",
            "interleave_once": "all_exhausted_without_replacement",
        }[strategy]
        wanted = interleave_datasets(
            loaded, probabilities=list(shares) if shares else None, seed=3, stopping_strategy=stop
        )["text"]
    assert found == list(wanted)
    if counts is not None:
        assert tuple(sum(text.startswith(name) for text in found) for name in ("one", "two")) == counts


def test_rounded_thirds_are_shares(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "one.jsonl", [{"text": "one"}])
    text = "model: model\ndataset: [one.jsonl, one.jsonl, one.jsonl]\nmix_strategy: interleave_under\n"
    tiny_llama_folder(tmp_path / "model")
    rounded, exact = (
        Job.parse(f"{text}interleave_probs: [{share}, {share}, {share}]\n", tmp_path)
        for share in ("0.3333333", repr(1 / 3))
    )
    assert list(mixture(rounded, [90, 90, 90])) == list(mixture(exact, [90, 90, 90]))


def test_broken_and_empty_records_are_told_where_entries_are_mixed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, texts in (("one", [b"", b"good"]), ("two", [b"caf\xe9", b"good"]), ("three", [b"fine", b"good"])):
        table = pa.table({"text": pa.array(texts, pa.binary()).view(pa.string())})
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    tiny_llama_folder(tmp_path / "model")
    text = "model: model\nmax_length: 64\nmix_strategy: interleave_under\ndataset: "
    job = Job.parse(f"{text}[one.parquet, three.parquet]\n", tmp_path)
    assert len(load_corpus(job, byte_tokenizer(), tmp_path / "data").ends) == 3
    assert "one.parquet: 1 of 2 records drawn are empty and left out" in caplog.text
    job = Job.parse(f"{text}[one.parquet, two.parquet]\n", tmp_path)
    with pytest.raises(UserError) as refused:
        load_corpus(job, byte_tokenizer(), tmp_path / "data")
    told = ('row 1 of two.parquet has a text that is not UTF-8: 0xe9 in "caf\ufffd"',)
    assert (refused.value.code, refused.value.numbers) == ("dataset-unreadable", told)


def test_the_folder_of_an_entry_has_its_splits_by_its_files_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dataset by its name, as those of the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("worker.data.hub_files.check_reached", lambda *_: None)
    (tmp_path / "named" / "en").mkdir(parents=True)
    for split in ("train", "test"):
        write_jsonl(tmp_path / "named" / "en" / f"{split}.jsonl", [{"text": split}])
    write_jsonl(tmp_path / "named" / "train.jsonl", [{"text": "all"}])
    rows = open_source(DataEntry(path="named", data_dir="en")).rows()
    assert [row.record for row in rows] == [{"text": "train"}]


def test_an_entry_may_be_its_first_records_alone(tmp_path: Path) -> None:
    records = [{"text": f"row {number}"} for number in range(5)]
    assert learn(tmp_path, records, "max_samples: 3").rows == 3
    assert learn(tmp_path, records, "max_samples: 3", "max_samples: 2\n").rows == 2
    assert learn(tmp_path, records, "type: text", "max_samples: 4\n").rows == 4
    with pytest.raises(UserError, match=r"max_samples of an entry is 0\.5"):
        learn(tmp_path, records, "max_samples: 0.5")


def test_an_entry_without_a_most_is_written_as_it_was_before_there_was_one() -> None:
    assert "max_samples" not in DataEntry(path="a").model_dump(mode="json")
    assert DataEntry(path="a", max_samples=2).model_dump(mode="json")["max_samples"] == 2
