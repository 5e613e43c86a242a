"""Planning beside a job that runs: a GPU is not touched, and what is free at the moment decides nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from sqlalchemy import create_engine

from planner.cache.store import Cache
from planner.cache.tables import metadata
from planner.commands.plan_job import plan_job
from planner.errors import Exit, UserError
from planner.machine.presets import preset, usable_gpu_bytes
from planner.machine.this_machine import Card, check_budgets, device_bytes, parse_card, ram_bytes
from planner.measure.gpu_card import ask_card, estimate_card
from planner.measure.target import find_target
from tests.support.analyses import analyse_once
from tests.support.texts import make_job, sentences, tiny_llama_folder, write_jsonl

GIB = 2**30
CARD = Card(name="NVIDIA GeForce RTX 3060", memory_bytes=12 * GIB)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    analyse_once(monkeypatch)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a card, whatever this one has."""
    monkeypatch.setattr("planner.measure.target.ask_card", lambda: CARD)


def test_the_drivers_line_is_read() -> None:
    assert parse_card("12288, NVIDIA GeForce RTX 3060\n") == CARD


@pytest.mark.parametrize("text", ["", "No devices were found\n", "[N/A], NVIDIA Thing\n", "12288\n"])
def test_other_lines_are_no_card(text: str) -> None:
    with pytest.raises(ValueError, match="not a card"):
        parse_card(text)


def test_the_drivers_tool_is_asked_for_the_card_that_cuda_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_keywords: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, "12288, NVIDIA GeForce RTX 3060\n", "")

    monkeypatch.setattr("planner.machine.this_machine.subprocess.run", run)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert ask_card() == CARD
    assert asked[0][0] == "nvidia-smi"
    assert "--id=2" in asked[0]


def test_a_known_card_has_its_makers_rates() -> None:
    machine = estimate_card(CARD, torch.bfloat16)
    known = preset("rtx3060", bf16=True)
    assert (machine.flops_per_s, machine.h2d_bytes_per_s) == (known.flops_per_s, known.h2d_bytes_per_s)
    assert machine.name.startswith("NVIDIA GeForce RTX 3060 on ")
    assert machine.cpu_bytes < ram_bytes()


@pytest.mark.parametrize(("gib", "name"), [(10, "rtx3080"), (12, "rtx3080-12gb")])
def test_cards_of_one_name_are_told_apart_by_their_memory(gib: int, name: str) -> None:
    machine = estimate_card(Card(name="NVIDIA GeForce RTX 3080", memory_bytes=gib * GIB), torch.bfloat16)
    assert machine.gpu_update_parameters_per_s == preset(name, bf16=True).gpu_update_parameters_per_s


def test_an_unknown_card_has_modest_rates_and_its_own_memory() -> None:
    machine = estimate_card(Card(name="NVIDIA Z1", memory_bytes=10 * GIB), torch.float32)
    assert machine.gpu_bytes == usable_gpu_bytes(10 * GIB)
    assert machine.flops_per_s < preset("rtx3060", bf16=False).flops_per_s


@pytest.mark.usefixtures("card")
def test_at_submission_the_default_budget_is_the_cards_memory_less_a_reserve() -> None:
    target = find_target(CUDA, torch.float32, measure=False)
    assert (target.device, target.final) == (CPU, False)
    assert target.machine.gpu_bytes == usable_gpu_bytes(12 * GIB)


def test_on_the_cpu_a_plan_may_be_final_and_the_budget_is_bounded_by_the_hosts_memory() -> None:
    target = find_target(CPU, torch.float32, measure=False)
    assert (target.device, target.final, target.gpu_bytes) == (CPU, True, ram_bytes())


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("keys", [{}, {"gpu_budget": "6MB"}], ids=str)
def test_on_a_gpu_a_plan_at_submission_is_an_estimate_and_makes_no_context(
    tmp_path: Path, keys: dict[str, object]
) -> None:
    url = f"sqlite:///{tmp_path / 'offmate.db'}"
    metadata.create_all(create_engine(url))
    job = make_job(
        tiny_llama_folder(tmp_path / "model"), write_jsonl(tmp_path / "data.jsonl", sentences(8)), max_length=32, **keys
    )
    touched = torch.cuda.is_initialized()
    first, second = (plan_job(job, CUDA, cache=Cache(url), measure=False) for _ in range(2))
    assert not first.measured and not second.measured
    assert second.cached and second.plan == first.plan
    assert first.plan.gpu_budget_bytes == (job.gpu_budget or usable_gpu_bytes(12 * GIB))
    assert torch.cuda.is_initialized() == touched


@pytest.mark.parametrize(
    ("gpu", "cpu", "number"),
    [
        (12 * GIB + 1, None, "gpu_budget 12.1 GiB, the device has 12.0 GiB"),
        (8 * GIB, 33 * GIB, "cpu_budget 33.0 GiB, the host has 32.0 GiB"),
    ],
)
def test_a_budget_beyond_the_machine_is_refused_with_both_numbers(gpu: int, cpu: int | None, number: str) -> None:
    with pytest.raises(UserError) as refused:
        check_budgets(gpu, cpu, gpu_bytes=12 * GIB, ram_bytes=32 * GIB)
    assert (refused.value.code, refused.value.exit_code) == ("budget-too-large", Exit.USAGE)
    assert refused.value.numbers == (number,)


@pytest.mark.parametrize(("gpu", "cpu"), [(None, None), (12 * GIB, 32 * GIB)])
def test_a_budget_of_all_there_is_is_taken(gpu: int | None, cpu: int | None) -> None:
    check_budgets(gpu, cpu, gpu_bytes=12 * GIB, ram_bytes=32 * GIB)


def test_the_devices_memory_is_known_without_torch_where_the_driver_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("planner.machine.this_machine.driver_card", lambda: CARD)
    assert device_bytes() == 12 * GIB
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_bytes() == ram_bytes()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("planner.machine.this_machine.driver_card", lambda: parse_card("no devices"))
    monkeypatch.setattr("planner.machine.this_machine._GPU_DEVICES", (str(tmp_path),))
    assert device_bytes() is None
    monkeypatch.setattr("planner.machine.this_machine._GPU_DEVICES", (str(tmp_path / "none"),))
    assert device_bytes() == ram_bytes()


def test_a_job_with_a_budget_beyond_the_hosts_memory_is_not_planned(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", sentences(8))
    job = make_job(tiny_llama_folder(tmp_path / "model"), data, max_length=32, gpu_budget=ram_bytes() + 1)
    with pytest.raises(UserError) as refused:
        plan_job(job, CPU, cache=None, measure=False)
    assert refused.value.code == "budget-too-large"
