"""Reads frozen weights that stay in the model's own files, each time they are fetched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from planner.cpu.direct import OpenFile, mapped_at
from planner.errors import UserError, first_line
from planner.schedule.items import Item


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    file: OpenFile
    offset: int
    bytes: int
    dtype: torch.dtype
    shape: torch.Size


class FileItems:
    """Knows where, and in which file, each item's bytes are. Files are opened once, read-only, and stay open: if a file
    is replaced under its name, the old one is still read."""

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}
        self._files: dict[Path, OpenFile] = {}

    def __contains__(self, item: Item) -> bool:
        return item in self._parts

    def add(self, item: Item, weight: Tensor) -> None:
        """Register the item: the contiguous `weight`, whose memory is mapped from a file. Raises UserError
        "weights-not-in-files", "disk-failed"."""
        found = mapped_at(weight)
        if found is None or found[1] % weight.element_size():
            raise UserError(
                f"{item.name} cannot be read from the model's files as it is in memory.", code="weights-not-in-files",
                numbers=("it was converted when the model was loaded, or its file was replaced since",),
                hint="offmate retry; where that is no help, a larger cpu_budget",
            )  # fmt: skip
        path, offset = found
        try:
            file = self._files.setdefault(path, self._files.get(path) or OpenFile(path))
        except OSError as error:
            raise _failed(path, error) from error
        self._parts[item] = _Part(file, offset, weight.nbytes, weight.dtype, weight.shape)

    def read(self, item: Item, memory: Tensor) -> Tensor:
        """Read the item into `memory`, which must be larger. Returns the item's part of it. Raises UserError
        "disk-failed"."""
        part = self._parts[item]
        try:
            return part.file.read(part.offset, part.bytes, memory).view(part.dtype).view(part.shape)
        except OSError as error:
            raise _failed(part.file.path, error) from error


def _failed(path: Path, error: OSError) -> UserError:
    return UserError(
        "The model's weights cannot be read from disk any more.", code="disk-failed",
        numbers=(f"{path}: {first_line(error)}",),
        hint="see to the disk; the job goes on from its last checkpoint: offmate retry",
    )  # fmt: skip
