"""bf16 where the machine's card computes in it, as a job's file leaves it open."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from planner.job.schema import Job
from tests.planner.importers.test_tools import AXOLOTL, OURS, folder

__all__ = ["folder"]


def driver(monkeypatch: pytest.MonkeyPatch, capability: str | None) -> None:
    """A machine whose card has this compute capability; None: without a card."""

    def run(command: list[str], **_keywords: object) -> subprocess.CompletedProcess[str]:
        if capability is None:
            raise FileNotFoundError(command[0])
        return subprocess.CompletedProcess(command, 0, f"{capability}\n", "")

    monkeypatch.setattr("planner.machine.this_machine.subprocess.run", run)


@pytest.mark.parametrize(
    ("capability", "bf16", "word"),
    [
        ("8.6", True, "computes in it"),
        ("7.5", False, "older"),
        ("[N/A]", False, ""),
        (None, False, ""),
    ],
)
def test_ours_is_bf16_where_the_card_computes_in_it_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capability: str | None, bf16: bool, word: str
) -> None:
    driver(monkeypatch, capability)
    monkeypatch.setattr("planner.machine.this_machine._GPU_DEVICES", ())
    job, notes = Job.parse_with_notes(OURS, folder)
    told = [note for note in notes if "bf16" in note]
    assert job.bf16 is bf16
    assert [word in note for note in told] == ([True] if word else [])
    for said in ("bf16: false", "dtype: float32", "float32: true"):
        job, notes = Job.parse_with_notes(f"{OURS}{said}\n", folder)
        assert (job.bf16, any("leaves it out" in note for note in notes)) == (False, False)
    assert Job.parse(f"{OURS}bf16: true\n", folder).bf16
    assert Job.parse(AXOLOTL, folder).bf16 is (capability != "7.5")


@pytest.mark.parametrize("there", [True, False])
def test_a_driver_that_does_not_answer_is_told_of_where_a_card_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    driver(monkeypatch, None)
    monkeypatch.setattr("planner.machine.this_machine._GPU_DEVICES", (str(folder if there else folder / "none"),))
    job, notes = Job.parse_with_notes(OURS, folder)
    assert not job.bf16
    assert any("the driver does not say what the card is" in note for note in notes) is there


def test_the_precision_of_a_submission_stays_whatever_the_card_is_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(monkeypatch, "8.9")
    resolved = folder / "resolved.yaml"
    resolved.write_text(Job.parse(OURS, folder).resolved_yaml())
    driver(monkeypatch, "7.0")
    assert Job.from_resolved(resolved).bf16
    resolved.write_text(Job.parse(OURS, folder).resolved_yaml())
    driver(monkeypatch, "8.9")
    assert not Job.from_resolved(resolved).bf16


def test_a_question_about_a_card_by_its_name_is_about_that_card(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, None)
    assert Job.question(OURS, folder).bf16
    assert not Job.question(f"{OURS}bf16: false\n", folder).bf16
