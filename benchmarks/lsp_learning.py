"""What training by LSP-Offload learns beside full fine-tuning and LoRA, in small, with the product's own modules.

A Llama of 0.6 million parameters over bytes learns prose, Python's docstrings, and is then fine-tuned on code, Python's
own sources. Every method trains in plain PyTorch by AdamW, without weight decay or clipping, on the same rows.
"""

from __future__ import annotations

import ast
import random
import statistics
import sysconfig
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from planner.job.schema import Job
from planner.models.lsp import LEFT, RIGHT, layers_with_cores
from tests.support.texts import byte_tokenizer, make_job, sentences, write_jsonl
from worker.check.plain_pytorch import PlainTraining
from worker.subspace.change import Changed, Projectors
from worker.training.learning_rate import optimizer_of
from worker.training.model import load_model

LENGTH, ROWS = 64, 16
BASE_STEPS, STEPS, EVERY = 500, 150, 50
SEEDS = 5
WIDTH = 128
FULL = "full, matrices of layers"
SPARSE, DENSE = "LSP sparse, 4 nonzeros", "LSP dense"
BARS = {SPARSE: 0.75, DENSE: 0.95}
"""The least share of full fine-tuning's gain in loss, in the mean over seeds."""
_LIBRARY = Path(sysconfig.get_path("stdlib"))
_MOST = 3_000_000  # bytes of text
_HELD_OUT, _TEST_ROWS = 200_000, 96
_ITEM_BYTES = 2  # values in bf16, columns in int16
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """What trains: keys of the job, and two learning rates of which the better on seed 0 is taken."""

    name: str
    keys: Mapping[str, Any]
    rates: tuple[float, float]


_LORA = {"method": "lora", "lora_dropout": 0.0}
_LSP = {"method": "lsp", "lsp_size": WIDTH // 2, "lsp_check_steps": EVERY, "lsp_threshold": 0.0}
METHODS = (
    Method(name=FULL, keys={"trainable": [r"model\.layers\..*_proj"]}, rates=(1e-3, 2e-3)),
    Method(name="full, all weights", keys={}, rates=(1e-3, 2e-3)),
    Method(name="LoRA 8", keys={**_LORA, "lora_r": 8, "lora_alpha": 16}, rates=(5e-3, 1e-2)),
    Method(name="LoRA 12", keys={**_LORA, "lora_r": 12, "lora_alpha": 24}, rates=(5e-3, 1e-2)),
    Method(name=SPARSE, keys={**_LSP, "lsp_nonzeros": 4}, rates=(3e-3, 6e-3)),
    Method(name=DENSE, keys={**_LSP, "lsp_nonzeros": None}, rates=(3e-3, 6e-3)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What a method has learned. `tried`: rate -> held-out loss on seed 0. `losses`: held-out loss of each seed.
    `trained`: the numbers that it trains. `row_bytes`: of projectors or adapters in bf16, for each row of a projector,
    which are the rows and columns of all weights; `rotation_bytes`: of these, what the rotations of sparse projectors
    take. `changes`: the mean bias before and after each change of projectors, on seed 0."""

    name: str
    tried: dict[float, float]
    rate: float
    losses: tuple[float, ...]
    trained: int
    row_bytes: float
    rotation_bytes: float
    changes: tuple[tuple[float, float], ...]
    seconds: float


def learned(base: Path, scratch: Path) -> Iterator[Learned]:
    """Train by each method. `base`: the folder with the base model; `scratch`: a folder for the job's data."""
    base_model(base)
    data = write_jsonl(scratch / "data.jsonl", sentences(9))
    for method in METHODS:
        began = time.perf_counter()
        runs = {rate: run(job_of(base, data, method, 0), rate) for rate in method.rates}
        rate = min(runs, key=lambda rate: runs[rate].loss)
        others = [run(job_of(base, data, method, seed), rate) for seed in range(1, SEEDS)]
        first = runs[rate]
        yield Learned(
            name=method.name,
            tried={tried: its.loss for tried, its in runs.items()},
            rate=rate,
            losses=tuple(its.loss for its in (first, *others)),
            trained=first.trained,
            row_bytes=first.row_bytes,
            rotation_bytes=first.rotation_bytes,
            changes=tuple((_mean(change.before), _mean(change.after)) for change in first.changes),
            seconds=time.perf_counter() - began,
        )


def shares(before: float, full: Sequence[float], losses: Sequence[float]) -> list[float]:
    """The share of full fine-tuning's gain in loss that a method gains, seed by seed. `before`: the base's loss."""
    return [(before - loss) / (before - own) for loss, own in zip(losses, full, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training: the loss on text held out, and as in `Learned`."""

    loss: float
    trained: int
    row_bytes: float
    rotation_bytes: float
    changes: tuple[Changed, ...]


def run(job: Job, rate: float, steps: int = STEPS) -> Run:
    """Fine-tune on code, and look at the loss on code held out. The job's seed orders the rows, and draws projectors
    and adapters."""
    data = code()[:-_HELD_OUT]
    model = load_model(job)
    row_bytes, rotation_bytes = _beside(model)
    projectors = Projectors(model, job) if job.method == "lsp" else None
    plain = PlainTraining(
        model, optimizer=optimizer_of(job, model), max_grad_norm=job.max_grad_norm, device=_CPU, on_cpu=()
    )
    rows, sampled = batches(data, 2 * job.seed), batches(data, 2 * job.seed + 1)
    changes = []
    for step in range(steps):
        if projectors is not None and projectors.due(step):
            slices = [next(sampled) for _ in range(job.lsp_rows // ROWS)]
            changes.append(projectors.change(plain, step, slices, len(slices) * _items()))
        share = min(1, (step + 1) / 10) * (0.1 + 0.9 * (1 - step / steps))
        plain.step([next(rows)], seeds=[step], learning_rate=rate * share, items=torch.tensor(_items()))
    return Run(
        loss=held_out_loss(model),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        row_bytes=row_bytes,
        rotation_bytes=rotation_bytes,
        changes=tuple(changes),
    )


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    """The loss on rows of code that no training sees."""
    held = code()[-_HELD_OUT:]
    test = torch.stack([held[at : at + LENGTH] for at in range(0, 1500 * _TEST_ROWS, 1500)])
    model.eval()
    return float(model(input_ids=test, labels=test).loss)


def base_model(folder: Path) -> LlamaForCausalLM:
    """The base in `folder`, which is trained on prose and written there if there is none."""
    if (folder / "config.json").exists():
        return LlamaForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,  # that of the tokenizer: bytes, and four special tokens that no row has
        hidden_size=WIDTH,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    rows = batches(prose(), 0)
    for step in range(BASE_STEPS):
        share = min(1, (step + 1) / 20) * (0.1 + 0.9 * (1 - step / BASE_STEPS))
        optimizer.param_groups[0]["lr"] = 2e-3 * share
        model(**next(rows)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


def job_of(base: Path, data: Path, method: Method, seed: int) -> Job:
    """The job that trains the model in `base` by a method. Its `data` are not read: rows come from `batches`."""
    keys = {"max_length": LENGTH, "per_device_train_batch_size": ROWS, "max_grad_norm": 0, "seed": seed}
    return make_job(base, data, **keys, **method.keys)


def _beside(model: nn.Module) -> tuple[float, float]:
    """Bytes of projectors or adapters for each row and column of a weight, and those of rotations among them."""
    layers = list(layers_with_cores(model))
    if layers:
        names = {
            f"{name}.{side}.{part}": p.numel()
            for name, layer in layers
            for side in (LEFT, RIGHT)
            for part, p in getattr(layer, side).named_parameters()
        }
        sides = sum(layer.in_features + layer.out_features for _, layer in layers)
    else:
        adapters = {name: p for name, p in model.named_parameters() if "lora_" in name}
        names = {name: p.numel() for name, p in adapters.items()}
        sides = sum(max(p.shape) for p in adapters.values())
    rotations = sum(count for name, count in names.items() if name.endswith(".rotation"))
    return (_ITEM_BYTES * sum(names.values()) / sides, _ITEM_BYTES * rotations / sides) if sides else (0.0, 0.0)


def _items() -> int:
    """The tokens of a batch that the loss divides by: the first of a row has none before it."""
    return ROWS * (LENGTH - 1)


def _mean(biases: Mapping[str, float]) -> float:
    return statistics.mean(biases.values())


def batches(data: Tensor, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield batches of rows that begin anywhere in `data`, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        places = torch.randint(0, len(data) - LENGTH - 1, (ROWS,), generator=generator)
        rows = torch.stack([data[place : place + LENGTH] for place in places])
        yield {"input_ids": rows, "labels": rows}


@cache
def code() -> Tensor:
    """Sources of the standard library's modules, as bytes."""
    files = sorted(_LIBRARY.glob("*.py"))
    random.Random(1).shuffle(files)
    return _bytes(file.read_text("utf-8") for file in files)


def prose() -> Tensor:
    """The standard library's documentation and docstrings, as bytes."""
    return _bytes(_docstrings())


def _docstrings() -> Iterator[str]:
    yield (_LIBRARY / "pydoc_data" / "topics.py").read_text("utf-8")
    for file in sorted(_LIBRARY.rglob("*.py")):
        if {"test", "site-packages"} & set(file.parts):
            continue
        try:
            tree = ast.parse(file.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) and (text := ast.get_docstring(node)):
                yield text


def _bytes(texts: Iterable[str]) -> Tensor:
    found = bytearray()
    for text in texts:
        found += text.encode() + b"\n\n"
        if len(found) >= _MOST:
            break
    return torch.frombuffer(found[:_MOST], dtype=torch.uint8).long()
