"""Power that goes at any time, and stores that would not stand it."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from planner.codec import from_json, to_json
from planner.errors import UserError
from tests.support.stored_states import PIECE, Drive, PowerCut, Training, digest, steps_of, stored
from tests.worker.storage.test_states import STEPS, want
from worker.storage import states as module
from worker.storage.states import StatesOnDisk
from worker.storage.states_record import StatesRecord


class InPlace(StatesOnDisk):
    """Writes the home that the checkpoint names."""

    def _home_to_write(self, k: int) -> int:
        return self._current[k]


class NeverFlushed(StatesOnDisk):
    """Publishes what may be nowhere yet."""

    def flush(self) -> StatesRecord:
        files, self._files = self._files, {}
        record = super().flush()
        self._files = files
        return record


class FlushedLate(NeverFlushed):
    """Flushes when it has been published."""

    def published(self) -> None:
        for file in self._files.values():
            file.flush()
        super().published()


class ReleasedEarly(StatesOnDisk):
    """Writes to the homes of the checkpoint before as soon as the new one is flushed: its publication comes later."""

    def flush(self) -> StatesRecord:
        record = super().flush()
        self.published()
        return record


def trained(folders: Sequence[Path], drive: Drive, kind: type[StatesOnDisk], every: int) -> str:
    """Until the power is cut, or to the end: the digest of the states."""
    found = None if drive.record is None else from_json(StatesRecord, to_json(drive.record))
    states = kind(folders, stored(), piece_elements=PIECE, homes=2, record=found, open_file=drive.open)
    training = Training(states, drive.step if found is not None else 0)
    late: list[tuple[StatesRecord, int]] = []
    for step in steps_of(training, every, STEPS):
        late.append((states.flush(), step))
        if kind is ReleasedEarly and len(late) == 1 and step:
            continue
        record, of = late.pop(0)
        drive.publish(record, of)
        states.published()
    drive.life = -1
    return digest(training.all_states())


def campaign(folder: Path, kind: type[StatesOnDisk], rounds: int, seed: int) -> tuple[int, str | None]:
    """Cuts, and what went wrong."""
    draw, cuts = random.Random(seed), 0
    for number in range(rounds):
        drive, every = Drive(draw), draw.choice((1, 2, 3))
        folders = [folder / f"{number}-{k}" for k in range(draw.choice((1, 2)))]
        while True:
            drive.switch_on(draw.randrange(5, 60 * len(folders)))  # enough, now and then, for a checkpoint
            try:
                if trained(folders, drive, kind, every) != want():
                    return cuts, "other bits"
                break
            except PowerCut:
                cuts += 1
            except UserError as error:
                return cuts, error.code
    return cuts, None


@pytest.fixture
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of folders: those of a drive that is only thought of are there."""
    monkeypatch.setattr(module, "sync", lambda _: None)


@pytest.mark.usefixtures("_no_sync")
def test_power_may_go_at_any_time(tmp_path: Path) -> None:
    cuts, wrong = campaign(tmp_path, StatesOnDisk, int(os.environ.get("OFFMATE_POWER_CUT_ROUNDS", "8")), 1)
    assert wrong is None and cuts > 8


@pytest.mark.usefixtures("_no_sync")
@pytest.mark.parametrize("kind", [InPlace, NeverFlushed, FlushedLate, ReleasedEarly])
def test_a_broken_store_does_not_stand_that(tmp_path: Path, kind: type[StatesOnDisk]) -> None:
    cuts, wrong = campaign(tmp_path, kind, 12, 1)
    assert wrong in ("states-torn", "other bits"), (cuts, wrong)
