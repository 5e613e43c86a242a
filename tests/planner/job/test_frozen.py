"""Data are those that a job was handed in with, or it is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from datasets import Dataset

from planner.errors import UserError
from planner.job.frozen import check_frozen, freeze
from planner.job.schema import Job
from tests.planner.conftest import BASE


def changes(job: Job, before: dict) -> tuple[str, ...]:
    with pytest.raises(UserError, match="not those that the job was submitted with") as refused:
        check_frozen(job, before)
    assert refused.value.code == "data-changed"
    return refused.value.numbers


def test_files_that_changed_came_or_went_are_named(folder: Path) -> None:
    (folder / "more").mkdir()
    (folder / "more" / "a.jsonl").write_text('{"text": "a"}\n')
    job = Job.parse("model: tiny\ndataset: [text.jsonl, more]\nval_size: 1\n", folder)
    before = json.loads(json.dumps(freeze(job)))
    check_frozen(job, before)
    text = folder / "text.jsonl"
    text.write_text(text.read_text().replace("a", "b"))
    assert changes(job, before) == (f"{text}: other content",)
    text.write_text('{"text": "longer"}\n')
    (folder / "more" / "b.jsonl").write_text('{"text": "a"}\n')
    (folder / "more" / "a.jsonl").unlink()
    assert changes(job, before) == (
        f"{folder}/more/b.jsonl: there was no such file",
        f"{folder}/more/a.jsonl: it is gone",
        f"{text}: 14 bytes, now 19",
    )


def test_a_file_that_was_only_touched_or_copied_back_is_the_same(folder: Path) -> None:
    job = Job.parse(BASE, folder)
    before = freeze(job)
    text = folder / "text.jsonl"
    content = text.read_text()
    text.unlink()
    text.write_text(content)
    os.utime(text, (1, 1))
    check_frozen(job, before)


def test_a_change_is_seen_wherever_it_is_in_a_file_and_whatever_its_time_of_change(folder: Path) -> None:
    job, text = Job.parse(BASE, folder), folder / "text.jsonl"
    text.write_text('{"text": "a"}\n' * 200_000)
    os.utime(text, (1, 1))
    before = freeze(job)
    check_frozen(job, before)
    text.write_text('{"text": "a"}\n' * 199_999 + '{"text": "b"}\n')
    os.utime(text, (1, 1))
    assert changes(job, before) == (f"{text}: other content",)


def test_what_an_earlier_version_noted_of_large_files_and_saved_datasets_is_no_change(folder: Path) -> None:
    Dataset.from_dict({"text": ["a"]}).save_to_disk(str(folder / "saved"))
    job, text = Job.parse("model: tiny\ndataset: [text.jsonl, saved]\n", folder), folder / "text.jsonl"
    before = freeze(job)
    status = text.stat()
    before[str(text)] = {"bytes": status.st_size, "hash": "of a part", "changed_ns": status.st_mtime_ns}
    state = folder / "saved" / "state.json"
    before[str(state)] = {"bytes": 1, "hash": "any"}
    check_frozen(job, before)
    os.utime(text, (1, 1))
    assert changes(job, before) == (f"{text}: other content",)


def test_a_dataset_of_the_hub_and_a_job_of_before_have_nothing_to_compare(folder: Path) -> None:
    job = Job.parse("model: tiny\ndataset: owner/set\n", folder)
    assert freeze(job) == {}
    check_frozen(Job.parse(BASE, folder), None)


def test_an_adapter_that_a_job_goes_on_from_is_that_which_was_there(folder: Path) -> None:
    made = folder / "made"
    made.mkdir()
    (made / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}')
    (made / "adapter_model.safetensors").write_bytes(b"1")
    (folder / "tiny" / "model.safetensors").touch()
    job = Job.parse(f"{BASE}method: lora\nadapter_name_or_path: made\n", folder)
    before = freeze(job)
    check_frozen(job, before)
    (made / "adapter_model.safetensors").write_bytes(b"2")
    (made / "adapter_config.json").unlink()
    assert changes(job, before) == (
        f"{made}/adapter_config.json: it is gone",
        f"{made}/adapter_model.safetensors: other content",
    )
    check_frozen(job.model_copy(update={"adapter_name_or_path": None}), before)
