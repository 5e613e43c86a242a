"""Keeps on disk, while a run trains, activations, weights that live wholly on disk, and the gradients of these weights.

Each item has a place in a file whose name is removed at once, so that the file goes when its process ends, whatever
ends it. A checkpoint needs none of this, so nothing is flushed to make it durable."""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from planner.cpu.direct_file import DirectFile
from planner.errors import UserError, first_line
from planner.schedule.items import ACTIVATIONS, WEIGHT, Item
from planner.schedule.state_pieces import PAGE, Piece
from worker.storage.drive_folders import check_room, prepared, refused, tidy
from worker.storage.striped import File, Part, Striped, file_sizes, parts_of_pieces


class ActivationsOnDisk:
    """Activations, weights and gradients ("items") in one file in each of `folders`, which belong to this run alone.

    read_bytes       bytes read since this object was made
    written_bytes    bytes written since this object was made
    """

    def __init__(
        self,
        folders: Sequence[Path],
        sizes: Mapping[Item, int],
        *,
        shares: Callable[[], Sequence[int]] | None = None,
        open_file: Callable[[Path], File] = DirectFile,
    ) -> None:
        """`sizes`: the most bytes of each item, in whole pages. `shares`: gives the relative share of every item that
        each folder gets; None: equal shares. Raises UserError "disk-is-memory", "disk-not-direct", "disk-too-small",
        "disk-failed"."""
        self.read_bytes = self.written_bytes = 0
        self._lock = threading.Lock()
        self._failed: UserError | None = None
        weights, activations = (any(item.kind == kind for item in sizes) for kind in (WEIGHT, ACTIVATIONS))
        self._what = " and ".join(["activations"] * (activations or not weights) + ["weights"] * weights)
        self._folders = [prepared(folder, self._what) for folder in folders]
        pieces = [Piece(name=name, number=0, first=0, elements=size, widths=(1,)) for name, size in sizes.items()]
        divided = tuple(shares()) if shares is not None else (1,) * len(folders)
        places = parts_of_pieces(pieces, divided, homes=1)
        self._places = dict(zip(sizes, places, strict=True))
        self._files: dict[int, File] = {}
        self._striped = Striped(self._files, len(folders))
        tidy(self._folders, "activations-*.bin")  # a process killed between making and unlinking a file leaves it
        try:
            self._open(file_sizes(places, len(folders), homes=1), open_file)
        except BaseException:
            self.close()
            raise

    def _open(self, sizes: Sequence[int], open_file: Callable[[Path], File]) -> None:
        name = f"activations-{secrets.token_hex(4)}"
        paths = [folder / f"{name}-{k}.bin" for k, folder in enumerate(self._folders)]
        check_room(paths, sizes, self._what)
        for k, (path, size) in enumerate(zip(paths, sizes, strict=True)):
            if not size:
                continue
            try:
                self._files[k] = open_file(path)
                self._files[k].reserve(size)
                page = torch.zeros(2 * PAGE, dtype=torch.uint8)
                self._files[k].write(0, page[-page.data_ptr() % PAGE :][:PAGE])  # some refuse only when written to
            except OSError as error:
                raise refused(path, size, error, self._what) from error
            finally:
                path.unlink(missing_ok=True)

    def write(self, item: Item, memory: Tensor) -> None:
        """Write the item from `memory`: bytes in whole pages, no more than the item's size on disk. Raises UserError
        "disk-failed"."""
        self._move(item, memory, write=True)

    def read(self, item: Item, memory: Tensor) -> None:
        """Fill `memory` (bytes) with the item as last written, from its beginning. Raises UserError "disk-failed"."""
        self._move(item, memory, write=False)

    def _move(self, item: Item, memory: Tensor, *, write: bool) -> None:
        if self._failed is not None:
            raise self._failed
        failed = functools.partial(self._fail, "written to" if write else "read from")
        parts = list(_beginning(self._places[item], memory.nbytes))
        self._striped.move(parts, 0, memory, write=write, floats=None, failed=failed)
        with self._lock:
            if write:
                self.written_bytes += memory.nbytes
            else:
                self.read_bytes += memory.nbytes

    def _fail(self, done: str, file: int, error: OSError) -> UserError:
        failed = UserError(
            f"{self._what.capitalize()} cannot be {done} disk any more.",
            code="disk-failed",
            numbers=(f"{self._folders[file]}: {first_line(error)}",),
            hint="check the disk; the job goes on from its last checkpoint: offmate retry",
        )
        self._failed = self._failed or failed
        return failed

    def close(self) -> None:
        """Close the files, which disappear thereby, and remove the folders that are then empty."""
        self._striped.close()
        for file in self._files.values():
            file.close()
        self._files.clear()
        for folder in self._folders:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _beginning(parts: Sequence[Part], size: int) -> Iterator[Part]:
    for part in parts:
        if part.start < size:
            yield replace(part, bytes=min(part.bytes, size - part.start))
