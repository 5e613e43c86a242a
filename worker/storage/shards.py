"""Writes tensors to safetensors files and reads them back, a bounded piece at a time; records files' checksums."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from planner.disk import sync


@dataclass(frozen=True, slots=True, eq=False)
class Streamed:
    """An item whose tensors, one of the same shape and `dtype` for each name in `parts`, are nowhere in memory as a
    whole. `pieces` yields, piece by piece, the index of a first element and the flat elements of each part from there
    on; they are valid until the next piece. `rest`: whole tensors that belong to the same item."""

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    pieces: Callable[[], Iterator[tuple[int, Sequence[Tensor]]]]
    rest: Mapping[str, Tensor]
    dtype: torch.dtype = torch.float32

    @property
    def bytes(self) -> int:
        """The number of bytes of all the item's tensors: those that are streamed, and the whole ones in `rest`."""
        streamed = self.dtype.itemsize * math.prod(self.shape) * len(self.parts)
        return streamed + sum(tensor.nbytes for tensor in self.rest.values())


Item = tuple[str, Mapping[str, Tensor]]
"""A parameter's name and its tensors by part: {"master": …, "exp_avg": …}."""
Written = Item | tuple[str, Streamed]

SHARD_BYTES = 256 * 2**20
_HEADER_BYTES = 2**16
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8", torch.int16: "I16"}
_PIECE = 4 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """How a checkpoint's manifest describes one file: its name in the folder, its size in bytes, and the BLAKE2b
    checksum of its content."""

    name: str
    bytes: int
    blake2b: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """Read the file at `path` and describe it: name, size in bytes, checksum."""
        digest = hashlib.blake2b(digest_size=32)
        size = 0
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
                size += len(piece)
        return cls(name=path.name, bytes=size, blake2b=digest.hexdigest())


class _Shard:
    """A safetensors file that takes one tensor after another and keeps none in memory. The header comes first and says
    where each tensor is; its space is reserved at the start, and it is written at the end."""

    def __init__(self, path: Path) -> None:
        self.path, self.bytes = path, 0
        self._entries: dict[str, object] = {}
        self._entries_bytes = 0
        self._file = path.open("wb")
        self._file.seek(_HEADER_BYTES)

    @property
    def full(self) -> bool:
        """Whether the file's header may have no space left for another item."""
        return self._entries_bytes > _HEADER_BYTES // 2

    def write(self, name: str, tensor: Tensor) -> None:
        """Append `tensor` to the file under `name`."""
        self._add(name, tensor.dtype, tensor.shape)
        self._file.write(_bytes_of(tensor))

    def write_pieces(self, name: str, item: Streamed) -> None:
        """Append the tensors of `item.parts` one after another, filling all of them piece by piece."""
        starts = [self._add(f"{name}/{part}", item.dtype, item.shape) for part in item.parts]
        for first, pieces in item.pieces():
            for start, piece in zip(starts, pieces, strict=True):
                self._file.seek(_HEADER_BYTES + start + item.dtype.itemsize * first)
                self._file.write(_bytes_of(piece))
        self._file.seek(_HEADER_BYTES + self.bytes)

    def _add(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> int:
        """Reserve the place of a tensor in the header; returns where it begins, in bytes behind the header."""
        start, self.bytes = self.bytes, self.bytes + math.prod(shape) * dtype.itemsize
        entry = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, self.bytes]}
        self._entries[name] = entry
        self._entries_bytes += len(json.dumps({name: entry}))
        return start

    def finish(self) -> None:
        """Write the header, close the file and flush it to disk."""
        header = json.dumps(self._entries).encode().ljust(_HEADER_BYTES - 8)  # the format allows spaces at its end
        assert len(header) == _HEADER_BYTES - 8
        self._file.seek(0)
        self._file.write(len(header).to_bytes(8, "little") + header)
        self.close()
        sync(self.path)

    def close(self) -> None:
        """Close the file without writing its header."""
        self._file.close()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def write_shards(folder: Path, stem: str, items: Iterable[Written], *, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write `items` to the files `stem-00001.safetensors`, … in `folder`, each of about `shard_bytes` bytes, and flush
    them to disk. Returns their paths in order.

    Tensors must be in host memory. They go straight to the file, so one item's tensors need not outlive the next item.
    An item's tensors are in one file, under the names "name/part"."""
    paths: list[Path] = []
    shard: _Shard | None = None
    try:
        for name, parts in items:
            item_bytes = parts.bytes if isinstance(parts, Streamed) else sum(t.nbytes for t in parts.values())
            if shard is not None and (shard.full or shard.bytes + item_bytes > shard_bytes):
                shard.finish()
                shard = None
            if shard is None:
                shard = _Shard(folder / f"{stem}-{len(paths) + 1:05}.safetensors")
                paths.append(shard.path)
            if isinstance(parts, Streamed):
                shard.write_pieces(name, parts)
            for part, tensor in (parts.rest if isinstance(parts, Streamed) else parts).items():
                shard.write(f"{name}/{part}", tensor)
        if shard is not None:
            shard.finish()
    finally:
        if shard is not None:
            shard.close()
    return paths


def read_shards(paths: Iterable[Path]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield (name, {part: tensor}) for each item in the files at `paths`, in order, one at a time. The tensors are
    mapped from disk: copy a tensor before changing it."""
    for path in paths:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name, keys in groupby(sorted(file.keys()), key=lambda key: key.rpartition("/")[0]):
                yield name, {key.rpartition("/")[2]: file.get_tensor(key) for key in keys}
