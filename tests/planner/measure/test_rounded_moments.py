"""A job with moments in 8 bits, as it is planned: which tensors have them, their bytes, and the time of updates."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from planner.codec import from_json, to_json
from planner.cpu.eight_bits import moment_bytes
from planner.job.room import checkpoint_bytes
from planner.job.schema import Job
from planner.machine.presets import preset
from planner.measure.analysis import describe, estimate_times
from planner.measure.machine_rates import measure_hardware
from planner.optimizers.adamw_8bit import AdamW8bit
from planner.optimizers.base import Rates
from planner.optimizers.table import ADAMW
from planner.schedule.chain import Chain, Tensor
from planner.schedule.compile import OpKind, compile_program
from planner.schedule.memory_use import cpu_peak_bytes
from planner.schedule.simulate import durations_s
from planner.whatif.trace import problem_of, traced
from planner.whatif.ways_to_fit import ways_to_fit
from tests.support.analyses import analyse_once, analysed_once
from tests.support.tiny_models import config_of

CPU = torch.device("cpu")
EIGHT = AdamW8bit()
MACHINE = replace(preset("rtx3060", bf16=True), min_transfer_bytes=0)


@pytest.fixture(autouse=True)
def one_analysis(monkeypatch):
    analyse_once(monkeypatch)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config_of("llama", width=64, layers=2).save_pretrained(folder)
    return Job(
        model=str(folder),
        tokenizer=str(folder),
        dataset=("none",),
        bf16=True,
        max_length=16,
        per_device_train_batch_size=1,
        optim="adamw_8bit",
    )


@pytest.fixture(scope="module")
def chain(job):
    analysis = analysed_once(job, CPU)
    return analysis.chain(estimate_times(analysis, MACHINE))


def exact(job):
    return job.model_copy(update={"optim": "adamw_torch"})


def test_large_trained_tensors_have_them_but_no_embedding(chain):
    tensors = {t.name: t for t in (*chain.tensors(), *chain.frame_tensors)}
    assert {name for name, t in tensors.items() if t.optimizer != EIGHT} == {
        name for name, t in tensors.items() if t.elements < 4096 or name == "model.embed_tokens.weight"
    }
    up = tensors["model.layers.0.mlp.up_proj.weight"]
    assert up.optimizer == EIGHT and up.has_master
    assert up.state_bytes == up.elements * (4 + 2 + 2 * 4 / 256) == sum(up.state_sizes)
    assert (up.shared_bytes, up.host_gradient_bytes(1), up.host_gradient_bytes(2)) == (0, 0, up.gradient_bytes)
    assert tensors["model.embed_tokens.weight"].state_bytes == 12 * tensors["model.embed_tokens.weight"].elements
    assert from_json(Chain, to_json(chain)) == chain


def test_frozen_tensors_have_none_and_fp32_ones_have_no_master():
    weight = torch.nn.Parameter(torch.empty(64, 128, device="meta"))
    frozen, trained = (describe("w", weight, trained=trained, optimizers={"w": EIGHT}) for trained in (False, True))
    assert (frozen.optimizer, frozen.state_bytes, frozen.has_master) == (ADAMW, 0, False)
    assert (trained.optimizer, trained.state_sizes, trained.has_master) == (EIGHT, (8192 + 128,) * 2, False)


def test_sizes_that_are_not_theirs_are_no_tensor_and_disks_have_none():
    sizes = {"name": "w", "elements": 512, "bytes": 1024, "gradient_bytes": 1024, "optimizer": EIGHT}
    assert Tensor(**sizes, state_bytes=2048 + 2 * 520).state_sizes == (520, 520, 2048)
    with pytest.raises(ValueError, match="cannot have 6144 bytes"):
        Tensor(**sizes, state_bytes=6144)
    with pytest.raises(ValueError, match="or on disk"):
        Tensor(**sizes, state_bytes=2048 + 2 * 520, states_on_disk=True)


def test_updates_take_the_time_of_such_ones_wherever_they_are(job, chain):
    fast = replace(MACHINE, gpu_update_parameters_per_s=1e9, cpu_update_parameters_per_s=1e8)
    known = replace(fast, gpu_rounded_update_parameters_per_s=4e8, cpu_rounded_update_parameters_per_s=3e7)
    assert EIGHT.rates(fast) == Rates(gpu=2e8, cpu=5e7)  # as long as not measured
    assert ADAMW.rates(known) == Rates(gpu=1e9, cpu=1e8)
    plan = problem_of(job, known, CPU).plan()
    program = compile_program(plan, chain)
    rates = {OpKind.UPDATE: 4e8, OpKind.CPU_UPDATE: 3e7}
    elements = {t.name: t.elements for t in (*chain.tensors(), *chain.frame_tensors)}
    seen = 0
    for op, seconds in zip(program.ops, durations_s(program, chain, known), strict=True):
        if op.kind in rates:
            assert seconds == pytest.approx(sum(elements[name] for name in op.names) / rates[op.kind])
            seen += 1
    assert seen


def test_a_host_that_is_too_small_for_fp32_states_has_room_for_these_and_is_told_so(job):
    problems = {each.optim: problem_of(each, MACHINE, CPU) for each in (exact(job), job)}
    pressed = int(1.02 * max(problem.least_bytes() for problem in problems.values()))
    problems = {optim: replace(problem, gpu_budget_bytes=pressed) for optim, problem in problems.items()}
    needs = {optim: cpu_peak_bytes(problem.plan(), problem.chain) for optim, problem in problems.items()}
    assert needs["adamw_8bit"] < 0.7 * needs["adamw_torch"]
    room = int(1.1 * needs["adamw_8bit"])
    full, fits = (replace(problem, cpu_budget_bytes=room) for problem in problems.values())
    assert not full.fits() and fits.fits()
    for each, told in ((exact(job), True), (job, False)):
        ways = [way.text for way in ways_to_fit(each, full, partial(traced, hardware=full.hardware), runs=True)]
        assert ("AdamW's moments in 8 bits, rounded" in ways) == told


def test_rates_are_measured_where_they_matter():
    found = measure_hardware(CPU, torch.bfloat16, optimizer=EIGHT)
    assert 0 < found.cpu_rounded_update_parameters_per_s <= found.cpu_update_parameters_per_s
    assert found.gpu_rounded_update_parameters_per_s == found.cpu_rounded_update_parameters_per_s


def test_a_checkpoint_has_a_byte_each(job, chain):
    tensors = (*chain.tensors(), *chain.frame_tensors)
    moments = sum(2 * moment_bytes(t.elements) if t.optimizer == EIGHT else 8 * t.elements for t in tensors)
    assert chain.saved_bytes == moments + 4 * sum(t.elements for t in tensors)
    assert checkpoint_bytes(job, chain.saved_bytes) == chain.saved_bytes + 2**20


def test_a_question_about_such_a_job_is_another_one(job, tmp_path):
    folder = job.model
    asked = {
        optim: Job.question(f"model: {folder}\noptim: {optim}\n", tmp_path)
        for optim in ("adamw_8bit", "adamw_bnb_8bit", "adamw_torch", "adamw_torch_fused")
    }
    assert asked["adamw_torch"] == asked["adamw_torch_fused"] != asked["adamw_8bit"] == asked["adamw_bnb_8bit"]
