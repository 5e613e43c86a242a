"""A question about several machines, or about several amounts of GPU memory. Tests take seconds: they solve the integer
programs of a model for each of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from rich.console import Console
from transformers import LlamaConfig

from offmated.cli.several_view import several
from planner.codec import to_json
from planner.commands.kept_traces import Traces
from planner.commands.several import _never_slower, compare, frontier
from planner.job.schema import Job
from planner.machine.presets import preset
from planner.picture.frontier import frontier_page
from planner.reports.receipt import Receipt


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    tmp_path = tmp_path_factory.mktemp("job")
    config = LlamaConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4
    )
    config.save_pretrained(tmp_path / "model")
    keys = {"model": str(tmp_path / "model"), "max_length": 512, "bf16": True, "gradient_accumulation_steps": 2}
    return Job.question(json.dumps(keys), tmp_path)


@pytest.fixture(scope="module")
def traces() -> Traces:
    return Traces()


def printed(receipts: list[Receipt], *, frontier: bool) -> list[str]:
    console = Console(width=1000, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(several([json.loads(json.dumps(to_json(each))) for each in receipts], frontier=frontier))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_machines_are_compared_in_one_table_and_what_does_not_fit_says_what_it_needs(job: Job, traces: Traces) -> None:
    machines = [preset(name, bf16=True) for name in ("rtx3060", "rtx4090")]
    receipts = compare(job, machines, traces=traces)
    assert [receipt.hardware for receipt in receipts] == machines
    assert receipts[0].step_s > receipts[1].step_s > 0
    question, _, head, *lines = printed(receipts, frontier=False)
    assert question.startswith("model (") and "GeForce" not in question
    assert head.split() == [
        "MACHINE",
        "GPU",
        "HOST",
        "STEP",
        "TOKENS/S",
        "PLAN",
        "GPU",
        "PEAK",
        "HOST",
        "PEAK",
        "LIMIT",
    ]
    assert [line.split("  ")[0] for line in lines] == ["GeForce RTX 3060 12 GB", "GeForce RTX 4090"]
    tight = compare(job.model_copy(update={"gpu_budget": 2**20}), machines[:1], traces=traces)
    assert tight[0].status == "infeasible" and tight[0].fits_with == ()
    assert re.search(r"does not fit +needs [0-9.]+ MiB of GPU memory", printed(tight, frontier=False)[-1])


def test_the_step_over_gpu_memory_goes_from_the_least_budget_to_the_whole(job: Job, traces: Traces) -> None:
    machine = preset("rtx3060", bf16=True)
    whole = job.model_copy(update={"gpu_budget": 2**29})
    receipts = frontier(whole, machine, traces=traces)
    budgets = [receipt.gpu_budget_bytes for receipt in receipts]
    assert budgets == sorted(set(budgets)) and budgets[-1] == 2**29 and len(budgets) >= 3
    assert budgets[0] == receipts[-1].least_gpu_budget_bytes
    assert all(0 < receipt.gpu_peak_bytes <= receipt.gpu_budget_bytes for receipt in receipts)
    assert len(printed(receipts, frontier=True)) == 3 + len(receipts)
    assert [r.step_s for r in receipts] == sorted((r.step_s for r in receipts), reverse=True)
    slow_end = [*receipts[:-1], replace(receipts[-1], step_s=2 * receipts[0].step_s)]
    assert _never_slower(slow_end)[-1].step_s == receipts[-2].step_s
    assert _never_slower(slow_end)[-1].gpu_budget_bytes == 2**29
    page = frontier_page(receipts, title="a <model>")
    assert page.count("<circle") == len(receipts) and "<h1>a &lt;model&gt;</h1>" in page
    nothing = frontier(job.model_copy(update={"gpu_budget": 2**20}), machine, traces=traces)
    assert [receipt.status for receipt in nothing] == ["infeasible"]
    assert "does not fit" in printed(nothing, frontier=True)[-1]
