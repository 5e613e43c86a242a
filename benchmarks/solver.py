"""How large the O-ILP is, how long the planner takes, how near it gets, and what whole tensors cost.

    nice python benchmarks/solver.py [--cases 16 34 82 128] [--random 50 [--first SEED] [--time-limit SECONDS]
        [--whole-limit SECONDS]] [--repeat 3] [--profile] [--json FILE]

For each chain: columns, rows, nonzeros, seconds to build and to solve the O-ILP alone (least of the repeats), the
solver's gap, seconds of `make_plan` in all, candidates, rounding, proofs and simulation included (least and greatest of
the repeats, and the least of the process's own time), the step before rounding (`lp_step_s`), after it (`step_s`), and
the bound for any schedule. Seconds are of this machine; gaps and ratios are not. With --profile: where the time of one
`make_plan` goes, by function.

Random chains are also held against the fastest greedy plan, the budgets, and, with --whole-limit, the O-ILP with a
binary per tensor and fate (`benchmarks/yardsticks.py`): `lp_step_s` splits tensors at will, which no plan does. The
JSON is written after every chain; a chain that fails is reported with its error, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.cases import Case, llama2_case, llama3_case, random_case
from benchmarks.yardsticks import WholeTensors, greedy_step_s, whole_tensors
from planner.draft.setting import Budgets
from planner.ilp.instance import make_instance
from planner.ilp.program import build, solve_oilp
from planner.search.make_plan import make_plan

GAP, TIME_LIMIT_S = 0.005, 300.0  # other work on the machine must not cut a search short
BAR = 0.03  # of lp_step_s, for whole tensors
BARS_S = {34: 3.0, 82: 15.0, 128: 30.0}


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
    within_budget: bool

    @property
    def rounding(self) -> float:
        return self.step_s / self.lp_step_s - 1 if self.lp_step_s else float("nan")

    @property
    def to_bound(self) -> float:
        return 1 - self.bound_s / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Scattered:
    """A random chain: what was seen, and what it is held against. `whole`: None where not asked for or not found."""

    result: Result
    greedy_s: float | None
    whole: WholeTensors | None

    @property
    def worse_than_greedy(self) -> bool:
        return self.greedy_s is not None and self.result.step_s > self.greedy_s * (1 + 1e-9)

    @property
    def integrality(self) -> float | None:
        """What whole tensors cost the solver itself; None where its answer may be off by more than the gap."""
        if self.whole is None or self.whole.bound_s < self.whole.step_s * (1 - 1.01 * GAP):
            return None
        return self.whole.step_s / self.result.lp_step_s - 1 if self.result.lp_step_s else None

    @property
    def to_whole(self) -> float | None:
        """What the plan's step is above the best step of whole tensors."""
        if self.integrality is None or self.whole is None:
            return None
        return self.result.step_s / self.whole.step_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A chain that could not be planned."""

    name: str
    error: str


def measure(case: Case, repeats: int, time_limit_s: float) -> Result:
    """Build, solve and plan `case`, each `repeats` times."""
    budgets = Budgets(gpu_bytes=case.gpu_bytes, cpu_bytes=case.cpu_bytes, barrier=False)  # as the planner asks first
    built, solved, plans, own = [], [], [], []
    for _ in range(repeats):
        start = time.perf_counter()
        instance = make_instance(case.chain, case.hardware, budgets=budgets, slices=1, clip=False)
        problem = build(instance).rows.problem
        built.append(time.perf_counter() - start)
        start = time.perf_counter()
        solve_oilp(instance, time_limit_s=time_limit_s, gap=GAP)  # builds it once more
        solved.append(time.perf_counter() - start - built[-1])
        start, start_cpu = time.perf_counter(), time.process_time()
        plan = make_plan(
            case.chain, case.hardware, gpu_budget_bytes=case.gpu_bytes, cpu_budget_bytes=case.cpu_bytes, slices=1,
            clip=False, time_limit_s=time_limit_s, gap=GAP,
        )  # fmt: skip
        plans.append(time.perf_counter() - start)
        own.append(time.process_time() - start_cpu)
    return Result(
        name=case.name, blocks=len(case.chain.blocks), columns=len(problem.variables()),
        rows=len(problem.constraints), nonzeros=sum(len(row) for row in problem.constraints.values()),
        build_s=min(built), solve_s=min(solved), plan_s=tuple(plans), plan_cpu_s=tuple(own), solver_gap=plan.solver_gap,
        lp_step_s=plan.lp_step_s, step_s=plan.step_s, bound_s=plan.bound_s, source=plan.source,
        within_budget=plan.gpu_peak_bytes <= case.gpu_bytes and plan.cpu_peak_bytes <= case.cpu_bytes,
    )  # fmt: skip


def measure_random(seed: int, time_limit_s: float, whole_limit_s: float) -> Scattered:
    """Plan a random chain, and find what to hold the plan against."""
    case = random_case(seed)
    result = measure(case, 1, time_limit_s)
    budgets = Budgets(gpu_bytes=case.gpu_bytes, cpu_bytes=case.cpu_bytes, barrier=False)
    whole = None
    if whole_limit_s > 0:
        whole = whole_tensors(case.chain, case.hardware, budgets, time_limit_s=whole_limit_s, gap=GAP)
    return Scattered(result=result, greedy_s=greedy_step_s(case.chain, case.hardware, budgets), whole=whole)


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


def percent(share: float | None) -> str:
    """For the table."""
    return "?" if share is None else f"{100 * share:.2f}%"


def random_line(s: Scattered) -> str:
    """One row of the table, with what whole tensors cost."""
    return f"{line(s.result)}; integrality {percent(s.integrality)}, above whole tensors {percent(s.to_whole)}"


def summary(seen: list[Scattered], failures: list[Failure]) -> str:
    """The random chains in a few figures."""
    gaps = [s.result.solver_gap for s in seen]
    costs = [s.result.rounding for s in seen if s.result.lp_step_s]
    seconds = [own for s in seen for own in s.result.plan_cpu_s]
    above = [s.to_whole for s in seen if s.to_whole is not None]
    parts = [s.integrality for s in seen if s.integrality is not None]
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
    if above:
        text += (
            f"\nthe best step of whole tensors, where solved ({len(above)}): above lp_step_s by at most "
            f"{percent(max(parts))}; plans above it by at most {percent(max(above))}, median "
            f"{percent(statistics.median(above))}, over 3% on {sum(cost > BAR for cost in above)}"
        )
    return text


def measure_chains(sizes: list[int], repeats: int) -> list[Result]:
    """The chains of fixed size, with their bars."""
    results = []
    for case in [llama2_case(n) if n <= 34 else llama3_case(n) for n in sizes]:
        r = measure(case, repeats, TIME_LIMIT_S)
        results.append(r)
        print(line(r), flush=True)
        limit = BARS_S.get(r.blocks)
        if limit:
            bars = {
                "gap 0.5%": r.solver_gap <= GAP,
                f"{limit:.0f} s": min(r.plan_s) <= limit,
                f"{limit:.0f} s of its own": min(r.plan_cpu_s) <= limit,
                "rounding 3%": r.rounding <= BAR,
            }
            print("       bars:", ", ".join(f"{bar} {'met' if met else 'NOT met'}" for bar, met in bars.items()))
    return results


def main() -> int:
    """Measure what the command line asks for; 1 where a random chain failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, nargs="*", default=[16, 34, 82, 128], help="numbers of blocks")
    parser.add_argument("--random", type=int, default=50, help="how many random chains")
    parser.add_argument("--first", type=int, default=0, help="the first random chain's seed")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds to plan a random chain")
    parser.add_argument(
        "--whole-limit", type=float, default=60.0, help="for the best step of whole tensors; 0: not asked"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.profile:
        for n in options.cases:
            show_profile(llama2_case(n) if n <= 34 else llama3_case(n))
        return 0
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; gap asked for {GAP:.1%}")
    print(HEADER)
    results = measure_chains(options.cases, options.repeat)
    seen: list[Scattered] = []
    failures: list[Failure] = []
    for seed in range(options.first, options.first + options.random):
        try:
            seen.append(measure_random(seed, options.time_limit, options.whole_limit))
        except Exception:  # whatever it is, it is a failure, and the others are planned all the same
            failures.append(Failure(name=f"random {seed}", error=traceback.format_exc()))
            print(failures[-1].name, "FAILED:", failures[-1].error, flush=True)
        else:
            last = seen[-1]
            good = last.result.rounding <= BAR and last.result.solver_gap <= 0.02 and last.result.within_budget
            if not good or last.worse_than_greedy:
                print(random_line(last), flush=True)
        if options.json:
            _write(options, results, seen, failures)
    if seen:
        print(summary(seen, failures))
    if options.json:
        _write(options, results, seen, failures)
    return 1 if failures else 0


def _write(
    options: argparse.Namespace, results: list[Result], seen: list[Scattered], failures: list[Failure]
) -> None:  # fmt: skip
    rows = {
        "chains": [asdict(r) for r in results], "random": [asdict(s) for s in seen],
        "failures": [asdict(f) for f in failures], "time_limit_s": options.time_limit,
        "whole_limit_s": options.whole_limit, "load": os.getloadavg(),
    }  # fmt: skip
    part = options.json.with_suffix(".part")  # a run that is stopped leaves a whole file
    part.write_text(json.dumps(rows, indent=1) + "\n")
    part.replace(options.json)


if __name__ == "__main__":
    sys.exit(main())
