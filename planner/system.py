"""Says what this system has of Linux, and sets limits of a process where the system has them.

offmate trains on Linux. On macOS and Windows only the commands work that plan, or look at a job file. There, a limit
that the system lacks is not set.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

IS_LINUX = sys.platform == "linux"
"""Whether this is Linux, which has /proc and all that training needs. WSL2 is Linux."""
HAS_TIMERS = hasattr(signal, "setitimer")
"""Whether the system sends a signal to a process after some of the processor's time. Windows does not."""


def signals(*names: str) -> tuple[signal.Signals, ...]:
    """Those of the signals with these names that this system has."""
    return tuple(signal.Signals[name] for name in names if hasattr(signal, name))


def soft_limit(name: str) -> int | None:
    """The limit `name` of this process, such as "RLIMIT_AS"; None if it is not limited, as always on Windows."""
    if resource is None:
        return None
    limit, _ = resource.getrlimit(getattr(resource, name))
    return None if limit == resource.RLIM_INFINITY else limit


@contextmanager
def lowered(limits: Mapping[str, int]) -> Iterator[None]:
    """A context in which this process has the soft limits `limits`: the name of each, such as "RLIMIT_AS", and its
    value. A limit that is lower already stays. Nothing is limited on Windows, which has no such limits."""
    if resource is None:
        yield
        return
    named = {getattr(resource, name): limit for name, limit in limits.items()}
    before = {which: resource.getrlimit(which) for which in named}
    try:
        for which, limit in named.items():
            soft, hard = before[which]
            resource.setrlimit(which, (limit if soft == resource.RLIM_INFINITY else min(soft, limit), hard))
        yield
    finally:
        for which, limit_before in before.items():
            resource.setrlimit(which, limit_before)
