"""Full fine-tuning with optimizer states, and activations, on NVMe drives: planned steps, and what they write.

    python -m benchmarks.states_on_disk [clipped] [CARD …]    Llama-3.1-8B at home
    python -m benchmarks.states_on_disk lohan       a model of 13 B on 1 to 12 drives, beside LoHan's measurements

bf16 with fp32 masters, slices of 1024 tokens; no clipping, unless asked for. At home: a drive that reads 7 and writes 5
GB/s, 2.5 GB/s for hours. LoHan's machine (its artifact's evaluation data): an RTX 4090 that computes at 158 TFLOP/s, a
server's memory (409.6 GB/s), data-centre drives that read 6.5 and write 3.4 GB/s for as long as it takes, batches of 32
rows.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from benchmarks.chains import Batch, Shape, head_s, layer_figures, llama_chain
from planner.errors import UserError
from planner.machine.cards import CARDS
from planner.machine.hardware import Hardware
from planner.machine.presets import MEMORY_SHARE, preset
from planner.schedule.compile import compile_program
from planner.schedule.simulate import written_bytes
from planner.search.from_disk import with_disk
from planner.search.problem import Problem

SHAPE = Shape(
    name="Llama-3.1-8B", layers=32, width=4096, key_width=1024, inner=14336, vocabulary=128256, heads=32, outputs=128256
)
GPT_13B = Shape(
    name="GPT-13B", layers=40, width=5120, key_width=5120, inner=13653, vocabulary=50257, heads=40, outputs=50257
)
LOHAN_S = {1: 69.5, 2: 40.5, 3: 32.1, 6: 21.4, 12: 18.4}
"""Seconds of its steps by drives, from the rates that it measured."""
TOKENS = 1024
SLICES = (1, 4, 16)
RAM_GIB = (32, 64)


def problem(card: str, ram_gib: int, slices: int) -> Problem:
    """The question, before it is decided what is on disk."""
    hardware = replace(
        preset(card, bf16=True, cpu_memory_bytes=ram_gib * 2**30),
        disk_read_bytes_per_s=7e9,
        disk_write_bytes_per_s=5e9,
        disk_sustained_bytes_per_s=2.5e9,
        disk_bytes=10**13,
    )
    return problem_on(hardware, SHAPE, card, rows=1, slices=slices)


def lohan_problem(drives: int, ram_gib: int) -> Problem:
    """LoHan's machine with less memory than its 768 GB."""
    hardware = replace(
        preset("rtx4090", bf16=True, cpu_memory_bytes=ram_gib * 2**30),
        flops_per_s=158e12,
        h2d_bytes_per_s=21e9,
        d2h_bytes_per_s=21e9,
        cpu_memory_bytes_per_s=0.75 * 409.6e9,
        cpu_update_parameters_per_s=0.6 * 409.6e9 / 28,
        disk_read_bytes_per_s=drives * 6.5e9,
        disk_write_bytes_per_s=drives * 3.4e9,
        disk_bytes=10**14,
    )
    return problem_on(hardware, GPT_13B, "rtx4090", rows=8, slices=4)


def problem_on(hardware: Hardware, shape: Shape, card: str, *, rows: int, slices: int) -> Problem:
    """The question, in slices of so many rows."""
    batch = Batch(rows=rows, length=TOKENS, number_bytes=2, state_bytes=12)
    layer = layer_figures(
        shape,
        batch,
        flops_per_s=hardware.flops_per_s,
        scores=False,
        memory_bytes_per_s=MEMORY_SHARE * CARDS[card].memory_bytes_per_s,
    )
    chain = llama_chain(shape, batch, layer, head_forward_s=head_s(shape, batch, flops_per_s=hardware.flops_per_s))
    return Problem(
        chain=chain,
        hardware=hardware,
        gpu_budget_bytes=hardware.gpu_bytes,
        cpu_budget_bytes=hardware.cpu_bytes,
        slices=slices,
        clip=False,
    )


def beside_lohan() -> None:
    """Print a row per number of drives."""
    print("| drives | LoHan, 768 GB | ours, 64 GB | bound | written | ours, 128 GB | bound | written |")
    print("|---|---|---|---|---|---|---|---|")
    for drives, seen_s in LOHAN_S.items():
        cells = [f"{drives}", f"{seen_s} s"]
        for ram_gib in (64, 128):
            asked = with_disk(lohan_problem(drives, ram_gib))
            plan = asked.plan()
            written = written_bytes(compile_program(plan, asked.chain))
            cells += [f"{plan.step_s:.1f} s", f"{plan.bound_s:.1f} s", f"{written / 1e9:.0f} GB"]
        print(f"| {' | '.join(cells)} |", flush=True)


def main(cards: list[str], *, clip: bool) -> None:
    """Print a row per machine and step."""
    print("| card, RAM | slices | step | bound | written | trailing | host peak | options | planned in |")
    print("|---|---|---|---|---|---|---|---|---|")
    for card in cards:
        for ram_gib in RAM_GIB:
            for slices in SLICES:
                began = time.monotonic()
                asked = with_disk(replace(problem(card, ram_gib, slices), clip=clip))
                try:
                    plan = asked.plan()
                except UserError as error:
                    print(f"| {card}, {ram_gib} GB | {slices} | {error.what} |", flush=True)
                    continue
                written = written_bytes(compile_program(plan, asked.chain))
                print(
                    f"| {card}, {ram_gib} GB | {slices} | {plan.step_s:.1f} s | {plan.bound_s:.1f} s"
                    f" | {written / 1e9:.0f} GB | {asked.chain.stored_bytes(plan.trailing()) / 1e9:.0f} GB"
                    f" | {plan.cpu_peak_bytes / 2**30:.1f} GiB"
                    f" | {plan.source}, {plan.rounds} rounds | {time.monotonic() - began:.0f} s |",
                    flush=True,
                )


if __name__ == "__main__":
    given = [name for name in sys.argv[1:] if name != "clipped"]
    beside_lohan() if given == ["lohan"] else main(given or ["rtx3060"], clip="clipped" in sys.argv[1:])
