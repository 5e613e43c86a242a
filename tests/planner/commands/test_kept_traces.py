"""Traces of models that are kept in files: equal to a new trace, for any machine, and without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from planner.commands import kept_traces
from planner.commands.kept_traces import Traces
from planner.job.schema import Job
from planner.machine.presets import preset
from planner.measure.analysis import analyse, estimate_times
from planner.whatif import trace
from planner.whatif.trace import traced
from planner.whatif.traced import Traced

SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
MACHINES = [preset(name, bf16=True) for name in ("rtx3060", "rtx4090")]


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., Job]:
    LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2).save_pretrained(tmp_path / "model")

    def job(**keys: object) -> Job:
        asked = {"model": str(tmp_path / "model"), "max_length": 64, "bf16": True} | keys
        return Job.question(json.dumps(asked), tmp_path)

    return job


@pytest.mark.parametrize("keys", [{}, {"optim": "muon"}, {"method": "lora", "load_in_4bit": True}])
def test_a_trace_gives_the_chain_of_any_machine_exactly(ask: Callable[..., Job], keys: dict[str, object]) -> None:
    job = ask(**keys)
    analysis = analyse(job, torch.device("cpu"), for_gpu=True)
    found = traced(job, MACHINES[0])
    for machine in MACHINES:
        assert found.chain_on(machine) == analysis.chain(estimate_times(analysis, machine))


def test_a_kept_trace_serves_other_machines_budgets_and_slices_and_no_other_model(
    ask: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Job] = []

    def counted(job: Job, *arguments: object, **named: object) -> Traced:
        made.append(job)
        return traced(job, *arguments, **named)

    monkeypatch.setattr(trace, "traced", counted)
    folder = tmp_path / "kept" / "traces"
    first = Traces(folder).of(ask(gradient_accumulation_steps=4), MACHINES[0])
    same = ask(gradient_accumulation_steps=8, gpu_budget="1GiB", cpu_budget="2GiB")
    assert Traces(folder).of(same, MACHINES[1]) == first
    assert len(made) == 1 and folder.stat().st_mode & 0o777 == 0o700
    others = [ask(gradient_accumulation_steps=1), ask(max_length=32), ask(exact=False), ask(method="lora")]
    for number, other in enumerate(others, start=2):
        Traces(folder).of(other, MACHINES[0])
        assert len(made) == number
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 2'))
    changed = Traces(folder).of(ask(gradient_accumulation_steps=4), MACHINES[0])
    assert len(made) == len(others) + 2
    assert (len(first.chain.blocks), len(changed.chain.blocks)) == (5, 4)


def test_a_broken_file_is_made_anew_and_the_oldest_give_way(
    ask: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_traces, "_MOST", 2)
    found = Traces(tmp_path / "traces").of(ask(), MACHINES[0])
    (file,) = (tmp_path / "traces").iterdir()
    file.write_text(file.read_text()[:100])
    assert Traces(tmp_path / "traces").of(ask(), MACHINES[0]) == found
    assert json.loads(file.read_text())["by_slice"] is False
    os.utime(file, (0, 0))
    for length in (16, 32):
        Traces(tmp_path / "traces").of(ask(max_length=length), MACHINES[0])
    assert len(list((tmp_path / "traces").iterdir())) == 2 and not file.exists()


def test_where_nothing_can_be_kept_the_question_is_answered_all_the_same(
    ask: Callable[..., Job], tmp_path: Path
) -> None:
    (tmp_path / "a file").touch()
    found = Traces(tmp_path / "a file" / "traces").of(ask(), MACHINES[0])
    assert replace(found, notes=()) == replace(Traces().of(ask(), MACHINES[0]), notes=())


def test_a_second_question_about_a_model_is_answered_without_torch(ask: Callable[..., Job], tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(ask(gradient_accumulation_steps=2).resolved_yaml())
    code = (
        "import sys; from planner.__main__ import main; code = main(sys.argv[1:]); "
        "print(code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    ends = []
    for machine in ("rtx4090", "rtx3060"):
        words = ["ask", f"--job={file}", f"--hardware={machine}", f"--traces={tmp_path / 'traces'}"]
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
        *told, answer, end = done.stdout.splitlines()
        assert json.loads(answer)["status"] == "optimal"
        assert [json.loads(line) for line in told][:2] == [{"doing": "reading the model"}, {"doing": "solving"}]
        assert json.loads(told[2])["so_far"]["step_s"] == json.loads(answer)["step_s"]
        ends.append(end)
    assert ends == ["0 True True", "0 False False"]
