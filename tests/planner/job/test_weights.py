"""A model's files of weights at submission: which of them are missing, cut short, or stand for others."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from planner.errors import Exit, UserError
from planner.job.lora import has_no_weights
from planner.job.weights import check_weights
from tests.planner.job.conftest import parse

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"
SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]


def whole(file: Path) -> None:
    save_file({"a": np.zeros((4, 4), np.float32), "b": np.ones(3, np.float32)}, file, metadata={"format": "pt"})


def index(model: Path, name: str = "model.safetensors.index.json") -> None:
    (model / name).write_text(json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}))


def sharded(model: Path) -> None:
    index(model)
    for shard in SHARDS:
        whole(model / shard)


def cut(file: Path, size: int) -> None:
    whole(file)
    file.write_bytes(file.read_bytes()[:size])


def torn_archive(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data.pkl", bytes(1000))
    file.write_bytes(file.read_bytes()[:500])


def gone(file: Path) -> None:
    file.symlink_to("../../blobs/4d7a")


@pytest.mark.parametrize(
    "make",
    [
        lambda model: None,
        lambda model: whole(model / "model.safetensors"),
        sharded,
        lambda model: (whole(model / "model.safetensors"), index(model)),  # the one file goes before
        lambda model: (model / "pytorch_model.bin").write_bytes(b"\x80\x02an old pickle"),
        lambda model: whole(model / "of_another_name.safetensors"),
        lambda model: save_file({}, model / "model.safetensors"),
    ],
)
def test_weights_that_are_whole_and_folders_without_any_are_fine(
    make: Callable[[Path], object], folder: Path
) -> None:  # fmt: skip
    make(folder / "tiny")
    job = parse("", folder)
    check_weights(job)
    assert has_no_weights(job.model) == (len(list((folder / "tiny").iterdir())) == 2)


@pytest.mark.parametrize(
    ("make", "number", "hint"),
    [
        (index, f"2 of 2 files are missing: {', '.join(SHARDS)}", "hf download"),
        (lambda m: (sharded(m), (m / SHARDS[1]).unlink()), f"1 of 2 files is missing: {SHARDS[1]}", "hf download"),
        (lambda m: index(m, "pytorch_model.bin.index.json"), "2 of 2 files are missing", "hf download"),
        (lambda m: whole(m / SHARDS[0]), "missing: model.safetensors.index.json", "hf download"),
        (lambda m: (index(m), [gone(m / shard) for shard in SHARDS]), "2 of 2 files are missing", "hf download"),
        (lambda m: (m / "model.safetensors.index.json").write_text('{"weight_map'), "is no index", "hf download"),
        (lambda m: (m / "model.safetensors").write_text(POINTER), "model.safetensors: a git-lfs pointer", "lfs pull"),
        (lambda m: (sharded(m), (m / SHARDS[0]).write_text(POINTER)), f"{SHARDS[0]}: a git-lfs pointer", "lfs pull"),
        (lambda m: (m / "pytorch_model.bin").write_text(POINTER), "pytorch_model.bin: a git-lfs pointer", "lfs pull"),
        (lambda m: cut(m / "model.safetensors", -1), "bytes, and by its header", "hf download"),
        (lambda m: cut(m / "model.safetensors", 50), "or was cut short; it has 50 bytes", "hf download"),
        (lambda m: cut(m / "model.safetensors", 0), "or was cut short; it has 0 bytes", "hf download"),
        (lambda m: (sharded(m), cut(m / SHARDS[1], -9)), f"{SHARDS[1]}: it has", "hf download"),
        (lambda m: (m / "model.safetensors").write_bytes(b"\xff" * 40), "no safetensors file", "hf download"),
        (lambda m: torn_archive(m / "pytorch_model.bin"), "pytorch_model.bin: it was cut short", "hf download"),
        (lambda m: (m / "pytorch_model.bin").touch(), "pytorch_model.bin: it is empty", "hf download"),
    ],
)  # fmt: skip
def test_weights_that_are_not_whole_are_refused_by_the_names_of_their_files(
    make: Callable[[Path], object], number: str, hint: str, folder: Path
) -> None:
    make(folder / "tiny")
    job = parse("", folder)
    assert not has_no_weights(job.model) and not any("random" in note for note in job.notes)
    with pytest.raises(UserError) as refused:
        check_weights(job)
    assert (refused.value.code, refused.value.exit_code) == ("weights-not-usable", Exit.USAGE)
    (line,) = refused.value.numbers
    assert number in line and hint in refused.value.hint and str(folder / "tiny") in refused.value.hint
