"""Files of other tools: which tool a file is for, and what the keys that it leaves out mean in that tool.

A person who pastes a file expects what that tool would do. So a file whose keys are those of axolotl, LLaMA-Factory or
TRL gets that tool's defaults, and a note says which. All other files get offmate's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from planner.job.lora import PEFTS_OWN
from planner.job.pretraining import long_texts, read_otherwise
from planner.job.slot_templates import PARSED, PREFIX, has_slots, slot_template
from planner.job.source import SWITCHED_OFF
from planner.job.trainable import of_llama_factory
from planner.keys import TABLES
from planner.keys.llama_factory import LLAMA_FACTORY as LLAMA_FACTORY_KEYS
from planner.keys.trl import TRL as TRL_KEYS
from planner.optimizers.muon import ADJUST, ORIGINAL, Muon

AXOLOTL, LLAMA_FACTORY, TRL = "axolotl", "LLaMA-Factory", "TRL"
_LLAMA_FACTORY = LLAMA_FACTORY_KEYS.keys() - TRL_KEYS.keys() - {"dataset", "eval_dataset", "val_size", "max_samples"}
"""Keys that neither TRL nor offmate has."""

DEFAULTS: dict[str, dict[str, Any]] = {
    AXOLOTL: {
        "max_length": 512,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.03,
        "bf16": "auto",
        "long_rows": "drop",
    },
    LLAMA_FACTORY: {"max_length": 2048, "long_rows": "share"},
    TRL: {
        "learning_rate": 2e-5,
        "bf16": "auto",
        "train_on": "pairs",
        "router_aux_loss_coef": "auto",
        "router_aux_loss_mean": True,
    },
}
"""Tool -> the values of absent keys, where they differ from offmate's."""

LORA_DEFAULTS: dict[str, dict[str, Any]] = {
    AXOLOTL: {"lora_dropout": 0.0},
    LLAMA_FACTORY: {"lora_r": 8, "lora_dropout": 0.0, "lora_target_modules": "all-linear"},
    TRL: {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": PEFTS_OWN},
}
"""Tool -> the further defaults with `method: lora`. axolotl has none for rank, alpha and targets: they must be
given."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The tool that a file is for; `tool` None for offmate's own."""

    tool: str | None

    @classmethod
    def of(cls, keys: Collection[str]) -> Dialect:
        """The dialect that the keys of a file show."""
        if "base_model" in keys:
            return cls(AXOLOTL)
        if "model_name_or_path" in keys:
            return cls(LLAMA_FACTORY if _LLAMA_FACTORY & set(keys) else TRL)
        return cls(None)

    def other_name(self, key: str, name: str) -> str | None:
        """The tool's key for the job's key `name`, where `key` is a name of it elsewhere and means something else in
        this tool. None where `key` means `name` here, too, or where the tool has no key for it."""
        table = TABLES.get(self.tool or "", {})
        if key not in table or table[key].kind == "honoured":
            return None
        named = (other for other, meaning in table.items() if meaning.kind == "honoured" and meaning.text == name)
        return next(named, None)

    def missing(self, values: Mapping[str, Any]) -> list[str]:
        """Keys that the tool requires and `values` lack."""
        of_adapters = ("lora_r", "lora_alpha", "lora_target_modules") if _makes_adapters(values) else ()
        wanted = ("learning_rate", *of_adapters) if self.tool == AXOLOTL else ()
        return [key for key in wanted if values.get(key) is None]

    def chooses_best(self, file: Mapping[str, object]) -> bool:
        """Whether the tool keeps the best evaluated model where the file does not say so. axolotl does where every save
        falls on an evaluation, by its own arithmetic with shares of all steps."""
        if self.tool != AXOLOTL or file.get("eval_strategy") in ("no", False):
            return False
        save, every = (_share(file, f"{name}_steps", f"{name}s_per_epoch") for name in ("save", "eval"))
        evaluates = bool(file.get("val_set_size") or file.get("test_datasets"))
        return evaluates and bool(save and every and save % every == 0)

    def fill(self, values: dict[str, Any], file: Mapping[str, object]) -> tuple[str, ...]:
        """Put the tool's defaults into `values` (by canonical name) where the file has none; `file`: the file's own
        keys and values. Returns notes for the user: one on the defaults, one on other differences from the tool."""
        if self.tool is None:
            return ()
        absent = dict(DEFAULTS[self.tool])
        if self.tool == LLAMA_FACTORY:
            if file.get("finetuning_type") is None:
                absent["method"] = "lora"
            if file.get("finetuning_type") == "freeze":
                values |= of_llama_factory(file)
            if (file.get("resize_vocab") is True or values.get("add_tokens")) and _makes_adapters(absent | values):
                absent["lora_modules_to_save"] = ["embed_tokens", "lm_head"]
            if file.get("stage") != "pt":
                absent["chat_template"] = PARSED
            if file.get("stage") == "pt":
                del absent["long_rows"]  # texts are cut at their end
                absent |= {"packing": "wrapped"}
                if values.get("packing") is True:  # the tool can pack texts in this way only
                    values["packing"] = "wrapped"
        if _makes_adapters(absent | values):
            absent |= LORA_DEFAULTS[self.tool]
            if self.tool == AXOLOTL and values.get("lora_target_parameters") not in SWITCHED_OFF:
                absent["lora_target_modules"] = []  # axolotl allows parameters as the only targets
            if self.tool == TRL and values.get("lora_target_parameters") not in SWITCHED_OFF:
                absent["lora_dropout"] = 0.0  # peft refuses TRL's default for layers here
            if self.tool == LLAMA_FACTORY:
                absent["lora_alpha"] = 2 * _whole(values.get("lora_r", absent["lora_r"]))
        if self.tool == TRL and values.get("method") == "lora" and values.get("load_in_4bit") is True:
            absent["bnb_4bit_use_double_quant"] = False
        if self.tool == AXOLOTL and _are_completions(values.get("dataset")):
            absent["long_rows"] = "split"
        packs = values.get("packing") is True
        if self.tool == AXOLOTL and (long := long_texts(file, packs=packs)):
            absent["long_rows"] = long
        if self.tool == AXOLOTL and values.get("optim") == Muon.kind:
            absent[ADJUST] = ORIGINAL
        if self.tool == AXOLOTL and (added := _new_tokens(values)):
            values["add_tokens"] = added
        if self.chooses_best(file):
            absent["load_best_model_at_end"] = True
        if values.get("label_smoothing_factor") not in SWITCHED_OFF:  # TRL's smoothed loss, too, is of the logits alone
            absent.pop("router_aux_loss_coef", None)
        if shorter := self.tool == LLAMA_FACTORY and values.get("packing") in (True, "wrapped"):
            _leave_room(values, absent)
        if values.get("train_batch_size") is not None:
            absent.pop("per_device_train_batch_size", None)
        filled = {key: value for key, value in absent.items() if values.get(key) is None}
        values |= filled
        others = (
            _muons_apart(self.tool, values, filled),
            _decay_of_loraplus(self.tool, values),
            _rows_of_tokens(values),
            _embeddings_of_loraplus(self.tool, values),
            _routers_of_packed(self.tool, values),
            read_otherwise(file, packs=packs) if self.tool == AXOLOTL else "",
            _rows_of_texts(values) if self.tool == LLAMA_FACTORY and file.get("stage") == "pt" else "",
            _documents_apart(values, file) if self.tool == LLAMA_FACTORY else "",
            f"max_length is {values['max_length']}, as packed rows are one token shorter than cutoff_len there"
            if shorter
            else "",
            replace_end(values, file) if self.tool == LLAMA_FACTORY else "",
            _cut_prompts(self.tool, values),
            _held_out(values),
        )
        words = ", ".join(f"{key} {value}" for key, value in filled.items())
        told = f"the file reads as {self.tool}'s; what it leaves out is as there: {words}" if filled else ""
        apart = f"in this file of {self.tool}'s: {words}" if (words := "; ".join(filter(None, others))) else ""
        return tuple(filter(None, (told, apart)))


def _leave_room(values: dict[str, Any], absent: dict[str, Any]) -> None:
    """Reduce `max_length` by one, for a file that packs: LLaMA-Factory's packed rows are a token shorter than
    `cutoff_len`."""
    for said in (values, absent):
        if isinstance(said.get("max_length"), int) and not isinstance(said["max_length"], bool):
            said["max_length"] -= 1


def _new_tokens(values: Mapping[str, Any]) -> list[object]:
    """The tokens that axolotl adds to the tokenizer where it lacks them: `add_tokens` and its special tokens. [] for
    wrong values, which are reported elsewhere."""
    given, special = values.get("add_tokens") or [], values.get("special_tokens") or {}
    if not isinstance(given, list) or not isinstance(special, dict):
        return []
    more = special.get("additional_special_tokens")
    named = [token for name, token in special.items() if name != "additional_special_tokens"]
    tokens = [*named, *given, *(more if isinstance(more, list) else ())]  # in axolotl's order
    return [token for place, token in enumerate(tokens) if token not in tokens[:place]]


def _rows_of_tokens(values: Mapping[str, Any]) -> str:
    """A note that new tokens' rows begin otherwise than in the tools; "" without new tokens."""
    if not values.get("add_tokens"):
        return ""
    return "of add_tokens, what the tokenizer lacks gets rows that are drawn around the mean of the others"


def _muons_apart(tool: str, values: Mapping[str, Any], filled: Collection[str]) -> str:
    """A note on how the tool's Muon differs from the job's; "" where it does not."""
    ours = "its Muon is torch.optim.Muon here"
    if ADJUST in filled:
        return f"{ours}, whose steps of wide matrices are larger"
    decay = values.get("weight_decay")
    if tool == LLAMA_FACTORY and values.get("optim") == Muon.kind and isinstance(decay, (int, float)) and decay > 0:
        return f"{ours} and torch.optim.AdamW, and weight_decay leaves biases and norms alone, which it decays there"
    return ""


def _decay_of_loraplus(tool: str, values: dict[str, Any]) -> str:
    """Set the weight decay to 0 where axolotl gives none to peft's LoRA+, and return a note on it; else ""."""
    if tool != AXOLOTL or values.get("loraplus_lr_ratio") in SWITCHED_OFF or values.get("weight_decay") in SWITCHED_OFF:
        return ""
    values["weight_decay"] = 0.0
    return "weight_decay is 0, as its LoRA+ has none"


def _embeddings_of_loraplus(tool: str, values: Mapping[str, Any]) -> str:
    """A note that LLaMA-Factory's LoRA+ gives its rate for embeddings to only one of the two matrices of their
    adapters."""
    targets = str(values.get("lora_target_modules"))
    if tool != LLAMA_FACTORY or values.get("loraplus_lr_ratio") in SWITCHED_OFF:
        return ""
    if not any(word in targets for word in ("emb", "wte")):
        return ""
    return "loraplus_lr_embedding is for both matrices of an embedding's adapter, as in peft, and there for B alone"


def _cut_prompts(tool: str, values: Mapping[str, Any]) -> str:
    """A note that long rows are cut at their end where prompts are learned, as nothing tells prompts from answers
    then."""
    if tool != LLAMA_FACTORY or values.get("train_on") != "all" or values.get("long_rows") != "share":
        return ""
    return "with train_on_prompt long rows are cut at their end, where prompts and answers share the room there"


def _rows_of_texts(values: Mapping[str, Any]) -> str:
    """A note on how LLaMA-Factory cuts texts into rows: 1000 texts at a time, and a rest that fills no row is not
    learned."""
    if values.get("packing") != "wrapped":
        return ""
    return "all texts are learned to their end, of which it leaves out what does not fill a row, of each 1000"


def _documents_apart(values: Mapping[str, Any], file: Mapping[str, object]) -> str:
    """A note on how LLaMA-Factory packs without `neat_packing`."""
    if values.get("packing") is not True or file.get("neat_packing") not in SWITCHED_OFF:
        return ""
    return "packed documents do not see one another, as with neat_packing, and there they do"


def _held_out(values: Mapping[str, Any]) -> str:
    """A note that the tools hold out the rows of `val_size` even where they never evaluate on them."""
    if values.get("eval_strategy") not in ("no", False) or values.get("val_size") in SWITCHED_OFF:
        return ""
    return "as nothing is evaluated, all rows are trained on, and there those of val_size are not"


def _routers_of_packed(tool: str, values: Mapping[str, Any]) -> str:
    """A note that axolotl gives the model no mask of packed rows, so that padding counts in the routers' loss, which
    balances the experts."""
    if tool != AXOLOTL or values.get("packing") is not True or not values.get("router_aux_loss_coef"):
        return ""
    return "the routers' loss is without the padding of packed rows, which counts there"


def _makes_adapters(values: Mapping[str, Any]) -> bool:
    """Whether new adapters are made: an existing adapter has its own rank and other keys."""
    return values.get("method") == "lora" and values.get("adapter_name_or_path") in SWITCHED_OFF


def _share(file: Mapping[str, object], steps: str, per_epoch: str) -> float | None:
    """The steps between two saves or evaluations, or their share of all steps, as axolotl computes it from a number per
    epoch. None where neither is given."""
    given, times, epochs = file.get(steps), file.get(per_epoch), file.get("num_epochs") or 1
    if isinstance(times, (int, float)) and isinstance(epochs, (int, float)) and times > 0 < epochs:
        return 1.0 / (times * epochs)
    return given if isinstance(given, (int, float)) and given > 0 else None


def _are_completions(entries: object) -> bool:
    """Whether all data are plain texts (`completion`), of which axolotl leaves nothing out."""
    return isinstance(entries, list) and all(
        isinstance(entry, dict) and str(entry.get("type")).startswith("completion") for entry in entries
    )


def _whole(value: object) -> int:
    """A rank; 8 for a value that is no number, which is reported as a mistake elsewhere."""
    return value if isinstance(value, int) and value > 0 else 8


# ---- the end token that a template of LLaMA-Factory's gives a tokenizer (its `replace_eos`)


def replace_end(values: dict[str, Any], file: Mapping[str, object]) -> str:
    """Put the end token of the `template` in a LLaMA-Factory `file` into `values`, whose keys are canonical. Returns a
    note for the user; "" where nothing is replaced."""
    name, special = file.get("template"), values.get("special_tokens") or {}
    template = slot_template(f"{PREFIX}{name}") if has_slots(name) else None
    texts = file.get("stage") == "pt" and name == "llama3"  # LLaMA-Factory ends these texts with another token
    if template is None or not template.replaces_eos or texts:
        return ""
    if not isinstance(special, dict) or "eos_token" in special:
        return ""
    end = template.stops[0]
    values["special_tokens"] = {"eos_token": end, **special}
    if file.get("resize_vocab") is True and values.get("add_tokens") in (None, ""):
        values["add_tokens"] = [end, *(["<|im_start|>"] if name == "chatml" else [])]
    return f"template: {name} makes {end} the tokenizer's end token, as there"
