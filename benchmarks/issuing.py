"""Processor time of issuing a layer's forward and backward on one slice: plain PyTorch's, all on the device, with
weights and activations that travel, and at the least budget, paired in one run.

    python benchmarks/issuing.py [--rounds 30] [--layers 16] [--slices 4] [--dtype bf16] [--json]

Tensors are so small that computing is next to nothing, and torch has one thread: what is counted is Python's and
PyTorch's way to each operation, of all threads that issue, updates and frame included. Steps take turns, so that a slow
moment of the machine meets all four. It is counted on the CPU device: what a card needs beside is calls of its driver.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads would count while they wait for each other
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from torch import nn

from benchmarks.spread import Spread
from planner.candidate.candidate import assemble
from planner.candidate.setting import Budgets, Setting
from planner.greedy.streaming import profile, streamed
from planner.measure.analysis import analyse_model, estimate_times
from planner.measure.machine_rates import estimate_hardware
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan
from planner.search.problem import Problem
from tests.support.engine_plans import adamw, resident_plan
from tests.support.plain_engine import PlainEngine
from worker.engine.engine import Engine

WIDTH, VOCABULARY, LENGTH = 64, 128, 16
MOVED_BYTES = 1024  # norms stay on the device, matrices travel: as they do where they are large
WARM = 3
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def make_model(layers: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).to(dtype).train()


def plans(
    layers: int, slices: int, dtype: torch.dtype, batch: Mapping[str, torch.Tensor]
) -> tuple[Chain, dict[str, Plan]]:
    """All on the device; streamed, with activations offloaded; and the plan for the least budget."""
    device = torch.device("cpu")
    hardware = replace(estimate_hardware(device), min_transfer_bytes=MOVED_BYTES, cpu_bytes=2**34)
    analysis = analyse_model(make_model(layers, dtype), batch, device=device)
    chain = analysis.chain(estimate_times(analysis, hardware))
    problem = Problem(
        chain=chain, hardware=hardware, gpu_budget_bytes=0, cpu_budget_bytes=2**34, slices=slices, clip=True
    )
    problem = replace(problem, gpu_budget_bytes=problem.least().gpu_bytes)
    budgets = Budgets(gpu_bytes=2**40, cpu_bytes=2**40)
    setting = Setting(chain=chain, hardware=hardware, budgets=budgets, slices=slices, clip=True)
    offloading = streamed(setting, profile(setting, "offload"), ahead=True, source="streamed")
    return chain, {
        "resident": resident_plan(chain, slices=slices, clip=True),
        "streamed": assemble(chain, offloading, slices=slices, clip=True),
        "least": problem.plan(),
    }


def measure(layers: int, slices: int, dtype: torch.dtype, rounds: int) -> dict[str, list[float]]:
    """Name -> milliseconds for a layer and slice, of each round."""
    ids = torch.randint(0, VOCABULARY, (slices, 1, LENGTH), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": i, "labels": i.clone()} for i in ids]
    chain, made = plans(layers, slices, dtype, batches[0])
    device, optimizer = torch.device("cpu"), adamw(make_model(layers, dtype))
    plain = PlainEngine(make_model(layers, dtype), optimizer=optimizer, max_grad_norm=1.0)
    engines = {
        name: Engine(
            make_model(layers, dtype), plan=plan, chain=chain, optimizer=optimizer, max_grad_norm=1.0, device=device
        )
        for name, plan in made.items()
    }
    drains = {name: engine.drain for name, engine in engines.items()}
    steps: dict[str, Callable[..., object]] = {"plain": plain.step, **{name: e.step for name, e in engines.items()}}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(WARM + rounds):
        for name, step in steps.items():
            begin = time.process_time()
            step(batches, seeds=range(slices), learning_rate=1e-4, num_items_in_batch=slices * (LENGTH - 1))
            drains.get(name, lambda: None)()
            if number >= WARM:
                found[name].append(1e3 * (time.process_time() - begin) / (layers * slices))
    for engine in engines.values():
        engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--slices", type=int, default=4)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options.layers, options.slices, DTYPES[options.dtype], options.rounds)
    if options.json:
        print(json.dumps(found))
        return
    print(f"torch {torch.__version__}, {options.layers} layers, {options.slices} slices, {options.dtype}")
    print("            ms of processor time a layer and slice    ratio to plain: median (least, greatest)")
    for name, times in found.items():
        print(f"{name:10s}  {Spread.of(times):.3f}    {Spread.of_ratios(times, found['plain']):.3f}")


if __name__ == "__main__":
    main()
