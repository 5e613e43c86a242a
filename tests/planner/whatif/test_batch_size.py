"""The batch size left to the planner: candidates, their chains from two traces, the choice, and the run folder. Some
tests take seconds: they solve the integer program of a model, or many small ones."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.__main__ import main
from planner.commands.plan_job import plan_job
from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.machine.hardware import Hardware
from planner.measure.analysis import analyse, estimate_times
from planner.measure.machine_rates import estimate_hardware
from planner.models.hf_model import skeleton_model
from planner.run.folder import RunFolder
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan
from planner.search.from_disk import disk_bytes
from planner.search.make_plan import GAP
from planner.search.problem import Problem
from planner.whatif.batch_size import candidates, hopeful, ranked
from planner.whatif.between import between
from planner.whatif.ways_to_fit import Way
from tests.planner.measure.test_analysis import a_mean_per_slice
from tests.support.analyses import analyse_once, analysed_once
from tests.support.texts import make_job, sentences, tiny_llama_folder, write_jsonl

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    analyse_once(monkeypatch)


def auto_job(folder: Path, **keys: Any) -> Job:
    model = tiny_llama_folder(folder / "model")
    data = write_jsonl(folder / "data.jsonl", sentences(8))
    return make_job(model, data, **{"max_length": 32, "train_batch_size": 4, "gpu_budget": "2MB", **keys})


def machine() -> Hardware:
    return estimate_hardware(CPU, torch.float32)


def test_the_candidates_are_the_divisors_of_the_steps_rows() -> None:
    assert candidates(1) == [1]
    assert candidates(7) == [1, 7]
    assert candidates(12) == [1, 2, 3, 4, 6, 12]
    assert candidates(64) == [1, 2, 4, 8, 16, 32, 64]


def test_of_many_divisors_some_of_every_size_are_candidates() -> None:
    some = candidates(5040)  # it has 60
    assert len(some) <= 16
    assert (some[0], some[-1]) == (1, 1008)  # more rows than 1024 are not tried
    assert all(b <= 3 * a for a, b in itertools.pairwise(some))
    assert all(5040 % rows == 0 for rows in some)


def chain_of(job: Job, rows: int) -> Chain:
    analysis = analysed_once(job.with_slices(rows).model_copy(update={"gradient_accumulation_steps": 1}), CPU)
    return analysis.chain(estimate_times(analysis, machine()))


def test_two_traces_give_the_bytes_of_every_batch_size_between(tmp_path: Path) -> None:
    job = auto_job(tmp_path, train_batch_size=8, max_length=128)  # the loss by rows takes four turns in all three
    low, high, real = (chain_of(job, rows) for rows in (2, 8, 4))
    guess = between(low, high, (4 - 2) / (8 - 2))
    assert guess.slice_tokens == real.slice_tokens
    assert list(guess.tensors()) == list(real.tensors())
    for mine, traced in zip(guess.blocks, real.blocks, strict=True):
        for a, b in zip(mine.options, traced.options, strict=True):
            assert math.isclose(a.saved_bytes, b.saved_bytes, rel_tol=0.01)
            assert math.isclose(a.forward_peak_bytes, b.forward_peak_bytes, rel_tol=0.02)
            assert math.isclose(a.backward_peak_bytes, b.backward_peak_bytes, rel_tol=0.02)
            assert math.isclose(a.forward_s + a.backward_s, b.forward_s + b.backward_s, rel_tol=0.02)


def test_no_split_of_a_step_has_a_shorter_plan_than_the_first_of_the_ranking(tmp_path: Path) -> None:
    job, hardware = auto_job(tmp_path, gpu_budget="1MB"), machine()
    steps: dict[int, float] = {}
    for rows in (1, 2, 4):
        try:
            plan = Problem(
                chain=chain_of(job, rows),
                hardware=hardware,
                gpu_budget_bytes=job.gpu_budget or 0,
                slices=4 // rows,
                clip=True,
                cpu_budget_bytes=hardware.cpu_bytes,
            ).plan()
        except UserError:
            continue
        steps[rows] = plan.step_s
    best = ranked(job, CPU, hardware)[0]
    assert best.slices * best.rows == 4
    assert steps[best.rows] <= min(steps.values()) * (1 + 3 * GAP)


def test_the_largest_micro_batch_does_not_fit_a_small_budget(tmp_path: Path) -> None:
    job = auto_job(tmp_path, train_batch_size=16, gpu_budget="1MB", max_grad_norm=0)
    rows = [split.rows for split in ranked(job, CPU, machine())]
    assert rows and max(rows) < 16


def test_the_planner_process_writes_the_batch_size_it_measured_into_the_run_folder(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.resolved.write_text(auto_job(tmp_path, train_batch_size=2).resolved_yaml(), "utf-8")
    arguments = ["plan", str(run.path), "--device", "cpu"]
    assert main(arguments) == Exit.DONE
    preview = json.loads(run.plan.read_text("utf-8"))
    assert not preview["measured"] and preview["rows"] == preview["splits"][0]["rows"]
    assert not Job.from_resolved(run.resolved).is_split
    assert main([*arguments, "--measure"]) == Exit.DONE
    decided = Job.from_resolved(run.resolved)
    written = json.loads(run.plan.read_text("utf-8"))
    assert written["measured"] and written["rows"] == decided.slice_rows
    assert {split["rows"] for split in written["splits"]} == {1, 2}
    assert decided.slice_rows * decided.gradient_accumulation_steps == decided.train_batch_size == 2
    assert written["plan"]["slices"] * written["plan"]["rounds"] == decided.gradient_accumulation_steps
    # Planned again, it stays: a run that goes on keeps its batch size.
    assert main(arguments) == Exit.DONE
    assert Job.from_resolved(run.resolved) == decided
    assert json.loads(run.plan.read_text("utf-8"))["splits"] == []


@pytest.mark.parametrize("loss", ["its own", "a mean per slice"])
def test_a_step_that_fits_in_no_split_is_refused_with_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    def skeleton(*args: Any) -> Any:
        model = skeleton_model(*args)
        model.loss_function = a_mean_per_slice
        return model

    if loss != "its own":
        monkeypatch.setattr("planner.measure.analysis.skeleton_model", skeleton)
    job = auto_job(tmp_path, train_batch_size=2, gpu_budget="100kB", bf16=True)
    with pytest.raises(UserError) as refused:
        plan_job(job, CPU, cache=None, measure=False)
    assert (refused.value.code, refused.value.exit_code) == ("budget-too-small", Exit.DOES_NOT_FIT)


def test_a_job_that_does_not_fit_is_told_what_would_with_its_numbers(tmp_path: Path) -> None:
    job = auto_job(tmp_path, train_batch_size=None, per_device_train_batch_size=16, max_length=64)
    one = plan_job(job.model_copy(update={"per_device_train_batch_size": 1}), CPU, cache=None, measure=False)
    tight = job.model_copy(update={"gpu_budget": 2 * one.plan.gpu_peak_bytes})
    with pytest.raises(UserError) as refused:
        plan_job(tight, CPU, cache=None, measure=False)
    assert (refused.value.code, refused.value.hint[:17]) == ("budget-too-small", "give --gpu-budget")
    (way,) = (line for line in refused.value.numbers if line.startswith("fits with the same step in smaller slices: "))
    rows, slices = (int(number) for number in re.findall(r"_(?:size|steps)=(\d+)", way)[:2])
    assert rows * slices == 16
    smaller = tight.model_copy(update={"per_device_train_batch_size": rows, "gradient_accumulation_steps": slices})
    assert plan_job(smaller, CPU, cache=None, measure=False).plan.gpu_peak_bytes <= (tight.gpu_budget or 0)


def test_where_weights_are_in_files_splits_and_ways_to_fit_are_looked_for_with_them_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_llama_folder(tmp_path / "model") / "config.json"
    wide = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "dtype": "float32"}
    (config.parent / "model.safetensors").touch()
    data = write_jsonl(tmp_path / "data.jsonl", sentences(8))
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | wide), "utf-8")
    job = make_job(
        config.parent,
        data,
        method="lora",
        lora_target_modules=["q_proj"],
        max_length=32,
        train_batch_size=2,
        gpu_budget="24MB",
        cpu_budget="24MB",
    )
    traced = analyse(job.with_slices(2), CPU)
    for place in ("whatif.batch_size", "commands.plan_job"):
        monkeypatch.setattr(f"planner.{place}.analyse", lambda *_of, **_keys: traced)
    splits = hopeful(job, CPU, machine())
    assert [split.rows for split in splits] == [2, 1] and all(split.hope_s < math.inf for split in splits)
    assert all(disk_bytes(split.problem.chain) > 0 for split in splits)

    asked: list[Problem] = []

    def no_plan(*_of: object, **_keys: object) -> Plan:
        raise UserError("No.", code="budget-too-small", hint="none", exit_code=Exit.DOES_NOT_FIT)

    def ways(_job: Job, problem: Problem, *_of: object, **_keys: object) -> list[Way]:
        asked.append(problem)
        return []

    monkeypatch.setattr(Problem, "plan", no_plan)  # as where its places lose too much
    monkeypatch.setattr("planner.commands.plan_job.ways_to_fit", ways)
    with pytest.raises(UserError, match="budget-too-small"):
        plan_job(job.with_slices(2), CPU, cache=None, measure=False)
    assert disk_bytes(asked[0].chain) > 0
