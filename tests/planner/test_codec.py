"""Values and their JSON form."""

from __future__ import annotations

import json

import pytest

from planner.codec import from_json, to_json
from planner.errors import Exit, UserError
from planner.schedule.chain import Chain, Tensor
from planner.schedule.plan import Plan
from planner.units import format_bytes, format_seconds, parse_bytes
from tests.support.chains import chain, mixed_plan


@pytest.mark.parametrize("value", [chain(), chain(tied=True), mixed_plan(3)])
def test_json_gives_the_value_back(value):
    assert from_json(type(value), json.loads(json.dumps(to_json(value)))) == value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"elements": -1}, r"\$: Tensor.elements is -1"),
        ({"elements": float("nan")}, r"\$.elements: expected int"),
        ({"elements": True}, r"\$.elements: expected int, got True"),
        ({"colour": 1}, r"\$.colour: unknown field; known are name, elements"),
        ({"name": None}, r"\$.name: expected str, got None"),
    ],
)
def test_wrong_data_names_the_field(change, message):
    data = to_json(chain().blocks[1].tensors[0])
    assert isinstance(data, dict)
    with pytest.raises(ValueError, match=message):
        from_json(Tensor, {**data, **change})


def test_a_wrong_field_deep_inside_is_named_by_its_path():
    data = json.loads(json.dumps(to_json(chain())))
    data["blocks"][2]["options"][1]["forward_s"] = "soon"
    with pytest.raises(ValueError, match=r"\$\.blocks\[2\]\.options\[1\]\.forward_s: expected float, got 'soon'"):
        from_json(Chain, data)


def test_a_missing_field_is_named():
    with pytest.raises(ValueError, match=r"\$\.stages: missing"):
        from_json(Plan, {"options": [], "resident": []})


@pytest.mark.parametrize(("text", "count"), [("10GiB", 10 * 2**30), ("500 MB", 500 * 10**6), ("1.5k", 1500), (7, 7)])
def test_sizes_are_read(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["ten", "-1", "1.2.3GB", "5 apples", -1, True])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError):
        parse_bytes(text)


def test_sizes_are_never_understated():
    assert format_bytes(2**30 + 1) == "1.1 GiB"
    assert format_bytes(1023) == "1023 B"


def test_seconds_are_written_as_people_say_them():
    assert [format_seconds(s) for s in (0.00001, 0.0123, 3.4, 7500)] == ["10 µs", "12.3 ms", "3.4 s", "2 h 05 min"]


def test_an_error_says_what_the_numbers_and_what_to_type():
    error = UserError(
        "No schedule fits this memory budget.",
        code="budget-too-small",
        exit_code=Exit.DOES_NOT_FIT,
        numbers=("budget 6.0 GiB, least possible 7.4 GiB",),
        hint="offmate submit job.yaml --gpu-budget 8GiB",
    )
    assert str(error) == (
        "No schedule fits this memory budget.\n"
        "  budget 6.0 GiB, least possible 7.4 GiB\n"
        "  hint: offmate submit job.yaml --gpu-budget 8GiB   [budget-too-small]"
    )
