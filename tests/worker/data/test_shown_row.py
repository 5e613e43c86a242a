"""A row as people see it: what is learned stands between marks, also beside a gap."""

from __future__ import annotations

import pytest

from worker.data.shown_row import ShownRow

PIECES = (("asked ", False), ("said", True), (" more", False))


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (15, "asked [said] more"),
        (14, "asked [s] … [id] more"),  # the gap is within what is learned
        (10, "asked …  more"),
        (4, "as … re"),
    ],
)
def test_the_middle_of_a_long_row_is_cut_out_and_no_mark_stands_alone(most: int, expected: str) -> None:
    assert ShownRow(pieces=PIECES, tokens=0, learned=0).marked(most, "[", "]") == expected
