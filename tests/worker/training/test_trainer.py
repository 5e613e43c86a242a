"""The trainer as a process, with the real engine under a plan that mixes options and both update sides. Some tests
take seconds: each process that they start imports PyTorch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from planner.codec import to_json
from planner.errors import Exit
from planner.job.output_dir import delivered
from planner.job.schema import Job
from planner.measure.machine_rates import estimate_hardware
from planner.models.tokenizer import load_tokenizer
from planner.optimizers.adamw import AdamWGroup
from planner.run.folder import RunFolder
from tests.support.engine_plans import mixed_plan
from tests.support.plain_engine import PlainEngine
from tests.support.runs import chain_of_job
from tests.support.texts import make_job, sentences, tiny_llama_folder, write_jsonl
from worker import sample
from worker.data.batches import Batches
from worker.data.seeds import micro_batch_seed
from worker.training.learning_rate import decay_names, learning_rate
from worker.training.metrics import read_metrics
from worker.training.model import load_model
from worker.training.run import run_job
from worker.training.stop import StopRequest

STEPS = 16
PATIENCE_S = 300.0


def tiny_job(folder: Path, **keys: object) -> Job:
    small = {
        "max_length": 32,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "max_steps": STEPS,
        "save_steps": 4,
    }
    data = write_jsonl(folder / "data.jsonl", sentences(20))
    return make_job(tiny_llama_folder(folder / "model"), data, **{**small, **keys})


def make_run(folder: Path, job: Job) -> Path:
    """A run folder as the planner leaves it."""
    folder.mkdir()
    (folder / "resolved.yaml").write_text(job.resolved_yaml(), "utf-8")
    chain = chain_of_job(job)
    plan = mixed_plan(chain, slices=job.gradient_accumulation_steps, clip=job.max_grad_norm is not None)
    parts = {"plan": plan, "chain": chain, "hardware": estimate_hardware(torch.device("cpu"))}
    found = {name: to_json(part) for name, part in parts.items()}
    (folder / "plan.json").write_text(json.dumps({"format": 1, **found}))
    return folder


def start(run: Path, *arguments: str, held_at: int | None = None) -> subprocess.Popen[str]:
    """The trainer's process; with `held_at` it stands still after that step until `go_on`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(run.parent / "hf"), "HF_HUB_OFFLINE": "1"}
    program = ["-m", "worker.trainer"] if held_at is None else ["-m", "tests.support.fakes.held_trainer", str(held_at)]
    with (run / "log.txt").open("a") as log:
        return subprocess.Popen(
            [sys.executable, *program, *(arguments or (str(run),))],
            cwd=run,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.close()


def finish(run: Path) -> int:
    return start(run).wait(PATIENCE_S)


def said(run: Path) -> str:
    return (run / "log.txt").read_text("utf-8")


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not any(event["step"] >= step for event in steps(run)):
        assert process.poll() is None, said(run)
        assert time.monotonic() < deadline, said(run)
        time.sleep(0.005)


def steps(run: Path) -> list[dict[str, Any]]:
    return [event for event in read_metrics(run / "metrics.jsonl") if event["event"] == "step"]


def losses(run: Path) -> list[object]:
    return [event["loss"] for event in steps(run)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a job that nobody disturbed."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole")
    run = make_run(folder / "run", tiny_job(folder))
    assert finish(run) == Exit.DONE, said(run)
    return run


@pytest.fixture
def run(tmp_path: Path, whole: Path) -> Path:
    """A run folder of the same job, about to start."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("resolved.yaml", "plan.json"):
        (folder / name).write_bytes((whole / name).read_bytes())
    return folder


def test_a_job_ends_with_the_weights_and_losses_of_plain_pytorch(whole: Path) -> None:
    job = Job.from_resolved(whole / "resolved.yaml")
    model = load_model(job)
    batches = Batches(job, load_tokenizer(job), whole / "data")
    optimizer = AdamWGroup(
        betas=(job.adam_beta1, job.adam_beta2),
        eps=job.adam_epsilon,
        weight_decay=job.weight_decay,
        decay_names=decay_names(model),
    )
    plain = PlainEngine(model, optimizer=optimizer, max_grad_norm=job.max_grad_norm)
    plain_losses = []
    for step in range(STEPS):
        data = batches.step(step)
        result = plain.step(
            data,
            seeds=[micro_batch_seed(job.seed, step, k) for k in range(3)],
            learning_rate=learning_rate(job, step, STEPS),
            num_items_in_batch=torch.tensor(batches.num_items(data)),
        )
        plain_losses.append(float(torch.stack(result.losses).sum()))
    assert losses(whole) == plain_losses
    assert differing(weights(whole / "output"), dict(model.named_parameters())) == []


def test_the_log_says_when_checkpoints_come_and_what_they_take(whole: Path) -> None:
    assert re.search(r"checkpoints: every 4 steps or 15 minutes, [\d.]+ MiB each; the last 2 are kept", said(whole))


def test_the_model_folder_generates_with_its_own_tokenizer(whole: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(whole / "output")
    tokenizer = AutoTokenizer.from_pretrained(whole / "output")
    inputs = tokenizer("the quick", return_tensors="pt")
    text = tokenizer.decode(model.generate(**inputs, max_new_tokens=5, do_sample=False)[0])
    assert text.startswith("the quick")
    assert len(text) > len("the quick")


def test_the_metrics_tell_the_run_from_start_to_end(whole: Path) -> None:
    events = read_metrics(whole / "metrics.jsonl")
    first, last = events[0], events[-1]
    assert {**first, "time": 0} == {
        "event": "start",
        "time": 0,
        "step": 0,
        "total_steps": STEPS,
        "resumed_from": None,
        "device": "cpu",
    }
    assert [event["step"] for event in steps(whole)] == list(range(1, STEPS + 1))
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [4, 8, 12]
    assert (last["event"], last["step"], last["status"]) == ("end", STEPS, "done")
    assert last["output"] == str(whole / "output")
    assert last["step_s"] > 0
    assert {"predicted_step_s", "predicted_gpu_peak_bytes"} <= last.keys()
    assert losses(whole)[-1] < losses(whole)[0]


def test_the_device_is_metered_in_the_first_steps(whole: Path) -> None:
    peaks = [event["gpu_peak_bytes"] for event in steps(whole)]
    assert all(isinstance(peak, int) for peak in peaks[:2])
    assert peaks[2:] == [None] * (STEPS - 2)


def test_the_log_shows_what_is_learned(whole: Path) -> None:
    assert "⟦" in said(whole)
    assert "has no weights; starting from random ones" in said(whole)


def test_sigterm_ends_the_step_and_writes_a_checkpoint_to_go_on_from(run: Path, whole: Path) -> None:
    process = start(run, held_at=3)
    wait_for_step(run, 3, process)
    process.send_signal(signal.SIGTERM)
    go_on(process)
    assert process.wait(PATIENCE_S) == Exit.STOPPED, said(run)
    end = read_metrics(run / "metrics.jsonl")[-1]
    assert (end["event"], end["status"], end["step"]) == ("end", "stopped", 3)
    assert (run / "checkpoints" / "step-3" / "manifest.json").exists()
    assert run_job(RunFolder(run), StopRequest())  # in this process, which has torch loaded already
    assert read_metrics(run / "metrics.jsonl")[-1]["status"] == "done"
    starts = [event["resumed_from"] for event in read_metrics(run / "metrics.jsonl") if event["event"] == "start"]
    assert starts == [None, 3]
    assert losses(run) == losses(whole)
    assert differing(weights(run / "output"), weights(whole / "output")) == []


def test_noise_in_what_is_only_told_keeps_no_run_from_going_on(run: Path, whole: Path) -> None:
    process = start(run, held_at=6)
    wait_for_step(run, 6, process)
    process.kill()
    process.wait(PATIENCE_S)
    for name in ("timeline.json", "packages.json", "error.json", "first_notes.json", "notches.json"):
        (run / name).write_bytes(bytes(512))
    first, *rest = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    noise = b"noise\n" + bytes(300) + b"\n" + b'{"event": "step", "step": NaN}\n' + "\u00fc\n".encode("latin-1")
    (run / "metrics.jsonl").write_bytes(first + noise + b"".join(rest) + bytes(80))
    assert finish(run) == Exit.DONE, said(run)
    assert "going on from step 4" in said(run)
    assert said(run).count("metrics.jsonl: line 2 is no event, nor are 3 more, and passed over") == 1
    assert losses(run) == losses(whole)
    assert differing(weights(run / "output"), weights(whole / "output")) == []
    (run / "metrics.jsonl").write_bytes(bytes(512) + b"\n")  # what it said of its end, too
    assert delivered(None, run / "output", RunFolder(run).token()) == run / "output"
    assert sample.main([str(run), "the quick", "--tokens", "2"]) == Exit.DONE


def test_after_a_kill_between_checkpoints_the_run_ends_as_if_nothing_had_happened(run: Path, whole: Path) -> None:
    process = start(run, held_at=6)
    wait_for_step(run, 6, process)
    process.kill()
    process.wait(PATIENCE_S)
    assert finish(run) == Exit.DONE, said(run)
    assert "going on from step 4" in said(run)
    assert losses(run) == losses(whole)
    assert differing(weights(run / "output"), weights(whole / "output")) == []


def test_a_second_sigterm_ends_the_process_without_a_checkpoint(tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    job = Job.from_resolved(whole / "resolved.yaml").model_copy(update={"save_steps": 10**6, "max_steps": 10**6})
    (run / "resolved.yaml").write_text(job.resolved_yaml(), "utf-8")
    (run / "plan.json").write_bytes((whole / "plan.json").read_bytes())
    process = start(run)
    wait_for_step(run, 3, process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    code = process.wait(PATIENCE_S)
    # Two signals at once may arrive as one; the first alone is a stop with a checkpoint.
    checkpoints = list((run / "checkpoints").glob("step-*"))
    assert (code, bool(checkpoints)) in ((-signal.SIGTERM, False), (Exit.STOPPED, True)), said(run)


def test_a_run_whose_model_is_there_is_done_whatever_comes_as_it_ends(run: Path) -> None:
    process = start(run, held_at=0)
    deadline = time.monotonic() + PATIENCE_S
    while "the trainer ends" not in said(run):
        assert process.poll() is None and time.monotonic() < deadline, said(run)
        time.sleep(0.005)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
    go_on(process)
    assert process.wait(PATIENCE_S) == Exit.DONE, said(run)


def test_an_error_a_person_can_act_on_goes_to_the_log_and_to_error_json_without_a_traceback(
    run: Path, whole: Path, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "bad.jsonl", [{"question": "a"}])
    job = Job.from_resolved(whole / "resolved.yaml").model_copy(update={"dataset": (str(tmp_path / "bad.jsonl"),)})
    (run / "resolved.yaml").write_text(job.resolved_yaml(), "utf-8")
    assert finish(run) == Exit.USAGE
    assert json.loads((run / "error.json").read_text()) == {
        "what": "The columns of bad.jsonl are not a format that is known.",
        "numbers": [
            "found: question",
            "known: text | messages | conversations | prompt, completion | instruction, (input,) output | segments | "
            "input_ids, (labels) | (prompt,) chosen, rejected | prompt, completion, label",
        ],
        "hint": "name them in the entry, such as type: instructions, columns: {instruction: question, output: answer}, "
        "or rename them",
        "code": "unknown-columns",
        "exit_code": 2,
    }
    assert "[unknown-columns]" in said(run)
    assert "Traceback" not in said(run)


def test_data_that_would_steer_a_terminal_stand_in_the_log_without_what_does(
    run: Path, whole: Path, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "evil.jsonl", [{"text": "\x1b]0;owned\x07\rone two three\x9b2J"}] * 4)
    changed = {"dataset": (str(tmp_path / "evil.jsonl"),), "max_steps": 1}
    job = Job.from_resolved(whole / "resolved.yaml").model_copy(update=changed)
    (run / "resolved.yaml").write_text(job.resolved_yaml(), "utf-8")
    assert finish(run) == Exit.DONE, said(run)
    assert "]0;owned��one two three" in said(run)
    assert all(c.isprintable() or c in "\n\t" for c in (run / "log.txt").read_bytes().decode())


def test_without_a_run_folder_the_usage_is_shown(run: Path) -> None:
    assert start(run, "/nowhere").wait(PATIENCE_S) == Exit.USAGE
    assert "usage: python -m worker.trainer RUN_DIR" in said(run)
