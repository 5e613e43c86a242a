"""How large the O-ILP is, how long the planner takes, how near it gets, and what whole tensors cost.

    nice python benchmarks/solver.py [--cases 16 34 82 128] [--random 50] [--repeat 3] [--profile] [--json FILE]

For each chain: columns, rows, nonzeros, seconds to build and to solve the O-ILP alone (least of the repeats), the
solver's gap, seconds of `make_plan` in all, candidates, rounding, proofs and simulation included (least and greatest of
the repeats, and the least of the process's own time), the step before rounding (`lp_step_s`), after it (`step_s`), and
the bound for any schedule. Seconds are of this machine; gaps and ratios are not. With --profile: where the time of one
`make_plan` goes, by function.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import paper000
from benchmarks.chains import GB, LLAMA3_70B, SERVER, Batch, head_s, layer_figures, llama_chain, random_chain
from planner.chain import Chain
from planner.greedy import Setting, profile, resident
from planner.hardware import Hardware
from planner.instance import Budgets, make_instance
from planner.itinerary import assemble
from planner.memory import gpu_peak_bytes
from planner.oilp import _build, solve_oilp
from planner.program import compile_program
from planner.solve import least_budget, make_plan

GAP, TIME_LIMIT_S = 0.005, 300.0  # other work on the machine must not cut a search short
BARS_S = {34: 3.0, 82: 15.0, 128: 30.0}
UNLIMITED = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem to plan."""

    name: str
    chain: Chain
    hardware: Hardware
    gpu_bytes: int
    cpu_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was seen; seconds of this machine."""

    name: str
    blocks: int
    columns: int
    rows: int
    nonzeros: int
    build_s: float
    solve_s: float
    plan_s: tuple[float, ...]
    plan_cpu_s: tuple[float, ...]  # the process's own time: what an idle machine would take
    solver_gap: float
    lp_step_s: float
    step_s: float
    bound_s: float
    source: str

    @property
    def rounding(self) -> float:
        return self.step_s / self.lp_step_s - 1 if self.lp_step_s else float("nan")

    @property
    def to_bound(self) -> float:
        return 1 - self.bound_s / self.step_s


def llama2_case(blocks: int) -> Case:
    """Llama2-7B's layers on the RTX 3060 of paper 000; 34 blocks are the whole model."""
    return Case(
        name=f"Llama2-7B layers, RTX 3060, {blocks} blocks", chain=paper000.chain(layers=blocks - 2),
        hardware=paper000.hardware(), gpu_bytes=paper000.BUDGET, cpu_bytes=paper000.HOST,
    )  # fmt: skip


def llama3_case(blocks: int) -> Case:
    """Llama-3-70B's layers, bf16 with fp32 masters, 4 × 512 tokens, 22 GB; 82 blocks are the whole model."""
    batch = Batch(rows=4, length=512, number_bytes=2, state_bytes=12)
    shape = replace(LLAMA3_70B, layers=blocks - 2)
    layer = layer_figures(shape, batch, flops_per_s=SERVER.flops_per_s, memory_bytes_per_s=1000.0 * GB, scores=False)
    chain = llama_chain(shape, batch, layer, head_forward_s=head_s(shape, batch, flops_per_s=SERVER.flops_per_s))
    return Case(
        name=f"Llama-3-70B layers, 22 GB, {blocks} blocks", chain=chain, hardware=SERVER, gpu_bytes=22 * GB,
        cpu_bytes=UNLIMITED,
    )  # fmt: skip


def random_case(seed: int) -> Case:
    """A random chain; its budget lies between the least possible and what keeping everything takes."""
    chain, hardware = random_chain(seed)
    budgets = Budgets(gpu_bytes=UNLIMITED, cpu_bytes=UNLIMITED)
    setting = Setting(chain=chain, hardware=hardware, budgets=budgets, slices=1, clip=False)
    everything = assemble(chain, resident(setting, profile(setting, "fast"), "resident"), slices=1, clip=False)
    most = gpu_peak_bytes(compile_program(everything, chain), chain)
    least = least_budget(chain, hardware, cpu_budget_bytes=UNLIMITED, slices=1, clip=False).gpu_bytes
    share = random.Random(seed + 10**6).uniform(0.05, 0.9)
    return Case(
        name=f"random {seed}", chain=chain, hardware=hardware, gpu_bytes=least + int(share * (most - least)),
        cpu_bytes=UNLIMITED,
    )  # fmt: skip


def measure(case: Case, repeats: int) -> Result:
    """Build, solve and plan `case`, each `repeats` times."""
    budgets = Budgets(gpu_bytes=case.gpu_bytes, cpu_bytes=case.cpu_bytes, barrier=False)  # as the planner asks first
    build, solve, plans, own = [], [], [], []
    for _ in range(repeats):
        start = time.perf_counter()
        instance = make_instance(case.chain, case.hardware, budgets=budgets, slices=1, clip=False)
        problem = _build(instance).rows.problem
        build.append(time.perf_counter() - start)
        start = time.perf_counter()
        solve_oilp(instance, time_limit_s=TIME_LIMIT_S, gap=GAP)  # builds it once more
        solve.append(time.perf_counter() - start - build[-1])
        start, start_cpu = time.perf_counter(), time.process_time()
        plan = make_plan(
            case.chain, case.hardware, gpu_budget_bytes=case.gpu_bytes, cpu_budget_bytes=case.cpu_bytes, slices=1,
            clip=False, time_limit_s=TIME_LIMIT_S, gap=GAP,
        )  # fmt: skip
        plans.append(time.perf_counter() - start)
        own.append(time.process_time() - start_cpu)
    return Result(
        name=case.name, blocks=len(case.chain.blocks), columns=len(problem.variables()),
        rows=len(problem.constraints), nonzeros=sum(len(row) for row in problem.constraints.values()),
        build_s=min(build), solve_s=min(solve), plan_s=tuple(plans), plan_cpu_s=tuple(own), solver_gap=plan.solver_gap,
        lp_step_s=plan.lp_step_s, step_s=plan.step_s, bound_s=plan.bound_s, source=plan.source,
    )  # fmt: skip


def show_profile(case: Case) -> None:
    """Seconds by function of one `make_plan`, callees included."""
    profiler = cProfile.Profile()
    profiler.enable()
    make_plan(
        case.chain, case.hardware, gpu_budget_bytes=case.gpu_bytes, cpu_budget_bytes=case.cpu_bytes, slices=1,
        clip=False, time_limit_s=TIME_LIMIT_S, gap=GAP,
    )  # fmt: skip
    profiler.disable()
    pstats.Stats(profiler).sort_stats("cumulative").print_stats("planner|pulp.*solve|highs", 30)


HEADER = (
    "blocks  columns   rows  nonzeros  build s  solve s  solver's gap  plan s (least, most)  its CPU s  rounding"
    "  to bound"
)


def line(r: Result) -> str:
    """One row of the table."""
    return (
        f"{r.blocks:6d} {r.columns:8d} {r.rows:6d} {r.nonzeros:9d} {r.build_s:8.2f} {r.solve_s:8.2f} "
        f"{100 * r.solver_gap:12.2f}% {min(r.plan_s):12.2f} {max(r.plan_s):8.2f} {min(r.plan_cpu_s):9.2f} "
        f"{100 * r.rounding:8.2f}% {100 * r.to_bound:8.2f}%  {r.name}; {r.step_s:.3f} s, {r.source}"
    )


def summary(results: list[Result]) -> str:
    """The random chains in a few figures."""
    gaps, costs = [r.solver_gap for r in results], [r.rounding for r in results]
    seconds = [s for r in results for s in r.plan_cpu_s]
    over = sum(cost > 0.03 for cost in costs)
    return (
        f"{len(results)} random chains: solver's gap at most {100 * max(gaps):.2f}%, median "
        f"{100 * statistics.median(gaps):.2f}%; rounding at most {100 * max(costs):.2f}%, median "
        f"{100 * statistics.median(costs):.2f}%, over 3% on {over}; planning at most {max(seconds):.2f} s of its own"
    )


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, nargs="*", default=[16, 34, 82, 128], help="numbers of blocks")
    parser.add_argument("--random", type=int, default=50, help="how many random chains")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = [llama2_case(n) if n <= 34 else llama3_case(n) for n in options.cases]
    if options.profile:
        for case in cases:
            show_profile(case)
        return
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; gap asked for {GAP:.1%}")
    print(HEADER)
    results = []
    for case in cases:
        results.append(measure(case, options.repeat))
        print(line(results[-1]), flush=True)
        limit = BARS_S.get(results[-1].blocks)
        if limit:
            r = results[-1]
            bars = {
                "gap 0.5%": r.solver_gap <= GAP,
                f"{limit:.0f} s": min(r.plan_s) <= limit,
                f"{limit:.0f} s of its own": min(r.plan_cpu_s) <= limit,
                "rounding 3%": r.rounding <= 0.03,
            }
            print("       bars:", ", ".join(f"{bar} {'met' if met else 'NOT met'}" for bar, met in bars.items()))
    scattered = []
    for seed in range(options.random):
        scattered.append(measure(random_case(seed), 1))
        if scattered[-1].rounding > 0.03 or scattered[-1].solver_gap > 0.02:
            print(line(scattered[-1]), flush=True)
    if scattered:
        print(summary(scattered))
    if options.json:
        rows: dict[str, object] = {"chains": [asdict(r) for r in results], "random": [asdict(r) for r in scattered]}
        rows["load"] = os.getloadavg()
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
