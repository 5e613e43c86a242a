"""One question of card.py, in a process of its own: `python -m benchmarks.card_questions QUESTION FOLDER`.

FOLDER has work.json, and gets the answer as QUESTION.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as planner and trainer do, before torch starts its threads

import torch
from torch import Tensor

from benchmarks.contenders import RATE, Work
from planner.arrange.pack import can_arrange
from planner.codec import Json, from_json, to_json
from planner.measure.analysis import analyse_model, measure_times
from planner.measure.machine_rates import measure_hardware
from planner.measure.times import device_name
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan
from planner.search.problem import Problem
from tests.support.engine_plans import adamw
from tests.support.plain_engine import PlainEngine
from worker.engine.engine import Engine
from worker.runtime.arena import Counts, arena, take_over
from worker.runtime.cuda import CudaMachine

MIB = 2**20
STEPS = 3
SHARE = 0.25
SIDE = 4096
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMalloc", "cudaFree")


def machine(folder: Path) -> Json:
    """The device, versions, rates; what its context takes."""
    device = torch.device(_work(folder, "bf16").device)
    rates = {str(t): to_json(measure_hardware(device, t)) for t in (torch.bfloat16, torch.float32)}
    return {
        "device": device_name(device), "torch": torch.__version__, "cuda": torch.version.cuda,
        "cores": len(os.sched_getaffinity(0)), "rates": rates,
    }  # fmt: skip


def copies(folder: Path) -> Json:
    """Rates from registered memory, each direction alone, both together, and beside products; how long issuing takes,
    which must not wait for the copy."""
    device = torch.device(_work(folder, "bf16").device)
    size = 256 * MIB
    card = CudaMachine(device)
    host, back = (card.host_empty((size,), torch.uint8) for _ in range(2))
    there, source = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    a = torch.ones(SIDE, SIDE, dtype=torch.bfloat16, device=device)
    up, down = (torch.cuda.Stream(device) for _ in range(2))

    def on(stream: Any, target: Tensor, origin: Tensor) -> None:
        with torch.cuda.stream(stream):
            target.copy_(origin, non_blocking=True)

    def products() -> None:
        for _ in range(20):
            a @ a

    ways: dict[str, tuple[Callable[[], object], ...]] = {
        "to the device": (lambda: on(up, there, host),),
        "to the host": (lambda: on(down, back, source),),
        "both": (lambda: on(up, there, host), lambda: on(down, back, source)),
        "products": (products,),
        "both beside products": (products, lambda: on(up, there, host), lambda: on(down, back, source)),
    }
    found: dict[str, Json] = {}
    for name, issue in ways.items():
        for warm in (True, False):
            torch.cuda.synchronize(device)
            begin = time.perf_counter()
            for one in issue:
                one()
            issued = time.perf_counter() - begin
            torch.cuda.synchronize(device)
            if not warm:
                found[name] = {"seconds": time.perf_counter() - begin, "issuing_s": issued, "bytes_each_way": size}
    return found


def plain(folder: Path, dtype: str) -> Json:
    """Plain PyTorch's losses and states, and its peak."""
    work = _work(folder, dtype)
    model = work.model().to(work.device)
    engine = PlainEngine(model, optimizer=adamw(model), max_grad_norm=1.0, device=torch.device(work.device))
    losses = [loss for step in range(STEPS) for loss in _step(engine, work, step)]
    cuda = work.device == "cuda"
    peak = torch.cuda.max_memory_allocated() if cuda else sum(p.nbytes for p in model.parameters()) * 4
    return {"peak_bytes": peak, "losses": losses, "state": _state(engine)}


def plan(folder: Path, dtype: str) -> Json:
    """A plan for a share of plain PyTorch's peak, or the least possible; the attention that was traced."""
    work = _work(folder, dtype)
    device = torch.device(work.device)
    peak = json.loads((folder / f"plain-{dtype}.json").read_text("utf-8"))["peak_bytes"]
    hardware = measure_hardware(device, work.torch_dtype)
    arranged = device.type == "cuda" and can_arrange()
    analysis = analyse_model(work.model(), work.batches()[0], device=device, arranged=arranged)
    chain = analysis.chain(measure_times(analysis, device, hardware, slices=work.slices))
    asked: dict[str, Any] = {
        "chain": chain, "hardware": hardware, "cpu_budget_bytes": hardware.cpu_bytes, "slices": work.slices,
        "clip": True,
    }  # fmt: skip
    least = Problem(gpu_budget_bytes=0, **asked).least().gpu_bytes
    found = Problem(gpu_budget_bytes=max(least, int(SHARE * peak)), **asked).plan(time_limit_s=10.0)
    code = "".join(getattr(pair, "forward_source", "") for pairs in analysis.pairs.values() for pair in pairs.values())
    attention: list[Json] = [*sorted(set(re.findall(r"\w*(?:attention|flash|fmha)\w*", code)))]
    (folder / f"made-{dtype}.json").write_text(json.dumps({"plan": to_json(found), "chain": to_json(chain)}), "utf-8")
    return {
        "least_bytes": least, "budget_bytes": found.gpu_budget_bytes, "predicted_bytes": found.gpu_peak_bytes,
        "source": found.source, "has_places": bool(found.offsets), "attention": attention,
    }  # fmt: skip


def engine(folder: Path, dtype: str) -> Json:
    """The plan's steps beside plain PyTorch's: bits, bytes, seconds, calls of the driver, waits, kernels of attention;
    then an evaluation, texts, and a step after them."""
    work = _work(folder, dtype)
    device = torch.device(work.device)
    if device.type == "cuda":
        take_over()
    made = json.loads((folder / f"made-{dtype}.json").read_text("utf-8"))
    expected = json.loads((folder / f"plain-{dtype}.json").read_text("utf-8"))
    its, chain = from_json(Plan, made["plan"]), from_json(Chain, made["chain"])
    before = _driver_bytes(device)
    model = work.model()
    engine = Engine(model, plan=its, chain=chain, optimizer=adamw(model), max_grad_norm=1.0, device=device)
    losses, driver, said = list[str](), list[Json](), list[Json]()
    try:
        for step in range(STEPS):
            losses += _step(engine, work, step)
            driver.append(_driver_bytes(device) - before)
            said.append(to_json(_counts()))
        engine.drain()
        state = _state(engine)
        waited, begin = engine.waited_s, time.perf_counter()
        issued = 0.0
        for step in range(STEPS, 2 * STEPS):
            start = time.perf_counter()
            _issue(engine, work, step)
            issued += time.perf_counter() - start
        engine.drain()
        _synchronize(device)
        seconds = (time.perf_counter() - begin) / STEPS
        found: dict[str, Json] = {
            "losses_equal": losses == expected["losses"], "state_equal": state == expected["state"],
            "budget_bytes": its.gpu_budget_bytes, "predicted_bytes": its.gpu_peak_bytes, "counts": said,
            "driver_bytes": driver, "predicted_s": its.step_s, "bound_s": its.bound_s, "step_s": seconds,
            "issuing_s": issued / STEPS, "waited_s": (engine.waited_s - waited) / STEPS,
            "trace": _trace(engine, work, device),
        }  # fmt: skip
        evaluated = engine.evaluate(work.batches())
        found["evaluation_peak_bytes"] = evaluated.peak_bytes
        begin = time.perf_counter()
        engine.generate([[5, 6, 7], [9, 10]], new_tokens=8, pad=0)
        found["generation_s"] = time.perf_counter() - begin
        _step(engine, work, 2 * STEPS + 3)
        found["counts_after"] = to_json(_counts())
        return found
    finally:
        engine.close()


def _trace(engine: Engine, work: Work, device: torch.device) -> Json:
    """How often three steps call what waits or asks the driver, and the names of what computes attention. None where
    there is nothing to ask."""
    if torch.profiler.ProfilerActivity.CUDA not in torch.profiler.supported_activities():
        return None
    with torch.profiler.profile(acc_events=True) as profile:
        for step in range(2 * STEPS, 2 * STEPS + 3):
            _issue(engine, work, step)
        engine.drain()
        _synchronize(device)
    counts = {event.key: event.count for event in profile.key_averages()}
    names = sorted(key for key in counts if re.search("attention|flash|fmha", key, re.IGNORECASE))
    return {"calls": {name: counts.get(name, 0) for name in WAITS}, "attention": [*names]}


def _issue(engine: Engine | PlainEngine, work: Work, step: int) -> Sequence[Tensor]:
    seeds = [1000 * step + k for k in range(work.slices)]
    result = engine.step(work.batches(), seeds=seeds, learning_rate=RATE, num_items_in_batch=work.items)
    return [*result.losses, *([] if result.grad_norm is None else [result.grad_norm])]


def _step(engine: Engine | PlainEngine, work: Work, step: int) -> list[str]:
    """Losses and norm of a step, bit by bit."""
    return [float(one).hex() for one in _issue(engine, work, step)]


def _state(engine: Engine | PlainEngine) -> str:
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


def _work(folder: Path, dtype: str) -> Work:
    return from_json(Work, {**json.loads((folder / "work.json").read_text("utf-8")), "dtype": dtype})


def answer(question: str, folder: Path) -> None:
    """Write it."""
    name, _, dtype = question.partition("-")
    alone: dict[str, Callable[[Path], Json]] = {"machine": machine, "copies": copies}
    twice: dict[str, Callable[[Path, str], Json]] = {"plain": plain, "plan": plan, "engine": engine}
    torch.use_deterministic_algorithms(dtype != "", warn_only=True)
    found = twice[name](folder, dtype) if dtype else alone[name](folder)
    (folder / f"{question}.json").write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    answer(sys.argv[1], Path(sys.argv[2]))
