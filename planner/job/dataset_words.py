"""Reads the entries of `dataset` as people write them: a path, or axolotl's mapping of what to read and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

from pydantic import ValidationError

from planner.job.data_entry import COLUMNS, DataEntry, EndMarks, Type, simplest
from planner.job.records import ROLES, VALUES, role_of
from planner.job.source import SWITCHED_OFF, shown

_ALPACA = (
    "Below is an instruction that describes a task{more}. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\n{{instruction}}\n\n"
)
ALPACA = {
    "with_input": _ALPACA.format(more=", paired with an input that provides further context")
    + "### Input:\n{input}\n\n### Response:\n",
    "without_input": _ALPACA.format(more="") + "### Response:\n",
}
"""The prompt format of the Alpaca data."""

_TYPES: dict[str, dict[str, Any]] = {
    "alpaca": {"type": "instructions", "prompt_format": ALPACA, "columns": {"system": "", "history": ""}},
    "completion": {"type": "text"},
    "pretrain": {"type": "text"},
    "chat_template": {"type": "messages"},
    "sharegpt": {"type": "messages", "columns": {"messages": "conversations"}},
    "input_output": {"type": "segments"},
    **{name: {"type": name} for name in ("text", "messages", "prompt", "instructions", "segments", "tokens")},
}
"""A type -> the fields of the entry that it sets; axolotl's types first, then offmate's own. A column set to "" is not
used, even where the data have it."""
DATASET_TYPES = tuple(_TYPES)
CONVERSATIONS = tuple(name for name, says in _TYPES.items() if says["type"] == "messages")

_UNUSED = ("ds_type", "preprocess_shards", "trust_remote_code")  # a file's suffix shows its type; no code is run
_NOT_THERE = {
    "shards": "a shard of the data; give split, like train[:5%]",
    "shards_idx": "a shard of the data; give split, like train[:5%]",
    "input_format": "another input format",
    "input_transform": "a transform of one's own",
    "message_field_training_detail": "learning pieces of a turn",
    "logprobs_field": "distillation",
    "temperature": "distillation",
    "field_human": "a conversation in two columns; give messages",
    "field_model": "a conversation in two columns; give messages",
    "fraction": "shares of a mixture; give split, like train[:10%]",
    "skip": "leaving out the first records; give split, like train[1000:]",
}
_FIELDS = {"field": "text", "text_column": "text", "field_messages": "messages", "field_tools": "tools"}
_MESSAGE_FIELDS = {"message_field_role": "role", "message_field_content": "content", "message_field_training": "train"}
LEARNED_KEYS = ("roles_to_train", "train_on_eos", "train_on_eot")
"""Keys of an entry that say which turns are learned, and with which end marks. `[]` and `none`, which switch off other
keys, are choices here: only turns that say so themselves are learned, and no end mark is."""
_FILE_READERS = ("json", "csv", "parquet", "arrow", "text")
TEMPLATE_KEYS = ("chat_template", "chat_template_jinja", "conversation")
"""Keys of an entry that say which chat template its conversations have."""

Finder = Callable[[object], str]


def read_entry(entry: object, find: Finder) -> list[str | DataEntry]:
    """The entries for which one element of the list stands; `find` makes a path absolute. Raises ValueError, TypeError
    and FileNotFoundError, with messages for people."""
    if isinstance(entry, DataEntry):
        return [entry]
    if not isinstance(entry, dict):
        return [find(entry)]
    if not isinstance(entry.get("path"), str):
        raise ValueError(f"an entry has a path, this one has {', '.join(map(str, entry))}")
    fields = _fields(entry)
    files, inside = fields.pop("data_files", ()), fields.pop("data_dir", None)
    if inside is not None:
        files = [f"{inside}/{file}" for file in files]
    try:
        if entry["path"] in _FILE_READERS and (files or inside is not None):
            return [simplest({**fields, "path": find(file)}) for file in files or [inside]]
        path = find(entry["path"])
        if inside is not None and not files:
            if path.startswith("/"):
                return [simplest({**fields, "path": find(f"{path}/{inside}")})]
            fields["data_dir"] = inside  # the hub finds splits in it by the files' names
        if path.startswith("/") and files:
            return [simplest({**fields, "path": find(f"{path}/{file}")}) for file in files]
        return [simplest({**fields, "path": path, "data_files": tuple(files)})]
    except ValidationError as error:
        field = error.errors()[0]["loc"][0]
        raise ValueError(f"{field} of an entry is {shown(entry.get(str(field)))}") from error


def _fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry's keys, without its path, as fields of `DataEntry`."""
    found: dict[str, Any] = {"columns": {}, "message_keys": {}, "roles": {}}
    for key, value in entry.items():
        if key in ("path", *TEMPLATE_KEYS) or value is None or (value in SWITCHED_OFF and key not in LEARNED_KEYS):
            continue
        if key == "type":
            _say_type(found, value)
        elif key in ("split", "name", "revision", "max_samples", "formatting", "converter", "draw", VALUES):
            found[key] = value
        elif key == "data_files":
            found[key] = [value] if isinstance(value, str) else list(value)
        elif key == "data_dir" and isinstance(value, str):
            found[key] = value
        elif key == "columns" and isinstance(value, list):
            _select(found, value)
        elif key in ("columns", "message_keys") and isinstance(value, dict):
            found[key] |= value
        elif key == "prompt_format" and isinstance(value, dict):
            found[key] = value
        elif key in _FIELDS:
            found["columns"][_FIELDS[key]] = value
        elif key in _MESSAGE_FIELDS:
            found["message_keys"][_MESSAGE_FIELDS[key]] = value
        elif key == "message_property_mappings" and isinstance(value, dict):
            found["message_keys"] |= value
        elif key == "field_thinking":
            found["message_keys"][str(entry.get("template_thinking_key") or "reasoning_content")] = value
        elif key == "split_thinking":  # a text is the key that gets the thoughts, as offmate writes it
            key_of_thoughts = entry.get("template_thinking_key") or "reasoning_content"
            found[key] = value if isinstance(value, str) else str(key_of_thoughts)
        elif key == "roles" and isinstance(value, dict):
            found["roles"] |= value if entry.get("formatting") else _roles(value)
        elif key in ("drop_system_message", "drop_system"):
            found["drop_system"] = bool(value)
        elif key in LEARNED_KEYS or key == "eot_tokens":
            found[key] = value
        elif key in _NOT_THERE:
            raise ValueError(f"{key} asks for {_NOT_THERE[key]}")
        elif key not in (*_UNUSED, "template_thinking_key"):
            raise ValueError(f"{key} is no key of an entry")
    # system: system stays: that column begins conversations only where the entry names it.
    found["columns"] = {our: theirs for our, theirs in found["columns"].items() if our != theirs or our == "system"}
    found["message_keys"] = {ours: theirs for ours, theirs in found["message_keys"].items() if ours != theirs}
    _check_learned(found)
    return found


def _select(found: dict[str, Any], names: list[Any]) -> None:
    """Take TRL's list of columns; all other columns are ignored."""
    kinds: tuple[Type, ...] = ("messages", "prompt", "text")
    kind = next((kind for kind in kinds if set(COLUMNS[kind]) <= {*map(str, names)}), None)
    if kind is None:
        text = "a record is messages, prompt and completion, or text; another name is given as {text: name}"
        raise ValueError(f"columns is {shown(names)}; {text}")
    found["type"] = kind
    beside = ("tools", VALUES) if kind != "text" else ()
    found["columns"] |= {column: "" for column in beside if column not in names}


def _check_learned(found: Mapping[str, Any]) -> None:
    """Raise ValueError for a wrong value of a key that says which turns are learned."""
    given = found.get("roles_to_train", ["assistant"])
    if not isinstance(given, list):
        raise ValueError(f"roles_to_train is {shown(given)}; it must be a list of roles")
    roles = {name: role_of(found["roles"].get(name, name)) for name in map(str, given)}
    if unknown := [name for name, role in roles.items() if role is None]:
        raise ValueError(f"roles_to_train has {unknown[0]}, and no turn has that role; roles are {', '.join(ROLES)}")
    for key in ("train_on_eos", "train_on_eot"):
        if found.get(key) not in (None, *get_args(EndMarks)):
            raise ValueError(f"{key} is {shown(found[key])}; it must be one of {', '.join(get_args(EndMarks))}")


def _roles(given: Mapping[str, Any]) -> dict[str, str]:
    """Role in the data -> role, from axolotl's form ({assistant: [gpt]}) or offmate's ({gpt: assistant})."""
    found: dict[str, str] = {}
    for one, other in given.items():
        found |= dict.fromkeys(other, one) if isinstance(other, list) else {one: other}
    return {theirs: ours for theirs, ours in found.items() if theirs != ours}


def _say_type(found: dict[str, Any], value: object) -> None:
    if isinstance(value, dict):  # axolotl's own prompts
        _own_prompt(found, value)
        return
    name = value.removesuffix(".default") if isinstance(value, str) else ""
    name = name.split(":")[0] if name.startswith("completion:") else name
    if name not in _TYPES:
        known = ", ".join(DATASET_TYPES)
        raise ValueError(f"type is {shown(value)}; columns are detected, known types are {known}")
    if isinstance(value, str) and value.startswith("completion:"):
        found["columns"]["text"] = value.partition(":")[2]
    for key, said in _TYPES[name].items():
        found[key] = {**said, **found[key]} if key == "columns" else said


def _own_prompt(found: dict[str, Any], given: Mapping[str, Any]) -> None:
    said = {key: value for key, value in given.items() if value is not None}
    names = {f"field_{name}": name for name in ("instruction", "input", "output", "system")}
    if "field" in said:
        found["type"] = "text"
        found["columns"]["text"] = said["field"]
        return
    if unknown := set(said) - {*names, "system_prompt", "system_format", "format", "no_input_format"}:
        raise ValueError(f"{sorted(unknown)[0]} is no key of a type")
    found["type"] = "instructions"
    found["columns"] |= {ours: said[key] for key, ours in names.items() if key in said}
    system = str(said.get("system_format", "{system}"))
    bare = str(said.get("no_input_format", "{instruction} "))
    if "{system}" not in system:
        found["columns"]["system"] = ""
    found["prompt_format"] = {
        "with_input": system + str(said.get("format", "{instruction} {input} ")),
        "without_input": system + bare,
        "system": str(said.get("system_prompt", "")),
    }
