"""Compiles C code on the machine where it runs, with a compiler found there, and keeps the library in the user's
cache.

The name of a built file contains a hash of all that the code depends on: source, flags, compiler, the processor's
instructions. So a file that exists is the right one, even in a home directory that several machines share.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from planner.system import IS_LINUX

COMPILERS = ("cc", "gcc", "clang")
# No fast math and no contraction: the code must compute exactly what is written, to equal PyTorch to the last bit.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC", "-pthread")
_PATIENCE_S = 120
_INCLUDED = re.compile(r'^#include "(.+)"$', re.MULTILINE)


class CannotBuildError(Exception):
    """A C library cannot be built or loaded. The message says why, in words for the log."""


def load(source: Path) -> ctypes.CDLL:
    """Load the library compiled from `source`, compiling it first if the cache does not have it. Functions called
    through it release Python's lock. Raises CannotBuildError."""
    try:
        return ctypes.CDLL(str(_built(source)))
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        raise CannotBuildError(str(error)) from error


def cache_folder() -> Path:
    """The folder of cached files, $XDG_CACHE_HOME/offmate or ~/.cache/offmate. All installations share it, and it is
    safe to delete."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (caches if caches.is_absolute() else Path.home() / ".cache") / "offmate"


def _built(source: Path) -> Path:
    if not IS_LINUX:
        raise CannotBuildError("C code is built on Linux only")
    import fcntl  # late: Windows has no such module

    compiler = _compiler()
    version = _run([*compiler, "--version"]).splitlines()[:1]
    parts = (*_code(source), *FLAGS, *compiler, *version, platform.machine(), *_instructions())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CannotBuildError(f"others can put code into {folder}")
    built = folder / f"{source.stem}-{key}.so"
    if not built.exists():
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not built.exists():  # nobody else has built it while we waited
                _build(compiler, source, built)
    return built


def _code(source: Path) -> Iterator[str]:
    """The text of a file and of the files in its folder that it includes."""
    code = source.read_text("utf-8")
    yield code
    for name in _INCLUDED.findall(code):
        yield from _code(source.parent / name)


def _build(compiler: list[str], source: Path, built: Path) -> None:
    part = built.with_suffix(".part")
    _run([*compiler, *FLAGS, str(source), "-o", str(part), "-lm"])
    with part.open("rb") as file:
        os.fsync(file.fileno())  # after a power cut the name must not exist with half a file
    part.replace(built)


def _compiler() -> list[str]:
    """The command of the C compiler: $CC, or the first of COMPILERS that is in PATH. Raises CannotBuildError."""
    if command := shlex.split(os.environ.get("CC", "")):
        return command
    for name in COMPILERS:
        if path := shutil.which(name):
            return [path]
    raise CannotBuildError(f"no C compiler: none of {', '.join(COMPILERS)} is in PATH")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise CannotBuildError(f"{command[0]} did not end within {_PATIENCE_S} s") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        wrong = next((line for line in lines if "error" in line), lines[0])
        raise CannotBuildError(f"{command[0]}: {wrong}")
    return done.stdout


def _instructions() -> Iterator[str]:
    """The processor's instructions: the code may use all of them, and would crash on a processor without them."""
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith(("flags", "Features")):
            yield line
            return
