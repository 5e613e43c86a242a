from __future__ import annotations

import gc
import logging
import os

import pytest

from planner.fast_imports import lasting_imports

with lasting_imports():
    from tests.support import engines, selection
    from tests.support.cuda import session
    from tests.support.cuda.session import pytest_runtest_setup, pytest_runtest_teardown, the_device

__all__ = ["pytest_runtest_setup", "pytest_runtest_teardown"]


def pytest_addoption(parser):
    parser.addoption("--all-instances", action="store_true", help="run all instances of a test with sweep(n)")


def pytest_collection_modifyitems(config, items):
    """Leave out what sweeps leave out, mark what is later, and have the tests of the emulated device run on it."""
    selection.leave_out(config, items, everything=session.device is not None)
    config.stash[selection.COLLECTED] = frozenset(item.nodeid for item in items)
    selection.Selection.read().mark(items)
    session.pytest_collection_modifyitems(config, items)


def pytest_collection_finish():
    """What was imported stays: looking through it for garbage, again and again, takes a twelfth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


for name in [name for name in os.environ if name.startswith("OFFMATE_")]:
    del os.environ[name]  # a person's own daemon, or that of another machine, is not for tests


@pytest.fixture
def make():
    """`engines.build`, whose engines are closed at the end."""
    made = []

    def build(*args, **kwargs):
        pair = engines.build(*args, **kwargs)
        made.append(pair[0])
        return pair

    yield build
    for engine in made:
        engine.close()
    assert engines.own_threads() == []


@pytest.fixture(autouse=True)
def loggers_as_before():
    """A test that turns a log down for good takes from later ones what they look for."""
    before = _turned_down()
    yield
    assert _turned_down() == before


@pytest.fixture(autouse=True)
def nobody_is_a_job(monkeypatch):
    """A test that runs a job's code in its own process would have later ones told what helps a job."""
    monkeypatch.setattr("planner.hub._Speaker.is_a_job", False)


def _turned_down():
    return logging.root.manager.disable, *(logging.getLogger(name).level for name in ("offmated", "planner", "worker"))


@pytest.fixture
def device():
    """The emulated CUDA device (tests/support/cuda), for tests marked `emulated`."""
    return the_device()
