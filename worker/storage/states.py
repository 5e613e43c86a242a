"""Keeps optimizer states on disk in pieces (ranges of a tensor's elements) with two places each, called homes, so that
checkpoints copy nothing.

The home that the newest checkpoint names is never written. Updates go to the other home and overwrite what earlier
steps since that checkpoint left there. To checkpoint, the files are flushed; then a record is published that says which
home of each piece is current and gives the sum of its content. Whatever stops the process or the machine, the homes in
the last record are whole. Two homes take twice the disk space. Where checkpoints are copies, pieces have one home."""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from planner.cpu.direct_file import DirectFile, Sum
from planner.disk import sync
from planner.errors import UserError, first_line
from planner.schedule.state_pieces import PAGE, Piece, StoredTensor
from planner.units import format_bytes
from worker.storage.drive_folders import check_room, prepared, refused, tidy
from worker.storage.shards import Streamed
from worker.storage.states_record import StatesRecord, all_pieces, parts_of, torn
from worker.storage.striped import File, Striped, file_sizes, parts_of_pieces

_WHAT = "optimizer states"


class StatesOnDisk:
    """The optimizer states of some tensors, in one file in each of `folders`. The folders belong to this run alone:
    states files that neither this run nor its newest checkpoint needs are removed from them. A home is a place on disk
    for a piece of states.

    homes            homes per piece: 2 where checkpoints name them, 1 where checkpoints copy the states
    resumed          whether the newest checkpoint's files were taken over with the states in them
    read_bytes       bytes read since this object was made
    written_bytes    bytes written since this object was made
    """

    def __init__(
        self,
        folders: Sequence[Path],
        tensors: Sequence[StoredTensor],
        *,
        piece_elements: int,
        homes: int,
        record: StatesRecord | None = None,
        open_file: Callable[[Path], File] = DirectFile,
        shares: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """`record`: the states that the newest checkpoint names. Their files are taken over where their layout is the
        one wanted here; else new files are made beside them. `shares`: called only for new files; gives the relative
        share of every piece that each folder gets. None: equal shares. A folder without a share has no file. Raises
        UserError "disk-is-memory", "disk-not-direct", "disk-too-small", "disk-failed", "states-torn"."""
        self.homes, self.read_bytes, self.written_bytes = homes, 0, 0
        self._tensors, self._piece_elements = tuple(tensors), piece_elements
        self.pieces = all_pieces(tensors, piece_elements)
        self._numbers = {(piece.name, piece.number): k for k, piece in enumerate(self.pieces)}
        self._lock = threading.Lock()
        self._failed: UserError | None = None
        self._published = True  # False from `flush` until `published` or `withdrawn`
        self._not_finite: set[int] = set()
        self._current, self._sums = [0] * len(self.pieces), [0] * len(self.pieces)
        self._kept: list[int] | None = None  # the homes that the newest checkpoint names
        folders = [prepared(folder, _WHAT) for folder in folders]
        self.resumed = record is not None and record.is_laid_out(folders, tensors, piece_elements, homes)
        if record is not None and self.resumed:
            self._paths = [Path(file) for file in record.files]
            self._current = record.current()
            self._kept, self._sums = list(self._current), record.sums()
            self._shares, self._places = record.shares, record.parts()
        else:
            self._shares = tuple(shares()) if shares is not None else (1,) * len(folders)
            self._places = parts_of_pieces(self.pieces, self._shares, homes)
            name = f"states-{secrets.token_hex(4)}"
            self._paths = [folder / f"{name}-{k}.bin" for k, folder in enumerate(folders)]  # a folder may come twice
        tidy(folders, "states-*.bin", [*self._paths, *map(Path, record.files if record is not None else ())])
        self._files: dict[int, File] = {}
        self._striped = Striped(self._files, len(self._paths))
        try:
            self._open(open_file)
        except BaseException:
            self.close() if self.resumed else self.delete()
            raise

    def _open(self, open_file: Callable[[Path], File]) -> None:
        sizes = file_sizes(self._places, len(self._paths), self.homes)
        if self.resumed:
            for path, size in zip(self._paths, sizes, strict=True):
                if size and (not path.is_file() or path.stat().st_size < size):
                    raise torn(f"{path} is missing or too short; it has {format_bytes(size)} where it is whole")
        else:
            check_room(self._paths, sizes, _WHAT)
        for k, (path, size) in enumerate(zip(self._paths, sizes, strict=True)):
            if not size:  # a drive without a share: it is full, or too slow
                continue
            try:
                self._files[k] = open_file(path)
                if not self.resumed:
                    self._files[k].reserve(size)
                    page = torch.zeros(2 * PAGE, dtype=torch.uint8)
                    self._files[k].write(0, page[-page.data_ptr() % PAGE :][:PAGE])  # some refuse only when written to
            except OSError as error:
                raise refused(path, size, error, _WHAT) from error
        for folder in {self._paths[k].parent for k in self._files}:
            sync(folder)
            sync(folder.parent)

    def read(self, name: str, piece: int, memory: Tensor) -> None:
        """Read piece number `piece` of the states of the tensor `name`, as last written, into `memory`: at least
        `Piece.bytes` bytes, beginning at a page boundary. Any number of threads may read and write different pieces.
        Raises UserError "disk-failed"."""
        self._read(self._numbers[name, piece], memory)

    def _read(self, k: int, memory: Tensor, *, floats: int | None = None) -> Sum | None:
        total = self._striped.move(
            self._places[k],
            self._current[k],
            memory,
            write=False,
            floats=floats,
            failed=functools.partial(self._fail, "read from"),
        )
        with self._lock:
            self.read_bytes += self.pieces[k].bytes
        return total

    def write(self, name: str, piece: int, memory: Tensor) -> None:
        """Write piece number `piece` of the states of the tensor `name` from `memory`, to the place on disk that the
        newest checkpoint does not name. Raises UserError "disk-failed"; after an error every later write and flush
        raises it, too."""
        k = self._numbers[name, piece]
        assert self._published, "between flush and publication both homes are kept"
        if self._failed is not None:
            raise self._failed
        home = self._home_to_write(k)
        total = self._striped.move(
            self._places[k],
            home,
            memory,
            write=True,
            floats=_floats(self.pieces[k]),
            failed=functools.partial(self._fail, "written to"),
        )
        assert total is not None
        with self._lock:
            self.written_bytes += self.pieces[k].bytes
            self._current[k], self._sums[k] = home, total.sum
            (self._not_finite.discard if total.finite else self._not_finite.add)(k)

    def _home_to_write(self, k: int) -> int:
        return 1 - self._kept[k] if self._kept is not None and self.homes == 2 else self._current[k]

    def parts(self, name: str, piece: int, memory: Tensor) -> list[Tensor]:
        """The states of piece number `piece` of the tensor `name` as flat views of `memory`, into which the piece was
        read: exp_avg, exp_avg_sq and, where there is one, the fp32 master."""
        return parts_of(self.pieces[self._numbers[name, piece]], memory)

    def check(self, memory: Tensor) -> Iterator[tuple[Piece, list[Tensor]]]:
        """Read every piece of the checkpoint that was taken over into `memory`, compare it with its recorded sum, and
        yield the piece with its states (flat views of `memory`). Raises UserError "states-torn", "disk-failed"."""
        for k, piece in enumerate(self.pieces):
            total = self._read(k, memory, floats=_floats(piece))
            assert total is not None
            if total.sum != self._sums[k]:
                raise torn(f"piece {piece.number} of {piece.name} in {', '.join(map(str, self._paths))}")
            yield piece, parts_of(piece, memory)

    def streamed(self, name: str, memory: Tensor, others: Mapping[str, Tensor]) -> Streamed:
        """The states of the tensor `name` for a checkpoint that copies them: an object that reads them piece by piece
        through `memory`. `others`: tensors to write beside them."""
        tensor = next(tensor for tensor in self._tensors if tensor.name == name)

        def pieces() -> Iterator[tuple[int, list[Tensor]]]:
            for piece in tensor.pieces(self._piece_elements):
                self.read(name, piece.number, memory)
                yield piece.first, parts_of(piece, memory)

        return Streamed(tensor.shape, tensor.parts, pieces, others)

    def written(self, name: str, memory: Tensor, dtype: torch.dtype) -> Streamed:
        """The fp32 master of the tensor `name`, rounded to `dtype`, as the "weight" of a model folder: an object that
        reads it piece by piece through `memory`."""
        states = self.streamed(name, memory, {})
        master = states.parts.index("master")

        def pieces() -> Iterator[tuple[int, list[Tensor]]]:
            for first, parts in states.pieces():
                yield first, [parts[master].to(dtype)]

        return Streamed(states.shape, ("weight",), pieces, {}, dtype)

    def not_finite(self) -> str | None:
        """The name of a tensor whose states, as last written, contain a number that is not finite (nan or inf); None if
        there is none."""
        return self.pieces[min(self._not_finite)].name if self._not_finite else None

    def flush(self) -> StatesRecord:
        """Flush to disk what was written, and return the record by which a checkpoint names it. Nothing may be written
        until `published` or `withdrawn` is called. Raises UserError "disk-failed"."""
        if self._failed is not None:
            raise self._failed
        for number, file in self._files.items():
            try:
                file.flush()
            except OSError as error:  # the drive reports lost data only once
                raise self._fail("written to", number, error) from error
        self._published = False
        return StatesRecord.of(
            self._paths, self._shares, self._tensors, self._piece_elements, self.homes, self._current, self._sums
        )

    def published(self) -> None:
        """Note that the checkpoint with the record from `flush` is safely on disk. From now on writes may overwrite the
        states that the checkpoint before it names."""
        self._kept, self._published = list(self._current), True

    def withdrawn(self) -> None:
        """Note that no checkpoint has the record from `flush`: the previous checkpoint remains the newest, and its
        states are still never overwritten."""
        self._published = True

    def files(self) -> list[Path]:
        """The paths of the files, one for each folder."""
        return list(self._paths)

    def close(self) -> None:
        """Close the files, which stay on disk."""
        self._striped.close()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def delete(self) -> None:
        """Remove the files, which must not be needed any more, and the folders that are then empty."""
        self.close()
        for path in self._paths:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the folder holds other files, or was removed already
                path.parent.rmdir()

    def _fail(self, done: str, file: int, error: OSError) -> UserError:
        failed = UserError(
            f"The optimizer states cannot be {done} disk any more.",
            code="disk-failed",
            numbers=(f"{self._paths[file]}: {first_line(error)}",),
            hint="check the disk; the job goes on from its last checkpoint: offmate retry",
        )
        self._failed = self._failed or failed
        return failed


def _floats(piece: Piece) -> int:
    return piece.elements * sum(width for width in piece.widths if width == 4)
