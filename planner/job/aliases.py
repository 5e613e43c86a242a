"""The names people know from other tools: what each means in a job, what says nothing here, what is refused.

What becomes of a key is in `planner.keys`; here it is done.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from planner.job.dialects import AXOLOTL, Dialect
from planner.job.evaluation import EVALUATED
from planner.job.fields import DEFAULT_EPOCHS
from planner.job.lora import PLUS, PLUS_EMBEDDING
from planner.job.pretraining import TEXTS, entries_of
from planner.job.source import MOST_MISTAKES, SWITCHED_OFF, Mistake, Source, shown, to_user_error
from planner.job.trackers import reports
from planner.job.values import check_value, done_otherwise, merged, translated
from planner.keys import ANY, TABLES, other_names
from planner.keys.meaning import (
    DECIDES,
    DIFFUSION,
    DISTILLED,
    ELSEWHERE,
    EVALUATES,
    KERNELS,
    LEARNED,
    ONE_DEVICE,
    OTHER_FORM,
    PICTURES,
    QUANTIZED,
    REPORTS,
    REWARDS,
    Meaning,
)
from planner.machine.memory import computes_bf16

_MORE = {"tokenizer": ("tokenizer_name_or_path",), "num_train_epochs": ("epochs",)}
_PARTS = (
    "dataset_config", "dataset_train_split", "dataset_text_field", "roles_to_train", "train_on_eos", "train_on_eot",
    "cosine_min_lr_ratio",
)  # fmt: skip
"""Read by `planner.job.foreign_data`, of TRL's one dataset and axolotl's turns, and by `planner.job.schedules`."""
ALIASES: dict[str, tuple[str, ...]] = {
    key: tuple(name for name in (*other_names().get(key, ()), *_MORE.get(key, ())) if name not in _PARTS)
    for key in (*other_names(), *_MORE)
}
"""Canonical key -> other names people use for it (axolotl, LLaMA-Factory, TRL)."""

SHORT = {
    "lr": "learning_rate", "bs": "per_device_train_batch_size",
    "grad_accum": "gradient_accumulation_steps", "steps": "max_steps", "warmup": "warmup_steps", "wd": "weight_decay",
    "scheduler": "lr_scheduler_type", "seq_len": "max_length", "seq_length": "max_length", "context": "max_length",
    "data": "dataset", "output": "output_dir", "r": "lora_r", "rank": "lora_r", "alpha": "lora_alpha",
    "dropout": "lora_dropout", "target_modules": "lora_target_modules", "lora": "method",
}  # fmt: skip
"""Everyday names of keys, which no tool has: what to give instead is told."""

REPORTING = ("wandb_", "mlflow_", "comet_", "swanlab_", "trackio_")
"""How keys begin that say where to report to, in any version of a tool."""
_BEGINNINGS = dict.fromkeys(REPORTING, REPORTS) | {
    "liger_": KERNELS, "unsloth_": KERNELS, "flash_attn_": KERNELS, "fsdp_": DECIDES, "ddp_": DECIDES,
}  # fmt: skip
_PLUGINS = {
    "liger": KERNELS, "cut_cross_entropy": KERNELS, "kernels": KERNELS, "expert_parallel": ONE_DEVICE,
    "swanlab": REPORTS, "lm_eval": EVALUATES,
}  # fmt: skip
"""axolotl's that change no number that is learned -> why they say nothing."""
_OTHER_STAGES = ("rm", "ppo", "dpo", "kto")  # LLaMA-Factory's that are not there
_EIGHT = "load_in_8bit"
_METHODS = (*ALIASES["method"], "method")
_PER_EPOCH = "evals_per_epoch"
_CHOOSING = ("load_best_model_at_end", "early_stopping_patience", "early_stopping_steps")
_ALONE = (REWARDS, PICTURES, DISTILLED, DIFFUSION, ELSEWHERE, OTHER_FORM)
"""What a file is about altogether: where that is not there, nothing else needs to be said of it."""


class _Reading:
    """A file's keys as they are read: values under canonical names, mistakes, and what is not used and why."""

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
        """What becomes of a key; None for one that nobody knows."""
        table = TABLES.get(self.dialect.tool or "", {})
        if key in table:
            return table[key]
        if key in self.names:
            return Meaning(kind="honoured", text=self.names[key])
        beginning = next((why for start, why in _BEGINNINGS.items() if key.startswith(start)), None)
        return ANY.get(key) or (Meaning(kind="unused", text=beginning) if beginning else None)

    def refuse(self, key: str, text: str, *, alone: bool = False) -> None:
        """Something that is not there."""
        (self.alone if alone else self.mistakes).append(self.source.mistake(key, "not-there", text))

    def read(self, key: str, value: object) -> None:
        """Sort one key in."""
        meaning = self.meaning(key)
        if meaning is None and value is None and self.dialect.tool is not None:
            self.unused.setdefault("nobody knows it, and it asks for nothing", []).append(key)
        elif meaning is None:
            self.unknown.append(key)
            # To look for a key that was meant takes a millisecond, and only the first mistakes are told.
            known = {*self.names, *ANY} if len(self.mistakes) < MOST_MISTAKES else ()
            self.mistakes.append(self.source.unknown(key, known, SHORT.get(key)))
        elif key in _SPECIAL:
            _SPECIAL[key](self, key, value)
        elif meaning.kind == "honoured":
            if key in _METHODS and value == "qlora" and self.source.values.get("load_in_4bit") is not True:
                self._refuse_quantized(key, "qlora trains adapters on a base in 4 bits; give load_in_4bit: true, too")
            self.found.setdefault(_EIGHT if (key, value) == ("quantization_bit", 8) else meaning.text, []).append(key)
        elif value in SWITCHED_OFF or value in meaning.fine or value == ["none"]:
            pass
        elif meaning.kind == "not there":
            if meaning.text == QUANTIZED:
                self._refuse_quantized(key, f"{QUANTIZED} is not there yet; give one of them instead")
            else:
                what, _, instead = meaning.text.partition("; ")
                text = f"{what} is not there yet; {instead or 'leave this key out'}"
                self.refuse(key, text, alone=meaning.text in _ALONE)
        elif meaning.kind != "part":
            self.unused.setdefault(meaning.text, []).append(key)
        elif self.source.values.get(meaning.text) in SWITCHED_OFF:
            self.unused.setdefault(f"it says nothing without {meaning.text}", []).append(key)

    def _refuse_quantized(self, key: str, text: str) -> None:
        """One line, whichever and how many keys ask for it."""
        if not self._quantized:
            self.refuse(key, text)
        self._quantized = True


def canonical(source: Source, names: Mapping[str, str]) -> tuple[dict[str, Any], list[Mistake], tuple[str, ...]]:
    """The file's values under canonical names, what is wrong with its keys, and notes to the user about keys of other
    tools. `names`: every name a key may have -> its canonical name. Raises UserError for a file
    that is about something else altogether."""
    reading = _Reading(source, names)
    for key, value in source.values.items():
        reading.read(key, value)
    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    _settle_reports(reading, reading.found.pop("report_to", []), values, given)
    for name, keys in reading.found.items():
        _settle(name, keys, reading, values, given)
    _settle_pissa(reading, values, given)
    mistakes, dialect = reading.mistakes, reading.dialect
    defaults = dialect.fill(values, source.values)
    _settle_evaluations(reading, values, given)
    if not {"model", "dataset"} & reading.found.keys() and len(reading.unknown) > len(source.values) / 2:
        text = f"it and {len(reading.unknown) - 1} more keys are unknown, and there is neither model nor dataset"
        reading.alone = [source.mistake(reading.unknown[0], "unknown-key", f"{text}: this is no job")]
    if reading.alone:
        raise to_user_error(reading.alone[:1], source.name)
    if not mistakes:
        text = f"it is missing; {dialect.tool} has no default for it"
        mistakes = [source.mistake(key, "missing-key", text) for key in dialect.missing(values)]
    if values.get("bf16") == "auto":
        values["bf16"] = computes_bf16() is not False
    left_out = (f"not used: {', '.join(keys)} ({why})" for why, keys in reading.unused.items())
    return values, mistakes, (*_renamed(given), *defaults, *left_out)


def _settle(name: str, keys: list[str], reading: _Reading, values: dict[str, Any], given: dict[str, str]) -> None:
    """The value of a canonical key from the keys of the file that mean it: those that ask for nothing give way."""
    source, tool = reading.source, reading.dialect.tool
    said = {key: source.values[key] for key in keys}
    wrong = [mistake for key in keys for mistake in check_value(key, name, said[key], source)]
    reading.mistakes += wrong
    if wrong:
        given[name] = wrong[0].key
        values[name] = entries_of(said[keys[0]]) if keys[0] == TEXTS else said[keys[0]]
        return
    found = merged(said) if len(said) > 1 else said
    if len(found) > 1:
        first, other = list(found)[:2]
        text = f"{first} is given too, and both mean {name}; keep one"
        reading.mistakes.append(source.mistake(other, "two-names", text))
    key, value = next(iter(found.items()))
    new = translated(key, value)
    if tool is not None and key != "adapter" and (value is None or value == "") and (tool == AXOLOTL or new is None):
        return  # as if it were not in the file
    if (new != value or new in SWITCHED_OFF) and (why := done_otherwise(key, name, value, tool)):
        reading.unused.setdefault(why, []).append("pad_token" if key == "special_tokens" else f"{key}: {value}")
    if new is None and value is not None and key != "chat_template":
        return
    given[name], values[name] = key, new


def _settle_pissa(reading: _Reading, values: dict[str, Any], given: dict[str, str]) -> None:
    """LLaMA-Factory's, which approximates unless it is told not to."""
    if given.get("init_lora_weights") != "pissa_init" or values["init_lora_weights"] != "pissa":
        return
    count = reading.source.values.get("pissa_iter")
    count = 16 if count is None else count
    if isinstance(count, bool) or not isinstance(count, int) or not (count == -1 or 1 <= count <= 999):
        text = f"it is {shown(count)}; it must be a number of iterations, or -1 for an exact decomposition"
        reading.mistakes.append(reading.source.mistake("pissa_iter", "bad-value", text))
    elif count > 0:
        values["init_lora_weights"] = f"pissa_niter_{count}"


def _settle_evaluations(reading: _Reading, values: dict[str, Any], given: dict[str, str]) -> None:
    """axolotl's evaluations per epoch, which count where there is something to evaluate on: a share of all steps, which
    depends on `values` with the defaults of the file's tool in them."""
    source, asked = reading.source, reading.source.values.get(_PER_EPOCH)
    epochs = values.get("num_train_epochs", DEFAULT_EPOCHS)
    text, code = None, "bad-value"
    if asked in SWITCHED_OFF:
        return
    if isinstance(asked, bool) or not isinstance(asked, (int, float)) or not 0 < asked < float("inf"):
        text = f"it is {shown(asked)}; it must be a number above 0"
    elif "eval_steps" in given and values["eval_steps"] not in SWITCHED_OFF:
        text, code = f"{given['eval_steps']} is given too, and both mean eval_steps; keep one", "two-names"
    elif values.get("eval_strategy") == "epoch":
        text = f"{given['eval_strategy']} is epoch, which is one evaluation after each; keep one of the two"
    elif all(values.get(name) in SWITCHED_OFF for name in EVALUATED):
        reading.unused.setdefault("there is nothing to evaluate on", []).append(_PER_EPOCH)
    elif isinstance(epochs, (int, float)) and epochs > 0 and asked * epochs > 1:
        given["eval_steps"], values["eval_steps"] = _PER_EPOCH, 1.0 / (asked * epochs)
    else:
        reading.unused.setdefault("an evaluation comes after each epoch", []).append(_PER_EPOCH)
    if text is not None:
        reading.mistakes.append(source.mistake(_PER_EPOCH, code, text))


def _settle_reports(reading: _Reading, keys: list[str], values: dict[str, Any], given: dict[str, str]) -> None:
    found = reports(keys, reading.source)
    reading.mistakes += found.mistakes
    if keys or found.trackers:
        values["report_to"] = list(found.trackers)
    if keys:
        given["report_to"] = next((key for key in keys if key == "report_to"), keys[0])
    if found.others:
        reading.unused.setdefault(REPORTS, []).extend(found.others)
    for name, settings in found.idle.items():
        reading.unused.setdefault(f"it says nothing without report_to: {name}", []).extend(settings)


def _plugins(reading: _Reading, key: str, value: object) -> None:
    """axolotl's; those that would change what is learned are refused."""
    plugins = [value] if isinstance(value, str) and value else value
    for plugin in plugins if isinstance(plugins, list) else ():
        why = next((why for known, why in _PLUGINS.items() if known in str(plugin).lower()), None)
        if why is None:
            reading.refuse(key, f"{plugin} is not there; leave it out")
        elif key not in reading.unused.setdefault(why, []):
            reading.unused[why].append(key)


def _stage(reading: _Reading, key: str, value: object) -> None:
    if value in ("sft", "pt", *SWITCHED_OFF):
        return
    near = difflib.get_close_matches(str(value).lower(), ("sft", "pt", *_OTHER_STAGES), n=1)
    if near and near[0] not in _OTHER_STAGES:
        text = f"it is {shown(value)}; did you mean {near[0]}?"
        reading.mistakes.append(reading.source.mistake(key, "bad-value", text))
        return
    text = f"it is {shown(value)}; offmate trains on texts and conversations; give sft or pt, or leave this key out"
    reading.refuse(key, text, alone=value in _OTHER_STAGES)


def _bnb_config(reading: _Reading, key: str, value: object) -> None:
    """axolotl's; what is here without it says nothing."""
    here = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    asks = value if isinstance(value, dict) else {}
    other = [name for name, wanted in here.items() if asks.get(name, wanted) != wanted]
    if value in SWITCHED_OFF or value == ["none"]:
        return
    if reading.source.values.get("load_in_4bit") in SWITCHED_OFF:
        reading.unused.setdefault("it says nothing without load_in_4bit", []).append(key)
    elif other:
        reading.refuse(key, f"{other[0]} is a key of its own here; write it without {key}")
    else:
        reading.unused.setdefault("a base in 4 bits is so here, too", []).append(key)


def _unpacked(reading: _Reading, key: str, value: object) -> None:
    """axolotl's way to say that a model published in mxfp4 or fp8 is unpacked, as it is here by itself."""
    more = reading.source.values.get("model_quantization_config_kwargs")
    if value in ("Mxfp4Config", "FineGrainedFP8Config") and isinstance(more, dict) and more == {"dequantize": True}:
        why = "a model that was saved in mxfp4 or fp8 is unpacked as it is read"
        reading.unused.setdefault(why, []).append(key)
    elif value not in SWITCHED_OFF:
        reading.refuse(key, "loading the model in another way is not there yet; leave this key out")


def _metric(reading: _Reading, key: str, value: object) -> None:
    """What a best model is the best by."""
    file = reading.source.values
    chosen = any(file.get(name) not in SWITCHED_OFF for name in _CHOOSING) or reading.dialect.chooses_best(file)
    fine = (*SWITCHED_OFF, "eval_loss", "loss") if key == "metric_for_best_model" else SWITCHED_OFF
    if not chosen and value not in SWITCHED_OFF:
        reading.unused.setdefault("it says nothing without load_best_model_at_end", []).append(key)
    elif value not in fine:
        text = f"it is {shown(value)}; the best evaluation is that with the smallest loss (eval_loss)"
        reading.refuse(key, text)


def _thinking(reading: _Reading, key: str, value: object) -> None:
    """LLaMA-Factory's: false takes thoughts out, and shows empty ones in their place that are not learned."""
    if value is False and reading.source.values.get("template") == "qwen3":
        reading.refuse(key, "it is false; qwen3 without thoughts is not there yet; give template: qwen3_nothink")
    elif value not in (True, *SWITCHED_OFF):
        reading.refuse(key, f"{LEARNED} is not there yet; leave this key out")


def _resume(reading: _Reading, key: str, value: object) -> None:
    if value is not True and value not in SWITCHED_OFF:
        reading.refuse(key, f"it is {shown(value)}; a job starts at its model; leave this key out")


def _frozen(reading: _Reading, key: str, value: object) -> None:
    """LLaMA-Factory's, read by `planner.job.trainable`."""
    if reading.source.values.get("finetuning_type") != "freeze" and value not in SWITCHED_OFF:
        reading.unused.setdefault("it says nothing without finetuning_type: freeze", []).append(key)


def _rate_of_embeddings(reading: _Reading, key: str, value: object) -> None:
    """LoRA+'s. In offmate's own files it is refused alone, see `planner.job.lora`; here it is a default written out."""
    if reading.dialect.tool is None or reading.source.values.get(PLUS) not in SWITCHED_OFF:
        reading.found.setdefault(key, []).append(key)
    elif value not in SWITCHED_OFF:
        reading.unused.setdefault(f"it says nothing without {PLUS}", []).append(key)


_SPECIAL: dict[str, Callable[[_Reading, str, object], None]] = {
    "bnb_config_kwargs": _bnb_config, "enable_thinking": _thinking,
    "model_quantization_config": _unpacked, "plugins": _plugins, "stage": _stage, "resume_from_checkpoint": _resume,
    **dict.fromkeys(("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules"), _frozen),
    "metric_for_best_model": _metric, "greater_is_better": _metric,
    PLUS_EMBEDDING: _rate_of_embeddings,
    **dict.fromkeys(("dataset_dir", _PER_EPOCH, *_PARTS), lambda *_: None),
}  # fmt: skip


def _renamed(given: Mapping[str, str]) -> Iterator[str]:
    other = [f"{key} is {name}" for name, key in given.items() if key != name]
    if other:
        yield f"in offmate's names: {', '.join(other)}"
