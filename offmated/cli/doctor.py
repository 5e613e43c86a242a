"""Checks for `offmate doctor` whether this machine has everything that jobs need. Each check says what it found and
what to do."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shlex
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from packaging.requirements import Requirement
from rich.table import Table

from offmated.cli.client import Client
from offmated.cli.doctor_drives import look_at
from offmated.cli.output import coloured, table
from offmated.config import Config
from offmated.jobs.database import has_sound_log
from offmated.paths import Paths
from offmated.service.broker import Broker
from planner.errors import UserError
from planner.units import format_bytes

OK, WARNING, PROBLEM = "ok", "warning", "problem"
TORCH_PATIENCE_S = 120
DRIVER_PATIENCE_S = 20
_ASKED = ("driver_version", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max")
LITTLE_DISK_BYTES = 20 * 2**30  # a small model's checkpoints and output
LITTLE_RAM_BYTES = 8 * 2**30
_TIME_ERROR = 5  # linux/timex.h

_TORCH = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found["gpus"].append({"name": torch.cuda.get_device_name(index), "free": free, "total": total})
from planner.cpu.adamw import cpu_kernel
kernel = cpu_kernel()
found["updates"] = {"description": kernel.description, "shortcoming": kernel.shortcoming}
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check of `offmate doctor`. `verdict`: "ok", "warning" (jobs work, with less) or "problem" (jobs
    fail). `advice`: what to do."""

    name: str
    verdict: str
    found: str
    advice: str = ""


def examine(paths: Paths, folders: Sequence[Path] = ()) -> Iterator[Check]:
    """Yield the results of all checks, the quick ones first. `folders`: the folders whose drives are checked; by
    default the state folder."""
    yield _python()
    yield from _itself()
    yield _memory()
    yield _locked(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield _clock(_is_kept_right())
    yield _disk(paths)
    yield from _settings(paths.config)
    yield _database()
    yield _broker(paths)
    yield _daemon(paths)
    yield from _kernel(Path("/proc/version"))
    yield from _driver()
    yield from _torch()
    yield from map(_drive, folders or (paths.state,))


def as_table(checks: Sequence[Check]) -> Table:
    """The results of the checks as a table for people."""
    rows = [(check.name, coloured(check.verdict), check.found, check.advice) for check in checks]
    return table(("CHECK", "VERDICT", "FOUND", "WHAT TO DO"), rows)


def as_json(checks: Sequence[Check]) -> list[dict[str, str]]:
    """The results of the checks as JSON objects, for programs."""
    return [asdict(check) for check in checks]


def _python() -> Check:
    return Check(name="python", verdict=OK, found=f"{sys.version.split()[0]} at {sys.executable}")


def _itself() -> Iterator[Check]:
    try:
        its = metadata.distribution("offmate")
    except metadata.PackageNotFoundError:
        folder = Path(__file__).parents[2]
        found = f"is not installed but runs from {folder}: its dependencies were not checked"
        yield Check(name="offmate", verdict=WARNING, found=found, advice=shlex.join(("pip", "install", str(folder))))
        return
    yield _packages(its)
    yield _extras(its.metadata.get_all("Provides-Extra") or (), its.requires or ())


def _packages(its: metadata.Distribution) -> Check:
    """Whether the installed packages have versions that offmate accepts. Optional packages are checked only if they are
    installed."""
    wrong = []
    for need in map(Requirement, its.requires or ()):
        needed, optional = (need.marker is None or need.marker.evaluate({"extra": extra}) for extra in ("", "lora"))
        if not (needed or optional):
            continue
        try:
            have = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            if needed:
                wrong.append((f"{need.name} is missing", need))
            continue
        if not need.specifier.contains(have, prereleases=True):
            wrong.append((f"{need.name} {have}, needed {need.specifier}", need))
    version = its.version
    if wrong:
        found = "; ".join((version, *(trouble for trouble, _ in wrong)))
        advice = shlex.join(("pip", "install", *(f"{need.name}{need.specifier}" for _, need in wrong)))
        return Check(name="offmate", verdict=PROBLEM, found=found, advice=advice)
    named = ("transformers", "PuLP", "highspy", "rq", "SQLAlchemy")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in named)
    return Check(name="offmate", verdict=OK, found=f"{version} with {versions}")


def _extras(names: Sequence[str], requires: Sequence[str]) -> Check:
    """Which optional packages are installed."""
    needs = [(need, need.marker) for need in map(Requirement, requires) if need.marker is not None]
    installed, missing = list[str](), list[str]()
    for extra in names:
        if extra != "test":
            of_it = [need for need, marker in needs if marker.evaluate({"extra": extra})]
            (installed if all(map(_is_there, of_it)) else missing).append(extra)
    lists = (("installed:", installed), ("not installed:", missing))
    found = "; ".join(f"{title} {', '.join(some)}" for title, some in lists if some)
    advice = f"if a job needs one: pip install 'offmate[{missing[0]}]'" if missing else ""
    return Check(name="extras", verdict=OK, found=found or "none", advice=advice)


def _is_there(need: Requirement) -> bool:
    try:
        return need.specifier.contains(metadata.version(need.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def _memory() -> Check:
    memory = psutil.virtual_memory()
    found = f"{format_bytes(memory.available)} free of {format_bytes(memory.total)}"
    if memory.total < LITTLE_RAM_BYTES:
        advice = "weights and optimizer states live here: about 12 bytes per parameter; train small models"
        return Check(name="memory", verdict=WARNING, found=found, advice=advice)
    return Check(name="memory", verdict=OK, found=found)


def _locked(limit: int) -> Check:
    """How much memory a process may lock. Not a warning, as transfers use memory pinned by the driver, which does not
    count against this limit everywhere; for containers, NVIDIA advises to set no limit."""
    if limit == resource.RLIM_INFINITY:
        return Check(name="locked memory", verdict=OK, found="no limit")
    advice = "where pinning fails: --ulimit memlock=-1 for a container, else memlock in /etc/security/limits.conf"
    return Check(name="locked memory", verdict=OK, found=f"at most {format_bytes(limit)}", advice=advice)


def _is_kept_right() -> bool | None:
    """Whether the kernel's clock is synchronized to a time service; None where it does not say. See adjtimex(2)."""
    try:
        state = int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)))  # modes 0: nothing is changed
    except (OSError, AttributeError):
        return None
    return state != _TIME_ERROR if state >= 0 else None


def _clock(kept_right: bool | None) -> Check:
    """Whether this machine's clock is right, as windows and `--begin` go by it."""
    found = time.strftime("%Y-%m-%d %H:%M %Z")
    if kept_right is not False:
        return Check(name="clock", verdict=OK, found=found)
    advice = "windows and --begin depend on it: timedatectl set-ntp true keeps it right"
    return Check(name="clock", verdict=OK, found=f"{found}, and no time service sets it", advice=advice)


def _settings(file: Path) -> Iterator[Check]:
    """Whether other users can read the settings file: addresses of notifications contain passwords. The daemon closes
    the file at its start."""
    try:
        status = file.stat()
    except OSError:
        return
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077 and "notify" in file.read_text("utf-8", errors="replace"):
        whose = "" if status.st_uid == os.getuid() else "; it is another user's"
        found, advice = f"{file.name} has addresses and can be read by others ({mode:03o}{whose})", f"chmod 600 {file}"
        yield Check(name="settings", verdict=WARNING, found=found, advice=advice)
    else:
        yield Check(name="settings", verdict=OK, found=f"{file}, {mode:03o}")


def _disk(paths: Paths) -> Check:
    folder = paths.state
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    found = f"{format_bytes(free)} free at {paths.state}"
    if free < LITTLE_DISK_BYTES:
        advice = "checkpoints go there; free some space, or set OFFMATE_HOME to a larger disk"
        return Check(name="disk", verdict=WARNING, found=found, advice=advice)
    return Check(name="disk", verdict=OK, found=found)


def _drive(folder: Path) -> Check:
    drive = look_at(folder)
    return Check(name="drive", verdict=OK if drive.fine else WARNING, found=drive.text, advice=drive.advice)


def _database(version: tuple[int, int, int] = sqlite3.sqlite_version_info) -> Check:
    found = ".".join(map(str, version))
    if has_sound_log(version):
        return Check(name="sqlite", verdict=OK, found=found)
    advice = (
        "jobs are safe: the database uses a rollback journal, so readers wait for writers; 3.51.3 has neither problem"
    )
    found = f"{found}, whose write-ahead log can lose concurrent writes"
    return Check(name="sqlite", verdict=OK, found=found, advice=advice)


def _kernel(file: Path) -> Iterator[Check]:
    """A warning under WSL2: Windows keeps half of the memory, and lets little of the rest be pinned."""
    try:
        is_wsl = "microsoft" in file.read_text("utf-8", errors="replace").lower()
    except OSError:
        return
    if is_wsl:
        advice = "give Linux more of the memory in .wslconfig; keep models and state in its own disk, not below /mnt"
        yield Check(name="wsl", verdict=WARNING, found="this is WSL2", advice=advice)


def _driver() -> Iterator[Check]:
    """The cards' driver and their links to the host, over which everything moves that does not stay on the card."""
    try:
        output = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=DRIVER_PATIENCE_S,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return  # the check of torch tells what this means
    yield from links(output)


def links(answer: str) -> Iterator[Check]:
    """Yield a check of the PCIe link of each GPU: `answer` is what `nvidia-smi` printed for the query `_ASKED`, a line
    per GPU. A link's generation falls while the card is idle, so only the highest one is shown; its width does not
    fall."""
    for line in answer.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(_ASKED):
            continue
        driver, highest, width, widest = values
        found = f"driver {driver}, PCIe {highest}.0 x{width}"
        if width.isdigit() and widest.isdigit() and int(width) < int(widest):
            times = f"{int(widest) / int(width):g}"
            advice = f"the card could have x{widest}, in another slot: transfers now take {times} times as long"
            yield Check(name="link", verdict=WARNING, found=f"{found} of x{widest}", advice=advice)
        else:
            yield Check(name="link", verdict=OK, found=found)


def _broker(paths: Paths) -> Check:
    try:
        broker = Broker.choose(Config.load(paths), paths)
        if broker.command is None:
            broker.wait_until_ready()
    except UserError as error:
        found = "; ".join((error.what, *error.numbers))
        return Check(name="broker", verdict=PROBLEM, found=found, advice=error.hint)
    if broker.command is not None:
        return Check(name="broker", verdict=OK, found=f"{broker.command[0]}, run by the daemon")
    url = urlsplit(broker.url)  # not shown whole: it may hold a password
    return Check(name="broker", verdict=OK, found=f"yours at {url.hostname or url.path}")


def _daemon(paths: Paths) -> Check:
    client = Client(paths)
    try:
        health = client.health()
    except UserError as error:
        return Check(name="daemon", verdict=WARNING, found=error.what, advice=error.hint)
    return Check(name="daemon", verdict=OK, found=f"{health['state']} at {paths.api_socket}")


def _torch() -> Iterator[Check]:
    """PyTorch and the GPUs, checked in their own process: importing torch takes seconds, and CUDA leaves threads."""
    try:
        answer = subprocess.run(
            [sys.executable, "-P", "-c", _TORCH],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TORCH_PATIENCE_S,
        )
    except subprocess.TimeoutExpired:
        found = f"no answer within {TORCH_PATIENCE_S} s"
        yield Check(name="torch", verdict=PROBLEM, found=found, advice="is the GPU driver stuck? try nvidia-smi")
        return
    if answer.returncode != 0:
        found = answer.stderr.strip().splitlines()[-1] if answer.stderr.strip() else f"exit code {answer.returncode}"
        yield Check(name="torch", verdict=PROBLEM, found=found, advice="pip install --force-reinstall torch")
        return
    facts = json.loads(answer.stdout.splitlines()[-1])
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else "CPU build"
    yield Check(name="torch", verdict=OK, found=f"{facts['version']} ({build})")
    yield _updates(**facts["updates"])
    for gpu in facts["gpus"]:
        room = f"{format_bytes(gpu['free'])} free of {format_bytes(gpu['total'])}"
        yield Check(name="gpu", verdict=OK, found=f"{gpu['name']}, {room}")
    if not facts["gpus"]:
        yield _no_gpu(cuda_build=bool(facts["cuda"]))


def _updates(*, description: str, shortcoming: str) -> Check:
    if not shortcoming:
        return Check(name="cpu updates", verdict=OK, found=description)
    advice = "jobs run; updates are faster with a C compiler that works: sudo apt install gcc"
    return Check(name="cpu updates", verdict=WARNING, found=f"{description}; {shortcoming}", advice=advice)


def _no_gpu(*, cuda_build: bool) -> Check:
    if not Path("/dev/nvidiactl").exists():
        advice = "jobs run on the CPU; for an NVIDIA card install its driver"
        return Check(name="gpu", verdict=WARNING, found="none", advice=advice)
    if not cuda_build:
        advice = "pip install --force-reinstall torch --index-url https://pypi.org/simple"
        return Check(name="gpu", verdict=PROBLEM, found="there is one, but this torch cannot use it", advice=advice)
    advice = "the driver may be too old for this torch: compare nvidia-smi with the CUDA version above"
    return Check(name="gpu", verdict=PROBLEM, found="there is one, but torch cannot open it", advice=advice)
