"""LLaMA-Factory's named datasets, as its dataset_info.json explains them; what is wrong is one line each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.data.records import conversation
from planner.job.schema import Job
from tests.planner.data.test_entry import AXOLOTL, LLAMA_FACTORY, entry, one_line
from tests.support.texts import write_jsonl

INFO = {
    "plain": {"file_name": "plain.json"},
    "renamed": {"file_name": "plain.json", "columns": {"prompt": "q", "query": "more", "response": "a", "system": "s"}},
    "talks": {
        "file_name": "talks.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "turns", "system": "sys"},
        "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "me", "assistant_tag": "it"},
    },
    "open": {"file_name": "talks.jsonl", "formatting": "openai", "columns": {"messages": "messages"}},
    "hub": {"hf_hub_url": "owner/set", "subset": "en", "split": "train[:5%]", "folder": "v2"},
    "here": {"hf_hub_url": "/nowhere/at/all", "folder": "en"},
    "numbered": {"hf_hub_url": "owner/set", "folder": 3},
    "text": {"file_name": "texts.jsonl", "columns": {"prompt": "body"}},
    "prefer": {"file_name": "plain.json", "ranking": True},
    "seen": {"file_name": "plain.json", "columns": {"images": "images"}},
    "drawn": {"file_name": "plain.json", "num_samples": 10},
    "called": {"file_name": "plain.json", "columns": {"tools": "tools"}},
    "lost": {"file_name": "lost.json"},
    "partly": {"file_name": "plain.json", "columns": {"prompt": "q", "response": "a"}},
    "script": {"script_url": "here"},
}


@pytest.fixture
def data(folder: Path) -> Path:
    (folder / "data").mkdir()
    (folder / "data" / "dataset_info.json").write_text(json.dumps(INFO))
    (folder / "data" / "plain.json").write_text('[{"instruction": "a", "output": "b"}]')
    talk = [{"who": "me", "what": "hi"}, {"who": "it", "what": "yes"}]
    write_jsonl(folder / "data" / "talks.jsonl", [{"turns": talk}])
    write_jsonl(folder / "data" / "texts.jsonl", [{"body": "long ago"}])
    return folder


def test_llama_factorys_names_are_those_of_its_dataset_info(data: Path) -> None:
    job = Job.parse(LLAMA_FACTORY + "dataset: plain, talks,hub\n", data)
    plain, talks, hub = job.data
    assert (plain.path, plain.type, plain.prompt_format) == (str(data / "data" / "plain.json"), "instructions", None)
    assert (hub.path, hub.name, hub.split, hub.data_dir) == ("owner/set", "en", "train[:5%]", "v2")
    record = {"turns": [{"who": "me", "what": "hi"}, {"who": "it", "what": "yes"}], "sys": "be nice"}
    mapped = talks.mapped(record)
    assert mapped["system"] == "be nice"
    assert conversation(mapped["messages"]) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
    ]


def test_llama_factorys_columns_that_are_not_named_are_not_there(data: Path) -> None:
    plain, renamed = Job.parse(LLAMA_FACTORY + "dataset: [plain, partly]\n", data).data
    record = {"instruction": "a", "input": "b", "output": "c", "system": "d", "history": [["e", "f"]]}
    assert plain.mapped(record) == {"instruction": "a", "input": "b", "output": "c"}
    assert plain.names(tuple(record)) == ("instruction", "input", "output")
    assert renamed.mapped({"q": "a", "input": "b", "a": "c"}) == {"instruction": "a", "output": "c"}
    (talks,) = Job.parse(LLAMA_FACTORY + "dataset: open\n", data).data
    (message,) = [{"role": "user", "content": "hi"}]
    record = {"messages": [message | {"weight": 0}], "system": "s", "tools": "[]", "chat_template_kwargs": {}}
    assert talks.mapped(record) == {"messages": [message]} and talks.names(tuple(record)) == ("messages",)


def test_llama_factorys_data_may_lie_above_the_file(data: Path) -> None:
    (below := data / "examples" / "train_lora").mkdir(parents=True)
    text = LLAMA_FACTORY.replace("tiny", str(data / "tiny")) + "dataset: plain\n"
    assert Job.parse(text, below).data[0].path == str(data / "data" / "plain.json")


def test_llama_factorys_renamed_columns_and_openais_form(data: Path) -> None:
    renamed, opened = Job.parse(LLAMA_FACTORY + "dataset: [renamed, open]\n", data).data
    found = renamed.mapped({"q": "a", "more": "b", "a": "c", "s": "d"})
    assert found == {"instruction": "a", "input": "b", "output": "c", "system": "d"}
    messages = opened.mapped({"messages": [{"role": "user", "content": "hi"}]})["messages"]
    assert messages == [{"role": "user", "content": "hi"}]


def test_pretraining_learns_the_column_of_prompts(data: Path) -> None:
    found = entry("model_name_or_path: tiny\nstage: pt\nfinetuning_type: full\ndataset: text\n", data)
    assert (found.type, found.columns, found.formatting) == ("text", {"text": "body"}, "alpaca")
    head = "model_name_or_path: tiny\nstage: pt\nfinetuning_type: full\ndataset: "
    assert "renamed has query beside prompt; with stage: pt only one column is" in one_line(f"{head}renamed\n", data)
    for name in ("plain", "talks"):
        assert f"{name} names no column of texts for stage: pt; give" in one_line(f"{head}{name}\n", data)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("prefer", "prefer is data of preferences; offmate trains on texts and conversations"),
        ("seen", "seen has images; offmate trains on texts and conversations"),
        ("drawn", "drawn has num_samples, which draws a part of it"),
        ("lost", "there is no dataset at "),
        ("here", "there is no dataset at /nowhere/at/all"),
        ("numbered", "numbered has folder: 3; it must be a folder's name"),
        ("script", "script has neither file_name nor hf_hub_url"),
        ("nobody", "nobody is not in "),
    ],
)
def test_what_cannot_be_read_of_a_named_dataset_is_one_line(name: str, words: str, data: Path) -> None:
    assert words in one_line(LLAMA_FACTORY + f"dataset: {name}\n", data)


def test_where_no_dataset_info_is_it_is_said_where_it_was_looked_for_and_what_to_type(folder: Path) -> None:
    text = LLAMA_FACTORY + "dataset: identity\n"
    (below := folder / "examples").mkdir()
    text = text.replace("tiny", str(folder / "tiny"))
    assert one_line(text, below) == (
        f"line 4: dataset: there is no dataset_info.json in {below}/data, nor in data of a folder above, to say what"
        " identity is; give the folder that has one (dataset_dir: /path/of/it), or in place of identity its file or its"
        " hub id"
    )
    assert f"there is no dataset_info.json in {folder}/elsewhere, to say what" in one_line(
        f"{text}dataset_dir: {folder}/elsewhere\n", below
    )


def test_entries_read_back_equal(data: Path) -> None:
    for text in (
        LLAMA_FACTORY + "dataset: plain,talks,renamed\n",
        f"{AXOLOTL}datasets: [{{path: text.jsonl, type: alpaca, split: 'train[:50%]'}}, {{path: owner/set}}]\n",
    ):
        job = Job.parse(text, data)
        (data / "resolved.yaml").write_text(job.resolved_yaml())
        assert Job.from_resolved(data / "resolved.yaml") == job
