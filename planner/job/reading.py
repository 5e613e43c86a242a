"""Reads a file's keys one by one: which are taken, which have no effect and why, which are refused.

`planner.keys` says what becomes of each key. This module carries it out, and has functions for keys that need more than
the table.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from planner.job.aliases import PARTS, SHORT
from planner.job.dialects import AXOLOTL, TRL, Dialect
from planner.job.lora import ADAPTER, PLUS, PLUS_EMBEDDING
from planner.job.source import MOST_MISTAKES, SWITCHED_OFF, Mistake, Source, shown
from planner.job.values import METHODS, other_optimizer
from planner.keys import ANY, TABLES
from planner.keys.meaning import (
    DECIDES,
    DIFFUSION,
    DISTILLED,
    ELSEWHERE,
    EVALUATES,
    KERNELS,
    ONE_DEVICE,
    OTHER_FORM,
    PICTURES,
    QUANTIZED,
    REPORTS,
    REWARDS,
    Meaning,
)

REPORTING = ("wandb_", "mlflow_", "comet_", "swanlab_", "trackio_")
"""Beginnings of keys that say where to report to, in any version of a tool."""
_BEGINNINGS = dict.fromkeys(REPORTING, REPORTS) | {
    "liger_": KERNELS,
    "unsloth_": KERNELS,
    "flash_attn_": KERNELS,
    "fsdp_": DECIDES,
    "ddp_": ONE_DEVICE,
}
_PLUGINS = {
    "liger": KERNELS,
    "cut_cross_entropy": KERNELS,
    "kernels": KERNELS,
    "expert_parallel": ONE_DEVICE,
    "swanlab": REPORTS,
    "lm_eval": EVALUATES,
}
"""axolotl's plugins that change nothing that is learned -> why they have no effect here."""
_OTHER_STAGES = ("rm", "ppo", "dpo", "kto")  # LLaMA-Factory's stages that are not there
_EIGHT = "load_in_8bit"
PER_EPOCH = "evals_per_epoch"
"""axolotl's key, which is settled when all values are known."""
_CHOOSING = ("load_best_model_at_end", "early_stopping_patience", "early_stopping_steps")
_OTHER_TRAINING = (REWARDS, PICTURES, DISTILLED, DIFFUSION)
_ALONE = (*_OTHER_TRAINING, ELSEWHERE, OTHER_FORM)
"""Purposes of a whole file: where such a purpose is not there, only that mistake is reported."""


class Reading:
    """A file's keys while they are read: values under canonical names, mistakes, and keys that are not used, with the
    reason."""

    def __init__(self, source: Source, names: Mapping[str, str]) -> None:
        self.source, self.names = source, names
        self.dialect = Dialect.of(source.values)
        self.found: dict[str, list[str]] = {}  # canonical key -> keys of the file
        self.mistakes: list[Mistake] = []
        self.alone: list[Mistake] = []
        self.unused: dict[str, list[str]] = {}
        self.unknown: list[str] = []
        self._quantized = False

    def meaning(self, key: str) -> Meaning | None:
        """What becomes of a key; None for an unknown key."""
        table = TABLES.get(self.dialect.tool or "", {})
        if key in table:
            return table[key]
        if key in self.names:
            return Meaning(kind="honoured", text=self.names[key])
        beginning = next((why for start, why in _BEGINNINGS.items() if key.startswith(start)), None)
        return ANY.get(key) or (Meaning(kind="unused", text=beginning) if beginning else None)

    def refuse(self, key: str, text: str, *, alone: bool = False) -> None:
        """Note a mistake: something that is not there yet. `alone`: it is reported instead of all others."""
        (self.alone if alone else self.mistakes).append(self.source.mistake(key, "not-there", text))

    def read(self, key: str, value: object) -> None:
        """Read one key: as its own function does, or as its meaning says."""
        meaning = self.meaning(key)
        if meaning is None and value is None and self.dialect.tool is not None:
            self.unused.setdefault("nobody knows it, and it asks for nothing", []).append(key)
        elif meaning is None:
            self.unknown.append(key)
            # Finding a similar key takes a millisecond, and only the first mistakes are reported.
            known = {*self.names, *ANY} if len(self.mistakes) < MOST_MISTAKES else ()
            self.mistakes.append(self.source.unknown(key, known, SHORT.get(key)))
        elif key in _SPECIAL:
            _SPECIAL[key](self, key, value)
        else:
            self.read_as(meaning, key, value)

    def read_as(self, meaning: Meaning, key: str, value: object) -> None:
        """Read one key by its meaning."""
        if meaning.kind == "honoured":
            if key in METHODS and value == "qlora" and self.source.values.get("load_in_4bit") is not True:
                self._refuse_quantized(key, "qlora trains adapters on a base in 4 bits; give load_in_4bit: true, too")
            self.found.setdefault(_EIGHT if (key, value) == ("quantization_bit", 8) else meaning.text, []).append(key)
        elif value in SWITCHED_OFF or value in meaning.fine or value == ["none"] or self._told_beside(key):
            pass
        elif meaning.kind == "not there":
            if meaning.text == QUANTIZED:
                self._refuse_quantized(key, f"{QUANTIZED} is not there yet; give one of them instead")
            else:
                what, _, instead = meaning.text.partition("; ")
                other = "a file for it cannot be run here" if what in _OTHER_TRAINING else "leave this key out"
                text = f"{what} is not there yet; {instead or other}"
                self.refuse(key, text, alone=meaning.text in _ALONE)
        elif meaning.kind != "part":
            self.unused.setdefault(meaning.text, []).append(key)
        elif self.source.values.get(meaning.text) in SWITCHED_OFF:
            self.unused.setdefault(f"it has no effect without {meaning.text}", []).append(key)

    def _told_beside(self, key: str) -> bool:
        """Whether the error of another key already says that the thing to which this key belongs is not there."""
        file = self.source.values
        if key in ("optim_args", "optim_target_modules"):
            return other_optimizer(file)
        if key == "quantization_method":
            return file.get("quantization_bit") not in (4, 8, *SWITCHED_OFF)
        return key == "relora_steps" and file.get("relora") not in SWITCHED_OFF

    def _refuse_quantized(self, key: str, text: str) -> None:
        """Note one mistake for all keys that ask for a quantized base."""
        if not self._quantized:
            self.refuse(key, text)
        self._quantized = True


def _plugins(reading: Reading, key: str, value: object) -> None:
    """axolotl's plugins; those that would change what is learned are refused."""
    plugins = [value] if isinstance(value, str) and value else value
    for plugin in plugins if isinstance(plugins, list) else ():
        why = next((why for known, why in _PLUGINS.items() if known in str(plugin).lower()), None)
        if why is None:
            reading.refuse(key, f"{plugin} is not there; leave it out")
        elif key not in reading.unused.setdefault(why, []):
            reading.unused[why].append(key)


def _stage(reading: Reading, key: str, value: object) -> None:
    if value in ("sft", "pt", *SWITCHED_OFF):
        return
    near = difflib.get_close_matches(str(value).lower(), ("sft", "pt", *_OTHER_STAGES), n=1)
    if near and near[0] not in _OTHER_STAGES:
        text = f"it is {shown(value)}; did you mean {near[0]}?"
        reading.mistakes.append(reading.source.mistake(key, "bad-value", text))
        return
    other = value in _OTHER_STAGES
    text = f"it is {shown(value)}; offmate trains on texts and conversations; "
    instead = "a file for it cannot be run here" if other else "give sft or pt, or leave this key out"
    reading.refuse(key, text + instead, alone=other)


def _bnb_config(reading: Reading, key: str, value: object) -> None:
    """axolotl's bitsandbytes config; values that are offmate's own have no effect."""
    here = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    asks = value if isinstance(value, dict) else {}
    other = [name for name, wanted in here.items() if asks.get(name, wanted) != wanted]
    if value in SWITCHED_OFF or value == ["none"]:
        return
    if reading.source.values.get("load_in_4bit") in SWITCHED_OFF:
        reading.unused.setdefault("it has no effect without load_in_4bit", []).append(key)
    elif other:
        reading.refuse(key, f"{other[0]} is a key of its own here; write it without {key}")
    else:
        reading.unused.setdefault("a base in 4 bits is so here, too", []).append(key)


def _unpacked(reading: Reading, key: str, value: object) -> None:
    """axolotl's way to say that a model published in mxfp4 or fp8 is unpacked; here that happens by itself."""
    more = reading.source.values.get("model_quantization_config_kwargs")
    if value in ("Mxfp4Config", "FineGrainedFP8Config") and isinstance(more, dict) and more == {"dequantize": True}:
        why = "a model that was saved in mxfp4 or fp8 is unpacked as it is read"
        reading.unused.setdefault(why, []).append(key)
    elif value not in SWITCHED_OFF:
        reading.refuse(key, "loading the model in another way is not there yet; leave this key out")


def _metric(reading: Reading, key: str, value: object) -> None:
    """The metric that chooses the best model, and its direction."""
    file = reading.source.values
    chosen = any(file.get(name) not in SWITCHED_OFF for name in _CHOOSING) or reading.dialect.chooses_best(file)
    fine = (*SWITCHED_OFF, "eval_loss", "loss") if key == "metric_for_best_model" else SWITCHED_OFF
    if not chosen and value not in SWITCHED_OFF:
        reading.unused.setdefault("it has no effect without load_best_model_at_end", []).append(key)
    elif value not in fine:
        text = f"it is {shown(value)}; the best evaluation is that with the smallest loss (eval_loss)"
        reading.refuse(key, text)


def _resume(reading: Reading, key: str, value: object) -> None:
    if value is not True and value not in SWITCHED_OFF:
        reading.refuse(key, f"it is {shown(value)}; a job starts at its model; leave this key out")


def _frozen(reading: Reading, key: str, value: object) -> None:
    """LLaMA-Factory's keys for frozen layers, which `planner.job.trainable` reads."""
    if reading.source.values.get("finetuning_type") != "freeze" and value not in SWITCHED_OFF:
        reading.unused.setdefault("it has no effect without finetuning_type: freeze", []).append(key)


def _rate_of_embeddings(reading: Reading, key: str, value: object) -> None:
    """LoRA+'s rate for embeddings. Without LoRA+ it is refused in offmate's own files (`planner.job.lora`); in a tool's
    file it has no effect, as tools write out their defaults."""
    if reading.dialect.tool is None or reading.source.values.get(PLUS) not in SWITCHED_OFF:
        reading.found.setdefault(key, []).append(key)
    elif value not in SWITCHED_OFF:
        reading.unused.setdefault(f"it has no effect without {PLUS}", []).append(key)


def _uncut(reading: Reading, key: str, value: object) -> None:
    """`max_length`: TRL's null, which cuts no row, is refused."""
    if value is None and reading.dialect.tool == TRL:
        text = "it is null, and TRL then cuts no row; give a number of tokens, at least those of the longest row"
        reading.mistakes.append(reading.source.mistake(key, "not-there", text))
    else:
        _as_it_is(reading, key, value)


def _padding(reading: Reading, key: str, value: object) -> None:
    """LLaMA-Factory's `ignore_pad_token_for_loss`."""
    if value in (False, "no", "false"):
        reading.refuse(key, "it is false; learning the padding is not there yet; leave this key out")
    else:
        _as_it_is(reading, key, value)


def _merged_first(reading: Reading, key: str, value: object) -> None:
    """LLaMA-Factory's `create_new_adapter`, for the adapter that the job continues."""
    if reading.source.values.get(ADAPTER) in SWITCHED_OFF and value not in SWITCHED_OFF:
        reading.unused.setdefault(f"it has no effect without {ADAPTER}", []).append(key)
    else:
        _as_it_is(reading, key, value)


def _tokens(reading: Reading, key: str, value: object) -> None:
    """axolotl's `tokens`. A mapping is the early form of `special_tokens`."""
    if isinstance(value, dict) and reading.dialect.tool == AXOLOTL:
        reading.found.setdefault("special_tokens", []).append(key)
    else:
        _as_it_is(reading, key, value)


def _as_it_is(reading: Reading, key: str, value: object) -> None:
    meaning = reading.meaning(key)
    assert meaning is not None
    reading.read_as(meaning, key, value)


_SPECIAL: dict[str, Callable[[Reading, str, object], None]] = {
    "bnb_config_kwargs": _bnb_config,
    "model_quantization_config": _unpacked,
    "plugins": _plugins,
    "stage": _stage,
    "resume_from_checkpoint": _resume,
    **dict.fromkeys(("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules"), _frozen),
    "max_length": _uncut,
    "ignore_pad_token_for_loss": _padding,
    "create_new_adapter": _merged_first,
    "metric_for_best_model": _metric,
    "greater_is_better": _metric,
    PLUS_EMBEDDING: _rate_of_embeddings,
    "tokens": _tokens,
    **dict.fromkeys(("dataset_dir", PER_EPOCH, *PARTS), lambda *_: None),
}
