"""The table of other tools' keys: complete by what the tools document, and read by the reader."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from planner.errors import UserError
from planner.importers.base import Meaning
from planner.importers.tools import ANY, TOOLS
from planner.importers.transformers import REPORTING
from planner.importers.trl import PREFERENCES
from planner.job.schema import Job
from tests.planner.conftest import BASE, parse

TABLES = {tool.name: tool.keys for tool in TOOLS}
DOCUMENTED = Path(__file__).parent / "documented"
HONOURED = {
    (tool, key): meaning.text
    for tool, table in TABLES.items()
    for key, meaning in table.items()
    if meaning.kind == "honoured"
}
OWN = frozenset(Job.model_fields)


def listed(name: str) -> list[str]:
    lines = (DOCUMENTED / name).read_text().splitlines()
    return " ".join(line for line in lines if not line.startswith("#")).split()


@pytest.mark.parametrize(("tool", "name"), [("axolotl", "axolotl.txt"), ("LLaMA-Factory", "llama_factory.txt")])
def test_every_key_of_a_tools_documentation_is_in_its_table(tool: str, name: str) -> None:
    assert [key for key in listed(name) if key not in TABLES[tool]] == []


def test_every_field_of_the_installed_trl_and_transformers_is_in_their_tables() -> None:
    from transformers import Seq2SeqTrainingArguments
    from trl import (
        DatasetMixtureConfig,
        DPOConfig,
        GRPOConfig,
        KTOConfig,
        ModelConfig,
        RewardConfig,
        RLOOConfig,
        ScriptArguments,
        SFTConfig,
    )

    def names(*kinds: type) -> set[str]:
        return {field.name for kind in kinds for field in dataclasses.fields(kind)}  # type: ignore[arg-type]

    ours = names(SFTConfig, ModelConfig, ScriptArguments, DatasetMixtureConfig)
    assert ours - TABLES["TRL"].keys() == set()
    others = names(DPOConfig, KTOConfig, GRPOConfig, RLOOConfig, RewardConfig) - ours - {"chat_template_kwargs"}
    assert [key for key in sorted(others) if TABLES["TRL"].get(key) not in PREFERENCES.values()] == []
    assert names(Seq2SeqTrainingArguments) - TABLES["LLaMA-Factory"].keys() == set()


def test_what_a_key_is_honoured_as_is_a_key_of_a_job() -> None:
    read_beside = {"plugins", "stage", "dataset_dir"}
    assert set(HONOURED.values()) - OWN - read_beside == set()


NOT_THERE = sorted(key for key, meaning in ANY.items() if meaning.kind == "not there")
UNUSED = sorted(key for key, meaning in ANY.items() if meaning.kind in ("unused", "planner") and key not in OWN)
PARTS = {key: meaning.text for key, meaning in ANY.items() if meaning.kind == "part"}
SPECIAL = {"resume_from_checkpoint", "dtype", "torch_dtype", "ignore_pad_token_for_loss"}


@pytest.mark.parametrize("value", ["false", "no", "'no'", "null", "0", "0.0", "[]", "none", "''"])
def test_keys_that_are_switched_off_ask_for_nothing(value: str, folder: Path) -> None:
    keys = [key for key in (*NOT_THERE, *UNUSED, *PARTS) if key not in SPECIAL]
    job, notes = Job.parse_with_notes(BASE + "".join(f"{key}: {value}\n" for key in keys), folder)
    assert (job, notes) == (parse("", folder), job.notes)


@pytest.mark.parametrize("key", [key for key in NOT_THERE if key != "create_new_adapter"])  # which is beside another
def test_a_key_of_something_that_is_not_there_is_refused_in_one_line(key: str, folder: Path) -> None:
    with pytest.raises(UserError) as refused:
        Job.parse(BASE + f"{key}: 3\n", folder)
    assert refused.value.code == "not-there"
    (line,) = refused.value.numbers
    assert line.startswith(f"line 3: {key}: ") and "not supported yet" in line


@pytest.mark.parametrize("key", [*(key for key in UNUSED if key not in SPECIAL), *(f"{b}new" for b in REPORTING)])
def test_a_key_that_changes_nothing_is_accepted_and_said_once(key: str, folder: Path) -> None:
    job, notes = Job.parse_with_notes(BASE + f"{key}: 10\n", folder)
    assert job == parse("", folder)
    assert len([note for note in notes if note.startswith(f"not used: {key} (")]) == 1


@pytest.mark.parametrize("key", sorted(PARTS))
def test_a_part_is_told_by_its_whole_and_says_nothing_without_it(key: str, folder: Path) -> None:
    whole = PARTS[key]
    _, notes = Job.parse_with_notes(BASE + f"{key}: 3\n", folder)
    assert f"not used: {key} (it has no effect without {whole})" in notes
    if ANY.get(whole, Meaning(kind="unused", text="")).kind == "not there":
        with pytest.raises(UserError) as refused:
            Job.parse(BASE + f"{key}: 3\n{whole}: 3\n", folder)
        assert [line.split(": ")[1] for line in refused.value.numbers] == [whole]


@pytest.mark.parametrize(("tool", "key"), [pair for pair in HONOURED if pair[1] not in OWN])
def test_a_key_with_another_name_is_not_unknown(tool: str, key: str, folder: Path) -> None:
    """Whatever is wrong with the value, the reader knows the key."""
    beginning = {
        "axolotl": "base_model: tiny\n",
        "TRL": "model_name_or_path: tiny\n",
        "LLaMA-Factory": "model_name_or_path: tiny\nstage: sft\n",
    }[tool]
    if key in beginning:
        return
    try:
        Job.parse(beginning + f"dataset: text.jsonl\n{key}: {{odd: 1}}\n", folder)
    except UserError as error:
        assert "unknown key" not in str(error) and error.code != "unknown-key"


def test_a_file_about_something_else_altogether_gets_one_line(folder: Path) -> None:
    for lines in (
        "base_model: tiny\nrl: grpo\nrl_beta: 0.1\ndatasets: [{path: gone.jsonl, type: chatml.intel}]\nuse_pose: 1\n",
        "model_name_or_path: tiny\nstage: ppo\npref_beta: 0.1\npref_loss: simpo\ndataset: gone\nadd_tokens: a\n",
        "model_name_or_path: tiny\ndataset_name: gone\nbeta: 0.1\nloss_type: exo_pair\nlabel_smoothing: 0.1\n",
    ):
        with pytest.raises(UserError) as refused:
            Job.parse(lines, folder)
        assert len(refused.value.numbers) == 1 and refused.value.code == "not-there"


def test_a_key_of_an_entry_is_told_where_it_belongs(folder: Path) -> None:
    with pytest.raises(UserError) as refused:
        Job.parse("model: tiny\ndataset: text.jsonl\ntype: instructions\ncolumns: {output: answer}\n", folder)
    assert refused.value.numbers == (
        "line 3: type: unknown key; type belongs in an entry of dataset",
        "line 4: columns: unknown key; columns belongs in an entry of dataset",
    )


@pytest.mark.parametrize(
    ("stage", "told"),
    [
        ("sfft", 'it is "sfft"; did you mean sft?'),
        ("SFT", 'it is "SFT"; did you mean sft?'),
        ("orpo", 'it is "orpo"; give sft, pt, dpo or kto'),
        ("DPO", 'it is "DPO"; did you mean dpo?'),
    ],
)
def test_a_misspelled_stage_hides_no_other_mistake(stage: str, told: str, folder: Path) -> None:
    with pytest.raises(UserError) as refused:
        Job.parse(f"model_name_or_path: tiny\nstage: {stage}\ndataset: text.jsonl\ncutof_len: 9\n", folder)
    assert refused.value.numbers[0] == f"line 2: stage: {told}"
    assert "cutof_len: unknown key; did you mean cutoff_len?" in refused.value.numbers[1]


@pytest.mark.parametrize("base", [BASE, "base_model: tiny\nlearning_rate: 1e-4\ndatasets: [{path: text.jsonl}]\n"])
def test_a_run_that_is_to_resume_is_told_that_a_job_does_that_by_itself(base: str, folder: Path) -> None:
    _, notes = Job.parse_with_notes(base + "resume_from_checkpoint: true\n", folder)
    why = "a job starts from its model, and resumes from its own checkpoints by itself"
    assert f"not used: resume_from_checkpoint ({why})" in notes
