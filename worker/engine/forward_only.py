"""Runs the model forward only, for evaluation and generation, within the plan's memory budget."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import Exit, UserError
from planner.graph import EAGER, BlockNames, value_of
from planner.measure.forward_bytes import eval_mode, measure_forward, measure_generation
from planner.out_of_memory import forget_frames, is_out_of_memory
from planner.schedule.chain import Chain
from planner.schedule.compile import OpKind, Program
from planner.schedule.forward_program import ForwardBytes, TooLarge, forward_program
from planner.schedule.plan import Plan
from planner.schedule.verify import verify
from planner.units import format_bytes
from worker.engine.actions import Actions
from worker.engine.answers import RunPass, answers
from worker.engine.block_calls import ModelBlock
from worker.engine.lockstep import Lockstep
from worker.engine.weights import Weights
from worker.runtime.interpreter import Cursor
from worker.runtime.machine import Machine, RandomState
from worker.runtime.step_values import StepValues

log = logging.getLogger(__name__)

_MOST_SLICES = 8  # more would save hardly anything: weights travel once for all slices


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of an evaluation: `losses`, one per batch (0-dimensional tensors on the device); `figures`, what else
    the model's result had for each (fp32 tensors [n] on the device, empty for most models); and `peak_bytes`, the most
    device bytes in use meanwhile (None when they are not counted)."""

    losses: tuple[Tensor, ...]
    peak_bytes: int | None
    figures: tuple[Tensor, ...] = ()


class Forward:
    """Runs an engine's model forward in evaluation mode: each block runs its own PyTorch code on weights that are on
    the device meanwhile.

    All updates must be finished before. Afterwards, also after an error, weights and states are on the device and on
    the host as they were."""

    def __init__(
        self,
        model: nn.Module,
        *,
        plan: Plan,
        chain: Chain,
        blocks: Sequence[ModelBlock],
        weights: Weights,
        actions: Actions,
        machine: Machine,
    ) -> None:
        self._model, self._plan, self._chain = model, plan, chain
        self._blocks, self._weights, self._actions, self._machine = blocks, weights, actions, machine
        names = [block.name for block in chain.blocks]
        self._names = BlockNames(
            embedding=names[0],
            layers=tuple(names[1:-1]),
            head=names[-1],
            kinds=tuple(block.kind for block in chain.blocks),
        )
        self._eager = frozenset(
            block.name
            for block, option in zip(chain.blocks, plan.options, strict=True)
            if block.option(option).recipe == EAGER.name
        )
        self.room_bytes = plan.gpu_budget_bytes or sys.maxsize  # less where the machine's cap leaves less
        self._measured: dict[tuple[object, ...], ForwardBytes] = {}
        self._lockstep: Lockstep | None = None
        self._at_most = _MOST_SLICES
        self._speaking = False

    @property
    def running(self) -> bool:
        """Whether an evaluation or generation is running, so that calls of the blocks' modules must go to `enter`."""
        return self._lockstep is not None

    def enter(self, block: ModelBlock, *args: Any, **kwargs: Any) -> Any:
        """Run `block` on these arguments, in place of its module's forward, once its weights are on the device."""
        assert self._lockstep is not None
        self._lockstep.gate(block.index)
        own_code = block.own_forward if self._speaking else block.loss_forward
        with own_code(), block.weights_in_place(self._weights.device.items):
            return block.module.forward(*args, **kwargs)

    def evaluate(self, batches: Sequence[Mapping[str, Tensor]]) -> Evaluation:
        """The loss of each batch. Several batches run together, block by block, so that weights travel once for all of
        them. If the device then has no room between its tensors, half as many run together from there on. Raises
        UserError "evaluation-does-not-fit"."""
        machine = self._machine
        staged = [{key: machine.stage(tensor) for key, tensor in batch.items()} for batch in batches]
        results: dict[int, Tensor] = {}
        measured = self._measure(batches)
        slices = self._most_slices(measured, len(batches))
        before = machine.random_state()
        machine.reset_peak()
        try:
            with eval_mode(self._model), machine.computing():
                while len(results) < len(staged):
                    try:
                        for size, firsts in _groups(len(staged), slices):
                            with self._passes(self._program(measured, size)) as run_pass:
                                for first in firsts:
                                    run_pass(
                                        _body(self._model, staged, first, machine.device, results), [before] * size
                                    )
                    except RuntimeError as error:
                        if slices == 1 or not is_out_of_memory(error):
                            raise
                        results.clear()
                        slices = self._at_most = slices // 2
                        log.info("evaluation: no room for so many batches at a time, now %d", slices)
        finally:
            machine.set_random_state(before)
        losses, figures = apart([results[k] for k in range(len(batches))])
        return Evaluation(losses=losses, figures=figures, peak_bytes=machine.peak_bytes())

    def generate(self, prompts: Sequence[Sequence[int]], *, new_tokens: int, pad: int) -> list[list[int]]:
        """Generate greedily after each of `prompts` (lists of token ids); see `worker.engine.answers`. Returns at most
        `new_tokens` token ids for each. All prompts run together, so weights travel once per token; if that does not
        fit the budget, they run in groups. `pad`: the token id that fills up shorter answers.

        Raises UserError "generation-does-not-fit"."""
        machine = self._machine
        answered: list[list[int]] = []
        machine.reset_peak()
        while len(answered) < len(prompts):
            size, program = self._generation(prompts[len(answered) :], new_tokens)
            some = prompts[len(answered) : len(answered) + size]
            with eval_mode(self._model), machine.computing(), self._passes(program, speaking=True) as run_pass:
                answered += answers(self._model, machine, run_pass, some, new_tokens=new_tokens, pad=pad)
        return answered

    def check_generation(self, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> None:
        """Raise UserError "generation-does-not-fit" if generating `new_tokens` tokens after each of `prompts` would
        exceed the budget. Nothing is generated."""
        self._generation(prompts, new_tokens)

    def _generation(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[int, Program]:
        """(How many of the first prompts fit together, the program that generates one token.)"""
        size = len(prompts)
        while True:
            measured = self._measure_generation(size, max(map(len, prompts[:size])), new_tokens)
            try:
                return size, self._program(measured, 1, "Generation", "fewer or shorter sample_prompts")
            except UserError:
                if size == 1:
                    raise
                size = -(-size // 2)

    def _measure_generation(self, rows: int, length: int, new_tokens: int) -> ForwardBytes:
        key = (rows, length, new_tokens)
        if key not in self._measured:
            with self._own_forwards(speaking=True):
                self._measured[key] = measure_generation(
                    self._model, self._names, rows, length, new_tokens, self._machine.device, eager=self._eager
                )
        return self._measured[key]

    def check_fits(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        """Raise UserError "evaluation-does-not-fit" if evaluating `batches` would exceed the budget. Nothing is
        evaluated."""
        self._most_slices(self._measure(batches), len(batches))

    def _measure(self, batches: Sequence[Mapping[str, Tensor]]) -> ForwardBytes:
        """The bytes of a forward on a batch that is as large as the largest of `batches` in every dimension."""
        sample = {
            name: torch.zeros(
                [max(sizes) for sizes in zip(*(b[name].shape for b in batches), strict=True)], dtype=t.dtype
            )
            for name, t in batches[0].items()
        }
        key = tuple((name, tuple(t.shape), t.dtype) for name, t in sample.items())
        if key not in self._measured:
            device = self._machine.device

            with self._own_forwards():
                self._measured[key] = measure_forward(
                    self._model,
                    self._names,
                    lambda: _value(self._model, sample, device),
                    tuple(sample.values()),
                    device,
                    eager=self._eager,
                )
        return self._measured[key]

    @contextlib.contextmanager
    def _own_forwards(self, *, speaking: bool = False) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for block in self._blocks:
                stack.enter_context(block.own_forward() if speaking else block.loss_forward())
            yield

    def _most_slices(self, measured: ForwardBytes, count: int) -> int:
        """How many batches run in lockstep: as many as fit; one if no weight travels."""
        if not any(op.kind is OpKind.FETCH for op in self._program(measured, 1).ops):
            return 1
        for slices in range(min(count, self._at_most), 1, -1):
            with contextlib.suppress(TooLarge):
                forward_program(self._plan, self._chain, measured, slices=slices, budget_bytes=self.room_bytes)
                return slices
        return 1

    def _program(
        self,
        measured: ForwardBytes,
        slices: int,
        pass_name: str = "Evaluation",
        less: str = "a smaller per_device_train_batch_size, or eval_strategy: no",
    ) -> Program:
        try:
            program = forward_program(self._plan, self._chain, measured, slices=slices, budget_bytes=self.room_bytes)
        except TooLarge as error:
            budget_bytes = self._plan.gpu_budget_bytes
            numbers = [f"needed {format_bytes(error.least_bytes)}, budget {format_bytes(budget_bytes)}"]
            if self.room_bytes < budget_bytes:
                room = format_bytes(self.room_bytes)
                numbers.append(f"of the budget {room} are left by the device's runtime and the allocator's gaps")
            raise UserError(
                f"{pass_name} does not fit the GPU budget.",
                code=f"{pass_name.lower()}-does-not-fit",
                numbers=tuple(numbers),
                hint=f"use a larger gpu_budget, {less}",
                exit_code=Exit.DOES_NOT_FIT,
            ) from error
        verify(program, self._chain, gpu_budget_bytes=self.room_bytes, measured=measured)
        return program

    @contextlib.contextmanager
    def _passes(self, program: Program, *, speaking: bool = False) -> Iterator[RunPass]:
        """A context that gives the function `run_pass(body, states)`, which makes one pass over the model: `body(k)`
        calls the model for slice k, from the random state `states[k]`. `speaking`: the caller needs the logits
        themselves."""
        self._speaking = speaking
        leaving = sorted(set(self._plan.resident) - set(program.resident))
        interpreter = self._machine.interpreter(program, self._actions)
        cursor = Cursor(program, interpreter)
        self._lockstep = lockstep = Lockstep(program.slices, cursor, self._machine)

        def run_pass(body: Callable[[int], None], states: list[RandomState]) -> None:
            cursor.begin(_NO_UPDATES)
            lockstep.run(body, states)
            cursor.end()

        try:
            self._weights.leave(leaving)
            self._machine.forget_threads()
            yield run_pass
            interpreter.drain()
        except RuntimeError as error:
            forget_frames(error)  # free what they hold, before the weights come back
            raise
        finally:
            self._lockstep = None
            lockstep.close()
            interpreter.close()
            self._machine.synchronize()  # copies may still be using what is freed now
            self._machine.forget_threads()  # these slices' workspaces lie where a step has places for tensors
            self._weights.come_back()


_NO_UPDATES = StepValues(number=0, learning_rate=0.0, host_count=torch.zeros(()), device_count=torch.zeros(()))


def _groups(count: int, slices: int) -> Iterator[tuple[int, range]]:
    """(slices per pass, the first batch of each pass of that size): full passes first, then one with the rest."""
    whole = count - count % slices
    if whole:
        yield slices, range(0, whole, slices)
    if whole < count:
        yield count - whole, range(whole, whole + 1)


def _body(
    model: nn.Module,
    batches: Sequence[Mapping[str, Tensor]],
    first: int,
    device: torch.device,
    results: dict[int, Tensor],
) -> Callable[[int], None]:
    def body(k: int) -> None:
        with torch.no_grad():  # this is thread state
            results[first + k] = _value(model, batches[first + k], device)

    return body


def _value(model: nn.Module, batch: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """The model's `value_of` for a batch, without its other results. The batch is copied to the device."""
    return value_of(model(**{name: t.to(device, copy=True, non_blocking=True) for name, t in batch.items()}))


def apart(values: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The losses, and the figures behind them, in what `planner.graph.value_of` gave for some slices; no figures where
    the values are losses alone."""
    if not any(value.numel() > 1 for value in values):
        return tuple(values), ()
    return tuple(value[0] for value in values), tuple(value[1:] for value in values)
