"""The worker of a queue, with a real broker that goes away."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from rq.serializers import JSONSerializer

from offmated.config import Config
from offmated.paths import Paths
from offmated.service.broker import Broker
from offmated.service.rqworker import ForkWorker
from planner.run.processes import spawn
from tests.support.daemons import until

HORSE_S = 3


@pytest.fixture
def signals() -> Iterator[None]:
    """The handlers of a worker that is asked to end, taken back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def home() -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="offmate-", dir="/tmp"))  # sockets have short paths
    yield home
    shutil.rmtree(home)


@pytest.mark.usefixtures("signals")
def test_a_broker_that_goes_away_ends_no_horse_that_works(home: Path) -> None:
    paths = Paths.at(home)
    paths.create()
    broker = Broker.choose(Config.load(paths, {}), paths)
    assert broker.command is not None
    server = spawn(broker.command, folder=paths.broker)
    broker.wait_until_ready()
    connection = broker.connect()
    queue = broker.queue("gpu", connection)
    begun, done = home / "begun", home / "done"
    script = f"touch {begun}; sleep {HORSE_S}; touch {done}"
    job = queue.enqueue("subprocess.call", ["sh", "-c", script], job_timeout=-1)
    worker = ForkWorker([queue], connection=connection, serializer=JSONSerializer, job_monitoring_interval=1)
    worker.register_birth()
    worker.prepare_execution(job)
    worker.fork_work_horse(job, queue)
    until(begun.exists, "the horse works")
    server.kill()
    server.wait()
    with pytest.raises(redis.ConnectionError):
        connection.ping()
    worker.request_stop(signal.SIGTERM, None)
    with contextlib.suppress(redis.ConnectionError):  # after the horse's end RQ asks what became of the message
        worker.monitor_work_horse(job, queue)
    assert done.exists()
