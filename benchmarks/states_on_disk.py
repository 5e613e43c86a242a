"""Full fine-tuning of Llama-3.1-8B at home with optimizer states on an NVMe drive: planned steps, and what they write.

    python -m benchmarks.states_on_disk [CARD …]

bf16 with fp32 masters, slices of 1024 tokens, no clipping; a drive that reads 7 and writes 5 GB/s, 2.5 GB/s for hours.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from benchmarks.chains import Batch, Shape, head_s, layer_figures, llama_chain
from planner.errors import UserError
from planner.machine.presets import CARDS, MEMORY_SHARE, preset
from planner.schedule.compile import compile_program
from planner.schedule.simulate import written_bytes
from planner.search.problem import Problem
from planner.search.states_on_disk import with_states_on_disk

SHAPE = Shape(
    name="Llama-3.1-8B", layers=32, width=4096, key_width=1024, inner=14336, vocabulary=128256, heads=32, outputs=128256
)
TOKENS = 1024
SLICES = (1, 4, 16)
RAM_GIB = (32, 64)
PLAN_S = 120.0


def problem(card: str, ram_gib: int, slices: int) -> Problem:
    """The question, before it is decided what is on disk."""
    hardware = replace(
        preset(card, bf16=True, cpu_memory_bytes=ram_gib * 2**30), disk_read_bytes_per_s=7e9,
        disk_write_bytes_per_s=5e9, disk_sustained_bytes_per_s=2.5e9, disk_bytes=10**13,
    )  # fmt: skip
    batch = Batch(rows=1, length=TOKENS, number_bytes=2, state_bytes=12)
    layer = layer_figures(
        SHAPE, batch, flops_per_s=hardware.flops_per_s, scores=False,
        memory_bytes_per_s=MEMORY_SHARE * CARDS[card].memory_bytes_per_s,
    )  # fmt: skip
    chain = llama_chain(SHAPE, batch, layer, head_forward_s=head_s(SHAPE, batch, flops_per_s=hardware.flops_per_s))
    return Problem(
        chain=chain, hardware=hardware, gpu_budget_bytes=hardware.gpu_bytes, cpu_budget_bytes=hardware.cpu_bytes,
        slices=slices, clip=False,
    )  # fmt: skip


def main(cards: list[str]) -> None:
    """Print a row per machine and step."""
    print("| card, RAM | slices | step | bound | written | host peak | options | planned in |")
    print("|---|---|---|---|---|---|---|---|")
    for card in cards:
        for ram_gib in RAM_GIB:
            for slices in SLICES:
                began = time.monotonic()
                asked = with_states_on_disk(problem(card, ram_gib, slices))
                try:
                    plan = asked.plan(PLAN_S)
                except UserError as error:
                    print(f"| {card}, {ram_gib} GB | {slices} | {error.what} |", flush=True)
                    continue
                written = written_bytes(compile_program(plan, asked.chain))
                print(
                    f"| {card}, {ram_gib} GB | {slices} | {plan.step_s:.1f} s | {plan.bound_s:.1f} s"
                    f" | {written / 1e9:.0f} GB | {plan.cpu_peak_bytes / 2**30:.1f} GiB"
                    f" | {plan.source}, {plan.rounds} rounds | {time.monotonic() - began:.0f} s |", flush=True,
                )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:] or ["rtx3060"])
