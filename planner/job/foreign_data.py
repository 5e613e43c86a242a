"""What other tools' files say of their data in keys outside the entries: LLaMA-Factory's named datasets, TRL's split
and column, which turns are learned, and the chat templates of axolotl's entries, which become the job's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from planner.job.data_entry import DataEntry
from planner.job.dataset_info import OtherData, read_names
from planner.job.dataset_words import CONVERSATIONS, LEARNED_KEYS, TEMPLATE_KEYS
from planner.job.dialects import AXOLOTL, LLAMA_FACTORY, TRL
from planner.job.paths import data_finder, looks_local, resolve
from planner.job.records import VALUES
from planner.job.source import SWITCHED_OFF, Mistake, Source, shown
from planner.keys.meaning import LEARNED

_DATA = ("dataset", "eval_dataset")
_TRLS = {"dataset_config": "name", "dataset_train_split": "split", "dataset_text_field": "field"}
"""TRL's keys about its one dataset -> those of an entry."""

_CODES = {OSError: "missing-file", TypeError: "wrong-type", ValueError: "bad-value"}


def settle_data(
    values: dict[str, Any], names: dict[str, str], source: Source, tool: str | None, folder: Path
) -> list[Mistake]:
    """Put what the file says of its data into the entries of `values`. `names`: canonical name -> the name in the file.
    Returns mistakes."""
    for key in _DATA:  # a mapping alone counts as a list with one entry, without its dash
        values |= {key: [values[key]]} if isinstance(values.get(key), dict) else {}
    mistakes = _templates(values, names, source)
    mistakes += _trls_dataset(values, source, tool, folder)
    mistakes += _learned(values, source, tool)
    if tool == LLAMA_FACTORY:
        for key in _DATA:
            try:
                if values.get(key) is not None:
                    found = _named(values[key], source, folder)
                    if source.values.get("stage") == "pt" and isinstance(found, list):
                        found = [_as_texts(entry) for entry in found]
                    values[key] = found
            except (OSError, TypeError, ValueError) as error:
                for wrong in [*_wrong_names(values.pop(key), source, folder)] or [error]:
                    code = next(code for kind, code in _CODES.items() if isinstance(wrong, kind))
                    mistakes.append(source.mistake(names[key], code, str(wrong)))
                    if isinstance(wrong, OtherData):  # its template is for that data, too
                        values.pop("chat_template", None)
    return mistakes


def _as_texts(entry: Any) -> Any:
    """An entry whose texts are learned as in LLaMA-Factory, where only a path was given."""
    return {"path": entry, "formatting": "alpaca"} if isinstance(entry, str) else entry


def _wrong_names(value: object, source: Source, folder: Path) -> Iterator[Exception]:
    """The errors of names that are wrong by themselves."""
    names = value.split(",") if isinstance(value, str) else value
    for name in names if isinstance(names, list) else ():
        try:
            _named([name.strip() if isinstance(name, str) else name], source, folder)
        except (OSError, TypeError, ValueError) as error:
            yield error


def _named(value: object, source: Source, folder: Path) -> object:
    """The entries of LLaMA-Factory's dataset names, as its dataset_info.json describes them."""
    given = source.values.get("dataset_dir") or "data"
    places = [resolve(given, start) for start in (folder, *folder.parents)] if given != "ONLINE" else []
    place = _place(places)
    find, pretraining = data_finder(folder), source.values.get("stage") == "pt"
    found = read_names(value, place, pretraining=pretraining, find=find) if place else None
    if found is not None:
        return found
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if isinstance(names, list) and place:
        for name in names:
            if isinstance(name, str) and re.fullmatch(r"[\w.-]+", name) and not looks_local(name, folder):
                above = f", nor in {given} of a folder above" if len(set(places)) > 1 else ""
                raise FileNotFoundError(
                    f"there is no dataset_info.json in {place}{above}, to say what {name} is; give the folder "
                    f"that has one (dataset_dir: /path/of/it), or in place of {name} its file or its hub id"
                )
    return names


def _place(places: Sequence[str]) -> str:
    """The `dataset_dir`: the one beside the file, else one above it, as LLaMA-Factory's own files lie in subfolders and
    are run from above. "" without places."""
    found = (place for place in places if (Path(place) / "dataset_info.json").is_file())
    return next(found, places[0] if places else "")


def _trls_dataset(values: dict[str, Any], source: Source, tool: str | None, folder: Path) -> list[Mistake]:
    said = {ours: source.values[key] for key, ours in _TRLS.items() if source.values.get(key) not in SWITCHED_OFF}
    said = {key: value for key, value in said.items() if (key, value) not in (("split", "train"), ("field", "text"))}
    path = values.get("dataset")
    if not isinstance(path, str):
        keys = [key for key, ours in _TRLS.items() if ours in said]
        return [source.mistake(key, "bad-value", "it is for one dataset; say it in the entries") for key in keys]
    if tool == TRL:  # TRL does not learn from instructions
        said["columns"] = {"instruction": ""}
    if said:
        values["dataset"] = [{"path": path, **said}]
    evaluated = values.get("eval_strategy") not in SWITCHED_OFF and not {"eval_dataset", "val_size"} & values.keys()
    if tool == TRL and evaluated and not looks_local(path, folder):
        split = source.values.get("dataset_test_split") or "test"
        values["eval_dataset"] = [{"path": path, **said, "split": split}]
    return []


def _learned(values: dict[str, Any], source: Source, tool: str | None) -> list[Mistake]:
    """Put into the entries which turns are learned, and with which end marks (`eot_tokens`), where the file says it for
    all its conversations. Entries of axolotl also get its defaults. Returns mistakes."""
    said = {key: source.values[key] for key in LEARNED_KEYS if source.values.get(key) is not None}
    marks = source.values.get("eot_tokens")
    if said and tool == LLAMA_FACTORY:
        return [source.mistake(key, "not-there", f"{LEARNED} is not there yet; leave this key out") for key in said]
    entries = values.get("dataset")
    if said and isinstance(entries, list) and entries and not any(map(_of_turns, entries)):
        text = "it is for conversations, and by their type no entry of dataset has any; leave it out"
        return [source.mistake(key, "bad-value", text) for key in said]
    said |= {} if marks in SWITCHED_OFF else {"eot_tokens": marks}
    for key in _DATA if said or tool == AXOLOTL else ():
        given = values.get(key)
        if isinstance(given, (str, list)):
            entries = given if isinstance(given, list) else [given]
            read = [_with_learned(entry, said) for entry in entries]
            values[key] = [_as_axolotl(entry) for entry in read] if tool == AXOLOTL else read
    return []


def _with_learned(entry: Any, said: dict[str, Any]) -> Any:
    if not said or not isinstance(entry, (str, dict)) or not _of_turns(entry):
        return entry  # its reader reports what is wrong
    return {**said, **({"path": entry} if isinstance(entry, str) else entry)}


def _as_axolotl(entry: Any) -> Any:
    """An entry of conversations as axolotl reads it: the assistant's turns are learned by its rules, the column system
    begins a conversation, and a turn's own word on whether it is learned counts only where the entry names that key."""
    if not isinstance(entry, dict) or entry.get("type") is None or not _of_turns(entry):
        return entry
    dropped = any(entry.get(key) not in SWITCHED_OFF for key in ("drop_system_message", "drop_system"))
    columns = {VALUES: "", **({} if dropped else {"system": "system"})}
    said = {"columns": columns, "message_keys": {"train": "", "weight": ""}}
    for key, names in said.items():
        given = entry.get(key) or {}
        said[key] = {**names, **given} if isinstance(given, dict) else given  # its reader reports a wrong one
    roles = {} if entry.get("roles_to_train") is not None else {"roles_to_train": ["assistant"]}
    return {**said, **{key: value for key, value in entry.items() if key not in said}, **roles}


def _of_turns(entry: Any) -> bool:
    """Whether an entry may have conversations, by its type."""
    kind = entry.get("type") if isinstance(entry, dict) else None
    return kind is None or str(kind).removesuffix(".default") in CONVERSATIONS


def _templates(values: dict[str, Any], names: dict[str, str], source: Source) -> list[Mistake]:
    """Make the chat template that the entries name the job's, which has one for all of them. Returns mistakes."""
    entries = values.get("dataset")
    found: dict[str, str] = {}
    for entry in entries if isinstance(entries, list) else ():
        said = {key: entry[key] for key in TEMPLATE_KEYS if entry.get(key)} if isinstance(entry, dict) else {}
        template = said.get("chat_template_jinja") or said.get("chat_template") or said.get("conversation")
        if template is not None and not isinstance(entry, DataEntry):
            found[str(template)] = names["dataset"]
    own = values.get("chat_template")
    found = {name: key for name, key in found.items() if name not in ("tokenizer_default", own)}
    if not found:
        return []
    if len(found) > 1 or own is not None:
        text = f"its entries have several chat templates: {', '.join(map(shown, [*found, *([own] if own else [])]))}"
        return [source.mistake(names["dataset"], "not-there", text)]
    values["chat_template"] = next(iter(found))
    return []
