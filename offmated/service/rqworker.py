"""Runs the worker of one queue: `python -m offmated.service.rqworker plan|gpu`. For every message, that is for every
job to plan or to train, it forks a child process, which RQ calls the work horse."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis.client import Pipeline
from rq import Queue, Worker
from rq.job import Job
from rq.serializers import JSONSerializer

import offmated.jobs.store  # noqa: F401  # the tasks need it: imported before the fork, the horses have it at once
from offmated.config import Config
from offmated.paths import Paths
from offmated.service.broker import Broker
from planner.run.processes import die_with

log = logging.getLogger(__name__)


class ForkWorker(Worker):
    """RQ's worker with three changes: its work horse (the child process that RQ forks for each job) dies with it, the
    daemon is told when a work horse ends, and a broker that is away for a while does not end the worker."""

    def main_work_horse(self, job: Job, queue: Queue) -> None:
        """Run the job in this child process, which RQ calls the work horse, and make the process die with its worker.
        Otherwise RQ would let it go on, with nothing to watch it, when its worker is killed."""
        assert self.pid is not None
        die_with(self.pid)
        super().main_work_horse(job, queue)

    def monitor_work_horse(self, job: Job, queue: Queue) -> None:
        """Wait for the end of the child process that runs the job (the work horse), and then wake the daemon by
        SIGCHLD, as it sleeps until a child ends or its next regular work is due."""
        super().monitor_work_horse(job, queue)
        os.kill(os.getppid(), signal.SIGCHLD)  # a parent that does not handle the signal ignores it

    # The three methods below tell the broker things that do not matter while a horse works. A failure of one would end
    # the worker, and with it a training that needs no broker.

    def maintain_heartbeats(self, job: Job) -> None:
        """Send RQ's heartbeat, the sign to the broker that worker and job are alive. A broker that does not answer is
        no error."""
        with _broker_may_be_away():
            super().maintain_heartbeats(job)

    def set_current_job_working_time(self, current_job_working_time: float, pipeline: Pipeline | None = None) -> None:
        """Tell the broker for how many seconds the present job has run; 0 after its end. A broker that does not answer
        is no error."""
        with _broker_may_be_away():
            super().set_current_job_working_time(current_job_working_time, pipeline)

    def set_shutdown_requested_date(self) -> None:
        """Tell the broker when the worker was asked to end. A broker that does not answer is no error."""
        with _broker_may_be_away():
            super().set_shutdown_requested_date()  # type: ignore[no-untyped-call]


@contextmanager
def _broker_may_be_away() -> Iterator[None]:
    try:
        yield
    except redis.RedisError as error:
        log.warning("the broker does not take what is said to it: %s", error)


def main(name: str) -> int:
    """Run the worker of the queue "plan" or "gpu" until SIGTERM. Returns exit code 1 where the broker failed; the log
    says how."""
    paths = Paths.from_environment()
    broker = Broker.choose(Config.load(paths), paths)
    connection = broker.connect()
    try:
        worker = ForkWorker([broker.queue(name, connection)], connection=connection, serializer=JSONSerializer)
        worker.work(logging_level="WARNING")
    except redis.RedisError as error:
        log.error("the broker is away, or refuses: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    logging.basicConfig(format=f"%(asctime)s {sys.argv[1]}-worker[{os.getpid()}] %(message)s", level=logging.INFO)
    sys.exit(main(sys.argv[1]))
