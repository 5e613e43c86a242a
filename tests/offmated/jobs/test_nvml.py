"""What the GPU took for a job: the driver's counter, here one of the test's own, and how it is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from offmated.api.report import report
from offmated.jobs import nvml
from offmated.jobs.migrate import upgrade
from offmated.jobs.states import JobState
from offmated.jobs.store import Store
from offmated.paths import Paths
from planner.run.processes import Process

ME = Process.current()


class Card(ModuleType):
    """A module like pynvml, with one card whose counter, in millijoules, can be set."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.counter: int | None = 5_000_000
        self.asked: list[object] = []

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> object:
        return name

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> int:
        self.asked.append(handle)
        if self.counter is None:
            raise self.NVMLError("Not Supported")
        return self.counter


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    card = Card()
    monkeypatch.setitem(sys.modules, "pynvml", card)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield card


def test_what_the_gpu_took_is_the_difference_of_its_counter(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    before = nvml.energy_joules()
    assert before == 5000.0
    card.counter = 5_250_000
    assert nvml.energy_since(before) == 250.0
    assert nvml.energy_since(None) is None
    card.counter = 10
    assert nvml.energy_since(before) is None, "the driver was loaded anew"
    card.counter = None
    assert nvml.energy_since(before) is nvml.energy_joules() is None, "a card without a counter"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    nvml.energy_joules()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7")
    nvml.energy_joules()
    assert card.asked[-2:] == [1, "GPU-7"]


def test_without_the_package_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.energy_joules() is None


def test_the_report_adds_what_all_attempts_took_and_says_where_one_is_not_known(tmp_path: Path) -> None:
    paths = Paths.at(tmp_path / "state")
    paths.runs.mkdir(parents=True)
    store = Store(f"sqlite:///{paths.database}")
    upgrade(store.engine, paths)

    def folder(number: int) -> Path:
        paths.run_folder(number).mkdir()
        return paths.run_folder(number)

    def run(*took: float | None) -> str:
        row = store.add("job", folder)
        planned = store.take(row.id, JobState.PLANNING, ME)
        assert planned is not None
        store.end(planned, 0)
        for number, energy_j in enumerate(took, 1):
            begun = store.take(row.id, JobState.RUNNING, ME)
            assert begun is not None
            last = number == len(took)
            store.end(begun, 0 if last else None, blameless=not last, energy_j=energy_j)
        return str(report(store, 0.0)["lines"][-1])

    assert "; 0.5 kWh on the GPU; " in run(1_440_000.0, 360_000.0)
    assert "; at least 0.1 kWh on the GPU; " in run(None, 360_000.0)
    assert "kWh" not in run(None)
