"""Finds this machine's drives on Linux (by /proc and /sys): on which drive a folder is, and how much may be written to
it.

Makers state in data sheets how many bytes may be written in a drive's life (TBW); the drive itself does not report it.
If the job does not state it either, it is taken as 600 times the drive's size, the usual figure for consumer drives
with three bits a cell; with four bits a cell it is a third to two thirds of that.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.errors import UserError

RATED_SIZES = 600
MEASURED_BYTES = 2**30
"""Size in bytes of the test file with which a drive's rates are measured."""
_FULL = 0.98
IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
MOUNTS = Path("/proc/self/mountinfo")
BLOCKS = Path("/sys/class/block")
_SECTOR = 512
_ESCAPES = {r"\040": " ", r"\011": "\t", r"\012": "\n", r"\134": "\\"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """The drive that holds a folder. `source`: the mounted file system's source, as the system names it (such as
    /dev/nvme0n1p2). `device`: name of the whole drive; empty if there is none, or several, as in a RAID. `bytes`: size
    of the drive, or of the file system if the drive's is not known."""

    source: str
    mount: str
    file_system: str
    device: str
    model: str
    bytes: int

    @property
    def rated_bytes(self) -> int:
        """Bytes that may be written to the drive in its life, estimated as 600 times its size."""
        return RATED_SIZES * self.bytes


def drive_of(folder: Path, *, mounts: Path = MOUNTS, blocks: Path = BLOCKS) -> Drive:
    """The drive that holds `folder` or, if that does not exist, the nearest existing folder above it. Raises
    OSError."""
    folder = next(path for path in (folder, *folder.parents) if path.exists()).resolve()
    mount, file_system, source = _mounted(folder, mounts)
    device = _whole(source, blocks)
    size, model = shutil.disk_usage(folder).total, ""
    if device:
        size = max(size, _SECTOR * int(_read(blocks / device / "size") or 0))
        model = _read(blocks / device / "device" / "model")
    return Drive(source=source, mount=mount, file_system=file_system, device=device, model=model, bytes=size)


def check_place(folder: Path, *, table: Path = Path("/etc/fstab")) -> None:
    """Raise UserError "disk-failed" if the drive meant for `folder` is not mounted, so that files would go to the disk
    below. That is so if the parent folder does not exist, or if nothing is mounted at a mount point above `folder` that
    the file system table `table` lists."""
    what, hint = "A folder for optimizer states cannot be used.", f"mount the drive that {folder} is on"
    if not folder.parent.is_dir():
        raise UserError(
            what,
            code="disk-failed",
            numbers=(f"there is no {folder.parent}",),
            hint=f"{hint}; offmate makes this folder, but none above it",
        )
    place = folder.resolve()
    lines = (line.split() for line in _read(table).splitlines() if not line.lstrip().startswith("#"))
    for mount in (Path(_plain(words[1])) for words in lines if len(words) > 2 and words[1].startswith("/")):
        if place.is_relative_to(mount) and not mount.is_mount():
            raise UserError(
                what,
                code="disk-failed",
                numbers=(f"{table} has a drive for {mount}, and nothing is mounted there",),
                hint=hint,
            )


def rooms(folders: Sequence[Path]) -> list[int]:
    """Bytes that each folder may use of the free space on its drive. Folders on the same drive get equal parts of its
    free space. Raises OSError."""
    here = devices(folders)
    free = (int(_FULL * shutil.disk_usage(_there(folder)).free) for folder in folders)
    return [size // here.count(drive) for size, drive in zip(free, here, strict=True)]


def devices(folders: Sequence[Path]) -> list[int]:
    """The device number (`st_dev`) of the file system of each folder; folders on the same one have equal numbers.
    Raises OSError."""
    return [_there(folder).stat().st_dev for folder in folders]


def _there(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def usable(rooms: Sequence[int]) -> list[int]:
    """The indices of the drives that can hold optimizer states, given the free bytes of each: those with room for the
    file with which a drive is measured; all drives if none has that much."""
    return [k for k, room in enumerate(rooms) if room >= MEASURED_BYTES] or list(range(len(rooms)))


def rated_bytes(folders: Sequence[Path], parts: Sequence[float] | None = None) -> int:
    """Bytes that may be written to the drives of these folders, all together, until the first drive is worn out.
    `parts`: the relative amounts written to each folder; None: equal amounts. Raises OSError."""
    parts = [1.0] * len(folders) if parts is None else parts
    takes: dict[str, float] = {}
    rated: dict[str, int] = {}
    for drive, part in zip(map(drive_of, folders), parts, strict=True):
        name = drive.device or drive.mount
        takes[name], rated[name] = takes.get(name, 0) + part, drive.rated_bytes
    return min(int(rated[name] * sum(parts) / part) for name, part in takes.items() if part)


def _mounted(folder: Path, mounts: Path) -> tuple[str, str, str]:
    """Mount point, kind and source of the folder's file system: the innermost mount around the folder, and the last of
    several in one place."""
    innermost = "/", "", ""
    for line in mounts.read_text("utf-8", errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        mount = _plain(before.split()[4])
        if folder.is_relative_to(mount) and len(mount) >= len(innermost[0]):
            file_system, source = after.split()[:2]
            innermost = mount, file_system, _plain(source)
    return innermost


def _plain(text: str) -> str:
    for escape, character in _ESCAPES.items():
        text = text.replace(escape, character)
    return text


def _whole(source: str, blocks: Path) -> str:
    """Name of the whole drive of a device: that of a partition, or the one that a mapped device lies on; empty where
    there are several or none."""
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
