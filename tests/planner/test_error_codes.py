"""Every error code of the product is explained, and no other: codes are read from the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import chain

from planner.error_codes import THEMES
from tests.house.test_imports import modules

CODE = re.compile("[a-z]+(-[a-z0-9]+)+")
EXPLAINED = [code for codes in THEMES.values() for code in codes]


def parsed() -> dict[str, ast.Module]:
    """The product's modules, but for the explanations themselves."""
    return {
        name: ast.parse(path.read_text("utf-8"))
        for name, path in modules().items()
        if not name.startswith("planner.error_codes")
    }


def written(value: ast.expr, constants: Mapping[str, str]) -> Iterator[str]:
    """The codes that an expression may give, as regular expressions."""
    match value:
        case ast.Constant(value=str(code)):
            yield re.escape(code)
        case ast.Name(id=name) if name in constants:
            yield re.escape(constants[name])
        case ast.IfExp(body=one, orelse=other):
            yield from written(one, constants)
            yield from written(other, constants)
        case ast.JoinedStr(values=parts):
            yield "".join(re.escape(str(part.value)) if isinstance(part, ast.Constant) else "[a-z]+" for part in parts)


def named(value: ast.expr | None, constants: Mapping[str, str]) -> Iterator[str]:
    """The same for a value of a variable that is called `code` and may be no error's."""
    for code in written(value, constants) if value is not None else ():
        if CODE.fullmatch(code.replace("\\", "")):
            yield code


def codes(tree: ast.AST, constants: Mapping[str, str], places: Mapping[str, int]) -> Iterator[str]:
    """The codes that a module gives to its errors: as the argument `code` of a call (`places`: function -> where that
    argument is without its name), the entry "code" of a dict, a variable `code`, or a value of a table `…_CODES`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args, keywords=keywords):
                yield from chain(*(written(word.value, constants) for word in keywords if word.arg == "code"))
                if name in places and len(args) > places[name]:
                    yield from named(args[places[name]], constants)
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "code":
                        yield from written(value, constants)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(values=values)) if name.endswith("_CODES"):
                yield from chain(*(written(value, constants) for value in values))
            case ast.Assign(targets=[ast.Name(id="code")], value=value):
                yield from named(value, constants)
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                for target, value in zip(names, values, strict=False):
                    if isinstance(target, ast.Name) and target.id == "code":
                        yield from named(value, constants)
            case ast.arguments(args=args, defaults=defaults) if defaults:
                for argument, default in zip(args[-len(defaults) :], defaults, strict=True):
                    if argument.arg == "code":
                        yield from named(default, constants)


def constants_of(trees: Mapping[str, ast.Module]) -> dict[str, str]:
    """The texts that modules give names to."""
    return {
        node.targets[0].id: node.value.value
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def places_of(trees: Mapping[str, ast.Module]) -> dict[str, int]:
    """Function -> the position of its argument `code` in a call."""
    found = {}
    for node in chain(*map(ast.walk, trees.values())):
        if isinstance(node, ast.FunctionDef):
            arguments = [argument.arg for argument in node.args.args if argument.arg != "self"]
            if "code" in arguments:
                found[node.name] = arguments.index("code")
    return found


def used() -> set[str]:
    """The codes of the product, as regular expressions."""
    trees = parsed()
    constants, places = constants_of(trees), places_of(trees)
    return {code for tree in trees.values() for code in codes(tree, constants, places)}


def test_codes_are_found_in_every_form_in_which_they_are_given() -> None:
    source = """
def refuse(self, key, code="not-there"): ...
MISSING = "missing-file"
OF_KIND_CODES = {OSError: "wrong-type"}
UserError("…", code="bad-yaml")
UserError("…", code=MISSING)
UserError("…", code=f"unknown-{kind}")
UserError("…", code="no-plan" if early else "no-model")
reading.refuse(key, "two-names")
text, code = "…", "duplicate-key"
code = "bad-value"
answer = {"code": "crashed"}
raise UserError(error.what, code=error.code)
"""
    tree = ast.parse(source)
    found = set(codes(tree, constants_of({"": tree}), places_of({"": tree})))
    assert {code.replace("\\", "") for code in found} == {
        "not-there", "missing-file", "wrong-type", "bad-yaml", "unknown-[a-z]+", "no-plan", "no-model", "two-names",
        "duplicate-key", "bad-value", "crashed",
    }  # fmt: skip


def test_every_code_of_the_product_is_explained() -> None:
    codes = used()
    assert len(codes) > 150
    assert {code for code in codes if not any(re.fullmatch(code, known) for known in EXPLAINED)} == set()


def test_no_code_is_explained_that_no_error_has() -> None:
    codes = used()
    assert {known for known in EXPLAINED if not any(re.fullmatch(code, known) for code in codes)} == set()


def test_a_code_is_explained_once_in_sentences() -> None:
    assert len(EXPLAINED) == len(set(EXPLAINED))
    for code, (cause, cure) in chain(*(codes.items() for codes in THEMES.values())):
        assert cause.endswith("."), code
        assert cure.endswith((".", "`")), code
