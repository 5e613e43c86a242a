"""Plans usual models on three usual cards, by four methods: whether each fits, with how much memory, and how fast.

    nice python -m benchmarks.what_fits [--only TEXT]    # plans, and keeps the answers in results/what_fits.json
    python -m benchmarks.what_fits --print fits          # the table of docs/how-to/what-fits.md, from these answers
    python -m benchmarks.what_fits --print readme        # the tables beside other tools

Models are taken from their configs alone; nothing is downloaded or measured. Each question is asked with 64 GiB of RAM,
and again with 128 GiB where that is too little; for the tables beside other tools, with the least GPU memory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks import examples, questions
from planner.commands.ask import ask
from planner.commands.kept_traces import Traces
from planner.job.schema import Job
from planner.machine.presets import needed_cpu_memory, preset
from planner.reports.receipt import Receipt

RESULTS = questions.ROOT / "benchmarks" / "results" / "what_fits.json"
LENGTH, ROWS = 2048, 8
_QWEN_14B = {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40}
MODELS: dict[str, tuple[str, tuple[str, dict[str, Any]]]] = {
    "1B": ("Llama-3.2-1B", questions.MODELS["Llama-3.2-1B"]),
    "4B": ("Qwen3-4B", examples.MODELS["Qwen/Qwen3-4B"]),
    "8B": ("Llama-3.1-8B", questions.MODELS["Llama-3.1-8B"]),
    "14B": ("Qwen3-14B", ("Qwen3Config", examples.MODELS["Qwen/Qwen3-8B"][1] | _QWEN_14B)),
    "32B": ("Qwen3-32B", questions.MODELS["Qwen3-32B"]),
    "70B": ("Llama-3.1-70B", questions.MODELS["Llama-3.1-70B"]),
}
"""A size -> the model's name, and the class and the values of its config."""
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": {"method": "lora", "lora_r": 16},
    "QLoRA": {"method": "lora", "lora_r": 16, "load_in_4bit": True},
    "LSP": {"method": "lsp"},
}
"""The keys of a job of each method."""
MACHINES = {"rtx3060": "RTX 3060, 12 GB", "rtx4090": "RTX 4090, 24 GB", "rtx5090": "RTX 5090, 32 GB"}
RAM_GIB = (64, 128)
LEAST_ON = "rtx4090"  # the card of the plans with the least GPU memory
LEAST_SIZES, LEAST_METHODS = ("8B", "14B", "32B", "70B"), ("full", "LoRA", "QLoRA")
README_SIZES = ("8B", "70B")  # two are enough to see how the figures grow
SOURCES = {
    "unsloth": "https://unsloth.ai/docs/get-started/fine-tuning-for-beginners/unsloth-requirements",
    "LLaMA-Factory": "https://github.com/hiyouga/LLaMA-Factory#hardware-requirement",
    "axolotl": "https://github.com/axolotl-ai-cloud/axolotl/blob/main/examples/llama-3/README.md",
}
PUBLISHED = {
    "full": {"LLaMA-Factory": "7B 60–120, 14B 120–240, 30B 300–600, 70B 600–1200", "axolotl": "8B 48"},
    "LoRA": {"unsloth": "8B 22, 14B 33, 32B 76, 70B 164", "LLaMA-Factory": "7B 16, 14B 32, 30B 64, 70B 160"}
    | {"axolotl": "8B 11 (8-bit base)"},
    "QLoRA": {"unsloth": "8B 6, 14B 8.5, 32B 26, 70B 41", "LLaMA-Factory": "7B 6, 14B 12, 30B 24, 70B 48"},
}
"""GB of GPU memory that the tools' own pages name, by method, tool and size of model; LLaMA-Factory
calls its figures estimated (full: from `pure_bf16` to `bf16`), unsloth the absolute minimum."""
SAME = {"7B": "8B", "30B": "32B"}  # sizes that stand in the row of another
BESIDE = """\
By `python -m benchmarks.what_fits --print readme`. *Other tools:* GPU memory that their own pages name
(LLaMA-Factory's of March 2025, estimated; axolotl's of August 2025; unsloth's of 2026, its minimum); –: not found
there. *offmate:* plans with the least GPU memory for steps of one row of 2,048 tokens on an RTX 4090, not measured on a
card, without the 0.4 GB that CUDA takes. More GPU memory makes steps faster, and less RAM is enough with a drive
([plans for usual cards](docs/how-to/what-fits.md)). DeepSpeed and MegaTrain have no such table, but say that they train
[over 40B in full on 32 GB](https://www.deepspeed.ai/news/2021/03/07/zero3-offload.html) and
[up to 120B on an H200](https://arxiv.org/abs/2604.05091), both with 1.5 TB of RAM."""
FEATURES = (
    ("", "offmate", "unsloth", "axolotl", "LLaMA-Factory", "DeepSpeed", "MegaTrain"),
    ("full fine-tuning, states in RAM", "yes", "–", "by DeepSpeed, FSDP", "by DeepSpeed", "yes", "yes"),
    ("states on a drive", "yes", "–", "–", "–", "yes", "–"),
    ("told before the start", "memory, time, for any card")
    + ("table of memory", "–", "table of memory", "estimate of memory", "calculator of batch sizes"),
    ("queue of jobs, daemon", "yes", "–", "–", "–", "–", "–"),
    ("several GPUs for a job", "**no**", "yes", "yes", "yes", "yes", "yes"),
    ("reinforcement learning", "**no** (DPO, ORPO, KTO: yes)", "GRPO", "GRPO", "PPO", "–", "GRPO, by VERL"),
    ("images", "**no**", "yes", "yes (beta)", "yes", "any model", "yes"),
    ("tried on", "H100, H200, 45 minutes in all; **no home card**")
    + ("NVIDIA, AMD, Intel", "NVIDIA, AMD", "NVIDIA, AMD, Ascend", "up to 512 V100", "H100, H200, GH200"),
)
"""What the tools' documentation says; "–": it was not found there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The plan for a question. `ram_gib`: the host's memory with which it was asked. `needs_gib`: of a job that does
    not fit, the smallest host memory that is sold with which it does (0: none); the figures of a step are then 0."""

    ram_gib: int
    gpu_bytes: int = 0
    host_bytes: int = 0
    tokens_per_s: float = 0.0
    needs_gib: int = 0


def figures(receipt: Receipt) -> dict[str, Any]:
    """The figures of an answer, from the receipt of a job that fits."""
    memory = {"gpu_bytes": receipt.gpu_peak_bytes, "host_bytes": receipt.cpu_peak_bytes}
    return memory | {"tokens_per_s": receipt.tokens_per_s}


def job_of(size: str, method: str, models: Path, *, rows: int = ROWS) -> Job:
    """The job that trains a size of model, whose config lies in `models`, by a method: `rows` micro-batches a step."""
    keys = {"model": str(models / MODELS[size][0]), "bf16": True, "max_length": LENGTH, **METHODS[method]}
    keys |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": rows}
    return Job.question(yaml.safe_dump(keys), models, in_lines=False, told=frozenset(keys))


def planned(size: str, card: str, method: str, models: Path, traces: Traces) -> Answer:
    """The plan on a card with the least RAM of `RAM_GIB` that is enough, or what it needs instead."""
    job = job_of(size, method, models)
    for ram_gib in RAM_GIB:
        hardware = preset(card, bf16=True, cpu_memory_bytes=ram_gib * 2**30)
        receipt = ask(job, hardware, traces=traces, helps=False)
        if receipt.status != "infeasible":
            return Answer(ram_gib=ram_gib, **figures(receipt))
        least = receipt.least_cpu_budget_bytes
        needs_gib = needed_cpu_memory(least) // 2**30 if least is not None else 0
        if not needs_gib or needs_gib > RAM_GIB[-1]:  # more RAM than is asked about
            break
    return Answer(ram_gib=RAM_GIB[-1], needs_gib=needs_gib)


def planned_at_least(size: str, method: str, models: Path, traces: Traces) -> Answer:
    """The plan of one row with the least GPU memory, on `LEAST_ON`, with as much RAM as that takes."""
    job = job_of(size, method, models, rows=1)
    endless = preset(LEAST_ON, bf16=True, cpu_memory_bytes=4 * 2**40)
    problem = traces.of(job, endless).decided(job, endless)
    least = problem.least_bytes()
    assert least is not None  # 4 TiB of RAM are enough for all
    needs = replace(problem, gpu_budget_bytes=least).least_cpu_bytes()
    assert needs is not None
    ram_gib = needed_cpu_memory(needs) // 2**30
    hardware = preset(LEAST_ON, bf16=True, cpu_memory_bytes=ram_gib * 2**30)
    receipt = ask(job.model_copy(update={"gpu_budget": least}), hardware, traces=traces, helps=False)
    assert receipt.status != "infeasible"
    return Answer(ram_gib=ram_gib, **figures(receipt) | {"gpu_bytes": least})


def write_models(folder: Path) -> None:
    """Write the configs of the models, without weights, into folders of `folder`."""
    import transformers

    for name, (kind, values) in MODELS.values():
        getattr(transformers, kind)(**values).save_pretrained(folder / name)


def kept() -> dict[str, Answer]:
    """The answers in `RESULTS`, by question."""
    found = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    return {key: Answer(**value) for key, value in found.items()}


def asked() -> Iterator[tuple[str, str, str]]:
    """Size, card and method of all questions."""
    for size in MODELS:
        if size in LEAST_SIZES:
            yield from ((size, "least", method) for method in LEAST_METHODS)
        yield from ((size, card, method) for card in MACHINES for method in METHODS)


def rounded(number: float) -> str:
    """The number with two digits that count."""
    digits = 2 - len(str(int(number))) if number >= 1 else 1
    return f"{round(number, digits):,.{max(digits, 0)}f}"


def in_table(rows: Iterable[Sequence[str]]) -> str:
    """The rows as a Markdown table, whose head is the first."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * (lines[0].count("|") - 1), *lines[1:]])


def fits_cell(answer: Answer) -> str:
    """GPU memory, host memory and speed of a plan, or the RAM with which there is one."""
    if not answer.tokens_per_s:
        return f"no: {answer.needs_gib:,} GiB of RAM" if answer.needs_gib else "no"
    host = f"{answer.host_bytes / 2**30:.0f}{'†' if answer.ram_gib > RAM_GIB[0] else ''}"
    return f"{answer.gpu_bytes / 2**30:.1f} · {host} · {rounded(answer.tokens_per_s)}"


def fits_table(answers: Mapping[str, Answer]) -> str:
    """The table of docs/how-to/what-fits.md."""
    rows = [["model", "card", *METHODS]]
    for size, (name, _) in MODELS.items():
        for card, title in MACHINES.items():
            found = [answers.get(f"{size} {card} {method}") for method in METHODS]
            rows.append([name, title, *(fits_cell(answer) if answer else "not planned" for answer in found)])
    return in_table(rows)


def published(method: str, tool: str, size: str) -> str:
    """What a tool's own page says of a method and a size of model, with its size where that is another."""
    for part in PUBLISHED[method].get(tool, "").split(", "):
        own, _, figure = part.partition(" ")
        if figure and SAME.get(own, own) == size:
            return figure if own == size else f"{figure} ({own})"
    return "–"


def readme(answers: Mapping[str, Answer]) -> str:
    """The tables beside other tools, for the README."""
    tools = [f"[{tool}]({page})" for tool, page in SOURCES.items()]
    rows = [["GB of GPU memory", "offmate, planned least (RAM, tokens/s)", *tools]]
    for method in LEAST_METHODS:
        for size in README_SIZES:
            if (answer := answers.get(f"{size} least {method}")) is None:
                continue
            ours = f"{rounded(answer.gpu_bytes / 1e9)} ({answer.ram_gib:,} GiB, {rounded(answer.tokens_per_s)})"
            rows.append([f"{method}, {size}", ours, *(published(method, tool, size) for tool in SOURCES)])
    return "\n\n".join([in_table(rows), BESIDE, in_table(FEATURES)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="questions that contain TEXT, such as '8B rtx4090'")
    parser.add_argument("--print", choices=("fits", "readme"), dest="printed", help="a table, from the kept answers")
    options = parser.parse_args()
    if options.printed:
        print({"fits": fits_table, "readme": readme}[options.printed](kept()))
        return
    with tempfile.TemporaryDirectory(prefix="offmate-fits-") as scratch:
        known = (Path(scratch), Traces())
        write_models(Path(scratch))
        for size, card, method in asked():
            key = f"{size} {card} {method}"
            if options.only not in key:
                continue
            answer = planned_at_least(size, method, *known) if card == "least" else planned(size, card, method, *known)
            print(key, answer, flush=True)
            answers = kept() | {key: answer}  # another process may have kept others
            told = {key: asdict(answers[key]) for key in map(" ".join, asked()) if key in answers}
            RESULTS.write_text(json.dumps(told, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
