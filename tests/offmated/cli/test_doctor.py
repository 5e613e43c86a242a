"""`offmate doctor` about versions that offmate was not run with."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from offmated.cli.doctor import Check, examine
from offmated.paths import Paths


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
