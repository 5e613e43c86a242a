"""Bytes handed out to whole tensors."""

from __future__ import annotations

from planner.search.place_transfers import Job, hand_out


def job(name: str, size: int, release: int, deadline: int) -> Job:
    return Job(name=name, size=size, release=release, deadline=deadline)


def test_what_leaves_leaves_at_least_as_early_as_the_amounts() -> None:
    jobs = [job("a", 10, 0, 9), job("b", 10, 0, 9)]
    assert hand_out([5, 0, 6, 9], jobs, eager=True) == {"a": 0, "b": 2}


def test_what_comes_comes_at_most_as_early_as_the_amounts() -> None:
    jobs = [job("a", 10, 0, 9), job("b", 10, 0, 9)]
    assert hand_out([5, 6, 0, 9], jobs, eager=False) == {"a": 1, "b": 3}


def test_the_earliest_deadline_goes_first() -> None:
    jobs = [job("late", 10, 0, 9), job("soon", 10, 0, 2)]
    assert hand_out([10, 10], jobs, eager=True) == {"soon": 0, "late": 1}


def test_what_waited_is_sent_before_what_the_running_block_makes() -> None:
    jobs = [job("new", 10, 1, 3), job("old", 10, 0, 9)]
    assert hand_out([0, 10, 10], jobs, eager=True, new_last=True) == {"old": 1, "new": 2}
    assert hand_out([0, 10, 10], jobs, eager=True) == {"new": 1, "old": 2}


def test_at_its_deadline_a_tensor_moves_in_any_case() -> None:
    assert hand_out([0, 0, 0], [job("a", 10, 0, 1)], eager=False) == {"a": 1}
    assert hand_out([], [job("a", 10, 3, 4)], eager=True) == {"a": 4}


def test_a_solvers_rounding_error_delays_nobody() -> None:
    assert hand_out([9.999999, 0], [job("a", 10, 0, 1)], eager=False) == {"a": 0}
