"""Predicted against measured: peak bytes and step time of five plans of the example's model, on this machine.

    python examples/pydoc.py && python benchmarks/prediction.py [examples/pydoc.yaml] [--rounds 9] [--json FILE]

Blocks and machine are measured first, as a job does. Peaks are metered over two steps of full-length rows; then the
plans' steps alternate without the meter, so that a slow moment meets all of them. A plan's ratio is measured over
predicted seconds of a step; the paired one divides it by that of the first plan in the same round, which takes out how
busy the machine was.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as planner and trainer do, before torch starts its threads

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.spread import Spread
from planner.candidate.candidate import Candidate, assemble
from planner.candidate.evaluate import predicted_step_s
from planner.candidate.setting import Budgets, Setting
from planner.greedy.streaming import profile, resident, streamed
from planner.job.schema import Job
from planner.machine.hardware import Hardware
from planner.measure.analysis import analyse, measure_times
from planner.measure.machine_rates import measure_hardware
from planner.models.hf_model import model_config, working_dtype
from planner.optimizers.adamw import AdamWGroup
from planner.schedule.chain import Chain
from planner.schedule.compile import compile_program
from planner.schedule.memory_use import gpu_peak_bytes
from planner.schedule.plan import Plan
from planner.schedule.verify import verify
from planner.search.problem import Problem
from planner.units import parse_bytes
from worker.engine.engine import Engine
from worker.training.learning_rate import decay_names
from worker.training.model import load_model

CPU = torch.device("cpu")
HOST = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One plan with its predictions."""

    name: str
    plan: Plan
    step_s: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A plan's figures; `step_s` per round, `paired` against the first plan of the round."""

    name: str
    predicted_bytes: int
    metered_bytes: int
    predicted_s: float
    step_s: tuple[float, ...]
    paired: tuple[float, ...]


def subjects(job: Job, chain: Chain, hardware: Hardware) -> Iterator[Subject]:
    """Five plans that do different things."""
    slices = job.gradient_accumulation_steps
    free = Budgets(gpu_bytes=HOST, cpu_bytes=HOST)
    setting = Setting(chain=chain, hardware=hardware, budgets=free, slices=slices, clip=False)

    def subject(name: str, plan: Plan) -> Subject:
        program = compile_program(plan, chain)
        verify(program, chain)
        return Subject(
            name=name,
            plan=plan,
            step_s=predicted_step_s(program, chain, hardware),
            peak_bytes=gpu_peak_bytes(program, chain),
        )

    def proposed(candidate: Candidate) -> Plan:
        return assemble(chain, candidate, slices=slices, clip=False)

    def planned(budget: str, *, cpu_updates: bool) -> Plan:
        return Problem(
            chain=chain,
            hardware=hardware,
            gpu_budget_bytes=parse_bytes(budget),
            cpu_budget_bytes=HOST,
            slices=slices,
            clip=False,
            cpu_updates=cpu_updates,
        ).plan()

    yield subject("resident, all kept", proposed(resident(setting, profile(setting, "fast"), "resident")))
    yield subject("resident, recomputed", proposed(resident(setting, profile(setting, "recompute"), "resident")))
    offloading = streamed(setting, profile(setting, "offload"), ahead=True, source="streamed")
    yield subject("streamed, activations offloaded", proposed(offloading))
    yield subject("planned, 97 MiB", planned("97MiB", cpu_updates=True))
    yield subject("planned, 140 MiB, no CPU updates", planned("140MiB", cpu_updates=False))


def engine_of(job: Job, plan: Plan, chain: Chain, *, metered: bool) -> Engine:
    """The job's model under a plan."""
    model = load_model(job)
    optimizer = AdamWGroup(
        betas=(job.adam_beta1, job.adam_beta2),
        eps=job.adam_epsilon,
        weight_decay=job.weight_decay,
        decay_names=decay_names(model),
    )
    return Engine(model, plan=plan, chain=chain, optimizer=optimizer, max_grad_norm=None, device=CPU, metered=metered)


class Bench:
    """Steps of the job's size on random tokens."""

    def __init__(self, job: Job) -> None:
        shape = (job.slice_rows, job.max_length)
        generator = torch.Generator().manual_seed(0)
        vocabulary = model_config(job).vocab_size
        ids = [torch.randint(vocabulary, shape, generator=generator) for _ in range(job.gradient_accumulation_steps)]
        self.batches = [{"input_ids": i, "labels": i.clone()} for i in ids]
        self.items = sum(i[:, 1:].numel() for i in ids)

    def step(self, engine: Engine) -> tuple[float, int | None]:
        """Seconds, and metered bytes."""
        start = time.perf_counter()
        result = engine.step(
            self.batches, seeds=range(len(self.batches)), learning_rate=1e-4, num_items_in_batch=self.items
        )
        return time.perf_counter() - start, result.peak_bytes

    def metered_bytes(self, engine: Engine) -> int:
        """The peak of two steps."""
        peaks = [self.step(engine)[1] for _ in range(2)]
        engine.close()
        return max(peak for peak in peaks if peak is not None)


def measure(job: Job, rounds: int) -> list[Measured]:
    """All five plans."""
    analysis = analyse(job, CPU)
    hardware = measure_hardware(CPU, working_dtype(job))
    times = measure_times(analysis, CPU, hardware, slices=job.gradient_accumulation_steps)
    chain = analysis.chain(times)
    plans, bench = list(subjects(job, chain, hardware)), Bench(job)
    metered = [bench.metered_bytes(engine_of(job, s.plan, chain, metered=True)) for s in plans]
    engines = [engine_of(job, s.plan, chain, metered=False) for s in plans]
    seconds: list[list[float]] = [[] for _ in plans]
    for number in range(rounds + 2):
        order = range(len(plans)) if number % 2 else reversed(range(len(plans)))
        for i in order:
            taken, _ = bench.step(engines[i])
            if number >= 2:  # the first ones warm up
                seconds[i].append(taken)
    for engine in engines:
        engine.close()
    first = [taken / plans[0].step_s for taken in seconds[0]]
    return [
        Measured(
            name=s.name,
            predicted_bytes=s.peak_bytes,
            metered_bytes=peak,
            predicted_s=s.step_s,
            step_s=tuple(taken),
            paired=tuple(t / s.step_s / base for t, base in zip(taken, first, strict=True)),
        )
        for s, peak, taken in zip(plans, metered, seconds, strict=True)
    ]


def main() -> None:
    """Measure the job named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path, nargs="?", default=Path("examples/pydoc.yaml"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    results = measure(Job.load(options.job), options.rounds)
    print(f"{torch.get_num_threads()} threads, {os.cpu_count()} cores, load {load:.1f} before")
    print(
        "plan                                peak bytes: predicted, metered, difference   "
        "step s: predicted, measured   ratio (least, most)   paired (least, most)"
    )
    for r in results:
        print(
            f"{r.name:34s} {r.predicted_bytes:12,d} {r.metered_bytes:12,d} {r.predicted_bytes - r.metered_bytes:8,d}"
            f"   {r.predicted_s:8.3f} {statistics.median(r.step_s):8.3f}"
            f"   {Spread.of(taken / r.predicted_s for taken in r.step_s):.2f}   {Spread.of(r.paired):.2f}"
        )
    if options.json:
        rows = {"load": load, "threads": torch.get_num_threads(), "plans": [asdict(r) for r in results]}
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
