"""examples/pydoc.yaml's first steps in plain PyTorch, beside a run's: python examples/plain_pytorch.py [RUN]

`train` is a usual training loop, without any of offmate's engine; only the rows of each step come from offmate, since
both are to learn from the same ones. RUN is the run folder of a job of that file; without it only plain PyTorch speaks.
`offmate certify FILE` compares any job so, and all weights and moments with it.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from offmated.cli.output import table
from planner.cpu.meter import Meter
from planner.job.schema import Job
from planner.models.tokenizer import load_tokenizer
from planner.units import format_bytes, format_bytes_down, format_seconds
from worker.training.metrics import read_metrics

if TYPE_CHECKING:
    from worker.data.batches import Batches

FILE = Path(__file__).with_name("pydoc.yaml")
STEPS = 12
METERED = 2  # steps whose memory is counted, which takes time; the later ones are timed
SHOWN = (1, 2, 3, STEPS)


class Steps(NamedTuple):
    """The most bytes of tensors on the device, the loss of each step, and the median seconds of a step."""

    peak_bytes: int
    losses: list[float]
    step_s: float


def train(job: Job, batches: Batches, device: str) -> Steps:
    """The first steps of a job like examples/pydoc.yaml: all weights, fp32, AdamW, cosine, no clipping."""
    from transformers import get_cosine_schedule_with_warmup  # brings packages that speak when they are loaded

    torch.manual_seed(job.seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job.model), dtype=torch.float32).to(device)
    model.train()
    model.config.use_cache = False  # with a cache transformers lets the documents packed into a row see each other
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": job.weight_decay}, {"params": norms, "weight_decay": 0.0}],
        lr=job.learning_rate,
        betas=(job.adam_beta1, job.adam_beta2),
        eps=job.adam_epsilon,
        fused=True,
    )
    scheduler = get_cosine_schedule_with_warmup(optimizer, int(job.warmup_steps), batches.total_steps)

    def step(slices: list[dict[str, torch.Tensor]]) -> float:
        total = torch.zeros((), device=device)
        for batch in slices:
            given = {name: tensor.to(device) for name, tensor in batch.items()}
            loss = model(**given, num_items_in_batch=batches.num_items(slices)).loss
            loss.backward()
            total += loss.detach()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return float(total)

    meter, losses, seconds = Meter(), list[float](), list[float]()
    for tensor in (*model.parameters(), *model.buffers()):
        meter.add(tensor)
    with meter.watch():
        losses += [step(batches.step(number)) for number in range(METERED)]
    for number in range(METERED, STEPS):
        began = time.perf_counter()
        losses.append(step(batches.step(number)))
        seconds.append(time.perf_counter() - began)
    peak_bytes = torch.cuda.max_memory_allocated() if device == "cuda" else meter.peak
    return Steps(peak_bytes, losses, statistics.median(seconds))


def of_run(folder: Path) -> Steps:
    """The same of a run of offmate."""
    steps = [event for event in read_metrics(folder / "metrics.jsonl") if event["event"] == "step"]
    first = steps[:STEPS]
    return Steps(
        max(int(event["gpu_peak_bytes"] or 0) for event in steps),
        [float(event["loss"] or 0) for event in first],
        statistics.median(float(event["step_s"] or 0) for event in first[METERED:]),
    )


def compare(plain: Steps, run: Steps, job: Job, device: str) -> None:
    """Print both, and how equal they are."""
    assert job.gpu_budget is not None
    share = f"{run.peak_bytes / plain.peak_bytes:.0%}, under a budget of {format_bytes_down(job.gpu_budget)}"
    rows = [
        ("memory, peak", format_bytes(plain.peak_bytes), format_bytes(run.peak_bytes), share),
        *((f"loss, step {n}", f"{plain.losses[n - 1]:.7f}", f"{run.losses[n - 1]:.7f}", "") for n in SHOWN),
        ("a step", format_seconds(plain.step_s), format_seconds(run.step_s), f"{run.step_s / plain.step_s:.2f} times"),
    ]
    screen = Console(highlight=False, soft_wrap=True)
    screen.print(table(("", "plain PyTorch", "offmate", ""), rows))
    screen.print(f"\nLosses: {equal(plain.losses, run.losses)}.")
    if device == "cpu":
        screen.print(
            "Memory: the bytes of all tensors alive at once (weights, gradients, moments, activations), counted alike\n"
            "for both. This machine has no GPU, so a counted part of its memory plays one: what offmate moves out of\n"
            "that part is not counted, as it would not be on a GPU."
        )
    else:
        screen.print("Memory: what PyTorch's allocator had given out at once.")
    screen.print(f"A step: the median of steps {METERED + 1} to {STEPS}, one after the other on this machine.")


def equal(plain: list[float], run: list[float]) -> str:
    """How far losses agree."""
    if plain == run:
        return f"those of all {len(plain)} steps are equal, in every bit"
    worst = max(abs(a - b) / abs(a) for a, b in zip(plain, run, strict=True))
    return f"those of {len(plain)} steps differ by up to {worst:.1e} of their value"


def main(run: Path | None) -> None:
    """Train, and print what came of it."""
    logging.disable()  # what is said of the data is in the job's log
    from worker.data.batches import Batches

    job, device = Job.load(FILE), "cuda" if torch.cuda.is_available() else "cpu"
    plain = train(job, Batches(job, load_tokenizer(job)), device)
    if run is not None:
        compare(plain, of_run(run), job, device)
        return
    share = format_bytes_down(plain.peak_bytes * 2 // 5)
    print(f"memory, peak {format_bytes(plain.peak_bytes)}, 40% of it {share}; a step {format_seconds(plain.step_s)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
