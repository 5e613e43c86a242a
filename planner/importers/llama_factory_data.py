"""Finds the datasets that a LLaMA-Factory file names, which `dataset_info.json` in its `dataset_dir` describes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.data.entry import DataEntry, simplest
from planner.data.local_data import KINDS
from planner.data.paths import data_finder, looks_local, resolve
from planner.importers.axolotl_data import DATA, Finder
from planner.keys.fields import VALUES
from planner.keys.source import Mistake, Source, shown

_INSTRUCTIONS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "system": "system",
    "history": "history",
    "tools": "tools",
}
_ANSWERS = {"chosen": "chosen", "rejected": "rejected", "kto_tag": "label"}
"""LLaMA-Factory's names of columns of preferences -> offmate's."""
_PICTURES = ("images", "videos", "audios")
_TAGS = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function_call",
    "system_tag": "system",
}
_SHAREGPT = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}

_OPENAI = {"role_tag": "role", "content_tag": "content", **_TAGS}


_CODES = {OSError: "missing-file", TypeError: "wrong-type", ValueError: "bad-value"}


class OtherData(ValueError):
    """Data for another kind of training: pictures, videos and sounds."""


def read_names(value: object, folder: str, *, pretraining: bool, find: Finder) -> list[str | DataEntry] | None:
    """The entries for which a list of names, or names with commas between them, stand; None where there is no
    dataset_info.json. Raises ValueError for a dataset or a dataset_info.json that cannot be read, and
    FileNotFoundError."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    file = Path(folder) / "dataset_info.json"
    if not isinstance(names, list) or not file.is_file():
        return None
    try:
        known = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    entries: list[str | DataEntry] = []
    for name in names:
        info = known.get(name) if isinstance(known, dict) and isinstance(name, str) else None
        if not isinstance(info, dict):
            entries.append(_unnamed(name, file, find))
            continue
        entries.append(_entry(name, info, file.parent, pretraining, find))
    return entries


def _unnamed(name: object, file: Path, find: Finder) -> str:
    """A path or a hub id among the names."""
    if isinstance(name, str) and "/" not in name and Path(name).suffix.lower() not in KINDS:
        raise FileNotFoundError(f"{name} is not in {file}; give its file or its hub id")
    return find(name)


def _entry(name: str, info: dict[str, Any], folder: Path, pretraining: bool, find: Finder) -> str | DataEntry:
    columns = info.get("columns") or {}
    if pictures := [column for column in _PICTURES if column in columns]:
        raise OtherData(f"{name} has {pictures[0]}; offmate trains on texts and conversations")
    fields: dict[str, Any] = {"path": _path(name, info, folder, find)}
    fields |= {ours: info[key] for key, ours in (("subset", "name"), ("split", "split")) if info.get(key)}
    if (inside := info.get("folder")) and info.get("hf_hub_url"):
        if not isinstance(inside, str):
            raise ValueError(f"{name} has folder: {shown(inside)}; it must be a folder's name")
        here = Path(fields["path"]).is_absolute()
        fields |= {"path": find(f"{fields['path']}/{inside}")} if here else {"data_dir": inside}
    if info.get("num_samples"):
        raise ValueError(
            f"{name} has num_samples, which draws a part of it at random; give split, like train[:1000], in its place"
        )
    formatting = info.get("formatting", "alpaca")
    fields["formatting"] = formatting
    if pretraining and info.get("ranking"):
        raise ValueError(f"{name} has ranking: true, and stage: pt learns from texts; leave it out, or the dataset")
    if pretraining:
        fields |= {"type": "text", "columns": {"text": _pretraining_column(name, formatting, columns)}}
    elif formatting == "alpaca":
        theirs = {ours: columns[key] for key, ours in _INSTRUCTIONS.items() if key in columns}
        # A column that is not named is not used, even where the data have it. Where none is named at all,
        # LLaMA-Factory uses instruction, input and output.
        theirs = dict.fromkeys(("system", "history", "tools", *(("input",) if columns else ())), "") | theirs
        fields |= {"type": "instructions", "columns": theirs}
        answers = _answers(name, info, columns)
        if answers.get("type") == "preference":
            fields["columns"].pop("output", None)
        fields |= {**answers, "columns": fields["columns"] | answers["columns"]} if answers else {}
    elif formatting in ("sharegpt", "openai"):
        tags = info.get("tags") or (_SHAREGPT if formatting == "sharegpt" else _OPENAI)  # tags replace all defaults
        more = {key: columns.get(key) or "" for key in ("system", "tools")}
        fields |= {
            "type": "messages",
            "columns": {"messages": columns.get("messages", "conversations"), **more, VALUES: ""},
            "message_keys": {
                "role": tags.get("role_tag", "role"),
                "content": tags.get("content_tag", "content"),
                "train": "",
                "weight": "",
            },
            "roles": {tags[tag]: role for tag, role in _TAGS.items() if tags.get(tag)},
        }
        answers = _answers(name, info, columns)
        fields |= {**answers, "columns": fields["columns"] | answers["columns"]} if answers else {}
    else:
        raise ValueError(f"{name} has the formatting {shown(formatting)}; known are alpaca, sharegpt and openai")
    for key in ("columns", "message_keys"):
        same = ("system",) if key == "columns" else ()
        fields[key] = {one: other for one, other in fields.get(key, {}).items() if one != other or one in same}
    return simplest(fields)


def _answers(name: str, info: dict[str, Any], columns: dict[str, Any]) -> dict[str, Any]:
    """The type of data of preferences and the columns of answers and labels; {} for other data. Raises ValueError."""
    if not info.get("ranking"):
        label = columns.get("kto_tag")
        return {"type": "unpaired", "columns": {"label": label}} if label else {}
    theirs = {ours: columns[key] for key, ours in _ANSWERS.items() if columns.get(key)}
    if "label" in theirs:
        raise ValueError(f"{name} has ranking and a kto_tag; leave out the one that is not meant")
    if missing := [side for side in ("chosen", "rejected") if side not in theirs]:
        raise ValueError(f"{name} has ranking: true and names no column {missing[0]}; add it to its columns")
    return {"type": "preference", "columns": theirs}


def _pretraining_column(name: str, formatting: str, columns: dict[str, Any]) -> str:
    """The column whose texts are learned. Raises ValueError where LLaMA-Factory would join several columns."""
    if formatting != "alpaca" or not columns.get("prompt"):
        raise ValueError(
            f"{name} names no column of texts for stage: pt; give columns: {{prompt: text}} in dataset_info.json"
        )
    if more := [key for key in ("query", "history") if columns.get(key)]:
        raise ValueError(
            f"{name} has {more[0]} beside prompt; with stage: pt only one column is learned: leave {more[0]} out"
        )
    return str(columns["prompt"])


def _path(name: str, info: dict[str, Any], folder: Path, find: Finder) -> str:
    if info.get("hf_hub_url"):
        return str(info["hf_hub_url"])
    if not info.get("file_name"):
        raise ValueError(f"{name} has neither file_name nor hf_hub_url; offmate reads data from these two only")
    path = folder / str(info["file_name"])
    if path.suffix.lower() not in KINDS and not path.is_dir():
        raise ValueError(f"{name} is the file {path}; its name must end in one of {', '.join(KINDS)}")
    return find(str(path))


def settle_names(values: dict[str, Any], names: Mapping[str, str], source: Source, folder: Path) -> list[Mistake]:
    """Put the entries into `values` for which the file's names of datasets stand. Returns mistakes."""
    mistakes = []
    for key in DATA:
        try:
            if values.get(key) is not None:
                entries = _named(values[key], source, folder)
                if source.values.get("stage") == "pt" and isinstance(entries, list):
                    entries = [_as_texts(entry) for entry in entries]
                values[key] = entries
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
    dataset_dir = source.values.get("dataset_dir") or "data"
    places = [resolve(dataset_dir, start) for start in (folder, *folder.parents)] if dataset_dir != "ONLINE" else []
    place = _place(places)
    find, pretraining = data_finder(folder), source.values.get("stage") == "pt"
    entries = read_names(value, place, pretraining=pretraining, find=find) if place else None
    if entries is not None:
        return entries
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if isinstance(names, list) and place:
        for name in names:
            if isinstance(name, str) and re.fullmatch(r"[\w.-]+", name) and not looks_local(name, folder):
                above = f", nor in {dataset_dir} of a folder above" if len(set(places)) > 1 else ""
                raise FileNotFoundError(
                    f"there is no dataset_info.json in {place}{above}, to say what {name} is; give the folder "
                    f"that has one (dataset_dir: /path/of/it), or in place of {name} its file or its hub id"
                )
    return names


def _place(places: Sequence[str]) -> str:
    """The `dataset_dir`: the one beside the file, else one above it, as LLaMA-Factory's own files lie in subfolders and
    are run from above. "" without places."""
    described = (place for place in places if (Path(place) / "dataset_info.json").is_file())
    return next(described, places[0] if places else "")
