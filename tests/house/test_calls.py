"""What the house says in every call of a kind, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house.test_imports import modules

LOADING = {"from_pretrained", "from_config"}
STARTING = {"run", "Popen", "call", "check_call", "check_output"}

OWN_STDIN = {"subprocess.DEVNULL", "subprocess.PIPE"}


def attributes(source: ast.AST, names: set[str]) -> Iterator[tuple[ast.Attribute, ast.Call | None]]:
    """Every use of an attribute of these names but in a type, with the call it is the function of, if it is one's."""
    calls = {call.func: call for call in ast.walk(source) if isinstance(call, ast.Call)}
    kinds = {node.value for node in ast.walk(source) if isinstance(node, ast.Subscript)}  # subprocess.Popen[bytes]
    for node in ast.walk(source):
        if isinstance(node, ast.Attribute) and node.attr in names and node not in kinds:
            yield node, calls.get(node)


def keyword(call: ast.Call | None, name: str) -> str | None:
    """The source of a call's keyword."""
    found = [] if call is None else [word.value for word in call.keywords if word.arg == name]
    return ast.unparse(found[0]) if found else None


def loads_without_saying(source: ast.AST) -> list[str]:
    """Uses of transformers' loaders that are no call with `trust_remote_code=False`."""
    return [
        ast.unparse(node)
        for node, call in attributes(source, LOADING)
        if ast.unparse(node.value) != "ScriptDirectory" and keyword(call, "trust_remote_code") != "False"
    ]


def starts_without_saying(source: ast.AST) -> list[str]:
    """Processes that are started with the caller's stdin."""
    return [
        ast.unparse(node)
        for node, call in attributes(source, STARTING)
        if ast.unparse(node.value) == "subprocess"
        and keyword(call, "stdin") not in OWN_STDIN
        and keyword(call, "input") is None  # which comes through a pipe
    ]


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ("AutoConfig.from_pretrained(x)", ["AutoConfig.from_pretrained"]),
        ("AutoConfig.from_pretrained(x, trust_remote_code=trusted)", ["AutoConfig.from_pretrained"]),
        ("make = cast(Any, AutoModel.from_config)", ["AutoModel.from_config"]),
        ("AutoConfig.from_pretrained(x, trust_remote_code=False)", []),
    ],
)
def test_a_loader_that_may_run_code_is_found(told: str, found: list[str]) -> None:
    assert loads_without_saying(ast.parse(told)) == found


def test_no_loader_of_transformers_may_run_a_models_code() -> None:
    uses = {name: path.read_text("utf-8") for name, path in modules().items()}
    assert any("from_pretrained(" in text for text in uses.values())
    assert {name: loads for name, text in uses.items() if (loads := loads_without_saying(ast.parse(text)))} == {}


def test_no_process_may_read_what_its_caller_is_told() -> None:
    """A prompt of a library would be answered by it."""
    assert starts_without_saying(ast.parse("subprocess.run(command)")) == ["subprocess.run"]
    found = {name: starts_without_saying(ast.parse(path.read_text("utf-8"))) for name, path in modules().items()}
    assert {name: starts for name, starts in found.items() if starts} == {}
