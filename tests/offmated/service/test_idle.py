"""What a daemon does twice a second, while there is nothing to do and while there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import event

from offmated.jobs.states import TAKEN_FROM, JobState, StopReason
from offmated.service import dispatcher as dispatcher_module
from planner.run.processes import Process
from tests.support.desks import Desk, dead_process, desk_at, short_paths


@pytest.fixture
def desk() -> Iterator[Desk]:
    with short_paths() as paths:
        paths.create()
        with desk_at(paths) as desk:
            yield desk


def tick(desk: Desk) -> list[str]:
    """Do what the daemon does, and say which parts that were."""
    parts = desk.dispatcher.parts(desk.store.living())
    for _, do in parts:
        do()
    return [what for what, _ in parts]


def test_with_an_empty_queue_one_question_is_asked(desk: Desk) -> None:
    over = desk.add()
    desk.store.stop(over, StopReason.CANCEL)
    asked: list[str] = []

    def see(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("SELECT"):
            asked.append(statement)

    event.listen(desk.store.engine, "before_cursor_execute", see)
    assert tick(desk) == []
    assert len(asked) == 1


@pytest.mark.parametrize("state", [state for state in JobState if state in {*TAKEN_FROM, *TAKEN_FROM.values()}])
def test_no_job_that_is_not_over_is_left_alone(desk: Desk, state: JobState) -> None:
    number = desk.planned() if state in (JobState.WAITING, JobState.RUNNING) else desk.add()
    if state in TAKEN_FROM:
        assert desk.store.take(number, state, Process(pid=2**22, started=1, boot="none")) is not None
    assert desk.store.living() == {state}
    tick(desk)
    assert desk.store.job(number).owner is None, "its worker is not there: it is taken back"
    tick(desk)
    sent = desk.sent("gpu" if state in (JobState.WAITING, JobState.RUNNING) else "plan")
    assert sent == [number], "it is handed out"


def test_a_job_that_cannot_be_taken_back_at_once_after_the_daemons_death_is_not_blamed_later(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = desk.planned()
    assert desk.store.take(number, JobState.RUNNING, dead_process()) is not None

    def refuse(run: object) -> None:
        raise OSError("not now")

    with monkeypatch.context() as patch:
        patch.setattr(dispatcher_module, "end_leftover", refuse)
        desk.dispatcher.adopt(blameless=True)
    assert desk.store.job(number).owner is not None
    desk.dispatcher.adopt()
    row = desk.store.job(number)
    assert (row.state, row.crashes) == (JobState.WAITING, 0)
    assert row.history[-1]["ending"] == "went down with the daemon or the machine"
