"""Reads a job's YAML file, with the line of each key, and turns mistakes in it into errors. Duplicate keys are
mistakes."""

from __future__ import annotations

import difflib
import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from planner.errors import Exit, UserError
from planner.units import counted

_SET = "--set "
SHOWN_LENGTH = 200  # characters of a wrong value in an error

MOST_CHARACTERS = 2**18
"""The most characters of a job file, and of its content with each YAML alias written out. Reading this many takes about
half a second."""
MOST_VALUES = 10_000
"""The most values in a job file, counting keys and lists, and each YAML alias as if it were written out. A list of some
thousand files fits."""
DEEPEST = 32
"""The most levels of lists and mappings inside one another."""
MOST_MISTAKES = 50
"""The most mistakes that an error lists for one file."""
_LONGEST_NUMBER = 100  # characters; arithmetic with a number of 200,000 digits takes seconds
_SURROGATE = re.compile("[\ud800-\udfff]")

SWITCHED_OFF: tuple[object, ...] = (None, False, 0, "", "no", "none", [], {})
"""Values by which a job file switches a key off: with them the key counts as not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One thing wrong with one key of a job file: what is wrong (`text`), a stable `code`, and the line, counted from
    1; None where the key is not in the file."""

    key: str
    code: str
    text: str
    line: int | None

    def __str__(self) -> str:
        text = f"{_cut(self.key)}: {self.text}"
        return f"line {self.line}: {text}" if self.line else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The content of a job file: a YAML mapping, with the line of each key.

    `name`: what errors call the file. `lines`: key -> line from 1; the elements of a list are "key[0]" and so on.
    `told`: the keys that were set on the command line (--set). `written`: the text of values that YAML reads as
    something else, such as no for false or 1e3 for 1000.0. `unclear`: mistakes for numbers that YAML reads differently
    than people do.
    """

    name: str
    values: dict[str, Any]
    lines: dict[str, int]
    told: frozenset[str] = frozenset()
    written: Mapping[str, str] = field(default_factory=dict)
    unclear: tuple[Mistake, ...] = ()

    def shown(self, key: str, value: object) -> str:
        """Return the value of a key as the file writes it, for errors. Where YAML reads that text as something else,
        this is added: "1e3, which YAML reads as 1000.0"."""
        if (written := self.written.get(key)) is None or shown(self.values[key]) != shown(value):
            return shown(value)
        return f"{_cut(written)}, which YAML reads as {shown(value)}"

    def mistake(self, key: str, code: str, text: str) -> Mistake:
        """Return a mistake at `key`, with the line that the key has in the file."""
        if key in self.told:
            return Mistake(key=f"{_SET}{key}", code=code, text=text, line=None)
        return Mistake(key=key, code=code, text=text, line=self.lines.get(key))

    def unknown(self, key: str, known: Iterable[str], meant: str | None = None) -> Mistake:
        """Return the mistake for a key that is not in `known`. It suggests the key `meant` or, where that is None, the
        `known` key with the most similar name."""
        near = [meant] if meant else difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)
        return self.mistake(key, "unknown-key", "unknown key" + (f"; did you mean {near[0]}?" if near else ""))


class _TooMuch(yaml.composer.ComposerError):
    """Raised for a file with more values, characters or levels than a job file may have."""


class _Loader(yaml.SafeLoader):
    """A safe YAML loader that refuses duplicate keys and reads 5e-5 as a number, as YAML 1.2 does (1.1 wants 5.0e-5).

    A date stays text: no key takes a date, and a run may be named after a day. 1:30 and 010, which YAML 1.1 reads as 90
    and 8, are noted in `unclear`, each with its node. A few bytes of aliases can stand for more than any memory holds,
    so values and characters behind aliases are counted during reading, and too many are refused before they are built.

    Not ruamel.yaml: with YAML 1.2 it reads `yes` and `off` as texts, which transformers' files mean as switches, and
    with 1.1 it reads the key `n` as false. It does not count aliases, and it accepts unknown tags.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = self._characters = self._depth = 0
        self._stands_for: dict[str, tuple[int, int]] = {}  # anchor -> values and characters
        self.unclear: dict[int, tuple[yaml.ScalarNode, object]] = {}  # by position: a merged mapping is read twice

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        alias = isinstance(event, yaml.AliasEvent)
        before = self._values, self._characters
        self._count(event)
        self._depth += 1
        if self._depth > DEEPEST:
            raise _TooMuch(None, None, f"lists and mappings more than {DEEPEST} deep", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(node, yaml.ScalarNode) and _SURROGATE.search(node.value):
            node.value = _joined(node)
        if event.anchor is not None and not alias:
            self._stands_for[event.anchor] = (self._values - before[0], self._characters - before[1])
        return node

    def _count(self, event: Any) -> None:
        """Add the values and characters that the next event stands for. Raises `_TooMuch` and `ComposerError`."""
        values, characters = 1, len(event.value) if isinstance(event, yaml.ScalarEvent) else 0
        if isinstance(event, yaml.AliasEvent) and event.anchor in self.anchors:
            if event.anchor not in self._stands_for:
                problem = f"*{event.anchor} stands for something that it is a part of"
                raise yaml.composer.ComposerError(None, None, problem, event.start_mark)  # type: ignore[arg-type]
            values, characters = self._stands_for[event.anchor]
        self._values += values
        self._characters += characters
        if self._values > MOST_VALUES:
            raise _TooMuch(None, None, f"more than {MOST_VALUES:,} values", event.start_mark)
        if self._characters > MOST_CHARACTERS:  # the text itself is shorter: aliases repeat it
            problem = f"aliases that stand for more than {MOST_CHARACTERS:,} characters"
            raise _TooMuch(None, None, problem, event.start_mark)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            if node.tag in _NUMBERS and len(node.value) > _LONGEST_NUMBER:
                raise ValueError("too long for a number")
            if isinstance(node, yaml.ScalarNode) and node.tag in _NUMBERS:
                value = super().construct_object(node, deep)
                if _has_two_readings(node, value):
                    self.unclear[node.start_mark.index] = (node, value)
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, ValueError) as error:  # from `!!int abc` and the like
            problem = f"{shown(node.value)} is no {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge" or not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                problem = f"{key.value} is given twice, first in line {seen[key.value]}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def _has_two_readings(node: yaml.ScalarNode, value: Any) -> bool:
    """Return whether YAML 1.1 reads a number in base 60 or base 8, so that it gets another value than a person does."""
    written = node.value.replace("_", "")
    in_eights = re.fullmatch("[-+]?0[0-9]+", written) and node.tag == _NUMBERS[0] and int(written) != value
    return ":" in written or bool(in_eights)


def _joined(node: Any) -> str:
    """Return a text in which each surrogate pair, as JSON writes it ("\\ud83d\\ude00"), is joined to one character.
    Raises ComposerError for half a pair, which is no valid text and can be neither stored nor sent."""
    try:
        return str(node.value).encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        half = f"\\u{ord(_SURROGATE.findall(node.value)[0]):x}"
        raise yaml.composer.ComposerError(None, None, f"{half} is half a character", node.start_mark) from None


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_text(path: Path, *, longest: int | None = MOST_CHARACTERS) -> str:
    """Return the text of a job file, of at most `longest` characters (None: any number). Raises UserError (exit 2)
    where it cannot be read or is longer."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(-1 if longest is None else longest + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        near = _near(path) if isinstance(error, FileNotFoundError) else None
        raise UserError(
            f"Cannot read the job file {path}: {reason}.",
            code="missing-file",
            exit_code=Exit.USAGE,
            hint=f"did you mean {near}?" if near else "give the path of a YAML file; `offmate keys` lists its keys",
        ) from error
    _check_length(text, path.name, longest)
    return text


def _near(path: Path) -> Path | None:
    """Return the file in the same folder whose name is most similar; None where none is similar."""
    try:
        names = [file.name for file in path.parent.iterdir() if file.is_file()]
    except OSError:
        return None
    similar = difflib.get_close_matches(path.name, names, n=1)
    return path.with_name(similar[0]) if similar else None


def _check_length(text: str, name: str, longest: int | None) -> None:
    if longest is not None and len(text) > longest:
        raise UserError(
            f"{name}{_if_data(name)} is too long for a job file.",
            code="file-too-long",
            exit_code=Exit.USAGE,
            numbers=(f"it has more than {longest:,} characters",),
            hint="give long texts as files: a template, the data",
        )


def _if_data(name: str) -> str:
    """Return a remark for an error, if the name of a supposed job file ends as a data file's does; else ""."""
    return ", which looks like a data file and not like a job file" if name.lower().endswith((".jsonl", ".csv")) else ""


def read_yaml(text: str, name: str, *, longest: int | None = MOST_CHARACTERS, allow_unclear: bool = False) -> Source:
    """Return the mapping in a YAML `text` of at most `longest` characters. `name`: the file's name in errors. Raises
    UserError (exit 2) where the text is no valid YAML, is no mapping, gives a key twice, or has more in it than a job
    file may (`MOST_VALUES`, `DEEPEST`). Numbers that YAML reads differently than people do raise it, too; with
    `allow_unclear` they are returned in `Source.unclear` instead."""
    _check_length(text, name, longest)
    try:
        loader = _Loader(text)  # raises for characters that YAML does not allow
        try:
            node = loader.get_single_node()
            values = loader.construct_document(node) if node is not None else None
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        line = _line(error, text)
        code, hint = "bad-yaml", "write one `key: value` per line, without spaces before the key"
        if isinstance(error, yaml.constructor.ConstructorError) and "given twice" in str(error.problem):
            code, hint = "duplicate-key", "keep one of the two lines"
        elif isinstance(error, _TooMuch):
            code, hint = "file-too-long", "a job says less than that; a list of many files can be a folder"
        problem = f"{name}{_if_data(name)}: {_cut(error.problem or 'not YAML', 2 * SHOWN_LENGTH)}"
        raise UserError(
            problem + (f" (line {line})" if line else ""), code=code, exit_code=Exit.USAGE, hint=hint
        ) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(
            f"{name}{_if_data(name)}: not YAML: {error}",
            code="bad-yaml",
            exit_code=Exit.USAGE,
            hint="write one `key: value` per line",
        ) from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(
            f"{name} is not a mapping of keys to values{_if_data(name)}.",
            code="bad-yaml",
            exit_code=Exit.USAGE,
            hint="write one `key: value` per line, at least model and dataset; `offmate keys` lists all keys",
        )
    assert isinstance(node, yaml.MappingNode)
    lines = {key.value: key.start_mark.line + 1 for key, _ in node.value}
    for key, value in node.value:
        if isinstance(value, yaml.SequenceNode):
            lines |= {f"{key.value}[{place}]": item.start_mark.line + 1 for place, item in enumerate(value.value)}
    scalars = [(key.value, value) for key, value in node.value if isinstance(value, yaml.ScalarNode)]
    written = {
        key: value.value
        for key, value in scalars
        if not value.style and isinstance(values.get(key), (bool, int, float)) and value.value != shown(values[key])
    }
    unclear = tuple(_unclear(node, *number) for number in loader.unclear.values())
    if unclear and not allow_unclear:
        raise to_user_error(list(unclear), name)
    return Source(name=name, values=values, lines=lines, written=written, unclear=unclear)


def _unclear(mapping: yaml.MappingNode, number: yaml.ScalarNode, value: object) -> Mistake:
    """Return the mistake for a `number` that YAML reads differently than people do. `value`: YAML's reading."""
    key = next(
        str(key.value)
        for key, value_node in mapping.value
        if value_node.start_mark.index <= number.start_mark.index <= value_node.end_mark.index
    )
    text = f"YAML reads {number.value} as {value}; write the number that is meant, or a text in quotes"
    return Mistake(key=key, code="unclear-number", text=text, line=number.start_mark.line + 1)


def _line(error: yaml.MarkedYAMLError, text: str) -> int | None:
    """Return the line of the mistake. YAML notices a line without a colon only at the beginning of the next line or at
    the end of the text."""
    mark = error.problem_mark or error.context_mark
    if error.context == "while scanning a simple key":
        mark = error.context_mark
    elif str(error.problem).startswith(("mapping values are not allowed here", "expected '<document start>'")):
        lines = [(number, line.partition("#")[0]) for number, line in enumerate(text.splitlines(), start=1)]
        lines = [(number, line) for number, line in lines if line.strip() and not line.startswith(("---", "%"))]
        if lines and ":" not in lines[0][1] and mark is not None and mark.line + 1 <= lines[:2][-1][0]:
            return lines[0][0]
    return mark.line + 1 if mark else None


def shown(value: object, length: int = SHOWN_LENGTH) -> str:
    """Return `value` as people write it in YAML, for errors: "text", true, null, 0.1. It is cut to `length` characters;
    no more than that is formatted, so large values cost nothing."""
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
    text = ""
    try:
        for piece in json.JSONEncoder(default=str, ensure_ascii=False).iterencode(value):
            text += piece
            if len(text) > length:
                break
    except (TypeError, ValueError, RecursionError):  # keys that JSON does not allow; a list that holds itself
        text = reprlib.repr(value)
    return _cut(text, length)


def _cut(text: str, length: int = SHOWN_LENGTH) -> str:
    return text if len(text) <= length else f"{text[:length]}…"


def to_user_error(mistakes: list[Mistake], name: str) -> UserError:
    """Return all mistakes of a job file as one error (exit 2), ordered by line, at most `MOST_MISTAKES` of them.
    `name`: the file's name. The error has the code of its mistake where there is only one, else "bad-job"."""
    ordered = sorted(mistakes, key=lambda mistake: mistake.line or 0)
    more = len(ordered) - MOST_MISTAKES
    count = "one mistake" if len(ordered) == 1 else counted(len(ordered), "mistake")
    set_count = sum(mistake.key.startswith(_SET) for mistake in mistakes)
    where = "--set" if set_count == len(mistakes) else f"{name} with --set" if set_count else name
    return UserError(
        f"{where} has {count}.",
        code=ordered[0].code if len(ordered) == 1 else "bad-job",
        numbers=(*map(str, ordered[:MOST_MISTAKES]), *([f"and {more:,} more"] if more > 0 else [])),
        hint=(
            f"correct {'--set' if set_count == len(mistakes) else 'the file'} and try again; "
            "`offmate keys` lists all keys"
        ),
        exit_code=Exit.USAGE,
    )
