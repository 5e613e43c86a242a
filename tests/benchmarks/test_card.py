"""The questions to a new card are asked one by one: one that fails or hangs leaves the others their answers."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import card

ANSWERS = {
    "machine": "(folder / 'machine.json').write_text('{\"device\": \"A Card\"}')",
    "copies": "import time; time.sleep(100)",
    "plain-fp32": "raise SystemExit('no such thing')",
    "plan-fp32": "(folder / 'plan-fp32.json').write_text('{\"least_bytes\": 7}')",
}


def test_a_question_that_fails_or_hangs_leaves_the_others_their_answers(tmp_path, monkeypatch: pytest.MonkeyPatch):
    def command_of(question, folder, sizes):
        begin = f"from pathlib import Path; folder = Path({str(folder)!r}); print('asked', flush=True); "
        return [sys.executable, "-S", "-c", begin + ANSWERS[question]]

    monkeypatch.setattr(card, "command_of", command_of)
    monkeypatch.setattr(card, "RESULTS", tmp_path)
    monkeypatch.setattr(card, "QUESTIONS", {**card.QUESTIONS, "copies": 2})
    monkeypatch.setattr(sys, "argv", ["card.py", "--only", *ANSWERS])
    assert card.main() == 1
    found = json.loads((tmp_path / "card-a-card.json").read_text("utf-8"))["found"]
    assert found["machine"]["answer"] == {"device": "A Card"}
    assert found["plan-fp32"]["answer"] == {"least_bytes": 7}
    assert (found["copies"]["exit_code"], found["copies"]["said"]) == (None, "asked\n")
    assert found["plain-fp32"]["exit_code"] == 1 and "no such thing" in found["plain-fp32"]["said"]
