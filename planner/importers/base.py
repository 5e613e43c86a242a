"""Describes another training tool, such as axolotl, so that offmate can read its job files.

Each tool is a subclass of `Tool` in a file of this folder. Its table (`Meaning`, `table`) says what each key does.
Methods and mappings of the class say the rest: the tool's defaults, how its values are translated into offmate's, which
values are mistakes, and where its training differs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from planner.keys.preference import PREFERENCES
from planner.keys.source import SWITCHED_OFF, Mistake, Source

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
REPORTS = "offmate reports to tensorboard, wandb, trackio and mlflow only; metrics.jsonl has all figures"
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

REWARDS = f"this kind of training (there is preference: {', '.join(PREFERENCES[:-1])} or {PREFERENCES[-1]})"
PICTURES = "training on pictures, sounds or videos"
QUANTIZED = "a base quantized in another way than load_in_4bit and load_in_8bit"
OTHER_LORA = "another kind of LoRA"
SOME_WEIGHTS = "training some weights only"
OPTIMIZER = "another optimizer"
PROJECTED = (
    "an optimizer with projected gradients (GaLore, APOLLO); "
    "leave this key out and give method (adapter, finetuning_type): lsp, which is there for that purpose"
)
ITS_RATE = "another learning rate for some weights"
SHAPE = "another shape of the learning rate"
LOSS = "another loss"
LENGTHS = "another weight for the longer answer's end (LD-DPO)"
LEARNED = "another choice of what is learned"
ORDER = "another order of the data"
CHANGED_MODEL = "a changed model (change its config.json)"
FP16 = "fp16 training; give bf16: true in its place, or leave both out to compute in fp32"
DISTILLED = "distillation"
DIFFUSION = "training a diffusion model"
ELSEWHERE = "training on another service"
OTHER_FORM = (
    "a key of LLaMA-Factory's v1 beside model_name_or_path, base_model or dataset; give model and train_dataset in "
    "their place, as v1 does, or write all as its other files are"
)


_OTHER_TRAINING = (REWARDS, PICTURES, DISTILLED, DIFFUSION)
_ALONE = (*_OTHER_TRAINING, ELSEWHERE, OTHER_FORM)
"""Purposes of a whole file: where such a purpose is not there, only that mistake is reported."""


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
    """Returns a table of a tool's keys: key -> its `Meaning`. Keys are given as texts with spaces between the names.

    `same`: keys that have offmate's own names. `honoured`: offmate's key -> the tool's names for it. `unused` and
    `not_there`: `Meaning.text` -> keys. `planner`: keys that the planner decides. `parts`: a key -> the keys that have
    no effect without it. `fine`: key -> `Meaning.fine`.
    """
    meanings: dict[str, Meaning] = {}

    def add(names: str, meaning: Meaning) -> None:
        for name in names.split():
            assert name not in meanings, name
            meanings[name] = meaning

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
        meanings[name] = replace(meanings[name], fine=values)
    return meanings


File = Mapping[str, object]
"""A file's own keys and their values."""


class Reading:
    """Collects what is learned while the keys of a file are read: keys that offmate has (`taken`), mistakes, and keys
    without effect, with the reason (`unused`). `meaning` returns the `Meaning` of a key, None for an unknown
    key."""

    def __init__(self, source: Source, tool: Tool, meaning: Callable[[str], Meaning | None]) -> None:
        self.source, self.tool, self.meaning = source, tool, meaning
        self.taken: dict[str, list[str]] = {}  # canonical key -> keys of the file
        self.mistakes: list[Mistake] = []
        self.alone: list[Mistake] = []
        self.unused: dict[str, list[str]] = {}
        self.unknown: list[str] = []
        self._quantized = False

    @property
    def file(self) -> File:
        """The file's keys and values."""
        return self.source.values

    def refuse(self, key: str, text: str, *, alone: bool = False) -> None:
        """Note a mistake: something that is not supported yet. `alone`: it is reported instead of all others."""
        (self.alone if alone else self.mistakes).append(self.source.mistake(key, "not-there", text))

    def leave(self, key: str, why: str) -> None:
        """Note that a key has no effect here, and why."""
        self.unused.setdefault(why, []).append(key)

    def take(self, key: str, name: str) -> None:
        """Note a key of the file that means offmate's key `name`."""
        self.taken.setdefault(name, []).append(key)

    def refuse_quantized(self, key: str, text: str) -> None:
        """Note one mistake for all keys that ask for a quantized base."""
        if not self._quantized:
            self.refuse(key, text)
        self._quantized = True

    def read_as_table(self, key: str, value: object) -> None:
        """Read a key by its meaning alone."""
        meaning = self.meaning(key)
        assert meaning is not None
        if meaning.kind == "honoured":
            self.take(key, meaning.text)
        elif value in SWITCHED_OFF or value in meaning.fine or value == ["none"]:
            pass
        elif meaning.kind == "not there" and meaning.text == QUANTIZED:
            self.refuse_quantized(key, f"{QUANTIZED} is not supported yet; give one of them instead")
        elif meaning.kind == "not there":
            what, _, instead = meaning.text.partition("; ")
            other = "a file for it cannot be run here" if what in _OTHER_TRAINING else "leave this key out"
            self.refuse(key, f"{what} is not supported yet; {instead or other}", alone=meaning.text in _ALONE)
        elif meaning.kind != "part":
            self.leave(key, meaning.text)
        elif self.file.get(meaning.text) in SWITCHED_OFF:
            self.leave(key, f"it has no effect without {meaning.text}")

    def read_beside(self, key: str, value: object, whole: str) -> None:
        """Read a key that asks for nothing without the key `whole`."""
        if self.file.get(whole) in SWITCHED_OFF and value not in SWITCHED_OFF:
            self.leave(key, f"it has no effect without {whole}")
        else:
            self.read_as_table(key, value)


Reader = Callable[[Reading, str, Any], None]
"""Reads one key, given its value, where its meaning in the table is not all."""
Translation = Callable[[Any, File], object]
"""A key's value in the form of offmate's key, None where it asks for nothing. It gets the file's other keys, too."""
Check = Callable[[str, Any, Source], list[Mistake]]
"""The mistakes of one key's value, given the key and the file."""
Join = Callable[[File], File | None]
"""Combines the values of several keys of a file that mean one key of offmate's; None where these keys are not its
own. Keys that disagree stay beside each other."""


class Tool:
    """A tool and its job files: another tool, or offmate itself (`planner.importers.transformers.OWN`).

    `name`: as people write it; `keys`: all that it documents; `defaults`: offmate's keys and their values where a file
    has none and the tool's default is another; `lora_defaults`: further ones where new adapters are made.
    `takes_learned`: keys beside the entries may say which turns are learned. `chooses_loss`: the key without which its
    files learn nothing from preferences; "" where other keys than one may show that. The mappings below it have a
    file's keys: `readers` for keys that need more than the table, `translations`, `checks`, `switches` for keys that
    must be true or false, `dtypes` for keys that name the dtype in which weights are trained and written (value as text
    -> dtype).
    The keys in `reported` are silent where their condition holds: another key's mistake covers them.
    """

    name: ClassVar[str] = ""
    keys: ClassVar[Table] = {}
    defaults: ClassVar[Mapping[str, Any]] = {}
    lora_defaults: ClassVar[Mapping[str, Any]] = {}
    readers: ClassVar[Mapping[str, Reader]] = {}
    translations: ClassVar[Mapping[str, Translation]] = {}
    checks: ClassVar[Mapping[str, Check]] = {}
    joins: ClassVar[tuple[Join, ...]] = ()
    switches: ClassVar[tuple[str, ...]] = ()
    takes_learned: ClassVar[bool] = True
    chooses_loss: ClassVar[str] = ""
    dtypes: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    reported: ClassVar[Mapping[str, Callable[[File], bool]]] = {}

    def shows(self, keys: Collection[str]) -> bool:
        """Whether a file with these keys is for this tool."""
        return False

    def loss(self, file: File) -> str | None:
        """The value of `preference` that a file asks for, by that key or by the tool's own keys; None for a file that
        asks for none, or for one that is not there."""
        own = file.get("preference")
        return own if isinstance(own, str) and own in PREFERENCES else None

    def missing(self, values: Mapping[str, Any]) -> list[str]:
        """Keys, by offmate's names, that the tool requires and `values` lack."""
        return []

    def chooses_best(self, file: File) -> bool:
        """Whether the tool keeps the best evaluated model where the file does not say so."""
        return False

    def absent(self, values: dict[str, Any], file: File) -> dict[str, Any]:
        """Returns the tool's defaults for a file, by offmate's names. `values`: the file's values by offmate's names; a
        tool may change them here, where one key changes what another means."""
        return dict(self.defaults)

    def differences(self, values: dict[str, Any], filled: Collection[str], file: File) -> Iterator[str]:
        """Yields notes for the user on how training here differs from the tool's. `values`: the job's values by
        offmate's names, defaults included; a value that the tool would replace there is replaced here, too. `filled`:
        the keys whose values are defaults."""
        yield from ()

    def settle_data(
        self, values: dict[str, Any], names: Mapping[str, str], source: Source, folder: Path
    ) -> list[Mistake]:
        """Rewrites the entries of `dataset` and `eval_dataset` in `values` as the tool reads them. Returns mistakes.
        `names`: offmate's key -> its name in the file. Relative paths start at `folder`."""
        return []


def makes_adapters(values: Mapping[str, Any]) -> bool:
    """Whether new adapters are made: an existing adapter has its own rank and other keys."""
    return values.get("method") == "lora" and values.get("adapter_name_or_path") in SWITCHED_OFF


def method_of(value: object) -> object:
    """A method's name in offmate's words: adapters on a base in 4 bits are `lora` beside `load_in_4bit`."""
    return "lora" if value == "qlora" else value
