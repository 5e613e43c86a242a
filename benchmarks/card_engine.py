"""What card_questions.py asks of an engine under a plan, on a card, and what all its questions share."""

from __future__ import annotations

import gc
import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders import RATE, Work
from planner.codec import Json, from_json, to_json
from planner.errors import UserError
from planner.schedule.chain import Chain
from planner.schedule.compile import OpKind, Program, Queue, compile_program
from planner.schedule.plan import Plan
from tests.support.engine_plans import adamw
from tests.support.plain_engine import PlainEngine
from worker.check.plain_pytorch import PlainTraining
from worker.engine.engine import Engine
from worker.runtime.arena import Counts, arena, take_over

STEPS = 3
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMalloc", "cudaFree")
_STEP = "a step is issued"
_ITEM = re.compile(r"[wsg]:")  # in the name of what is issued, which has weights' names


def engine(folder: Path, about: str) -> Json:
    """The plan's steps beside plain PyTorch's: bits, bytes, seconds, calls of the driver, waits, kernels of attention;
    what each queue did beside what was planned; then an evaluation, texts, and a step after them."""
    work = work_of(folder, about)
    device = torch.device(work.device)
    if device.type == "cuda":
        take_over()
    (its, *_), chain = made_of(folder, about)
    expected = answer_of(folder, f"bits-{about}") if (folder / f"bits-{about}.json").exists() else None
    program = compile_program(its, chain)
    before = _driver_bytes(device)
    model = work.model()
    engine = Engine(model, plan=its, chain=chain, optimizer=adamw(model), max_grad_norm=1.0, device=device)
    losses, driver, said = list[str](), list[Json](), list[Json]()
    found: dict[str, Json] = {
        "budget_bytes": its.gpu_budget_bytes,
        "predicted_bytes": its.gpu_peak_bytes,
        "predicted_s": its.step_s,
        "bound_s": its.bound_s,
        "turns": sum(op.kind is OpKind.RUN for op in program.ops),
    }

    def keep() -> None:  # what there is of it, should the time run out
        (folder / f"engine-{about}.json").write_text(json.dumps(found), "utf-8")

    try:
        for number in range(STEPS):
            losses += step(engine, work, number)
            driver.append(_driver_bytes(device) - before)
            said.append(to_json(_counts()))
            found |= {"counts": said, "driver_bytes": driver}
            keep()
        if expected is not None:
            found["losses_equal"] = losses == expected["losses"]
            found["state_equal"] = state_of(engine) == expected["state"]
            keep()
        engine.drain()
        waited, begin = engine.waited_s, time.perf_counter()
        issued = 0.0
        for number in range(STEPS, 2 * STEPS):
            start = time.perf_counter()
            issue(engine, work, number)
            issued += time.perf_counter() - start
        engine.drain()
        _synchronize(device)
        found["step_s"] = (time.perf_counter() - begin) / STEPS
        found |= {"issuing_s": issued / STEPS, "waited_s": (engine.waited_s - waited) / STEPS}
        later: dict[str, Callable[[], Json]] = {
            "queues": lambda: _queues(engine, work, program),
            "trace": lambda: _trace(engine, work, device),
            "evaluation_peak_bytes": lambda: engine.evaluate(work.batches()).peak_bytes,
            "generation_s": lambda: _generation_s(engine),
        }
        keep()
        for name, asked in later.items():
            try:
                found[name] = asked()
            except (RuntimeError, UserError) as error:  # the others are asked all the same
                found[name] = f"{type(error).__name__}: {error}"[:300]
            keep()
        step(engine, work, 2 * STEPS + 3)
        found["counts_after"] = to_json(_counts())
    finally:
        keep()
        engine.close()
    return found


def peaks(folder: Path, about: str) -> Json:
    """At each share of plain PyTorch's peak: bytes predicted, allocated, reserved, and those that the card has less."""
    work = work_of(folder, about)
    device = torch.device(work.device)
    if device.type == "cuda":
        take_over()
    (plans, chain), before = made_of(folder, about), _driver_bytes(device)
    found: list[Json] = []
    for its in plans:
        gc.collect()
        if (memory := arena()) is not None:
            memory.empty()
            memory.reset_peaks()
        model = work.model()
        engine = Engine(model, plan=its, chain=chain, optimizer=adamw(model), max_grad_norm=1.0, device=device)
        told: dict[str, Json] = {"budget_bytes": its.gpu_budget_bytes, "predicted_bytes": its.gpu_peak_bytes}
        try:
            for number in range(STEPS):
                step(engine, work, number)
            told |= {"counts": to_json(_counts()), "driver_bytes": _driver_bytes(device) - before}
        except (RuntimeError, torch.OutOfMemoryError) as error:
            told["error"] = str(error)[:300]
        finally:
            engine.close()
        del engine, model  # or their memory would be there beside the next one's
        found.append(told)
        (folder / f"peaks-{about}.json").write_text(json.dumps(found), "utf-8")
    return found


def _generation_s(engine: Engine) -> float:
    begin = time.perf_counter()
    engine.generate([[5, 6, 7], [9, 10]], new_tokens=8, pad=0)
    return time.perf_counter() - begin


def _queues(engine: Engine, work: Work, program: Program) -> Json:
    """Of two recorded steps: seconds a step that each queue worked, and parameters that the CPU's updates did a second
    while the others worked, too."""
    engine.record()
    for step in range(3):
        issue(engine, work, step)
    found = engine.recorded()
    assert found is not None
    busy = {queue.value: 0 for queue in Queue}
    rates = {"elements": 0, "ns": 0}
    sizes = {name: p.numel() for name, p in engine._model.named_parameters()}
    for starts, ends in zip(found.start_ns, found.end_ns, strict=True):
        for op, start, end in zip(program.ops, starts, ends, strict=True):
            busy[op.queue.value] += end - start
            if op.kind is OpKind.CPU_UPDATE:
                rates["elements"] += sum(sizes.get(name, 0) for name in op.names)
                rates["ns"] += end - start
    seconds: dict[str, Json] = {name: ns / 2e9 for name, ns in busy.items()}
    rate = rates["elements"] / (rates["ns"] / 1e9) if rates["ns"] else None
    return {"step_s": found.step_ns(program) / 1e9, "busy_s": seconds, "cpu_update_parameters_per_s": rate}


def _trace(engine: Engine, work: Work, device: torch.device) -> Json:
    """How often three steps, while they are issued, call what waits or asks the driver, by whichever thread, and the
    names of what computes attention. The CPU's queue waits for gradients by cudaEventSynchronize. None where there is
    nothing to ask."""
    if torch.profiler.ProfilerActivity.CUDA not in torch.profiler.supported_activities():
        return None
    with torch.profiler.profile(acc_events=True) as profile:
        for step in range(2 * STEPS, 2 * STEPS + 3):
            with torch.profiler.record_function(_STEP):
                issue(engine, work, step)
        engine.drain()
        _synchronize(device)
    events = list(profile.events() or ())
    steps = [event.time_range for event in events if event.name == _STEP]
    inside = [e.name for e in events if any(s.start <= e.time_range.start < s.end for s in steps)]
    names = sorted({e.name for e in events if re.search("attention|flash|fmha", e.name) and not _ITEM.search(e.name)})
    return {"calls": {name: inside.count(name) for name in WAITS}, "attention": [*names]}


def issue(engine: Engine | PlainEngine, work: Work, step: int) -> Sequence[Tensor]:
    seeds = [1000 * step + k for k in range(work.slices)]
    items = torch.tensor(work.items)  # a device multiplies by a number's inverse, and divides by a tensor
    result = engine.step(work.batches(), seeds=seeds, learning_rate=RATE, num_items_in_batch=items)
    return [*result.losses, *([] if result.grad_norm is None else [result.grad_norm])]


def step(engine: Engine | PlainEngine, work: Work, step: int) -> list[str]:
    """Losses and norm of a step, bit by bit."""
    return [float(one).hex() for one in issue(engine, work, step)]


def state_of(engine: Engine | PlainTraining) -> str:
    """The bits of weights, masters and moments."""
    found = sorted(
        (name, part, hashlib.sha256(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest())
        for name, parts in engine.state()
        for part, t in parts.items()
    )
    return hashlib.sha256(str(found).encode()).hexdigest()


def _counts() -> Counts | None:
    found = arena()
    return None if found is None else found.counts()


def _driver_bytes(device: torch.device) -> int:
    """Taken of the card, by everybody."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def work_of(folder: Path, about: str) -> Work:
    dtype = "fp32" if about == "fp32" else "bf16"
    found = from_json(Work, {**json.loads((folder / "work.json").read_text("utf-8")), "dtype": dtype})
    return replace(found, width=min(256, found.width), length=64, batch=1) if about == "small" else found


def answer_of(folder: Path, question: str) -> Any:
    return json.loads((folder / f"{question}.json").read_text("utf-8"))


def made_of(folder: Path, about: str) -> tuple[list[Plan], Chain]:
    made = answer_of(folder, f"made-{about}")
    return [from_json(Plan, one) for one in made["plans"]], from_json(Chain, made["chain"])
