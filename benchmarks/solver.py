"""How large the O-ILP is, how long the planner takes, how near it gets, and what whole tensors cost.

    nice python benchmarks/solver.py [--cases 16 34 82 128] [--slices 1 4] [--clip no yes] [--irregular 10]
        [--random 50 [--first SEED]] [--repeat 3] [--profile] [--json FILE]

For each chain: columns, rows, nonzeros, seconds to build and to solve the O-ILP alone (least of the repeats), the
solver's gap, seconds of `make_plan` in all, candidates, rounding, proofs and simulation included (least and greatest of
the repeats, and the least of the process's own time in user mode), the step before rounding (`lp_step_s`), after it
(`step_s`), and the bound for any schedule. Seconds are of this machine; gaps and ratios are not. With --profile: where
the time of one `make_plan` goes, by function.

Irregular chains have 42 blocks, random ones 4 to 14; budgets lie between the least possible and what keeping everything
takes. Random chains are also held against the fastest greedy plan and the budgets. The JSON is written after every
chain; a chain that fails is reported with its error, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.cases import Case, irregular_case, llama2_case, llama3_case, random_case
from benchmarks.yardsticks import greedy_step_s
from planner.candidate.setting import Budgets, Setting
from planner.ilp.instance import make_instance
from planner.ilp.program import build, solve_oilp
from planner.schedule.plan import Plan
from planner.search.problem import Problem

GAP = 0.005
BAR = 0.03  # of lp_step_s, for whole tensors
BARS_S = {34: 3.0, 82: 15.0, 128: 30.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was seen; seconds of this machine."""

    name: str
    blocks: int
    slices: int
    clip: bool
    columns: int
    rows: int
    nonzeros: int
    build_s: float
    solve_s: float
    plan_s: tuple[float, ...]
    plan_cpu_s: tuple[float, ...]  # the process's own time in user mode
    solver_gap: float
    lp_step_s: float
    step_s: float
    bound_s: float
    rounds: int
    source: str
    within_budget: bool

    @property
    def rounding(self) -> float:
        return self.step_s / self.lp_step_s - 1 if self.lp_step_s else float("nan")

    @property
    def to_bound(self) -> float:
        return 1 - self.bound_s / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Scattered:
    """A random chain: what was seen, and what it is held against."""

    result: Result
    greedy_s: float | None

    @property
    def worse_than_greedy(self) -> bool:
        return self.greedy_s is not None and self.result.step_s > self.greedy_s * (1 + 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A chain that could not be planned."""

    name: str
    error: str


def own_s() -> float:
    """Seconds of processor time of this process so far, in user mode."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def plan_of(case: Case) -> Plan:
    """The planner's answer."""
    return Problem(
        chain=case.chain,
        hardware=case.hardware,
        gpu_budget_bytes=case.gpu_bytes,
        cpu_budget_bytes=case.cpu_bytes,
        slices=case.slices,
        clip=case.clip,
    ).plan(gap=GAP)


def measure(case: Case, repeats: int) -> Result:
    """Build, solve and plan `case`, each `repeats` times."""
    budgets = Budgets(gpu_bytes=case.gpu_bytes, cpu_bytes=case.cpu_bytes)
    setting = Setting(chain=case.chain, hardware=case.hardware, budgets=budgets, slices=case.slices, clip=case.clip)
    built, solved, plans, own = [], [], [], []
    for _ in range(repeats):
        start = time.perf_counter()
        instance = make_instance(setting)
        problem = build(instance).rows.problem
        built.append(time.perf_counter() - start)
        start = time.perf_counter()
        solve_oilp(instance, gap=GAP)  # builds it once more
        solved.append(time.perf_counter() - start - built[-1])
        start, start_cpu = time.perf_counter(), own_s()
        plan = plan_of(case)
        plans.append(time.perf_counter() - start)
        own.append(own_s() - start_cpu)
    return Result(
        name=case.name,
        blocks=len(case.chain.blocks),
        slices=case.slices,
        clip=case.clip,
        columns=len(problem.variables()),
        rows=len(problem.constraints),
        nonzeros=sum(len(row) for row in problem.constraints.values()),
        build_s=min(built),
        solve_s=min(solved),
        plan_s=tuple(plans),
        plan_cpu_s=tuple(own),
        solver_gap=plan.solver_gap,
        lp_step_s=plan.lp_step_s,
        step_s=plan.step_s,
        bound_s=plan.bound_s,
        rounds=plan.rounds,
        source=plan.source,
        within_budget=plan.gpu_peak_bytes <= case.gpu_bytes and plan.cpu_peak_bytes <= case.cpu_bytes,
    )


def measure_random(seed: int) -> Scattered:
    """Plan a random chain, and find what to hold the plan against."""
    case = random_case(seed)
    budgets = Budgets(gpu_bytes=case.gpu_bytes, cpu_bytes=case.cpu_bytes)
    return Scattered(result=measure(case, 1), greedy_s=greedy_step_s(case.chain, case.hardware, budgets))


def show_profile(case: Case) -> None:
    """Seconds by function of one `make_plan`, callees included."""
    profiler = cProfile.Profile()
    profiler.enable()
    plan_of(case)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("cumulative").print_stats("planner|pulp.*solve|highs", 30)


HEADER = (
    "blocks slices clip  columns   rows  nonzeros  build s  solve s  solver's gap  plan s (least, most)  its CPU s"
    "  rounding  to bound"
)


def line(r: Result) -> str:
    """One row of the table."""
    return (
        f"{r.blocks:6d} {r.slices:6d} {'yes' if r.clip else 'no':>4s} {r.columns:8d} {r.rows:6d} {r.nonzeros:9d} "
        f"{r.build_s:8.2f} {r.solve_s:8.2f} {100 * r.solver_gap:12.2f}% {min(r.plan_s):12.2f} {max(r.plan_s):8.2f} "
        f"{min(r.plan_cpu_s):9.2f} {100 * r.rounding:8.2f}% {100 * r.to_bound:8.2f}%  {r.name}; {r.step_s:.4f} s, "
        f"{r.source}"
    )


def percent(share: float) -> str:
    """For the table."""
    return f"{100 * share:.2f}%"


def summary(seen: list[Scattered], failures: list[Failure]) -> str:
    """The random chains in a few figures."""
    gaps = [s.result.solver_gap for s in seen]
    costs = [s.result.rounding for s in seen if s.result.lp_step_s]
    seconds = [own for s in seen for own in s.result.plan_cpu_s]
    text = (
        f"{len(seen)} random chains and {len(failures)} failures; {sum(not s.result.within_budget for s in seen)} over "
        f"a budget, {sum(s.worse_than_greedy for s in seen)} worse than a greedy plan\n"
        f"solver's gap at most {percent(max(gaps))}, median {percent(statistics.median(gaps))}; "
        f"planning at most {max(seconds):.2f} s of its own, median {statistics.median(seconds):.2f} s"
    )
    if costs:
        text += (
            f"\nrounding at most {percent(max(costs))}, median {percent(statistics.median(costs))}, over 3% of "
            f"lp_step_s on {sum(cost > BAR for cost in costs)} of {len(costs)}"
        )
    return text


def chain_cases(sizes: list[int], slices: list[int], clips: list[bool]) -> Iterator[Case]:
    """The chains like real models."""
    for n in sizes:
        for count in slices:
            for clip in clips:
                yield replace(llama2_case(n) if n <= 34 else llama3_case(n), slices=count, clip=clip)


def measure_chains(cases: Iterator[Case], repeats: int) -> Iterator[Result]:
    """The chains of fixed size, with their bars."""
    for case in cases:
        r = measure(case, repeats)
        print(line(r), flush=True)
        limit = BARS_S.get(r.blocks) if r.slices == 1 and not r.clip else None
        if limit:
            bars = {
                "gap 0.5%": r.solver_gap <= GAP,
                f"{limit:.0f} s": min(r.plan_s) <= limit,
                f"{limit:.0f} s of its own": min(r.plan_cpu_s) <= limit,
                "rounding 3%": r.rounding <= BAR,
            }
            print("       bars:", ", ".join(f"{bar} {'met' if met else 'NOT met'}" for bar, met in bars.items()))
        yield r


def main() -> int:
    """Measure what the command line asks for; 1 where a random chain failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, nargs="*", default=[16, 34, 82, 128], help="numbers of blocks")
    parser.add_argument("--slices", type=int, nargs="*", default=[1], help="slices of a step, for each case")
    parser.add_argument("--clip", nargs="*", choices=("no", "yes"), default=["no"], help="clipping, for each case")
    parser.add_argument("--irregular", type=int, default=0, help="how many irregular chains of 42 blocks")
    parser.add_argument("--random", type=int, default=50, help="how many random chains")
    parser.add_argument("--first", type=int, default=0, help="the first random chain's seed")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = list(chain_cases(options.cases, options.slices, [clip == "yes" for clip in options.clip]))
    cases += [irregular_case(seed) for seed in range(options.irregular)]
    if options.profile:
        for case in cases:
            show_profile(case)
        return 0
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; gap asked for {GAP:.1%}")
    print(HEADER)
    results: list[Result] = []
    seen: list[Scattered] = []
    failures: list[Failure] = []
    for result in measure_chains(iter(cases), options.repeat):
        results.append(result)
        if options.json:
            _write(options.json, results, seen, failures)
    if options.irregular:
        costs = [r.rounding for r in results if r.name.startswith("irregular")]
        print(f"irregular chains: rounding {percent(statistics.median(costs))} in the median, at most {max(costs):.2%}")
    for seed in range(options.first, options.first + options.random):
        try:
            seen.append(measure_random(seed))
        except Exception:  # whatever it is, it is a failure, and the others are planned all the same
            failures.append(Failure(name=f"random {seed}", error=traceback.format_exc()))
            print(failures[-1].name, "FAILED:", failures[-1].error, flush=True)
        else:
            last = seen[-1]
            good = last.result.rounding <= BAR and last.result.solver_gap <= 0.02 and last.result.within_budget
            if not good or last.worse_than_greedy:
                print(line(last.result), flush=True)
        if options.json:
            _write(options.json, results, seen, failures)
    if seen:
        print(summary(seen, failures))
    return 1 if failures else 0


def _write(path: Path, results: list[Result], seen: list[Scattered], failures: list[Failure]) -> None:
    rows = {
        "chains": [asdict(r) for r in results],
        "random": [asdict(s) for s in seen],
        "failures": [asdict(f) for f in failures],
        "load": os.getloadavg(),
    }
    part = path.with_suffix(".part")  # a run that is stopped leaves a whole file
    part.write_text(json.dumps(rows, indent=1) + "\n")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
