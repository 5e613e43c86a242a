"""Checks that the local files of a job's base, which are those of its model and tokenizer, are unchanged since the job
was submitted.

A job whose base has changed is refused. This module does not import torch.

A file whose size, times, inode and device are as noted has not been written to, and is not read again. Where these
differ, its content decides, so a file that was copied, restored or touched counts as unchanged. Models on the hub are
identified by their commit. Python code in a model's folder is never run and not checked.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from planner.codec import json_object
from planner.data.local_data import is_local
from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.job.weights import weight_files
from planner.units import counted, format_bytes

log = logging.getLogger(__name__)

Part = Literal["config", "tokenizer", "weights"]
PARTS: tuple[Part, ...] = ("config", "tokenizer", "weights")
BESIDE_WEIGHTS: tuple[Part, ...] = ("config", "tokenizer")
"""The parts of the base that are copied into the model folder of a trained job."""
TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "tekken.json",
    "chat_template*",
)
"""Files of tokenizers, older formats included. transformers reads special tokens from these, too."""
_CONFIG = ("config*.json", "generation_config.json", "adapter_config.json")
_WEIGHTS = ("model.safetensors.index.json", "pytorch_model.bin.index.json", "adapter_model.*")
"""Files beside the weight files themselves. transformers loads an adapter in a model's folder together with the
model."""

Base = Mapping[str, Mapping[str, Any]]
"""What is noted of a base: path of a file -> its `part` (config, tokenizer or weights), its size in `bytes`, the `hash`
of its content (None until it is read), and the `status` in which it has that hash: mtime and ctime in ns, inode,
device. The `status` is None where a later change might not show in it. Large weight files also have a `glance`: the
hash of some pieces of their content."""

AT_ONCE_BYTES = 2 * 2**30
"""The most bytes of weights that are read while a user waits for the answer. More are read later by the planner's
process."""
_SETTLED_NS = 2 * 10**9  # file systems note times in steps of up to 2 s: a second change within one is not seen
_THREADS = 4
_RUNS_ASKED = 100
_PIECES, _PIECE_BYTES = 16, 64 * 2**10
_SHOWN = 5


def base_files(job: Job, parts: Iterable[Part] = PARTS) -> dict[Path, Part]:
    """Return the local files that loading the job's model, tokenizer and `ref_model` reads, each with its part of the
    base. `parts`: only these parts. Raises UserError `weights-not-usable`, OSError."""
    model, tokenizer = Path(job.model), Path(job.tokenizer)
    part_of: dict[Path, Part] = {}
    if is_local(job.tokenizer):
        patterns = (*TOKENIZER, "additional_chat_templates/*", "config.json")
        part_of |= dict.fromkeys(_matching(tokenizer, patterns), "tokenizer")
    if is_local(job.model):
        part_of |= dict.fromkeys(_matching(model, _CONFIG), "config")
    for folder in (model, Path(job.ref_model or job.model)) if "weights" in parts else ():
        if folder.is_absolute() and folder.is_dir():
            files = weight_files(folder) or sorted(folder.glob("*.safetensors"))
            part_of |= dict.fromkeys((*filter(Path.is_file, files), *_matching(folder, _WEIGHTS)), "weights")
    return {file: part for file, part in part_of.items() if part in parts}


def freeze_base(job: Job, runs: Path) -> dict[str, dict[str, Any]]:
    """Return what identifies the files of the job's base (see `Base`). `runs`: the folder of all runs, whose notes have
    the hashes of files that were read before. Where more than `AT_ONCE_BYTES` of weights would have to be read, their
    hashes stay None. Raises UserError, OSError."""
    base = {str(file): _told(file, part) for file, part in base_files(job).items()}
    weights = {path: note for path, note in base.items() if note["part"] == "weights"}
    if sum(note["bytes"] for note in weights.values()) > AT_ONCE_BYTES:
        for path, note in weights.items():
            note["glance"] = _glance(Path(path), note["bytes"])
    _fill_in(base, _known(runs))
    much = sum(note["bytes"] for note in weights.values() if note["hash"] is None) > AT_ONCE_BYTES
    _read({path: note for path, note in base.items() if not (much and note["part"] == "weights")})
    return base


def left_for_later(base: Base) -> tuple[str, ...]:
    """Return a note for the user on the weights that are not read yet; () where all are."""
    sizes = [note["bytes"] for note in base.values() if note["hash"] is None]
    if not sizes:
        return ()
    size = format_bytes(sum(sizes))
    return (f"the weights of the base, {size}, are read when the job is planned, to notice when they change",)


def content_of(base: Base) -> dict[str, Any]:
    """Return a value that is equal for bases of equal content, whenever their files were written. Large weight files
    are compared by their `glance`."""
    return {path: [note["bytes"], note.get("glance") or note["hash"]] for path, note in base.items()}


def check_base(
    job: Job,
    base: Base | None,
    runs: Path,
    *,
    parts: Iterable[Part] = PARTS,
    most_bytes: int | None = None,
    hint: str = "go on with what is there now: offmate retry ID --allow-changed-model",
) -> Base | None:
    """Raise UserError `base-changed` if files of the job's base have changed since it was submitted; else return the
    base to be noted from now on.

    `base`: what was noted; None: nothing was, and nothing is checked. `runs`: as for `freeze_base`. `parts`: check only
    these parts. `most_bytes`: where more bytes than this would have to be read, only sizes and times of files are
    checked. `hint`: what the user can do besides restoring the files. Raises OSError.
    """
    if base is None:
        return None
    wanted = set(parts)
    now = {str(file): _told(file, part) for file, part in base_files(job, wanted).items()}
    before = {path: noted for path, noted in base.items() if noted["part"] in wanted}
    changes = [f"{path}: there was no such file" for path in sorted(now.keys() - before.keys())]
    changes += [f"{path}: it is gone" for path in sorted(before.keys() - now.keys()) if not Path(path).exists()]
    unread: dict[str, dict[str, Any]] = {}
    for path in sorted(now.keys() & before.keys()):
        current, noted = now[path], before[path]
        if current["bytes"] != noted["bytes"]:
            changes.append(f"{path}: {noted['bytes']} bytes, now {current['bytes']}")
        elif noted["hash"] is None and current["status"][:2] != noted["status"][:2]:
            changes.append(f"{path}: it was written to before the job was planned")
        elif noted["hash"] is None or current["status"] != noted["status"]:
            unread[path] = current
    if not changes:
        _fill_in(unread, _known(runs) if unread else {})
        if (
            most_bytes is not None
            and sum(current["bytes"] for current in unread.values() if not current["hash"]) > most_bytes
        ):
            return base
        _read(unread)
        for path, current in unread.items():
            if before[path]["hash"] not in (None, current["hash"]):
                changes.append(f"{path}: other content")
    if changes:
        more = [f"and {len(changes) - _SHOWN} more"] if len(changes) > _SHOWN else []
        raise UserError(
            "The files of the model are not those that the job was submitted with.",
            code="base-changed",
            exit_code=Exit.USAGE,
            numbers=(*changes[:_SHOWN], *more),
            hint=f"put them back, or {hint}",
        )
    return {**base, **{path: {**before[path], **current} for path, current in unread.items()}}


class Run(Protocol):
    """The members of a run folder (`planner.run.folder.RunFolder`) that this module uses: its path, and the note on the
    base."""

    @property
    def path(self) -> Path:
        """The run folder, whose parent folder has all runs."""

    def read_base(self) -> Base | None:
        """Return the base that is noted in the run folder; None where there is none."""

    def write_base(self, base: Base | None) -> None:
        """Replace the base that is noted in the run folder."""

    def say(self, text: str) -> None:
        """Add a line to the job's log."""


def keep_base(job: Job, run: Run, *, parts: Iterable[Part] = PARTS) -> None:
    """Check the base of a run folder's job at its start, and note what is known of its files from now on. Raises
    UserError `base-changed` as `check_base` does, OSError. Where no base was noted, as by an older version, today's
    files are noted."""
    runs = run.path.parent
    if (base := run.read_base()) is None:
        base = freeze_base(job, runs)
        run.write_base(base)
        if base:
            files = counted(len(base), "file")
            run.say(f"the base was not noted at submission; from now on it is these {files}, as they are today")
    run.write_base(check_base(job, base, runs, parts=parts))


def _matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted(file for pattern in patterns for file in folder.glob(pattern) if file.is_file())


def _told(file: Path, part: Part) -> dict[str, Any]:
    of = file.stat()
    return {"part": part, "bytes": of.st_size, "hash": None, "status": _status(of)}


def _status(of: os.stat_result) -> list[int]:
    return [of.st_mtime_ns, of.st_ctime_ns, of.st_ino, of.st_dev]


def _fill_in(files: Mapping[str, dict[str, Any]], known: Mapping[tuple[int, ...], str]) -> None:
    for note in files.values():
        note["hash"] = known.get((note["bytes"], *note["status"]))


def _known(runs: Path) -> dict[tuple[int, ...], str]:
    """Return the hashes of files that the newest runs have read: (size, status) -> hash."""
    hashes: dict[tuple[int, ...], str] = {}
    numbers = sorted((int(run.name) for run in runs.iterdir() if run.name.isdigit()), reverse=True)
    for number in numbers[:_RUNS_ASKED]:
        with suppress(OSError, LookupError, TypeError, AttributeError):  # the file is gone, or not as we write it
            for note in (json_object((runs / str(number) / "base.json").read_bytes()) or {}).values():
                if note["hash"] is not None and note["status"] is not None:
                    hashes[(note["bytes"], *note["status"])] = note["hash"]
    return hashes


def _read(files: Mapping[str, dict[str, Any]]) -> None:
    """Read each file that has no hash yet, and note its hash. Its status becomes None where the file was so new that a
    later change might not show in it, or changed while it was read."""
    unread = [path for path, note in files.items() if note["hash"] is None]
    if (size := sum(files[path]["bytes"] for path in unread)) > AT_ONCE_BYTES:
        log.info("base: %s are read to know their content", format_bytes(size))
    began_ns = time.time_ns()
    with ThreadPoolExecutor(_THREADS) as threads:
        for path, digest in zip(unread, threads.map(_hash, unread), strict=True):
            note = files[path]
            settled = max(note["status"][:2]) < began_ns - _SETTLED_NS and _status(Path(path).stat()) == note["status"]
            note |= {"hash": digest, "status": note["status"] if settled else None}


def _hash(path: str) -> str:
    with Path(path).open("rb") as content:
        return hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _glance(file: Path, size: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as content:
        for piece in range(_PIECES):
            content.seek(size * piece // _PIECES)
            digest.update(content.read(_PIECE_BYTES))
    return digest.hexdigest()
