"""When jobs begin and end: a queue played through by hand."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offmated.jobs.queue_forecast import MOST_NIGHTS, Expected, Work, forecast
from planner.keys.window import Span, Window

H = 3600.0
NIGHT = Window.parse("23:00-07:00 UTC")
MORNING = Window.parse("05:00-09:00 UTC")
NOON = datetime(2026, 6, 10, 12, tzinfo=UTC).timestamp()
TONIGHT = NOON + 11 * H


def test_jobs_follow_one_another() -> None:
    queue = [Work(id=7, left_s=H, running=True), Work(id=3, left_s=2 * H), Work(id=5, left_s=H)]
    assert forecast(queue, NOON) == {
        7: Expected(starts_at=NOON, ends_at=NOON + H),
        3: Expected(starts_at=NOON + H, ends_at=NOON + 3 * H),
        5: Expected(starts_at=NOON + 3 * H, ends_at=NOON + 4 * H),
    }


def test_the_job_that_runs_goes_on_whoever_came_before_it() -> None:
    found = forecast([Work(id=1, left_s=H), Work(id=2, left_s=H, running=True)], NOON)
    assert (found[2].ends_at, found[1].starts_at) == (NOON + H, NOON + H)


def test_a_job_that_begins_later_lets_others_go_before_it_and_waits_for_who_has_begun() -> None:
    queue = [Work(id=1, left_s=H, begin_at=NOON + H), Work(id=2, left_s=3 * H), Work(id=3, left_s=H)]
    found = forecast(queue, NOON)
    assert [found[number].starts_at for number in (2, 1, 3)] == [NOON, NOON + 3 * H, NOON + 4 * H]


def test_a_job_after_another_comes_when_that_is_done() -> None:
    found = forecast([Work(id=1, left_s=H, after=2), Work(id=2, left_s=H), Work(id=3, left_s=H)], NOON)
    assert [found[number].starts_at for number in (2, 1, 3)] == [NOON, NOON + H, NOON + 2 * H]


def test_what_is_held_is_left_out_and_behind_what_is_not_known_nothing_is() -> None:
    queue = [Work(id=1, left_s=H, blocked=True), Work(id=2, left_s=None), Work(id=3, left_s=H)]
    assert forecast(queue, NOON) == {2: Expected(starts_at=NOON)}


def test_a_job_is_done_in_one_night_where_it_has_room_before_the_last_save() -> None:
    (fits,) = forecast([Work(id=1, left_s=7.5 * H, stop_s=0.5 * H, window=NIGHT)], NOON).values()
    assert fits == Expected(starts_at=TONIGHT, ends_at=TONIGHT + 7.5 * H, nights=1)


def test_a_long_job_takes_several_nights_and_days_are_for_others() -> None:
    long, day = Work(id=1, left_s=20 * H, stop_s=H, window=NIGHT), Work(id=2, left_s=10 * H)
    found = forecast([long, day], TONIGHT)
    # 7 h a night until the save; the other job has the GPU from 6:00 to 16:00 of the first day.
    assert found[1] == Expected(starts_at=TONIGHT, ends_at=TONIGHT + 48 * H + 6 * H, nights=3)
    assert found[2] == Expected(starts_at=TONIGHT + 7 * H, ends_at=TONIGHT + 17 * H)


def test_two_windows_that_overlap_are_one_after_the_other() -> None:
    found = forecast([Work(id=1, left_s=7 * H, window=NIGHT), Work(id=2, left_s=H, window=MORNING)], NOON)
    assert found[1].ends_at == TONIGHT + 7 * H == found[2].starts_at


def test_a_window_without_room_for_a_step_promises_nothing() -> None:
    assert forecast([Work(id=1, left_s=H, stop_s=9 * H, window=NIGHT)], NOON)[1].ends_at is None


def test_a_job_that_runs_outside_its_window_goes_on_in_the_next() -> None:
    (found,) = forecast([Work(id=1, left_s=H, window=NIGHT, running=True)], NOON).values()
    assert (found.starts_at, found.ends_at) == (TONIGHT, TONIGHT + H)


def test_of_a_job_of_more_nights_than_anybody_plans_just_that_is_said_and_few_windows_are_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[float] = []
    span = Window.span

    def look(window: Window, now: float) -> Span:
        looked.append(now)
        return span(window, now)

    monkeypatch.setattr(Window, "span", look)
    queue = [Work(id=n, left_s=1e9, stop_s=60, window=NIGHT) for n in range(49)] + [Work(id=49, left_s=H)]
    found = forecast(queue, NOON)
    assert found == {0: Expected(starts_at=TONIGHT, nights=MOST_NIGHTS), 49: Expected(starts_at=NOON, ends_at=NOON + H)}
    assert len(looked) < 5 * MOST_NIGHTS


@given(
    st.lists(
        st.builds(
            Work,
            id=st.just(0),
            left_s=st.floats(60, 40 * H),
            stop_s=st.floats(0, H),
            window=st.sampled_from([None, NIGHT, MORNING]),
            begin_at=st.floats(NOON - H, NOON + 30 * H),
        ),
        max_size=6,
    )
)
def test_everything_that_may_begin_ends_and_never_before_it_could(works: list[Work]) -> None:
    queue = [
        Work(id=n, left_s=w.left_s, stop_s=w.stop_s, window=w.window, begin_at=w.begin_at) for n, w in enumerate(works)
    ]
    found = forecast(queue, NOON)
    total = 0.0
    for work in queue:
        one = found[work.id]
        assert one.starts_at is not None and one.ends_at is not None and work.left_s is not None
        assert one.starts_at >= max(NOON, work.begin_at)
        assert one.ends_at - one.starts_at >= work.left_s - 1
        assert (one.nights > 0) == (work.window is not None)
        total += work.left_s
    if queue:
        assert max(one.ends_at or 0 for one in found.values()) >= NOON + total - 1, "one GPU works on one at a time"


@pytest.mark.parametrize("count", [50])
def test_a_long_queue_is_foretold_at_once(count: int) -> None:
    found = forecast([Work(id=n, left_s=3 * H, stop_s=60, window=NIGHT) for n in range(count)], NOON)
    assert len(found) == count
