"""A job with Muon, as it is planned: which tensors are matrices, their bytes, and the time of updates."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from planner.codec import from_json, to_json
from planner.job.schema import Job
from planner.machine.presets import preset
from planner.measure.analysis import estimate_times
from planner.measure.times import Times, UpdateTimes
from planner.measure.updates import estimate_updates, measure_updates
from planner.optimizers import muon
from planner.optimizers.muon import Muon, flops
from planner.schedule.chain import Chain, Tensor
from planner.schedule.compile import OpKind, compile_program
from planner.schedule.memory_use import cpu_parts, products_bytes
from planner.schedule.simulate import durations_s
from planner.schedule.timeless import without_times
from planner.whatif.trace import problem_of
from tests.support.analyses import analyse_once, analysed_once
from tests.support.tiny_models import config_of

CPU = torch.device("cpu")
MACHINE = replace(preset("rtx3060", bf16=True), min_transfer_bytes=0)


def is_matrix(tensor):
    return isinstance(tensor.optimizer, Muon)


def updates_of(shapes):
    return tuple(UpdateTimes(optimizer=Muon(shorter_side=side), elements=elements) for side, elements in shapes)


def slower_on_the_device(its):
    return replace(its, optimizer=its.optimizer.timed(gpu_s=2 * its.optimizer.gpu_s, cpu_s=its.optimizer.cpu_s))


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
        optim="muon",
    )


@pytest.fixture(scope="module")
def times_and_chain(job):
    analysis = analysed_once(job, CPU)
    times = estimate_times(analysis, MACHINE)
    return times, analysis.chain(times)


@pytest.fixture
def chain(times_and_chain):
    return times_and_chain[1]


def test_matrices_of_layers_have_a_momentum_and_nothing_else_has(chain):
    tensors = {t.name: t for t in (*chain.tensors(), *chain.frame_tensors)}
    assert {name for name, t in tensors.items() if is_matrix(t)} == {name for name in tensors if "proj" in name}
    up = tensors["model.layers.0.mlp.up_proj.weight"]
    assert (up.optimizer.shorter_side, up.has_master, up.storable) == (64, True, False)
    assert up.state_sizes == (4 * up.elements,) * 2
    assert (up.shared_bytes, up.host_gradient_bytes(1), up.host_gradient_bytes(2)) == (0, 0, up.gradient_bytes)
    assert tensors["model.norm.weight"].state_bytes == 12 * tensors["model.norm.weight"].elements
    matrices = sum(t.elements for t in tensors.values() if is_matrix(t))
    assert chain.saved_bytes == 12 * sum(t.elements for t in tensors.values()) - 4 * matrices


def test_sizes_that_are_not_theirs_are_no_tensor_and_disks_have_none():
    sizes = {"name": "w", "elements": 512, "bytes": 1024, "gradient_bytes": 1024, "optimizer": Muon(shorter_side=16)}
    assert Tensor(**sizes, state_bytes=4096).has_master
    with pytest.raises(ValueError, match="cannot have 6144 bytes"):
        Tensor(**sizes, state_bytes=6144)
    with pytest.raises(ValueError, match="or on disk"):
        Tensor(**sizes, state_bytes=4096, states_on_disk=True)


def test_times_are_those_of_each_shape_and_no_part_of_what_is_asked(times_and_chain):
    times, chain = times_and_chain
    assert from_json(Times, to_json(times)) == times and from_json(Chain, to_json(chain)) == chain
    assert all(is_matrix(t) == (t.optimizer.gpu_s > 0) == (t.optimizer.cpu_s > 0) for t in chain.tensors())
    other = replace(times, updates=tuple(map(slower_on_the_device, times.updates)))
    (block, *_), (slower, *_) = (
        [replace(b, tensors=tuple(map(t.of_update, b.tensors))) for b in chain.blocks[1:]] for t in (times, other)
    )
    assert block != slower
    blocks = (chain.blocks[0], slower, *chain.blocks[2:])
    assert without_times(replace(chain, blocks=blocks)) == without_times(chain)
    with pytest.raises(KeyError, match="no times of an update of"):
        replace(times, updates=()).of_update(slower.tensors[0])


def test_an_estimate_is_of_arithmetic_and_a_measurement_of_the_very_update():
    shapes = ((8, 8 * 64), (4096, 4096 * 14336))
    small, large = (its.optimizer for its in estimate_updates(updates_of(shapes), MACHINE))
    assert small.gpu_s == small.cpu_s == pytest.approx(150e-6)
    assert flops(*shapes[1]) / MACHINE.flops_per_s < large.gpu_s < 2 * flops(*shapes[1]) / MACHINE.flops_per_s
    assert large.cpu_s > 20 * large.gpu_s
    (measured,) = measure_updates(updates_of(shapes[:1]), CPU, MACHINE)
    assert 0 < measured.optimizer.gpu_s == measured.optimizer.cpu_s
    assert (measured.optimizer.shorter_side, measured.elements) == shapes[0]


def test_a_matrix_that_takes_long_is_measured_by_a_smaller_one(monkeypatch):
    monkeypatch.setitem(muon._MOST_FLOPS, "cpu", 1e6)
    seen = []
    monkeypatch.setattr("planner.optimizers.muon.update", lambda matrix, **_: seen.append(matrix.gradient.shape))
    measure_updates(updates_of(((64, 64 * 128),)), CPU, MACHINE)
    assert set(seen) == {(16, 32)}


def test_updates_take_their_own_time_wherever_they_are(job, chain):
    plan = problem_of(job, MACHINE, CPU).plan()
    program = compile_program(plan, chain)
    tensors = {t.name: t for t in (*chain.tensors(), *chain.frame_tensors)}
    seen = 0
    for op, seconds in zip(program.ops, durations_s(program, chain, MACHINE), strict=True):
        own = [tensors[name] for name in op.names] if op.kind in (OpKind.UPDATE, OpKind.CPU_UPDATE) else []
        if own and all(map(is_matrix, own)):
            on_cpu = op.kind is OpKind.CPU_UPDATE
            assert seconds == pytest.approx(sum(t.optimizer.cpu_s if on_cpu else t.optimizer.gpu_s for t in own))
            seen += 1
    assert seen


def test_the_host_has_room_for_the_products_of_one_matrix_where_it_updates_any(job, chain):
    problem = problem_of(job, MACHINE, CPU)
    pressed = replace(problem, gpu_budget_bytes=int(1.02 * problem.least_bytes()))
    plan = pressed.plan()
    updated = plan.cpu_updated()
    assert updated & {t.name for t in chain.tensors() if is_matrix(t)}
    largest = max(t.scratch_bytes for t in chain.tensors() if is_matrix(t))
    assert cpu_parts(plan, chain).products_bytes == products_bytes(chain, updated) <= products_bytes(chain) == largest
    assert products_bytes(chain, ()) == 0
    assert not plan.ahead() & {t.name for t in chain.tensors() if is_matrix(t)}


def test_a_host_without_room_for_products_leaves_matrices_to_the_device_and_the_bound_is_one(job):
    problem = problem_of(job.model_copy(update={"max_grad_norm": None}), MACHINE, CPU)
    little = replace(problem, cpu_budget_bytes=products_bytes(problem.chain) - 1)
    assert 0 < little.bound_s() <= (1 + 1e-6) * little.hope_s() < math.inf


def test_a_question_about_such_a_job_is_another_one(job, tmp_path):
    keys = ("optim: muon", "optim: muon\nmuon_adjust_lr_fn: original", "optim: adamw_torch")
    first, second, other = (Job.question(f"model: {job.model}\n{each}\n", tmp_path) for each in keys)
    assert first == second != other
