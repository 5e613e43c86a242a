"""The table of job states, and what becomes of a job whose process ended."""

from __future__ import annotations

from functools import partial

import pytest

from offmated.jobs.states import (
    AGAIN,
    CRASH_LIMIT,
    FINAL,
    NEXT,
    TAKEN_FROM,
    TRANSITIONS,
    Ending,
    Event,
    Hold,
    JobState,
    StopReason,
    account,
    judge,
)

trainer = partial(Ending, process="trainer")
PLANNING, RUNNING = JobState.PLANNING, JobState.RUNNING


def test_the_table_covers_every_state() -> None:
    assert set(NEXT) == set(JobState)


def test_every_event_happens_somewhere_and_what_an_event_means_is_read_from_the_table() -> None:
    assert set(Event) == {event for events in TRANSITIONS.values() for event in events}
    assert {JobState.PLANNING: JobState.SUBMITTED, JobState.RUNNING: JobState.WAITING} == TAKEN_FROM
    assert all(TRANSITIONS[phase][Event.RETURN] is due for phase, due in TAKEN_FROM.items())
    assert TRANSITIONS[JobState.RUNNING][Event.FINISH] is JobState.DONE


def test_done_failed_and_cancelled_are_final() -> None:
    assert {JobState.DONE, JobState.FAILED, JobState.CANCELLED} == FINAL


def test_a_failed_and_a_cancelled_job_may_be_tried_again_and_a_done_one_not() -> None:
    assert {JobState.FAILED, JobState.CANCELLED} == AGAIN
    assert all(NEXT[state] == frozenset(TAKEN_FROM.values()) for state in AGAIN)
    assert NEXT[JobState.DONE] == frozenset()


@pytest.mark.parametrize(
    ("stop", "code", "words"),
    [
        (None, 0, "the trainer is done"),
        (StopReason.CANCEL, 0, "the trainer is done"),
        (StopReason.CANCEL, -15, "cancelled"),
        (StopReason.CANCEL, 75, "cancelled"),
        (StopReason.SHUTDOWN, 75, "stopped with the daemon"),
        (StopReason.PAUSE, 75, "paused"),
        (StopReason.PAUSE, -15, "paused"),
        (StopReason.SHUTDOWN, -15, "stopped with the daemon"),
        (StopReason.SHUTDOWN, -9, "stopped with the daemon"),
        (StopReason.SHUTDOWN, None, "stopped with the daemon"),
        (StopReason.SHUTDOWN, 1, "the trainer failed with exit code 1"),
        (StopReason.SHUTDOWN, -11, "the trainer was killed by SIGSEGV (signal 11)"),
        (None, -9, "the trainer was killed by SIGKILL (signal 9)"),
        (None, 75, "the trainer was stopped from outside"),
        (None, None, "went down with its worker"),
        (None, 1, "the trainer failed with exit code 1"),
    ],
)
def test_an_ending_is_told_in_words(stop: StopReason | None, code: int | None, words: str) -> None:
    assert account(stop, trainer(exit_code=code)) == words


def test_an_ending_with_a_reason_is_told_with_it() -> None:
    assert (
        account(None, trainer(exit_code=2, error={"what": "No such column."})) == "the trainer failed: No such column."
    )
    assert account(None, trainer(exit_code=None, blameless=True)) == "went down with the daemon or the machine"


def test_every_state_is_reached_from_submitted() -> None:
    reached = {JobState.SUBMITTED}
    while more := set().union(*(NEXT[state] for state in reached)) - reached:
        reached |= more
    assert reached == set(JobState)


def test_every_state_that_is_not_final_may_become_cancelled() -> None:
    assert all(JobState.CANCELLED in NEXT[state] for state in JobState if state not in FINAL)


def test_a_process_takes_a_job_only_from_the_state_before() -> None:
    assert all(phase in NEXT[due] and due in NEXT[phase] for phase, due in TAKEN_FROM.items())


@pytest.mark.parametrize("stop", [None, *StopReason])
@pytest.mark.parametrize("phase", [PLANNING, RUNNING])
@pytest.mark.parametrize("code", [0, 1, 2, 3, 75, 143, -9, -15, None])
@pytest.mark.parametrize("progressed", [False, True])
def test_every_verdict_is_a_way_of_the_table(
    phase: JobState, stop: StopReason | None, code: int | None, progressed: bool
) -> None:
    verdict = judge(phase, stop, 2, trainer(exit_code=code, progressed=progressed))
    assert verdict.state in NEXT[phase]
    assert (verdict.error is not None) == (verdict.state is JobState.FAILED or verdict.hold is not None)


def test_a_run_that_ends_well_is_done_and_a_plan_waits_for_the_gpu() -> None:
    assert judge(RUNNING, None, 0, trainer(exit_code=0)).state is JobState.DONE
    assert judge(PLANNING, None, 0, trainer(exit_code=0)).state is JobState.WAITING


def test_a_run_that_finished_before_its_cancel_arrived_is_done() -> None:
    assert judge(RUNNING, StopReason.CANCEL, 0, trainer(exit_code=0)).state is JobState.DONE


@pytest.mark.parametrize("code", [1, 75, -15, -9, None])
def test_a_cancelled_run_is_cancelled_however_it_ended(code: int | None) -> None:
    assert judge(RUNNING, StopReason.CANCEL, 0, trainer(exit_code=code)).state is JobState.CANCELLED


@pytest.mark.parametrize("code", [75, -15, -9, None])
def test_a_shutdown_sends_the_job_back_and_blames_nobody(code: int | None) -> None:
    verdict = judge(RUNNING, StopReason.SHUTDOWN, 2, trainer(exit_code=code))
    assert (verdict.state, verdict.crashes) == (JobState.WAITING, 2)


@pytest.mark.parametrize("code", [1, 2, 3])
def test_a_persons_error_is_final_and_kept(code: int) -> None:
    error = {"what": "No such column: text."}
    verdict = judge(RUNNING, None, 0, trainer(exit_code=code, error=error))
    assert (verdict.state, verdict.error) == (JobState.FAILED, error)


def test_a_failure_without_words_shows_the_end_of_the_log() -> None:
    verdict = judge(RUNNING, None, 0, trainer(exit_code=1, log=("KeyError: 'x'",)))
    assert verdict.error == {
        "what": "The trainer ended with exit code 1.",
        "numbers": ["KeyError: 'x'"],
        "hint": "the job's log says more",
        "code": "trainer-failed",
        "exit_code": 1,
    }


def test_a_failure_without_words_is_tried_again_from_a_new_checkpoint_and_one_with_words_is_not() -> None:
    verdict = judge(RUNNING, None, 2, trainer(exit_code=1, progressed=True))
    assert (verdict.state, verdict.crashes, verdict.error) == (JobState.WAITING, 0, None)
    assert judge(RUNNING, None, 0, trainer(exit_code=1)).state is JobState.FAILED, "the same once more: it has failed"
    told = trainer(exit_code=1, progressed=True, error={"what": "No such column."})
    assert judge(RUNNING, None, 0, told).state is JobState.FAILED


def test_a_process_that_could_not_write_its_error_down_had_a_full_disk() -> None:
    verdict = judge(RUNNING, None, 0, trainer(exit_code=74))
    assert verdict.error is not None
    assert (verdict.error["code"], verdict.error["exit_code"]) == ("disk-full", 1)


@pytest.mark.parametrize("phase", [PLANNING, RUNNING])
def test_a_full_disk_sends_the_job_back_to_wait_for_room_and_is_nobodys_fault(phase: JobState) -> None:
    error = {"what": "The disk has no room.", "code": "disk-full"}
    for ending in (trainer(exit_code=1, error=error), trainer(exit_code=74)):
        verdict = judge(phase, None, 2, ending)
        assert (verdict.state, verdict.hold, verdict.crashes) == (TAKEN_FROM[phase], Hold.NO_ROOM, 2)
        assert judge(phase, StopReason.CANCEL, 2, ending).state is JobState.CANCELLED
    assert judge(phase, None, 2, trainer(exit_code=1)).hold is None


@pytest.mark.parametrize("phase", [PLANNING, RUNNING])
def test_a_hub_that_is_not_reached_sends_the_job_back_to_wait_for_it_and_is_nobodys_fault(phase: JobState) -> None:
    ending = trainer(exit_code=1, error={"what": "The hub cannot be reached.", "code": "hub-not-reached"})
    verdict = judge(phase, None, 2, ending)
    assert (verdict.state, verdict.hold, verdict.crashes) == (TAKEN_FROM[phase], Hold.NO_HUB, 2)
    assert judge(phase, StopReason.CANCEL, 2, ending).state is JobState.CANCELLED


def test_a_death_sends_the_job_back_until_the_limit() -> None:
    crashes, states = 0, []
    for _ in range(CRASH_LIMIT):
        verdict = judge(RUNNING, None, crashes, trainer(exit_code=-9))
        crashes = verdict.crashes
        states.append(verdict.state)
    assert states == [JobState.WAITING, JobState.WAITING, JobState.FAILED]
    assert verdict.error is not None
    assert verdict.error["what"] == "The trainer died 3 times without a new checkpoint."
    assert verdict.error["numbers"] == ["the last time: the trainer was killed by SIGKILL (signal 9)"]


def test_a_new_checkpoint_forgets_earlier_deaths() -> None:
    verdict = judge(RUNNING, None, 2, trainer(exit_code=-9, progressed=True))
    assert (verdict.state, verdict.crashes) == (JobState.WAITING, 1)


def test_a_job_that_went_down_with_the_machine_is_not_blamed() -> None:
    verdict = judge(RUNNING, None, 2, trainer(exit_code=None, blameless=True))
    assert (verdict.state, verdict.crashes) == (JobState.WAITING, 2)


def test_a_planner_that_died_plans_again() -> None:
    assert judge(PLANNING, None, 0, trainer(exit_code=-11)).state is JobState.SUBMITTED
