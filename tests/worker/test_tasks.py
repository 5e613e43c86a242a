"""What the GPU worker does after a trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.job.output_dir import Place
from tests.support.runs import make_run
from worker.tasks import clear_place


@pytest.mark.parametrize("place", ["out", "empty", None])
def test_what_a_killed_trainer_was_writing_where_the_model_goes_is_removed(tmp_path: Path, place: str | None) -> None:
    (tmp_path / "empty").mkdir()
    _, run = make_run(tmp_path, "llama", output_dir=place and str(tmp_path / place))
    folder = tmp_path / place if place else run.output
    run.token()
    before = sorted(tmp_path.rglob("*"))
    made = Place(folder=folder, token=run.token()).begin()
    (made / "model.safetensors").write_text("half of it")
    clear_place(run)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_whose_job_cannot_be_read_is_left_as_it_is(tmp_path: Path) -> None:
    _, run = make_run(tmp_path, "llama")
    run.resolved.write_text("[")
    clear_place(run)
