"""Step time of offmate with everything kept on the device, as a ratio to plain PyTorch, paired in one run.

    python benchmarks/step_overhead.py [--pairs 15] [--json]

Both train the same Llama on the same batches with AdamW(fused=True); steps alternate, so that a slow moment of the
machine meets both. Printed are the median, least and greatest ratio of paired steps per size of block.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.spread import Spread
from planner.measure.analysis import analyse_model, estimate_times
from planner.measure.machine_rates import estimate_hardware
from planner.schedule.compile import compile_program
from planner.schedule.plan import Plan
from planner.schedule.verify import verify
from tests.support.engine_plans import adamw, resident_plan
from tests.support.plain_engine import PlainEngine
from worker.engine.engine import Engine

LAYERS, ROWS, LENGTH = 4, 4, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Step times over plain PyTorch's, pair by pair, and the seconds of a block within the plain one."""

    width: int
    slices: int
    block_s: float
    ratios: tuple[float, ...]


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=LAYERS,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).train()


def measure(width: int, slices: int, pairs: int, device: torch.device) -> Measured:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 512, (slices, ROWS, LENGTH), generator=generator)
    batches = [{"input_ids": i, "labels": i.clone()} for i in ids]
    analysis = analyse_model(make_model(width), batches[0], device=device)
    chain = analysis.chain(estimate_times(analysis, estimate_hardware(device)))
    plan: Plan = resident_plan(chain, slices=slices)
    verify(compile_program(plan, chain), chain)
    model, plain_model = make_model(width), make_model(width).to(device)
    optimizer = adamw(model)
    engine = Engine(model, plan=plan, chain=chain, optimizer=optimizer, max_grad_norm=None, device=device)
    plain = PlainEngine(plain_model, optimizer=optimizer, max_grad_norm=None, device=device)
    times: dict[str, list[float]] = {"engine": [], "plain": []}

    def step(name: str, run: Callable[..., object], number: int) -> None:
        start = time.perf_counter()
        run(batches, seeds=range(slices), learning_rate=1e-4, num_items_in_batch=slices * ROWS * (LENGTH - 1))
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= 2:  # the first ones warm up
            times[name].append(time.perf_counter() - start)

    for number in range(pairs + 2):
        order = [("engine", engine.step), ("plain", plain.step)]
        for name, run in order if number % 2 else reversed(order):
            step(name, run, number)
    engine.close()
    ratios = tuple(a / b for a, b in zip(times["engine"], times["plain"], strict=True))
    block_s = statistics.median(times["plain"]) / (LAYERS * slices)
    return Measured(width=width, slices=slices, block_s=block_s, ratios=ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = [
        measure(width, slices, options.pairs, device) for width, slices in ((64, 1), (128, 1), (256, 1), (256, 4))
    ]
    if options.json:
        print(json.dumps([{k: getattr(r, k) for k in Measured.__slots__} for r in results]))
        return
    print(f"torch {torch.__version__} on {device}, {torch.get_num_threads()} threads")
    print("width  slices  block fwd+bwd  step time, ratio to plain: median (least, greatest)")
    for r in results:
        print(f"{r.width:5d}  {r.slices:6d}  {1e3 * r.block_s:10.1f} ms  {Spread.of(r.ratios):.3f}")


if __name__ == "__main__":
    main()
