"""Finds what a job's `model`, `tokenizer`, `dataset` and `chat_template` name: local files, whose paths are made
absolute, or ids on the Hugging Face hub.

Each function takes the value as it is written, and the folder where relative paths start. The folder is None for values
from `resolved.yaml`, in which a path is absolute, a template is its text, and all else is an id. A function raises
FileNotFoundError where a path does not exist, ValueError where it exists but cannot be used, and TypeError where the
value cannot be a path at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.data.entry import DataEntry, simplest
from planner.data.paths import NOTHING, data_finder, path_or_id, resolve
from planner.importers.axolotl_data import read_entry
from planner.importers.llama_factory_templates import PREFIX, slot_template
from planner.importers.templates import NAMES, named_template
from planner.keys.adapter import local_adapter
from planner.keys.source import MOST_CHARACTERS, Mistake, Source, shown

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)


def folders(value: object, folder: Path | None) -> tuple[str, ...]:
    """Return one path or a list of paths as absolute paths, which need not exist. Raises ValueError where two are the
    same folder."""
    paths = tuple(resolve(text, folder) for text in (value if isinstance(value, (list, tuple)) else [value]))
    seen: dict[str, str] = {}
    for path in paths if folder is not None else ():
        if (real := os.path.realpath(path)) in seen:
            raise ValueError(f"{path} is there twice{'' if seen[real] == path else f', as {seen[real]}'}")
        seen[real] = path
    return paths


def local_model(text: object, folder: Path | None) -> str:
    """Return the absolute path of a model folder, which must have a config.json, or a hub id unchanged. Raises
    FileNotFoundError, TypeError."""
    path = path_or_id(text, folder, "model folder")
    if isinstance(path, Path) and not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} has no config.json; a model is a folder in Hugging Face's layout")
    return str(path)


def local_config(text: object, folder: Path | None) -> str:
    """Return the absolute path of a folder with config.json or of a config file under another name, or a hub id
    unchanged. This is enough to plan a job, but not to train. Raises FileNotFoundError, TypeError."""
    path = path_or_id(text, folder, "model config")
    if not isinstance(path, Path) or (path.is_file() and path.name != "config.json"):
        return str(path)
    return local_model(str(path.parent if path.is_file() else path), folder)


def local_tokenizer(text: object, folder: Path | None) -> str:
    """Return the absolute path of a folder with a tokenizer's files, or a hub id unchanged. Raises FileNotFoundError,
    TypeError."""
    path = path_or_id(text, folder, "tokenizer folder")
    if isinstance(path, Path) and not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise FileNotFoundError(f"{path} has no tokenizer files ({', '.join(_TOKENIZER_FILES[:3])} …)")
    return str(path)


def local_dataset(value: object, folder: Path | None) -> tuple[str | DataEntry, ...]:
    """Return the datasets that a job's `dataset` names: one value or a list, each a file, a folder, a hub id, or a
    mapping that says how to read one (`planner.importers.axolotl_data`). Raises ValueError, FileNotFoundError,
    TypeError."""
    entries = value if isinstance(value, (list, tuple)) else [value]
    if not entries:
        raise ValueError("the list is empty")
    if folder is None:  # from resolved.yaml
        read = [simplest(entry) if isinstance(entry, dict) else str(entry) for entry in entries]
        for entry in read:
            data_finder(folder)(entry.path if isinstance(entry, DataEntry) else entry)
        return tuple(read)
    return tuple(named for entry in entries for named in read_entry(entry, data_finder(folder)))


def local_file_or_template(text: object, folder: Path | None) -> str:
    """Return the text of the Jinja template that a job's `chat_template` names: a file's path, a template's name, or
    the text itself. The name of a LLaMA-Factory template is returned unchanged. Raises FileNotFoundError, ValueError,
    TypeError."""
    if not isinstance(text, str):
        raise TypeError(f"it is {shown(text)}; it must be a path to a Jinja template, or its text")
    if folder is None or "{{" in text or "{%" in text or slot_template(text) is not None:
        return text
    path = Path(resolve(text, folder))
    if not path.exists() and (known := named_template(text)) is not None:
        return known
    if path.is_dir():  # TRL would take the tokens of the tokenizer in it, too
        raise FileNotFoundError(f"{path} is a folder; give the template's file, such as chat_template.jinja in it")
    if not path.is_file():
        known = f"(known: {', '.join(NAMES)}; LLaMA-Factory's are {PREFIX}NAME)"
        names = "" if "/" in text or "." in text else f", nor a template of that name {known}"
        raise FileNotFoundError(
            f"there is no template file at {path}{names}; leave the key out to use the tokenizer's own"
        )
    with path.open(encoding="utf-8", errors="replace") as file:
        template = file.read(MOST_CHARACTERS + 1)
    if len(template) > MOST_CHARACTERS:
        raise ValueError(f"{path} is too long for a template: it has more than {MOST_CHARACTERS:,} characters")
    if "{{" not in template and "{%" not in template:
        raise ValueError(f"{path} is not a Jinja template: it has no {{{{ }}}} and no {{% %}}")
    return template


_PATH_CODES = {OSError: "missing-file", TypeError: "wrong-type", ValueError: "bad-value"}
_FINDERS: dict[str, Callable[[object, Path | None], object]] = {
    "model": local_model,
    "ref_model": local_model,
    "tokenizer": local_tokenizer,
    "dataset": local_dataset,
    "eval_dataset": local_dataset,
    "chat_template": local_file_or_template,
    "output_dir": resolve,
    "adapter_name_or_path": local_adapter,
    "disk_paths": folders,
}
_PLANNED: dict[str, Callable[[object, Path | None], object]] = {
    "model": local_config,
    "adapter_name_or_path": local_adapter,
    "disk_paths": folders,
}


def _wrong_entries(
    find: Callable[[object, Path | None], object], value: object, folder: Path | None
) -> Iterator[tuple[int, Exception]]:
    """Yield those entries of a list that are wrong by themselves: place in the list, from 0, and error."""
    for place, entry in enumerate(value if isinstance(value, list) else ()):
        try:
            find([entry], folder)
        except (OSError, TypeError, ValueError) as error:
            yield place, error


def resolve_paths(
    values: dict[str, Any], folder: Path | None, source: Source, name_of: Callable[[str], str], *, only_planned: bool
) -> list[Mistake]:
    """Make the paths in `values` (canonical key -> value) absolute, in place, and return mistakes for files that are
    missing or cannot be used. `name_of`: gives the name that the file uses for a canonical key. `only_planned`: the job
    is for planning only, so the model's config is enough."""
    mistakes: list[Mistake] = []
    for key, find in (_PLANNED if only_planned else _FINDERS).items():
        if key == "tokenizer" and values.get(key) is None:  # the model's is used; a mistake there is reported once
            values.pop(key, None)
            if values.get("model") is not None and not mistakes:
                values[key] = values["model"]
        if values.get(key) is None:
            continue
        try:
            values[key] = find(values[key], folder)
        except (OSError, TypeError, ValueError) as error:
            wrong_entries: list[tuple[int | None, Exception]] = [*_wrong_entries(find, values[key], folder)]
            for entry, wrong in wrong_entries or [(None, error)]:
                code = next(code for kind, code in _PATH_CODES.items() if isinstance(wrong, kind))
                mistake = source.mistake(name_of(key), code, str(wrong))
                if mistake.line is not None and entry is not None:
                    mistake = replace(mistake, line=source.lines.get(f"{name_of(key)}[{entry}]", mistake.line))
                mistakes.append(mistake)
    for key in ("model", "tokenizer") if folder is not None else ():
        revision, place = values.get(f"{key}_revision"), str(values.get(key, ""))
        if revision not in (None, "main") and Path(place).is_absolute():
            text = f"it is of a {key} on the hub, and {place} is a folder; leave this key out"
            mistakes.append(source.mistake(name_of(f"{key}_revision"), "bad-value", text))
    if only_planned:
        values |= {"tokenizer": NOTHING, "dataset": (NOTHING,)}
    return mistakes
