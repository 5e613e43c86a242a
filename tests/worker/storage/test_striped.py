"""States over several drives: each has its part of every piece, and all work at the same time."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from planner.codec import from_json, to_json
from planner.cpu.direct_file import DirectFile, Sum
from planner.errors import UserError
from planner.schedule.state_pieces import PAGE, Piece
from tests.support.stored_states import PIECE, Training, digest, slot, steps_of, stored
from tests.worker.storage.test_states import checkpoints, save, want
from worker.storage.states import StatesOnDisk
from worker.storage.states_record import StatesRecord
from worker.storage.striped import Part, Striped, file_sizes, parts_of_pieces

SHARES = (5, 1, 2)


def opened(folder: Path, **keys: object) -> StatesOnDisk:
    folders = [folder / str(number) for number in range(3)]
    given = {"piece_elements": PIECE, "homes": 2, "shares": lambda: SHARES, **keys}
    return StatesOnDisk(folders, stored(), **given)  # type: ignore[arg-type]


def piece(pages: int) -> Piece:
    return Piece(name="w", number=0, first=0, elements=pages * PAGE // 4, widths=(4,))


def test_every_file_has_its_share_of_every_piece_in_whole_pages() -> None:
    parts = parts_of_pieces([piece(8), piece(1), piece(16)], SHARES, homes=2)
    first, tiny, last = parts
    assert first == (Part(0, 0, 0, 5 * PAGE), Part(1, 0, 5 * PAGE, PAGE), Part(2, 0, 6 * PAGE, 2 * PAGE))
    assert tiny == (Part(0, 10 * PAGE, 0, PAGE),)
    assert last == (
        Part(0, 12 * PAGE, 0, 10 * PAGE),
        Part(1, 2 * PAGE, 10 * PAGE, 2 * PAGE),
        Part(2, 4 * PAGE, 12 * PAGE, 4 * PAGE),
    )
    assert file_sizes(parts, 3, homes=2) == [32 * PAGE, 6 * PAGE, 12 * PAGE]


@pytest.mark.parametrize("threads", [False, True], ids=["in turn", "in threads"])
def test_states_on_drives_of_other_rates_are_those_in_memory_and_come_back_from_a_checkpoint(
    tmp_path: Path, threads: bool
) -> None:
    training = Training(opened(tmp_path), 0)
    for _ in steps_of(training, 2, 2, threads=threads):
        save(training, tmp_path)
    sizes = [path.stat().st_size for path in training.states.files()]
    assert sizes[0] > sizes[2] > sizes[1] > 0
    training.states.close()
    last = checkpoints(tmp_path).latest()
    assert last is not None
    states = opened(tmp_path, record=last.states, shares=lambda: (1, 1, 1))  # drives are measured anew, and differ
    assert states.resumed
    training = Training(states, last.step)
    for step in steps_of(training, 1, 4, threads=threads):
        assert digest(training.all_states()) == want(step)
        save(training, tmp_path)
    states.close()
    last = checkpoints(tmp_path).latest()
    assert last is not None
    assert digest({name: dict(parts) for name, parts in last.tensors()}) == want(4)


@pytest.mark.parametrize("drive", [0, 1, 2])
def test_a_part_that_is_not_what_the_checkpoint_names_is_found_on_any_drive(tmp_path: Path, drive: int) -> None:
    training = Training(opened(tmp_path), 0)
    for _ in steps_of(training, 1, 1):
        save(training, tmp_path)
    path = training.states.files()[drive]
    training.states.close()
    content = bytearray(path.read_bytes())
    for at in range(0, len(content), PAGE):  # in both homes
        content[at] ^= 1
    path.write_bytes(content)
    last = checkpoints(tmp_path).latest()
    assert last is not None
    with pytest.raises(UserError) as raised:
        Training(opened(tmp_path, record=last.states), last.step)
    assert raised.value.code == "states-torn" and str(path) in str(raised.value)


def test_what_was_written_before_there_were_shares_is_read_and_gone_on_with(tmp_path: Path) -> None:
    one = Training(StatesOnDisk([tmp_path / "one"], stored(), piece_elements=PIECE, homes=2), 0)
    for _ in steps_of(one, 2, 2):
        record = one.states.flush()
        one.states.published()
    (content,) = (path.read_bytes() for path in one.states.files())
    old, at = [b"", b"", b""], 0
    for k, piece in enumerate(one.states.pieces):  # one drive after the other has a piece, in both homes
        old[k % 3] += content[at : at + 2 * piece.bytes]
        at += 2 * piece.bytes
    paths = [tmp_path / str(k) / "states-old.bin" for k in range(3)]
    for path, its in zip(paths, old, strict=True):
        path.parent.mkdir()
        path.write_bytes(its)
    values = {**to_json(record), "files": [str(path) for path in paths]}  # type: ignore[dict-item]
    del values["shares"]
    for _ in range(2):  # and again, as it is named by the next checkpoint
        found = from_json(StatesRecord, values)
        with found.read() as named:
            assert digest({name: dict(next(parts)) for name, parts in named.items()}) == want(one.step)
        states = opened(tmp_path, record=found)
        assert states.resumed and states.files() == paths
        one = Training(states, one.step)
        one.run_step()
        assert digest(one.all_states()) == want(one.step)
        values = to_json(states.flush())
        states.close()


def test_a_drive_without_room_has_no_part_and_no_file(tmp_path: Path) -> None:
    training = Training(opened(tmp_path, shares=lambda: (5, 0, 2)), 0)
    for _ in steps_of(training, 1, 2):
        save(training, tmp_path)
    assert [path.exists() for path in training.states.files()] == [True, False, True]
    training.states.close()
    last = checkpoints(tmp_path).latest()
    assert last is not None
    assert digest({name: dict(parts) for name, parts in last.tensors()}) == want(2)
    states = opened(tmp_path, record=last.states)
    assert states.resumed and digest(Training(states, 2).all_states()) == want(2)
    states.delete()


def test_a_drive_too_full_for_a_folder_is_left_out_and_missed_where_it_has_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def full(path: Path, *given: int, **keys: int) -> None:
        if path == tmp_path / "1":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        mkdir(path, *given, **keys)

    monkeypatch.setattr(Path, "mkdir", full)
    training = Training(opened(tmp_path, shares=lambda: (5, 0, 2)), 0)
    training.run_step()
    assert digest(training.all_states()) == want(1)
    training.states.delete()
    with pytest.raises(UserError) as raised:
        opened(tmp_path)
    assert raised.value.code == "disk-too-small" and str(tmp_path / "1") in str(raised.value)


class Meeting:
    """A file whose transfers wait until the others' have begun."""

    def __init__(self, barrier: threading.Barrier, error: OSError | None = None) -> None:
        self.barrier, self.error, self.moved = barrier, error, False

    def read(self, offset: int, memory: Tensor, *, floats: int | None = None) -> Sum | None:
        self.barrier.wait(timeout=20)
        if self.error is not None:
            raise self.error
        self.moved = True
        return None

    write = read

    def reserve(self, size: int) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize("write", [False, True])
def test_all_drives_move_their_parts_at_the_same_time(write: bool) -> None:
    barrier = threading.Barrier(3)
    files = [Meeting(barrier) for _ in range(3)]
    striped = Striped(dict(enumerate(files)), 3)
    [parts] = parts_of_pieces([piece(8)], SHARES, homes=1)
    striped.move(parts, 0, slot(8 * PAGE), write=write, floats=None, failed=lambda _, error: error)
    assert all(file.moved for file in files)
    striped.close()


def test_a_drive_that_fails_is_named_after_the_others_are_done() -> None:
    barrier = threading.Barrier(2)
    files = [Meeting(barrier, OSError(5, "broken")), Meeting(barrier)]
    striped = Striped(dict(enumerate(files)), 2)
    [parts] = parts_of_pieces([piece(8)], (1, 1), homes=1)
    with pytest.raises(RuntimeError, match="drive 0"):
        striped.move(parts, 0, slot(8 * PAGE), write=True, floats=None, failed=lambda k, _: RuntimeError(f"drive {k}"))
    assert files[1].moved
    striped.close()


def test_on_one_drive_the_sum_is_that_of_the_file(tmp_path: Path) -> None:
    memory = slot(8 * PAGE)
    memory.copy_(torch.arange(8 * PAGE) % 251)
    file = DirectFile(tmp_path / "file")
    file.reserve(8 * PAGE)
    [parts] = parts_of_pieces([piece(8)], (1,), homes=1)
    striped = Striped({0: file}, 1)
    found = striped.move(parts, 0, memory, write=True, floats=0, failed=lambda _, error: error)
    assert found == file.write(0, memory, floats=0)
    striped.close()
    file.close()
