"""Make the virtual environment that `make demo` and `make test` use: python3 deploy/install.py FOLDER

While it waits it says what is being done: on a terminal in one line that changes, elsewhere in a line every 15 seconds.

Standard library only. Debian and Ubuntu ship a Python without `ensurepip`; there pip comes from its own wheel, so that
nothing needs to be installed by hand. Machines without an NVIDIA GPU get PyTorch's CPU build, which is far smaller.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
INDEX = "https://pypi.org/simple/pip/"
PIP_WHEEL = "pip-25.3-py3-none-any.whl"
PIP_SHA256 = "9655943313a94722b7774661c21049070f6bbb0a1516bf02f7c8d5d9201514cd"
TORCH_CPU = "https://download.pytorch.org/whl/cpu"
GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # of NVIDIA's driver on Linux, and of WSL2
EVERY_S = {True: 0.5, False: 15.0}
"""Seconds between two lines about what is being done, on a terminal and elsewhere."""
DOING = (
    (re.compile(r"Collecting (\S+)"), "choosing {}"),
    (re.compile(r"Downloading (?:https?://\S+/)?([^\s/]+?)(?:-py\d\S*|-cp\d\S*)? \((.+?)\)"), "fetching {} ({})"),
    (re.compile(r"Using cached ([^\s/]+?)(?:-py\d\S*|-cp\d\S*)? \((.+?)\)"), "taking {} ({}) from pip's cache"),
    (re.compile(r"(Building|Preparing|Getting) .*"), "preparing the project"),
    (re.compile(r"Installing collected packages: (.+)"), "writing packages, {} in all"),
)
"""A line of pip's -> what it means in words."""


def make_environment(folder: Path) -> Path:
    """A virtual environment with pip in `folder`; returns its Python. Exits with what to type when there is no way."""
    python = folder / "bin" / "python"
    if (folder / "bin" / "pip").exists():
        return python
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", folder], capture_output=True, text=True)
    if made.returncode == 0:
        return python
    print("This Python has no ensurepip; pip comes from its wheel.", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    try:
        content = download_pip()
    except (OSError, LookupError) as error:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        sys.exit(
            f"Cannot make a virtual environment.\n  {(made.stderr or made.stdout).strip()}\n  {INDEX}: {error}\n"
            f"  hint: sudo apt install python{version}-venv"
        )
    wheel = folder / PIP_WHEEL
    wheel.write_bytes(content)
    subprocess.run([python, f"{wheel}/pip", "install", "--quiet", "--no-index", wheel], check=True)
    return python


def download_pip() -> bytes:
    """pip's wheel. Raises OSError without a network, LookupError when the index has another file or none."""
    with urllib.request.urlopen(INDEX, timeout=30) as answer:
        page = answer.read().decode()
    link = re.search(f'href="([^"]+/{re.escape(PIP_WHEEL)})', page)
    if link is None:
        raise LookupError(f"{PIP_WHEEL} is not there")
    with urllib.request.urlopen(urllib.parse.urljoin(INDEX, link[1]), timeout=60) as answer:
        content: bytes = answer.read()
    if hashlib.sha256(content).hexdigest() != PIP_SHA256:
        raise LookupError(f"{PIP_WHEEL} is not the file it was; it was not run")
    return content


def cpu_index() -> list[str]:
    """Options that make pip take PyTorch's CPU build; none where there is a GPU, or when its index does not answer."""
    if any(Path(device).exists() for device in GPU_DEVICES) or platform.machine() != "x86_64":
        return []
    try:
        urllib.request.urlopen(TORCH_CPU + "/torch/", timeout=5).close()
    except (urllib.error.URLError, TimeoutError):
        return []
    return ["--index-url", TORCH_CPU]


def in_words(line: str) -> str | None:
    """What a line of pip's output says that it does now; None for a line that says nothing of that."""
    for pattern, words in DOING:
        if found := pattern.match(line.strip()):
            parts = found.groups()
            return words.format(parts[0].count(",") + 1) if "writing" in words else words.format(*parts)
    return None


def run_pip(command: list[str], step: str) -> None:
    """Run pip, and tell what it does. Exits with pip's output and its exit code when it fails. Ends pip where the wait
    for it ends in an exception, such as that of `stop`."""
    began, terminal = time.monotonic(), sys.stdout.isatty()
    doing, output = "asking the package index", list[str]()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    pip = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )

    def hear() -> None:
        nonlocal doing
        for line in pip.stdout or ():
            output.append(line)
            doing = in_words(line) or doing

    hearing = threading.Thread(target=hear, daemon=True)  # processes of pip's may keep its output open after its end
    hearing.start()
    try:
        while hearing.is_alive():
            tell(f"{step}: {doing}, {time.monotonic() - began:.0f} s", terminal)
            hearing.join(EVERY_S[terminal])
        code = pip.wait()
    except BaseException:
        pip.terminate()
        pip.wait()
        raise
    if code:
        print("".join(output), end="", file=sys.stderr)
        sys.exit(code)
    tell(f"{step}: done in {time.monotonic() - began:.0f} s", terminal)
    if terminal:
        print()


def tell(text: str, terminal: bool) -> None:
    """Print a line; on a terminal in place of the one before, cut to its width."""
    width = shutil.get_terminal_size().columns - 1
    print(f"\r\x1b[K{text[:width]}" if terminal else f"{text}\n", end="", flush=True)


def stop(number: int, _frame: object) -> NoReturn:
    """Handle a signal: say that the installation is stopped, and exit with the code that shells give this signal."""
    print(f"{chr(10) if sys.stdout.isatty() else ''}The installation is stopped.", file=sys.stderr, flush=True)
    sys.exit(128 + number)


def main() -> None:
    """Make the environment, then install PyTorch, the project (editable) and its test tools as constraints.txt says."""
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    folder = Path(sys.argv[1]).absolute()
    print(f"Making the environment in {folder}", flush=True)
    python = make_environment(folder)
    options = ["--disable-pip-version-check", "--progress-bar", "off", "--constraint", "constraints.txt"]
    pip = [str(python), "-m", "pip", "install", *options]
    if index := cpu_index():
        run_pip([*pip, *index, "torch"], "PyTorch for CPUs, some 200 MB")
    run_pip([*pip, "--editable", ".[test]"], "offmate and its packages")


if __name__ == "__main__":
    main()
