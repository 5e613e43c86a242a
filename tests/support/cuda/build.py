"""guard.cpp as a library: built once for a PyTorch and a compiler, and kept. Imports no torch."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from planner.cpu.build import cache_folder

SOURCE = Path(__file__).with_name("guard.cpp")
COMPILERS = ("c++", "g++", "clang++")


def missing() -> str | None:
    """Why there can be no emulated device here; None when there can."""
    if (_torch() / "lib" / "libtorch_cuda.so").exists():
        return "this PyTorch has CUDA: the emulated device needs one without"
    if _compiler() is None:
        return f"no C++ compiler: none of {', '.join(COMPILERS)} is in PATH, and $CXX is not set"
    return None


@functools.cache
def load() -> ctypes.CDLL:
    """The library. PyTorch looks for it once, when somebody first asks for CUDA: it must be there before torch is
    imported. Raises subprocess.CalledProcessError."""
    compiler = _compiler()
    assert compiler is not None, missing()
    lib = _torch() / "lib"
    command = [*compiler, "-std=c++20", "-w", "-shared", "-fPIC", f"-I{_torch() / 'include'}", str(SOURCE)]
    command += [f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch_cpu", "-lc10"]
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    parts = (SOURCE.read_text("utf-8"), importlib.metadata.version("torch"), version, *command)
    folder = cache_folder() / "tests"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    built = folder / f"guard-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes want it at a time
        if not built.exists():
            part = built.with_suffix(".part")
            subprocess.run([*command, "-o", str(part)], check=True)
            part.replace(built)
    return ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)  # as PyTorch loads CUDA's runtime


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def _compiler() -> list[str] | None:
    if given := shlex.split(os.environ.get("CXX", "")):
        return given
    return next(([path] for name in COMPILERS if (path := shutil.which(name))), None)
