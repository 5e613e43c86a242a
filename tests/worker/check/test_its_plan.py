"""Whose plan is certified: the one that the job has, or gets when it has its turn. Some tests take seconds: a model
is traced for its plan, and again for its engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.commands.answer import Answer
from planner.commands.plan_job import plan_job
from planner.errors import UserError
from planner.job.base import freeze_base
from planner.job.schema import Job
from planner.measure.repeatable import Kernels, kernels_in_force
from planner.run.folder import RunFolder
from tests.support.runs import make_run
from worker.check.certificate import certify
from worker.check.its_plan import ItsPlan, its_plan
from worker.prepare import main as prepare

CPU = torch.device("cpu")
STEP = {"gradient_accumulation_steps": 2, "max_steps": 3}


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def asked(job: Job, run: RunFolder | None, folder: Path) -> ItsPlan:
    return its_plan(job, run, CPU, folder, None)


def test_a_job_that_has_its_final_plan_is_certified_under_that_and_not_under_a_new_one(tmp_path: Path) -> None:
    job, run = make_run(tmp_path, "llama", **STEP)
    document = json.loads(run.plan.read_text()) | {"measured": True}
    run.plan.write_text(json.dumps(document))
    found = asked(job, run, tmp_path / "data")
    assert found.decided and found.document == document
    assert plan_job(job, CPU, cache=None, measure=True).plan.options != found.plan.options, "the test shows something"
    assert list(found.plan.options) == document["plan"]["options"]
    for layers, whole in ((2, False), (3, True)):
        folder = tmp_path / f"of {layers}"
        folder.mkdir()
        assert certify(found, steps=1, layers=layers, device=CPU, folder=folder, kernels=Kernels()).decided == whole
    run.plan.write_text(json.dumps(document | {"measured": False}))
    assert not asked(job, run, tmp_path / "data").decided, "an estimate gives way to a plan made from measurements"


def test_on_a_gpu_a_plan_for_other_kernels_gives_way_to_one_for_those_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention's backward needs more scratch in strict ones, for which the job's own plan has no room."""
    made: list[str] = []

    def planned(job: Job, device: torch.device, **keywords: Any) -> Answer:
        made.append(kernels_in_force(device))
        return replace(plan_job(job, CPU, **keywords), kernels=kernels_in_force(device))

    monkeypatch.setattr("worker.check.its_plan.plan_job", planned)
    job, run = make_run(tmp_path, "llama", **STEP)
    document = json.loads(run.plan.read_text()) | {"measured": True}
    run.plan.write_text(json.dumps(document))
    cuda = torch.device("cuda")
    with Kernels().taken():
        anew = its_plan(job, run, cuda, tmp_path / "data", None)
        assert (anew.decided, anew.other_kernels, made) == (False, True, ["strict"])
        assert anew.document["kernels"] == "strict"
        assert asked(job, run, tmp_path / "data").decided, "on a CPU both are the same kernels"
        run.plan.write_text(json.dumps(document | {"kernels": "strict"}))
        assert its_plan(job, run, cuda, tmp_path / "data", None).decided, "of a job that asks for such kernels"
    assert len(made) == 1


def test_without_a_plan_the_data_are_counted_first_as_for_the_job(tmp_path: Path) -> None:
    job, run = make_run(tmp_path, "qwen2", **STEP)
    found = asked(job, None, tmp_path / "data")
    assert prepare([str(run.path)]) == 0
    counted = run.read_counted()
    assert counted is not None and found.chain.distinct_tokens == counted.distinct_tokens != ()
    assert found.document["length"] == counted.lengths[0]
    assert not found.decided


def test_the_plan_of_a_job_whose_head_is_its_own_depends_on_no_data(tmp_path: Path) -> None:
    job, _ = make_run(tmp_path, "llama", **STEP)
    assert asked(job, None, tmp_path / "data").chain.distinct_tokens == ()


def test_micro_batches_that_the_planner_decides_are_decided_after_the_data_were_counted(tmp_path: Path) -> None:
    job, _ = make_run(tmp_path, "llama", max_steps=3)
    whole = job.model_copy(update={"per_device_train_batch_size": "auto", "train_batch_size": 4})
    found = asked(whole, None, tmp_path / "data")
    assert found.job.is_split and found.job.slice_rows * found.plan.slices * found.plan.rounds == 4
    assert len(found.batches.step(0)) == found.plan.slices * found.plan.rounds


def test_a_submitted_job_is_not_asked_about_on_another_base(tmp_path: Path) -> None:
    job, run = make_run(tmp_path, "llama", **STEP)
    run.plan.write_text(json.dumps(json.loads(run.plan.read_text()) | {"measured": True}))
    run.write_base(freeze_base(job, run.path.parent))
    asked(job, run, tmp_path / "data")
    config = Path(job.model) / "config.json"
    size = config.stat().st_size
    config.write_text(config.read_text() + "\n")
    with pytest.raises(UserError) as refused:
        asked(job, run, tmp_path / "data")
    assert (refused.value.code, refused.value.numbers) == ("base-changed", (f"{config}: {size} bytes, now {size + 1}",))
    assert refused.value.hint == "put them back, or give the job's file to ask about the model that is there now"
