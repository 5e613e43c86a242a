"""axolotl's data of preferences: the texts that its types make of records; what is wrong with an entry is one line.

`axolotl_pairs.json` has what axolotl 0.19's own functions make of some records, and the types that its files give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.data.entry import DataEntry
from planner.data.preference_records import Texts, answers_of
from planner.errors import UserError
from planner.importers.axolotl_pairs import formats, settle_pairs
from planner.job.data_check import check_data, kind_in
from planner.job.schema import Job
from planner.keys.source import Source, read_yaml
from tests.support.texts import make_job, tiny_llama_folder, write_jsonl
from tests.worker.data.test_preference_formats import rows_of, tokenizer_of

FACTS = json.loads((Path(__file__).parent / "axolotl_pairs.json").read_text("utf-8"))


def source_of(loss: object) -> Source:
    return read_yaml("reward_model: true\n" if loss == "reward" else f"rl: {loss}\n", "job.yaml")


def settled(entry: dict[str, Any], loss: str) -> dict[str, Any]:
    values: dict[str, Any] = {"dataset": [entry]}
    (mistake,) = settle_pairs(values, {"dataset": "datasets"}, source_of(loss)) or [None]
    if mistake is not None:
        raise ValueError(str(mistake))
    (found,) = values["dataset"]
    return found  # type: ignore[no-any-return]


def job_of(folder: Path, entry: dict[str, Any], records: list[dict[str, Any]], loss: str) -> Job:
    path = write_jsonl(folder / "data.jsonl", records)
    keys = settled({"path": str(path), **entry}, loss)
    model = tiny_llama_folder(folder / "model", chat_template="x")
    values = {"model": str(model), "dataset": [keys], "bf16": False, "preference": loss}
    return Job.parse(yaml.safe_dump(values), Path("/"))


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: f"{fact['rl']}-{fact['template']}-{fact['type']}"[:60])
def test_the_texts_of_a_record_are_axolotls(fact: dict[str, Any], tmp_path: Path) -> None:
    tokenizer, texts = tokenizer_of(fact["template"]), fact["texts"]
    job = job_of(tmp_path, {"type": fact["type"]}, [fact["record"]], fact["rl"])
    check_data(job)
    (tmp_path / "resolved.yaml").write_text(job.resolved_yaml())
    assert Job.from_resolved(tmp_path / "resolved.yaml") == job
    plain = write_jsonl(tmp_path / "plain.jsonl", [texts])
    assert rows_of(job, tokenizer) == rows_of(make_job(tmp_path / "model", plain, preference=fact["rl"]), tokenizer)


def test_every_type_has_facts() -> None:
    kinds = {"preference": ("dpo", "orpo"), "unpaired": ("kto",)}
    for kind, losses in kinds.items():
        said = {fact["type"] for fact in FACTS if fact["rl"] in losses and isinstance(fact["type"], str)}
        assert said == set(formats(kind))


@pytest.mark.parametrize("template", ["chatml", "llama3", "qwen3", "qwen2_5", "phi3", "gemma3"])
@pytest.mark.parametrize("more", [{"system": "S"}, {"system": ""}, {}], ids=["system", "empty", "none"])
def test_the_tokens_of_a_reward_models_pairs_are_axolotls(template: str, more: dict[str, str], tmp_path: Path) -> None:
    tokenizer = tokenizer_of(template)
    record = {**more, "input": "2+2?", "chosen": "four\n", "rejected": "five!", "margin": 1.0}
    job = job_of(tmp_path, {"type": "bradley_terry.chat_template"}, [record], "reward")
    check_data(job)
    (tmp_path / "resolved.yaml").write_text(job.resolved_yaml())
    assert Job.from_resolved(tmp_path / "resolved.yaml") == job
    ((chosen, rejected),) = rows_of(job, tokenizer)
    turns = [{"role": "system", "content": text} for text in more.values()] + [{"role": "user", "content": "2+2?"}]
    for row, answer in ((chosen, "four\n"), (rejected, "five!")):
        # axolotl's _tokenize_single_prompt: the prompt's tokens, then those of the whole from there on.
        asked: Any = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        whole: Any = tokenizer.apply_chat_template(
            [*turns, {"role": "assistant", "content": answer}], return_dict=False
        )
        assert [token for token, _ in row] == asked + whole[len(asked) :]


def test_a_system_text_is_left_out_where_the_entry_says_so(tmp_path: Path) -> None:
    record, kind = {"system": "S", "input": "a", "chosen": "b", "rejected": "c"}, "bradley_terry.chat_template"
    found = DataEntry.model_validate(settled({"path": "a", "type": kind, "drop_system_message": True}, "reward"))
    assert found.mapped(record)["prompt"] == [{"role": "user", "content": "a"}]
    kept = DataEntry.model_validate(settled({"path": "a", "type": kind}, "reward"))
    assert kept.mapped(record)["prompt"][0] == {"role": "system", "content": "S"}


def test_a_template_whose_prompt_is_no_beginning_of_the_whole_breaks_a_reward_models_record(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("chatml")
    ends = "{{ 'go' if add_generation_prompt else '' }}"
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m['role'] + m['content'] }}}}{{% endfor %}}{ends}"
    record = {"input": "a", "chosen": "b", "rejected": "c"}
    job = job_of(tmp_path, {"type": "bradley_terry.chat_template"}, [record], "reward")
    with pytest.raises(UserError, match="does not begin prompt and answer with the tokens of the prompt") as refused:
        rows_of(job, tokenizer)
    assert refused.value.exit_code == 2


def test_an_entry_names_the_columns_of_messages_and_their_keys() -> None:
    entry = {
        "path": "a",
        "type": "chat_template",
        "field_messages": "talk",
        "field_chosen": "good",
        "field_rejected": "bad",
        "message_keys": {"role": "from", "content": "value"},
        "roles": {"human": "user", "gpt": "assistant"},
    }
    found = DataEntry.model_validate(settled(entry, "dpo"))
    answer = {"from": "gpt", "value": "b"}
    record = {"talk": [{"from": "human", "value": "a", "more": 1}], "good": answer, "bad": [answer | {"value": "c"}]}
    assert found.mapped(record) == {
        "prompt": [{"role": "user", "content": "a"}],
        "chosen": [{"role": "assistant", "content": "b"}],
        "rejected": [{"role": "assistant", "content": "c"}],
    }
    with pytest.raises(ValueError, match="a message has tool_calls, which axolotl does not read"):
        found.mapped({**record, "good": answer | {"tool_calls": [1]}})


def test_data_without_a_type_are_in_trls_form() -> None:
    assert settled({"path": "a"}, "dpo") == {"path": "a"}
    assert settled({"path": "a", "type": "passthrough"}, "ipo") == {"path": "a", "type": "preference"}


def test_without_rl_types_are_those_of_supervised_learning() -> None:
    for loss in ("null", "grpo"):
        assert settled({"path": "a", "type": "chatml.intel"}, loss) == {"path": "a", "type": "chatml.intel"}


@pytest.mark.parametrize(
    ("given", "loss", "words"),
    [
        ("chatml.intel", "reward", 'type is "chatml.intel", which with reward_model is unknown; known is bradley_te'),
        ({"field_prompt": "p"}, "reward", "which with reward_model is unknown"),
        ("bradley_terry.llama3", "reward", "which with reward_model is unknown; known is bradley_terry.chat_template"),
        ("alpaca", "dpo", 'type is "alpaca", which with rl: dpo is unknown; known are chatml.default, chatml.argilla_'),
        ("chatml.argilla", "dpo", 'type is "chatml.argilla", which with rl: dpo is unknown'),
        ("chatml.icr", "kto", "known are chatml.argilla, chatml.argilla_chat, chatml.intel, chatml.prompt_pairs, "),
        ("zephyr.nectar", "dpo", "it takes the answer of the last rank for the chosen one, and in that data it is the"),
        ({"field_prompt": "p", "field_output": "o"}, "dpo", "a type has no key field_output; it has field_prompt, "),
        ({"completion_format": "{completion}"}, "dpo", "a type has no key completion_format; it has field_prompt, "),
        ({"field_prompt": 3}, "dpo", "field_prompt is 3; it must be text"),
        ({"prompt_format": "{x}"}, "dpo", "its places are {prompt} and {system}, and {prompt} must be there"),
        ({"chosen_format": "{chosen!r}"}, "dpo", 'chosen_format is "{chosen!r}"; its places are {chosen}'),
        ({"completion_format": "{completion"}, "kto", "completion_format is "),
    ],
)
def test_an_entry_that_cannot_be_read_is_one_line(given: object, loss: str, words: str) -> None:
    with pytest.raises(ValueError) as refused:
        settled({"path": "a", "type": given}, loss)
    assert words in str(refused.value)


def test_keys_about_messages_are_refused_beside_a_reward_models_type() -> None:
    with pytest.raises(ValueError, match="roles_to_train does not go together with type: bradley_terry"):
        settled({"path": "a", "type": "bradley_terry.chat_template", "roles_to_train": ["assistant"]}, "reward")


def test_a_type_with_a_mistake_is_not_read_further() -> None:
    values: dict[str, Any] = {"dataset": [{"path": "a", "type": "alpaca"}], "eval_dataset": [{"path": "b"}]}
    (mistake,) = settle_pairs(values, {"dataset": "datasets"}, source_of("dpo"))
    assert "datasets: type is" in str(mistake) and values == {"dataset": ["a"], "eval_dataset": [{"path": "b"}]}


@pytest.mark.parametrize(
    ("given", "loss", "record", "words"),
    [
        ("chatml.intel", "dpo", {"chosen": "a", "rejected": "b"}, "it has no question"),
        (
            "chatml.intel",
            "dpo",
            {"question": "q", "chosen": "", "rejected": "b"},
            "chosen is empty, and there is nothi",
        ),
        ("chatml.intel", "dpo", {"question": 3, "chosen": "a", "rejected": "b"}, "question is text, this is 3"),
        (
            "chatml.ultra",
            "dpo",
            {"prompt": "q", "chosen": "a", "rejected": "b"},
            "it has nothing at chosen.1.content, ",
        ),
        (
            "chat_template.argilla_chat",
            "dpo",
            {"chosen": "a", "rejected": "b"},
            "chosen is a list of messages, this is",
        ),
        (
            "chatml.ultra",
            "kto",
            {"prompt": "q", "completion": "a", "label": "yes"},
            "label is true or false (1 or 0), ",
        ),
        (
            {"prompt_format": "{system}{prompt}"},
            "kto",
            {"prompt": "q", "completion": "a", "label": 1},
            "it has no system",
        ),
    ],
)
def test_a_record_that_does_not_fit_its_type_is_broken(
    given: object, loss: str, record: dict[str, Any], words: str, tmp_path: Path
) -> None:
    job = job_of(tmp_path, {"type": given}, [record], loss)
    with pytest.raises(UserError) as refused:
        check_data(job)
    assert words in str(refused.value) and refused.value.code == "broken-record"


def test_an_answer_that_axolotl_would_look_for_in_the_wrong_place_is_broken(tmp_path: Path) -> None:
    record = {"messages": "2+2?", "chosen": "by", "rejected": "four"}
    job = job_of(tmp_path, {"type": "chat_template"}, [record], "dpo")
    with pytest.raises(UserError, match='axolotl finds "by" in what the chat template writes before it, or nowhere'):
        rows_of(job, tokenizer_of("qwen2_5"))  # its system text has the word
    assert len(rows_of(job, tokenizer_of("qwen3"))) == 1


def test_variables_for_the_chat_template_are_refused_where_axolotl_does_not_give_it_any(tmp_path: Path) -> None:
    record = {"messages": "2+2?", "chosen": "4", "rejected": "5"}
    job = job_of(
        tmp_path, {"type": "chat_template", "chat_template_kwargs": {"enable_thinking": False}}, [record], "dpo"
    )
    with pytest.raises(UserError, match="axolotl gives the chat template no chat_template_kwargs"):
        rows_of(job, tokenizer_of("qwen3"))


def test_texts_are_read_without_a_chat_template(tmp_path: Path) -> None:
    job = job_of(tmp_path, {"type": "llama3.prompt_pairs"}, [{"prompt": "{a}", "chosen": "b", "rejected": "c"}], "dpo")
    (entry,) = job.data
    kind = kind_in(entry, ("prompt", "chosen", "rejected"), "data", job)
    assert kind == "preference"
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    prompt = f"{header.format('user')}{{a}}<|eot_id|>{header.format('assistant')}"
    found = answers_of(kind, entry.mapped({"prompt": "{a}", "chosen": "b", "rejected": "c"}))
    assert found == Texts(prompt=prompt, chosen="b<|eot_id|>", rejected="c<|eot_id|>")
