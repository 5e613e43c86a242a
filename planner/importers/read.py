"""Translates the keys of a job file, of offmate or of another tool, into values under offmate's names.

`planner.importers.tools` lists the tools, each of which has a file of its own. This module applies what that file says:
which keys are taken, which have no effect and why, which are refused, and which defaults the tool has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from planner.data.entry import DataEntry
from planner.importers.axolotl import AXOLOTL, settle_evaluations
from planner.importers.axolotl_data import DATA, TEXTS, settle_learned, settle_templates
from planner.importers.axolotl_pairs import settle_pairs
from planner.importers.base import REPORTS, Check, File, Join, Reader, Reading, Tool, Translation
from planner.importers.tools import ANY, PARTS, SHORT, TOOLS, meaning_of, tool_of
from planner.importers.transformers import OWN, check_by_name, done_otherwise, without_padding
from planner.importers.trl import TRL, settle_dataset
from planner.keys.lora import BEGIN, DEFAULTS, MODULES, PARAMETERS, PLUS, PLUS_EMBEDDING, WHERE
from planner.keys.lsp import NONZEROS
from planner.keys.preference import REWARD
from planner.keys.source import MOST_MISTAKES, SWITCHED_OFF, Mistake, Source, shown, to_user_error
from planner.keys.trackers import reports
from planner.machine.this_machine import computes_bf16
from planner.units import counted

_ALL = (OWN, *TOOLS)
_READERS: dict[str, Reader] = {key: read for tool in _ALL for key, read in tool.readers.items()}
_TRANSLATIONS: dict[str, Translation] = {key: new for tool in _ALL for key, new in tool.translations.items()}
_CHECKS: dict[str, Check] = {key: check for tool in _ALL for key, check in tool.checks.items()}
_JOINS: tuple[Join, ...] = tuple(join for tool in _ALL for join in tool.joins)
_SWITCHES = frozenset(key for tool in _ALL for key in tool.switches)
_REPORTED: dict[str, Callable[[File], bool]] = {key: when for tool in _ALL for key, when in tool.reported.items()}
_DTYPES: dict[str, Mapping[str, str]] = {key: dtypes for tool in reversed(TOOLS) for key, dtypes in tool.dtypes.items()}
"""What the tools know of their keys, together: people mix tools' keys, and a file may show no tool."""


def canonical(source: Source, names: Mapping[str, str]) -> tuple[dict[str, Any], list[Mistake], tuple[str, ...]]:
    """Returns the file's values by offmate's names, the mistakes in its keys, and notes for the user on keys of other
    tools. `names`: every name that a key may have -> offmate's key. Raises UserError for a file that asks for another
    kind of training, such as DPO, or that is no job file."""
    tool = tool_of(source.values)
    reading = Reading(source, tool, partial(meaning_of, tool=tool, names=names))
    for key, value in source.values.items():
        _read(reading, key, value, names)
    values: dict[str, Any] = {}
    named: dict[str, str] = {}
    _settle_reports(reading, reading.taken.pop("report_to", []), values, named)
    for name, keys in reading.taken.items():
        _settle(name, keys, reading, values, named)
    mistakes = reading.mistakes
    notes = _fill(tool, values, source.values)
    _settle_adapters(reading, values, named)
    settle_evaluations(reading, values, named)
    if not {"model", "dataset"} & reading.taken.keys() and len(reading.unknown) > len(source.values) / 2:
        text = f"it and {counted(len(reading.unknown) - 1, 'more key')} are unknown"
        text += ", and there is neither model nor dataset: this is not a job file"
        reading.alone = [source.mistake(reading.unknown[0], "unknown-key", text)]
    if reading.alone:
        raise to_user_error(reading.alone[:1], source.name)
    if not mistakes:
        text = f"it is missing; {tool.name} has no default for it"
        mistakes = [source.mistake(key, "missing-key", text) for key in tool.missing(values)]
    if values.get("bf16") == "auto":
        values["bf16"] = computes_bf16() is not False
    dtype_note = _settle_written(values, source.values)
    left_out = (f"not used: {', '.join(keys)} ({why})" for why, keys in reading.unused.items())
    return values, mistakes, (*_renamed(named), *notes, *dtype_note, *left_out)


def settle_data(
    values: dict[str, Any], names: Mapping[str, str], source: Source, tool: Tool, folder: Path
) -> list[Mistake]:
    """Moves what the file says of its data in keys of its own, such as `dataset_config`, into the entries of `dataset`
    and `eval_dataset` in `values`. Returns mistakes. `names`: offmate's key -> its name in the file."""
    for key in DATA:  # a mapping alone counts as a list with one entry, without its dash
        values |= {key: [values[key]]} if isinstance(values.get(key), dict) else {}
    mistakes = settle_templates(values, names, source)
    mistakes += settle_dataset(values, source, folder, for_trl=tool is TRL)
    mistakes += settle_pairs(values, names, source)
    return (
        mistakes
        + settle_learned(values, source, taken=tool.takes_learned)
        + tool.settle_data(values, names, source, folder)
    )


def _translated(key: str, value: object, file: File) -> object:
    """The value of a file's key in the form of offmate's key; None where it asks for nothing."""
    return _TRANSLATIONS[key](value, file) if key in _TRANSLATIONS else value


def _read(reading: Reading, key: str, value: object, names: Mapping[str, str]) -> None:
    """Read one key: as its own function does, or as its meaning says."""
    meaning = reading.meaning(key)
    if meaning is None and value is None and reading.tool is not OWN:
        reading.leave(key, "nobody knows it, and it asks for nothing")
    elif meaning is None:
        reading.unknown.append(key)
        if reading.tool is OWN and key in DataEntry.model_fields:
            text = f"unknown key; {key} belongs in an entry of dataset"
            reading.mistakes.append(reading.source.mistake(key, "unknown-key", text))
            return
        # Finding a similar key takes a millisecond, and only the first mistakes are reported.
        known = {*names, *ANY} if len(reading.mistakes) < MOST_MISTAKES else ()
        reading.mistakes.append(reading.source.unknown(key, known, SHORT.get(key)))
    elif key in _READERS:
        _READERS[key](reading, key, value)
    elif key not in PARTS and not (key in _REPORTED and meaning.kind != "honoured" and _REPORTED[key](reading.file)):
        reading.read_as_table(key, value)


def _check(key: str, name: str, value: object, source: Source) -> list[Mistake]:
    """Mistakes in a value whose meaning depends on the name of its key in the file, or that is known by name."""
    if key in _SWITCHES and (value is not None or key == "enable_thinking") and not isinstance(value, bool):
        return [source.mistake(key, "wrong-type", f"it is {shown(value)}; it must be true or false")]
    wrong = _CHECKS[key](key, value, source) if key in _CHECKS else []
    return wrong or check_by_name(key, name, value, source)


def _joined(values: File, file: File) -> File:
    """Reduces the file's keys that mean one key of offmate's, `values`: to one key where they agree, else to those that
    disagree. Keys that ask for nothing are dropped, and some pairs are combined into one value (`_JOINS`)."""
    for join in _JOINS:
        if (joined := join(values)) is not None:
            return joined
    asking = {key: value for key, value in values.items() if value not in SWITCHED_OFF}
    apart: dict[str, object] = {}
    for key, value in (asking or dict([next(iter(values.items()))])).items():
        new = _translated(key, value, file)
        if new is not None and new not in [_translated(*item, file) for item in apart.items()]:
            apart[key] = value
    saying = {key: value for key, value in values.items() if _translated(key, value, file) is not None}
    return apart or dict([next(iter((saying or values).items()))])


def _settle(name: str, keys: list[str], reading: Reading, values: dict[str, Any], named: dict[str, str]) -> None:
    """Settle the value of one of offmate's keys from the file's keys that mean it. Keys that ask for nothing give
    way."""
    source, file = reading.source, reading.file
    by_key = {key: file[key] for key in keys}
    wrong = [mistake for key in keys for mistake in _check(key, name, by_key[key], source)]
    reading.mistakes += wrong
    if wrong:
        named[name] = wrong[0].key
        values[name] = _translated(TEXTS, by_key[TEXTS], file) if keys[0] == TEXTS else by_key[keys[0]]
        return
    joined = _joined(by_key, file) if len(by_key) > 1 else by_key
    if len(joined) > 1:
        first, other = list(joined)[:2]
        text = f"{first} is given too, and both mean {name}; keep one"
        reading.mistakes.append(source.mistake(other, "two-names", text))
    key, value = next(iter(joined.items()))
    new = _translated(key, value, file)
    pads = name == "special_tokens" and reading.tool.loss(file) == REWARD
    new = without_padding(new) if name == "special_tokens" and not pads else new
    nothing = value == "" or (value is None and (reading.tool is AXOLOTL or new is None))
    ignored = reading.tool is not OWN and key not in ("adapter", NONZEROS) and nothing
    if ignored or (name == "eval_dataset" and value in SWITCHED_OFF):
        return  # as if it were not in the file
    if not pads and (why := done_otherwise(key, name, value)):
        reading.leave("pad_token" if name == "special_tokens" else f"{key}: {value}", why)
    if new is None and value is not None and key != "chat_template":
        return
    named[name], values[name] = key, new


def _fill(tool: Tool, values: dict[str, Any], file: File) -> tuple[str, ...]:
    """Put the tool's defaults into `values` where the file has none. Returns notes for the user: one on the defaults,
    one on other differences from the tool."""
    if tool is OWN:
        return ()
    absent = tool.absent(values, file)
    if tool.chooses_best(file):
        absent["load_best_model_at_end"] = True
    if values.get("label_smoothing_factor") not in SWITCHED_OFF:  # TRL's smoothed loss, too, is of the logits alone
        absent.pop("router_aux_loss_coef", None)
    if values.get("train_batch_size") is not None:
        absent.pop("per_device_train_batch_size", None)
    filled = {key: value for key, value in absent.items() if values.get(key) is None}
    values |= filled
    differences = [*tool.differences(values, filled, file)]
    if values.get("add_tokens"):
        differences.append(
            "tokens of add_tokens that the tokenizer lacks get embedding rows drawn around the mean of the others"
        )
    if values.get("eval_strategy") in ("no", False) and values.get("val_size") not in SWITCHED_OFF:
        differences.append(f"nothing is evaluated, so the rows of val_size are trained on; {tool.name} leaves them out")
    words = ", ".join(f"{key} {value}" for key, value in filled.items())
    defaults = f"the file reads as {tool.name}'s; its defaults for keys that are not given: {words}" if filled else ""
    apart = "; ".join(filter(None, differences))
    return tuple(filter(None, (defaults, f"in this file of {tool.name}'s: {apart}" if apart else "")))


def _settle_written(values: dict[str, Any], file: File) -> tuple[str, ...]:
    """Put into `values` the `save_dtype` that the file asks for by other tools' keys for the dtype of weights: those
    tools train the weights in that dtype, and write them in it. Returns notes for the user."""
    key_dtypes = [(key, dtype) for key, dtypes in _DTYPES.items() if (dtype := dtypes.get(str(file.get(key))))]
    if not key_dtypes:
        return ()
    key, dtype = key_dtypes[0]
    key = "bf16: full" if key == "bf16" else key
    if values.get("method") == "lora":
        return (f"{key}: adapters, and masters and moments, stay fp32.",)
    if "save_dtype" in values:
        return (f"{key}: masters and moments stay fp32.",)
    values["save_dtype"] = dtype
    return (f"{key}: masters and moments stay fp32; save_dtype is {dtype}.",)


def _settle_adapters(reading: Reading, values: dict[str, Any], named: dict[str, str]) -> None:
    """Leave out the adapter keys of a tool's file that makes no adapters, as the tool does."""
    if reading.tool is OWN or values.get("method") == "lora":
        return
    for name in (*DEFAULTS, MODULES, PARAMETERS, *WHERE, BEGIN, PLUS, PLUS_EMBEDDING, "use_rslora", "use_dora"):
        key = named.pop(name, None)
        if key is not None and values.pop(name, None) not in SWITCHED_OFF:
            reading.leave(key, "it has no effect without method: lora")


def _settle_reports(reading: Reading, keys: list[str], values: dict[str, Any], named: dict[str, str]) -> None:
    wanted = reports(keys, reading.source)
    reading.mistakes += wanted.mistakes
    if keys or wanted.trackers:
        values["report_to"] = list(wanted.trackers)
    if keys:
        named["report_to"] = next((key for key in keys if key == "report_to"), keys[0])
    for key in wanted.others:
        reading.leave(key, REPORTS)
    for name, settings in wanted.idle.items():
        for key in settings:
            reading.leave(key, f"it has no effect without report_to: {name}")


def _renamed(named: Mapping[str, str]) -> Iterator[str]:
    other = [f"{key} is {name}" for name, key in named.items() if key != name]
    if other:
        yield f"in offmate's names: {', '.join(other)}"
