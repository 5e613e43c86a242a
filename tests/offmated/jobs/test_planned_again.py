"""A job that does not fit with rows of max_length, and whose data are too large to be counted before that is known.
Some tests take seconds: each start of the real planner or trainer imports PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offmated.jobs.states import JobState
from offmated.jobs.store import Store
from offmated.jobs.submission import submit
from offmated.paths import Paths
from planner import tasks
from planner.run.folder import RunFolder
from tests.support.texts import tiny_llama_folder, write_jsonl

BUDGET = "6MiB"


@pytest.mark.parametrize(("longest", "state"), [(40, JobState.WAITING), (900, JobState.FAILED)])
def test_it_is_counted_and_planned_for_its_own_rows(
    longest: int, state: JobState, store: Store, paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_llama_folder(tmp_path / "llama")
    rows = ["x" * 30] * 100 + ["y" * longest]  # of which submission sees the first 64
    write_jsonl(tmp_path / "data.jsonl", [{"text": text} for text in rows])
    keys = f"max_length: 1024\nbf16: false\npacking: false\ngpu_budget: {BUDGET}\n"
    row, _ = submit(store, paths, f"model: ./llama\ndataset: data.jsonl\n{keys}", tmp_path)
    for name, value in paths.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tasks, "why_not_at_hand", lambda job: "as data of 65 MiB are not")
    tasks.plan_job(row.id)
    run, found = RunFolder(Path(row.run_dir)), store.job(row.id)
    assert found.state == state, run.log.read_text()
    assert "rows of max_length do not fit; the data may have shorter ones" in run.log.read_text()
    if state is JobState.WAITING:
        assert json.loads(run.plan.read_text())["length"] == 64
        assert run.read_error() is None
    else:
        assert found.error is not None and found.error["code"] == "budget-too-small"
