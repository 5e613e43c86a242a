"""Tensors to safetensors files and back, a bounded piece at a time, each file with its size and checksum."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from planner.errors import UserError
from planner.units import format_bytes

Item = tuple[str, Mapping[str, Tensor]]
"""A parameter's name, and tensors that belong to it by their part: {"master": …, "exp_avg": …}."""

SHARD_BYTES = 256 * 2**20
_PIECE = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file of a checkpoint: name in its folder, size, BLAKE2b of its content."""

    name: str
    bytes: int
    blake2b: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """The record of the file as it is on disk now."""
        digest = hashlib.blake2b(digest_size=32)
        size = 0
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
                size += len(piece)
        return cls(name=path.name, bytes=size, blake2b=digest.hexdigest())


def write_shards(folder: Path, stem: str, items: Iterable[Item], *, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write `stem-00001.safetensors` … with about `shard_bytes` each, flushed to disk; returns them in order.

    Tensors are on the host, and those of one item need not outlive the next: small items are copied until a file is
    full, large ones written at once, so the copies stay below one shard. An item's tensors share a file, under
    "name/part".
    """
    paths: list[Path] = []
    held: dict[str, Tensor] = {}
    size = 0

    def flush(content: dict[str, Tensor]) -> None:
        path = folder / f"{stem}-{len(paths) + 1:05}.safetensors"
        save_file(content, path)
        sync(path)
        paths.append(path)

    for name, parts in items:
        item_bytes = sum(tensor.nbytes for tensor in parts.values())
        if item_bytes >= shard_bytes:
            flush({f"{name}/{part}": tensor.detach().contiguous() for part, tensor in parts.items()})
            continue
        if size + item_bytes > shard_bytes:
            flush(held)
            held, size = {}, 0
        for part, tensor in parts.items():
            held[f"{name}/{part}"] = tensor.detach().clone(memory_format=torch.contiguous_format)
        size += item_bytes
    if held:
        flush(held)
    return paths


def read_shards(paths: Iterable[Path]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The items of the files, one at a time, mapped from disk: copy what is to be changed."""
    for path in paths:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name, keys in groupby(sorted(file.keys()), key=lambda key: key.rpartition("/")[0]):
                yield name, {key.rpartition("/")[2]: file.get_tensor(key) for key in keys}


def sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush every file and folder in `folder`, and `folder` itself."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def check_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Raise UserError when `folder`'s disk has less than `needed_bytes` left for `what`."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise UserError(
            f"The disk has no room for {what}.", code="disk-full",
            numbers=(f"needed {format_bytes(needed_bytes)}, free {format_bytes(free)} at {folder}",),
            hint="free some space, or lower save_total_limit; the job goes on from its last checkpoint",
        )  # fmt: skip
