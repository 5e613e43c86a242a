"""The hours in which a job may use the GPU: "23:00-07:00 mon-fri Europe/Berlin"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from planner.keys.source import SWITCHED_OFF, Mistake, Source, shown

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_KEYS = ("window", "days", "timezone")
_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)-([01]?\d|2[0-4]):([0-5]\d)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span of time, from `opens` to `closes`, in seconds since 1970 (Unix time)."""

    opens: float
    closes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The hours of the day in which a job may use the GPU, in local time.

    `begin` and `end`: minutes after midnight. A window whose `end` is not after its `begin` ends on the next day.
    `days`: the days on which it begins, 0 for Monday. `timezone`: a name such as Europe/Berlin; None: this machine's.
    `Window.parse(str(w)) == w`.
    """

    begin: int
    end: int
    days: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6)
    timezone: str | None = None

    @classmethod
    def parse(cls, text: str) -> Window:
        """Return the window in a text such as "23:00-07:00 mon-fri Europe/Berlin": hours, then optional days and an
        optional time zone. Raises ValueError that says what is wrong."""
        hours, *more = text.split()[:4] or [""]
        clock = _CLOCK.fullmatch(hours)
        if clock is None:
            raise ValueError(f"{shown(hours or text)} is not like 23:00-07:00")
        begin, end = int(clock[1]) * 60 + int(clock[2]), int(clock[3]) * 60 + int(clock[4])
        if end > 24 * 60:
            raise ValueError(f"{hours}: a day ends at 24:00")
        if begin == end % (24 * 60):
            raise ValueError(f"{hours} is a whole day; leave the window out, or write 00:00-23:59")
        days: tuple[str, ...] = DAYS
        timezone = None
        if more and more[0].split(",")[0].split("-")[0].lower() in DAYS:
            days = _days(more.pop(0))
        if more:
            timezone = _timezone(more.pop(0))
        if more:
            raise ValueError(f"{shown(' '.join(more))} is too much; a window is hours, days and a time zone")
        return cls(begin=begin, end=end, days=tuple(map(DAYS.index, days)), timezone=timezone)

    @classmethod
    def of(cls, value: object) -> Window:
        """Return the window that a job file's value describes: a text (see `parse`), or a mapping with `window`, `days`
        and `timezone`. Raises ValueError."""
        if isinstance(value, str):
            return cls.parse(value)
        if not isinstance(value, Mapping) or "window" not in value:
            raise ValueError('it must be like 23:00-07:00, or a mapping with "window", "days" and "timezone"')
        if unknown := [str(key) for key in value if key not in _KEYS]:
            raise ValueError(f"unknown key {unknown[0]}; there are {', '.join(_KEYS)}")
        days = value.get("days")
        named = ",".join(map(str, days)) if isinstance(days, list) else days
        words = [value["window"], named, value.get("timezone")]
        return cls.parse(" ".join(str(word).replace(" ", "") for word in words if word is not None))

    def __str__(self) -> str:
        hours = f"{self.begin // 60:02}:{self.begin % 60:02}-{self.end // 60:02}:{self.end % 60:02}"
        days = ",".join(DAYS[day] for day in self.days) if len(self.days) < len(DAYS) else None
        return " ".join(filter(None, (hours, days, self.timezone)))

    def span(self, now: float) -> Span:
        """Return the span of time in which the window is open at `now` (Unix time, seconds); else the next such
        span."""
        zone = ZoneInfo(self.timezone) if self.timezone is not None else None
        today = datetime.fromtimestamp(now, zone).date()
        # A night that began yesterday may not be over. Up to a week may pass without a window, and the clock change
        # may skip one.
        for offset in range(-1, 9):
            day = today + timedelta(days=offset)
            if day.weekday() in self.days:
                over_night = timedelta(days=1 if self.end <= self.begin else 0)
                opens, closes = _moment(day, self.begin, zone), _moment(day + over_night, self.end, zone)
                if opens < closes and closes > now:
                    return Span(opens=opens, closes=closes)
        raise AssertionError("a window has a day in every week")

    def opening(self, now: float) -> float:
        """Return when the window is open next, in Unix time (seconds): `now` if it is open now."""
        return max(now, self.span(now).opens)

    def next_opening(self, now: float) -> float:
        """Return when the window next opens after `now`, in Unix time (seconds). If it is open now, this is the opening
        after it has closed."""
        span = self.span(now)
        return span.opens if span.opens > now else self.opening(span.closes)


def check_window(values: dict[str, Any], names: Mapping[str, str], source: Source) -> list[Mistake]:
    """Return the mistakes in `schedule`. Its value in `values` (canonical key -> value) is replaced by the text form of
    its window. `names`: canonical key -> the name that the file uses."""
    if (value := values.get("schedule")) in SWITCHED_OFF:
        values.pop("schedule", None)
        return []
    try:
        values["schedule"] = str(Window.of(value))
    except ValueError as error:
        return [source.mistake(names["schedule"], "bad-value", str(error))]
    return []


def _moment(day: date, minutes: int, zone: ZoneInfo | None) -> float:
    """Return the Unix time (seconds) of `minutes` after midnight. An hour that the clock skips in spring counts as the
    hour after it; of an hour that comes twice in autumn, the first counts."""
    days, minute = divmod(minutes, 24 * 60)
    at = datetime.combine(day + timedelta(days=days), time(minute // 60, minute % 60), zone)
    return at.timestamp()


def _days(text: str) -> tuple[str, ...]:
    chosen = set()
    for part in text.lower().split(","):
        first, dash, last = part.partition("-")
        if first not in DAYS or (dash and last not in DAYS):
            raise ValueError(f"{shown(part)} is not a day; days are {', '.join(DAYS)}, and mon-fri means five of them")
        at, end = DAYS.index(first), DAYS.index(last or first)
        chosen |= {DAYS[(at + step) % 7] for step in range((end - at) % 7 + 1)}
    return tuple(day for day in DAYS if day in chosen)


def _timezone(name: str) -> str:
    try:
        return ZoneInfo(name).key
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"{shown(name)} is no time zone; write it like Europe/Berlin") from None
