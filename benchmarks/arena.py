"""What a fixed arena for planned tensors would cost, beside PyTorch's allocator for all that turns make themselves.

    python benchmarks/arena.py

An arena with fixed offsets needs the most bytes that weights, states, gradients and offloaded activations have at any
time of the step, and the allocator the most that everything else has. One memory for both needs the most of the sum.
The arena is taken to be packed without a gap.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.cases import Case, llama2_case, llama3_case
from benchmarks.chains import GB
from planner.schedule.compile import compile_program
from planner.schedule.memory import Parts, gpu_breakdown
from planner.search.make_plan import make_plan

_SOLVER_S = 10.0


def measure(case: Case, *, clip: bool) -> tuple[int, int, int]:
    """Of the case's plan: bytes of one memory for all, of the arena, and of the rest."""
    plan = make_plan(
        case.chain, case.hardware, gpu_budget_bytes=case.gpu_bytes, cpu_budget_bytes=case.cpu_bytes, slices=1,
        clip=clip, time_limit_s=_SOLVER_S,
    )  # fmt: skip
    moments = [found.peak for found in gpu_breakdown(compile_program(plan, case.chain), case.chain)]
    return (
        max(parts.total_bytes for parts in moments),
        max(_planned_bytes(parts) for parts in moments),
        max(parts.total_bytes - _planned_bytes(parts) for parts in moments),
    )


def _planned_bytes(parts: Parts) -> int:
    return parts.weights_bytes + parts.states_bytes + parts.gradients_bytes + parts.offloaded_bytes


def main() -> None:
    """Plan and print."""
    print("case                                            one memory       arena        rest   arena and rest / one")
    for case in (llama2_case(16), llama2_case(34), llama3_case(16)):
        for clip in (False, True):
            one, arena, rest = measure(case, clip=clip)
            name = case.name + (", clipped" if clip else "")
            print(
                f"{name:46s} {one / GB:8.2f} GB {arena / GB:8.2f} GB {rest / GB:8.2f} GB   {(arena + rest) / one:.2f}"
            )


if __name__ == "__main__":
    main()
