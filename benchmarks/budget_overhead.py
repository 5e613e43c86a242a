"""Step time under a planned budget of 40% of plain PyTorch's peak, as a ratio to plain PyTorch, paired in one run.

    python benchmarks/budget_overhead.py [--pairs 15] [--share 0.4] [--json FILE]

On the CPU, where the meter says what is on the device. Four ways to train the same Llama on the same batches with
AdamW(fused=True) take turns, so that a slow moment of the machine meets all of them:

    plain        plain PyTorch
    kept         offmate, everything resident, all activations kept
    recomputed   offmate, everything resident, with the plan's options: what it recomputes, recomputed
    planned      offmate under the budget

planned / plain is what the budget costs; (recomputed - kept) / plain is recomputation's own part of it. *Clock* is what
a user waits, *own time* what all threads of the process computed in between: other programs hold up the first only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as planner and trainer do, before torch starts its threads
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor

from benchmarks.spread import Spread
from benchmarks.step_overhead import LAYERS, LENGTH, ROWS, make_model
from planner.candidate.candidate import assemble
from planner.candidate.setting import Budgets, Setting
from planner.cpu.meter import Meter
from planner.greedy.streaming import profile, resident
from planner.machine.hardware import Hardware
from planner.measure.analysis import analyse_model, measure_times
from planner.measure.machine_rates import measure_hardware
from planner.schedule.chain import Chain
from planner.schedule.compile import compile_program
from planner.schedule.plan import Plan
from planner.schedule.verify import verify
from planner.search.problem import Problem
from tests.support.engine_plans import adamw
from tests.support.plain_engine import PlainEngine
from worker.engine.engine import Engine

CPU = torch.device("cpu")
CASES = ((128, 1), (256, 1), (256, 4))
HOST = 2**40
SECONDS = 10.0  # of planning


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One size of model. `block_s`: own time of a block, forward and backward, in the plain step; `peak_bytes`: the
    plan's; `options`: how many blocks have each. `clock` and `own`: step times over plain PyTorch's in each round, per
    way, with "recomputation", what recomputing adds when nothing else changes.
    """

    width: int
    slices: int
    block_s: float
    plain_bytes: int
    peak_bytes: int
    options: dict[str, int]
    rounds: int
    clock: dict[str, tuple[float, ...]]
    own: dict[str, tuple[float, ...]]


def batches_of(slices: int) -> list[dict[str, Tensor]]:
    """The micro-batches of every step."""
    ids = torch.randint(0, 512, (slices, ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": i, "labels": i.clone()} for i in ids]


def run(engine: Engine | PlainEngine, batches: Sequence[dict[str, Tensor]]) -> None:
    """One optimizer step."""
    items = len(batches) * ROWS * (LENGTH - 1)
    engine.step(batches, seeds=range(len(batches)), learning_rate=1e-4, num_items_in_batch=items)


def plain_peak_bytes(width: int, batches: Sequence[dict[str, Tensor]]) -> int:
    """What plain PyTorch has on the device at most, by the meter that counts offmate's bytes."""
    meter, model = Meter(), make_model(width)
    for tensor in (*model.parameters(), *model.buffers()):
        meter.add(tensor)
    engine = PlainEngine(model, optimizer=adamw(model), max_grad_norm=None)
    with meter.watch():
        for _ in range(2):
            run(engine, batches)
    return meter.peak


def resident_plan(chain: Chain, hardware: Hardware, options: Sequence[str] | None, slices: int) -> Plan:
    """Everything on the device, with these options; None: the quickest."""
    free = Budgets(gpu_bytes=HOST, cpu_bytes=HOST)
    setting = Setting(chain=chain, hardware=hardware, budgets=free, slices=slices, clip=False)
    candidate = resident(setting, options or profile(setting, "fast"), "resident")
    plan = assemble(chain, candidate, slices=slices, clip=False)
    verify(compile_program(plan, chain), chain)
    return plan


def measure(width: int, slices: int, pairs: int, share: float) -> Measured:
    """One size of model."""
    batches = batches_of(slices)
    plain_bytes = plain_peak_bytes(width, batches)
    analysis = analyse_model(make_model(width), batches[0], device=CPU)
    hardware = measure_hardware(CPU)
    chain = analysis.chain(measure_times(analysis, CPU, hardware, slices=slices))
    planned = Problem(
        chain=chain,
        hardware=hardware,
        gpu_budget_bytes=int(share * plain_bytes),
        cpu_budget_bytes=HOST,
        slices=slices,
        clip=False,
    ).plan()
    plans = {
        "kept": resident_plan(chain, hardware, None, slices),
        "recomputed": resident_plan(chain, hardware, planned.options, slices),
        "planned": planned,
    }

    def engine_of(plan: Plan) -> Engine:
        model = make_model(width)
        return Engine(model, plan=plan, chain=chain, optimizer=adamw(model), max_grad_norm=None, device=CPU)

    model = make_model(width)
    engines: dict[str, Engine | PlainEngine] = {name: engine_of(plan) for name, plan in plans.items()}
    engines["plain"] = PlainEngine(model, optimizer=adamw(model), max_grad_norm=None)
    clock, own = ({name: list[float]() for name in engines} for _ in range(2))
    for number in range(pairs + 2):
        for name in (list, reversed)[number % 2](list(engines)):
            started, computed = time.perf_counter(), time.process_time()
            run(engines[name], batches)
            if number >= 2:  # the first ones warm up
                clock[name].append(time.perf_counter() - started)
                own[name].append(time.process_time() - computed)
    for engine in engines.values():
        engine.close()
    return Measured(
        width=width,
        slices=slices,
        block_s=statistics.median(own["plain"]) / (LAYERS * slices),
        plain_bytes=plain_bytes,
        peak_bytes=planned.gpu_peak_bytes,
        options=dict(Counter(planned.options)),
        rounds=planned.rounds,
        clock=over_plain(clock),
        own=over_plain(own),
    )


def over_plain(times: dict[str, list[float]]) -> dict[str, tuple[float, ...]]:
    """Per way the ratio to plain PyTorch in each round, and recomputation's."""
    plain = times["plain"]
    over = {
        name: tuple(a / b for a, b in zip(taken, plain, strict=True))
        for name, taken in times.items()
        if name != "plain"
    }
    return over | {"recomputation": tuple(a - b for a, b in zip(over["recomputed"], over["kept"], strict=True))}


def main() -> None:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} cores, load {load:.1f}")
    results = []
    for width, slices in CASES:
        r = measure(width, slices, options.pairs, options.share)
        results.append(r)
        chosen = ", ".join(f"{count} {name}" for name, count in r.options.items())
        print(
            f"width {r.width}, {r.slices} slices, blocks of {1e3 * r.block_s:.1f} ms of own time: "
            f"{r.peak_bytes / 2**20:.1f} of {r.plain_bytes / 2**20:.1f} MiB; {chosen}; rounds {r.rounds}",
            flush=True,
        )
        for name in r.clock:
            clock, own = Spread.of(r.clock[name]), Spread.of(r.own[name])
            print(f"  {name:13s} of plain by the clock {clock:.3f}, in own time {own:.3f}")
    if options.json:
        rows = {"load": load, "threads": torch.get_num_threads(), "cases": [asdict(r) for r in results]}
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
