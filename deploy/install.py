"""Make the virtual environment that `make demo` and `make test` use: python3 deploy/install.py FOLDER

Standard library only. Debian and Ubuntu ship a Python without `ensurepip`; there pip comes from its own wheel, so that
nothing needs to be installed by hand. Machines without an NVIDIA GPU get PyTorch's CPU build, which is far smaller.
"""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INDEX = "https://pypi.org/simple/pip/"
PIP_WHEEL = "pip-25.3-py3-none-any.whl"
PIP_SHA256 = "9655943313a94722b7774661c21049070f6bbb0a1516bf02f7c8d5d9201514cd"
TORCH_CPU = "https://download.pytorch.org/whl/cpu"


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
    if Path("/dev/nvidiactl").exists() or platform.machine() != "x86_64":
        return []
    try:
        urllib.request.urlopen(TORCH_CPU + "/torch/", timeout=5).close()
    except (urllib.error.URLError, TimeoutError):
        return []
    return ["--index-url", TORCH_CPU]


def main() -> None:
    """Make the environment, then install PyTorch, the project (editable) and its test tools as constraints.txt says."""
    python = make_environment(Path(sys.argv[1]).absolute())
    pip = [
        str(python),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--constraint",
        "constraints.txt",
    ]
    print("Installing (PyTorch is large; this takes a few minutes the first time) …", flush=True)
    if index := cpu_index():
        subprocess.run([*pip, *index, "torch"], cwd=ROOT, check=True)
    subprocess.run([*pip, "--editable", ".[test]"], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
