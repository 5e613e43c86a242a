"""The job files in examples/jobs: each fits its card, and its first lines say what its plan says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks import examples
from planner.commands.kept_traces import Traces
from planner.job.schema import Job
from tests.support.texts import write_jsonl

FILES = sorted(examples.FOLDER.glob("*.yaml"))
WIDEST = [
    "qwen3-4b-rtx3060",
    *(f"{name}-rtx5090" for name in ("qwen3-8b", "llama-3.1-8b", "mistral-nemo-12b", "gpt-oss-20b")),
]
"""Of each model that a file trains by LoRA because nothing else fits, the machine with the most memory."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    examples.write_models(folder)
    return folder


@pytest.fixture(scope="module")
def traces() -> Traces:
    """Kept for all tests of this file: files of one model and method share a trace."""
    return Traces()


def test_there_are_six_models_on_three_cards() -> None:
    assert {examples.card_of(file) for file in FILES} == {"rtx3060", "rtx4090", "rtx5090"}
    named = {line for file in FILES for line in file.read_text().splitlines() if line.startswith("model: ")}
    assert {line.removeprefix("model: ") for line in named} == set(examples.MODELS)
    assert len(FILES) == len(named) * 3 == 18


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_is_a_short_job_for_data_beside_it(file: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copy(file, tmp_path / file.name))
    write_jsonl(tmp_path / "data.jsonl", [{"text": "some text"}])
    job = Job.load(copied)
    assert job.dataset == (str(tmp_path / "data.jsonl"),)
    assert not [line for line in file.read_text().splitlines() if len(line) > 120]
    assert 6 <= len(file.read_text().splitlines()) <= 12


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_fits_its_card_and_says_what_its_plan_says(file: Path, models: Path, traces: Traces) -> None:
    said = examples.Figures.read(file)
    receipt = examples.planned(file, models, traces)
    assert receipt.status in ("optimal", "feasible")
    found = examples.Figures.of(receipt, said.ram)
    for name in ("step_s", "tokens_per_s", "gpu_gib", "host_gib"):
        assert getattr(said, name) == pytest.approx(getattr(found, name), rel=0.02, abs=0.05), name
    assert said.minutes == pytest.approx(found.minutes, rel=0.02, abs=0.05)


@pytest.mark.parametrize("name", WIDEST)
def test_full_fine_tuning_does_not_fit_where_a_file_says_so(name: str, models: Path, traces: Traces) -> None:
    file = examples.FOLDER / f"{name}.yaml"
    assert "full fine-tuning does not fit" in file.read_text()
    receipt = examples.planned(file, models, traces, settings=["method=full"])
    assert receipt.status == "infeasible"
    assert receipt.least_cpu_budget_bytes is None or receipt.least_cpu_budget_bytes > receipt.cpu_budget_bytes
