"""Settles a file's values under offmate's names: merges several keys that mean one, and adds its tool's defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from planner.job.dialects import AXOLOTL
from planner.job.evaluation import EVALUATED
from planner.job.fields import DEFAULT_EPOCHS
from planner.job.lora import BEGIN, DEFAULTS, MODULES, PARAMETERS, PLUS, PLUS_EMBEDDING, WHERE
from planner.job.precision import settle_written
from planner.job.pretraining import TEXTS, entries_of
from planner.job.reading import PER_EPOCH, Reading
from planner.job.source import SWITCHED_OFF, Mistake, Source, shown, to_user_error
from planner.job.trackers import reports
from planner.job.values import check_value, done_otherwise, merged, translated
from planner.keys.meaning import REPORTS
from planner.machine.memory import computes_bf16
from planner.units import counted


def canonical(source: Source, names: Mapping[str, str]) -> tuple[dict[str, Any], list[Mistake], tuple[str, ...]]:
    """The file's values under canonical names, the mistakes of its keys, and notes for the user on keys of other tools.
    `names`: every name a key may have -> its canonical name. Raises UserError for a file with another purpose."""
    reading = Reading(source, names)
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
    _settle_adapters(reading, values, given)
    _settle_evaluations(reading, values, given)
    if not {"model", "dataset"} & reading.found.keys() and len(reading.unknown) > len(source.values) / 2:
        text = f"it and {counted(len(reading.unknown) - 1, 'more key')} are unknown"
        text += ", and there is neither model nor dataset: this is no job"
        reading.alone = [source.mistake(reading.unknown[0], "unknown-key", text)]
    if reading.alone:
        raise to_user_error(reading.alone[:1], source.name)
    if not mistakes:
        text = f"it is missing; {dialect.tool} has no default for it"
        mistakes = [source.mistake(key, "missing-key", text) for key in dialect.missing(values)]
    if values.get("bf16") == "auto":
        values["bf16"] = computes_bf16() is not False
    told = settle_written(values, source.values)
    left_out = (f"not used: {', '.join(keys)} ({why})" for why, keys in reading.unused.items())
    return values, mistakes, (*_renamed(given), *defaults, *told, *left_out)


def _settle(name: str, keys: list[str], reading: Reading, values: dict[str, Any], given: dict[str, str]) -> None:
    """Settle the value of a canonical key from the file's keys that mean it. Keys that ask for nothing give way."""
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
    nothing = value == "" or (value is None and (tool == AXOLOTL or new is None))
    if (tool is not None and key != "adapter" and nothing) or (name == "eval_dataset" and value in SWITCHED_OFF):
        return  # as if it were not in the file
    if why := done_otherwise(key, name, value):
        reading.unused.setdefault(why, []).append("pad_token" if name == "special_tokens" else f"{key}: {value}")
    if new is None and value is not None and key != "chat_template":
        return
    given[name], values[name] = key, new


def _settle_pissa(reading: Reading, values: dict[str, Any], given: dict[str, str]) -> None:
    """LLaMA-Factory's PiSSA, which is approximate unless `pissa_iter` is -1."""
    if given.get("init_lora_weights") != "pissa_init" or values["init_lora_weights"] != "pissa":
        return
    count = reading.source.values.get("pissa_iter")
    count = 16 if count is None else count
    if isinstance(count, bool) or not isinstance(count, int) or not (count == -1 or 1 <= count <= 999):
        text = f"it is {shown(count)}; it must be a number of iterations, or -1 for an exact decomposition"
        reading.mistakes.append(reading.source.mistake("pissa_iter", "bad-value", text))
    elif count > 0:
        values["init_lora_weights"] = f"pissa_niter_{count}"


def _settle_adapters(reading: Reading, values: dict[str, Any], given: dict[str, str]) -> None:
    """Leave out the adapter keys of a tool's file that makes no adapters, as the tool does."""
    if reading.dialect.tool is None or values.get("method") == "lora":
        return
    for name in (*DEFAULTS, MODULES, PARAMETERS, *WHERE, BEGIN, PLUS, PLUS_EMBEDDING, "use_rslora", "use_dora"):
        key = given.pop(name, None)
        if key is not None and values.pop(name, None) not in SWITCHED_OFF:
            reading.unused.setdefault("it has no effect without method: lora", []).append(key)


def _settle_evaluations(reading: Reading, values: dict[str, Any], given: dict[str, str]) -> None:
    """Settle axolotl's evaluations per epoch, where there is something to evaluate on, as a share of all steps. It
    depends on `values`, with the defaults of the file's tool in them."""
    source, asked = reading.source, reading.source.values.get(PER_EPOCH)
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
        reading.unused.setdefault("there is nothing to evaluate on", []).append(PER_EPOCH)
    elif isinstance(epochs, (int, float)) and epochs > 0 and asked * epochs > 1:
        given["eval_steps"], values["eval_steps"] = PER_EPOCH, 1.0 / (asked * epochs)
    else:
        reading.unused.setdefault("an evaluation comes after each epoch", []).append(PER_EPOCH)
    if text is not None:
        reading.mistakes.append(source.mistake(PER_EPOCH, code, text))


def _settle_reports(reading: Reading, keys: list[str], values: dict[str, Any], given: dict[str, str]) -> None:
    found = reports(keys, reading.source)
    reading.mistakes += found.mistakes
    if keys or found.trackers:
        values["report_to"] = list(found.trackers)
    if keys:
        given["report_to"] = next((key for key in keys if key == "report_to"), keys[0])
    if found.others:
        reading.unused.setdefault(REPORTS, []).extend(found.others)
    for name, settings in found.idle.items():
        reading.unused.setdefault(f"it has no effect without report_to: {name}", []).extend(settings)


def _renamed(given: Mapping[str, str]) -> Iterator[str]:
    other = [f"{key} is {name}" for name, key in given.items() if key != name]
    if other:
        yield f"in offmate's names: {', '.join(other)}"
