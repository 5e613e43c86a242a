"""Finds which changes of the machine or the job would make it faster, and by how much, by planning them beside the
job's own plan.

Other processes do this, because one thread solves one program. Only the most promising changes are planned; the others
are reported with the most that they could gain.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.pool import Pool

from planner.candidate.evaluate import predicted_step_s
from planner.errors import UserError
from planner.machine.presets import usable_cpu_bytes
from planner.optimizers.table import AnyOptimizer
from planner.reports.receipt import Change, Prospect
from planner.run.ending import signals_wait
from planner.schedule.chain import Chain
from planner.schedule.compile import compile_program
from planner.schedule.memory_use import cpu_peak_bytes, gpu_peak_bytes
from planner.schedule.plan import Plan
from planner.schedule.verify import verify
from planner.search.activations_on_disk import has_twins
from planner.search.problem import Problem
from planner.search.states_on_disk import decided_anew, states_on_disk

_GIB = 2**30
_UNCLIPPED = "no clipping (--clip none, max_grad_norm: 0)"
_WORTH = 1.02  # a smaller gain is no help
_PROMISING = 1.05  # a change that cannot gain more is not planned
_PLANNED = 4
_USED = 0.8  # share of a budget: if a plan uses less, more memory counts as no help


def variations(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """The problem with one thing changed at a time, each with a description for people."""
    hardware, chain = problem.hardware, problem.chain
    # Such updates are matrix products, which a CPU computes at a hundredth of a GPU's speed.
    slow = any(optimizer.own_seconds for optimizer in chain.optimizers)
    if problem.clip and slow:  # without clipping the GPU can do them
        yield _UNCLIPPED, replace(problem, clip=False)
    more = usable_cpu_bytes(64 * _GIB)
    yield "64 GiB more RAM", replace(problem, cpu_budget_bytes=problem.cpu_budget_bytes + more)
    extra = max(8, problem.gpu_budget_bytes // _GIB // 4) * _GIB
    text = f"{extra // _GIB} GiB more GPU memory"
    yield text, replace(problem, gpu_budget_bytes=problem.gpu_budget_bytes + extra)
    link = replace(hardware, h2d_bytes_per_s=2 * hardware.h2d_bytes_per_s, d2h_bytes_per_s=2 * hardware.d2h_bytes_per_s)
    yield "a link twice as fast", replace(problem, hardware=link)
    memory = replace(hardware.with_cpu_updates(2.0), cpu_memory_bytes_per_s=2 * hardware.cpu_memory_bytes_per_s)
    yield "host memory twice as fast, CPU updates with it", replace(problem, hardware=memory)
    if states_on_disk(chain) or has_twins(chain):
        drives = replace(
            hardware,
            disk_read_bytes_per_s=2 * hardware.disk_read_bytes_per_s,
            disk_write_bytes_per_s=2 * hardware.disk_write_bytes_per_s,
            disk_sustained_bytes_per_s=2 * hardware.disk_sustained_bytes_per_s,
            disk_bytes=2 * hardware.disk_bytes,
            disk_rated_bytes=2 * hardware.disk_rated_bytes,
        )
        yield "twice as many drives", replace(problem, hardware=drives)
    yield "a GPU that computes twice as fast", replace(problem, chain=_quicker(chain, 0.5))
    text = f"{2 * problem.slices} slices a step in place of {problem.slices}"
    yield text, replace(problem, slices=2 * problem.slices)
    if problem.clip and not slow:
        yield _UNCLIPPED, replace(problem, clip=False)


def _quicker(chain: Chain, factor: float) -> Chain:
    blocks = tuple(
        replace(
            block,
            tensors=tuple(replace(t, optimizer=_quicker_update(t.optimizer, factor)) for t in block.tensors),
            options=tuple(
                replace(o, forward_s=factor * o.forward_s, backward_s=factor * o.backward_s) for o in block.options
            ),
        )
        for block in chain.blocks
    )
    return replace(chain, blocks=blocks)


def _quicker_update(optimizer: AnyOptimizer, factor: float) -> AnyOptimizer:
    return optimizer.timed(gpu_s=factor * optimizer.gpu_s, cpu_s=optimizer.cpu_s)


def _pool() -> Pool:
    # Not forked: this process has threads by now. Ctrl-C is for this process, which ends the others: if it reached
    # them, each would print a traceback, and keep this process waiting.
    count = max(2, min(4, (os.cpu_count() or 1) - 1))
    if not hasattr(signal, "pthread_sigmask"):  # Windows, where Ctrl-C reaches all processes of a console
        return multiprocessing.get_context("spawn").Pool(count)
    resource_tracker.ensure_running()  # before the mask: its start lets Ctrl-C through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return multiprocessing.get_context("spawn").Pool(count)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Variations:
    """A context with a pool of processes that plan changed problems, to find what a change would gain. The processes
    end with the context."""

    def __init__(self) -> None:
        self._pool: Pool | None = None

    def __enter__(self) -> Variations:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()

    def _workers(self) -> Pool:
        """The pool, which is started when it is first needed: its processes take seconds to start."""
        if self._pool is None:
            with signals_wait():  # so that a signal finds a whole pool to end, or none
                self._pool = _pool()
        return self._pool

    def plans(self, problems: Sequence[Problem]) -> list[Plan | None]:
        """The plans of several problems, made in parallel; None for a problem that fits no plan."""
        return self._workers().map(_plan, problems, chunksize=1)

    def changes(
        self, problem: Problem, plan: Plan, *, more: Sequence[tuple[str, Problem]] = ()
    ) -> tuple[list[Prospect], Iterator[Change | None]]:
        """Start to plan the problem's variations, and those in `more`, in other processes.

        Returns the prospects of all changes that may help, the most promising by their lower bounds first; and an
        iterator over what became of each of them, in the same order: the `Change` with its gain, or None if it gains
        too little. Only the first four are planned; for all of them the time of a step with `plan` itself under the
        change is computed. So the answer does not depend on how long any of this takes.
        """
        prospects: list[tuple[Prospect, Problem]] = []
        for text, other in (*variations(problem), *more):
            most = (other.tokens / other.bound_s()) / (problem.tokens / plan.step_s)
            if most >= _WORTH and not _is_idle(problem, plan, other):
                prospects.append((Prospect(text=text, most=most), other))
        prospects.sort(key=lambda each: -each[0].most)
        running = []
        for number, (prospect, other) in enumerate(prospects):
            planned = number < _PLANNED and prospect.most >= _PROMISING
            running.append(self._workers().apply_async(_step_s, (problem, plan, other, planned)))

        def found() -> Iterator[Change | None]:
            for (prospect, other), result in zip(prospects, running, strict=True):
                step_s = result.get()
                tokens_per_s = other.tokens / step_s
                factor = tokens_per_s / (problem.tokens / plan.step_s)
                is_help = factor >= _WORTH
                yield (
                    Change(text=prospect.text, factor=factor, step_s=step_s, tokens_per_s=tokens_per_s)
                    if is_help
                    else None
                )

        return [prospect for prospect, _ in prospects], found()


def best_of(changes: Sequence[Change]) -> tuple[Change, ...]:
    """The changes, the one that helps most first."""
    return tuple(sorted(changes, key=lambda change: -change.factor))


def unplanned(prospects: Sequence[Prospect], changes: Sequence[Change]) -> tuple[Prospect, ...]:
    """The changes that were not planned, and which might gain more than was found for them without a plan."""
    gains = {change.text: change.factor for change in changes}
    not_planned = (p for number, p in enumerate(prospects) if number >= _PLANNED or p.most < _PROMISING)
    return tuple(p for p in not_planned if gains.get(p.text, 0.0) * _WORTH < p.most)


def _is_idle(problem: Problem, plan: Plan, other: Problem) -> bool:
    """Whether the other problem has more memory than this one, of a kind that the plan does not use up."""
    return (
        other.cpu_budget_bytes > problem.cpu_budget_bytes and plan.cpu_peak_bytes < _USED * problem.cpu_budget_bytes
    ) or (other.gpu_budget_bytes > problem.gpu_budget_bytes and plan.gpu_peak_bytes < _USED * problem.gpu_budget_bytes)


def _step_s(problem: Problem, plan: Plan, other: Problem, planned: bool) -> float:
    """Seconds of the other problem's step, computed in another process; infinity if nothing is known.

    If `planned`, a plan is made for it in as many rounds as `plan` has; with other slices, if these do not fit, in
    rounds scaled with the slices, then in one. With the same slices the result is at most the step of `plan` itself
    there, as no variation takes anything away.
    """
    step_s = math.inf
    if (other.slices, other.chain.slice_tokens) == (problem.slices, problem.chain.slice_tokens):
        step_s = predicted_step_s(compile_program(plan, other.chain), other.chain, other.hardware)
    if not planned:
        return step_s
    other = decided_anew(other)
    worth_s = plan.step_s * other.tokens / problem.tokens / _WORTH
    scaled = plan.rounds * other.slices // problem.slices
    for rounds in dict.fromkeys((plan.rounds, scaled, 1) if other.slices != problem.slices else (plan.rounds,)):
        if rounds < 1 or other.slices % rounds:
            continue
        found = other.plan_in(rounds, min(step_s, worth_s))
        if found is not None:
            return min(step_s, found.step_s)
    return step_s


def carried_over(plan: Plan, other: Problem) -> Plan | None:
    """The plan, used for another problem whose chain has the same blocks and tensors; None if it does not fit there.
    What the solver proved is left out, because it holds for the plan's own chain."""
    program = compile_program(plan, other.chain)
    device, host = gpu_peak_bytes(program, other.chain), cpu_peak_bytes(plan, other.chain)
    if device > other.gpu_budget_bytes or host > other.cpu_budget_bytes:
        return None
    verify(program, other.chain, gpu_budget_bytes=other.gpu_budget_bytes)
    return replace(
        plan,
        step_s=predicted_step_s(program, other.chain, other.hardware),
        gpu_peak_bytes=device,
        cpu_peak_bytes=host,
        lp_step_s=0.0,
        solver_gap=1.0,
        bound_s=other.bound_s(),
    )


def _plan(problem: Problem) -> Plan | None:
    """The problem's plan, made in another process; None if there is none."""
    try:
        return problem.plan()
    except UserError:
        return None
