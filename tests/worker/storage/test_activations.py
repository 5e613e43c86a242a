"""The place on drives for activations: what is written is read again, and nothing is left, however it ends."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from planner.cpu.direct_file import DirectFile
from planner.errors import UserError
from planner.schedule.items import Item
from worker.runtime.cpu import CpuMachine
from worker.storage.activations import ActivationsOnDisk

PAGE = 4096
SIZES = {Item("a:1.0"): 8 * PAGE, Item("a:1.1"): 8 * PAGE, Item("a:2.0"): 3 * PAGE}


def memory(size: int, seed: int = 0) -> torch.Tensor:
    made = CpuMachine(metered=False).host_empty((size,), torch.uint8)
    return made.random_(256, generator=torch.Generator().manual_seed(seed))


def on_disk(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("shares", [(1,), (1, 1), (3, 1), (1, 0, 2)])
def test_what_is_written_is_read_again_also_less_of_it_and_the_files_have_no_name(
    tmp_path: Path, shares: tuple[int, ...]
) -> None:
    folders = [tmp_path / "drive" / str(k) for k in range(len(shares))]
    scratch = ActivationsOnDisk(folders, SIZES, shares=lambda: shares)
    contents = {item: memory(size, seed) for seed, (item, size) in enumerate(SIZES.items())}
    for item, content in contents.items():
        scratch.write(item, content)
    scratch.write("a:1.0", contents["a:1.0"][: 2 * PAGE])  # of shorter slices
    assert on_disk(tmp_path) == []
    for item, content in contents.items():
        found = memory(len(content), 9)
        scratch.read(item, found)
        assert torch.equal(found, content)
    scratch.read("a:1.1", found := memory(5 * PAGE, 9))
    assert torch.equal(found, contents["a:1.1"][: 5 * PAGE])
    assert scratch.written_bytes == sum(SIZES.values()) + 2 * PAGE
    assert scratch.read_bytes == sum(SIZES.values()) + 5 * PAGE
    scratch.close()
    assert list((tmp_path / "drive").iterdir()) == []


_KILLED = """
import os, signal, sys, torch
from pathlib import Path
from planner.cpu.direct_file import DirectFile
from planner.schedule.items import Item
from worker.storage.activations import ActivationsOnDisk
if sys.argv[2] == "as it is made":
    DirectFile.reserve = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
ActivationsOnDisk([Path(sys.argv[1])], {Item("a:1.0"): 8192})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["as it is made", "later"])
def test_a_process_that_is_killed_leaves_nothing_or_what_the_next_one_removes(tmp_path: Path, when: str) -> None:
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "its"), when]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-2000:]
    assert len(on_disk(tmp_path)) == (when == "as it is made")
    ActivationsOnDisk([tmp_path / "its"], SIZES).close()
    assert list(tmp_path.iterdir()) == []


class Failing(DirectFile):
    """Fails from the second transfer on, the first being a trial."""

    def read(self, *args: object, **rest: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_after_an_error_nothing_more_is_moved(tmp_path: Path) -> None:
    scratch = ActivationsOnDisk([tmp_path / "its"], SIZES, open_file=Failing)
    scratch.write("a:2.0", memory(3 * PAGE))
    for act in (scratch.read, scratch.write):
        with pytest.raises(UserError, match="cannot be read from disk any more") as raised:
            act("a:2.0", memory(3 * PAGE))
        assert raised.value.code == "disk-failed" and str(tmp_path / "its") in str(raised.value)
    scratch.close()


def test_where_there_is_no_room_or_no_drive_it_is_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=PAGE))
        weights = {Item("w:l0.up"): PAGE, Item("g:l0.up"): PAGE}
        for sizes, what in ((weights, "weights"), (weights | SIZES, "activations and weights"), (SIZES, "activations")):
            with pytest.raises(UserError, match=f"no room for the {what}\\.") as raised:
                ActivationsOnDisk([tmp_path / "its"], sizes)
    assert raised.value.code == "disk-too-small"
    with pytest.raises(UserError) as raised:
        ActivationsOnDisk([Path("/dev/shm/offmate-turns")], SIZES)
    Path("/dev/shm/offmate-turns").rmdir()
    assert raised.value.code == "disk-is-memory" and on_disk(tmp_path) == []
