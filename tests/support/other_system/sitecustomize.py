"""Lets offmate's own code see less of Python's standard library, as on macOS or on Windows; for tests.

Python imports this file at the start of each process that has its folder on PYTHONPATH. OTHER_SYSTEM names the system
to imitate: "darwin" (macOS) or "win32". offmate's own code then lacks the modules and names that Python does not have
there, and the files in /proc and /sys. Libraries, and Python itself, go on seeing Linux: they have code of their own
for each system, which cannot be loaded here. Not imitated are the file systems, paths with drive letters, encodings,
and the way in which processes start and end.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

SYSTEM = os.environ["OTHER_SYSTEM"]
OURS = ("planner", "worker", "offmated", "offmate")
MODULES = {
    "darwin": (),
    "win32": ("resource", "fcntl", "pwd", "grp", "termios", "pty", "tty", "syslog", "readline", "posix", "curses"),
}[SYSTEM]
SIGNALS = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN"}
"""Those of Windows that Linux has, too."""
NAMES: dict[str, Callable[[str], bool]] = {
    "darwin": {
        "os": {
            *("O_DIRECT", "pidfd_open", "posix_fadvise", "posix_fallocate", "memfd_create", "eventfd", "splice"),
            *("copy_file_range", "sched_getaffinity", "sched_setaffinity", "POSIX_FADV_DONTNEED", "getxattr"),
        }.__contains__,
        "signal": {"sigtimedwait", "sigwaitinfo", "pidfd_send_signal", "SIGPWR", "SIGPOLL"}.__contains__,
    },
    "win32": {
        "os": lambda name: (
            name
            in {
                *("getuid", "geteuid", "getgid", "getegid", "getgroups", "getpgid", "getpgrp", "getsid", "getloadavg"),
                *("fork", "forkpty", "setsid", "setpgid", "killpg", "nice", "getpriority", "setpriority", "uname"),
                *("sysconf", "confstr", "pathconf", "statvfs", "fstatvfs", "fchmod", "fchown", "chown", "fchdir"),
                *("pread", "preadv", "pwrite", "pwritev", "pipe2", "sendfile", "sync", "mkfifo", "mknod", "wait"),
                *("O_DIRECT", "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_SYNC", "WNOHANG", "environb"),
                *("memfd_create", "eventfd", "pidfd_open", "copy_file_range", "splice", "getxattr", "lockf"),
            }
            or name.startswith(("sched_", "posix_", "POSIX_", "WIF", "RTLD_"))
        ),
        "signal": lambda name: (
            (name.startswith("SIG") and name not in SIGNALS)
            or name.startswith(("ITIMER_", "pthread_", "sigtimedwait", "sigwait", "pidfd_"))
            or name in {"alarm", "pause", "setitimer", "getitimer", "siginterrupt", "sigpending"}
        ),
        "socket": {"AF_UNIX", "socketpair", "send_fds", "recv_fds"}.__contains__,
        "mmap": {"MAP_PRIVATE", "MAP_SHARED", "MAP_ANONYMOUS", "PROT_READ", "PROT_WRITE"}.__contains__,
        "select": {"poll", "epoll"}.__contains__,
        "multiprocessing": {"resource_tracker"}.__contains__,  # it cannot be started there
    },
}[SYSTEM]


class Seen(ModuleType):
    """A module of Python as offmate's code sees it."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module.__name__)
        object.__setattr__(self, "_module", module)

    def __getattribute__(self, name: str) -> Any:
        module = object.__getattribute__(self, "_module")
        if module is sys and name == "platform":
            return SYSTEM
        if NAMES.get(module.__name__, frozenset[str]().__contains__)(name):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r} on {SYSTEM}")
        return getattr(module, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(object.__getattribute__(self, "_module"), name, value)


_seen = {name: Seen(__import__(name)) for name in ("sys", *NAMES)}
_import = builtins.__import__


def is_ours(names: dict[str, Any] | None) -> bool:
    """Whether a module's globals are those of offmate's own code, also of a module that is run as a program."""
    names = names or {}
    spec = names.get("__spec__")
    name = spec.name if names.get("__name__") == "__main__" and spec is not None else names.get("__name__", "")
    return str(name).partition(".")[0] in OURS


def _imported(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    if level or not is_ours(globals):
        return _import(name, globals, locals, fromlist, level)
    if name.partition(".")[0] in MODULES:
        raise ModuleNotFoundError(f"No module named {name!r} on {SYSTEM}", name=name)
    module = _import(name, globals, locals, fromlist, level)
    return _seen.get(module.__name__, module)


def _file_is_seen(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("open", "os.listdir", "os.scandir"):
        return
    path = arguments[0]
    if not isinstance(path, str | os.PathLike) or not os.fspath(path).startswith(("/proc/", "/sys/")):
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("pathlib", "io", __name__):
        frame = frame.f_back
    if frame is not None and is_ours(frame.f_globals):
        raise FileNotFoundError(2, f"not on {SYSTEM}", os.fspath(path))


builtins.__import__ = _imported
sys.addaudithook(_file_is_seen)
