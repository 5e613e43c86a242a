"""cuBLAS's workspaces, as PyTorch keeps them: a thread has a handle of its own, which another one gets when it ends; a
handle has a workspace for each stream, from its first matrix product there until all are cleared."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable

from torch import Tensor

PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"))


class Workspaces:
    """Of a device; none where CUBLAS_WORKSPACE_CONFIG does not say how large they are."""

    def __init__(self, storage: Callable[[int], Tensor]) -> None:
        self._storage = storage
        self._handles: list[threading.Thread] = []  # who has which one
        self._memory: dict[tuple[int, int], Tensor] = {}
        self._lock = threading.Lock()

    def use(self, stream: int) -> None:
        """The thread's handle multiplies on a stream."""
        found = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
        size = sum(int(kib) * int(count) for kib, count in found) * 2**10
        if size:
            with self._lock:
                key = self._handle(), stream
                if key not in self._memory:
                    self._memory[key] = self._storage(size)

    def _handle(self) -> int:
        me = threading.current_thread()
        if me not in self._handles:
            spare = [n for n, thread in enumerate(self._handles) if not thread.is_alive()]
            if spare:
                self._handles[spare[0]] = me
            else:
                self._handles.append(me)
        return self._handles.index(me)

    def clear(self) -> None:
        """Free them all."""
        with self._lock:
            self._memory.clear()
