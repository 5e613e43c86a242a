"""Disks without room, as any user can make them."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


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
