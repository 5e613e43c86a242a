"""All that runs on CUDA beside training, on a device that is late: evaluation, texts, jobs, certificates, own loops.
Some tests take seconds: models are traced and trained on an emulated device."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from planner.arrange.pack import with_places
from planner.codec import to_json
from planner.job.schema import Job
from planner.measure.change_bytes import change_bytes
from planner.measure.machine_rates import estimate_hardware
from planner.models.hf_model import sample_batch, skeleton_model
from planner.run.folder import RunFolder
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan
from planner.search.problem import Problem
from tests.support.arena import arena_on
from tests.support.cuda.device import Device
from tests.support.cuda.streams import Mood
from tests.support.engine_plans import adamw, chain_of, mixed_plan, streaming_plan
from tests.support.engines import data, learning_rate, own_threads
from tests.support.families import assert_bitwise, family_model, masked_batch, t5, trained
from tests.support.late_engines import Case, chain_for, engine_for, expected, train
from tests.support.lsp_jobs import lsp_job
from tests.support.own_loop import plain_loop
from tests.support.plain_engine import PlainEngine
from tests.support.texts import byte_tokenizer, make_job, sentences, tiny_llama_folder, write_jsonl
from tests.support.tiny_models import batch_of, make_model
from worker.api import prepare
from worker.check.comparison import Comparison
from worker.data.batches import Batches
from worker.engine.engine import Engine
from worker.training.metrics import read_metrics
from worker.training.model import load_model
from worker.training.run import run_job
from worker.training.stop import StopRequest

pytestmark = pytest.mark.emulated

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    assert own_threads() == []


def uncapped(plan: Plan) -> Plan:
    return replace(plan, gpu_budget_bytes=0)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", ["gemma2", "mixtral", "opt", "phi3", "gpt_neox"])
def test_a_family_equals_plain_pytorch_bitwise(device: Device, name: str) -> None:
    device.queues.set_mood(Mood.drawn(len(name)))
    make = functools.partial(family_model, name, torch.bfloat16)
    plan_of = lambda *args, **kwargs: uncapped(mixed_plan(*args, **kwargs))  # noqa: E731
    assert_bitwise(trained(make, masked_batch, slices=2, steps=2, clip=0.5, plan_of=plan_of, device=CUDA))


def test_an_encoder_decoder_equals_plain_pytorch_within_rounding(device: Device) -> None:
    device.queues.set_mood(Mood.drawn(5))
    plan_of = lambda *args, **kwargs: uncapped(streaming_plan(*args, **kwargs))  # noqa: E731
    got, wanted = trained(t5, masked_batch, slices=2, steps=2, plan_of=plan_of, sums=False, device=CUDA)
    assert torch.equal(got["loss 0.0"], wanted["loss 0.0"])
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("name", "seed"), [("llama", 0), ("gpt2", 1), ("llama", 2)])
def test_evaluations_and_texts_between_steps_are_plain_pytorchs(device: Device, name: str, seed: int) -> None:
    case = Case(name, "mixed")
    model = make_model(name)
    plain = PlainEngine(model.to(CUDA), device=CUDA, optimizer=adamw(model), max_grad_norm=None)
    engine = engine_for(case)
    batches = [batch_of(k, padded=k == 1) for k in range(3)]
    prompts = [[5, 6, 7], [9, 10, 11, 12, 13], [3]]

    def told(one: Engine | PlainEngine, step: int) -> list[object]:
        given, rest = data(step, 1)
        losses = [*one.step(given, learning_rate=learning_rate(step), **rest).losses, *one.evaluate(batches).losses]
        return [*(float(loss) for loss in losses), one.generate(prompts, new_tokens=6, pad=2)]

    wanted = [told(plain, step) for step in range(2)]
    device.queues.set_mood(Mood.drawn(3 * seed + 1))
    try:
        assert [told(engine, step) for step in range(2)] == wanted
    finally:
        engine.close()


def test_training_goes_on_after_errors_on_the_device_with_a_load_or_without(device: Device) -> None:
    case = Case("llama", "mixed", slices=2, clip=0.5)
    wanted, engine = expected(case), engine_for(case)
    saved = [(name, {k: t.clone() for k, t in parts.items()}) for name, parts in engine.state()]
    threads = own_threads()
    device.queues.set_mood(Mood.drawn(2))

    def step_that_fails(number: int) -> None:
        """No memory is left for slices of that length."""
        batches, rest = data(number, 2)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / torch.cuda.mem_get_info()[1])
        with pytest.raises(torch.OutOfMemoryError):
            engine.step([{name: t.repeat(1, 300) for name, t in b.items()} for b in batches], learning_rate=1.0, **rest)
        torch.cuda.set_per_process_memory_fraction(1.0)
        assert not engine.torn and sorted(own_threads()) == sorted(threads)

    try:
        for loads in (False, True):
            found = []
            for number, tensor in enumerate(train(engine, case)):
                found.append(tensor)
                if number < 2:
                    step_that_fails(number + 1)
            assert len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
            if not loads:
                engine.load_state(saved, step=0)
    finally:
        engine.close()


@pytest.mark.parametrize(("slices", "clip"), [(1, False), (2, True)])
def test_a_plan_of_the_planners_at_the_least_possible_budget_is_plain_pytorchs(
    device: Device, slices: int, clip: bool
) -> None:
    case = Case("llama", "keep", slices=slices, clip=0.5 if clip else None)
    chain: Chain = chain_for("llama", torch.float32)
    machine = replace(estimate_hardware(CUDA), min_transfer_bytes=0, cpu_bytes=2**30)
    least = (
        Problem(
            chain=chain,
            hardware=machine,
            gpu_budget_bytes=0,
            cpu_budget_bytes=2**30,
            slices=slices,
            clip=clip,
        )
        .least()
        .gpu_bytes
    )
    plan = Problem(
        chain=chain,
        hardware=machine,
        gpu_budget_bytes=least,
        cpu_budget_bytes=2**30,
        slices=slices,
        clip=clip,
    ).plan()
    wanted = expected(case)
    device.queues.set_mood(Mood.drawn(6 - slices))
    engine = engine_for(case, uncapped(plan))
    found = list(train(engine, case))
    engine.close()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def make_run(folder: Path, **keys: object) -> tuple[Job, RunFolder]:
    """A job of a tiny Llama, and its run folder as the planner leaves it."""
    model = tiny_llama_folder(folder / "model")
    small = {
        "max_length": 32,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "max_steps": 5,
        "save_steps": 2,
        "val_size": 5,
        "eval_steps": 2,
        "sample_tokens": 4,
        "sample_prompts": "the quick",
    }
    job = make_job(model, write_jsonl(folder / "data.jsonl", sentences(20)), **{**small, **keys})
    run = RunFolder(folder / "run")
    run.path.mkdir()
    run.resolved.write_text(job.resolved_yaml(), "utf-8")
    chain = chain_of(load_model(job), sample_batch(job), CUDA)
    plan = replace(mixed_plan(chain, slices=2, clip=True), gpu_budget_bytes=2**28)
    parts = {"plan": to_json(plan), "chain": to_json(chain), "hardware": to_json(estimate_hardware(CUDA))}
    run.plan.write_text(json.dumps({"format": 1, **parts}))
    return job, run


def told(run: RunFolder) -> list[object]:
    """What a run's metrics say of what it computed, each step once."""
    events = read_metrics(run.metrics)
    kept = {(e["event"], e["step"]): e.get("loss", e.get("eval_loss", e.get("text"))) for e in events}
    return [kept[key] for key in sorted(kept) if key[0] in ("step", "eval", "sample")]


def test_a_job_that_was_stopped_and_goes_on_trains_the_same_model(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    stop, step = StopRequest(), Engine.step

    def stopping(engine: Engine, *args: Any, **kwargs: Any) -> object:
        stop.asked = engine.steps_done == 2  # during the third
        return step(engine, *args, **kwargs)

    (tmp_path / "whole").mkdir()
    _, whole = make_run(tmp_path / "whole")
    device.queues.set_mood(Mood.drawn(1))
    assert run_job(whole, StopRequest())
    (tmp_path / "parts").mkdir()
    _, parts = make_run(tmp_path / "parts")
    device.queues.set_mood(Mood.drawn(6))
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", stopping)
        assert not run_job(parts, stop)
    assert run_job(parts, StopRequest())
    assert len(told(whole)) == 5 + 3 + 3 and told(parts) == told(whole)
    wanted, found = (
        dict(AutoModelForCausalLM.from_pretrained(run.path / "output").named_parameters()) for run in (whole, parts)
    )
    assert all(torch.equal(p, wanted[name]) for name, p in found.items())


@pytest.mark.parametrize("keys", [{}, {"bf16": True, "max_grad_norm": None}], ids=str)
def test_a_certificate_finds_no_difference(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, object]
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    job, _ = make_run(tmp_path, **keys)
    chain = chain_of(load_model(job), sample_batch(job), CUDA)
    plan = uncapped(mixed_plan(chain, slices=2, clip=job.max_grad_norm is not None))
    device.queues.set_mood(Mood.drawn(4))
    comparison = Comparison(
        job=job, batches=Batches(job, byte_tokenizer()), steps=2, layers=3, device=CUDA, folder=tmp_path
    )
    outcome = comparison.run(plan, chain)
    assert outcome.first == 0.0 and all(f.equal == f.count > 0 for f in outcome.findings)
    assert {d.greatest for d in outcome.parameters} == {0.0}


@pytest.mark.parametrize(("keys", "placed"), [({}, False), ({"bf16": True, "lsp_nonzeros": None}, True)])
def test_changes_of_projectors_are_plain_pytorchs(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, object], placed: bool
) -> None:
    """`placed`: tensors have places in the device's memory, and changes work between those that stay."""
    for name, size in (("SMALL_BYTES", 2**8), ("PAGE_BYTES", 2**12)):
        monkeypatch.setattr(f"planner.schedule.places.{name}", size)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    job = lsp_job(tmp_path, lsp_check_steps=1, **keys)
    machine = replace(estimate_hardware(CUDA), min_transfer_bytes=0, cpu_bytes=2**30)
    chain = chain_of(load_model(job), sample_batch(job), CUDA, arranged=placed)
    needed = change_bytes(job, skeleton_model(job), torch.device("cpu"))
    chain = replace(chain, between_gpu_bytes=needed.device, between_cpu_bytes=needed.host)
    problem = Problem(chain=chain, hardware=machine, gpu_budget_bytes=0, cpu_budget_bytes=2**30, slices=2, clip=True)
    plan = replace(problem, gpu_budget_bytes=problem.least().gpu_bytes * 11 // 10).plan()
    plan = with_places(plan, chain) if placed else uncapped(plan)
    assert bool(plan.offsets) == placed
    device.queues.set_mood(Mood.drawn(4))
    batches = Batches(job, byte_tokenizer())
    comparison = Comparison(job=job, batches=batches, steps=2, layers=3, device=CUDA, folder=tmp_path)
    with arena_on(device) if placed else contextlib.nullcontext():
        outcome = comparison.run(plan, chain)
    assert all(f.equal == f.count > 0 for f in outcome.findings)


def loop_model() -> nn.Module:
    """Large enough that tensors are worth moving."""
    return make_model("llama", width=128, layers=3)


@pytest.mark.parametrize("slices", [1, 2])
def test_a_loop_of_ones_own_gives_the_numbers_of_the_same_loop_in_plain_pytorch(
    device: Device, slices: int, tmp_path: Path
) -> None:
    steps = [[batch_of(10 * n + k, padded=k == 1) for k in range(slices)] for n in range(3)]
    plain, model = loop_model().to(CUDA), loop_model()

    def make_optimizer(of: nn.Module) -> torch.optim.AdamW:
        return torch.optim.AdamW(of.parameters(), lr=1e-2, fused=True)

    def make_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    there = [[{name: t.to(CUDA) for name, t in batch.items()} for batch in step] for step in steps]
    wanted = plain_loop(plain, there, make_optimizer=make_optimizer, make_schedule=make_schedule)
    optimizer = make_optimizer(model)
    schedule = make_schedule(optimizer)
    device.queues.set_mood(Mood.drawn(slices))
    engine = prepare(
        model, steps[0], optimizer=optimizer, device="cuda", measure=False, gpu_budget="28MB", max_grad_norm=0.5, seed=7
    )
    found = []
    for number, batches in enumerate(steps):
        found.append(engine.step(batches))
        schedule.step()
        if number == 0:
            engine.save(tmp_path)
            engine.load(tmp_path)
    engine.restore()
    assert [loss.item() for loss in found] == [loss.item() for loss in wanted]
    for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert p.is_cpu and torch.equal(p, q.cpu()), name
