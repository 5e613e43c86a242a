"""Reads job files of LLaMA-Factory's v1 (as of August 2026), and rewrites them in offmate's keys before any other code
reads them.

How v1 trains: with a constant learning rate, PyTorch's AdamW (all weights decay), the mean loss over the tokens of a
step, and bf16 only with FSDP2 or DeepSpeed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.data.paths import NOTHING, data_finder, looks_local, resolve
from planner.errors import UserError
from planner.importers.base import (
    GENERATES,
    KERNELS,
    LOGS,
    ONE_DEVICE,
    OWN_CODE,
    READS,
    SAVES,
    SHAPE,
    table,
)
from planner.importers.llama_factory import trained_layers
from planner.importers.tools import ALIASES
from planner.keys.lora import ALL_LINEAR
from planner.keys.source import SWITCHED_OFF, Mistake, Source, read_text, read_yaml, shown, to_user_error
from planner.optimizers.muon import Muon

V1 = "LLaMA-Factory's v1"
_BATCHING = "batching otherwise than normal and padding_free, which have micro_batch_size rows; give one of these"
_PREFERENCES = "learning from preferences in a file of v1's; write it as LLaMA-Factory's other files, with stage: dpo"
_CHECKPOINT = "going on from a checkpoint of another run; a job goes on from its own by itself, leave this key out"

LLAMA_FACTORY_V1 = table(
    same="model learning_rate num_train_epochs max_steps max_grad_norm bf16 seed output_dir save_steps "
    "save_total_limit",
    honoured={
        "max_length": "cutoff_len",
        "per_device_train_batch_size": "micro_batch_size",
        "train_batch_size": "global_batch_size dp_size",
        "chat_template": "custom_chat_template",
        "attn_implementation": "flash_attn",
        "deterministic": "full_determinism",
        "dataset": "train_dataset",
        "method": "peft_config",
        "load_in_4bit": "quant_config",
        "optim": "optim_config",
    },
    unused={
        LOGS: "logging_steps",
        OWN_CODE: "trust_remote_code",
        KERNELS: "kernel_config",
        READS: "batching_workers",
        SAVES: "save_epochs save_ckpt_as_hf",
        GENERATES: "sample_backend max_new_tokens",
        ONE_DEVICE: "cp_size cp_mode mp_replicate_size mp_shard_size dist_timeout",
        "nothing is evaluated, as there": "eval_dataset",
    },
    planner="enable_activation_checkpointing dist_config init_config",
    not_there={
        _BATCHING: "batching_strategy",
        SHAPE: "lr_scheduler_config",
        "a model with another head": "model_class",
        _CHECKPOINT: "resume_from_checkpoint",
        _PREFERENCES: "pref_loss pref_beta pref_ftx simpo_gamma dpo_label_smoothing ld_alpha",
    },
    fine={
        "batching_strategy": ("normal", "padding_free"),
        "model_class": ("llm",),
        "resume_from_checkpoint": ("auto",),
    },
)

_TELLING = (
    "train_dataset",
    "model_class",
    "dist_config",
    "peft_config",
    "kernel_config",
    "quant_config",
    "init_config",
    "optim_config",
    "lr_scheduler_config",
    "batching_strategy",
)
_OTHERS = ("model_name_or_path", "base_model", "dataset")
_MODEL = "Qwen/Qwen3-4B-Instruct-2507"
_DEFAULTS: dict[str, Any] = {
    "max_length": 2048,
    "per_device_train_batch_size": 1,
    "learning_rate": 1e-4,
    "num_train_epochs": 3,
    "lr_scheduler_type": "constant",
    "weight_decay": 0.01,
    "decay_all": True,
    "router_aux_loss_coef": 0,
}
_AS_THEY_ARE = {
    "model": "model",
    "learning_rate": "learning_rate",
    "num_train_epochs": "num_train_epochs",
    "seed": "seed",
    "output_dir": "output_dir",
    "save_steps": "save_steps",
    "save_total_limit": "save_total_limit",
    "cutoff_len": "cutoff_len",
    "micro_batch_size": "micro_batch_size",
    "flash_attn": "attn_implementation",
    "full_determinism": "full_determinism",
}
"""Key of v1 -> a name that offmate has for it; values mean the same under both."""
_LORA = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "modules_to_save": "lora_modules_to_save",
}
_EXPORT = ("export_dir", "export_size", "export_hub_model_id", "infer_dtype", "export_legacy_format")
_FREEZE = ("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules")
_BNB = ("quantization_bit", "compute_dtype", "double_quantization", "quantization_type")
_MUON: dict[str, Any] = {
    "wd": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_steps": 5,
    "adamw_betas": [0.9, 0.95],
    "adamw_eps": 1e-8,
    "lr": None,
}
_DISTRIBUTED = ("fsdp2", "fsdpturbo", "deepspeed")
_COUNTED = ("gpt2", "gpt_neo", "gpt_bigcode", "opt", "xglm", "biogpt", "openai-gpt", "ctrl", "bart", "mbart")
"""Types of models that learn an embedding for each position."""
_CANONICAL = {name: ours for ours, names in ALIASES.items() for name in names}
_NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+")


def is_v1(keys: Mapping[str, object]) -> bool:
    """Return whether a job file with these keys is one of LLaMA-Factory's v1."""
    return any(key in keys for key in _TELLING) and not any(key in keys for key in _OTHERS)


def in_own_keys(
    source: Source, folder: Path, keys: Collection[str], *, only_planned: bool
) -> tuple[Source, tuple[str, ...]]:
    """Return a job file of LLaMA-Factory's v1 rewritten in offmate's keys, with v1's defaults written out, and notes
    for the user. `folder`: where relative paths start. `keys`: offmate's keys, which may stand beside v1's.
    `only_planned`: the job is for planning only, so its data need not exist. Raises UserError for a file that asks for
    something that is not supported."""
    file = _File(source, folder, keys)
    file.read(only_planned=only_planned)
    if mistakes := file.alone[:1] or file.mistakes:
        raise to_user_error(mistakes, source.name)
    return file.written(), file.notes()


@dataclass(slots=True)
class _File:
    """A v1 job file while it is read. `own`: offmate's keys and their values, found so far; `lines`: the line of the
    file from which each of them comes."""

    source: Source
    folder: Path
    keys: Collection[str]
    own: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    alone: list[Mistake] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)
    unused: dict[str, list[str]] = field(default_factory=dict)
    filled: dict[str, Any] = field(default_factory=dict)
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def read(self, *, only_planned: bool) -> None:
        """Read all keys: first one by one, then those that depend on others."""
        for key, value in self.source.values.items():
            self._key(key, value)
        for key, name in _AS_THEY_ARE.items():
            if self._given(key) is not None:
                self.put(key, {name: self._given(key)})
        self._model()
        self.configs = {key: self._config(key) for key in _CONFIGS}
        for key, settle in _CONFIGS.items():
            settle(self, self.configs[key])
        self._steps()
        self._precision()
        self._template()
        if only_planned:
            self.put("train_dataset", {"dataset": NOTHING})
        else:
            self._data()

    def put(self, key: str, values: Mapping[str, Any]) -> None:
        """Set keys of offmate's that come from the file's `key`."""
        self.own |= values
        if key in self.source.lines:
            self.lines |= dict.fromkeys(values, self.source.lines[key])

    def refuse(self, key: str, text: str, code: str = "not-there") -> None:
        """Note a mistake at the file's `key`: a wrong value, or something that is not supported yet."""
        self.mistakes.append(self.source.mistake(key, code, text))

    def written(self) -> Source:
        """Return the file in offmate's keys, with v1's defaults."""
        beside = {key: value for key, value in self.source.values.items() if self._is_told(key)}
        above = {_CANONICAL.get(key, key) for key in beside}
        values = {key: value for key, value in self.own.items() if _CANONICAL.get(key, key) not in above} | beside
        present = {_CANONICAL.get(key, key) for key in values}
        present |= {"num_train_epochs"} if "max_steps" in present else set()
        self.filled |= {key: value for key, value in _DEFAULTS.items() if key not in present}
        source = self.source
        return Source(name=source.name, values=self.filled | values, lines=self.lines, told=source.told)

    def notes(self) -> tuple[str, ...]:
        """Return the notes for the user on this file."""
        words = ", ".join(f"{key} {str(value).lower()}" for key, value in self.filled.items())
        notes = [f"the file reads as {V1}; its defaults for keys that are not given: {words}"]
        if self.apart:
            notes.append(f"in this file of {V1}: {'; '.join(self.apart)}")
        return (*notes, *(f"not used: {', '.join(keys)} ({why})" for why, keys in self.unused.items()))

    def _is_told(self, key: str) -> bool:
        return key != "preference" and key not in LLAMA_FACTORY_V1 and (key in self.source.told or key in self.keys)

    def _given(self, key: str) -> Any:
        return self.source.values.get(key)

    def _key(self, key: str, value: object) -> None:
        meaning = LLAMA_FACTORY_V1.get("pref_loss" if key == "preference" else key)
        if self._is_told(key):
            return
        if meaning is None:
            self.mistakes.append(self.source.unknown(key, LLAMA_FACTORY_V1))
        elif meaning.kind == "honoured" or value in SWITCHED_OFF or value in meaning.fine:
            return
        elif meaning.kind == "not there":
            what, _, instead = meaning.text.partition("; ")
            text = f"{what} is not supported yet; {instead or 'leave this key out'}"
            alone = self.alone if meaning.text == _PREFERENCES else self.mistakes
            alone.append(self.source.mistake(key, "not-there", text))
        else:
            self.unused.setdefault(meaning.text, []).append(key)

    def _config(self, key: str) -> dict[str, Any]:
        """Return the mapping under a key such as `peft_config`, which must have a name; {} where there is none, or a
        wrong one, which is noted as a mistake."""
        value = self._given(key)
        if value is None:
            return {}
        if isinstance(value, dict) and isinstance(value.get("name"), str):
            return {str(name): _plain(entry) for name, entry in value.items()}
        self.refuse(key, f"it is {shown(value)}; it must be a mapping with a name, or null", "bad-value")
        return {}

    def _only(self, key: str, config: Mapping[str, Any], known: tuple[str, ...]) -> bool:
        """Return whether a config has only `known` keys, as v1 demands; otherwise note a mistake."""
        if strange := next((name for name in config if name not in ("name", *known)), None):
            self.refuse(key, f"it has {strange}, which is no key of it; known are {', '.join(known)}", "unknown-key")
        return strange is None

    def _model(self) -> None:
        if self._given("model") is None:
            self.own["model"] = self.filled["model"] = _MODEL
        kind = self._model_config().get("model_type")
        if kind in _COUNTED and self._given("batching_strategy") != "padding_free":
            text = f"{kind} learns a vector for each position, and v1 counts positions from 1, where the model itself "
            self.refuse("model", f"{text}counts from 0; batching_strategy: padding_free counts from 0, too")

    def _model_config(self) -> dict[str, Any]:
        """Return the config.json of a model in a local folder; {} where it cannot be read. Loading the model will
        report that."""
        try:
            config = json.loads((Path(resolve(self.own["model"], self.folder)) / "config.json").read_text("utf-8"))
        except (OSError, TypeError, ValueError):
            return {}
        return config if isinstance(config, dict) else {}

    def _adapters(self, config: dict[str, Any]) -> None:
        key, name = "peft_config", config.get("name")
        if name == "freeze":
            self._frozen(config)
        if name not in (None, "lora", "freeze"):
            self.refuse(key, f"it is for {shown(name)}; only lora and freeze are supported")
        if name != "lora" or not self._only(key, config, (*_LORA, "target_modules", "adapter_name_or_path", *_EXPORT)):
            return
        if config.get("export_dir") and self._given("train_dataset") is None:
            text = "export_dir asks for a merged model of an adapter that is there; offmate export makes one of a job's"
            self.alone.append(self.source.mistake(key, "not-there", text))
        adapter = config.get("adapter_name_or_path")
        if isinstance(adapter, list) and len(adapter) == 1:
            (adapter,) = adapter
        if adapter and not isinstance(adapter, str):
            text = f"adapter_name_or_path is {shown(adapter)}; one path goes on from one adapter"
            self.refuse(key, text, "bad-value")
        elif adapter:  # the adapter says all else itself
            self.put(key, {"method": "lora", "adapter_name_or_path": self._found(adapter)})
        if adapter:
            return
        defaults = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.05}
        settings = {**defaults, **{name: value for name, value in config.items() if value is not None}}
        targets = settings.get("target_modules", "all")
        targets = ALL_LINEAR if targets == "all" else [targets] if isinstance(targets, str) else targets
        lora_keys = {ours: settings[theirs] for theirs, ours in _LORA.items() if theirs in settings}
        self.put(key, {"method": "lora", "lora_target_modules": targets, **lora_keys})

    def _frozen(self, config: dict[str, Any]) -> None:
        if not self._only("peft_config", config, (*_FREEZE, "cast_trainable_params_to_fp32")):
            return
        if config.get("freeze_trainable_layers") == 0:
            self.refuse("peft_config", "freeze_trainable_layers is 0, by which no layer is trained; give a number")
        self.put("peft_config", trained_layers(config))
        if config.get("cast_trainable_params_to_fp32") is False:
            self.apart.append("masters and moments stay fp32, also with cast_trainable_params_to_fp32: false")

    def _quantized(self, config: dict[str, Any]) -> None:
        key, name = "quant_config", config.get("name")
        if name is None or not self._only(key, config, _BNB):
            return
        bits = config.get("quantization_bit")
        bits = 4 if bits is None and name == "bnb" else bits
        if name not in ("auto", "bnb") or bits not in (4, 8, None):
            self.refuse(key, f"it is {shown(config)}; only a base in 4 or 8 bits by bnb is supported")
        elif bits == 8:
            self.put(key, {"load_in_8bit": True})
        elif bits == 4:
            double, kind = config.get("double_quantization"), config.get("quantization_type")
            double_quant = {"bnb_4bit_use_double_quant": double if double is not None else True}
            self.put(key, {"load_in_4bit": True, "bnb_4bit_quant_type": kind or "nf4", **double_quant})
            if (dtype := config.get("compute_dtype") or "float16") != "bfloat16":
                self.apart.append(f"products with the base are in the job's own dtype, and there in {dtype}")

    def _optimizer(self, config: dict[str, Any]) -> None:
        key, name = "optim_config", config.get("name")
        if name is None:
            return
        if name != "muon":
            self.refuse(key, f"it is for {shown(name)}; only muon is supported; for AdamW leave this key out")
            return
        settings = {**_MUON, **config}
        if not self._only(key, config, (*_MUON,)):
            return
        for option in ("momentum", "nesterov", "ns_steps"):
            if settings[option] != _MUON[option]:
                self.refuse(key, f"{option} is {shown(settings[option])}; only {shown(_MUON[option])} is supported")
        if self.own.get("method") == "lora":
            self.refuse(
                key,
                "v1 trains adapters by AdamW also with muon, offmate would train them by Muon; leave this key out",
            )
        betas = settings["adamw_betas"]
        if not isinstance(betas, list) or len(betas) != 2:
            self.refuse(key, f"adamw_betas is {shown(betas)}; it must be two numbers", "bad-value")
            return
        adam_keys = {"adam_beta1": betas[0], "adam_beta2": betas[1], "adam_epsilon": settings["adamw_eps"]}
        self.put(key, {"optim": Muon.kind, "weight_decay": settings["wd"], **adam_keys})
        self.apart.append(
            "Muon is torch.optim.Muon, as there; in AdamW adamw_eps is added after the bias correction, there before it"
        )

    def _distributed(self, config: dict[str, Any]) -> None:
        key, name = "dist_config", config.get("name")
        if name not in (None, *_DISTRIBUTED):
            self.refuse(key, f"it is for {shown(name)}; known are {', '.join(_DISTRIBUTED)}", "bad-value")
        if config.get("dcp_path"):
            self.refuse(
                key,
                (
                    "dcp_path has weights in PyTorch's distributed form, which is not read; give a folder of "
                    "safetensors as model"
                ),
            )

    def _steps(self) -> None:
        """Read the rows of a step, the number of steps, and the limit for the gradient norm."""
        numbers = {key: self._given(key) for key in ("micro_batch_size", "dp_size", "global_batch_size", "max_steps")}
        for key, value in numbers.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                self.refuse(key, f"it is {shown(value)}; it must be a whole number", "wrong-type")
                return
        micro, cards = numbers["micro_batch_size"] or 1, numbers["dp_size"] or 1
        total = numbers["global_batch_size"] or micro * cards
        size_key = next((key for key in ("global_batch_size", "dp_size") if numbers[key]), "micro_batch_size")
        self.put(size_key, {"train_batch_size": total})
        if total > 1:
            self.apart.append(
                "a step goes on with the next epoch's rows, and there rows that fill no step are left out"
            )
        if (numbers["max_steps"] or 0) > 0:
            self.put("max_steps", {"max_steps": numbers["max_steps"]})
        clip = self._given("max_grad_norm") if "max_grad_norm" in self.source.values else 1.0
        if clip in SWITCHED_OFF or (isinstance(clip, (int, float)) and clip < 0):
            self.refuse("max_grad_norm", f"it is {shown(clip)}, with which v1 learns nothing; give a number above 0")
        self.put("max_grad_norm", {"max_grad_norm": clip})
        config = self.configs["dist_config"]
        if config.get("name") == "deepspeed" and total > micro * cards:
            text = "under deepspeed v1 divides the loss by the micro-batches of a step once more; leave this key out"
            self.refuse("global_batch_size", text)
        if config.get("name") == "deepspeed":
            self._deepspeed(config)

    def _deepspeed(self, config: dict[str, Any]) -> None:
        """Read DeepSpeed's config file: the limit for the gradient norm, and whether it computes in bf16."""
        try:
            path = Path(self._found(config.get("config_file")))
            settings = json.loads(path.read_text("utf-8"))
            if not isinstance(settings, dict):
                raise ValueError(f"{path} is no mapping")
        except (OSError, TypeError, ValueError) as error:
            text = f"config_file is {shown(config.get('config_file'))}, which cannot be read: {error}; it says how "
            self.refuse("dist_config", f"{text}gradients are clipped", "missing-file")
            return
        if other := next((name for name in ("optimizer", "scheduler") if name in settings), None):
            self.refuse("dist_config", f"{path.name} has {other}, and v1 has its own; leave it out there")
        clip = settings.get("gradient_clipping", 0.0)
        clip = 1.0 if clip == "auto" else clip
        self.put("dist_config", {"max_grad_norm": clip})
        if clip != (job_clip := self._given("max_grad_norm") or 1.0):
            note = f"max_grad_norm is {shown(clip)}, as DeepSpeed's own file has it, and not {shown(job_clip)}"
            self.apart.append(note)
        bf16, fp16 = (_enabled(settings, name) for name in ("bf16", "fp16"))
        if fp16 is True:
            self.refuse("dist_config", f"{path.name} has fp16, which v1 refuses, too")
        self.put("dist_config", {"bf16": "auto" if bf16 is True or (bf16 == fp16 == "auto") else False})

    def _precision(self) -> None:
        """Set `bf16`: v1 computes in bf16 with FSDP2 or DeepSpeed, otherwise in the model's dtype, which is fp32 in
        full training."""
        config, bf16 = self.configs["dist_config"], self._given("bf16")
        bf16 = "auto" if bf16 is None else bf16
        if config.get("name") == "deepspeed":
            self.own.setdefault("bf16", "auto")
        elif config:
            self.put("bf16", {"bf16": bf16})
        elif self._given("peft_config") is None:
            self.put("bf16", {"bf16": False})
            self.apart.append("bf16 is false, as v1 computes in bf16 with a dist_config only")
        else:
            base = self._model_config()
            is_fp32 = (base.get("dtype") or base.get("torch_dtype")) == "float32"
            self.put("bf16", {"bf16": False if is_fp32 else "auto"})

    def _template(self) -> None:
        template = self._given("custom_chat_template")
        if template in (None, ""):
            return
        if not isinstance(template, str) or not ("{{" in template or "{%" in template):
            self.refuse("custom_chat_template", f"it is {shown(template)}; it must be a template's text", "bad-value")
        self.put("custom_chat_template", {"chat_template": template})

    def _places(self) -> Iterator[Path]:
        """Yield the folders where relative paths may start: v1 may be run in the file's folder or in any folder
        above."""
        yield from (self.folder, *self.folder.parents)

    def _found(self, path: object) -> str:
        """Return a path as an absolute one, in the nearest of `_places` in which it exists; unchanged where it exists
        in none. Raises TypeError."""
        paths = (resolve(path, place) for place in self._places())
        return next((candidate for candidate in paths if Path(candidate).exists()), str(path))

    def _data(self) -> None:
        value, key = self._given("train_dataset"), "train_dataset"
        if not isinstance(value, str) or not value:
            text = "it is missing" if value is None else f"it is {shown(value)}; it must be a path or a hub id"
            self.refuse(key, text, "missing-key" if value is None else "wrong-type")
            return
        if not value.endswith(".yaml"):
            near = next((place for place in self._places() if Path(resolve(value, place)).exists()), None)
            self._entries({"": {"path": value, "source": "local" if near else "hf_hub"}}, near or self.folder)
            return
        place = next((place for place in self._places() if (place / value).is_file()), None)
        if place is None:
            self.refuse(
                key,
                (
                    f"there is no file {value} in the job file's folder or one above it; put it there, the hub is "
                    "not asked"
                ),
                "missing-file",
            )
            return
        try:
            self._entries(read_yaml(read_text(place / value), value).values, place)
        except UserError as error:
            self.refuse(key, error.what, "bad-value")

    def _entries(self, infos: Mapping[str, Any], place: Path) -> None:
        """Read the datasets of the file. `place`: the folder where v1 is run and where their paths start."""
        entries, wrong = entries_of(infos, place, seed=self._given("seed"))
        for name, error in wrong:
            code = "missing-file" if isinstance(error, OSError) else "bad-value"
            self.refuse("train_dataset", f"{name}: {error}" if name else str(error), code)
        self.put("train_dataset", {"dataset": entries})


def _plain(value: object) -> object:
    """Return a value as v1 reads it: a text that is a number, true or false becomes that."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    if _NUMBER.fullmatch(value):
        return int(value) if value.isdigit() else float(value)
    return value


def _enabled(settings: Mapping[str, Any], name: str) -> object:
    """Return the switch `name` of DeepSpeed's config file; "auto" where the file does not set it."""
    part = settings.get(name)
    switch = part.get("enabled", "auto") if isinstance(part, dict) else "auto"
    return _plain(switch)


_CONFIGS: dict[str, Callable[[_File, dict[str, Any]], None]] = {
    "peft_config": _File._adapters,
    "quant_config": _File._quantized,
    "optim_config": _File._optimizer,
    "dist_config": _File._distributed,
}
"""Keys whose values are mappings, and the methods that read them. Later ones may use what earlier ones have set."""


# ---- reads the datasets in a file of LLaMA-Factory's v1 as entries of a job's `dataset`


_INFO = ("path", "source", "split", "converter", "size", "weight", "streaming")
_MOST = 10**9
_UNKNOWN = -1


def entries_of(
    infos: Mapping[str, Any], place: Path, *, seed: object
) -> tuple[list[dict[str, Any]], list[tuple[str, Exception]]]:
    """Return the datasets in a job file of LLaMA-Factory's v1 as entries of an offmate job's `dataset`, and the errors
    in them, each with the dataset's name. `infos`: dataset name -> its mapping in v1's file; `place`: the folder where
    relative paths start; `seed`: the file's seed, for datasets of which rows are drawn at random."""
    entries, wrong, drawn = [], list[tuple[str, Exception]](), 0
    for name, info in infos.items():
        try:
            entry, drawn = _entry(info, place, drawn, 42 if seed is None else seed)
            entries.append(entry)
        except (OSError, TypeError, ValueError) as error:
            wrong.append((name, error))
    return entries, wrong


def _entry(info: object, place: Path, drawn: int, seed: object) -> tuple[dict[str, Any], int]:
    """Return a v1 dataset as an entry of `dataset`, and how many random numbers v1 has drawn up to and including this
    dataset. `drawn`: how many it had drawn before, or `_UNKNOWN`. Raises OSError, TypeError and ValueError."""
    if not isinstance(info, dict) or not isinstance(info.get("path"), str):
        raise ValueError(f"a dataset has a path, this is {shown(info)}")
    if strange := next((key for key in info if key not in _INFO), None):
        raise ValueError(f"{strange} is no key of a dataset; known are {', '.join(_INFO)}")
    if info.get("streaming"):
        raise ValueError("streaming is true, which v1 does not train on; leave it out")
    if (kind := info.get("source", "hf_hub")) not in ("hf_hub", "local"):
        raise ValueError(f"source is {shown(kind)}; local files and hf_hub are read")
    converter = info.get("converter") or "v1"
    if converter not in ("v1", "alpaca", "sharegpt"):
        pair = ", which is for preferences" if converter == "pair" else ""
        raise ValueError(f"converter is {shown(converter)}{pair}; known are alpaca and sharegpt, or none for v1's form")
    path = info["path"]
    if kind == "local" or looks_local(path, place):
        path = data_finder(place)(path if path.startswith(("/", "~")) else str(place / path))
    entry: dict[str, Any] = {"path": path, "converter": converter}
    entry |= {"split": info["split"]} if info.get("split") else {}
    entry |= {"type": "instructions" if converter == "alpaca" else "messages"}
    entry |= {"columns": {"messages": "conversations"}} if converter == "sharegpt" else {}
    size, weight = info.get("size"), info.get("weight")
    for key, value in (("size", size), ("weight", weight)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value <= _MOST):
            raise ValueError(f"{key} is {shown(value)}; it must be a number above 0, at most 10^9")
    if size is None and weight is None:
        return entry, drawn
    if drawn == _UNKNOWN:
        raise ValueError("it is drawn behind a dataset with weight and without size; give that one last")
    entry["draw"] = {"seed": seed, "size": size, "weight": weight, "skip": drawn}
    if size is None:
        return entry, _UNKNOWN
    return entry, drawn + int(size) + (int(size * weight) if weight is not None else 0)
