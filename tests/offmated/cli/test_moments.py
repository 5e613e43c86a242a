"""Times as people write them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime

import pytest

from offmated.cli.queue_commands import moment_of


@pytest.fixture(autouse=True)
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("now", "written", "meant"),
    [
        ("2026-11-22 10:00", "23:00", "2026-11-22T23:00+01:00"),
        ("2026-11-22 23:30", "23:00", "2026-11-23T23:00+01:00"),
        ("2026-11-22 23:00", "23:00", "2026-11-23T23:00+01:00"),
        ("2026-11-22 23:00", "6:40", "2026-11-23T06:40+01:00"),
        ("2026-11-22 10:00", "2026-12-24 18:00", "2026-12-24T18:00+01:00"),
        ("2026-11-22 10:00", "2026-12-24", "2026-12-24T00:00+01:00"),
        ("2026-11-22 10:00", "2026-12-24T18:00+00:00", "2026-12-24T19:00+01:00"),
        ("2026-11-22 10:00", "+2h30m", "2026-11-22T12:30+01:00"),
        ("2026-03-28 23:30", "06:00", "2026-03-29T06:00+02:00"),  # an hour is left out that night
        ("2026-03-29 00:00", "+6h", "2026-03-29T07:00+02:00"),
        ("2026-10-24 23:30", "06:00", "2026-10-25T06:00+01:00"),  # and one is there twice
        ("2026-10-25 00:00", "+6h", "2026-10-25T05:00+01:00"),
    ],
)
def test_a_time_is_that_of_the_clock_on_the_wall(now: str, written: str, meant: str) -> None:
    assert moment_of(written, datetime.fromisoformat(now)) == datetime.fromisoformat(meant).timestamp()


@pytest.mark.parametrize("written", ["", "soon", "25:00", "23:60", "+", "+2", "+2x", "2h", "2026-13-01", "-1h"])
def test_what_is_no_time_is_refused(written: str) -> None:
    with pytest.raises(ValueError):
        moment_of(written, datetime(2026, 11, 22))
