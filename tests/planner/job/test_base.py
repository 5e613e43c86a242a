"""The base is that which a job was handed in with, or the job is refused."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from planner.errors import UserError
from planner.job import base as base_module
from planner.job.base import BESIDE_WEIGHTS, base_files, check_base, content_of, freeze_base, left_for_later
from planner.job.schema import Job
from tests.planner.conftest import BASE, parse

LONG_AGO_NS = 10**18


@pytest.fixture
def model(folder: Path) -> Path:
    """A model's folder with weights, written some time ago, as far as its mtime says."""
    its = folder / "tiny"
    save_file({"w": np.arange(1, 9, dtype=np.float32)}, its / "model.safetensors")
    (its / "generation_config.json").write_text("{}")
    return its


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    its = tmp_path / "runs"
    its.mkdir()
    return its


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a moment ago count as if they had been there for long."""
    monkeypatch.setattr(base_module, "_SETTLED_NS", -(10**10))


def read_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose content is read from now on."""
    found: list[str] = []
    real = base_module._hash
    monkeypatch.setattr(base_module, "_hash", lambda path: (found.append(Path(path).name), real(path))[1])
    return found


def frozen(job: Job, runs: Path) -> dict[str, Any]:
    return json.loads(json.dumps(freeze_base(job, runs)))


def changes(job: Job, before: dict[str, Any], runs: Path) -> tuple[str, ...]:
    with pytest.raises(UserError, match="not those that the job was submitted with") as refused:
        check_base(job, before, runs)
    assert refused.value.code == "base-changed" and "offmate retry ID --allow-changed-model" in refused.value.hint
    return refused.value.numbers


def flip(file: Path) -> None:
    """Let all weights of a file have the other sign; its size and its mtime are as they were."""
    before = file.stat()
    content = bytearray(file.read_bytes())
    tensors = {name: -tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    assert file.read_bytes() != bytes(content) and file.stat().st_size == before.st_size
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_the_base_is_what_loading_reads_and_nothing_beside(model: Path, folder: Path) -> None:
    for name in (
        "README.md",
        "modeling_tiny.py",
        "train.json",
        "consolidated.safetensors",
        "special_tokens_map.json",
        "chat_template.jinja",
    ):
        (model / name).write_text("{}")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tools.jinja").write_text("{}")
    its = {str(file.relative_to(folder)): part for file, part in base_files(parse("", folder)).items()}
    assert its == {
        "tiny/config.json": "config",
        "tiny/generation_config.json": "config",
        "tiny/model.safetensors": "weights",
        "tiny/tokenizer.json": "tokenizer",
        "tiny/special_tokens_map.json": "tokenizer",
        "tiny/chat_template.jinja": "tokenizer",
        "tiny/additional_chat_templates/tools.jinja": "tokenizer",
    }


def test_shards_and_a_tokenizer_in_a_folder_of_its_own_are_of_the_base(model: Path, folder: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "words").mkdir()
    for name in ("tokenizer.json", "config.json"):
        (folder / "words" / name).write_text("{}")
    found = base_files(parse("tokenizer: ./words\n", folder))
    its = {str(file.relative_to(folder)): part for file, part in found.items()}
    assert its == {
        "words/tokenizer.json": "tokenizer",
        "words/config.json": "tokenizer",
        "tiny/config.json": "config",
        "tiny/generation_config.json": "config",
        "tiny/model-00001-of-00001.safetensors": "weights",
        "tiny/model.safetensors.index.json": "weights",
    }


def test_files_that_changed_came_or_went_are_named(model: Path, folder: Path, runs: Path) -> None:
    job = parse("", folder)
    before = frozen(job, runs)
    flip(model / "model.safetensors")
    assert changes(job, before, runs) == (f"{model}/model.safetensors: other content",)
    (model / "config.json").write_text('{"model_type": "gpt2"}')
    (model / "generation_config.json").unlink()
    (model / "chat_template.jinja").write_text("{}")
    assert changes(job, before, runs) == (
        f"{model}/chat_template.jinja: there was no such file",
        f"{model}/generation_config.json: it is gone",
        f"{model}/config.json: {before[str(model / 'config.json')]['bytes']} bytes, now 22",
    )
    shutil.rmtree(model)
    assert all(line.endswith(": it is gone") for line in changes(job, before, runs))


@pytest.mark.usefixtures("settled")
def test_what_was_not_written_to_is_not_read_again(
    model: Path, folder: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = parse("", folder)
    read = read_files(monkeypatch)
    before = frozen(job, runs)
    assert "model.safetensors" in read
    read.clear()
    assert check_base(job, before, runs) == before and read == []
    flip(model / "model.safetensors")
    assert changes(job, before, runs) and read == ["model.safetensors"], "mtime and size are as before, ctime is not"


@pytest.mark.usefixtures("settled")
def test_a_copy_in_its_place_is_the_same_and_is_read_once(
    model: Path, folder: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = parse("", folder)
    before = frozen(job, runs)
    shutil.copytree(model, folder / "copy")
    shutil.rmtree(model)
    (folder / "copy").rename(model)
    read = read_files(monkeypatch)
    after = check_base(job, before, runs)
    assert after is not None and content_of(after) == content_of(before) and after != before
    assert sorted(read) == sorted(Path(path).name for path in before)
    read.clear()
    assert check_base(job, after, runs) == after and read == []


def test_a_file_of_just_now_is_known_by_its_content_alone(model: Path, folder: Path, runs: Path) -> None:
    """A second change within the same tick of the file system's clock shows in no time."""
    job, file = parse("", folder), model / "model.safetensors"
    before = frozen(job, runs)
    assert before[str(file)]["status"] is None
    before[str(file)]["hash"] = "of another content"
    assert changes(job, before, runs) == (f"{file}: other content",)


@pytest.mark.usefixtures("settled")
def test_a_second_job_reads_nothing_of_the_same_base(
    model: Path, folder: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = parse("", folder)
    (runs / "7").mkdir()
    (runs / "7" / "base.json").write_text(json.dumps(frozen(job, runs)))
    (runs / "8").mkdir()
    (runs / "9").mkdir()
    (runs / "9" / "base.json").write_text('{"a": 1}')
    read = read_files(monkeypatch)
    again = frozen(parse("seed: 7\n", folder), runs)
    assert read == [] and again == frozen(job, runs)
    (model / "config.json").write_text('{"model_type": "llama"}')
    frozen(job, runs)
    assert read == ["config.json"]


def test_large_weights_are_left_for_later_and_a_change_until_then_is_seen(
    model: Path, folder: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_module, "AT_ONCE_BYTES", 10)
    job, file = parse("", folder), model / "model.safetensors"
    before = frozen(job, runs)
    assert before[str(file)]["hash"] is None and before[str(model / "config.json")]["hash"] is not None
    (note,) = left_for_later(before)
    assert note.startswith(f"the weights of the base, {file.stat().st_size} B, are read when the job is planned")
    assert check_base(job, before, runs, most_bytes=10) == before, "nobody waits for that"
    whole = check_base(job, before, runs)
    assert whole is not None and whole[str(file)]["hash"] is not None and left_for_later(whole) == ()
    assert content_of(whole) == content_of(before)
    flip(file)
    assert changes(job, before, runs) == (f"{file}: it was written to before the job was planned",)
    assert changes(job, dict(whole), runs) == (f"{file}: other content",)
    assert content_of(frozen(job, runs)) != content_of(before)


def test_equal_bases_are_equal_whenever_and_wherever_they_were_written(model: Path, folder: Path, runs: Path) -> None:
    before = content_of(frozen(parse("", folder), runs))
    for file in model.iterdir():
        content = file.read_bytes()
        file.unlink()
        file.write_bytes(content)
        os.utime(file, ns=(LONG_AGO_NS, LONG_AGO_NS))
    assert content_of(frozen(parse("", folder), runs)) == before
    flip(model / "model.safetensors")
    assert content_of(frozen(parse("", folder), runs)) != before


def test_of_a_job_that_is_trained_weights_may_be_others(model: Path, folder: Path, runs: Path) -> None:
    job = parse("", folder)
    before = frozen(job, runs)
    flip(model / "model.safetensors")
    check_base(job, before, runs, parts=BESIDE_WEIGHTS)
    (model / "tokenizer.json").write_text("[]")
    with pytest.raises(UserError, match="not those that the job was submitted with"):
        check_base(job, before, runs, parts=BESIDE_WEIGHTS)


def test_models_of_the_hub_and_jobs_of_before_have_nothing_to_compare(folder: Path, runs: Path) -> None:
    job = Job.parse("model: owner/name\ndataset: text.jsonl\n", folder)
    assert frozen(job, runs) == {}
    check_base(job, {}, runs)
    assert check_base(Job.parse(BASE, folder), None, runs) is None


def test_a_file_dated_in_the_future_is_always_read(
    model: Path, folder: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = time.time_ns() + 10**12
    os.utime(model / "model.safetensors", ns=(later, later))
    before = frozen(parse("", folder), runs)
    read = read_files(monkeypatch)
    check_base(parse("", folder), before, runs)
    assert "model.safetensors" in read
