"""Problems to plan: Llamas on the papers' and on larger machines, and irregular random chains."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from benchmarks import paper000
from benchmarks.chains import GB, LLAMA3_70B, SERVER, Batch, head_s, layer_figures, llama_chain, random_chain
from planner.candidate.candidate import assemble
from planner.candidate.setting import Budgets, Setting
from planner.greedy.streaming import profile, resident
from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain
from planner.schedule.compile import compile_program
from planner.schedule.memory_use import gpu_peak_bytes
from planner.search.problem import Problem

UNLIMITED = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem to plan."""

    name: str
    chain: Chain
    hardware: Hardware
    gpu_bytes: int
    cpu_bytes: int
    slices: int = 1
    clip: bool = False


def llama2_case(blocks: int) -> Case:
    """Llama2-7B's layers on the RTX 3060 of paper 000; 34 blocks are the whole model."""
    return Case(
        name=f"Llama2-7B layers, RTX 3060, {blocks} blocks",
        chain=paper000.chain(layers=blocks - 2),
        hardware=paper000.hardware(),
        gpu_bytes=paper000.BUDGET,
        cpu_bytes=paper000.HOST,
    )


def llama3_case(blocks: int) -> Case:
    """Llama-3-70B's layers, bf16 with fp32 masters, 4 × 512 tokens, 22 GB; 82 blocks are the whole model."""
    batch = Batch(rows=4, length=512, number_bytes=2, state_bytes=12)
    shape = replace(LLAMA3_70B, layers=blocks - 2)
    layer = layer_figures(shape, batch, flops_per_s=SERVER.flops_per_s, memory_bytes_per_s=1000.0 * GB, scores=False)
    chain = llama_chain(shape, batch, layer, head_forward_s=head_s(shape, batch, flops_per_s=SERVER.flops_per_s))
    return Case(
        name=f"Llama-3-70B layers, 22 GB, {blocks} blocks",
        chain=chain,
        hardware=SERVER,
        gpu_bytes=22 * GB,
        cpu_bytes=UNLIMITED,
    )


def random_case(seed: int) -> Case:
    """A random chain of 4 to 14 blocks."""
    return _between(f"random {seed}", seed, *random_chain(seed))


def irregular_case(seed: int) -> Case:
    """A random chain of 42 blocks."""
    return _between(f"irregular {seed}", seed, *random_chain(seed, layers=40))


def _between(name: str, seed: int, chain: Chain, hardware: Hardware) -> Case:
    """Its budget lies between the least possible and what keeping everything takes."""
    budgets = Budgets(gpu_bytes=UNLIMITED, cpu_bytes=UNLIMITED)
    setting = Setting(chain=chain, hardware=hardware, budgets=budgets, slices=1, clip=False)
    everything = assemble(chain, resident(setting, profile(setting, "fast"), "resident"), slices=1, clip=False)
    most = gpu_peak_bytes(compile_program(everything, chain), chain)
    least = (
        Problem(
            chain=chain,
            hardware=hardware,
            gpu_budget_bytes=0,
            cpu_budget_bytes=UNLIMITED,
            slices=1,
            clip=False,
        )
        .least()
        .gpu_bytes
    )
    share = random.Random(seed + 10**6).uniform(0.05, 0.9)
    return Case(
        name=name,
        chain=chain,
        hardware=hardware,
        gpu_bytes=least + int(share * (most - least)),
        cpu_bytes=UNLIMITED,
    )
