"""Whole files of the three tools, written for these tests from the tools' documentation: each is accepted and means
what its first line says, or is refused with one line per cause.

The first line of a file is its expectation: `accepted:` with values of the job, or `refused:` with a piece of each
line. Line numbers in refusals count from the line below it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from planner.errors import UserError
from planner.importers.tools import tool_of
from planner.job.imported import imported
from planner.job.schema import Job
from tests.support.texts import write_jsonl

FILES = Path(__file__).parent / "files"
CASES = sorted(FILES.rglob("*.yaml"))

INFO = {
    "identity": {"file_name": "../alpaca.jsonl"},
    "alpaca_en_demo": {"file_name": "../alpaca.jsonl"},
    "c4_demo": {"file_name": "../text.jsonl", "columns": {"prompt": "text"}},
    "talks": {"file_name": "../chat.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}},
    "open": {"file_name": "../chat.jsonl", "formatting": "openai", "columns": {"messages": "messages"}},
    "hub": {"hf_hub_url": "owner/set"},
    "seen": {"file_name": "../alpaca.jsonl", "columns": {"images": "pictures"}},
}
ADAPTER = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 12,
    "lora_dropout": 0.2,
    "target_modules": ["q_proj", "k_proj"],
    "use_rslora": True,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """What the files name."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").touch()
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": talk}])
    write_jsonl(tmp_path / "alpaca.jsonl", [{"instruction": "a", "output": "b"}])
    write_jsonl(tmp_path / "text.jsonl", [{"text": "a"}])
    write_jsonl(tmp_path / "segments.jsonl", [{"segments": [{"label": True, "text": "a"}]}])
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    (tmp_path / "saves").mkdir()
    (tmp_path / "saves" / "adapter_config.json").write_text(json.dumps(ADAPTER))
    (tmp_path / "saves" / "adapter_model.safetensors").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(INFO))
    return tmp_path


def test_there_are_thirty_files_of_each_tool() -> None:
    for tool in ("axolotl", "llama_factory", "trl"):
        assert sum(case.parent.name == tool for case in CASES) >= 30


@pytest.mark.parametrize("file", CASES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_file_means_what_it_says_or_is_refused_in_one_line_per_cause(file: Path, place: Path) -> None:
    first, _, text = file.read_text().partition("\n")
    (verdict, expected), *_ = yaml.safe_load(first.removeprefix("# ")).items()
    if verdict == "refused":
        with pytest.raises(UserError) as refused:
            Job.parse(text, place, name=file.name)
        lines = refused.value.numbers
        assert len(lines) == len(expected), lines
        assert [piece for piece in expected if not any(piece in line for line in lines)] == [], lines
        return
    job, notes = Job.parse_with_notes(text, place, name=file.name)
    found = json.loads(job.model_dump_json())
    assert {key: found[key] for key in expected} == expected
    tool = {"axolotl": "axolotl", "llama_factory": "LLaMA-Factory", "trl": "TRL"}[file.parent.name]
    assert tool_of(yaml.safe_load(text)).name == tool and notes
    again = imported(text, place, file.name)
    assert Job.parse(again, place / "data") == job, again
    (place / "resolved.yaml").write_text(job.resolved_yaml())
    assert Job.from_resolved(place / "resolved.yaml") == job
