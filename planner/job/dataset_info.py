"""LLaMA-Factory's datasets: names that the `dataset_info.json` in its `dataset_dir` describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planner.job.data_entry import DataEntry, simplest
from planner.job.dataset_words import Finder
from planner.job.local_data import KINDS
from planner.job.records import VALUES
from planner.job.source import shown

_INSTRUCTIONS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "system": "system",
    "history": "history",
    "tools": "tools",
}
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


class OtherData(ValueError):
    """Data for another kind of training: preferences, or pictures, videos and sounds."""


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
    found: list[str | DataEntry] = []
    for name in names:
        said = known.get(name) if isinstance(known, dict) and isinstance(name, str) else None
        if not isinstance(said, dict):
            found.append(_unnamed(name, file, find))
            continue
        found.append(_entry(name, said, file.parent, pretraining, find))
    return found


def _unnamed(name: object, file: Path, find: Finder) -> str:
    """A path or a hub id among the names."""
    if isinstance(name, str) and "/" not in name and Path(name).suffix.lower() not in KINDS:
        raise FileNotFoundError(f"{name} is not in {file}; give its file or its hub id")
    return find(name)


def _entry(name: str, said: dict[str, Any], folder: Path, pretraining: bool, find: Finder) -> str | DataEntry:
    columns = said.get("columns") or {}
    if said.get("ranking") or "kto_tag" in columns:
        raise OtherData(f"{name} is data of preferences; offmate trains on texts and conversations")
    if pictures := [column for column in _PICTURES if column in columns]:
        raise OtherData(f"{name} has {pictures[0]}; offmate trains on texts and conversations")
    fields: dict[str, Any] = {"path": _path(name, said, folder, find)}
    fields |= {ours: said[key] for key, ours in (("subset", "name"), ("split", "split")) if said.get(key)}
    if (inside := said.get("folder")) and said.get("hf_hub_url"):
        if not isinstance(inside, str):
            raise ValueError(f"{name} has folder: {shown(inside)}; it must be a folder's name")
        here = fields["path"].startswith("/")
        fields |= {"path": find(f"{fields['path']}/{inside}")} if here else {"data_dir": inside}
    if said.get("num_samples"):
        raise ValueError(f"{name} has num_samples, a drawn part of it; give split, like train[:1000], there")
    formatting = said.get("formatting", "alpaca")
    fields["formatting"] = formatting
    if pretraining:
        fields |= {"type": "text", "columns": {"text": _pretraining_column(name, formatting, columns)}}
    elif formatting == "alpaca":
        theirs = {ours: columns[key] for key, ours in _INSTRUCTIONS.items() if key in columns}
        # A column that is not named is not used, even where the data have it. Where none is named at all,
        # LLaMA-Factory uses instruction, input and output.
        theirs = dict.fromkeys(("system", "history", "tools", *(("input",) if columns else ())), "") | theirs
        fields |= {"type": "instructions", "columns": theirs}
    elif formatting in ("sharegpt", "openai"):
        tags = said.get("tags") or (_SHAREGPT if formatting == "sharegpt" else _OPENAI)  # tags replace all defaults
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
    else:
        raise ValueError(f"{name} has the formatting {shown(formatting)}; known are alpaca, sharegpt and openai")
    for key in ("columns", "message_keys"):
        same = ("system",) if key == "columns" else ()
        fields[key] = {one: other for one, other in fields.get(key, {}).items() if one != other or one in same}
    return simplest(fields)


def _pretraining_column(name: str, formatting: str, columns: dict[str, Any]) -> str:
    """The column whose texts are learned. Raises ValueError where LLaMA-Factory would join several columns."""
    if formatting != "alpaca" or not columns.get("prompt"):
        raise ValueError(f"{name} is for stage: pt, and says no column of texts; give columns: {{prompt: text}} there")
    if more := [key for key in ("query", "history") if columns.get(key)]:
        raise ValueError(f"{name} has {more[0]} beside prompt; under stage: pt one column is learned here")
    return str(columns["prompt"])


def _path(name: str, said: dict[str, Any], folder: Path, find: Finder) -> str:
    if said.get("hf_hub_url"):
        return str(said["hf_hub_url"])
    if not said.get("file_name"):
        raise ValueError(f"{name} has neither file_name nor hf_hub_url, and offmate reads no other place")
    path = folder / str(said["file_name"])
    if path.suffix.lower() not in KINDS and not path.is_dir():
        raise ValueError(f"{name} is {path}, and that is none of {', '.join(KINDS)}")
    return find(str(path))
