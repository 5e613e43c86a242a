"""Random training data in every kind of file, and what is to be learned of them: the values that Python's own `json`
and `csv` read there, rendered by the template. `python -m tests.support.random_records --seeds COUNT` tries many.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import logging
import random
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
from jinja2 import Environment
from pyarrow import parquet

from planner.errors import UserError
from planner.job.data_check import check_data
from planner.job.schema import Job
from tests.support.texts import byte_tokenizer, make_job, tiny_llama_folder
from worker.data.documents import documents_of

TEMPLATE = (
    "{% if tools %}TOOLS{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}{% for c in m.tool_calls or [] %}CALL{{ c | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXTS = (
    "",
    "a",
    " a ",
    "3",
    "3.0",
    "-0",
    "1e5",
    "null",
    "true",
    "NaN",
    "NA",
    "2024-03-05",
    "2024-03-05T10:00:00Z",
    "12:30",
    '"hi"',
    '{"a": 1}',
    "[1, 2]",
    "[]",
    "{}",
    "\\n",
    "a\nb",
    "a\r\nb",
    "a,b",
    'say "yes"',
    "tab\there",
    "ü😀",
    "\u2028",
    "\ufeffbom",
    "<b>&amp;</b>",
    "it's",
    "\\ud83d",
    "#",
    ";",
    "0x1f",
    "1_000",
    "007",
    "2024",
)

Wanted = list[tuple[str, list[str]]]
"""Of each document its text, and the pieces of it that are learned."""


def text_of(rng: random.Random) -> str:
    return "".join(rng.choice(_TEXTS) for _ in range(rng.choice((1, 1, 1, 2, 3))))


def value_of(rng: random.Random, depth: int = 3) -> Any:
    """Any value that JSON has."""
    kind = rng.randrange(8 if depth else 6)
    if kind == 6:
        return [value_of(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {text_of(rng): value_of(rng, depth - 1) for _ in range(rng.randrange(4))}
    plain = (None, rng.random() < 0.5, rng.randrange(-9, 10**15), float(rng.randrange(9)), rng.gauss(0, 1e6))
    return (*plain, text_of(rng))[kind]


def _message(rng: random.Random, role: str, arguments: Callable[[], Any], parts: bool) -> dict[str, Any]:
    content: Any = text_of(rng)
    if parts and rng.random() < 0.2:
        content = [{"type": "text", "text": text_of(rng)} for _ in range(rng.randrange(1, 3))]
    found = {"role": role, "content": content}
    if role == "assistant" and rng.random() < 0.4:
        found["tool_calls"] = [{"function": {"name": "f", "arguments": arguments()}}]
    return found if rng.random() < 0.5 else dict(reversed(found.items()))


def chats_of(rng: random.Random, *, typed: bool) -> list[dict[str, Any]]:
    """Conversations; `typed`: of values that a table has types for, with other keys in each."""

    def arguments() -> Any:
        if typed:
            return {key: text_of(rng) for key in "abc"[: rng.randrange(1, 4)]}  # a table has one order of keys
        return {text_of(rng): value_of(rng) for _ in range(rng.randrange(3))}

    records = []
    for _ in range(rng.randrange(1, 6)):
        roles = ["user", "assistant"] * rng.randrange(1, 3)
        record: dict[str, Any] = {"messages": [_message(rng, role, arguments, not typed) for role in roles]}
        if rng.random() < 0.3:
            record["tools"] = [{"name": "f", "parameters": arguments()}]
        if rng.random() < 0.3 and not typed:
            record["more"] = value_of(rng)
        records.append(record)
    return records


def pairs_of(rng: random.Random) -> list[dict[str, Any]]:
    """Prompts and completions, and a column that is something else in each record."""
    records = []
    for _ in range(rng.randrange(1, 8)):
        record = {"prompt": text_of(rng), "completion": text_of(rng), "more": value_of(rng)}
        if rng.random() < 0.2:
            record["completion"] = None
        records.append(record)
    return records


def learned_of(records: list[dict[str, Any]]) -> Wanted:
    """What is to be learned of these records."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = to_json = partial(json.dumps, ensure_ascii=False)
    render = environment.from_string(TEMPLATE).render
    wanted = []
    for record in records:
        if "messages" not in record:
            if record.get("completion"):
                wanted.append((record["prompt"] + record["completion"], [record["completion"]]))
            continue
        messages = []
        for message in record["messages"]:
            content = message["content"]
            whole = content if isinstance(content, str) else "".join(part["text"] for part in content)
            messages.append({**message, "content": whole})
        answers = [
            message["content"] + "".join(f"CALL{to_json(call)}" for call in message.get("tool_calls", []))
            for message in messages
            if message["role"] == "assistant"
        ]
        text = render(messages=messages, tools=record.get("tools"))
        wanted.append((text, [f"{answer}<|im_end|>" for answer in answers]))
    return wanted


def _json_files(rng: random.Random, folder: Path, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    read = []
    for number, some in enumerate(_parted(rng, records)):
        ascii_only, indent = rng.random() < 0.5, rng.choice((None, None, 1))
        dumped = [json.dumps(record, ensure_ascii=ascii_only, indent=indent) for record in some]
        text, name = rng.choice(("\n", "\r\n", "\n\n")).join(dumped), f"{number}.jsonl"
        if rng.random() < 0.4:
            text, name = f"[{','.join(dumped)}]", f"{number}.json"
        (folder / name).write_bytes((rng.choice(("", "\ufeff")) + text).encode())
        read += [json.loads(one) for one in dumped]
    return read


def _csv_files(rng: random.Random, folder: Path, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = []
    for number, some in enumerate(_parted(rng, records)):
        columns = rng.sample(["prompt", "completion", "more"], 3)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, lineterminator=rng.choice(("\n", "\r\n")), quoting=rng.choice((0, 1)))
        writer.writeheader()
        writer.writerows({key: "" if value is None else value for key, value in record.items()} for record in some)
        (folder / f"{number}.csv").write_bytes((rng.choice(("", "\ufeff")) + text.getvalue()).encode())
        read += csv.DictReader(io.StringIO(text.getvalue(), newline=""))
    return read


def _tables(rng: random.Random, folder: Path, records: list[dict[str, Any]], *, of_json: bool = False) -> None:
    """Parquet or Arrow files; `of_json`: texts are of the type that `datasets` has for JSON."""
    parts, is_arrow = _parted(rng, records), rng.random() < 0.5
    for number, some in enumerate(parts):
        names = list(dict.fromkeys(key for record in some for key in record))
        arrays = [pa.array([record.get(name) for record in some]) for name in names]
        arrays = [_of_json(array) for array in arrays] if of_json else arrays
        table = pa.table(dict(zip(names, arrays, strict=True)))
        if is_arrow:
            with pa.OSFile(str(folder / f"{number}.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
                out.write_table(table, max_chunksize=2)
        else:
            parquet.write_table(table, folder / f"{number}.parquet", row_group_size=rng.choice((1, 100)))


def _of_json(array: Any) -> Any:
    if isinstance(array, pa.ListArray):
        return pa.ListArray.from_arrays(array.offsets, _of_json(array.values))
    return pa.ExtensionArray.from_storage(pa.json_(), array)


def _parted(rng: random.Random, records: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The records, of which each part comes into a file of its own."""
    at = rng.randrange(len(records))
    return [part for part in (records[:at], records[at:]) if part]


def write(rng: random.Random, folder: Path) -> Wanted:
    """Write random data into the folder; returns what is to be learned of them."""
    kind = rng.randrange(5)
    if kind == 0:
        return learned_of(_csv_files(rng, folder, pairs_of(rng)))
    if kind == 1:
        records = chats_of(rng, typed=True)
        _tables(rng, folder, records)
        return learned_of(records)
    if kind == 2:
        records = chats_of(rng, typed=False)
        dumped = [
            {"messages": [json.dumps(m) for m in record["messages"]]}
            | ({"tools": json.dumps(record["tools"])} if "tools" in record else {})
            for record in records
        ]
        _tables(rng, folder, dumped, of_json=True)
        return learned_of(records)
    return learned_of(_json_files(rng, folder, pairs_of(rng) if kind == 3 else chats_of(rng, typed=False)))


def found_in(model: Path, folder: Path) -> Wanted:
    """What the trainer would learn of the data in the folder."""
    tokenizer = byte_tokenizer(chat_template=TEMPLATE)
    job: Job = make_job(model, folder, max_length=64, chat_template=TEMPLATE)
    check_data(job)
    return [
        (document.text, [document.text[start:end] for start, end in document.trained])
        for document in documents_of(job, tokenizer, False)
    ]


def differs(seed: int, model: Path) -> str | None:
    """What is learned otherwise of the data of this seed than it is to be; None for nothing."""
    rng = random.Random(seed)
    piece = rng.choice((1, 7, 64, 2**20))
    with tempfile.TemporaryDirectory() as name, mock.patch("planner.data.json_rows._PIECE", piece):
        folder = Path(name) / "data"
        folder.mkdir()
        wanted = write(rng, folder)
        if not wanted:  # all are empty
            return None
        try:
            found = found_in(model, folder)
        except UserError as error:
            return f"seed {seed}: {error}"
    if len(found) != len(wanted):
        return f"seed {seed}: {len(found)} documents, and not {len(wanted)}"
    pairs = ((one, other) for one, other in zip(found, wanted, strict=True) if one != other)
    return next((f"seed {seed}: {one!r}\nis to be {other!r}" for one, other in pairs), None)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.random_records", description=__doc__)
    parser.add_argument("--from", dest="first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)  # empty records are said to be left out
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_llama_folder(Path(folder))
        found = [differs(seed, model) for seed in range(chosen.first, chosen.first + chosen.seeds)]
    print(*filter(None, found), f"{chosen.seeds} seeds, {len(found) - found.count(None)} differ", sep="\n")
    return int(found.count(None) < len(found))


if __name__ == "__main__":
    sys.exit(main())
