"""A small job through every real part: command line, daemon, broker, planner, trainer, model folder. Some tests take
seconds: each start of the real planner or trainer imports PyTorch."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from offmated.cli import main
from tests import ROOT

COMMAND = [sys.executable, "-P", "-c", "from offmated.cli import main; main(prog_name='offmate')"]
JOB = """
model: model
dataset: text.jsonl
run_name: small
max_length: 64
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
max_steps: 4
learning_rate: 1e-3
max_grad_norm: 0
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with the example's text and tokenizer, a model of two small layers, and a daemon on its state folder."""
    folder = Path(tempfile.mkdtemp(prefix="offmate-"))  # sockets have short paths
    runpy.run_path(str(ROOT / "examples" / "pydoc.py"))["prepare"](folder)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    ).save_pretrained(folder / "model")
    (folder / "job.yaml").write_text(JOB)
    yield folder
    offmate(folder, "down")
    shutil.rmtree(folder)


def offmate(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`offmate words…` in the folder."""
    environment = {**os.environ, "OFFMATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*COMMAND, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def within(folder: Path, *words: str) -> Result:
    """The same in this process, for what a command says by itself: `test_cli.py` runs the program."""
    with chdir(folder):
        return CliRunner().invoke(main, words, prog_name="offmate", env={"OFFMATE_HOME": str(folder / "state")})


def answer(folder: Path, *words: str) -> Any:
    """What `offmate words… --json` says."""
    done = offmate(folder, *words, "--json")
    assert done.returncode == 0, done.stderr + offmate(folder, "logs", "1").stdout
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def job(folder: Path) -> dict[str, Any]:
    """The job, run to its end by `offmate run`, which starts the daemon."""
    found: dict[str, Any] = answer(folder, "run", "job.yaml")
    return found


def test_run_ends_with_a_model_folder_that_transformers_loads(job: dict[str, Any]) -> None:
    assert (job["state"], job["progress"]["step"], job["exit_code"]) == ("done", 4, 0)
    model = AutoModelForCausalLM.from_pretrained(job["output"])
    assert model.config.num_hidden_layers == 2
    tokenizer = AutoTokenizer.from_pretrained(job["output"])
    assert tokenizer.decode(tokenizer("The with statement")["input_ids"]) == "The with statement"


def test_show_has_predicted_and_measured_step_time_and_peak(job: dict[str, Any], folder: Path) -> None:
    shown = json.loads(within(folder, "show", str(job["id"]), "--json").stdout)
    assert shown["predicted"]["step_s"] > 0 and shown["measured"]["step_s"] > 0
    assert 0 < shown["measured"]["gpu_peak_bytes"] <= shown["predicted"]["gpu_peak_bytes"]
    assert shown["plan_document"]["measured"] is True
    text = within(folder, "show", str(job["id"])).stdout
    assert "step time" in text and "GPU peak" in text and "blocks" in text


def test_a_submitted_job_is_certified_under_its_own_plan(job: dict[str, Any], folder: Path) -> None:
    number = str(job["id"])
    plan = json.loads(within(folder, "show", number, "--json").stdout)["plan_document"]["plan"]
    found = answer(folder, "certify", number, "--steps", "1")
    assert found["decided"] and found["options"] == plan["options"]
    assert found["gpu_peak_bytes"] == plan["gpu_peak_bytes"]
    assert all(one["equal"] == one["count"] for one in found["findings"])
    other = within(folder, "certify", number, "--gpu-budget", "1GiB")
    assert other.exit_code == 2
    assert other.stderr.splitlines()[0] == f"Job {number} is taken as it was submitted, with its plan."


def test_a_second_submission_of_the_same_job_solves_nothing(job: dict[str, Any], folder: Path) -> None:
    again = answer(folder, "run", "job.yaml")
    assert again["id"] > job["id"]
    assert again["plan"]["cached"] is True
    assert again["progress"]["loss"] == job["progress"]["loss"]


def test_settings_stand_above_the_file_in_submissions_and_previews(job: dict[str, Any], folder: Path) -> None:
    submitted = within(folder, "submit", "job.yaml", "--hold", "--set", "max_steps=2", "--set", "seed=7", "--json")
    found = json.loads(submitted.stdout)
    assert found["notes"][:2] == ["--set max_steps=2, in place of the file's 4", "--set seed=7"]
    kept = (Path(found["run_dir"]) / "job.yaml").read_text()
    assert kept == JOB.replace("max_steps: 4", "max_steps: 2") + "seed: 7\n"
    changes = ("--set", "max_length=32", "--set", "run_name=a b")
    said = offmate(folder, "preview", "job.yaml", "--rows", "0", *changes).stdout
    assert "tokens in all, max_length 32\n" in said
    assert said.endswith("offmate plan job.yaml --set max_length=32 --set 'run_name=a b'\n")
    for command in ("submit", "preview", "certify", "verify-resume"):
        wrong = within(folder, command, "job.yaml", "--set", "max_step=2")
        assert wrong.exit_code == 2
        assert "--set max_step: unknown key; did you mean max_steps?" in wrong.stderr


@pytest.mark.parametrize("command", ["plan", "run"])
def test_what_cannot_fit_exits_with_3_and_names_the_least_budget(
    command: str, job: dict[str, Any], folder: Path
) -> None:
    done = offmate(folder, command, "job.yaml", "--gpu-budget", "64KiB")
    assert done.returncode == 3, done.stderr
    assert "budget-too-small" in done.stderr + done.stdout
