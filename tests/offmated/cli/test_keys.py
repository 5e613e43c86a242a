"""`offmate keys`: the keys of a job file, and the table of other tools' keys."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress

import pytest
from click.testing import CliRunner

from docs.make.keys import page as key_page
from docs.make.other_tools import page as tool_page
from offmated.cli import main
from offmated.cli.keys import TOOLS
from offmated.cli.output import shorten
from planner.errors import Exit
from planner.importers.base import REWARDS
from planner.importers.llama_factory_v1 import LLAMA_FACTORY_V1, V1
from planner.importers.tools import TOOLS as WITH_FILES
from planner.job.described import entry_section, first_sentence, plain, sections
from planner.job.schema import Job
from tests import ROOT

ALL_TABLES = {tool.name: tool.keys for tool in WITH_FILES} | {V1: LLAMA_FACTORY_V1}


def said(*words: str) -> str:
    result = CliRunner().invoke(main, ["keys", *words])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def refused(*words: str) -> str:
    result = CliRunner().invoke(main, ["keys", *words])
    assert result.exit_code == Exit.USAGE and not result.stdout
    return result.stderr


def on_a_terminal(columns: int, *words: str) -> str:
    """What a command prints on a terminal of so many columns, without its colours."""
    ours, theirs = pty.openpty()
    start = [sys.executable, "-c", "from offmated.command import main; main()", *words]
    with subprocess.Popen(start, stdout=theirs, env=os.environ | {"COLUMNS": str(columns), "TERM": "xterm"}) as process:
        os.close(theirs)
        pieces = []
        with suppress(OSError):  # EIO: the other end is closed
            while piece := os.read(ours, 2**16):
                pieces.append(piece)
    os.close(ours)
    assert process.returncode == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", b"".join(pieces).decode().replace("\r", ""))


def test_every_key_has_one_line_below_its_section() -> None:
    lines = said().splitlines()
    for section in (*sections(), entry_section()):
        begin = lines.index(section.title) + 1
        shown = lines[begin : begin + len(section.keys)]
        assert len(shown) == len(section.keys)
        for line, key in zip(shown, section.keys, strict=True):
            assert line.split()[0] == key.name and shorten(key.default or "required", 17) in line
            assert line.endswith(plain(first_sentence(key.text)))


def test_lines_on_a_terminal_end_at_its_width() -> None:
    lines = on_a_terminal(90, "keys").splitlines()
    assert max(map(len, lines)) == 90 and len(lines) == len(said().splitlines())


@pytest.mark.parametrize("name", ["per_device_train_batch_size", "micro_batch_size"])
def test_a_key_is_told_whole_by_each_of_its_names(name: str) -> None:
    key = next(key for section in sections() for key in section.keys if key.name == "per_device_train_batch_size")
    title, *lines, text = said(name).splitlines()
    assert title == key.name and text.strip() == plain(key.text)
    assert [line.split(maxsplit=1)[1] for line in lines[:2]] == [key.type, key.default]
    assert lines[2].split() == ["also", "accepted", "micro_batch_size"]


def test_a_name_of_a_job_and_of_an_entry_tells_both() -> None:
    told = json.loads(said("max_samples", "seed", "--json"))
    assert [(key["section"], key["name"]) for key in told] == [
        ("Data", "max_samples"),
        ("Entries of dataset", "max_samples"),
        ("Precision and seed", "seed"),
    ]
    assert "where    in an entry of dataset" in said("max_samples")


def test_the_json_of_all_keys_has_each_of_a_job() -> None:
    listed = json.loads(said("--json"))
    assert {key["name"] for key in listed if key["section"] != entry_section().title} == Job.model_fields.keys()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("learnign_rate", "did you mean learning_rate?"),
        ("micro_batch_siz", "did you mean micro_batch_size?"),
        ("lr", "did you mean learning_rate?"),
        ("axolotl", "offmate keys --tool axolotl says what becomes of that tool's keys"),
        ("qqqqqq", "`offmate keys` lists all keys"),
    ],
)
def test_an_unknown_key_is_refused_with_what_to_type(name: str, hint: str) -> None:
    assert refused(name) == f"A job file has no key {name}.\n  hint: {hint}   [unknown-key]\n"
    assert refused("seed", name) == refused(name)


def test_each_key_has_one_line_below_its_tool() -> None:
    _, *parts = said("--tool", "all").split("\n## ")
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
    assert line in said("--tool", tool).splitlines()


@pytest.mark.parametrize("word", TOOLS)
def test_one_tools_keys_are_told_alone(word: str) -> None:
    headings = [line for line in said("--tool", word.upper()).splitlines() if line.startswith("## ")]
    assert headings == [f"## {TOOLS[word]}"]
    assert {tool: list(table) for tool, table in json.loads(said("--tool", word, "--json")).items()} == {
        TOOLS[word]: sorted(ALL_TABLES[TOOLS[word]])
    }


def test_every_table_has_a_word_and_another_word_is_wrong_usage() -> None:
    assert set(TOOLS.values()) == ALL_TABLES.keys()
    assert "unsloth" in refused("--tool", "unsloth")
    assert "not both" in refused("seed", "--tool", "trl")


def test_pages_of_the_reference_have_each_key_once_under_its_anchor() -> None:
    page = key_page()
    anchors = re.findall(r"^### (\w+) \{#([\w-]+)\}$", page, flags=re.MULTILINE)
    assert [anchor for _, anchor in anchors if not anchor.startswith("dataset-")] == [
        key.name for section in sections() for key in section.keys
    ]
    assert [anchor for name, anchor in anchors if anchor == f"dataset-{name}"] == [
        f"dataset-{key.name}" for key in entry_section().keys
    ]
    known = {anchor for _, anchor in anchors}
    assert {*re.findall(r"\(#([\w-]+)\)", page)} <= known
    linked = {*re.findall(r"keys\.md#(\w+)", tool_page())}
    assert {"learning_rate", "per_device_train_batch_size", "dataset"} <= linked <= known


def test_pages_of_the_reference_link_to_pages_that_exist() -> None:
    generated = {"keys.md", "commands.md", "errors.md", "config.md", "python.md", "api.md", "other-tools.md"}
    for link in re.findall(r"\]\(([^)#]+)", key_page() + tool_page()):
        assert link in generated or (ROOT / "docs/reference" / link).exists(), link
