"""What the planner says of training by LSP-Offload beside LoRA and full fine-tuning: plans of 8 B on two cards.

`ask` is also what `paper002.py` asks with.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from planner.commands.ask import ask as ask_planner
from planner.commands.kept_traces import Traces
from planner.job.schema import Job
from planner.machine.hardware import Hardware
from planner.machine.presets import preset

MODEL = "Llama-3.1-8B"
LENGTH = 1024
FULL, LORA, LORA_DROPS, LSP = "full", "LoRA 24", "LoRA 24 with dropout", "LSP 512"
METHODS: dict[str, dict[str, Any]] = {
    FULL: {},
    LORA: {"method": "lora", "lora_r": 24, "lora_dropout": 0.0},
    LORA_DROPS: {"method": "lora", "lora_r": 24},
    LSP: {"method": "lsp"},
}
"""Keys of the jobs. LSP has no dropout, so LoRA has none either, but for one question with its default."""
CARDS = ("rtx4090", "rtx3060")
SLICES = (1, 4, 8)
LEAST_GIB, MOST_GIB = 32, 128
NEAR = 0.03
"""LSP's step is to be within this of LoRA's with about as many trained numbers."""
BARS_S = {"rtx4090": 0.5, "rtx3060": 2.7}
"""The most seconds of a step of LSP with 32 GiB of RAM and 1024 tokens."""
LEFT_OUT = (
    "full with 64 GiB and 4 or 8 slices, and with 32 GiB: 64 GiB are too few for one slice",
    "LoRA and LSP with 64 GiB, and with 128 GiB and 4 slices: from 32 to 128 GiB nothing changes by more than 1%",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question: `slices` micro-batches of `rows` × `length` tokens in bf16, with the job's other `keys`."""

    model: Path
    keys: Mapping[str, Any]
    length: int
    rows: int = 1
    slices: int = 1
    clip: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The planner's answer. Without `fits` the figures of the step are 0. `limit`: the resource that is busy longest.
    `used_s`: the processor seconds that it took."""

    fits: bool
    step_s: float
    bound_s: float
    gpu_peak_bytes: int
    cpu_peak_bytes: int
    trained: int
    limit: str
    used_s: float


def job_of(asked: Asked) -> Job:
    """The job that a question is about."""
    values = {
        "model": str(asked.model),
        "bf16": True,
        "max_length": asked.length,
        "per_device_train_batch_size": asked.rows,
        "gradient_accumulation_steps": asked.slices,
        **({} if asked.clip else {"max_grad_norm": 0}),
        **asked.keys,
    }
    return Job.question(yaml.safe_dump(values), Path.cwd(), name="The question", in_lines=False, told=frozenset(values))


def ask(asked: Asked, hardware: Hardware, traces: Traces) -> Answer:
    """The planner's answer for a machine, without what would help."""
    began = time.process_time()
    receipt = ask_planner(job_of(asked), hardware, traces=traces, helps=False)
    return Answer(
        fits=receipt.status != "infeasible",
        step_s=receipt.step_s,
        bound_s=receipt.bound_s,
        gpu_peak_bytes=receipt.gpu_peak_bytes,
        cpu_peak_bytes=receipt.cpu_peak_bytes,
        trained=receipt.trained_parameters,
        limit=receipt.loads[0].resource if receipt.loads else "",
        used_s=time.process_time() - began,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One question of the table and its answer. `clip`: gradients are clipped, as by default."""

    card: str
    ram_gib: int
    slices: int
    method: str
    clip: bool
    answer: Answer


def questions() -> Iterator[tuple[str, int, int, str, bool]]:
    """Card, GiB of RAM, slices, method and whether gradients are clipped: all that says something new."""
    for card in CARDS:
        for slices in SLICES:
            for ram_gib in (LEAST_GIB, MOST_GIB) if slices != 4 else (LEAST_GIB,):
                yield from ((card, ram_gib, slices, method, True) for method in (LORA, LSP))
            yield from ((card, MOST_GIB, slices, FULL, clip) for clip in (True, False))
        yield card, LEAST_GIB, 1, LORA_DROPS, True
        yield card, 64, 1, FULL, True


def answers(models: Path) -> Iterator[Row]:
    """Ask all questions. `models`: a folder with the configs of `questions.MODELS`."""
    traces = Traces()
    for card, ram_gib, slices, method, clip in questions():
        asked = Asked(model=models / MODEL, keys=METHODS[method], length=LENGTH, slices=slices, clip=clip)
        machine = preset(card, bf16=True, cpu_memory_bytes=ram_gib * 2**30)
        found = ask(asked, machine, traces)
        yield Row(card=card, ram_gib=ram_gib, slices=slices, method=method, clip=clip, answer=found)


def unlimited(hardware: Hardware) -> Hardware:
    """The same machine with a card that holds everything."""
    return replace(hardware, gpu_bytes=2**40)
