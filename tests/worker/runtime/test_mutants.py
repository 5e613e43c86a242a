"""What is not waited for is noticed: a sample of what `python -m tests.support.mutants` asks of each wait of a step."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.support.cuda.device import Device
from tests.support.mutants.changes import mutants
from tests.support.mutants.trial import (
    CASES,
    explanation,
    holds,
    is_noticed,
    noticed_by,
    program_of,
)

pytestmark = pytest.mark.emulated
EACH = 46
"""As many are left out for one that is tried."""


@pytest.fixture(autouse=True, scope="module")
def _little_to_collect() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_whatever_is_held_back_a_step_that_waits_as_it_should_is_plain_pytorchs(device: Device) -> None:
    for number, case in enumerate(CASES):
        mutant = list(mutants(program_of(case)))[7 * number]
        assert not [hold for hold in holds(mutant) if is_noticed(device, case, None, hold)]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: str(CASES[n]))
def test_a_wait_that_is_left_out_or_is_on_another_stream_is_noticed(device: Device, number: int) -> None:
    case = CASES[number]
    for mutant in list(mutants(program_of(case)))[3 * number :: EACH]:
        assert noticed_by(device, case, mutant) or explanation(case, mutant), mutant
