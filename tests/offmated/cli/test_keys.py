"""`offmate keys`: the table of other tools' keys."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from offmated.cli import main
from offmated.cli.keys import TOOLS
from planner.errors import Exit
from planner.importers.base import REWARDS
from planner.importers.llama_factory_v1 import LLAMA_FACTORY_V1, V1
from planner.importers.tools import TOOLS as WITH_FILES

ALL_TABLES = {tool.name: tool.keys for tool in WITH_FILES} | {V1: LLAMA_FACTORY_V1}


def said(*words: str) -> str:
    result = CliRunner().invoke(main, ["keys", *words])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_each_key_has_one_line_below_its_tool() -> None:
    _, *parts = said().split("\n## ")
    lines = {part.partition("\n")[0]: part.splitlines()[4:] for part in parts}
    assert lines.keys() == ALL_TABLES.keys()
    for tool, table in ALL_TABLES.items():
        assert [line.split("`")[1] for line in lines[tool]] == sorted(table), tool
        assert all(line.startswith("| `") and line.endswith(" |") for line in lines[tool]), tool


@pytest.mark.parametrize(
    ("tool", "line"),
    [
        ("axolotl", "| `base_model` | is `model` |"),
        ("axolotl", "| `learning_rate` | as it is here |"),
        ("axolotl", "| `fsdp` | the planner's |"),
        ("axolotl", "| `axolotl_config_path` | no effect: offmate has no use for it |"),
        ("trl", f"| `num_generations` | not supported: {REWARDS} |"),
        ("trl", "| `beta` | is `preference_beta` |"),
        ("llama-factory-v1", "| `model_class` | not supported: a model with another head (`llm`) |"),
    ],
)
def test_what_becomes_of_a_key_is_told(tool: str, line: str) -> None:
    assert line in said(tool).splitlines()


@pytest.mark.parametrize("word", TOOLS)
def test_one_tools_keys_are_told_alone(word: str) -> None:
    headings = [line for line in said(word.upper()).splitlines() if line.startswith("## ")]
    assert headings == [f"## {TOOLS[word]}"]
    assert {tool: list(table) for tool, table in json.loads(said(word, "--json")).items()} == {
        TOOLS[word]: sorted(ALL_TABLES[TOOLS[word]])
    }


def test_every_table_has_a_word_and_another_word_is_wrong_usage() -> None:
    assert set(TOOLS.values()) == ALL_TABLES.keys()
    assert CliRunner().invoke(main, ["keys", "unsloth"]).exit_code == Exit.USAGE
