"""LLaMA-Factory's named datasets, as its dataset_info.json explains them; what is wrong is one line each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.data.records import conversation
from planner.importers.llama_factory_records import Conversation, LeftOut, Pair, Turn, read_pair
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
    "ranked": {
        "file_name": "plain.json",
        "ranking": True,
        "columns": {"prompt": "q", "query": "more", "chosen": "good", "rejected": "bad", "history": "h"},
    },
    "ranked talks": {
        "file_name": "talks.jsonl",
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "turns", "chosen": "good", "rejected": "bad"},
    },
    "tagged": {"file_name": "plain.json", "columns": {"prompt": "q", "response": "a", "kto_tag": "fine"}},
    "tagged talks": {
        "file_name": "talks.jsonl",
        "formatting": "openai",
        "columns": {"messages": "messages", "kto_tag": "fine"},
    },
    "both": {"file_name": "plain.json", "ranking": True, "columns": {"chosen": "a", "rejected": "b", "kto_tag": "c"}},
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


def test_ranked_and_tagged_data_are_pairs_and_answers_with_a_label(data: Path) -> None:
    names = "[ranked, ranked talks, tagged, tagged talks]"
    ranked, talks, tagged, tagged_talks = Job.parse(f"{LLAMA_FACTORY}dataset: {names}\n", data).data
    assert [entry.kind for entry in (ranked, talks, tagged, tagged_talks)] == ["preference"] * 2 + ["unpaired"] * 2
    instruction = {"q": "a", "more": "b", "good": "c", "bad": "d", "h": [["e", "f"]], "output": "no", "system": "no"}
    names = ["chosen", "history", "input", "instruction", "output", "rejected"]
    assert sorted(ranked.names(tuple(instruction))) == names
    asked = (Turn(role="user", content="e"), Turn(role="assistant", content="f"), Turn(role="user", content="a\nb"))
    answers = {"chosen": Turn(role="assistant", content="c"), "rejected": Turn(role="assistant", content="d")}
    pair = Pair(conversation=Conversation(turns=asked), **answers)
    assert read_pair("preference", ranked.mapped(instruction), "alpaca") == pair
    said = {"turns": [{"from": "system", "value": "S"}, {"from": "human", "value": "a"}]}
    said |= {"good": {"from": "gpt", "value": "c"}, "bad": {"from": "function_call", "value": "d"}}
    pair = Pair(
        conversation=Conversation(turns=(Turn(role="user", content="a"),), system="S"),
        chosen=Turn(role="assistant", content="c"),
        rejected=Turn(role="calls", content="d"),
    )
    assert read_pair("preference", talks.mapped(said), "sharegpt") == pair
    found = read_pair("unpaired", tagged.mapped({"q": "a", "a": "b", "fine": False}), "alpaca")
    assert found == Pair(
        conversation=Conversation(turns=(Turn(role="user", content="a"),)), rejected=Turn(role="assistant", content="b")
    )
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    found = read_pair("unpaired", tagged_talks.mapped({"messages": turns, "fine": True}), "openai")
    assert isinstance(found, Pair) and found.chosen == Turn(role="assistant", content="b") and found.rejected is None


@pytest.mark.parametrize(
    ("name", "record", "words"),
    [
        ("ranked", {"q": "a", "good": "c", "bad": None}, "their chosen and rejected answers are not both there"),
        ("ranked talks", {"turns": [], "good": {}, "bad": {}}, "the user or a tool does not have the last word"),
        ("ranked talks", {"turns": "ua", "good": {}, "bad": {}}, "the user or a tool does not have the last word"),
        ("ranked talks", {"turns": "uu", "good": {}, "bad": {}}, "the user and the assistant do not speak in turn"),
        (
            "ranked talks",
            {"turns": "u", "good": "c", "bad": "d"},
            "their chosen and rejected answers are not both there",
        ),
        ("tagged", {"q": "a", "a": "b", "fine": "yes"}, "their label is not true or false"),
        (
            "tagged talks",
            {"messages": [], "fine": True},
            "their turns are not in pairs of the user's and the assistant's",
        ),
    ],
)
def test_records_that_llama_factory_leaves_out_are_left_out(
    name: str, record: dict[str, Any], words: str, data: Path
) -> None:
    (entry,) = Job.parse(f"{LLAMA_FACTORY}dataset: [{name}]\n", data).data
    if isinstance(turns := record.get("turns"), str):
        record["turns"] = [{"from": {"u": "human", "a": "gpt"}[who], "value": "x"} for who in turns]
    assert entry.formatting is not None and (entry.kind == "preference" or entry.kind == "unpaired")
    found = read_pair(entry.kind, entry.mapped(record), entry.formatting)
    assert isinstance(found, LeftOut) and words in found.why


@pytest.mark.parametrize(
    ("name", "record", "words"),
    [
        ("ranked", {"q": "a", "good": "c", "bad": ""}, 'an answer is text, and not empty; this is ""'),
        ("ranked", {"q": 3, "good": "c", "bad": "d"}, "column instruction is text, this is 3"),
        ("ranked talks", {"good": {"from": "human", "value": "c"}}, "an answer is the assistant's, this is"),
        ("ranked talks", {"good": {"from": "bot", "value": "c"}}, "an answer is the assistant's, this is"),
        ("tagged", {"q": "a", "a": None, "fine": True}, "an answer is text, and not empty; this is "),
    ],
)
def test_records_at_which_llama_factory_fails_are_broken(
    name: str, record: dict[str, Any], words: str, data: Path
) -> None:
    (entry,) = Job.parse(f"{LLAMA_FACTORY}dataset: [{name}]\n", data).data
    if name == "ranked talks":
        record = {"turns": [{"from": "human", "value": "a"}], "bad": {"from": "gpt", "value": "d"}, **record}
    assert entry.formatting is not None and (entry.kind == "preference" or entry.kind == "unpaired")
    with pytest.raises(ValueError) as refused:
        read_pair(entry.kind, entry.mapped(record), entry.formatting)
    assert words in str(refused.value)


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
        ("prefer", "prefer has ranking: true and names no column chosen; add it to its columns"),
        ("both", "both has ranking and a kto_tag; leave out the one that is not meant"),
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
