"""What the fronts of options are worth: step and least budget with the five options of a layer, and with all.

    nice python benchmarks/options.py [CASE …]

Llama shapes without weights, on presets of cards: whole plans, verified and simulated, not only the solver's steps.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import LlamaConfig

from planner.errors import UserError
from planner.graph import RECIPES
from planner.job.schema import Job
from planner.machine.presets import preset
from planner.search.problem import Problem
from planner.units import format_bytes, format_seconds
from planner.whatif.trace import problem_of

LLAMA_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)
ALL_LINEAR = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


@dataclass(frozen=True, slots=True)
class Case:
    """A job of the 8 B model: adapters or all weights; `slices` of `rows` × `length` tokens; card and GiB of RAM."""

    lora: bool
    slices: int
    rows: int
    length: int
    card: str
    ram: int

    def problem(self, folder: Path) -> Problem:
        keys = {
            "model": str(folder),
            "max_length": self.length,
            "per_device_train_batch_size": self.rows,
            "bf16": True,
            "gradient_accumulation_steps": self.slices,
            "max_grad_norm": 0.0,
            "exact": False,
            **({"method": "lora", "lora_r": 16, "lora_target_modules": ALL_LINEAR} if self.lora else {}),
        }
        machine = preset(self.card, bf16=True, cpu_memory_bytes=self.ram * 2**30)
        return problem_of(Job.question(json.dumps(keys), folder.parent), machine, torch.device("cpu"))


CASES = {
    "lora-16k": Case(True, 1, 1, 16384, "rtx3060", 64),
    "lora-32k": Case(True, 1, 1, 32768, "rtx3060", 64),
    "lora-16k-4090": Case(True, 1, 1, 16384, "rtx4090", 64),
    "lora-32k-4090": Case(True, 1, 1, 32768, "rtx4090", 64),
    "lora-64k-4090": Case(True, 1, 1, 65536, "rtx4090", 128),
    "lora-8x4x1k": Case(True, 8, 4, 1024, "rtx3060", 64),
    "full-4x4x1k": Case(False, 4, 4, 1024, "rtx3060", 128),
}


def with_five(problem: Problem) -> Problem:
    """The same question without the options of fronts."""
    blocks = (
        replace(block, options=tuple(o for o in block.options if o.name in RECIPES) or block.options)
        for block in problem.chain.blocks
    )
    return replace(problem, chain=replace(problem.chain, blocks=tuple(blocks)))


def answer(problem: Problem) -> str:
    """Least budget, step and bound, and the processor's seconds for the plan."""
    least, start = problem.least_bytes(), time.process_time()
    try:
        plan = problem.plan()
    except UserError:
        return f"least {format_bytes(least or 0)}, does not fit"
    spent_s, step, bound = time.process_time() - start, format_seconds(plan.step_s), format_seconds(plan.bound_s)
    return f"least {format_bytes(least or 0)}, step {step}, bound {bound}, planned in {spent_s:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], default=[])
    chosen = parser.parse_args().cases or list(CASES)
    with tempfile.TemporaryDirectory() as folder:
        LLAMA_8B.save_pretrained(Path(folder) / "8b")
        for name in chosen:
            problem = CASES[name].problem(Path(folder) / "8b")
            for what, asked in (("five options", with_five(problem)), ("front", problem)):
                print(f"{name:14} {what:13} {answer(asked)}", flush=True)


if __name__ == "__main__":
    main()
