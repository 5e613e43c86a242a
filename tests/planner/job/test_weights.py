"""A model's files of weights at submission: which of them are missing, cut short, or stand for others."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from planner.errors import Exit, UserError
from planner.job.weights import _TENSORS, check_weights
from planner.keys.lora import has_no_weights
from tests.planner.conftest import parse

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


WEIGHTS = {
    "a": torch.ones(2, 2, dtype=torch.bfloat16),
    "b": torch.nn.Parameter(torch.ones(3)),
    "c": torch.tensor([1, 2])[1:],
}


class Runs:
    """Whose pickle runs a command where it is read without care."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("false",)


def pickled(model: Path, content: object, **options: Any) -> None:
    torch.save(content, model / "pytorch_model.bin", **options)


def archive(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("notes.txt", "no weights")


def gone(file: Path) -> None:
    file.symlink_to("../../blobs/4d7a")


@pytest.mark.parametrize(
    "make",
    [
        lambda model: None,
        lambda model: whole(model / "model.safetensors"),
        sharded,
        lambda model: (whole(model / "model.safetensors"), index(model)),  # the one file goes before
        lambda model: pickled(model, WEIGHTS),
        lambda model: pickled(model, WEIGHTS, _use_new_zipfile_serialization=False),
        lambda model: whole(model / "of_another_name.safetensors"),
        lambda model: save_file({}, model / "model.safetensors"),
    ],
)
def test_weights_that_are_whole_and_folders_without_any_are_fine(make: Callable[[Path], object], folder: Path) -> None:
    make(folder / "tiny")
    job = parse("", folder)
    check_weights(job)
    assert has_no_weights(job.model) == (len(list((folder / "tiny").iterdir())) == 2)


def test_weights_in_forms_that_are_not_read_are_refused_and_not_replaced_by_random_ones(folder: Path) -> None:
    its = folder / "tiny"
    for name in ("optimizer.pt", "rng_state_0.pth", "notes.txt"):
        (its / name).write_bytes(b"x")
    check_weights(parse("", folder))
    for names in (["consolidated.00.pth"], ["model.gguf"], ["flax_model.msgpack", "tf_model.h5"], ["m.ckpt.index"]):
        for name in names:
            (its / name).write_bytes(b"x")
        with pytest.raises(UserError) as refused:
            check_weights(parse("", folder))
        assert (refused.value.code, refused.value.exit_code) == ("unknown-weights", Exit.USAGE)
        assert refused.value.numbers[0].startswith(f"{', '.join(names)}; it reads model.safetensors and")
        save_file({}, its / "model.safetensors")
        check_weights(parse("", folder))
        for name in (*names, "model.safetensors"):
            (its / name).unlink()


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
        (lambda m: pickled(m, Runs()), "it is a pickle of more than tensors (posix.system), and reading", "cd "),
        (lambda m: pickled(m, Runs(), pickle_protocol=4), "more than tensors (STACK_GLOBAL), and reading", "cd "),
        (lambda m: pickled(m, Runs(), _use_new_zipfile_serialization=False), "(posix.system), and reading", "cd "),
        (lambda m: pickled(m, torch.nn.Linear(2, 2)), "more than tensors (torch.nn.modules.linear.Linear)", "cd "),
        (lambda m: (m / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR."), "(os.system)", "cd "),
        (lambda m: (m / "pytorch_model.bin").write_bytes(b"(S'false'\nios\nsystem\n."), "(INST)", "cd "),
        (lambda m: (m / "pytorch_model.bin").write_bytes(b"no pickle"), "it is no file of PyTorch's: at", "cd "),
        (lambda m: archive(m / "pytorch_model.bin"), "it is no file of PyTorch's: ", "cd "),
    ],
)
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


def test_what_safe_loading_knows_is_taken_and_nothing_else() -> None:
    from torch._weights_only_unpickler import _get_allowed_globals

    assert not [name for name in _get_allowed_globals() if not _TENSORS.fullmatch(name)]
    others = (
        "torch.load",
        "torch.hub.load",
        "torch.nn.Linear",
        "builtins.eval",
        "os.system",
        "numpy.dtype",
        "torch._utils._import_dotted_name",
        "torch.storage._load_from_bytes",
        "collections.deque",
    )
    assert not [name for name in others if _TENSORS.fullmatch(name)]


def test_the_command_that_is_named_makes_weights_that_are_taken(folder: Path) -> None:
    model = folder / "tiny"
    layer = torch.nn.Linear(2, 3)
    layer.bias = torch.nn.Parameter(layer.weight[0].detach())  # which shares its memory
    pickled(model, layer)
    with pytest.raises(UserError) as refused:
        check_weights(parse("", folder))
    command = refused.value.hint.partition("convert it: ")[2]
    python = f"{shlex.quote(sys.executable)} -c"
    subprocess.run(command.replace("python -c", python), shell=True, check=True)
    check_weights(parse("", folder))
    made = load_file(model / "model.safetensors")
    assert made.keys() == {"weight", "bias"} and all(made[name].equal(t) for name, t in layer.state_dict().items())
