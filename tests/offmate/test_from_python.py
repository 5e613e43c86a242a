"""What `import offmate` gives. Each question about a job starts processes that import PyTorch, which takes seconds: so
few are asked."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict
from enum import StrEnum
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from torch import nn

import offmate
from offmate.questions import _source
from offmated.version import release
from planner.keys.source import read_yaml
from planner.run.processes import Process
from planner.schedule.plan import Stage
from tests import ROOT
from tests.support.daemons import until
from tests.support.texts import sentences, tiny_llama_folder, write_jsonl
from tests.support.tiny_models import batch_of, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, its data, and a job file that names both."""
    folder = tmp_path_factory.mktemp("job")
    tiny_llama_folder(folder / "model")
    write_jsonl(folder / "data.jsonl", sentences(9))
    keys = {
        "model": "./model",
        "dataset": "data.jsonl",
        "max_length": 32,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(keys))
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder that all tests share, so that a model is traced once."""
    path = tmp_path_factory.getbasetemp() / "home"
    monkeypatch.setenv("OFFMATE_HOME", str(path))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(path / "datasets"))
    return path


def test_all_public_names_are_there_documented_and_found_by_dir() -> None:
    for name in offmate.__all__:
        assert getattr(offmate, name) is not None
        assert name in dir(offmate)
    assert all(getattr(offmate, name).__doc__ for name in offmate.__all__ if name != "__version__")
    assert offmate.__version__ == release()
    with pytest.raises(AttributeError, match="has no attribute 'Plan'"):
        offmate.Plan  # noqa: B018


def test_a_plan_for_a_card_says_what_a_step_takes(folder: Path) -> None:
    plan = offmate.plan(folder / "job.yaml", hardware="rtx3060")
    assert plan.fits
    assert not plan.why_not
    assert plan.hardware.startswith("GeForce RTX 3060")
    assert (plan.rows, plan.micro_batches, plan.tokens_per_step) == (2, 2, 2 * 2 * 32)
    assert plan.step_s >= plan.bound_s > 0
    assert plan.tokens_per_s == pytest.approx(plan.tokens_per_step / plan.step_s)
    assert 0 < plan.gpu_bytes <= plan.gpu_budget_bytes < 12 * 2**30
    assert len(plan.options) == 5  # embedding, three layers, head
    assert [str(Stage.parse(line)) for line in plan.stages] == list(plan.stages)
    assert [line.split()[0] for line in plan.stages] == ["F0", "F1", "F2", "F3", "H4", "B3", "B2", "B1", "B0"]
    json.dumps(asdict(plan))
    with pytest.raises(FrozenInstanceError):
        plan.fits = False  # type: ignore[misc]


def test_a_plan_for_this_machine_is_for_rows_as_long_as_the_data(folder: Path) -> None:
    plan = offmate.plan(str(folder / "job.yaml"))
    assert plan.fits
    assert not plan.measured
    assert plan.hardware.startswith("cpu") or plan.gpu_budget_bytes > 0
    assert any("the longest row of data.jsonl has" in note for note in plan.notes)


def test_what_does_not_fit_is_an_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    job = {"model": Path("model"), "dataset": ["data.jsonl"], "max_length": 32, "gpu_budget": "20KB"}
    plan = offmate.plan(job, hardware="rtx3060")
    assert not plan.fits
    assert "the budget is 19.5 KiB" in plan.why_not
    assert (plan.gpu_budget_bytes, plan.step_s, plan.stages) == (20_000, 0.0, ())


def test_mistakes_are_errors_with_their_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(offmate.UserError) as raised:
        offmate.plan({"model": "model", "datset": "data.jsonl", "run_name": "1e5"})
    assert raised.value.code == "bad-job"
    assert raised.value.what == "The job has 2 mistakes."  # the name is none, though its text reads as a number
    assert raised.value.hint.startswith("correct the job and try again")
    assert (
        "datset: unknown key; did you mean dataset?" in raised.value.numbers
    )  # without a line of a text that is no file
    with pytest.raises(offmate.UserError) as raised:
        offmate.plan("job.yaml", hardware="rtx31")
    assert raised.value.code == "unknown-hardware"
    with pytest.raises(offmate.UserError) as raised:
        offmate.plan({"model": "model", "chat_template": "x" * 300_000}, hardware="rtx3060")
    assert raised.value.code == "file-too-long"
    assert raised.value.hint.startswith("give a file's path in place of a long text")


@pytest.mark.parametrize(
    "job",
    [
        {"model": object()},
        {"model": "m", "dataset": {1, 2}},
        {"model": b"m"},
        {"dataset": [{"path": range(2)}]},
        {1: "m"},
        {"dataset": {(1, 2): "m"}},
    ],
)
def test_values_that_a_job_file_cannot_hold_are_type_errors(job: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=r"in a job|a job's"):
        offmate.plan(job, hardware="rtx3060")


def test_arguments_that_cannot_be_meant_are_value_errors() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        offmate.certify("job.yaml", steps=0)
    with pytest.raises(ValueError, match="device is 'tpu'; it must be 'cpu' or 'cuda'"):
        offmate.certify("job.yaml", device="tpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hardware is empty"):
        offmate.plan("job.yaml", hardware="")


def test_a_mapping_reaches_the_reader_of_job_files_unchanged() -> None:
    class Name(StrEnum):
        MEMBER = "1e5"

    texts = ["1e5", "1e-4", "1.e3", "010", "1:30", "no", "null", "~", "", " a ", "2026-01-02", ".inf", "<<", "# a"]
    texts += ["a\nb\r\n\tc\n", "quotes \" and \\ '", "é 漢 😀 \x7f \x85 \xa0 \u2028 \ufeff \0", "a word " * 5000]
    numbers = [0, -7, 10**20, 1e5, 1e-5, 1e300, 0.1, -0.0, math.inf, True, None]
    pairs = {text: text for text in texts}
    job = {"run_name": Name.MEMBER, "texts": texts, "numbers": numbers, "pairs": pairs, "8": {8: 9}}
    source = read_yaml(_source(job)["text"], "The job")
    assert source.values == job
    assert list(map(repr, source.values["numbers"])) == list(map(repr, numbers))


def test_the_error_on_another_system_names_what_works_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.errors.IS_LINUX", False)
    with pytest.raises(offmate.UserError) as raised:
        offmate.plan("job.yaml")
    assert "explain" in raised.value.hint
    assert "in Python offmate.plan with hardware" in raised.value.hint


def test_a_crash_of_the_process_that_answers_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "sitecustomize.py").write_text("import os\nos.write(2, b'last words')\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # Python runs that file first
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    with pytest.raises(RuntimeError, match="exit code -6:\nlast words"):
        offmate.plan("job.yaml", hardware="rtx3060")
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_the_process_that_answers_ends_with_its_caller(name: str, folder: Path, home: Path, tmp_path: Path) -> None:
    home.mkdir(exist_ok=True)
    keys = yaml.safe_load((folder / "job.yaml").read_text()) | {"max_steps": 100_000}
    (folder / "long.yaml").write_text(yaml.safe_dump(keys))
    code = f"import offmate; offmate.certify({str(folder / 'long.yaml')!r}, steps=100_000, device='cpu')"
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=variables, stderr=subprocess.DEVNULL) as caller:
        until(lambda: list(home.glob(".certify-*")), "it computes")
        (child,) = psutil.Process(caller.pid).children()
        assert "offmate.child" in child.cmdline()
        process = Process.of(child.pid)
        assert process is not None
        caller.send_signal(getattr(signal, name))
    until(lambda: not process.alive(), "the process ends", patience_s=20)
    assert not list(home.glob(".certify-*"))
    assert not list(tmp_path.glob("offmate-*"))


def test_a_certificate_is_that_of_the_job(folder: Path, home: Path) -> None:
    certificate = offmate.certify(folder / "job.yaml", steps=1, device="cpu")
    assert certificate.bitwise
    assert certificate.holds
    assert (certificate.steps, certificate.slices, certificate.layers) == (1, 2, 3)
    assert [finding.what for finding in certificate.findings] == ["losses", "gradient norms", "parameters", "moments"]
    assert not list(home.glob(".certify-*"))


def test_prepare_trains_with_the_losses_of_plain_pytorch() -> None:
    def losses(step: Callable[[dict[str, torch.Tensor], nn.Module], torch.Tensor], model: nn.Module) -> list[float]:
        return [float(step(batch_of(seed), model)) for seed in range(2)]

    plain = make_model("llama", dropout=0.0)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)

    def plain_step(batch: dict[str, torch.Tensor], model: nn.Module) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    expected = losses(plain_step, plain)
    model = make_model("llama", dropout=0.0)
    engine = offmate.prepare(
        model,
        batch_of(0),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        gpu_budget="1MB",
        device="cpu",
        measure=False,
    )
    assert isinstance(engine, offmate.Engine)
    assert losses(lambda batch, _: engine.step(batch), model) == expected
    assert engine.restore() is model
