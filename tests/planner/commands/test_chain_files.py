"""Chains from JSON files: defaults, and what is said of a file that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.codec import to_json
from planner.commands.chain_files import load_chain
from planner.errors import UserError
from planner.schedule.chain import Block, Chain, Option, Tensor
from tests.support.chains import chain

TENSOR = {"name": "w", "elements": 10}
OPTION = {"name": "keep", "forward_s": 1, "backward_s": 2.5}
MIDDLE = {"tensors": [TENSOR], "input_bytes": 3, "output_bytes": 5, "options": [OPTION]}
SMALL = {"blocks": [{"output_bytes": 3}, MIDDLE, {"name": "head", "input_bytes": 5}]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file.json"


def chain_of(file: Path, data: object) -> Chain:
    file.write_text(json.dumps(data))
    return load_chain(file)


def refusal(file: Path, data: object) -> str:
    """What is said of a chain that is wrong, without the first and the last line."""
    with pytest.raises(UserError) as caught:
        chain_of(file, data)
    assert (caught.value.exit_code, caught.value.code) == (2, "bad-file")
    return caught.value.numbers[0]


def test_the_json_form_of_a_chain_is_read_as_it_is(file: Path) -> None:
    assert chain_of(file, to_json(chain(2, tied=True))) == chain(2, tied=True)


def test_what_a_chain_leaves_out_has_defaults(file: Path) -> None:
    tensor = Tensor(name="w", elements=10, bytes=40, gradient_bytes=40, state_bytes=80)
    assert chain_of(file, SMALL).blocks == (
        Block(
            name="block0",
            kind="block0",
            tensors=(),
            options=(Option(name="keep"),),
            output_bytes=3,
            forward_frame_bytes=3,
            backward_held_bytes=3,
        ),
        Block(
            name="block1",
            kind="block1",
            tensors=(tensor,),
            input_bytes=3,
            output_bytes=5,
            options=(Option(name="keep", forward_s=1.0, backward_s=2.5),),
            forward_held_bytes=3,
            forward_frame_bytes=5,
            backward_held_bytes=5,
            backward_frame_bytes=3,
        ),
        Block(
            name="head", kind="head", tensors=(), options=(Option(name="keep"),), input_bytes=5, forward_held_bytes=5
        ),
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"bytes": 20}, (20, 20, 120)),  # narrower than fp32: a master beside the moments
        ({"bytes": 20, "state_bytes": 80}, (20, 20, 80)),
        ({"trainable": False}, (40, 0, 0)),
        ({"gradient_bytes": 0}, (40, 0, 80)),
    ],
)
def test_bytes_of_a_tensor_follow_from_its_elements(
    given: dict[str, object], expected: tuple[int, ...], file: Path
) -> None:
    data = {"blocks": [{}, {"tensors": [TENSOR | given]}, {}]}
    tensor = chain_of(file, data).blocks[1].tensors[0]
    assert (tensor.bytes, tensor.gradient_bytes, tensor.state_bytes) == expected


def test_the_recipe_of_an_option_is_its_name(file: Path) -> None:
    data = {"blocks": [{}, {"options": [{"name": "recompute"}]}]}
    assert chain_of(file, data).blocks[1].options[0].recipe == "recompute"


def test_numbers_may_be_written_with_exponents(file: Path) -> None:
    assert chain_of(file, {"blocks": [{"output_bytes": 12e9}, {}]}).blocks[0].output_bytes == 12 * 10**9


def damaged(place: str, value: object) -> object:
    """`SMALL` with the value at a place like `blocks.1.options.0.forward_s` replaced."""
    data = json.loads(json.dumps(SMALL))
    *path, last = (int(step) if step.isdigit() else step for step in place.split("."))
    target = data
    for step in path:
        target = target[step]
    target[last] = value
    return data


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("blocks.1.options.0.forward_s", float("nan"), "$.blocks[1].options[0].forward_s is nan; it must be a finite"),
        ("blocks.1.options.0.forward_s", float("inf"), "$.blocks[1].options[0].forward_s is inf; it must be a finite"),
        ("blocks.1.input_bytes", float("nan"), "$.blocks[1].input_bytes is nan; it must be a finite number"),
        ("blocks.1.options.0.backward_s", -0.5, "$.blocks[1].options[0].backward_s is -0.5; it must be zero or more"),
        ("blocks.1.tensors.0.elements", -1, "$.blocks[1].tensors[0].elements is -1; it must be zero or more"),
        ("frame_bytes", 2**70, f"$.frame_bytes is {2**70}; that is more than any machine has"),
        ("blocks.1.tensors.0.elements", 1.5, "$.blocks[1].tensors[0].elements: expected int, got 1.5"),
        ("blocks.1.tensors.0.trainable", 1, "$.blocks[1].tensors[0].trainable: expected bool, got 1"),
        ("blocks.1.tensors.0.size", 1, "$.blocks[1].tensors[0].size: unknown field; known are name, elements, bytes"),
        ("blocks.1.option", [], "$.blocks[1].option: unknown field; known are name, kind, tensors, options"),
        ("budget", 1, "$.budget: unknown field; known are blocks, frame_bytes"),
        ("blocks.1.options", [], "$.blocks[1]: block block1 has no option"),
        ("blocks.1.options", [OPTION, OPTION], "$.blocks[1]: block block1 has two options of one name"),
        ("blocks.1.options", [{"forward_s": 1}], "$.blocks[1].options[0].name: missing"),
        ("blocks.1.tensors", [{"name": "w"}], "$.blocks[1].tensors[0].elements: missing"),
        ("blocks.1.tensors", {"w": 1}, "$.blocks[1].tensors: expected a list, got {'w': 1}"),
        ("blocks.1", "layer", "$.blocks[1]: expected an object, got 'layer'"),
        ("blocks", [MIDDLE], "$: a chain has at least two blocks, this one has 1"),
        ("blocks", 3, "$.blocks: expected a list, got 3"),
    ],
)
def test_an_error_names_the_field_and_what_is_wrong_with_it(place: str, value: object, said: str, file: Path) -> None:
    assert refusal(file, damaged(place, value)).startswith(said)


def test_one_name_is_one_tensor(file: Path) -> None:
    other = MIDDLE | {"tensors": [TENSOR | {"elements": 11}]}
    assert "tensor w has two descriptions" in refusal(file, {"blocks": [MIDDLE, other]})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1, column 2: "),
        ("[]", "$: expected an object, got []"),
        ('{"blocks": [], "blocks": []}', "blocks: the field is there twice in one object"),
        ("[" * 100_000, "its lists and objects are nested too deeply"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused(text: str, said: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        load_chain(file)
    assert caught.value.numbers[0].startswith(said)


def test_a_file_that_cannot_be_read_is_told_with_its_path(file: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_chain(file)
    assert str(caught.value).splitlines()[:2] == [f"Cannot use {file}.", "  No such file or directory"]
    file.write_bytes(b"\xff")
    with pytest.raises(UserError, match="it is not text in UTF-8"):
        load_chain(file)
