"""A job with a stop in the middle beside the same in one go, and what a finished model says. Some tests take seconds:
a model is traced for its plan, and again for its engine."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from planner.errors import Exit, UserError
from planner.measure.repeatable import Kernels, kernels_in_force
from planner.run.ending import exit_code_of
from planner.run.folder import RunFolder
from planner.run.processes import Process
from planner.units import printable
from tests.support.not_repeatable import patch_mlp
from tests.support.runs import make_run
from worker import trainer
from worker.check import verify_resume
from worker.check.__main__ import main
from worker.check.train_until import Until
from worker.check.verify_resume import _to_compare, differences
from worker.engine.engine import Engine
from worker.sample import answers
from worker.sample import main as sample
from worker.storage.checkpoint import read_checkpoint, write_checkpoint
from worker.training.run import run_job
from worker.training.stop import StopRequest
from worker.training.stored import clear_passing, passing_token


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_a_stop_in_the_middle_changes_no_bit_and_what_does_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "worker.check.verify_resume")
    job, run = make_run(tmp_path, "llama", max_steps=5)
    (tmp_path / "job.yaml").write_text(job.resolved_yaml())
    plan = run.plan.read_text()

    def prepare(job: object, runs: tuple[RunFolder, ...], options: argparse.Namespace, kernels: Kernels) -> int:
        for its in runs:  # the plan of a test is at hand
            its.path.mkdir(parents=True)
            its.write_resolved(run.resolved.read_text())
            its.plan.write_text(plan)
        return 4

    def leg(run: RunFolder, until: int, device: str | None, kernels: Kernels) -> None:
        assert main(["train-until", str(run.path), str(until)]) == Exit.STOPPED

    monkeypatch.setattr(verify_resume, "_prepare", prepare)
    monkeypatch.setattr(verify_resume, "_run", leg)
    words = ["verify-resume", str(tmp_path / "job.yaml"), f"--folder={tmp_path / 'both'}", "--steps=4"]
    assert main(words) == Exit.DONE
    said = capsys.readouterr().out
    assert "after step 2 and a new process, are equal in every bit" in said
    assert [record.getMessage() for record in caplog.records if record.name == "worker.check.verify_resume"] == [
        "training steps 1 to 4 in one go",
        "training steps 1 to 2, and a checkpoint",
        "going on from it to step 4, in a new process",
        "comparing the checkpoints of step 4",
    ]
    one, other = (RunFolder(tmp_path / "both" / name) for name in ("in-one-go", "with-a-stop"))
    assert [event["resumed_from"] for event in other.read_metrics() if event["event"] == "start"] == [None, 2]
    assert [event["resumed_from"] for event in one.read_metrics() if event["event"] == "start"] == [None]

    again = [*words, "--json"]
    monkeypatch.setattr(verify_resume, "_prepare", lambda job, runs, options, kernels: 4)
    monkeypatch.setattr(verify_resume, "_run", lambda run, until, device, kernels: None)  # both have done them
    assert main(again) == Exit.DONE
    equal = {"equal": True, "steps": 4, "stopped_after": 2, "differences": [], "deterministic_kernels": False}
    equal |= {"kernels": "deterministic ones only", "refused": []}
    assert json.loads(capsys.readouterr().out) == equal

    found = read_checkpoint(other.checkpoints / "step-4")
    items = [(name, {part: tensor.clone() for part, tensor in parts.items()}) for name, parts in found.tensors()]
    name, parts = items[3]
    parts["exp_avg"].view(torch.int32).view(-1)[0] ^= 1  # the last bit of a number
    write_checkpoint(other.checkpoints, 4, found.origin, "state", items, None)
    assert differences(one, other, 4) == [f"{name}: exp_avg"]
    assert main(again) == Exit.FAILED
    assert json.loads(capsys.readouterr().out) == equal | {"equal": False, "differences": [f"{name}: exp_avg"]}


def in_this_process(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
    """A leg of the comparison, where the test's model is."""
    return subprocess.CompletedProcess(command, main(command[4:]), stdout="")


def test_where_an_operation_refuses_both_runs_begin_once_more_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    patch_mlp(monkeypatch)
    job, run = make_run(tmp_path, "llama", max_steps=4)
    run.plan.write_text(json.dumps(json.loads(run.plan.read_text()) | {"measured": True}))  # nothing is measured first
    (tmp_path / "job.yaml").write_text(job.resolved_yaml())
    monkeypatch.setattr("worker.check.verify_resume.subprocess.run", in_this_process)
    words = [f"--folder={tmp_path / 'both'}", f"--run={run.path}", "--steps=3", "--device=cpu"]
    (tmp_path / "both").mkdir()
    assert main(["verify-resume", str(tmp_path / "job.yaml"), *words]) == Exit.DONE
    said = capsys.readouterr().out
    assert "steps 1 to 3 in one go, and with an end after step 1 and a new process, are equal in every bit" in said
    assert (
        "Kernels: deterministic ones but for put_, which has none and may differ from run to run; attention is "
        "computed by matrix products (SDPBackend.MATH). Those that the job itself takes may differ from run to run.\n"
    ) in said
    (tmp_path / "job.yaml").write_text(job.model_copy(update={"deterministic": True}).resolved_yaml())
    assert main(["verify-resume", str(tmp_path / "job.yaml"), *words]) == Exit.USAGE
    assert "put_ has no deterministic kernel in PyTorch" in capsys.readouterr().err


def test_a_deterministic_job_trains_under_the_strict_mode_and_goes_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    runs: list[RunFolder] = []
    modes: list[str] = []
    own = Engine.step

    def step(self: Engine, *rest: object, **keywords: object) -> object:
        modes.append(kernels_in_force(torch.device("cuda")))
        return own(self, *rest, **keywords)

    monkeypatch.setattr(Engine, "step", step)
    for name, stops in (("in one go", (6,)), ("with a stop", (3, 6))):
        (tmp_path / name).mkdir()
        job, run = make_run(tmp_path / name, "llama", gradient_accumulation_steps=2, max_steps=8, deterministic=True)
        for stop in stops:
            assert trainer._train(run, Until(run, stop)) is Exit.STOPPED
        runs.append(run)
    assert job.deterministic and modes == 12 * ["strict"]
    assert caplog.messages.count("kernels: deterministic ones only, as deterministic: true asks for") == 3
    assert differences(runs[0], runs[1], 6) == []
    patch_mlp(monkeypatch)
    (tmp_path / "refusing").mkdir()
    _, run = make_run(tmp_path / "refusing", "llama", gradient_accumulation_steps=2, max_steps=8, deterministic=True)
    assert exit_code_of(lambda: trainer._train(run, StopRequest()), run) == Exit.USAGE
    told = run.read_error()
    assert told is not None and (told["code"], told["numbers"]) == (
        "not-deterministic",
        ["put_ has no deterministic kernel in PyTorch"],
    )


def test_a_job_that_would_end_early_does_its_steps(tmp_path: Path) -> None:
    keys = {"val_size": 2, "eval_steps": 1, "early_stopping_patience": 1, "early_stopping_threshold": 1e9}
    job, run = make_run(tmp_path, "llama", max_steps=4, **keys)  # its evaluations end it after the second step
    run.write_resolved(_to_compare(job).resolved_yaml())
    assert main(["train-until", str(run.path), "3"]) == Exit.STOPPED


def plain_answer(folder: Path, prompt: str, tokens: int) -> str:
    """What the model there says after the prompt by transformers' own generation."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    asked = tokenizer(prompt, return_tensors="pt")
    found = model.generate(**asked, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return tokenizer.decode(found[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)


def test_a_finished_model_says_what_plain_generation_says_and_another_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, run = make_run(tmp_path, "llama", max_steps=2)
    with pytest.raises(UserError, match="has no model yet"):
        answers(run, ("the",), 5)
    assert run_job(run, StopRequest())
    text = plain_answer(run.output, "the", 5)
    assert answers(run, ("the",), 5, as_text=True) == [text]
    assert sample([str(run.path), "the", "--tokens=5", "--text"]) == Exit.DONE
    assert capsys.readouterr() == (f"{printable(text)}\n", "note: the answer stopped at the limit of --tokens 5\n")
    assert sample([str(run.path), "the", "the", "--tokens=5", "--text"]) == Exit.DONE
    said = "note: answer 1, 2 stopped at the limit of --tokens 5\n"
    assert capsys.readouterr() == (2 * f"> the\n{printable(text)}\n", said)
    assert sample([str(run.path), "the", "--tokens=5", "--text", "--json"]) == Exit.DONE
    assert json.loads(capsys.readouterr().out) == [{"prompt": "the", "answer": text}]
    run.output.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="not where it was"):
        answers(run, ("the",), 5)


def test_states_that_a_killed_process_left_on_disks_go_with_the_next_start(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "600"])
    owner = Process.of(child.pid)
    assert owner is not None
    names = [f"offmate-{passing_token()}", "offmate-passing-mine", "offmate-0123", "passing-1"]
    killed = f"offmate-passing-{str(owner).replace(':', '_')}-{'0' * 16}"
    for name in (*names, killed):
        (tmp_path / name).mkdir()
        (tmp_path / name / "states-1.bin").touch()
    job, _ = make_run(tmp_path, "llama")
    job = job.model_copy(update={"disk_paths": (str(tmp_path), str(tmp_path / "gone"))})
    clear_passing(job)
    assert (tmp_path / killed).exists(), "its process lives"
    child.kill()
    child.wait()
    clear_passing(job)
    assert not (tmp_path / killed).exists()
    assert all((tmp_path / name / "states-1.bin").exists() for name in names)
