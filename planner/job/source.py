"""Reading a job's YAML: lines of keys, duplicate keys, and mistakes put into words."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from planner.errors import Exit, UserError

_SET = "--set "
SHOWN_LENGTH = 200  # characters of a wrong value in an error

SWITCHED_OFF: tuple[object, ...] = (None, False, 0, "", "no", "none", [], {})
"""Values under which a key that asks for something asks for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One thing wrong with one key; `line` counts from 1, None when the key is not in the file."""

    key: str
    code: str
    text: str
    line: int | None

    def __str__(self) -> str:
        return f"line {self.line}: {self.key}: {self.text}" if self.line else f"{self.key}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A YAML mapping with the line of each of its keys; `name` is what errors call the file. `told`: keys that are not
    the file's, but the command line's (--set)."""

    name: str
    values: dict[str, Any]
    lines: dict[str, int]
    told: frozenset[str] = frozenset()

    def mistake(self, key: str, code: str, text: str) -> Mistake:
        """A mistake at `key`, with its line."""
        if key in self.told:
            return Mistake(key=f"{_SET}{key}", code=code, text=text, line=None)
        return Mistake(key=key, code=code, text=text, line=self.lines.get(key))

    def unknown(self, key: str, known: Iterable[str]) -> Mistake:
        """The mistake of a key that is none of `known`, with the nearest one that is."""
        near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)
        return self.mistake(key, "unknown-key", "unknown key" + (f"; did you mean {near[0]}?" if near else ""))


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice and reads 5e-5 as a number, as YAML 1.2 does (1.1 wants 5.0e-5).

    A date is text: no key means one, and a run may well be named after a day.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, ValueError) as error:  # of `!!int abc` and the like
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


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_text(path: Path) -> str:
    """The text of the job file. Raises UserError (exit 2) when it cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(
            f"Cannot read the job file {path}: {reason}.", code="missing-file", exit_code=Exit.USAGE,
            hint="give the path of a YAML file; docs/jobs.md lists its keys",
        ) from error  # fmt: skip


def read_yaml(text: str, name: str) -> Source:
    """The mapping in `text`. Raises UserError (exit 2) when it is no YAML, no mapping, or gives a key twice."""
    try:
        loader = _Loader(text)  # looks for characters that no YAML has
        try:
            node = loader.get_single_node()
            values = loader.construct_document(node) if node is not None else None
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        twice = isinstance(error, yaml.constructor.ConstructorError) and "given twice" in str(error.problem)
        raise UserError(
            f"{name}: {error.problem or 'not YAML'}" + (f" (line {mark.line + 1})" if mark else ""),
            code="duplicate-key" if twice else "bad-yaml", exit_code=Exit.USAGE,
            hint="keep one of the two lines" if twice else "write one `key: value` per line",
        ) from error  # fmt: skip
    except (yaml.YAMLError, RecursionError) as error:
        raise UserError(
            f"{name}: not YAML: {error}", code="bad-yaml", exit_code=Exit.USAGE, hint="write one `key: value` per line"
        ) from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(
            f"{name} is not a list of keys and values.", code="bad-yaml", exit_code=Exit.USAGE,
            hint="write one `key: value` per line, at least model and dataset; docs/jobs.md lists every key",
        )  # fmt: skip
    assert isinstance(node, yaml.MappingNode)
    return Source(name=name, values=values, lines={key.value: key.start_mark.line + 1 for key, _ in node.value})


def shown(value: object) -> str:
    """`value` as people write it in YAML: "text", true, null, 0.1. A list that holds itself is shown as Python does."""
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= SHOWN_LENGTH else f"{text[:SHOWN_LENGTH]}…"


def to_user_error(mistakes: list[Mistake], name: str) -> UserError:
    """All mistakes of a file as one error (exit 2); its code is the mistake's own when there is one only."""
    ordered = sorted(mistakes, key=lambda mistake: mistake.line or 0)
    count = "one mistake" if len(ordered) == 1 else f"{len(ordered)} mistakes"
    told = sum(mistake.key.startswith(_SET) for mistake in mistakes)
    where = "--set" if told == len(mistakes) else f"{name} with --set" if told else name
    return UserError(
        f"{where} has {count}.",
        code=ordered[0].code if len(ordered) == 1 else "bad-job",
        numbers=tuple(map(str, ordered)),
        hint=f"correct {'--set' if told == len(mistakes) else 'the file'} and try again; docs/jobs.md lists every key",
        exit_code=Exit.USAGE,
    )
