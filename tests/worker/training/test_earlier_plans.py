"""Plans that earlier versions made, for jobs that go on under them after an upgrade: in `earlier_plans/`, plan.json as
planners at commits 094e5b8, 8f3703e, 770dbeb, 58b8f9f and e3d9b69 wrote it for a Llama of two tiny layers."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.run.folder import RunFolder
from worker.training.run import read_plan

PLANS = sorted((Path(__file__).parent / "earlier_plans").iterdir())


@pytest.mark.parametrize("written", PLANS, ids=lambda file: file.stem)
def test_a_job_goes_on_under_the_plan_of_an_earlier_version(written: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").symlink_to(written)
    plan, chain, hardware = read_plan(RunFolder(tmp_path))  # which proves it right, too
    assert len(plan.options) == len(chain.blocks) == 4
    assert plan.gpu_peak_bytes <= plan.gpu_budget_bytes
    assert hardware.name
