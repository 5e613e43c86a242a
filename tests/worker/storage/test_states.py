"""Optimizer states on disk: the bits of states in memory, whatever stops the process or the machine."""

from __future__ import annotations

import errno
import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from planner.errors import UserError
from planner.schedule.state_pieces import stored_bytes
from tests.support.stored_states import (
    PIECE,
    Training,
    digest,
    in_memory,
    slot,
    steps_of,
    stored,
)
from worker.storage import states as module
from worker.storage.checkpoint import Checkpoints, Origin
from worker.storage.states import StatesOnDisk

ORIGIN = Origin(job={"learning_rate": 0.1}, data="abc", total_steps=10, plan="p")
STEPS = 5


@functools.cache
def want(steps: int = STEPS, dtype: torch.dtype = torch.bfloat16) -> str:
    return digest(in_memory(steps, dtype))


def opened(folder: Path, **keys: object) -> StatesOnDisk:
    given = {"piece_elements": PIECE, "homes": 2, **keys}
    return StatesOnDisk([folder / "drive"], stored(), **given)  # type: ignore[arg-type]


def checkpoints(folder: Path, keep: int | None = 1) -> Checkpoints:
    return Checkpoints(folder / "checkpoints", keep=keep, origin=ORIGIN)


# Equal to states in memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("threads", [False, True], ids=["in turn", "in threads"])
@pytest.mark.parametrize("drives", [1, 3])
def test_states_on_disk_are_those_in_memory_after_every_step(
    tmp_path: Path, drives: int, threads: bool, dtype: torch.dtype
) -> None:
    folders = [tmp_path / str(number) for number in range(drives)]
    states = StatesOnDisk(folders, stored(dtype), piece_elements=PIECE, homes=2)
    training = Training(states, 0, dtype=dtype)
    for step in steps_of(training, 1, STEPS, threads=threads):
        assert digest(training.all_states()) == want(step, dtype)
        states.flush()
        states.published()
    size = stored_bytes(states.pieces, 2)
    assert sum(path.stat().st_size for path in states.files()) == size
    assert states.written_bytes == (STEPS + 1) * size // 2
    assert states.read_bytes == (STEPS + STEPS + 1) * size // 2  # the steps', and to look at them


def test_a_folder_that_comes_twice_has_two_files(tmp_path: Path) -> None:
    states = StatesOnDisk([tmp_path, tmp_path], stored(), piece_elements=PIECE, homes=2)
    training = Training(states, 0)
    for step in steps_of(training, 1, 2):
        assert digest(training.all_states()) == want(step)
        states.flush()
        states.published()
    assert len(set(states.files())) == 2
    states.delete()


# Checkpoints


def save(training: Training, folder: Path, keep: int | None = 1) -> Path:
    states, state = training.states, []
    if states.homes == 1:
        memory = slot(max(piece.bytes for piece in states.pieces))
        state = [(tensor.name, states.streamed(tensor.name, memory, {})) for tensor in stored()]
    return checkpoints(folder, keep).save(training.step, state, 1000, states=states)


def taken_up(folder: Path, *, homes: int = 2) -> Training:
    last = checkpoints(folder).latest()
    assert last is not None
    states = opened(folder, homes=homes, record=last.states)
    training = Training(states, last.step)
    if states.resumed:
        assert dict(last.tensors(taken_over=True)) == {}
        return training
    whole = dict(last.tensors())
    for name, parts in whole.items():
        training.work[name].copy_(parts["master"])
    training.write(
        lambda piece: [
            whole[piece.name][part].view(-1)[piece.first : piece.first + piece.elements]
            for part in ("exp_avg", "exp_avg_sq", "master")
        ]
    )
    return training


@pytest.mark.parametrize("then", [1, 2], ids=["then copies", "then homes"])
@pytest.mark.parametrize("homes", [1, 2], ids=["copies", "homes"])
def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(tmp_path: Path, homes: int, then: int) -> None:
    training = Training(opened(tmp_path, homes=homes), 0)
    for step in steps_of(training, 3, 3):
        save(training, tmp_path)
        assert step == training.step
    training.run_step()
    training.states.close()  # step 4 is lost
    training = taken_up(tmp_path, homes=then)
    assert (training.step, training.states.resumed) == (3, homes == then == 2)
    for _ in steps_of(training, 4, STEPS):
        save(training, tmp_path)
    assert digest(training.all_states()) == want()
    assert list((tmp_path / "drive").iterdir()) == training.states.files()


def test_a_checkpoint_that_names_homes_gives_what_one_with_copies_gives(tmp_path: Path) -> None:
    for homes in (1, 2):
        folder = tmp_path / str(homes)
        training = Training(opened(folder, homes=homes), 0)
        for _ in steps_of(training, STEPS, STEPS):
            save(training, folder)
        last = checkpoints(folder).latest()
        assert last is not None and (last.states is None) is (homes == 1)
        assert digest(dict(last.tensors())) == want()


def test_a_commit_writes_no_state(tmp_path: Path) -> None:
    training = Training(opened(tmp_path), 0)
    save(training, tmp_path)
    training.run_step()
    before = training.states.written_bytes, training.states.read_bytes
    path = save(training, tmp_path)
    assert (training.states.written_bytes, training.states.read_bytes) == before
    assert sum(file.stat().st_size for file in path.iterdir()) < 3000


def test_older_checkpoints_keep_their_files_as_long_as_they_are_kept(tmp_path: Path) -> None:
    training = Training(opened(tmp_path), 0)
    save(training, tmp_path)
    (first,) = training.states.files()
    training.states.close()
    training = taken_up(tmp_path, homes=1)  # from here on three are kept, as copies
    for step in (1, 2, 3):
        training.run_step()
        assert first.exists(), step
        save(training, tmp_path, keep=3)
    assert not first.exists()
    assert list((tmp_path / "drive").iterdir()) == training.states.files()


def test_a_run_that_goes_on_in_memory_leaves_nothing_on_the_drive(tmp_path: Path) -> None:
    training = Training(opened(tmp_path), 0)
    save(training, tmp_path)
    training.states.close()
    assert list((tmp_path / "drive").iterdir()) == training.states.files()
    checkpoints(tmp_path).save(1, [("a", {"master": torch.zeros(3)})], 1000)
    assert not (tmp_path / "drive").exists()


def test_a_checkpoint_that_was_not_written_leaves_the_one_before(tmp_path: Path) -> None:
    training = Training(opened(tmp_path), 0)
    save(training, tmp_path)
    training.run_step()
    with pytest.raises(UserError, match="not finite"):
        bad = {"master": torch.tensor([float("nan")])}
        checkpoints(tmp_path).save(1, [("d", bad)], 1000, states=training.states)
    training.run_step()  # goes on, and over what step 1 wrote
    training.states.close()
    again = taken_up(tmp_path)
    assert again.step == 0 and digest(again.all_states()) == want(0)


def test_a_state_that_is_not_finite_is_in_no_checkpoint(tmp_path: Path) -> None:
    training = Training(opened(tmp_path), 0)
    save(training, tmp_path)
    training.run_step()
    training.write(lambda piece: [0.0, float("inf") if piece.name == "c" else 1.0, 2.0])
    with pytest.raises(UserError, match="a state of c is not finite at step 1"):
        save(training, tmp_path)
    training.write(lambda piece: [0.0, 1.0, 2.0])
    assert save(training, tmp_path).name == "step-1"


def test_nothing_is_written_between_flush_and_publication(tmp_path: Path) -> None:
    training = Training(opened(tmp_path), 0)
    training.states.flush()
    with pytest.raises(AssertionError, match="both homes are kept"):
        training.run_step()


# What is wrong with a disk


def torn_error(folder: Path) -> UserError:
    with pytest.raises(UserError) as raised:
        taken_up(folder)
    return raised.value


def test_states_that_were_changed_since_are_torn(tmp_path: Path) -> None:
    training = Training(opened(tmp_path), 0)
    save(training, tmp_path)
    training.states.close()
    (path,) = training.states.files()
    content = path.read_bytes()
    last = training.states.pieces[-1]
    at = stored_bytes(training.states.pieces[:-1], 2) + 700
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    error = torn_error(tmp_path)
    assert str(error) == (
        "The optimizer states on disk are not those of the checkpoint.\n"
        f"  piece {last.number} of c in {path}\n"
        "  hint: see whether the drive is there and whole; without them the job begins anew: submit it again   "
        "[states-torn]"
    )
    loaded = checkpoints(tmp_path).latest()
    assert loaded is not None
    with pytest.raises(UserError, match="piece 0 of c"):
        dict(loaded.tensors())
    path.write_bytes(content[:-4096])
    assert torn_error(tmp_path).code == "states-torn"
    path.unlink()
    assert torn_error(tmp_path).code == "states-torn"
    path.write_bytes(content)
    assert digest(taken_up(tmp_path).all_states()) == want(0)


class Failing:
    """A file that does what it is told until it fails."""

    def __init__(self, file: module.File, fails: dict[str, int]) -> None:
        self._file, self._fails = file, fails

    def __getattr__(self, name: str) -> Callable[..., object]:
        def act(*args: object, **keys: object) -> object:
            self._fails[name] = self._fails.get(name, -1) - 1
            if self._fails[name] == -1:
                raise OSError(errno.EIO, os.strerror(errno.EIO), "states")
            return getattr(self._file, name)(*args, **keys)

        return act


@pytest.mark.parametrize("what", ["read", "write", "flush"])
def test_a_drive_that_fails_is_named_and_the_last_checkpoint_stands(tmp_path: Path, what: str) -> None:
    fails: dict[str, int] = {}
    training = Training(opened(tmp_path, open_file=lambda path: Failing(module.DirectFile(path), fails)), 0)
    save(training, tmp_path)
    fails[what] = 2 if what != "flush" else 0
    with pytest.raises(UserError, match="any more") as raised:
        training.run_step(threads=True)
        save(training, tmp_path)
    assert raised.value.code == "disk-failed" and str(training.states.files()[0]) in str(raised.value)
    for again in (lambda: training.write(lambda piece: [0.0]), lambda: save(training, tmp_path)):
        with pytest.raises(UserError) as later:
            again()
        assert later.value.code == "disk-failed"
    training.states.close()
    training = taken_up(tmp_path)
    for _ in steps_of(training, STEPS, STEPS):
        pass
    assert digest(training.all_states()) == want()


def test_memory_is_no_disk() -> None:
    with pytest.raises(UserError) as raised:
        StatesOnDisk([Path("/dev/shm/offmate-test")], stored(), piece_elements=PIECE, homes=2)
    Path("/dev/shm/offmate-test").rmdir()
    assert raised.value.code == "disk-is-memory" and "/dev/shm/offmate-test is a tmpfs" in str(raised.value)


def test_a_drive_that_is_not_mounted_is_told_and_nothing_is_made_below_it(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        StatesOnDisk([tmp_path / "drive/states/offmate-1"], stored(), piece_elements=PIECE, homes=2)
    assert raised.value.code == "disk-failed" and raised.value.numbers == (f"there is no {tmp_path / 'drive'}",)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_found_before_anything_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [stored()[0].__class__(name="w", shape=(2**50,), widths=(4, 4, 4))]
    with pytest.raises(UserError) as raised:
        StatesOnDisk([tmp_path / "a", tmp_path / "b"], tensors, piece_elements=2**48, homes=2)
    assert raised.value.code == "disk-too-small" and raised.value.needs is not None
    assert raised.value.needs.bytes == 2 * 12 * 2**50  # both folders are on one disk
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**70))  # another was faster
    with pytest.raises(UserError) as raised:
        StatesOnDisk([tmp_path / "a", tmp_path / "b"], tensors, piece_elements=2**48, homes=2)
    assert raised.value.code == "disk-too-small"
    assert not list(tmp_path.rglob("states-*"))


@pytest.mark.parametrize("when", ["when opened", "when written"])
def test_a_disk_without_direct_transfers_is_refused(tmp_path: Path, when: str) -> None:
    def refusing(path: Path) -> module.File:
        if when == "when opened":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return Failing(module.DirectFile(path), {})

    def invalid(*_: object, **__: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.DirectFile, "write", invalid)
        with pytest.raises(UserError) as raised:
            opened(tmp_path, open_file=refusing)
    assert raised.value.code == "disk-not-direct"
    assert not list(tmp_path.rglob("states-*"))


def test_what_is_on_a_drive_is_for_this_user_alone(tmp_path: Path) -> None:
    (path,) = opened(tmp_path).files()
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_file_that_no_checkpoint_names_goes_and_others_stay(tmp_path: Path) -> None:
    training = Training(opened(tmp_path), 0)  # killed before its first checkpoint
    training.states.close()
    other = tmp_path / "drive" / "photo.png"
    other.touch()
    training = Training(opened(tmp_path), 0)
    assert set((tmp_path / "drive").iterdir()) == {other, *training.states.files()}
    training.states.delete()
    assert list((tmp_path / "drive").iterdir()) == [other]
    other.unlink()
    opened(tmp_path).delete()
    assert not (tmp_path / "drive").exists()
