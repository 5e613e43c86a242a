"""Plans that earlier versions made, for jobs that go on under them after an upgrade."""

from __future__ import annotations

from pathlib import Path

import pytest

from offmated.paths import Paths
from planner.run.folder import RunFolder
from tests.support.kept import VERSIONS, lay_out
from worker.training.run import read_plan


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_of_an_earlier_version_goes_on_under_its_plan(version: str, tmp_path: Path) -> None:
    paths = Paths.at(tmp_path / "state")
    lay_out(version, "killed", paths, tmp_path)
    plan, chain, hardware = read_plan(RunFolder(paths.run_folder(6)))  # which proves it right, too
    assert len(plan.options) == len(chain.blocks) == 4
    assert plan.gpu_peak_bytes <= plan.gpu_budget_bytes
    assert hardware.name
