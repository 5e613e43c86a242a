"""`offmate explain`: what an error's code means."""

from __future__ import annotations

import json

from click.testing import CliRunner, Result

from offmated.cli import main
from planner.error_codes import THEMES
from planner.errors import Exit


def explain(*words: str) -> Result:
    return CliRunner().invoke(main, ["explain", *words])


def test_every_code_is_explained_without_marks_of_links() -> None:
    for codes in THEMES.values():
        for code in codes:
            said = explain(code)
            assert said.exit_code == 0 and said.stdout.startswith(f"{code}\n") and "](" not in said.stdout, code


def test_a_code_may_stand_in_brackets_as_errors_print_it() -> None:
    assert explain("[hub-gated]").stdout == explain("hub-gated").stdout
    told = json.loads(explain("[hub-gated]", "--json").stdout)
    assert told["code"] == "hub-gated" and "accepted" in told["cause"] and told["cure"]


def test_another_word_is_refused_with_the_nearest_code() -> None:
    said = explain("budget-to-small")
    assert said.exit_code == Exit.USAGE and "did you mean budget-too-small?" in said.stderr
    assert "in brackets" in explain("zzz").stderr
