"""Entries of `dataset`: axolotl's lists, LLaMA-Factory's named datasets, TRL's keys; what is wrong is one line each."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.data.entry import DataEntry, LearnedTurns, PromptFormat
from planner.data.records import conversation
from planner.errors import UserError
from planner.job.data_check import check_data
from planner.job.imported import imported
from planner.job.schema import Job
from tests.support.texts import write_jsonl

AXOLOTL = "base_model: tiny\nlearning_rate: 0.0002\n"
LLAMA_FACTORY = "model_name_or_path: tiny\nstage: sft\nfinetuning_type: full\n"
TRL = "model_name_or_path: tiny\n"


def entry(text: str, folder: Path) -> DataEntry:
    (found,) = Job.parse(text, folder).data
    return found


def one_line(text: str, folder: Path) -> str:
    with pytest.raises(UserError) as refused:
        Job.parse(text, folder)
    (line,) = refused.value.numbers
    return line


def test_a_path_alone_stays_a_path(folder: Path) -> None:
    job = Job.parse(f"{AXOLOTL}datasets: [{{path: text.jsonl, ds_type: json, split: train}}]", folder)
    assert job.dataset == (str(folder / "text.jsonl"),)


def test_axolotls_chat_entries_say_where_messages_roles_and_contents_are(folder: Path) -> None:
    found = entry(
        f"""{AXOLOTL}datasets:
  - path: text.jsonl
    type: chat_template
    field_messages: dialogue
    field_tools: functions
    message_property_mappings: {{role: speaker, content: said}}
    message_field_training: learn
    field_thinking: thoughts
    roles: {{assistant: [bot, gpt], user: [customer]}}
    roles_to_train: [assistant]
    train_on_eos: turn
    drop_system_message: true
    split: train[:10%]
""",
        folder,
    )
    assert (found.type, found.split, found.drop_system) == ("messages", "train[:10%]", True)
    record = {
        "dialogue": [
            {"speaker": "system", "said": "be nice"},
            {"speaker": "customer", "said": "hi"},
            {"speaker": "bot", "said": "yes", "thoughts": "hm", "learn": False},
        ],
        "functions": [{"name": "f"}],
        "other": 1,
    }
    mapped = found.mapped(record)
    assert mapped["tools"] == [{"name": "f"}] and found.names(tuple(record)) == ("messages", "tools", "other")
    assert conversation(mapped["messages"]) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes", "reasoning_content": "hm", "train": False},
    ]


def test_which_turns_are_learned_is_said_by_an_entry_and_kept(folder: Path) -> None:
    job = Job.parse(
        f"""{AXOLOTL}eot_tokens: [<|end|>]
datasets:
  - {{path: text.jsonl, type: chat_template, roles: {{user: [customer]}}, roles_to_train: [customer, gpt]}}
  - {{path: text.jsonl, type: chat_template, roles_to_train: [], train_on_eos: none, train_on_eot: last}}
  - {{path: text.jsonl, type: chat_template, roles_to_train: [gpt, assistant], train_on_eot: turn}}
""",
        folder,
    )
    assert [found.learned for found in job.data] == [
        LearnedTurns(roles=frozenset({"user", "assistant"}), marks=("<|end|>",)),
        LearnedTurns(roles=frozenset(), eos="none", eot="last", marks=("<|end|>",)),
        LearnedTurns(roles=frozenset({"assistant"}), marks=("<|end|>",)),
    ]
    (folder / "resolved.yaml").write_text(job.resolved_yaml())
    assert Job.from_resolved(folder / "resolved.yaml") == job


@pytest.mark.parametrize(
    "before", [AXOLOTL + "eot_tokens: [<|end|>]\n", TRL, "model: tiny\n"], ids=["axolotl", "TRL", "ours"]
)
def test_an_entry_whose_dash_was_forgotten_is_that_entry(before: str, folder: Path) -> None:
    one = "path: text.jsonl, type: chat_template, message_field_training: train"
    if not before.startswith("base_model"):
        one = "path: text.jsonl, split: 'train[:50%]'"
    assert entry(f"{before}datasets: {{{one}}}\n", folder) == entry(f"{before}datasets: [{{{one}}}]\n", folder)


def test_axolotls_conversations_are_read_and_learned_by_its_rules_where_nothing_is_said(folder: Path) -> None:
    write_jsonl(folder / "more.jsonl", [{"text": "a"}])
    text = """eot_tokens: [<|end|>]
datasets:
  - {path: text.jsonl, type: chat_template}
  - {path: text.jsonl, type: chat_template, train_on_eos: last, message_field_training: train, drop_system: true}
  - {path: text.jsonl, type: completion}
test_datasets: [{path: text.jsonl, type: chat_template.default}]
"""
    job = Job.parse(AXOLOTL + text, folder)
    answers = LearnedTurns(roles=frozenset({"assistant"}), marks=("<|end|>",))
    one, other, texts = job.data
    assert (one.learned, texts.learned, job.eval_data[0].learned) == (answers, None, answers)
    assert other.learned == LearnedTurns(roles=answers.roles, eos="last", eot="last", marks=answers.marks)
    message = {"role": "assistant", "content": "a", "train": False, "weight": 0}
    record = {"messages": [message], "system": "s", "chat_template_kwargs": {"a": 1}}
    bare = {key: message[key] for key in ("role", "content")}
    assert one.mapped(record) == {"messages": [bare], "system": "s"}
    assert other.mapped(record)["messages"] == [bare | {"train": False}], "which it names"
    assert ("system" in one.columns, "system" in other.columns) == (True, False)
    again = imported(AXOLOTL + text, folder, "axolotl.yml")
    assert Job.parse(again, folder).data == job.data
    (ours,) = Job.parse("model: model\ndataset: [{path: text.jsonl, type: chat_template}]\n", folder).data
    assert ours == DataEntry(path=ours.path, type="messages"), "in offmate's own file the chat template says it"
    (ours,) = Job.parse("model: model\ndataset: text.jsonl\neot_tokens: [<|end|>]\n", folder).data
    assert ours.learned == answers, "no end marks are dropped"


def test_which_turns_are_learned_may_be_said_of_all_conversations(folder: Path) -> None:
    job = Job.parse(
        f"""{AXOLOTL}roles_to_train: []
train_on_eos: all
eval_dataset: text.jsonl
datasets:
  - {{path: text.jsonl, type: chat_template}}
  - {{path: text.jsonl, type: chat_template, train_on_eos: last}}
  - {{path: text.jsonl, type: completion}}
""",
        folder,
    )
    nobody = LearnedTurns(roles=frozenset(), eos="all", eot="all")
    assert [found.learned for found in (*job.data, *job.eval_data)] == [
        nobody,
        LearnedTurns(roles=frozenset(), eos="last", eot="last"),
        None,
        nobody,
    ]
    again = imported(job.resolved_yaml(), folder, "resolved.yaml")
    assert Job.parse(again, folder).data == job.data
    with pytest.raises(UserError, match="another choice of what is learned is not supported yet"):
        Job.parse("stage: sft\nfinetuning_type: full\nmodel_name_or_path: model\ntrain_on_eos: all", folder)


def test_which_turns_are_learned_is_not_said_of_all_where_no_entry_has_any(folder: Path) -> None:
    lines = "train_on_eos: none\nroles_to_train: []\n"
    for entries in ("[{path: text.jsonl, type: alpaca}]", "[{path: text.jsonl, type: instructions}]"):
        with pytest.raises(UserError) as refused:
            Job.parse(f"{AXOLOTL}{lines}datasets: {entries}", folder)
        words = "it is for conversations, and by their type no entry of dataset has any; leave it out"
        assert refused.value.numbers == (f"line 3: train_on_eos: {words}", f"line 4: roles_to_train: {words}")
    with pytest.raises(UserError, match="train_on_eos is false; it must be one of turn"):
        Job.parse(f"{AXOLOTL}train_on_eos: false\ndatasets: [{{path: text.jsonl, type: chat_template}}]", folder)
    Job.parse(f"{AXOLOTL}{lines}datasets: [{{path: text.jsonl, type: alpaca}}, {{path: text.jsonl}}]", folder)


def test_each_mistake_in_an_entry_is_told_at_its_own_line(folder: Path) -> None:
    entries = "\n  - path: text.jsonl\n    type: completion\n  - path: text.jsonl\n    type: oasst\n  - gone.jsonl\n"
    with pytest.raises(UserError) as refused:
        Job.parse(f"model: model\ndataset:{entries}", folder)
    assert [line.split(": type is")[0].split(" at ")[0] for line in refused.value.numbers] == [
        "line 5: dataset",
        "line 7: dataset: there is no dataset",
    ]


def test_which_turns_are_learned_is_for_conversations(folder: Path) -> None:
    job = Job.parse(f"{AXOLOTL}datasets: [{{path: text.jsonl, roles_to_train: [user]}}]", folder)
    with pytest.raises(UserError, match="its records are not conversations") as refused:
        check_data(job)
    assert (refused.value.code, refused.value.numbers) == ("no-turns", ("they are read as text",))


def test_a_turn_says_itself_whether_it_is_learned() -> None:
    talk = [{"role": "user", "content": "a", "train": True}, {"role": "user", "content": "b", "weight": 1}]
    assert [message.get("train") for message in conversation(talk)] == [True, None]
    with pytest.raises(ValueError, match="a turn is learned whole or not"):
        conversation([{"role": "user", "content": [{"text": "a", "train": False}]}])


def test_axolotls_alpaca_is_the_alpaca_prompt_whatever_template_the_tokenizer_has(folder: Path) -> None:
    prompt = entry(f"{AXOLOTL}datasets: [{{path: text.jsonl, type: alpaca}}]", folder).prompt_format
    assert prompt is not None
    assert prompt.written("Add.", "1 2", "").endswith("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n")
    assert prompt.written("Add.", "", "") == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nAdd.\n\n### Response:\n"
    )


def test_axolotls_alpaca_takes_no_system_text_and_no_history_of_the_data(folder: Path) -> None:
    record = {"instruction": "a", "output": "b", "system": "c", "history": [["d", "e"]]}
    found = entry(f"{AXOLOTL}datasets: [{{path: text.jsonl, type: alpaca}}]", folder)
    assert found.mapped(record) == {"instruction": "a", "output": "b"}
    assert found.names(tuple(record)) == ("instruction", "output")
    named = entry(f"{AXOLOTL}datasets: [{{path: text.jsonl, type: alpaca, columns: {{system: system}}}}]", folder)
    assert named.mapped(record)["system"] == "c"
    own = entry(f"{AXOLOTL}datasets: [{{path: text.jsonl, type: {{system_format: 'Q '}}}}]", folder)
    assert "system" not in own.mapped(record), "a format without a place for it"


def test_axolotls_own_prompts_have_their_columns_and_formats(folder: Path) -> None:
    found = entry(
        f"""{AXOLOTL}datasets:
  - path: text.jsonl
    type:
      system_prompt: Be brief.
      system_format: "<{{system}}>"
      field_instruction: question
      field_output: answer
      format: "[{{instruction}}|{{input}}]"
      no_input_format: "[{{instruction}}]"
""",
        folder,
    )
    assert found.columns == {"instruction": "question", "output": "answer"}
    assert found.prompt_format == PromptFormat(
        with_input="<{system}>[{instruction}|{input}]", without_input="<{system}>[{instruction}]", system="Be brief."
    )
    assert found.prompt_format.written("a", "", "") == "<Be brief.>[a]"
    assert found.prompt_format.written("a {input}", "b", "c") == "<c>[a {input}|b]", "no text is taken for a place"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("type: oasst", 'type is "oasst"; leave it out, as columns are detected, or give one of alpaca, completion'),
        ("type: chat_template, train_on_eos: first", 'train_on_eos is "first"; it must be one of turn, all, '),
        ("type: chat_template, train_on_eos: false", "train_on_eos is false; it must be one of turn, all, last, none"),
        ("type: chat_template, train_on_eot: no", "train_on_eot is false; it must be one of turn, all, last, none"),
        ("type: chat_template, train_on_eos: 0", "train_on_eos is 0; it must be one of turn, all, last, none"),
        ("type: chat_template, roles_to_train: false", "roles_to_train is false; it must be a list of roles"),
        ("type: chat_template, roles_to_train: [narrator]", "roles_to_train has narrator, and no turn has that role"),
        (
            "type: chat_template, message_field_training_detail: d",
            "message_field_training_detail is not supported: it asks for learning",
        ),
        (
            "type: alpaca, shards: 10",
            "shards is not supported: it asks for a shard of the data; give split, like train[:5%]",
        ),
        ("typ: alpaca", "an entry has no key typ"),
        ("type: {feld: x}", "a type has no key feld"),
        ("split: 'train['", 'split of an entry is "train["'),
    ],
)
def test_what_is_wrong_with_an_entry_is_one_line(lines: str, words: str, folder: Path) -> None:
    line = one_line(f"{AXOLOTL}datasets: [{{path: text.jsonl, {lines}}}]", folder)
    assert line.startswith("line 3: datasets: ") and words in line


def test_files_by_their_reader_and_hub_entries_with_name_and_files(folder: Path) -> None:
    (folder / "more.jsonl").write_text('{"text": "b"}\n')
    job = Job.parse(
        f"""{AXOLOTL}datasets:
  - {{path: json, data_files: [text.jsonl, more.jsonl], type: completion}}
  - {{path: owner/set, name: en, split: 'train[:5%]', data_files: a/*.json, revision: v2, type: completion}}
""",
        folder,
    )
    assert [found.path for found in job.data] == [str(folder / "text.jsonl"), str(folder / "more.jsonl"), "owner/set"]
    hub = job.data[2]
    assert (hub.name, hub.split, hub.data_files, hub.revision) == ("en", "train[:5%]", ("a/*.json",), "v2")
    assert job.long_rows == "split", "axolotl cuts long texts of completion into several"


def test_the_template_of_the_entries_is_the_jobs_and_there_is_one(folder: Path) -> None:
    lines = "datasets: [{path: text.jsonl, chat_template: %s}, {path: owner/set, chat_template: %s}]"
    job = Job.parse(AXOLOTL + lines % ("chatml", "chatml"), folder)
    assert job.chat_template is not None and "<|im_start|>" in job.chat_template
    assert "several chat templates: " in one_line(AXOLOTL + lines % ("chatml", "llama3"), folder)


def test_trls_dataset_has_its_part_split_column_and_test_split(folder: Path) -> None:
    job = Job.parse(
        TRL + "dataset_name: owner/set\ndataset_config: en\ndataset_train_split: train[:1%]\ndataset_text_field: body\n"
        "eval_strategy: steps\neval_steps: 10\ndataset_test_split: validation\n",
        folder,
    )
    (train,), (evaluated,) = job.data, job.eval_data
    assert (train.name, train.split, train.columns) == ("en", "train[:1%]", {"text": "body", "instruction": ""})
    assert (evaluated.path, evaluated.name, evaluated.split) == ("owner/set", "en", "validation")


def test_columns_that_an_entry_names_must_be_there(folder: Path) -> None:
    (folder / "tiny" / "chat_template.jinja").write_text("{{ messages }}")
    for lines, words in (
        ("type: completion, field: body", "there is no column body; found: text"),
        ("type: chat_template, field_messages: turns", "there is no column turns; found: text"),
        ("type: chat_template", "there is no column messages; found: text"),
        ("type: alpaca", "there is no column instruction; found: text"),
    ):
        job = Job.parse(f"{AXOLOTL}datasets: [{{path: text.jsonl, {lines}}}]", folder)
        with pytest.raises(UserError, match="not those that its entry names") as refused:
            check_data(job)
        assert (refused.value.code, refused.value.numbers) == ("unknown-columns", (words,))


def test_columns_and_keys_that_are_no_mapping_are_told_in_an_entry_of_axolotl_too(folder: Path) -> None:
    for key, value in (("columns", "messages"), ("message_keys", "role"), ("message_keys", "[role]")):
        with pytest.raises(UserError) as refused:
            Job.parse(f"{AXOLOTL}datasets: [{{path: text.jsonl, type: chat_template, {key}: {value}}}]", folder)
        assert len(refused.value.numbers) == 1 and f"{key} is" in refused.value.numbers[0]
    found = entry(f"{AXOLOTL}datasets: [{{path: text.jsonl, type: chat_template, columns: [messages]}}]", folder)
    assert (found.type, found.roles_to_train) == ("messages", ("assistant",))
    assert found.columns == {"tools": "", "chat_template_kwargs": ""}, "there are none beside it"


def test_files_have_no_other_split_than_train(folder: Path) -> None:
    with pytest.raises(UserError, match="split is test") as refused:
        check_data(Job.parse(f"{AXOLOTL}datasets: [{{path: text.jsonl, split: test}}]", folder))
    assert refused.value.code == "dataset-unreadable"
