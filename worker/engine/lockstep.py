"""Runs the slices (micro-batches) of a round in lockstep: each runs the model's forward in its own thread, one thread
at a time, so that each block runs all slices before the next block starts."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Protocol

import torch

from planner.schedule.plan import Direction
from worker.runtime.interpreter import Turn
from worker.runtime.machine import Machine, RandomState
from worker.runtime.threads import compute_with


class Aborted(BaseException):
    """Raised in the thread of a slice (micro-batch) to end it, because another slice has failed. It is no Exception, so
    that no `except Exception` in a model's forward swallows it."""


class Turns(Protocol):
    """The order in which blocks run on slices: see worker.runtime.interpreter.Cursor."""

    @property
    def turn(self) -> Turn | None:
        """The turn that computes now or comes next; None after the last."""

    def start_turn(self) -> Turn:
        """Wait until the next turn may begin, and return it."""

    def end_turn(self) -> None:
        """End the present turn."""


class Lockstep:
    """Hands the right to compute, a baton, from slice to slice (micro-batch) in the order of the program's turns; a
    turn is one block's computation on one slice. A slice keeps the baton until it reaches the next block, so the
    model's own operations between two blocks belong to the turn of the first.

    `holder` is the slice that computes. The threads live as long as this object, because each has a pool of OpenMP
    threads. A single slice runs in the caller's thread."""

    def __init__(self, slices: int, cursor: Turns, machine: Machine) -> None:
        self.holder = 0
        self._slices, self._cursor, self._machine = slices, cursor, machine
        self._gates: list[threading.Semaphore] = []
        self._states: list[RandomState] = []
        self._running: Turn | None = None
        self._last: Turn | None = None
        self._failure: BaseException | None = None
        self._finished: SimpleQueue[None] = SimpleQueue()
        threads = torch.get_num_threads()
        self._threads = [_SliceThread(k, threads) for k in range(slices)] if slices > 1 else []

    def run(self, body: Callable[[int], None], states: list[RandomState]) -> None:
        """Run `body(k)` for every slice k, from the random state `states[k]`, and return when all have ended. The first
        error ends all of them and is raised here."""
        self.holder, self._states, self._failure = 0, states, None
        self._running = self._last = None
        if not self._threads:
            self._machine.set_random_state(states[0])
            body(0)
            self._finish(0)
            return
        self._gates = [threading.Semaphore(0) for _ in range(self._slices)]
        self._gates[0].release()
        context = contextvars.copy_context()
        jobs = [(context.copy(), functools.partial(self._slice, k, body)) for k in range(self._slices)]
        starts = map(SimpleQueue.put, [thread.work for thread in self._threads], jobs)
        interrupt: BaseException | None = None
        ended = 0
        while ended < self._slices:
            try:
                deque(starts, maxlen=0)  # no interrupt comes between; after one, the rest is started
                self._finished.get()
                ended += 1
            except BaseException as error:  # KeyboardInterrupt reaches only this thread
                interrupt = error
                self._abort(error)
        failure, self._failure = self._failure, None  # its traceback holds frames, and frames hold activations
        if interrupt or failure:
            raise interrupt or failure  # type: ignore[misc]

    def _slice(self, k: int, body: Callable[[int], None]) -> None:
        try:
            with self._machine.computing(), torch.autograd.set_multithreading_enabled(False):
                self._take(k)
                body(k)
                self._finish(k)
        except Aborted:
            pass
        except BaseException as error:
            self._abort(error)
        finally:
            self._finished.put(None)

    def gate(self, block: int) -> Turn:
        """Wait, when the computing slice has arrived at block number `block`, until it may compute this block;
        meanwhile other slices compute. Returns the turn, the computation of the block on this slice."""
        k = self.holder
        if self._failure:
            raise Aborted
        self._end_turn()
        turn = self._cursor.turn
        if turn is not None and turn.slice != k and turn.direction is not Direction.BACKWARD:
            self._pass(k, turn.slice)
            self._take(k)
            turn = self._cursor.turn
        if turn is None or (turn.block, turn.slice) != (block, k) or turn.direction is Direction.BACKWARD:
            raise RuntimeError(
                f"slice {k} arrived at block {block}, the program expects {turn or 'nothing more'} (after "
                f"{self._last or 'the start'}): a block was skipped or called twice"
            )
        self._running = self._cursor.start_turn()
        return turn

    def _finish(self, k: int) -> None:
        if self._failure:
            raise Aborted
        self._end_turn()
        turn = self._cursor.turn
        if turn is None or turn.direction is Direction.BACKWARD:
            return
        if turn.slice == k:
            raise RuntimeError(f"slice {k} ended before {turn}: a block was skipped, or detached")
        self._pass(k, turn.slice)

    def _end_turn(self) -> None:
        if self._running is not None:
            self._last, self._running = self._running, None
            self._cursor.end_turn()

    def _pass(self, k: int, to: int) -> None:
        self._states[k] = self._machine.random_state()
        self._gates[to].release()

    def _take(self, k: int) -> None:
        self._gates[k].acquire()
        if self._failure:
            raise Aborted
        self.holder = k
        self._machine.set_random_state(self._states[k])

    def _abort(self, error: BaseException) -> None:
        self._failure = self._failure or error
        for gate in self._gates:
            gate.release()

    def everywhere(self, do: Callable[[], None]) -> None:
        """Call `do` in each thread that computes, one after another. Raises what it raises."""
        do()
        for thread in self._threads:
            done: Future[None] = Future()
            thread.work.put((contextvars.copy_context(), functools.partial(_settle, done, do)))
            done.result()

    def close(self) -> None:
        """End the slices' threads."""
        for thread in self._threads:
            thread.close()


def _settle(done: Future[None], do: Callable[[], None]) -> None:
    try:
        do()
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(None)


class _SliceThread:
    """A thread that runs what is put into `work`, until it is closed."""

    def __init__(self, k: int, threads: int) -> None:
        self.work: SimpleQueue[tuple[contextvars.Context, Callable[[], None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(threads,), name=f"offmate-slice{k}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.work.put(None)
        self._thread.join()

    def _run(self, threads: int) -> None:
        compute_with(threads)
        while (work := self.work.get()) is not None:
            work[0].run(work[1])
            del work
