"""`offmate doctor` about drives, and what-if about them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from offmated.cli import doctor_drives
from offmated.cli.doctor import WARNING, _drive
from planner.errors import UserError
from planner.machine.presets import DRIVES, preset, with_drives


def test_a_folders_drive_is_named_and_measured_and_nothing_stays(tmp_path: Path) -> None:
    found = doctor_drives.look_at(tmp_path / "new" / "one")
    assert str(tmp_path) in found.text and list(tmp_path.iterdir()) == []
    if found.fine:  # where tests run is what it is: overlay and ext4 are, memory is not
        assert "GB/s, writes" in found.text and "TB of writes" in found.text
    else:
        assert found.advice


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory here")
def test_memory_is_no_drive() -> None:
    check = _drive(Path("/dev/shm"))
    assert check.verdict == WARNING and "that is memory" in check.found and "disk_paths" in check.advice


@pytest.mark.parametrize(
    ("number", "text"), [(errno.EINVAL, "knows no direct transfers"), (errno.ENOSPC, "it could not be measured: why")]
)
def test_what_kept_it_from_being_measured_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, text: str
) -> None:
    monkeypatch.setattr(doctor_drives, "IN_MEMORY", frozenset())
    script = f"import json; print(json.dumps({{'error': {number}, 'text': 'why'}}))"
    monkeypatch.setattr(doctor_drives, "_MEASURE", script)
    found = doctor_drives.look_at(tmp_path)
    assert text in found.text and not found.fine and found.advice


def test_drives_are_known_by_name_and_several_are_as_many_times_as_fast() -> None:
    machine = preset("rtx3060", bf16=True)
    assert machine.disk_bytes == 0
    one, two = with_drives(machine, "pcie4"), with_drives(machine, "2xPCIe4")
    rates = ("disk_read_bytes_per_s", "disk_write_bytes_per_s", "disk_sustained_bytes_per_s", "disk_rated_bytes")
    assert [2 * getattr(one, name) for name in rates] == [getattr(two, name) for name in rates]
    assert (one.disk_read_bytes_per_s, one.disk_rated_bytes) == (DRIVES["pcie4"].read, 1200 * 10**12)
    with pytest.raises(UserError, match="known are pcie3, pcie4, pcie5") as raised:
        with_drives(machine, "3xpcie6")
    assert raised.value.code == "unknown-drive"
