"""Reading parts of files past the page cache."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from planner.cpu import build, direct
from planner.cpu.direct import ALIGNMENT, OpenFile, mapped_at, read_rate, room

SIZE = 9 * 2**20 + 1234  # three blocks, the last one neither whole nor of whole pages


@pytest.fixture(scope="module")
def content() -> bytes:
    return os.urandom(SIZE)


@pytest.fixture
def path(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(content)
    return path


@pytest.fixture(params=["threads in C", "Python's threads"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        found = direct._Native() if request.param == "threads in C" else direct._InPython()
    except build.CannotBuildError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(direct, "_reader", lambda: found)


def memory_for(size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, room(size)), dtype=torch.uint8)


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("direct_reads", [True, False], ids=["direct", "cached"])
def test_every_part_is_what_the_file_has(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, direct_reads: bool
) -> None:
    if not direct_reads:
        opened = os.open
        monkeypatch.setattr(os, "open", lambda name, flags: _no_direct(opened, name, flags))
    file = OpenFile(path)
    parts = [(0, SIZE), (0, 1), (SIZE - 1, 1), (4095, 2), (4096, 4096), (456, 643_528), (5 * 2**20 - 7, 4 * 2**20 + 99)]
    for offset, size in parts:
        memory = memory_for(size)
        memory.fill_(7)
        got = file.read(offset, size, memory)
        assert got.numpy().tobytes() == content[offset : offset + size], (offset, size)


def _no_direct(opened, name, flags):
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "no direct reads here")
    return opened(name, flags)


@pytest.mark.usefixtures("reader")
def test_where_a_file_system_opens_for_direct_reads_and_refuses_them_files_are_read_as_usual(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read, refused = direct._reader(), []

    def refusing(fd: int, *rest: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            return errno.EINVAL
        return read(fd, *rest)

    monkeypatch.setattr(direct, "_reader", lambda: refusing)
    caplog.set_level("INFO")
    files = [OpenFile(path), OpenFile(path)]
    path.unlink()
    path.write_bytes(b"other")  # what was opened is read, not what has its name now
    for file in files:
        for offset, size in ((456, 5 * 2**20), (SIZE - 1, 1)):
            got = file.read(offset, size, memory_for(size)).numpy().tobytes()
            assert got == content[offset : offset + size]
    assert len(refused) in (0, 2)  # once a file; never where the folder of tests knows no direct reads itself
    assert [record.message for record in caplog.records if "page cache" in record.message] == [
        f"disk: files in {path.parent} are read through the page cache, their file system knows no direct reads"
    ]


def test_a_file_that_is_refused_either_way_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_reader", lambda: lambda *_of: errno.EINVAL)
    file = OpenFile(path)
    for _ in range(2):
        with pytest.raises(OSError, match="Invalid argument"):
            file.read(0, 10, memory_for(10))


def test_a_direct_read_that_stops_short_in_mid_file_is_done_as_usual(
    path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv

    def short(fd: int, views: list[memoryview], offset: int) -> int:
        if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            return preadv(fd, views, offset)
        if offset % ALIGNMENT:
            raise OSError(errno.EINVAL, "no block begins there")
        return preadv(fd, [views[0][:ALIGNMENT]], offset) - 100

    found = direct._InPython()
    monkeypatch.setattr(direct, "_reader", lambda: found)
    monkeypatch.setattr(os, "preadv", short)
    assert OpenFile(path).read(456, 10**6, memory_for(10**6)).numpy().tobytes() == content[456 : 456 + 10**6]


@pytest.mark.usefixtures("reader")
def test_a_file_that_has_become_shorter_is_an_error_and_nothing_else(path: Path) -> None:
    file, memory = OpenFile(path), memory_for(SIZE)
    os.truncate(path, SIZE - 1)
    with pytest.raises(OSError, match="weights") as raised:
        file.read(0, SIZE, memory)
    assert raised.value.errno == errno.ENODATA
    assert file.read(0, SIZE - 1, memory).nbytes == SIZE - 1


def test_a_file_goes_on_to_be_read_when_another_has_its_name(path: Path, content: bytes) -> None:
    file = OpenFile(path)
    path.unlink()
    path.write_bytes(b"other")
    assert file.read(10, 100, memory_for(100)).numpy().tobytes() == content[10:110]


def test_what_a_tensor_is_mapped_from_is_found(tmp_path: Path) -> None:
    weights = {"a": torch.randn(300, 7), "b": torch.randn(11).bfloat16(), "c": torch.randn(5000)}
    save_file(weights, tmp_path / "model one.safetensors")
    for name, tensor in load_file(tmp_path / "model one.safetensors").items():
        found = mapped_at(tensor)
        assert found is not None and found[0] == tmp_path / "model one.safetensors"
        bytes_read = OpenFile(found[0]).read(found[1], tensor.nbytes, memory_for(tensor.nbytes))
        assert torch.equal(bytes_read.view(tensor.dtype).view(tensor.shape), weights[name])
    assert mapped_at(torch.zeros(10)) is None and mapped_at(memory_for(ALIGNMENT)) is None


def test_the_rate_of_a_drive_is_measured_on_the_files_themselves(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_for(2**20)
    assert read_rate([path, path], memory) > 2**20
    monkeypatch.setattr(direct, "_PROBED_S", 0.0)
    assert read_rate([path], memory) > 2**20
    assert read_rate([], memory) == 0.0
