"""What plain PyTorch needs for a job: peak device bytes and step time, everything on one device, no plan.

    python benchmarks/plain_peak.py examples/pydoc.yaml

The model as the job makes it, `AdamW(fused=True)`, gradient accumulation over full-length rows of random tokens.
On the CPU the bytes are those planner/cpu/meter.py counts, which is what "on the device" means there; on a GPU they are
the allocator's. The first step, which makes the optimizer's states, is not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from planner.cpu.meter import Meter
from planner.job.schema import Job
from planner.units import format_bytes, format_seconds


def plain_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, slices: list[torch.Tensor]) -> None:
    """One optimizer step as a plain training loop does it: `slices` are [rows, length] token ids."""
    items = sum(ids[:, 1:].numel() for ids in slices)
    for ids in slices:
        model(input_ids=ids, labels=ids, num_items_in_batch=items).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def measure(job: Job, device: str, steps: int) -> tuple[int, float]:
    """Peak device bytes over all steps, and the median seconds of the later ones."""
    meter = Meter()
    with meter.watch() if device == "cpu" else contextlib.nullcontext():
        torch.manual_seed(job.seed)
        config = AutoConfig.from_pretrained(job.model)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=job.attn_implementation,
            dtype=torch.bfloat16 if job.bf16 else torch.float32,
        ).to(device)  # fmt: skip
        for tensor in (*model.parameters(), *model.buffers()):
            meter.add(tensor)
        optimizer = torch.optim.AdamW(model.parameters(), lr=job.learning_rate, fused=True)
        shape = (job.slice_rows, job.max_length)
        slices = [
            torch.randint(config.vocab_size, shape, device=device) for _ in range(job.gradient_accumulation_steps)
        ]
        meter.reset_peak()
        seconds = []
        for _ in range(steps + 1):
            start = time.perf_counter()
            plain_step(model, optimizer, slices)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    peak = meter.peak if device == "cpu" else torch.cuda.max_memory_allocated()
    return peak, statistics.median(seconds[1:])


def main() -> None:
    """Measure the job named on the command line and print one line of JSON after the words."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    peak, seconds = measure(Job.load(options.job), options.device, options.steps)
    words = f"plain peak {format_bytes(peak)}, 40% of it {format_bytes(peak * 2 // 5)}, step {format_seconds(seconds)}"
    print(words)
    print(json.dumps({"device": options.device, "peak_bytes": peak, "step_s": seconds}))


if __name__ == "__main__":
    main()
