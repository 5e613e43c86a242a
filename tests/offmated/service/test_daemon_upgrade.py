"""Daemons of the next version that come to the state folder of this one, killed in the midst of its work. Some tests
take seconds: they start a daemon, its broker and its workers."""

from __future__ import annotations

import sqlite3
from contextlib import closing

from tests.support.accidents import UPGRADE, happen
from tests.support.daemons import PATIENCE_S, house, more_daemons, until
from tests.support.next_version import REVISION, install_in


def test_the_queue_of_an_earlier_version_goes_on() -> None:
    happen(UPGRADE)


def test_of_two_that_start_at_once_one_upgrades_the_database_and_the_other_is_told_so() -> None:
    with house() as built:
        built.down()
        install_in(built.home / "fakes")
        both = more_daemons(built, 2)
        try:
            until(lambda: any(daemon.poll() is not None for daemon in both), "one has ended")
            until(built.client.running, "the other answers")
            (lost,) = [daemon for daemon in both if daemon.poll() is not None]
            assert "[already-running]" in lost.communicate()[1]
            with closing(sqlite3.connect(built.paths.database)) as connection:
                assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [(REVISION,)]
            (copy,) = built.paths.backups.iterdir()
            assert copy.name.startswith("offmate-initial-")
            built.client.shutdown(wait=False)
        finally:
            for daemon in both:
                if daemon.poll() is None:
                    daemon.terminate()
                daemon.communicate(timeout=PATIENCE_S)
