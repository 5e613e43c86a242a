"""A part of the crash matrix; `python -m benchmarks.crashes` has all of it. Some tests take seconds: they start a
daemon, its broker and its workers."""

from __future__ import annotations

from tests.support.crashes import LAST_SAVED, STATES, Trial, cut_power, kill_while_seven_are_there, trial_house
from tests.support.disks import small_disk


def test_jobs_in_seven_states_go_on_after_a_power_loss_that_tore_files() -> None:
    with small_disk(2**20) as disk, trial_house(real=False) as home:
        trial = Trial(home, real=False)
        kill_while_seven_are_there(trial, cut_power, disk)
        trial.check()
        told = {state: trial.told(state) for state in STATES if state in trial.jobs}
        hurt = {"running": f"from step {LAST_SAVED}"}
        assert told == {state: hurt.get(state, "as if nothing") for state in told}
        assert len(told) == 7
