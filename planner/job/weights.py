"""Checks a model's weight files when a job is submitted: whether all are there and complete. Does not import torch.

The header of each file is compared with the file's size, so that the user learns now, and not when the job starts, that
a download is incomplete. Whether the numbers are right shows only when all of them are read. Of a pickle (`.bin` files)
the opcodes are looked at and none is executed: PyTorch's safe loading accepts only those that make tensors.
"""

from __future__ import annotations

import io
import pickletools
import re
import shlex
import zipfile
import zlib
from pathlib import Path

from planner.codec import json_object
from planner.errors import Exit, UserError, first_line
from planner.job.schema import Job
from planner.keys.lora import has_no_weights
from planner.units import counted

_NAMES = ("model.safetensors", "pytorch_model.bin")
"""Names of weight files, in the order in which transformers looks for them; each file comes before its index."""
_INDEX = ".index.json"
_OTHER_FORMS = (".pth", ".pt", ".h5", ".msgpack", ".gguf", ".ckpt", ".ckpt.index", ".npz", ".onnx")
"""Suffixes of weight files that transformers does not read."""
_OF_A_RUN = re.compile("optimizer|scheduler|scaler|rng_state|training_args|tokenizer|imatrix|embeddings")
"""Names of files in a checkpoint that are no weights."""
_POINTER = b"version https://git-lfs"
_LONGEST_HEADER = 100_000_000  # bytes; the limit of safetensors' own reader
_MOST_NAMED = 5
_MOST_PICKLED = 64 * 2**20  # bytes of a pickle that are checked; a large model's has less than 1 MiB
_PICKLES = 4  # in a file of PyTorch before 1.6: two numbers, a description, then the tensors
_TENSORS = re.compile(
    r"collections\.(OrderedDict|Counter)|_codecs\.encode|builtins\.(bytearray|set|complex)"
    r"|torch\.(Size|device|bool|[a-z]+\d\w*|per_(tensor|channel)_\w+)|torch\.(cuda\.)?(sparse\.)?\w*(Tensor|Storage)"
    r"|torch\.nn\.parameter\.Parameter|torch\.storage\.\w+Storage|torch\._utils\._rebuild_\w+"
    r"|torch\._tensor\._rebuild_from_type_v2|torch\.serialization\._get_layout"
)
"""The classes and functions in a pickle that PyTorch's safe loading accepts."""
_MAKES = ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4")
"""Opcodes of a pickle that PyTorch's safe loading does not accept: they make or call something by its name."""
_CONVERT = (
    "import glob, torch, safetensors.torch as s; w = {}; [w.update(getattr(x, 'state_dict', lambda: x)()) for x in "
    "(torch.load(f, 'cpu', weights_only=False) for f in glob.glob('pytorch_model*.bin'))]; s.save_file({k: "
    "t.detach().clone().contiguous() for k, t in w.items() if torch.is_tensor(t)}, 'model.safetensors', "
    "{'format': 'pt'})"
)


def check_weights(job: Job) -> None:
    """Check the weight files of a job whose model is a local folder. Raises UserError `weights-not-usable` (exit 2)
    where files are missing or damaged, and `unknown-weights` where all are in a format that is not read. A folder
    without weights is accepted, and so is one whose weight files have names that only transformers knows."""
    folder = Path(job.model)
    if not folder.is_absolute() or not folder.is_dir():
        return
    try:
        files = weight_files(folder)
        if not files and has_no_weights(job.model):
            _refuse_other_forms(folder)
        _check(folder, files)
    except OSError as error:
        raise _not_usable(folder, [first_line(error)], "let the daemon's user read the folder") from error


def _refuse_other_forms(folder: Path) -> None:
    """Raise UserError where a folder has weights only in formats that are not read: the job would start from random
    weights."""
    names = [file.name for file in sorted(folder.iterdir()) if file.is_file() and file.name.endswith(_OTHER_FORMS)]
    if names := [name for name in names if not _OF_A_RUN.match(name)]:
        raise UserError(
            f"offmate cannot read the weights in {folder}.",
            code="unknown-weights",
            exit_code=Exit.USAGE,
            numbers=(f"{_named(names)}; it reads {' and '.join(_NAMES)}, whole or in parts",),
            hint=f"take the model's safetensors, such as by: hf download OWNER/NAME --local-dir {folder}; or convert "
            "the weights to safetensors; to train from random weights, move the weight files out of the folder",
        )


def _check(folder: Path, files: list[Path]) -> None:
    pointers = [file.name for file in files if _is_pointer(file)]
    if pointers:
        raise _not_usable(
            folder,
            [f"{_named(pointers)}: a git-lfs pointer, three lines that stand for a file not downloaded"],
            f"type: git -C {folder} lfs pull",
        )
    if missing := [file.name for file in files if not file.is_file()]:
        are = "is" if len(missing) == 1 else "are"
        number = f"{len(missing)} of {counted(len(files), 'file')} {are} missing: {_named(missing)}"
        raise _not_usable(folder, [number], _again(folder))
    if broken := [f"{file.name}: {wrong}" for file in files if (wrong := _wrong(file))]:
        raise _not_usable(folder, broken[:_MOST_NAMED], _again(folder))
    pickles = [file for file in files if file.suffix != ".safetensors"]
    if refused := [f"{file.name}: {why}" for file in pickles if (why := _beyond_tensors(file))]:
        command = f"cd {shlex.quote(str(folder))} && python -c {shlex.quote(_CONVERT)}"
        raise _not_usable(
            folder,
            refused[:_MOST_NAMED],
            f"take the model's safetensors; or, if you trust who made the file, let it run and convert it: {command}",
        )


def weight_files(folder: Path) -> list[Path]:
    """Return the files from which transformers would read the weights in a model's folder, whether they exist or not;
    [] where their names are known only to transformers. Raises UserError `weights-not-usable` for a broken index,
    OSError."""
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
    """Return what is wrong with a weight file, as far as its header shows; None where nothing is."""
    size = file.stat().st_size
    with file.open("rb") as content:
        start = content.read(8)
        if file.suffix != ".safetensors":
            torn = start.startswith(b"PK") and not zipfile.is_zipfile(file)  # a zip's directory is at its end
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


def _beyond_tensors(file: Path) -> str | None:
    """Return why PyTorch's safe loading would refuse a pickle; None where nothing shows that it would."""
    pickles = b""
    try:
        pickles, number = _pickles(file)
        content = io.BytesIO(pickles)
        for _ in range(number):
            for opcode, argument, _ in pickletools.genops(content):
                name = str(argument).replace(" ", ".") if opcode.name == "GLOBAL" else opcode.name
                if (opcode.name == "GLOBAL" and not _TENSORS.fullmatch(name)) or opcode.name in _MAKES:
                    return f"it is a pickle of more than tensors ({name}), and reading it may run code"
    except (ValueError, LookupError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        if len(pickles) < _MOST_PICKLED:  # else the error only comes from the cut at _MOST_PICKLED
            return f"it is no file of PyTorch's: {first_line(error)}"
    return None


def _pickles(file: Path) -> tuple[bytes, int]:
    """Return the pickles at the beginning of a PyTorch file, at most `_MOST_PICKLED` bytes, and their number. Raises
    LookupError, RuntimeError and zipfile's errors for a file that PyTorch did not write."""
    with file.open("rb") as content:
        if content.read(2) != b"PK":
            content.seek(0)
            return content.read(_MOST_PICKLED), _PICKLES
    with zipfile.ZipFile(file) as archive:
        name = next((name for name in archive.namelist() if name.endswith("/data.pkl")), "data.pkl")
        with archive.open(name) as entry:
            return entry.read(_MOST_PICKLED), 1


def _named(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _again(folder: Path) -> str:
    return f"complete the download, such as by: hf download OWNER/NAME --local-dir {folder}"


def _not_usable(folder: Path, numbers: list[str], hint: str) -> UserError:
    return UserError(
        f"The weights of {folder} cannot be loaded.",
        code="weights-not-usable",
        exit_code=Exit.USAGE,
        numbers=tuple(numbers),
        hint=hint,
    )
