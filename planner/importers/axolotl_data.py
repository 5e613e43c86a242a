"""Reads the entries of `dataset`, in axolotl's form and in offmate's own: a path, or a mapping of what to read and how.

It also reads axolotl's keys for which turns are learned, and `pretraining_dataset`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from planner.data.entry import ALPACA, COLUMNS, DataEntry, EndMarks, Type, simplest
from planner.data.records import ROLES, role_of
from planner.importers.base import LEARNED
from planner.keys.fields import VALUES
from planner.keys.source import SWITCHED_OFF, Mistake, Source, shown

_TYPES: dict[str, dict[str, Any]] = {
    "alpaca": {"type": "instructions", "prompt_format": ALPACA, "columns": {"system": "", "history": ""}},
    "completion": {"type": "text"},
    "pretrain": {"type": "text"},
    "chat_template": {"type": "messages"},
    "sharegpt": {"type": "messages", "columns": {"messages": "conversations"}},
    "input_output": {"type": "segments"},
    **{
        name: {"type": name}
        for name in (
            *("text", "messages", "prompt", "instructions", "segments", "tokens"),
            *("preference", "unpaired"),
        )
    },
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
_TYPED = {
    "columns": "a mapping, or a list of names",
    "data_dir": "a folder's name",
    **dict.fromkeys(
        ("message_keys", "prompt_format", "pair_format", "message_property_mappings", "roles"), "a mapping"
    ),
}
"""Keys of an entry with a value of one type -> that type, in words that follow "it must be"."""
_FILE_READERS = ("json", "csv", "parquet", "arrow", "text")
TEMPLATE_KEYS = ("chat_template", "chat_template_jinja", "conversation")
"""Keys of an entry that say which chat template its conversations have."""

Finder = Callable[[object], str]


def read_entry(entry: object, find: Finder) -> list[str | DataEntry]:
    """Returns the data entries that one element of a job's `dataset` list stands for: several where it names several
    files. `find` makes a path absolute and raises where there is no data. Raises ValueError for a wrong value,
    TypeError for a wrong type and FileNotFoundError, with texts that users read."""
    if isinstance(entry, DataEntry):
        return [entry]
    if not isinstance(entry, dict):
        return [find(entry)]
    if not isinstance(entry.get("path"), str):
        raise ValueError(f"an entry needs a path; this one has only {', '.join(map(str, entry)) or 'no keys'}")
    fields = _fields(entry)
    files, inside = fields.pop("data_files", ()), fields.pop("data_dir", None)
    if inside is not None:
        files = [f"{inside}/{file}" for file in files]
    try:
        if entry["path"] in _FILE_READERS and (files or inside is not None):
            return [simplest({**fields, "path": find(file)}) for file in files or [inside]]
        path = find(entry["path"])
        if inside is not None and not files:
            if Path(path).is_absolute():
                return [simplest({**fields, "path": find(f"{path}/{inside}")})]
            fields["data_dir"] = inside  # the hub finds splits in it by the files' names
        if Path(path).is_absolute() and files:
            return [simplest({**fields, "path": find(f"{path}/{file}")}) for file in files]
        return [simplest({**fields, "path": path, "data_files": tuple(files)})]
    except ValidationError as error:
        field = error.errors()[0]["loc"][0]
        raise ValueError(
            f"{field} of an entry is {shown(entry.get(str(field)))}, which is no valid value of it"
        ) from error


def _fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry's keys, without its path, as fields of `DataEntry`."""
    fields: dict[str, Any] = {"columns": {}, "message_keys": {}, "roles": {}}
    for key, value in entry.items():
        if key in ("path", *TEMPLATE_KEYS) or value is None or (value in SWITCHED_OFF and key not in LEARNED_KEYS):
            continue
        if key == "type":
            _say_type(fields, value)
        elif key in ("split", "name", "revision", "max_samples", "formatting", "converter", "draw", VALUES):
            fields[key] = value
        elif key == "data_files":
            fields[key] = [value] if isinstance(value, str) else list(value)
        elif key == "data_dir" and isinstance(value, str):
            fields[key] = value
        elif key == "columns" and isinstance(value, list):
            _select(fields, value)
        elif key in ("columns", "message_keys") and isinstance(value, dict):
            fields[key] |= value
        elif key in ("prompt_format", "pair_format") and isinstance(value, dict):
            fields[key] = value
        elif key in _FIELDS:
            fields["columns"][_FIELDS[key]] = value
        elif key in _MESSAGE_FIELDS:
            fields["message_keys"][_MESSAGE_FIELDS[key]] = value
        elif key == "message_property_mappings" and isinstance(value, dict):
            fields["message_keys"] |= value
        elif key == "field_thinking":
            fields["message_keys"][str(entry.get("template_thinking_key") or "reasoning_content")] = value
        elif key == "split_thinking":  # a text is the key that gets the thoughts, as offmate writes it
            key_of_thoughts = entry.get("template_thinking_key") or "reasoning_content"
            fields[key] = value if isinstance(value, str) else str(key_of_thoughts)
        elif key == "roles" and isinstance(value, dict):
            fields["roles"] |= value if entry.get("formatting") else _roles(value)
        elif key in ("drop_system_message", "drop_system"):
            fields["drop_system"] = bool(value)
        elif key in LEARNED_KEYS or key == "eot_tokens":
            fields[key] = value
        elif key in _NOT_THERE:
            raise ValueError(f"{key} is not supported: it asks for {_NOT_THERE[key]}")
        elif key in _TYPED:
            raise ValueError(f"{key} is {shown(value)}; it must be {_TYPED[key]}")
        elif key not in (*_UNUSED, "template_thinking_key"):
            raise ValueError(f"an entry has no key {key}")
    # system: system stays: that column begins conversations only where the entry names it.
    fields["columns"] = {our: theirs for our, theirs in fields["columns"].items() if our != theirs or our == "system"}
    fields["message_keys"] = {ours: theirs for ours, theirs in fields["message_keys"].items() if ours != theirs}
    _check_learned(fields)
    return fields


def _select(fields: dict[str, Any], names: list[Any]) -> None:
    """Take TRL's list of columns; all other columns are ignored."""
    kinds: tuple[Type, ...] = ("messages", "prompt", "text")
    kind = next((kind for kind in kinds if set(COLUMNS[kind]) <= {*map(str, names)}), None)
    if kind is None:
        text = "a record is messages, prompt and completion, or text; another name is given as {text: name}"
        raise ValueError(f"columns is {shown(names)}; {text}")
    fields["type"] = kind
    beside = ("tools", VALUES) if kind != "text" else ()
    fields["columns"] |= {column: "" for column in beside if column not in names}


def _check_learned(fields: Mapping[str, Any]) -> None:
    """Raise ValueError for a wrong value of a key that says which turns are learned."""
    listed = fields.get("roles_to_train", ["assistant"])
    if not isinstance(listed, list):
        raise ValueError(f"roles_to_train is {shown(listed)}; it must be a list of roles")
    roles = {name: role_of(fields["roles"].get(name, name)) for name in map(str, listed)}
    if unknown := [name for name, role in roles.items() if role is None]:
        raise ValueError(f"roles_to_train has {unknown[0]}, and no turn has that role; roles are {', '.join(ROLES)}")
    for key in ("train_on_eos", "train_on_eot"):
        if fields.get(key) not in (None, *get_args(EndMarks)):
            raise ValueError(f"{key} is {shown(fields[key])}; it must be one of {', '.join(get_args(EndMarks))}")


def _roles(roles: Mapping[str, Any]) -> dict[str, str]:
    """Role in the data -> role, from axolotl's form ({assistant: [gpt]}) or offmate's ({gpt: assistant})."""
    renamed: dict[str, str] = {}
    for name, value in roles.items():
        renamed |= dict.fromkeys(value, name) if isinstance(value, list) else {name: value}
    return {theirs: ours for theirs, ours in renamed.items() if theirs != ours}


def _say_type(fields: dict[str, Any], value: object) -> None:
    if isinstance(value, dict):  # axolotl's own prompts
        _own_prompt(fields, value)
        return
    name = value.removesuffix(".default") if isinstance(value, str) else ""
    name = name.split(":")[0] if name.startswith("completion:") else name
    if name not in _TYPES:
        known = ", ".join(DATASET_TYPES)
        raise ValueError(f"type is {shown(value)}; leave it out, as columns are detected, or give one of {known}")
    if isinstance(value, str) and value.startswith("completion:"):
        fields["columns"]["text"] = value.partition(":")[2]
    for key, preset in _TYPES[name].items():
        fields[key] = {**preset, **fields[key]} if key == "columns" else preset


def _own_prompt(fields: dict[str, Any], prompt_type: Mapping[str, Any]) -> None:
    options = {key: value for key, value in prompt_type.items() if value is not None}
    names = {f"field_{name}": name for name in ("instruction", "input", "output", "system")}
    if "field" in options:
        fields["type"] = "text"
        fields["columns"]["text"] = options["field"]
        return
    if unknown := set(options) - {*names, "system_prompt", "system_format", "format", "no_input_format"}:
        raise ValueError(f"a type has no key {sorted(unknown)[0]}")
    fields["type"] = "instructions"
    fields["columns"] |= {ours: options[key] for key, ours in names.items() if key in options}
    system = str(options.get("system_format", "{system}"))
    bare = str(options.get("no_input_format", "{instruction} "))
    if "{system}" not in system:
        fields["columns"]["system"] = ""
    fields["prompt_format"] = {
        "with_input": system + str(options.get("format", "{instruction} {input} ")),
        "without_input": system + bare,
        "system": str(options.get("system_prompt", "")),
    }


# ---- which turns are learned, and the chat template, where keys beside the entries say it

DATA = ("dataset", "eval_dataset")
"""offmate's keys of data."""


def settle_learned(values: dict[str, Any], source: Source, *, taken: bool) -> list[Mistake]:
    """Put into the entries which turns are learned, and with which end marks (`eot_tokens`), where the file says it for
    all its conversations. `taken`: the file's tool takes keys for it. Returns mistakes."""
    settings = {key: source.values[key] for key in LEARNED_KEYS if source.values.get(key) is not None}
    marks = source.values.get("eot_tokens")
    if settings and not taken:
        return [
            source.mistake(key, "not-there", (f"{LEARNED} is not supported yet; leave this key out"))
            for key in settings
        ]
    entries = values.get("dataset")
    if settings and isinstance(entries, list) and entries and not any(map(_of_turns, entries)):
        text = "it is for conversations, and by their type no entry of dataset has any; leave it out"
        return [source.mistake(key, "bad-value", text) for key in settings]
    settings |= {} if marks in SWITCHED_OFF else {"eot_tokens": marks}
    for key in DATA if settings else ():
        if isinstance(entries := values.get(key), (str, list)):
            values[key] = [
                _with_learned(entry, settings) for entry in (entries if isinstance(entries, list) else [entries])
            ]
    return []


def _with_learned(entry: Any, settings: dict[str, Any]) -> Any:
    if not isinstance(entry, (str, dict)) or not _of_turns(entry):
        return entry  # its reader reports what is wrong
    return {**settings, **({"path": entry} if isinstance(entry, str) else entry)}


def as_axolotl(entry: Any) -> Any:
    """An entry of conversations as axolotl reads it: the assistant's turns are learned by its rules, the column system
    begins a conversation, and a turn's own word on whether it is learned counts only where the entry names that key."""
    if not isinstance(entry, dict) or entry.get("type") is None or not _of_turns(entry):
        return entry
    dropped = any(entry.get(key) not in SWITCHED_OFF for key in ("drop_system_message", "drop_system"))
    columns = {VALUES: "", **({} if dropped else {"system": "system"})}
    fields = {"columns": columns, "message_keys": {"train": "", "weight": ""}}
    for key, names in fields.items():
        entry_names = entry.get(key) or {}
        fields[key] = (
            {**names, **entry_names} if isinstance(entry_names, dict) else entry_names
        )  # its reader reports a wrong one
    roles = {} if entry.get("roles_to_train") is not None else {"roles_to_train": ["assistant"]}
    return {**fields, **{key: value for key, value in entry.items() if key not in fields}, **roles}


def _of_turns(entry: Any) -> bool:
    """Whether an entry may have conversations, by its type."""
    kind = entry.get("type") if isinstance(entry, dict) else None
    return kind is None or str(kind).removesuffix(".default") in CONVERSATIONS


def settle_templates(values: dict[str, Any], names: Mapping[str, str], source: Source) -> list[Mistake]:
    """Make the chat template that the entries name the job's, which has one for all of them. Returns mistakes."""
    entries = values.get("dataset")
    templates: dict[str, str] = {}
    for entry in entries if isinstance(entries, list) else ():
        template_keys = {key: entry[key] for key in TEMPLATE_KEYS if entry.get(key)} if isinstance(entry, dict) else {}
        template = (
            template_keys.get("chat_template_jinja")
            or template_keys.get("chat_template")
            or template_keys.get("conversation")
        )
        if template is not None and not isinstance(entry, DataEntry):
            templates[str(template)] = names["dataset"]
    job_template = values.get("chat_template")
    templates = {name: key for name, key in templates.items() if name not in ("tokenizer_default", job_template)}
    if not templates:
        return []
    if len(templates) > 1 or job_template is not None:
        text = (
            "its entries have several chat templates: "
            f"{', '.join(map(shown, [*templates, *([job_template] if job_template else [])]))}"
        )
        return [source.mistake(names["dataset"], "not-there", f"{text}; a job has one template: keep one")]
    values["chat_template"] = next(iter(templates))
    return []


# ---- `pretraining_dataset`: texts that axolotl reads as a stream, packed or one a row

TEXTS = "pretraining_dataset"
_TEXT_TYPES = ("pretrain", "completion")
_PART = "pretraining_sample_concatenation"
_APART = "pretrain_multipack_attn"


def entries_of(value: object) -> object:
    """The entries of `dataset` that mean the same. axolotl's `skip` becomes a part of the split."""
    if isinstance(value, (dict, str)) and value:
        value = [value]
    if not isinstance(value, list):
        return value
    entries = [{"path": entry} if isinstance(entry, str) else entry for entry in value]
    return [_text_entry(entry) if isinstance(entry, dict) else entry for entry in entries]


def _text_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    fields = {"type": "pretrain"} | {key: value for key, value in entry.items() if key != "skip" and value is not None}
    split = str(fields.get("split", "train"))
    if entry.get("skip") and _counts(entry["skip"]) and "[" not in split:  # `check_texts` reports all else
        fields["split"] = f"{split}[{entry['skip']}:]"
    return fields


def _counts(skip: object) -> bool:
    return isinstance(skip, int) and not isinstance(skip, bool) and skip >= 0


def check_texts(value: object, source: Source) -> list[Mistake]:
    """Mistakes in the value of `pretraining_dataset`, and in keys beside it that say how its texts become rows."""
    entries = entries_of(value)
    if value in SWITCHED_OFF or not isinstance(entries, list):
        return []
    if len(entries) > 1:
        text = f"it has {len(entries)} entries, and axolotl reads the first alone; keep that one"
        return [source.mistake(TEXTS, "bad-value", f"{text}, or give all as datasets of type completion")]
    if source.values.get("max_steps") in (*SWITCHED_OFF, -1):
        text = "it is missing, and nothing else says where a stream of texts is to end"
        return [source.mistake("max_steps", "missing-key", f"{text}; give the optimizer steps, too")]
    entry = entries[0] if isinstance(entries[0], dict) else {}
    written = value[0] if isinstance(value, list) else value
    skipped = written.get("skip") if isinstance(written, dict) else None
    if skipped is not None and not _counts(skipped):
        return [source.mistake(TEXTS, "bad-value", f"skip is {shown(skipped)}; it must be a number of records")]
    if skipped and isinstance(written, dict) and "[" in str(written.get("split")):
        return [source.mistake(TEXTS, "bad-value", "skip is given, and split names a part, too; keep one of them")]
    if (kind := entry.get("type")) in DATASET_TYPES and kind not in _TEXT_TYPES:
        text = f"type is {shown(kind)}; texts are of type {' or '.join(_TEXT_TYPES)}"
        return [source.mistake(TEXTS, "bad-value", f"{text}: give other data as datasets")]
    packs = source.values.get("sample_packing") not in SWITCHED_OFF
    seeing = "packed texts that attend to each other are not supported"
    if packs and source.values.get(_APART) is False:
        return [source.mistake(_APART, "not-there", f"{seeing}; leave this key out, and each text sees only itself")]
    if not packs and source.values.get(_PART) is True:
        text = f"{seeing}; give sample_packing: true in its place, and each text sees only itself"
        return [source.mistake(_PART, "not-there", text)]
    return []


def long_texts(file: Mapping[str, object], *, packs: bool) -> str:
    """What becomes of texts longer than a row: "split" or "cut"; "" for a file without the key."""
    return "" if file.get(TEXTS) in SWITCHED_OFF else "split" if packs else "cut"


def read_otherwise(file: Mapping[str, object], *, packs: bool) -> str:
    """A note on what is done otherwise than in axolotl; "" for nothing."""
    entries = entries_of(file.get(TEXTS))
    if file.get(TEXTS) in SWITCHED_OFF or not isinstance(entries, list):
        return ""
    notes = [f"{TEXTS} is read as a whole, a dataset of the hub downloaded (data_files names a part of it)"]
    notes.append("rows are drawn from all of it")
    if not packs:
        notes.append("each text has an end token, which it has not there")
    elif isinstance(entries[0], dict) and entries[0].get("type") == "pretrain":
        notes.append("a text longer than a row goes on in the next, where there the next repeats up to 256 tokens")
    return "; ".join(notes)
