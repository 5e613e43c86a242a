"""Reading the YAML of a job: what is refused before it is built, and how wrong values are shown."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import Exit, UserError
from planner.job.schema import CANONICAL, Job
from planner.keys.source import (
    DEEPEST,
    MOST_CHARACTERS,
    MOST_MISTAKES,
    MOST_VALUES,
    SHOWN_LENGTH,
    read_text,
    read_yaml,
    shown,
)

ALIASES = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join(10 * [f'*a{i - 1}'])}]\n" for i in range(1, 9)
)  # 301 bytes were enough for 579 MiB and 106 s
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40))


def refusal(text: str) -> UserError:
    with pytest.raises(UserError) as caught:
        read_yaml(text, "job.yaml")
    assert caught.value.exit_code is Exit.USAGE
    return caught.value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ALIASES, f"more than {MOST_VALUES:,} values (line 4)"),
        (MERGES, f"more than {MOST_VALUES:,} values (line 11)"),
        (f"a: &a {2000 * 'x'}\nb: [{2000 * '*a,'}]", "aliases that stand for more than 262,144 characters (line 2)"),
        ("".join(f"key{i}: 1\n" for i in range(15_000)), f"more than {MOST_VALUES:,} values (line 5000)"),
        ("a: " + 100_000 * "[", f"lists and mappings more than {DEEPEST} deep (line 1)"),
        ("a: " + 50_000 * "{? ", f"lists and mappings more than {DEEPEST} deep (line 1)"),
        ("a: 1\n#" + MOST_CHARACTERS * "x", "is too long for a job file"),
    ],
)
def test_what_would_be_too_much_is_refused_before_it_is_built(text: str, words: str) -> None:
    tracemalloc.start()
    error = refusal(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (error.code, words in error.what) == ("file-too-long", True), str(error)
    assert peak < 50 * 2**20


def test_aliases_and_merges_within_reason_are_read() -> None:
    source = read_yaml("base: &b {x: 1, y: [1]}\nother: {<<: *b, x: 2}\nlist: [*b, *b]\n", "job.yaml")
    assert source.values["other"] == {"x": 2, "y": [1]}
    assert source.values["list"] == 2 * [{"x": 1, "y": [1]}]
    assert source.lines == {"base": 1, "other": 2, "list": 3, "list[0]": 1, "list[1]": 1}  # where they are written


def test_a_file_as_large_as_it_may_be_is_read() -> None:
    head = "a: "
    assert read_yaml(head + (MOST_CHARACTERS - len(head)) * "x", "job.yaml").values["a"].endswith("xx")
    many = [1] * (MOST_VALUES - 3)  # the mapping, its key, and the list are the others
    assert read_yaml(json.dumps({"dataset": many}), "job.yaml").values["dataset"] == many
    deep = (DEEPEST - 2) * "[" + "1" + (DEEPEST - 2) * "]"
    assert read_yaml(f"a: {deep}", "job.yaml").values["a"]
    assert refusal(f"a: [{deep}]").code == "file-too-long"


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: *a}", "a: &a {<<: *a}"])
def test_an_alias_is_no_part_of_what_it_stands_for(text: str) -> None:
    assert refusal(text).what == "job.yaml: *a stands for something that it is a part of (line 1)"


@pytest.mark.parametrize(
    "number",
    [
        "0x" + 200_000 * "f",
        "1" + 100_000 * ":1",
        "0b" + 100_000 * "1",
        "0" + 200_000 * "7",
        200_000 * "9",
        "1." + 200_000 * "9",
        "-1" + 60 * ":59",
    ],
)
def test_a_number_nobody_means_is_none(number: str) -> None:
    error = refusal(f"seed: {number}")
    assert (error.code, error.what.endswith(("is no int (line 1)", "is no float (line 1)"))) == ("bad-yaml", True)
    assert len(error.what) < 2 * SHOWN_LENGTH


@pytest.mark.parametrize("text", ['run_name: "\\ud800"', '"\\udfff": 1', 'a: ["x\\uDC00y"]', 'a: {b: "\\ud800 "}'])
def test_half_a_character_is_no_text(text: str) -> None:
    assert refusal(text).what.endswith("is half a character (line 1)")


def test_a_character_in_two_halves_as_json_writes_it_is_read() -> None:
    assert read_yaml(json.dumps({"run_name": "a 😀"}), "job.yaml").values == {"run_name": "a 😀"}


def test_a_file_longer_than_a_job_is_not_read_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    with file.open("wb") as sparse:
        sparse.truncate(2**40)
    with pytest.raises(UserError) as caught:
        read_text(file)
    assert str(caught.value) == (
        "job.yaml is too long for a job file.\n"
        "  it has more than 262,144 characters\n"
        "  hint: give long texts as files: a template, the data   [file-too-long]"
    )


def test_a_file_that_is_not_there_is_told_with_one_of_a_similar_name(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: m")
    with pytest.raises(UserError) as near:
        read_text(tmp_path / "jobb.yml")
    assert near.value.hint == f"did you mean {tmp_path / 'job.yaml'}?"
    for path in (tmp_path / "nothing-like-it", tmp_path / "gone" / "job.yaml", tmp_path):
        with pytest.raises(UserError) as far:
            read_text(path)
        assert far.value.hint == "give the path of a YAML file; `offmate keys` lists its keys"


def test_the_first_mistakes_of_many_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        Job.parse("model: there/is/none\n" + "".join(f"key{i}: 1\n" for i in range(4000)), tmp_path)
    assert caught.value.what == "job.yaml has 4002 mistakes."
    assert len(caught.value.numbers) == MOST_MISTAKES + 1
    assert caught.value.numbers[-1] == f"and {4002 - MOST_MISTAKES:,} more"


def test_a_file_that_is_no_job_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        Job.parse("compute_environment: LOCAL_MACHINE\nmixed_precision: bf16\nnum_machines: 1\n", tmp_path)
    (line,) = caught.value.numbers
    assert "compute_environment: it and 2 more keys are unknown, and there is neither model nor dataset" in line


def test_wrong_values_are_shown_in_part(tmp_path: Path) -> None:
    itself: list[object] = []
    itself.append(itself)
    many: list[object] = [["x"] * 100] * 10_000
    for value in (many, itself, {b"a": 1}, "x" * 10**6, {"a": float("nan")}):
        assert 0 < len(shown(value)) <= SHOWN_LENGTH + 1
    assert shown([1, "a", None, True]) == '[1, "a", null, true]'


def test_what_a_mistake_quotes_does_not_steer_a_terminal(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        Job.parse('model: "/\\e[31m"\n"\\e[2J": 1\n', tmp_path)
    assert "\x1b" not in str(caught.value)


HOSTILE = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        [
            "~",
            "null",
            "[]",
            "{}",
            "yes",
            "-1",
            "1e999",
            ".nan",
            "-.inf",
            "0x1F",
            "1:2:3",
            "9" * 99,
            "[1, [2]]",
            "*a",
            "'\\0'",
            '"\\0"',
            '"\\ud83d"',
            '"\\e[0m"',
            "&a [1]",
            "!!binary aGk=",
            "!!set {a, b}",
            "!!omap [a: 1]",
            "!!timestamp 2024-01-01",
            "{2024: {<<: {a: 1}}}",
            "[[[[]]]]",
            "~nobody/x",
            "/" + "x" * 5000,
            ".",
            "/dev/null",
            "{path: 1}",
            "[{path: /, split: [1]}]",
            "[{role: 1}]",
        ]
    ),
)
LINES = st.lists(st.tuples(st.one_of(st.sampled_from(sorted(CANONICAL)), st.text(max_size=8)), HOSTILE), max_size=8)


@settings(max_examples=300, deadline=None)
@given(lines=LINES)
def test_whatever_is_handed_in_is_a_job_or_a_persons_error(lines: list[tuple[str, str]]) -> None:
    text = "".join(f"{key}: {value}\n" for key, value in lines)
    try:
        Job.parse(text, Path("/nowhere"))
    except UserError as error:
        assert error.exit_code is Exit.USAGE
        assert len(str(error).encode()) < MOST_CHARACTERS  # raises for what can be neither stored nor sent


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("1:30", "90"),
        ("-1:30", "-90"),
        ("1:30.5", "90.5"),
        ("190:20:30", "685230"),
        ("010", "8"),
        ("-0777", "-511"),
        ("0_10", "8"),
    ],
)
def test_a_number_that_yaml_reads_as_another_is_refused_with_its_key(written: str, read: str) -> None:
    for text, key in (
        (f"model: m\nmax_steps: {written}\n", "max_steps"),
        (f"model: m\nlist:\n  - {written}\n", "list"),
        (f"base: &b {{x: {written}}}\nother: {{<<: *b}}", "base"),
    ):
        with pytest.raises(UserError) as caught:
            read_yaml(text, "job.yaml")
        line = 1 if key == "base" else text.count("\n")
        said = f"YAML reads {written} as {read}; write the number that is meant, or a text in quotes"
        assert caught.value.numbers == (f"line {line}: {key}: {said}",)
        assert (caught.value.code, caught.value.exit_code) == ("unclear-number", Exit.USAGE)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("0", 0),
        ("00", 0),
        ("07", 7),
        ("-5", -5),
        ("1_000", 1000),
        ("0x10", 16),
        ("0b11", 3),
        ("1e3", 1000.0),
        ("5e-5", 5e-5),
        ("09.5", 9.5),
        ('"010"', "010"),
        ('"1:30"', "1:30"),
        ("08", "08"),
        ("0o10", "0o10"),
        ("23:00-07:00", "23:00-07:00"),
        ("2026-11-27", "2026-11-27"),
        ("1,000", "1,000"),
        ("y", "y"),
        ("n", "n"),
        ("yes", True),
        ("off", False),
        ("~", None),
        (".inf", float("inf")),
    ],
)
def test_what_has_one_reading_is_read_as_transformers_files_are(written: str, value: object) -> None:
    assert read_yaml(f"key: {written}\n", "job.yaml").values == {"key": value}


def test_values_are_shown_as_a_file_has_them() -> None:
    values = (True, False, None, "42", 42, 1e-5, float("inf"), float("-inf"), float("nan"), ["a", None], "é\n\u3000")
    told = ["true", "false", "null", '"42"', "42", "1e-05", ".inf", "-.inf", ".nan", '["a", null]', '"é\\n\u3000"']
    assert [shown(value) for value in values] == told
    assert shown("a" * 300, 80) == '"' + "a" * 79 + "…"


def test_a_value_that_yaml_made_of_another_is_shown_as_both() -> None:
    source = read_yaml("a: no\nb: 1e3\nc: 1.10\nd: 42\ne: text\nf: 'no'\ng:\nh: 1_000\n", "job.yaml")
    told = [source.shown(key, value) for key, value in source.values.items()]
    assert told == [
        "no, which YAML reads as false",
        "1e3, which YAML reads as 1000.0",
        "1.10, which YAML reads as 1.1",
        "42",
        '"text"',
        '"no"',
        "null",
        "1_000, which YAML reads as 1000",
    ]
    assert source.shown("a", "off") == '"off"', "what became of it is not what the file has"
