"""From a job to plan.json: estimates, measurements, the cache, and the planner process around them. Some tests take
seconds: each process that they start imports PyTorch."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import create_engine, text

from planner.__main__ import main
from planner.cache.store import Cache
from planner.cache.tables import metadata
from planner.codec import from_json
from planner.commands.plan_job import plan_job
from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.measure.analysis import analyse, measure_times
from planner.measure.machine_rates import measure_hardware
from planner.measure.repeatable import Kernels, kernels_in_force
from planner.schedule.chain import Chain
from planner.schedule.compile import compile_program
from planner.schedule.memory_use import gpu_peak_bytes
from planner.schedule.plan import Plan
from planner.search.problem import Problem
from tests.support.analyses import analyse_once
from tests.support.disks import small_disk
from tests.support.not_repeatable import patch_mlp
from tests.support.texts import make_job, sentences, tiny_llama_folder, write_jsonl

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    analyse_once(monkeypatch)
    monkeypatch.setattr("planner.commands.plan_job.measure_hardware", measured_machine)


@pytest.fixture
def database(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'offmate.db'}"
    metadata.create_all(create_engine(url))
    return url


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return tiny_job(tmp_path)


def tiny_job(folder: Path, **keys: Any) -> Job:
    model = tiny_llama_folder(folder / "model")
    data = write_jsonl(folder / "data.jsonl", sentences(8))
    return make_job(model, data, **{"max_length": 32, "gpu_budget": "2MB", "gradient_accumulation_steps": 2, **keys})


def run_folder(folder: Path, job: Job) -> Path:
    run = folder / "run"
    run.mkdir()
    (run / "resolved.yaml").write_text(job.resolved_yaml(), "utf-8")
    return run


def no_solving(*_arguments: object, **_keywords: object) -> Plan:
    raise AssertionError("a plan was solved that should have been found")


measured_machine = functools.cache(measure_hardware)


def no_measuring(*_arguments: object, **_keywords: object) -> Any:
    raise AssertionError("something was measured that should have been found")


def test_the_second_submission_of_a_job_solves_nothing(
    job: Job, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = plan_job(job, CPU, cache=Cache(database), measure=False)
    assert not first.cached and not first.measured and first.solve_s > 0
    monkeypatch.setattr(Problem, "plan", no_solving)
    second = plan_job(job, CPU, cache=Cache(database), measure=False)
    assert second.cached and second.solve_s == 0
    assert (second.plan, second.chain, second.key) == (first.plan, first.chain, first.key)
    assert Cache(database).hits(first.key) == 1


def test_a_plan_whose_weights_are_in_files_is_found_for_no_model_whose_are_not(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "model" / "config.json"
    config.parent.mkdir()
    (config.parent / "model.safetensors").touch()
    job = tiny_job(tmp_path, method="lora", lora_target_modules=["q_proj"], gpu_budget="1GB")
    traced = analyse(job, CPU)  # of one architecture, and so the same for all
    monkeypatch.setattr("planner.commands.plan_job.analyse", lambda *_args, **_keywords: traced)
    cached = []
    for published in ("float32", "bfloat16", "float32"):  # as it is used; in another dtype
        config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | {"dtype": published}), "utf-8")
        cached.append(plan_job(job, CPU, cache=Cache(database), measure=False).cached)
    assert cached == [False, False, True]


def test_what_was_measured_once_is_used_from_then_on(job: Job, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(database)
    measured = plan_job(job, CPU, cache=cache, measure=True)
    assert measured.measured and not measured.cached
    monkeypatch.setattr("planner.commands.plan_job.measure_times", no_measuring)
    monkeypatch.setattr("planner.commands.plan_job.measure_hardware", no_measuring)
    # The same question: its final plan is there, without asking for a measurement too.
    assert plan_job(job, CPU, cache=cache, measure=True).plan == measured.plan
    assert plan_job(job, CPU, cache=cache, measure=False).plan == measured.plan
    # Another budget: another plan, final because the measurement is there.
    other = plan_job(job.model_copy(update={"gpu_budget": 3_000_000}), CPU, cache=cache, measure=False)
    assert other.measured and not other.cached
    assert other.hardware == measured.hardware


def test_an_estimate_does_not_stand_in_for_a_measurement(job: Job, database: str) -> None:
    cache = Cache(database)
    estimate = plan_job(job, CPU, cache=cache, measure=False)
    final = plan_job(job, CPU, cache=cache, measure=True)
    assert not estimate.measured
    assert final.measured and not final.cached
    assert final.key != estimate.key


def outdate(database: str, table: str) -> None:
    """Every row of the table as another version of the planner might have written it."""
    with create_engine(database).begin() as connection:
        for number, document in connection.execute(text(f"select id, document from {table}")).all():
            changed = json.loads(document)
            changed["hardware"]["of_another_version"] = 1
            values = {"id": number, "document": json.dumps(changed)}
            connection.execute(text(f"update {table} set document = :document where id = :id"), values)


def test_what_another_version_kept_is_made_anew_and_replaced(job: Job, database: str) -> None:
    first = plan_job(job, CPU, cache=Cache(database), measure=True)
    outdate(database, "plans")
    again = plan_job(job, CPU, cache=Cache(database), measure=False)
    assert again.measured and not again.cached and again.hardware == first.hardware
    outdate(database, "plans")
    outdate(database, "measurements")
    assert not plan_job(job, CPU, cache=Cache(database), measure=False).measured
    assert not plan_job(job, CPU, cache=Cache(database), measure=True).cached
    assert plan_job(job, CPU, cache=Cache(database), measure=False).cached


def test_a_plan_that_is_forgotten_takes_its_measurement_with_it(job: Job, database: str) -> None:
    cache = Cache(database)
    first = plan_job(job, CPU, cache=cache, measure=True)
    other = plan_job(job.model_copy(update={"gpu_budget": 3_000_000}), CPU, cache=cache, measure=False)
    assert other.measurement == first.measurement is not None
    cache.forget_plan(first.key)
    assert cache.find_measurement(first.measurement) is None
    assert not plan_job(job, CPU, cache=cache, measure=False).measured


def test_with_a_measurement_all_plans_that_rest_on_it_are_forgotten(job: Job, database: str) -> None:
    cache = Cache(database)
    first = plan_job(job, CPU, cache=cache, measure=True)
    plan_job(job.model_copy(update={"gpu_budget": 3_000_000}), CPU, cache=cache, measure=False)
    estimate = plan_job(job.model_copy(update={"max_length": 16}), CPU, cache=cache, measure=False)
    assert first.measurement is not None and estimate.measurement is None
    cache.forget_measurement(first.measurement)
    assert [kept.key for kept in cache.plans()] == [estimate.key]
    assert not plan_job(job, CPU, cache=cache, measure=False).measured


def test_all_plans_forgotten_are_all_measurements_forgotten(job: Job, database: str) -> None:
    cache = Cache(database)
    plan_job(job, CPU, cache=cache, measure=True)
    assert cache.forget_plans() == 1
    assert not plan_job(job, CPU, cache=cache, measure=False).measured


def test_without_a_database_a_plan_is_made_every_time(job: Job) -> None:
    answers = [plan_job(job, CPU, cache=None, measure=False) for _ in range(2)]
    assert not any(answer.cached for answer in answers)
    assert answers[0].plan == answers[1].plan


def test_the_process_writes_the_plan_and_prints_it_without_its_chain(job: Job, database: str, tmp_path: Path) -> None:
    run = run_folder(tmp_path, job)
    command = [sys.executable, "-m", "planner", "plan", str(run), "--database", database, "--device", "cpu"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == Exit.DONE, process.stderr
    written = json.loads((run / "plan.json").read_text("utf-8"))
    lines = process.stdout.splitlines()
    assert len(lines) == 1
    assert json.loads(lines[0]) == {name: value for name, value in written.items() if name != "chain"}
    known = "format plan rows length label_length chain hardware measured cached solve_s key measurement splits disk"
    assert set(written) == {*known.split(), "kernels"}
    assert written["format"] == 1
    plan, chain = from_json(Plan, written["plan"]), from_json(Chain, written["chain"])
    assert gpu_peak_bytes(compile_program(plan, chain), chain) == plan.gpu_peak_bytes <= job.gpu_budget
    assert not (run / "error.json").exists()


def test_what_the_planner_notes_of_a_job_goes_to_its_log_and_what_libraries_note_does_not() -> None:
    code = (
        "import logging; from planner.__main__ import _log_to_the_job; _log_to_the_job();"
        "[logging.getLogger(name).info('of %s', name) for name in ('planner.commands.plan_job', 'httpx')]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [line.split(maxsplit=1)[1] for line in done.stderr.splitlines()] == ["of planner.commands.plan_job"]


def test_a_job_that_does_not_fit_leaves_its_error_and_a_budget_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tiny_job(tmp_path, gpu_budget="50kB")
    run = run_folder(tmp_path, job)
    assert main(["plan", str(run), "--device", "cpu"]) == Exit.DOES_NOT_FIT
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("No schedule fits this memory budget.\n  budget 48.8 KiB, least possible ")
    error = json.loads((run / "error.json").read_text("utf-8"))
    assert set(error) == {"what", "numbers", "hint", "code", "exit_code"}
    assert (error["code"], error["exit_code"]) == ("budget-too-small", 3)
    assert not (run / "plan.json").exists()
    budget = error["hint"].rpartition(" ")[2]
    (run / "resolved.yaml").write_text(tiny_job(tmp_path, gpu_budget=budget).resolved_yaml(), "utf-8")
    assert main(["plan", str(run), "--device", "cpu"]) == Exit.DONE
    assert not (run / "error.json").exists()


def test_a_job_whose_disk_has_no_room_for_its_model_is_told_with_its_first_plan(tmp_path: Path) -> None:
    job = tiny_job(tmp_path)
    with small_disk(8 * 2**20) as disk:
        run = run_folder(disk, job)
        assert main(["plan", str(run), "--device", "cpu"]) == Exit.FAILED
        error = json.loads((run / "error.json").read_text("utf-8"))
        assert (error["code"], (run / "plan.json").exists()) == ("disk-full", False)
        elsewhere = job.model_copy(update={"output_dir": str(disk / "out")})
        other = run_folder(tmp_path, elsewhere)
        assert main(["plan", str(other), "--device", "cpu"]) == Exit.FAILED
        error = json.loads((other / "error.json").read_text("utf-8"))
        assert error["what"] == f"The disk of the output folder {disk}/out has no room for the trained model."
        assert [path.name for path in disk.iterdir()] == ["run"]


def test_a_job_file_is_planned_without_a_run_folder(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(job.resolved_yaml(), "utf-8")
    before = sorted(tmp_path.iterdir())
    assert main(["plan", "--job", str(file), "--device", "cpu"]) == Exit.DONE
    *told, answer = map(json.loads, capsys.readouterr().out.splitlines())
    assert told == [{"doing": "reading the model"}, {"doing": "solving"}]
    assert from_json(Plan, answer["plan"]).slices == 2
    assert sorted(tmp_path.iterdir()) == before


def test_a_wrong_job_file_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("modle: x\n", "utf-8")
    assert main(["plan", "--job", str(file)]) == Exit.USAGE
    assert "modle" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(job.resolved_yaml(), "utf-8")
    assert main(["plan", "--job", str(file), "--device", "cuda"]) == Exit.USAGE
    assert "[no-cuda]" in capsys.readouterr().err


def test_a_budget_below_the_least_possible_raises_for_callers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError) as refused:
        plan_job(tiny_job(tmp_path, gpu_budget=1024), CPU, cache=None, measure=False)
    assert refused.value.exit_code == Exit.DOES_NOT_FIT


def test_a_job_that_asks_for_deterministic_kernels_is_measured_in_them(
    job: Job, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was measured in others is not taken for it, on a device where they differ."""
    own, strict = Cache(database), job.model_copy(update={"deterministic": True})
    monkeypatch.setattr("planner.commands.plan_job.kernels_in_force", lambda device: kernels_in_force(CUDA))
    measured: list[str] = []

    def measure(*arguments: Any, **keywords: Any) -> Any:
        measured.append(kernels_in_force(CUDA))
        return measure_times(*arguments, **keywords)

    monkeypatch.setattr("planner.commands.plan_job.measure_times", measure)
    answers = [plan_job(its, CPU, cache=own, measure=True) for its in (job, strict, job, strict)]
    assert measured == ["", "strict"]
    assert [answer.cached for answer in answers] == [False, False, True, True]
    assert [answer.to_json()["kernels"] for answer in answers] == ["", "strict", "", "strict"]
    assert answers[0].measurement != answers[1].measurement and answers[0].key != answers[1].key
    with Kernels().taken():  # as a certificate of the job has them
        assert plan_job(job, CPU, cache=own, measure=True).key == answers[1].key
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_job_whose_model_has_no_deterministic_kernels_is_refused_as_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_mlp(monkeypatch)
    job = tiny_job(tmp_path, max_length=20)  # no other test has traced it
    strict = job.model_copy(update={"deterministic": True})
    with pytest.raises(UserError, match="put_ has no deterministic kernel in PyTorch") as told:
        plan_job(strict, CPU, cache=None, measure=True)
    assert (told.value.code, told.value.exit_code) == ("not-deterministic", Exit.USAGE)
    assert plan_job(job, CPU, cache=None, measure=True).measured
