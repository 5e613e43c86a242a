"""Disks without room, as any user can make them."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def no_room_beyond(file_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond so many bytes: writes fail as on a full disk, with another number. The
    processes that it starts have the limit, too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


_PRIVATE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
_MOUNTED = 'mount -t tmpfs -o size="$0","$1" tmpfs /mnt && echo mounted && read end'


@contextmanager
def small_disk(size_bytes: int, options: str = "rw") -> Iterator[Path]:
    """A folder on a disk of this size, whole pages. It is mounted in a namespace of its own, which needs no rights, and
    found through a process there. Skips the test where the system's administrator forbids that."""
    command = [*_PRIVATE, _MOUNTED, str(size_bytes), options]
    try:
        keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    with keeper:
        assert keeper.stdin is not None and keeper.stdout is not None and keeper.stderr is not None
        try:
            if keeper.stdout.readline() != b"mounted\n":
                pytest.skip(f"no disk of one's own here: {keeper.stderr.read().decode().strip()}")
            yield Path(f"/proc/{keeper.pid}/root/mnt")
        finally:
            keeper.stdin.close()


def run_on_small_disk(size_bytes: int, command: list[str], log: Path, options: str = "rw") -> int:
    """The exit code of a command that finds a disk of this size at /mnt. As `small_disk`, for programs that look for
    the true names of their files. What the command says goes to `log`."""
    with small_disk(4096):  # skips where there can be none
        pass
    with log.open("wb") as file:
        mount = f'mount -t tmpfs -o size="$0",{options} tmpfs /mnt && exec "$@"'
        mounted = [*_PRIVATE, mount, str(size_bytes), *command]
        return subprocess.run(mounted, stdin=subprocess.DEVNULL, stdout=file, stderr=file).returncode
