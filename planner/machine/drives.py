"""The drives of this machine: which one a folder is on, as what, and how much may be written to it.

How much may be, makers say in their data sheets (TBW); a drive does not tell it. Where nobody says, it is taken for 600
times the drive's size, which is the usual figure for consumer drives with three bits a cell; with four bits a cell it
is a third to two thirds of that. Linux, by /proc and /sys.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.errors import UserError

RATED_SIZES = 600
MEASURED_BYTES = 2**30
"""Of the file by which a drive is measured."""
_FULL = 0.98
IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
MOUNTS = Path("/proc/self/mountinfo")
BLOCKS = Path("/sys/class/block")
_SECTOR = 512
_ESCAPES = {r"\040": " ", r"\011": "\t", r"\012": "\n", r"\134": "\\"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """What a folder is on. `source`: as the system names it. `device`: of the whole drive, empty where there is none,
    or several, as in a raid. `bytes`: of the drive, or of the file system where it is not known."""

    source: str
    mount: str
    file_system: str
    device: str
    model: str
    bytes: int

    @property
    def rated_bytes(self) -> int:
        """What may be written to it, as far as its size says."""
        return RATED_SIZES * self.bytes


def drive_of(folder: Path, *, mounts: Path = MOUNTS, blocks: Path = BLOCKS) -> Drive:
    """The drive of a folder, or of the nearest one above it that is there. Raises OSError."""
    folder = next(path for path in (folder, *folder.parents) if path.exists()).resolve()
    mount, file_system, source = _mounted(folder, mounts)
    device = _whole(source, blocks)
    size, model = shutil.disk_usage(folder).total, ""
    if device:
        size = max(size, _SECTOR * int(_read(blocks / device / "size") or 0))
        model = _read(blocks / device / "device" / "model")
    return Drive(source=source, mount=mount, file_system=file_system, device=device, model=model, bytes=size)


def check_place(folder: Path, *, table: Path = Path("/etc/fstab")) -> None:
    """Raise UserError "disk-failed" where what is meant for a drive would be on the disk below, as the drive is not
    mounted: the folder above is not there, or a mount point of the system's table has nothing mounted."""
    what, hint = "A folder for optimizer states cannot be used.", f"mount the drive that {folder} is on"
    if not folder.parent.is_dir():
        raise UserError(
            what, code="disk-failed", numbers=(f"there is no {folder.parent}",),
            hint=f"{hint}; nothing above this folder is made",
        )  # fmt: skip
    place = folder.resolve()
    lines = (line.split() for line in _read(table).splitlines() if not line.lstrip().startswith("#"))
    for mount in (Path(_plain(words[1])) for words in lines if len(words) > 2 and words[1].startswith("/")):
        if place.is_relative_to(mount) and not mount.is_mount():
            raise UserError(
                what, code="disk-failed", numbers=(f"{table} has a drive for {mount}, and nothing is mounted there",),
                hint=hint,
            )  # fmt: skip


def rooms(folders: Sequence[Path]) -> list[int]:
    """What each folder may take of what is free on its drive, in bytes; where several are on one, each has its part of
    that. Raises OSError."""
    here = devices(folders)
    free = (int(_FULL * shutil.disk_usage(_there(folder)).free) for folder in folders)
    return [size // here.count(drive) for size, drive in zip(free, here, strict=True)]


def devices(folders: Sequence[Path]) -> list[int]:
    """The number of each folder's file system, by which those on one are known. Raises OSError."""
    return [_there(folder).stat().st_dev for folder in folders]


def _there(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def usable(rooms: Sequence[int]) -> list[int]:
    """The numbers of the drives that get a part of the states, of those with so much room: one needs enough to be
    measured in; all where none has that."""
    return [k for k, room in enumerate(rooms) if room >= MEASURED_BYTES] or list(range(len(rooms)))


def rated_bytes(folders: Sequence[Path], parts: Sequence[float] | None = None) -> int:
    """What may be written to the drives of these folders altogether until the first is worn. `parts`: which part of
    that each folder gets, to one another; None: equal ones. Raises OSError."""
    parts = [1.0] * len(folders) if parts is None else parts
    takes: dict[str, float] = {}
    rated: dict[str, int] = {}
    for drive, part in zip(map(drive_of, folders), parts, strict=True):
        name = drive.device or drive.mount
        takes[name], rated[name] = takes.get(name, 0) + part, drive.rated_bytes
    return min(int(rated[name] * sum(parts) / part) for name, part in takes.items() if part)


def _mounted(folder: Path, mounts: Path) -> tuple[str, str, str]:
    """Where the folder's file system is mounted, its kind and its source: of those around the folder the innermost,
    of several in one place the last."""
    found = "/", "", ""
    for line in mounts.read_text("utf-8", errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        mount = _plain(before.split()[4])
        if folder.is_relative_to(mount) and len(mount) >= len(found[0]):
            file_system, source = after.split()[:2]
            found = mount, file_system, _plain(source)
    return found


def _plain(text: str) -> str:
    for escape, character in _ESCAPES.items():
        text = text.replace(escape, character)
    return text


def _whole(source: str, blocks: Path) -> str:
    """The drive that a device is of: a partition's, and what a mapped one lies on, where that is one."""
    if not source.startswith("/dev/"):
        return ""
    name = Path(source).resolve().name
    while (blocks / name).exists():
        below = [path.name for path in (blocks / name / "slaves").glob("*")]
        if len(below) > 1:
            return ""
        if below:
            name = below[0]
        elif (blocks / name / "partition").exists():
            name = (blocks / name).resolve().parent.name
        else:
            return name
    return ""


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""
