"""Makes the page of the Python names from `offmate.__all__`: their signatures and docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from types import FunctionType

import offmate

_TYPES = {
    "AnyJob": "str | os.PathLike[str] | Mapping[str, object]",
    "Batch": "Mapping[str, Tensor]",
    "LoopEngine": "Engine",
}
"""Names of types in the code -> what the page says in their place."""
_ENTRY = re.compile(r"(\w+(?:, \w+)*) {2,}(\S.*)")
_ORDER = ("prepare", "Engine", "plan", "JobPlan", "certify", "Certificate", "Finding", "Difference", "UserError")


def page() -> str:
    """The Markdown of reference/python.md."""
    if wrong := {*offmate.__all__} ^ {*_ORDER, "__version__"}:
        raise ValueError(f"docs/make/python.py: _ORDER and offmate.__all__ differ in {', '.join(sorted(wrong))}")
    parts = [
        "# Python",
        _markdown(inspect.getdoc(offmate) or ""),
        f"`offmate.__version__` is the version as text. This page is of version {offmate.__version__}.",
    ]
    for name in _ORDER:
        value = getattr(offmate, name)
        parts += _class(name, value) if isinstance(value, type) else _function(name, value, level=2)
    return "\n\n".join(parts) + "\n"


def _function(name: str, function: FunctionType, *, level: int, owner: str = "") -> Iterator[str]:
    anchor = f"{owner}.{name}" if owner else name
    yield f"{'#' * level} `{anchor}` {{ #{anchor} }}"
    yield _code(f"{name}{_signature(function)}")
    yield _markdown(inspect.getdoc(function) or "")


def _class(name: str, cls: type) -> Iterator[str]:
    yield f"## `{name}` {{ #{name} }}"
    yield _markdown(inspect.getdoc(cls) or "")
    if dataclasses.is_dataclass(cls):
        fields = (f"{field.name}: {field.type}" for field in dataclasses.fields(cls))
        yield _code(f"class {name}:\n" + "\n".join(f"    {field}" for field in fields))
    for attribute, value in vars(cls).items():
        if attribute.startswith("_"):
            continue
        if isinstance(value, property):
            yield f"### `{name}.{attribute}` {{ #{name}.{attribute} }}"
            yield _markdown(inspect.getdoc(value) or "")
        elif isinstance(value, FunctionType):
            yield from _function(attribute, value, level=3, owner=name)


def _signature(function: FunctionType) -> str:
    """The parameters and the result; one parameter a line where they are long."""
    signature = inspect.signature(function)
    parameters = [_in_words(p) for p in signature.parameters.values() if p.name != "self"]
    first_named = next((n for n, p in enumerate(signature.parameters.values()) if p.kind is p.KEYWORD_ONLY), None)
    if first_named is not None:
        parameters.insert(first_named - ("self" in signature.parameters), "*")
    result = f" -> {_type(signature.return_annotation)}"
    line = f"({', '.join(parameters)}){result}"
    return line if len(line) <= 80 else "(\n" + "".join(f"    {text},\n" for text in parameters) + f"){result}"


def _in_words(parameter: inspect.Parameter) -> str:
    text = f"{parameter.name}: {_type(parameter.annotation)}"
    return text if parameter.default is parameter.empty else f"{text} = {parameter.default!r}"


def _type(annotation: object) -> str:
    return re.sub(r"\b\w+\b", lambda word: _TYPES.get(word[0], word[0]), str(annotation))


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _markdown(docstring: str) -> str:
    """The docstring with lines "name   text" as a list, and indented code as fenced code."""
    return "\n\n".join(_paragraph(text) for text in re.split(r"\n\n+", docstring.strip("\n")))


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    if all(line.startswith("    ") for line in lines):
        return _code(inspect.cleandoc(text))
    if not _ENTRY.fullmatch(lines[0]):
        return text
    entries: list[str] = []
    for line in lines:
        if entry := _ENTRY.fullmatch(line):
            entries.append(f"- `{entry[1]}`: {entry[2]}")
        else:
            entries[-1] += f" {line.strip()}"
    return "\n".join(entries)
