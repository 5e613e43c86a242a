"""The files of a model's weights, looked at before a job is taken in: are all of them there, and whole? No torch.

Of each file its header is read, and its size compared with it: what a download left out is told now, and not when the
job has its turn. That the numbers are right only who reads all of them can tell.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from planner.codec import json_object
from planner.errors import Exit, UserError, first_line
from planner.job.schema import Job
from planner.units import counted

_NAMES = ("model.safetensors", "pytorch_model.bin")
"""In transformers' order; of each the file itself goes before its index."""
_INDEX = ".index.json"
_POINTER = b"version https://git-lfs"
_LONGEST_HEADER = 100_000_000  # bytes, of safetensors' own reader
_MOST_NAMED = 5


def check_weights(job: Job) -> None:
    """Look at the weights of a job whose model is a folder. Raises UserError `weights-not-usable` (exit 2) where files
    are missing, or are not what their names say. A folder without weights is fine, and so is one whose weights have
    names that only transformers knows."""
    folder = Path(job.model)
    if not folder.is_absolute() or not folder.is_dir():
        return
    try:
        _check(folder, _files(folder))
    except OSError as error:
        raise _not_usable(folder, [first_line(error)], "let the daemon's user read the folder") from error


def _check(folder: Path, files: list[Path]) -> None:
    pointers = [file.name for file in files if _is_pointer(file)]
    if pointers:
        raise _not_usable(
            folder, [f"{_named(pointers)}: a git-lfs pointer, three lines that stand for a file not downloaded"],
            f"type: git -C {folder} lfs pull",
        )  # fmt: skip
    if missing := [file.name for file in files if not file.is_file()]:
        are = "is" if len(missing) == 1 else "are"
        number = f"{len(missing)} of {counted(len(files), 'file')} {are} missing: {_named(missing)}"
        raise _not_usable(folder, [number], _again(folder))
    if broken := [f"{file.name}: {wrong}" for file in files if (wrong := _wrong(file))]:
        raise _not_usable(folder, broken[:_MOST_NAMED], _again(folder))


def _files(folder: Path) -> list[Path]:
    """The files that transformers reads the weights from, there or not. Raises UserError."""
    for name in _NAMES:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}{_INDEX}"
        shards_alone = not index.is_file() and any(folder.glob(name.replace(".", "-*-of-*.")))
        if shards_alone or _is_pointer(index):
            return [index]
        if not index.is_file():
            continue
        shards = (json_object(index.read_bytes()) or {}).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise _not_usable(folder, [f"{index.name} is no index of weights"], _again(folder))
        return [folder / shard for shard in sorted(set(shards.values()))]
    return []


def _is_pointer(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as content:
        return content.read(len(_POINTER)) == _POINTER


def _wrong(file: Path) -> str | None:
    """What is wrong with a file of weights, as far as its header tells."""
    size = file.stat().st_size
    with file.open("rb") as content:
        start = content.read(8)
        if file.suffix != ".safetensors":
            torn = start.startswith(b"PK") and not zipfile.is_zipfile(file)  # its list is at its end
            return "it is empty" if not size else f"it was cut short, at {size:,} bytes" if torn else None
        length = int.from_bytes(start, "little")
        header = json_object(content.read(length)) if len(start) == 8 and length <= min(size, _LONGEST_HEADER) else None
    try:
        tensors = [value for key, value in (header or {}).items() if key != "__metadata__"]
        ends = [int(tensor["data_offsets"][1]) for tensor in tensors]
    except (LookupError, TypeError, ValueError):
        header = None
    if header is None:
        return f"it is no safetensors file, or was cut short; it has {size:,} bytes"
    whole = 8 + length + max(ends, default=0)
    return f"it has {size:,} bytes, and by its header {whole:,}" if size != whole else None


def _named(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _again(folder: Path) -> str:
    return f"complete the download, such as by: hf download OWNER/NAME --local-dir {folder}"


def _not_usable(folder: Path, numbers: list[str], hint: str) -> UserError:
    return UserError(
        f"The weights of {folder} cannot be loaded.", code="weights-not-usable", exit_code=Exit.USAGE,
        numbers=tuple(numbers), hint=hint,
    )  # fmt: skip
