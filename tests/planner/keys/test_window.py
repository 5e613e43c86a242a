"""Night windows by a clock of the test's own: midnight, days, and the two nights on which clocks are set."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.keys.window import DAYS, Span, Window

HOUR_S = 3600.0
BERLIN = "Europe/Berlin"


def at(text: str, zone: str = BERLIN) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


def night(text: str, now: str) -> Span:
    return Window.parse(f"{text} {BERLIN}").span(at(now))


@pytest.mark.parametrize(
    ("window", "now", "opens", "closes"),
    [
        ("23:00-07:00", "2026-06-10 22:00", "2026-06-10 23:00", "2026-06-11 07:00"),
        ("23:00-07:00", "2026-06-10 23:00", "2026-06-10 23:00", "2026-06-11 07:00"),
        ("23:00-07:00", "2026-06-11 06:59", "2026-06-10 23:00", "2026-06-11 07:00"),
        ("23:00-07:00", "2026-06-11 07:00", "2026-06-11 23:00", "2026-06-12 07:00"),
        ("09:00-17:30", "2026-06-10 12:00", "2026-06-10 09:00", "2026-06-10 17:30"),
        ("18:00-24:00", "2026-06-10 12:00", "2026-06-10 18:00", "2026-06-11 00:00"),
        ("18:00-00:00", "2026-06-10 12:00", "2026-06-10 18:00", "2026-06-11 00:00"),
        # 2026-06-12 is a Friday: its night goes on into Saturday, and the next begins on Monday.
        ("23:00-07:00 mon-fri", "2026-06-13 03:00", "2026-06-12 23:00", "2026-06-13 07:00"),
        ("23:00-07:00 mon-fri", "2026-06-13 07:00", "2026-06-15 23:00", "2026-06-16 07:00"),
        ("10:00-20:00 sat,sun", "2026-06-15 09:00", "2026-06-20 10:00", "2026-06-20 20:00"),
        ("10:00-20:00 wed", "2026-06-10 20:00", "2026-06-17 10:00", "2026-06-17 20:00"),
    ],
)
def test_a_window_is_the_open_one_else_the_next(window: str, now: str, opens: str, closes: str) -> None:
    assert night(window, now) == Span(opens=at(opens), closes=at(closes))


@pytest.mark.parametrize(
    ("window", "evening", "hours"),
    [
        ("23:00-07:00", "2026-03-28 20:00", 7),
        ("23:00-07:00", "2026-10-24 20:00", 9),
        ("23:00-07:00", "2026-06-10 20:00", 8),
        ("02:30-07:00", "2026-03-28 20:00", 3.5),  # 02:30 is left out that night: what it would be is 03:30
        ("00:00-02:30", "2026-10-24 20:00", 2.5),  # there are two: the first is not too late
    ],
)
def test_a_night_on_which_clocks_are_set_ends_when_the_wall_says(window: str, evening: str, hours: float) -> None:
    found = night(window, evening)
    assert found.closes - found.opens == hours * HOUR_S


def test_a_window_that_the_clock_leaves_out_is_that_of_the_next_day() -> None:
    assert night("02:10-02:50", "2026-03-28 20:00").opens < at("2026-03-30 00:00")


def test_without_a_time_zone_it_is_the_machines(machine_in_sydney: None) -> None:
    assert Window.parse("23:00-07:00").span(at("2026-06-10 12:00", "Australia/Sydney")) == Span(
        opens=at("2026-06-10 23:00", "Australia/Sydney"), closes=at("2026-06-11 07:00", "Australia/Sydney")
    )


@pytest.fixture
def machine_in_sydney() -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = "Australia/Sydney"
    time.tzset()
    yield
    os.environ.pop("TZ") if before is None else os.environ.update(TZ=before)
    time.tzset()


def test_the_next_opening_is_never_the_one_that_is_open() -> None:
    window = Window.parse(f"23:00-07:00 {BERLIN}")
    assert window.next_opening(at("2026-06-10 23:30")) == at("2026-06-11 23:00")
    assert window.next_opening(at("2026-06-10 22:30")) == at("2026-06-10 23:00")
    assert window.opening(at("2026-06-10 23:30")) == at("2026-06-10 23:30")
    assert window.opening(at("2026-06-10 22:30")) == at("2026-06-10 23:00")


minutes = st.integers(0, 24 * 60 - 1)


@given(
    begin=minutes,
    end=minutes,
    days=st.sets(st.integers(0, 6), min_size=1).map(sorted).map(tuple),
    zone=st.sampled_from([None, BERLIN, "America/St_Johns", "Asia/Kathmandu"]),
    now=st.floats(1.7e9, 1.9e9),
)
def test_every_window_is_read_as_it_is_written_and_is_never_over(
    begin: int, end: int, days: tuple[int, ...], zone: str | None, now: float
) -> None:
    if begin == end:
        return
    window = Window(begin=begin, end=end, days=days, timezone=zone)
    assert Window.parse(str(window)) == window
    span = window.span(now)
    assert span.closes > max(now, span.opens)
    assert span.opens <= now + 9 * 24 * HOUR_S
    assert window.next_opening(now) > now


def test_a_mapping_says_the_same_as_a_text() -> None:
    said = {"window": "23:00-07:00", "days": ["mon", "tue"], "timezone": BERLIN}
    assert Window.of(said) == Window.of(f"23:00-07:00 mon,tue {BERLIN}") == Window.of({**said, "days": "mon-tue"})
    assert Window.of("22:00-06:00 fri-mon").days == (0, 4, 5, 6)
    assert len(Window.of({"window": "22:00-06:00"}).days) == len(DAYS)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("nights", '"nights" is not like 23:00-07:00'),
        ("25:00-07:00", "is not like"),
        ("23:00-24:30", "ends at 24:00"),
        ("07:00-07:00", "a whole day"),
        ("00:00-24:00", "a whole day"),
        ("23:00-07:00 mon-foo", '"mon-foo" is not a day'),
        ("23:00-07:00 Europe/Paradise", "no time zone"),
        ("23:00-07:00 mon UTC more", "too much"),
        ({"days": "mon"}, "it must be like"),
        (3, "it must be like"),
        ("", "is not like"),
        ({"window": "23:00-07:00", "day": "mon"}, "unknown key day"),
        ("23:00-07:00 ../etc/passwd", "no time zone"),
    ],
)
def test_what_is_no_window_is_said(value: object, why: str) -> None:
    with pytest.raises(ValueError) as caught:
        Window.of(value)
    assert why in str(caught.value)
