"""Streams and events beside what CUDA documents, and moods."""

from __future__ import annotations

import itertools
import threading

import pytest

from tests.support.cuda.streams import Event, Mood, Queues, Stream


class Log:
    """Two streams, whose work is letters."""

    def __init__(self, mood: Mood) -> None:
        self.waits: list[str] = []
        self.queues = Queues(lambda what, seen: self.waits.append(what))
        self.queues.set_mood(mood)
        self.main, self.side = self.queues.default, self.queues.new_stream()
        self.ran = ""

    def give(self, stream: Stream, letter: str, name: str | None = None) -> None:
        def run() -> None:
            self.ran += letter

        self.queues.name = name
        self.queues.give(stream, run)
        self.queues.name = None


LATE = Mood(haste=(0.0,))


@pytest.fixture
def log() -> Log:
    return Log(LATE)


def test_work_runs_late_and_in_its_streams_order(log: Log) -> None:
    for letter in "abc":
        log.give(log.main, letter)
    assert log.ran == "" and not log.main.query()
    log.main.synchronize()
    assert log.ran == "abc" and log.main.query()
    assert log.waits == ["Stream.synchronize"]


def test_nothing_orders_two_streams() -> None:
    log = Log(Mood(haste=(0.0, 1.0)))
    log.give(log.main, "a")
    log.give(log.side, "b")
    assert log.ran == "b"
    log.queues.finish()
    assert log.ran == "ba"


@pytest.mark.parametrize("seed", range(8))
def test_an_event_orders_what_was_before_it_and_what_waits_after(seed: int) -> None:
    log = Log(Mood(haste=(0.0, 1.0), seed=seed))
    log.give(log.main, "a")
    event = log.main.record_event()
    log.give(log.main, "b")
    log.side.wait_event(event)
    log.give(log.side, "c")
    assert log.ran == ""
    log.side.synchronize()
    assert log.ran.index("a") < log.ran.index("c")
    log.queues.finish()
    assert sorted(log.ran) == ["a", "b", "c"]


def test_an_event_that_was_never_recorded_holds_nobody_up(log: Log) -> None:
    event = Event(log.queues)
    log.side.wait_event(event)
    log.give(log.side, "a")
    log.give(log.main, "b")
    event.record(log.main)
    event_before = Event(log.queues)
    assert event_before.query() and not event.query()
    event_before.synchronize()
    log.side.synchronize()
    assert "a" in log.ran


def test_recording_again_moves_an_event_for_those_who_wait_afterwards_only() -> None:
    log = Log(Mood(haste=(0.0, 1.0)))
    log.give(log.main, "a")
    event = log.main.record_event()
    log.side.wait_event(event)
    log.give(log.side, "b")
    log.give(log.main, "c")
    event.record(log.main)
    event_passed = Event(log.queues)
    event_passed.record(log.side)
    event_passed.synchronize()
    assert log.ran in ("ab", "acb")
    event.synchronize()
    assert set(log.ran) == set("abc")


def test_synchronizing_an_event_waits_for_its_place_and_what_that_needs() -> None:
    found = set()
    for seed in range(20):
        log = Log(Mood(haste=(0.0,), seed=seed))
        log.give(log.main, "a")
        log.side.wait_event(log.main.record_event())
        log.give(log.side, "b")
        event = log.side.record_event()
        log.give(log.side, "c")
        log.give(log.main, "d")
        event.synchronize()
        assert event.query() and log.ran.index("a") < log.ran.index("b")
        found.add(log.ran)
    assert "ab" in found and len(found) > 1  # what need not run does so now and then


def test_one_stream_waits_for_all_that_another_has_been_given() -> None:
    log = Log(Mood(haste=(0.0, 1.0)))
    log.give(log.main, "a")
    log.side.wait_stream(log.main)
    log.give(log.side, "b")
    log.give(log.main, "c")
    assert log.ran == ""
    log.side.synchronize()
    assert log.ran.index("a") < log.ran.index("b")


def test_events_know_when_they_were_passed(log: Log) -> None:
    start, end = log.main.record_event(), log.main.record_event()
    end.synchronize()
    assert start.elapsed_time(end) >= 0


def test_the_current_stream_is_a_threads_own(log: Log) -> None:
    seen: list[Stream] = []
    with log.queues.on(log.side):
        thread = threading.Thread(target=lambda: seen.append(log.queues.current))
        thread.start()
        thread.join()
        assert log.queues.current is log.side
    assert seen == [log.main] and log.queues.current is log.main


def test_after_an_error_nothing_runs_and_everyone_hears_of_it(log: Log) -> None:
    def fail() -> None:
        raise ValueError("wrong")

    log.queues.give(log.main, fail)
    log.give(log.main, "a")
    with pytest.raises(RuntimeError, match="wrong"):
        log.main.synchronize()
    with pytest.raises(RuntimeError, match="wrong"):
        log.give(log.side, "b")
    assert log.ran == ""
    log.queues.rest()
    log.give(log.main, "c")
    assert log.ran == "c"


def test_held_work_comes_after_all_else_that_can_run() -> None:
    log = Log(Mood(held="slow"))
    log.give(log.main, "a", "slow")
    log.give(log.main, "b")
    log.give(log.side, "c")
    log.side.wait_event(log.main.record_event())
    log.give(log.side, "d")
    assert log.ran == "c"
    log.queues.finish()
    assert log.ran == "cabd"


def test_held_work_comes_right_after_what_it_is_held_for() -> None:
    log = Log(Mood(held="slow", until="quick"))
    log.give(log.main, "a", "slow")
    for letter in "bc":
        log.give(log.side, letter, "quick")
    assert log.ran == "bc"
    log.give(log.side, "d", "next")
    assert log.ran == "bcad"


def test_who_waits_for_held_work_gets_it_when_nobody_else_can_go_on() -> None:
    log = Log(Mood(held="slow"))
    log.give(log.main, "a", "slow")
    log.queues.patience = lambda: log.give(log.side, "b")
    log.main.synchronize()
    assert log.ran == "ba"


def test_moods_have_all_ways_of_early_and_late() -> None:
    drawn = [Mood.drawn(seed) for seed in range(24)]
    ways = set(itertools.product((0.0, 1.0), repeat=3)) - {(1.0, 1.0, 1.0)}
    assert {mood.haste for mood in drawn} > ways
    assert len({m.stumble for m in drawn}) > 1
