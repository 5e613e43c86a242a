"""Checks drives for `offmate doctor`: which drive a folder is on, how fast it is, and whether optimizer states may be
kept there (`disk_paths`)."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from planner.codec import from_json
from planner.machine.drives import IN_MEMORY, RATED_SIZES, drive_of

PATIENCE_S = 60
_MEASURE = """
import json, sys
from pathlib import Path
from planner.measure.drive import rates
try:
    print(json.dumps({"rates": rates(Path(sys.argv[1]))}))
except OSError as error:
    print(json.dumps({"error": error.errno, "text": str(error)}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of checking the drive of one folder. `fine`: optimizer states may be kept there."""

    text: str
    fine: bool
    advice: str = ""


def look_at(folder: Path) -> Found:
    """Find the drive of `folder`, and measure its speed for up to two seconds with a temporary file of up to 1 GiB."""
    try:
        drive = drive_of(folder)
    except OSError as error:
        return Found(text=f"{folder}: {error.strerror}", fine=False, advice="check the disk")
    device = f"{drive.model} ({drive.source})" if drive.model else drive.source
    where = f"{folder} is on {device}, {drive.file_system}"
    if drive.file_system in IN_MEMORY:
        return Found(text=f"{where}: that is memory", fine=False, advice="disk_paths need a folder on a drive")
    measured = _measured(folder)
    if measured.rates is not None:
        read, write = (f"{rate / 1e9:.2g} GB/s" for rate in measured.rates)
        life = f"{RATED_SIZES * drive.bytes / 1e12:.0f} TB of writes wear out a usual drive of its size"
        return Found(text=f"{where}: reads {read}, writes {write}; {life}", fine=True, advice=_on(drive.file_system))
    if measured.error == errno.EINVAL:
        advice = "disk_paths need one with direct transfers: ext4, xfs, btrfs"
        return Found(text=f"{where}, which knows no direct transfers", fine=False, advice=advice)
    advice = "check the disk, and to the rights of the folder"
    return Found(text=f"{where}; it could not be measured: {measured.text}", fine=False, advice=advice)


def _on(file_system: str) -> str:
    return "for disk_paths: chattr +C on the empty folder keeps files in one piece" if file_system == "btrfs" else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Bytes a second read and written, or the error that kept them from being measured."""

    rates: tuple[float, float] | None = None
    error: int | None = None
    text: str = ""


def _measured(folder: Path) -> _Measured:
    """The speed of a folder's drive, measured in a process of its own, as that needs torch."""
    while not folder.exists():
        folder = folder.parent
    try:
        output = subprocess.run(
            [sys.executable, "-P", "-c", _MEASURE, str(folder)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        ).stdout
    except subprocess.SubprocessError as error:
        return _Measured(text=type(error).__name__)
    return from_json(_Measured, json.loads(output.splitlines()[-1]))
