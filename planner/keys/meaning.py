"""Says what becomes of a key of another tool's file; `table` builds the tables of such keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["honoured", "unused", "planner", "not there", "part"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What becomes of a key that asks for something.

    `text`, by `kind`: "honoured": the key of offmate that it is. "unused": why it has no effect here. "planner": what
    the planner decides instead. "not there": what it asks for and offmate does not do, and behind "; " what to give
    instead. "part": the key of the same file without which it has no effect, and whose error covers both. `fine`:
    values of a key of kind "not there" that ask for nothing, besides those that switch any key off.
    """

    kind: Kind
    text: str
    fine: tuple[object, ...] = ()


Table = Mapping[str, Meaning]
"""Key -> what becomes of it. The keys are all that a tool documents."""

LOGS = "metrics.jsonl has every step, the log a line every 10 seconds"
REPORTS = "figures go to tensorboard, wandb, trackio and mlflow; metrics.jsonl has all of them"
ATTENTION = "attention is what attn_implementation says"
DECIDES = "the planner decides where tensors are and what is recomputed"
COMPILES = "with exact: false, compile: auto compiles layers where that is faster"
READS = "rows are read, batched and padded in one way only"
STREAMS = "data are read once, to disk, and memory stays flat; the order is drawn from all rows, not from a buffer"
SAVES = "checkpoints come by save_steps and save_minutes, and a job goes on from its last one by itself"
EVALUATES = "evaluations come by eval_strategy and eval_steps"
KERNELS = "the planner's blocks bring their own code"
UPLOADS = "nothing is uploaded"
OWN_CODE = "a model's own code is never run; its config says what it is"
GENERATES = "nothing is generated but the answers to sample_prompts"
ONE_DEVICE = "training uses one device"
SAYS_NOTHING = "offmate has no use for it"

REWARDS = "training by preferences or rewards"
PICTURES = "training on pictures, sounds or videos"
QUANTIZED = "a base quantized in another way than load_in_4bit and load_in_8bit"
OTHER_LORA = "another kind of LoRA"
SOME_WEIGHTS = "training some weights only"
OPTIMIZER = "another optimizer"
ITS_RATE = "another learning rate for some weights"
SHAPE = "another shape of the learning rate"
LOSS = "another loss"
LEARNED = "another choice of what is learned"
ORDER = "another order of the data"
CHANGED_MODEL = "a changed model (change its config.json)"
FP16 = "fp16 training, whose loss scaling skips steps (bf16: true is, and cards without it compute in fp32)"
DISTILLED = "distillation"
DIFFUSION = "training a diffusion model"
ELSEWHERE = "training on another service"
OTHER_FORM = (
    "a key of LLaMA-Factory's v1 beside model_name_or_path, base_model or dataset; give model and train_dataset in "
    "their place, as v1 does, or write all as its other files are"
)


def table(
    *,
    same: str = "",
    honoured: Mapping[str, str] | None = None,
    unused: Mapping[str, str] | None = None,
    planner: str = "",
    not_there: Mapping[str, str] | None = None,
    parts: Mapping[str, str] | None = None,
    fine: Mapping[str, tuple[object, ...]] | None = None,
) -> dict[str, Meaning]:
    """A table of keys; each text lists names with spaces between them. `same`: keys with offmate's own names;
    `honoured`: offmate's key -> the tool's names for it; `unused`, `not_there`: `Meaning.text` -> keys; `planner`:
    keys; `parts`: the key to which they belong -> keys; `fine`: key -> `Meaning.fine`."""
    found: dict[str, Meaning] = {}

    def add(names: str, meaning: Meaning) -> None:
        for name in names.split():
            assert name not in found, name
            found[name] = meaning

    for name in same.split():
        add(name, Meaning(kind="honoured", text=name))
    for key, names in (honoured or {}).items():
        add(names, Meaning(kind="honoured", text=key))
    for why, names in (unused or {}).items():
        add(names, Meaning(kind="unused", text=why))
    add(planner, Meaning(kind="planner", text=DECIDES))
    for what, names in (not_there or {}).items():
        add(names, Meaning(kind="not there", text=what))
    for key, names in (parts or {}).items():
        add(names, Meaning(kind="part", text=key))
    for name, values in (fine or {}).items():
        found[name] = replace(found[name], fine=values)
    return found
