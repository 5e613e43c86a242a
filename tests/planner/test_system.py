"""Limits of this process and signals, as far as the system has them. For other systems than Linux see
tests/offmated/cli/test_other_systems.py."""

from __future__ import annotations

import resource
import signal

import pytest

from planner import system


def test_a_limit_is_lowered_for_a_while_and_never_raised() -> None:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    with system.lowered({"RLIMIT_CORE": 0}):
        assert system.soft_limit("RLIMIT_CORE") == 0
        with system.lowered({"RLIMIT_CORE": 4096}):
            assert system.soft_limit("RLIMIT_CORE") == 0
    assert resource.getrlimit(resource.RLIMIT_CORE) == before


def test_a_limit_comes_back_after_an_error() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(ZeroDivisionError), system.lowered({"RLIMIT_NOFILE": 64, "RLIMIT_CORE": 0}):
        assert system.soft_limit("RLIMIT_NOFILE") == 64
        raise ZeroDivisionError
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_no_limit_is_none() -> None:
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    assert (system.soft_limit("RLIMIT_AS") is not None) == limited


def test_signals_that_the_system_lacks_are_left_out() -> None:
    assert system.signals("SIGTERM", "SIGBREAK", "SIGHUP") == (signal.SIGTERM, signal.SIGHUP)
