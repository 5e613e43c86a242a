"""What becomes of a plan's bytes in the device's memory: in PyTorch's allocator, and with a place for each tensor.

    python benchmarks/arena.py 1B --slices 4
    python benchmarks/arena.py 0.3B --plans 200

Each way gets the same plans' allocations in the host's order: PyTorch's caching allocator as it is, the same with all
its memory in one segment from the beginning, and places found before the step (`planner/arrange/`). Last comes what
the allocator of `worker/runtime/arena.c` takes from the driver in three steps under the plan's peak, as part of it, how
many tensors do not find their places, and how often it calls the driver after the first step. From the second step on
slices are of the planned length, of half or of a quarter of it, as it happens. `--plans`: so many random plans of three
layers of the shape are run so, and those are printed that take other memory than planned.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parent.parent))

from planner.schedule.allocations import Allocations, allocations
from planner.schedule.chain import Chain
from planner.schedule.compile import OpKind, compile_program
from planner.schedule.places import grains
from planner.search.problem import Problem
from tests.support.arena_alone import replay, replay_random, shorter
from tests.support.cuda.memory import Allocator, Block
from tests.support.shapes import SHAPES, llama_chain, machine

MIB = 2**20
_HOST = 2**42
_SHARES = (1.0, 1.1, 1.3)
_STEPS = 2


def live_bytes(found: Allocations) -> int:
    """The most bytes that live tensors have at one time."""
    now = most = 0
    sizes: dict[object, int] = {}
    for tensor, size in events(found, 1):
        sizes.setdefault(tensor, grains(size))
        now += sizes[tensor] if size else -sizes.pop(tensor)
        most = max(most, now)
    return most


def reserved_bytes(found: Allocations, *, first: int = 0) -> int:
    """What the caching allocator takes; `first`: from one segment of so many bytes, of which it takes the low end."""
    nothing = SimpleNamespace(base=0, size=2**62)
    allocator = Allocator(
        cast(Any, nothing),
        free_bytes=lambda: 2**62,
        done=lambda stream: lambda: True,
        finish=lambda: None,
        freed=lambda block: None,
        mapped=lambda address, size: None,
    )
    highest = 0
    if first:
        allocator.free(allocator.allocate(first, None))
    blocks: dict[object, Block] = {}
    for tensor, size in events(found, _STEPS):
        if size:
            blocks[tensor] = block = allocator.allocate(size, None)
            if block.address < first:
                highest = max(highest, block.address + block.size)
        else:
            allocator.free(blocks.pop(tensor))
    return highest + allocator.reserved.peak - first


def events(found: Allocations, steps: int) -> Iterator[tuple[object, int]]:
    """(tensor, bytes, or 0 when it goes) from the beginning through so many steps."""
    there = {item: [(item, n) for n, _ in enumerate(given)] for item, given in found.standing.items()}
    for item, given in found.standing.items():
        yield from zip(cast(list[object], there[item]), (e.bytes for e in given), strict=True)
    for step in range(steps):
        names: dict[int, object] = {}
        for item, given in found.standing.items():
            names |= zip((e.number for e in given), cast(list[object], there[item]), strict=True)
        for op, its in found.steps:
            new: list[object] = []
            for event in its:
                name = names.setdefault(event.number, (step, event.number))
                if event.bytes:
                    new.append(name)
                yield name, event.bytes
            if op.kind is OpKind.ALLOC and op.subject in there:
                there[op.subject] = cast(Any, new)


def try_plans(chain: Chain, others: Sequence[Chain], count: int) -> None:
    """Print those that take other memory than planned, and how many do not."""
    right = 0
    for seed in range(count):
        plan, run = replay_random(chain, seed, others=others)
        if (run.reserved_bytes, run.calls, run.strays) == (plan.gpu_peak_bytes, 0, 0):
            right += 1
        else:
            print(f"{seed}: {run}, planned {plan.gpu_peak_bytes}", flush=True)
    print(f"{right} of {count} plans run in the memory they say, without a call of the driver after the first step")


def main() -> None:
    """Plan and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--slices", type=int, default=4)
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--seconds", type=float, default=15.0, help="for a plan")
    parser.add_argument("--plans", type=int, default=0)
    given = parser.parse_args()
    layers = 3 if given.plans else None
    chain = llama_chain(given.shape, layers=layers)
    others = [shorter(chain, llama_chain(given.shape, layers=layers, length=length)) for length in (512, 256)]
    if given.plans:
        try_plans(chain, others, given.plans)
        return
    settings: dict[str, Any] = {"cpu_budget_bytes": _HOST, "slices": given.slices, "clip": given.clip}
    least = Problem(chain=chain, hardware=machine(), gpu_budget_bytes=0, **settings).least().gpu_bytes
    print("budget   live bytes   caching allocator   one segment   places   run: of the peak, strays, calls")
    for share in _SHARES:
        budget = int(share * least)
        plan = Problem(
            chain=chain,
            hardware=machine(),
            gpu_budget_bytes=budget,
            **settings,
        ).plan()
        found = allocations(compile_program(plan, chain), chain)
        live = live_bytes(found)
        default, one = reserved_bytes(found), reserved_bytes(found, first=4 * live)
        run = replay(replace(plan, gpu_budget_bytes=plan.gpu_peak_bytes), chain, others=others)
        print(
            f"{budget / MIB:5.0f} MiB   {live / MIB:5.0f} MiB   {default / live:.3f}   {one / live:.3f}   "
            f"{plan.gpu_peak_bytes / live:.3f}   {run.reserved_bytes / plan.gpu_peak_bytes:.3f}   {run.strays}   "
            f"{run.calls}",
            flush=True,
        )


if __name__ == "__main__":
    main()
