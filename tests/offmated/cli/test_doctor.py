"""`offmate doctor` about versions that offmate was not run with, and about the machine."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from offmated.cli import doctor
from offmated.cli.doctor import Check, examine, links
from offmated.paths import Paths
from tests import ROOT


def packages(folder: Path, monkeypatch: pytest.MonkeyPatch, **versions: str) -> Check:
    """What doctor says with these installed where they are found first, beside an offmate of known needs."""
    needs = ("torch>=2.11,<2.14", "rq", "nowhere>=3", "peft>=0.19,<1; extra == 'lora'", "absent; extra == 'lora'")
    for name, version in {"offmate": "0.1", **versions}.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        requires = "".join(f"Requires-Dist: {need}\n" for need in needs if name == "offmate")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
    monkeypatch.syspath_prepend(folder)
    (check,) = (check for check in itertools.islice(examine(Paths.at(folder)), 2) if check.name == "offmate")
    return check


def test_versions_outside_the_bounds_are_named_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = packages(tmp_path, monkeypatch, torch="2.14.1+cpu", peft="0.18.0")
    assert check.verdict == "problem"
    torch, peft = "torch 2.14.1+cpu, needed <2.14,>=2.11", "peft 0.18.0, needed <1,>=0.19"
    assert check.found == f"0.1; {torch}; nowhere is missing; {peft}"
    assert check.advice == "pip install 'torch<2.14,>=2.11' 'nowhere>=3' 'peft<1,>=0.19'"


def test_what_is_optional_and_absent_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = packages(tmp_path, monkeypatch, torch="2.11.0", nowhere="3.1", peft="0.19.0")
    assert (check.verdict, check.advice) == ("ok", "")


def test_where_offmate_runs_from_its_folder_without_being_installed_all_else_is_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def distribution(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    python, itself, memory = itertools.islice(examine(Paths.at(tmp_path)), 3)
    assert (python.name, memory.name) == ("python", "memory")
    assert (itself.name, itself.verdict, itself.advice) == ("offmate", "warning", f"pip install {ROOT}")
    assert itself.found.startswith(f"is not installed but runs from {ROOT}")


def test_a_link_with_fewer_lanes_than_the_card_has_is_told() -> None:
    found = list(links("570.86, 4, 16, 16\n570.86, 3, 4, 16\n570.86, [N/A], [N/A], [N/A]\nno such field\n"))
    assert [(check.verdict, check.found) for check in found] == [
        ("ok", "driver 570.86, PCIe 4.0 x16"),
        ("warning", "driver 570.86, PCIe 3.0 x4 of x16"),
        ("ok", "driver 570.86, PCIe [N/A].0 x[N/A]"),
    ]
    assert found[1].advice == "the card could have x16, in another slot: transfers now take 4 times as long"


def test_windows_own_linux_is_told_and_a_plain_one_is_not(tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text("Linux version 5.15.167.4-microsoft-standard-WSL2 (root@x) #1 SMP\n")
    assert [check.name for check in doctor._kernel(version)] == ["wsl"]
    version.write_text("Linux version 6.8.0-45-generic (buildd@x) #45-Ubuntu SMP\n")
    assert list(doctor._kernel(version)) == []
    assert list(doctor._kernel(tmp_path / "none")) == []


def test_an_sqlite_that_can_lose_what_two_write_is_told() -> None:
    assert "can lose" in doctor._database((3, 45, 1)).found
    assert doctor._database((3, 51, 3)).found == "3.51.3"


def test_settings_that_others_can_read_are_told_where_they_hold_addresses(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    assert list(doctor._settings(file)) == []
    for text, mode, verdict in (
        ('notify = "mailto://me:secret@x"', 0o644, "warning"),
        ('notify = "mailto://me:secret@x"', 0o600, "ok"),
        ('window = "23:00-07:00"', 0o644, "ok"),
    ):
        file.write_text(text)
        file.chmod(mode)
        (check,) = doctor._settings(file)
        assert (check.verdict, "secret" in str(check)) == (verdict, False)


def test_a_limit_of_locked_memory_and_a_clock_that_nobody_keeps_right_are_told() -> None:
    assert doctor._locked(8 * 2**20).found == "at most 8.0 MiB"
    assert doctor._locked(-1).found == "no limit"
    assert doctor._clock(kept_right=False).found.endswith(", and no time service sets it")
    assert [doctor._clock(kept_right=known).advice for known in (True, None)] == ["", ""]
    assert doctor._is_kept_right() in (True, False, None)


def test_what_is_optional_is_there_or_is_told_with_what_brings_it() -> None:
    needs = ["torch>=2", 'peft>=0.1; extra == "lora"', 'nowhere-at-all>=1; extra == "mlflow"', 'x; extra == "test"']
    found = doctor._extras(["lora", "mlflow", "test"], needs)
    assert found.found == "installed: lora; not installed: mlflow"
    assert found.advice == "if a job needs one: pip install 'offmate[mlflow]'"


def test_in_its_source_folder_the_command_and_what_it_starts_are_the_same_version(tmp_path: Path) -> None:
    for package in ("offmated", "planner", "worker"):
        (tmp_path / package).mkdir()
        for real in (ROOT / package).iterdir():
            (tmp_path / package / real.name).symlink_to(real)
    for name in ("offmated/command.py", "planner/__main__.py"):
        (tmp_path / name).unlink()
    (tmp_path / "offmated" / "command.py").write_text((ROOT / "offmated" / "command.py").read_text())
    (tmp_path / "planner" / "__main__.py").write_text("raise SystemExit(41)")
    chain = ["--chain", "chain.json", "--hardware", "rtx3060"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", "from offmated.command import main; main()", "plan", *chain],
        cwd=tmp_path,
        env={**environment, "OFFMATE_HOME": str(tmp_path / "state")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 41, done.stderr
