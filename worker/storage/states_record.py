"""The record by which a checkpoint names optimizer states on disk, and how to read the states by the record alone."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from planner.cpu.direct_file import DirectFile
from planner.errors import UserError, first_line
from planner.schedule.state_pieces import Piece, StoredTensor
from worker.storage.striped import File, Part, Striped, file_sizes, parts_in_turn, parts_of_pieces

_DTYPES = {4: torch.float32, 2: torch.int16}


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesRecord:
    """The record by which a checkpoint names optimizer states on disk: the files' full paths, the layout of the pieces
    (ranges of a tensor's elements) in them, the home of each piece (which of its places on disk is current; one digit
    each) and the sum of each piece (16 hexadecimal digits each). `shares`: the relative share of every piece in each
    file. Several files with only one share mean that the record is older than shares: its pieces are dealt whole. A
    file without a share does not exist."""

    files: tuple[str, ...]
    shares: tuple[int, ...] = (1,)
    tensors: tuple[StoredTensor, ...]
    piece_elements: int
    homes: int
    in_homes: str
    in_sums: str

    @classmethod
    def of(
        cls,
        paths: Sequence[Path],
        shares: Sequence[int],
        tensors: tuple[StoredTensor, ...],
        piece_elements: int,
        homes: int,
        current: Sequence[int],
        sums: Sequence[int],
    ) -> StatesRecord:
        """Make the record of states in files at `paths`. `current`: for each piece, the number of its home, the place
        on disk that holds its current states. `sums`: the sum of each piece's content."""
        return cls(
            files=tuple(map(str, paths)),
            shares=tuple(shares),
            tensors=tensors,
            piece_elements=piece_elements,
            homes=homes,
            in_homes="".join(map(str, current)),
            in_sums="".join(f"{each:016x}" for each in sums),
        )

    def current(self) -> list[int]:
        """For each piece of states, the number of its home: the place on disk that holds its current content."""
        return [int(digit) for digit in self.in_homes]

    def sums(self) -> list[int]:
        """For each piece of states, the sum by which its content is checked."""
        return [int(self.in_sums[at : at + 16], 16) for at in range(0, len(self.in_sums), 16)]

    def is_laid_out(
        self, folders: Sequence[Path], tensors: Sequence[StoredTensor], piece_elements: int, homes: int
    ) -> bool:
        """Whether new files in `folders` with these tensors, elements per piece and homes (places on disk per piece)
        would have each piece where this record's files have it, so that the files can be taken over."""
        parents = [str(Path(file).parent) for file in self.files]
        same = (self.tensors, self.piece_elements, self.homes) == (tuple(tensors), piece_elements, homes)
        return same and parents == list(map(str, folders))

    def parts(self) -> list[tuple[Part, ...]]:
        """For each piece of states, its parts: where in which file its bytes are."""
        pieces = all_pieces(self.tensors, self.piece_elements)
        if len(self.shares) != len(self.files):
            return parts_in_turn(pieces, len(self.files), self.homes)
        return parts_of_pieces(pieces, self.shares, self.homes)

    @contextlib.contextmanager
    def read(self) -> Iterator[Mapping[str, Iterator[Mapping[str, Tensor]]]]:
        """A context that gives a mapping: tensor name -> an iterator over one value, the tensor's states by name, whole
        and in fp32. The states are read when that value is asked for, which must be while the context is open. Both
        raise UserError "states-torn", "disk-failed"."""
        where = self.parts()
        used = [k for k, size in enumerate(file_sizes(where, len(self.files), self.homes)) if size]
        for missing in (self.files[k] for k in used if not Path(self.files[k]).is_file()):
            raise torn(f"{missing} is missing")
        with contextlib.ExitStack() as opened:
            files: dict[int, File] = {}
            for k in used:
                try:
                    files[k] = opened.enter_context(contextlib.closing(DirectFile(Path(self.files[k]))))
                except OSError as error:
                    raise _not_read(self.files[k], error) from error
            striped = opened.enter_context(contextlib.closing(Striped(files, len(used))))
            yield {tensor.name: self._tensor(tensor, where, striped) for tensor in self.tensors}

    def _tensor(
        self, tensor: StoredTensor, where: Sequence[Sequence[Part]], files: Striped
    ) -> Iterator[Mapping[str, Tensor]]:
        pieces = all_pieces(self.tensors, self.piece_elements)
        homes, sums = self.current(), self.sums()
        numbers = [k for k, piece in enumerate(pieces) if piece.name == tensor.name]
        memory = torch.frombuffer(mmap.mmap(-1, max(pieces[k].bytes for k in numbers)), dtype=torch.uint8)
        whole = {part: torch.empty(tensor.shape) for part in tensor.parts}
        for k in numbers:
            piece = pieces[k]
            total = files.move(
                where[k],
                homes[k],
                memory,
                write=False,
                floats=0,
                failed=lambda number, error: _not_read(self.files[number], error),
            )
            if total is None or total.sum != sums[k]:
                raise torn(f"piece {piece.number} of {piece.name} in {', '.join(self.files)}")
            for part, values in zip(tensor.parts, parts_of(piece, memory), strict=True):
                whole[part].view(-1)[piece.first : piece.first + piece.elements].copy_(values)
        yield whole


def _not_read(path: str, error: OSError) -> UserError:
    return UserError(
        "The optimizer states cannot be read from disk.",
        code="disk-failed",
        numbers=(f"{path}: {first_line(error)}",),
        hint="check the disk, then offmate retry",
    )


def all_pieces(tensors: Sequence[StoredTensor], piece_elements: int) -> tuple[Piece, ...]:
    """The pieces (ranges of at most `piece_elements` elements) into which the states of `tensors` are cut, in the
    tensors' order."""
    return tuple(piece for tensor in tensors for piece in tensor.pieces(piece_elements))


def parts_of(piece: Piece, memory: Tensor) -> list[Tensor]:
    """The moments and, where there is one, the master of `piece` as flat views of `memory`, in which they lie one after
    another."""
    parts, start = [], 0
    for width in piece.widths:
        end = start + width * piece.elements
        parts.append(memory[start:end].view(_DTYPES[width]))
        start = end
    return parts


def torn(where: str) -> UserError:
    """Make the UserError "states-torn", for states on disk that are not those that the checkpoint names. `where` says
    which."""
    return UserError(
        "The optimizer states on disk are not those of the checkpoint.",
        code="states-torn",
        numbers=(where,),
        hint="see whether the drive is there and whole; without them the job begins anew: submit it again",
    )
