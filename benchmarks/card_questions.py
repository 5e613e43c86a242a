"""The questions of card.py, each answered in a process that is forked for it.

A folder has work.json, and gets the answer as QUESTION.json. Of a question's name the second word says about what it is
asked: "fp32", "bf16" (with fp32 masters), "small" (in bf16, blocks that take the device no time), "compiled" (in bf16,
layers through PyTorch's inductor). Where bits are compared, kernels are those that add in one order.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.card_engine import STEPS, answer_of, engine, made_of, peaks, state_of, step, work_of
from benchmarks.contenders import RATE
from benchmarks.forked import Forks, check_cuda
from planner.arrange.pack import can_arrange
from planner.codec import Json, from_json, to_json
from planner.measure.analysis import analyse_model, measure_times
from planner.measure.machine_rates import measure_hardware
from planner.measure.repeatable import Kernels, with_fallback
from planner.measure.times import device_name
from planner.schedule.plan import Plan
from planner.search.problem import Problem
from tests.support.engine_plans import adamw, resident_plan
from tests.support.plain_engine import PlainEngine
from worker.check.plain_pytorch import PlainTraining
from worker.runtime.cuda import CudaMachine

MIB = 2**20
SHARE = 0.25
SIDE = 4096


def machine(folder: Path) -> Json:
    """The device, versions, rates; what its context takes."""
    device = torch.device(work_of(folder, "bf16").device)
    rates = {str(t): to_json(measure_hardware(device, t)) for t in (torch.bfloat16, torch.float32)}
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cores": len(os.sched_getaffinity(0)),
        "rates": rates,
    }


def copies(folder: Path) -> Json:
    """Rates from registered memory, each direction alone, both together, and beside products; how long issuing takes,
    which must not wait for the copy."""
    device = torch.device(work_of(folder, "bf16").device)
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


def plain(folder: Path, about: str) -> Json:
    """Plain PyTorch's peak."""
    work = work_of(folder, about)
    model = work.model().to(work.device)
    training = PlainEngine(model, optimizer=adamw(model), max_grad_norm=1.0, device=torch.device(work.device))
    losses = [loss for number in range(2) for loss in step(training, work, number)]
    cuda = work.device == "cuda"
    peak = torch.cuda.max_memory_allocated() if cuda else sum(p.nbytes for p in model.parameters()) * 4
    return {"peak_bytes": peak, "losses": [*losses]}


def plan(folder: Path, about: str) -> Json:
    """A plan for a share of plain PyTorch's peak, or the least possible; for other shares, too, in bf16; the attention
    that was traced."""
    work = work_of(folder, about)
    device = torch.device(work.device)
    hardware = measure_hardware(device, work.torch_dtype)
    arranged = device.type == "cuda" and can_arrange()
    analysis = analyse_model(work.model(), work.batches()[0], device=device, arranged=arranged)
    times = measure_times(analysis, device, hardware, slices=work.slices, compiling=about == "compiled")
    asked: dict[str, Any] = {
        "chain": (chain := analysis.chain(times)),
        "hardware": hardware,
        "cpu_budget_bytes": hardware.cpu_bytes,
        "slices": work.slices,
        "clip": True,
    }
    least = Problem(gpu_budget_bytes=0, **asked).least().gpu_bytes
    shares = {"small": (1.0,), "bf16": (SHARE, 1.0, 0.5, 0.0)}.get(about, (SHARE,))
    plains = "plain-fp32" if about == "fp32" else "plain-bf16"
    computed = resident_plan(chain, slices=work.slices, clip=True).gpu_budget_bytes
    is_measured = (folder / f"{plains}.json").exists()
    plain_peak = answer_of(folder, plains)["peak_bytes"] if is_measured else computed
    peak = hardware.gpu_bytes if about == "small" else plain_peak

    def planned(share: float) -> Json:
        """In a process forked after CUDA and PyTorch's threads have begun, which outlive no fork: it only solves."""
        torch.set_num_threads(1)  # others that its parent had are not there
        problem = Problem(gpu_budget_bytes=max(least, int(share * peak)), **asked)
        return to_json(problem.plan())

    at_once = max(1, len(os.sched_getaffinity(0)) // 2)
    plans = [from_json(Plan, one) for one in Forks().answers([partial(planned, one) for one in shares], at_once)]
    code = "".join(getattr(pair, "forward_source", "") for pairs in analysis.pairs.values() for pair in pairs.values())
    attention: list[Json] = [*sorted(set(re.findall(r"\w*(?:attention|flash|fmha)\w*", code)))]
    made = {"plans": [*map(to_json, plans)], "chain": to_json(chain)}
    (folder / f"made-{about}.json").write_text(json.dumps(made), "utf-8")
    compiled = [[t.kind, t.option, to_json(t.compiled)] for t in times.options if t.compiled is not None]
    return {
        "plain_bytes": plain_peak,
        "plain_is_measured": is_measured,
        "resident_bytes": computed,
        "least_bytes": least,
        "budget_bytes": plans[0].gpu_budget_bytes,
        "predicted_bytes": plans[0].gpu_peak_bytes,
        "source": plans[0].source,
        "has_places": bool(plans[0].offsets),
        "attention": attention,
        "compiled": [*compiled],
        "saved_bytes": {f"{kind} {o}": p.saved_bytes for kind, its in analysis.pairs.items() for o, p in its.items()},
    }


def bits(folder: Path, about: str) -> Json:
    """Losses and states of plain PyTorch where each tensor is updated on the device on which the plan updates it, which
    is what an engine's bits are compared with."""
    work = work_of(folder, about)
    (its, *_), _ = made_of(folder, about)
    on_cpu = {name for stage in its.stages for name in stage.cpu_update}
    model = work.model()
    training = PlainTraining(
        model, optimizer=[adamw(model)], max_grad_norm=1.0, device=torch.device(work.device), on_cpu=on_cpu
    )
    losses = list[str]()
    for number in range(STEPS):
        seeds = [1000 * number + k for k in range(work.slices)]
        found = training.step(work.batches(), seeds=seeds, learning_rate=RATE, items=torch.tensor(work.items))
        assert found.grad_norm is not None
        losses += [float(one).hex() for one in (*found.losses, found.grad_norm)]
    return {"losses": [*losses], "state": state_of(training), "on_cpu": len(on_cpu)}


def compares_bits(question: str) -> bool:
    """Whether it is asked under kernels that add in one order."""
    return question.partition("-")[2] in ("bf16", "fp32")


def answer(question: str, folder: Path) -> None:
    """Write it; and where bits are compared, which kernels computed it, as QUESTION.kernels."""
    name, _, about = question.partition("-")
    alone: dict[str, Callable[[Path], Json]] = {"machine": machine, "copies": copies}
    of_work: dict[str, Callable[[Path, str], Json]] = {
        "plain": plain,
        "plan": plan,
        "bits": bits,
        "engine": engine,
        "peaks": peaks,
    }

    def ask(kernels: Kernels | None) -> Json:
        if kernels is not None:
            (folder / f"{question}.kernels").write_text(str(kernels), "utf-8")
        return of_work[name](folder, about) if about else alone[name](folder)

    check_cuda()
    found = with_fallback(ask, required=False) if compares_bits(question) else ask(None)
    (folder / f"{question}.json").write_text(json.dumps(found), "utf-8")
