"""The example job, and the budget it is given. Some tests take seconds: each start of the real planner or trainer
imports PyTorch."""

from __future__ import annotations

import json
import runpy
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from planner.commands.plan_job import plan_job
from planner.job.schema import Job
from planner.measure.analysis import analyse, estimate_times
from planner.measure.gpu_card import workspace_bytes
from planner.measure.machine_rates import estimate_hardware
from planner.models.tokenizer import load_tokenizer
from planner.run.folder import RunFolder
from planner.search.problem import Problem
from tests import ROOT
from worker.data.batches import Batches
from worker.training.run import run_job
from worker.training.stop import StopRequest


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """examples/pydoc.yaml with its data and model, below a folder of its own."""
    folder = tmp_path_factory.mktemp("example")
    runpy.run_path(str(ROOT / "examples" / "pydoc.py"))["prepare"](folder / ".demo" / "pydoc")
    (folder / "examples").mkdir()
    (folder / "examples" / "pydoc.yaml").write_text((ROOT / "examples" / "pydoc.yaml").read_text())
    return folder / "examples" / "pydoc.yaml"


def test_the_example_is_full_fine_tuning_of_200_steps_or_more(prepared: Path) -> None:
    job = Job.load(prepared)
    assert job.method == "full"
    assert job.max_steps is not None and job.max_steps >= 200
    assert [note.split()[-3:] for note in job.notes] == [["under", "seed", "0."]]


def test_its_text_is_what_cpython_ships_and_its_tokenizer_gives_it_back(prepared: Path) -> None:
    job = Job.load(prepared)
    rows = [json.loads(line)["text"] for line in Path(job.dataset[0]).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(job.tokenizer)
    encoded = tokenizer(rows)["input_ids"]
    assert sum("lambda_expr" in row for row in rows) >= 1
    assert tokenizer.decode(encoded[0]) == rows[0]
    assert sum(len(ids) for ids in encoded) / len(rows) > job.max_length / 2, "rows are mostly padding"


def test_preparing_twice_gives_the_same_files(prepared: Path, tmp_path: Path) -> None:
    runpy.run_path(str(ROOT / "examples" / "pydoc.py"))["prepare"](tmp_path)
    for file in ("text.jsonl", "model/config.json", "model/tokenizer.json"):
        first = prepared.parent.parent / ".demo" / "pydoc" / file
        assert (tmp_path / file).read_bytes() == first.read_bytes(), file


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """What examples/plain_pytorch.py has."""
    return runpy.run_path(str(ROOT / "examples" / "plain_pytorch.py"))


def test_its_budget_is_40_percent_of_what_plain_pytorch_needs(prepared: Path, plain: dict[str, Any]) -> None:
    job = Job.load(prepared)
    peak_bytes = plain["train"](job, Batches(job, load_tokenizer(job)), "cpu").peak_bytes
    assert job.gpu_budget is not None
    assert 0.39 <= job.gpu_budget / peak_bytes <= 0.41, f"plain PyTorch needs {peak_bytes} bytes"


def test_the_demo_shows_plain_pytorchs_losses_beside_those_of_a_run_and_says_how_equal_they_are(
    prepared: Path, plain: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job.load(prepared).model_copy(update={"max_steps": plain["STEPS"]})
    folder = RunFolder(tmp_path)
    folder.resolved.write_text(job.resolved_yaml())
    folder.write_plan(plan_job(job, torch.device("cpu"), cache=None, measure=False).to_json())
    assert run_job(folder, StopRequest())
    capsys.readouterr()
    batches = Batches(job, load_tokenizer(job))
    learned, run = plain["train"](job, batches, "cpu"), plain["of_run"](folder.path)
    plain["compare"](learned, run, job, "cpu")
    said = capsys.readouterr().out
    assert f"loss, step 1   {learned.losses[0]:.7f}      {run.losses[0]:.7f}" in said
    assert "Losses: those of all 12 steps are equal, in every bit." in said
    other = run._replace(losses=[*run.losses[:-1], run.losses[-1] * (1 + 1e-5)])
    plain["compare"](learned, other, job, "cpu")
    assert "Losses: those of 12 steps differ by up to 1.0e-05 of their value." in capsys.readouterr().out


@pytest.mark.parametrize("bf16", [True, False])
def test_half_its_budget_is_enough_on_a_card_whose_matrix_products_would_keep_32_mib_a_thread(
    prepared: Path, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job.load(prepared).model_copy(update={"bf16": bf16})
    analysis = analyse(job, torch.device("cpu"))
    hardware = estimate_hardware(torch.device("cpu"))
    times = estimate_times(analysis, hardware)

    def least_bytes() -> int:
        chain = replace(analysis, workspace_bytes=workspace_bytes(torch.device("cuda"))).chain(times)
        return (
            Problem(
                chain=chain,
                hardware=hardware,
                gpu_budget_bytes=0,
                cpu_budget_bytes=hardware.cpu_bytes,
                slices=job.gradient_accumulation_steps,
                clip=False,
            )
            .least()
            .gpu_bytes
        )

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert job.gpu_budget is not None
    assert least_bytes() > 0.7 * job.gpu_budget  # with one slice at a time, and no room for another choice
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", _exported("CUBLAS_WORKSPACE_CONFIG"))
    assert least_bytes() < 0.5 * job.gpu_budget


def _exported(name: str) -> str:
    """What examples/demo.sh hands to its daemon where nothing is set."""
    line = next(line for line in (ROOT / "examples" / "demo.sh").read_text().splitlines() if f"export {name}" in line)
    return subprocess.run(
        ["sh", "-c", f'unset {name}; {line}; printf %s "${name}"'], capture_output=True, text=True
    ).stdout


def test_its_file_says_where_the_budget_comes_from() -> None:
    text = (ROOT / "examples" / "pydoc.yaml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("gpu_budget"))
    assert "examples/plain_pytorch.py" in line
    assert yaml.safe_load(text)["gpu_budget"] in line
