"""axolotl's `pretraining_dataset`: texts that axolotl reads as a stream, packed or one a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.job.dataset_words import DATASET_TYPES
from planner.job.source import SWITCHED_OFF, Mistake, Source, shown

TEXTS = "pretraining_dataset"
_TYPES = ("pretrain", "completion")
_PART = "pretraining_sample_concatenation"
_APART = "pretrain_multipack_attn"


def entries_of(value: object) -> object:
    """The entries of `dataset` that mean the same. axolotl's `skip` becomes a part of the split."""
    if isinstance(value, (dict, str)) and value:
        value = [value]
    if not isinstance(value, list):
        return value
    entries = [{"path": entry} if isinstance(entry, str) else entry for entry in value]
    return [_entry(entry) if isinstance(entry, dict) else entry for entry in entries]


def _entry(given: Mapping[str, Any]) -> dict[str, Any]:
    found = {"type": "pretrain"} | {key: said for key, said in given.items() if key != "skip" and said is not None}
    split = str(found.get("split", "train"))
    if given.get("skip") and _counts(given["skip"]) and "[" not in split:  # `check_texts` reports all else
        found["split"] = f"{split}[{given['skip']}:]"
    return found


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
    given = value[0] if isinstance(value, list) else value
    skipped = given.get("skip") if isinstance(given, dict) else None
    if skipped is not None and not _counts(skipped):
        return [source.mistake(TEXTS, "bad-value", f"skip is {shown(skipped)}; it must be a number of records")]
    if skipped and isinstance(given, dict) and "[" in str(given.get("split")):
        return [source.mistake(TEXTS, "bad-value", "skip is given, and split names a part, too; keep one of them")]
    if (kind := entry.get("type")) in DATASET_TYPES and kind not in _TYPES:
        text = f"type is {shown(kind)}; texts are of type {' or '.join(_TYPES)}"
        return [source.mistake(TEXTS, "bad-value", f"{text}: give other data as datasets")]
    packs = source.values.get("sample_packing") not in SWITCHED_OFF
    seeing = "texts that are packed whole and see each other are not there"
    if packs and source.values.get(_APART) is False:
        return [source.mistake(_APART, "not-there", f"{seeing}; leave this key out, and each is by itself")]
    if not packs and source.values.get(_PART) is True:
        text = f"{seeing}; give sample_packing: true in its place, and each is by itself"
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
    told = [f"{TEXTS} is read as a whole, a dataset of the hub downloaded (data_files names a part of it)"]
    told.append("rows are drawn from all of it")
    if not packs:
        told.append("each text has an end token, which it has not there")
    elif isinstance(entries[0], dict) and entries[0].get("type") == "pretrain":
        told.append("a text longer than a row goes on in the next, where there the next repeats up to 256 tokens")
    return "; ".join(told)
