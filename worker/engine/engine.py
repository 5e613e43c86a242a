"""Trains a model under a plan, with the numbers of plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import Exit, UserError
from planner.graph import refuse_autocast
from planner.optimizers.base import Group
from planner.out_of_memory import forget_frames, is_out_of_memory
from planner.schedule.chain import Chain
from planner.schedule.compile import compile_program
from planner.schedule.measured import Measured
from planner.schedule.peak_moments import staged_bytes
from planner.schedule.plan import Plan
from worker.engine.actions import Actions
from worker.engine.block_calls import ModelBlock, model_blocks
from worker.engine.forward_only import Evaluation, Forward, apart
from worker.engine.full_gradients import FullGradients, Revise
from worker.engine.gradients import Gradients
from worker.engine.rounds import Rounds
from worker.engine.shared_rows import SharedRows
from worker.engine.shorter_slices import ShorterSlices
from worker.engine.stored_states import Scratch, Store
from worker.engine.weights import Weights
from worker.runtime.cpu import CpuMachine
from worker.runtime.cuda import CudaMachine
from worker.runtime.interpreter import Cursor, Interpreter
from worker.runtime.machine import Machine
from worker.runtime.recording import Recording
from worker.runtime.step_values import StepValues, groups_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one step: `losses`, one per slice or micro-batch (0-dimensional tensors on the device); `figures`,
    what else the model's result had for each (fp32 tensors [n] on the device, empty for most models); `grad_norm`, the
    gradients' global norm before clipping (None without clipping); `peak_bytes`, the most device bytes in use during
    the step (None when they are not counted)."""

    losses: tuple[Tensor, ...]
    grad_norm: Tensor | None
    peak_bytes: int | None
    figures: tuple[Tensor, ...] = ()


class Engine:
    """Trains a causal language model under a plan: one call of `step` is one optimizer step.

    It takes the model over until `restore` gives it back: each block parameter becomes a one-element tensor, expanded
    to the true shape, while the weights are where the plan puts them, on the device, on the host or on disk. If an
    error ends a step before its first update, as an error in the model's forward does, the weights are those before the
    step, and the engine can go on. If updates had begun, the weights are `torn` (some old, some new), and only
    `load_state`, `restore` and `close` work."""

    def __init__(
        self,
        model: nn.Module,
        *,
        plan: Plan,
        chain: Chain,
        optimizer: Group | Sequence[Group],
        device: torch.device,
        max_grad_norm: float | None,
        metered: bool = False,
        states: Store | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        """`optimizer`: one for all tensors, or parameter groups. `max_grad_norm` is given exactly when the plan clips.
        `metered`: count device bytes (on the CPU; slow). `states` keeps the optimizer states that the plan has on disk,
        `scratch` everything else that it has there."""
        if plan.clip != (max_grad_norm is not None):
            raise ValueError(f"the plan has clip={plan.clip}, max_grad_norm is {max_grad_norm}")
        self.steps_done = 0
        self._groups = groups_of(optimizer, chain)
        self._model, self._plan = model, plan
        self._machine: Machine = CudaMachine(device) if device.type == "cuda" else CpuMachine(metered=metered)
        self._program = compile_program(plan, chain)
        self._memory = self._machine.memory(self._program, chain, plan.offsets)
        try:
            self._weights = Weights(model, self._program, chain, self._machine, self._memory, states, scratch)
        except BaseException:  # the model has its weights back; a plan that needs less can use this memory
            self._memory.close()
            raise
        self._device = self._weights.device
        self._blocks = model_blocks(model, chain, plan)
        for block in self._blocks:
            block.replace_forward(functools.partial(self._enter, block))
        self._shared = SharedRows(plan, chain, self._machine, trained=self._weights.trained)
        self._gradients = Gradients(
            self._device,
            self._machine,
            self._memory,
            self._weights.frame,
            order=self._weights.trained,
            by_rows=self._shared.names,
            max_norm=max_grad_norm,
        )
        self._actions = Actions(
            self._weights.host,
            self._device,
            self._gradients,
            self._weights.frame,
            self._weights.left_out,
            self._weights.stored,
        )
        self._rounds = Rounds(
            model,
            slices=plan.slices,
            labels={stage.name: str(stage) for stage in plan.stages},
            # A twentieth is added, because allocators round up.
            most_bytes=max(plan.gpu_budget_bytes, plan.gpu_peak_bytes * 21 // 20),
            blocks=self._blocks,
            gradients=self._gradients,
            device=self._device,
            machine=self._machine,
        )
        self._shorter = ShorterSlices(
            model, plan=plan, chain=chain, blocks=self._blocks, memory=self._memory, device=self._machine.device
        )
        self._forward_only = Forward(
            model,
            plan=plan,
            chain=chain,
            blocks=self._blocks,
            weights=self._weights,
            actions=self._actions,
            machine=self._machine,
        )
        self._full_gradients = FullGradients(
            model,
            plan=plan,
            blocks=self._blocks,
            weights=self._weights,
            machine=self._machine,
            memory=self._memory,
        )
        self._staged_bytes = staged_bytes(chain, plan.slices, plan.rounds)
        self.torn = self._stepping = self._gone = self._half_revised = False
        self._open()

    def _open(self) -> None:
        self._closed = self._warm = False
        self._cap()
        self._interpreter: Interpreter = self._machine.interpreter(self._program, self._actions)
        self._cursor = Cursor(self._program, self._interpreter, self._memory.expect)
        self._rounds.open(self._cursor)

    def _cap(self) -> None:
        if self._plan.gpu_budget_bytes:
            room = self._machine.cap(self._plan.gpu_budget_bytes, self._plan.gpu_peak_bytes)
            self._forward_only.room_bytes = room

    @property
    def waited_s(self) -> float:
        """The seconds that computation has waited for copies and CPU updates since the engine was made."""
        return self._interpreter.waited_s

    @property
    def recording(self) -> Recording | None:
        """The recording, under way, of when operations run; None when nothing is recorded."""
        return self._interpreter.recording

    def record(self) -> None:
        """Start recording when the operations of the next steps run. Operations between two steps are not recorded."""
        self._usable()
        self._interpreter.record()

    def forget_recording(self) -> None:
        """Stop recording when operations run, and drop what was recorded."""
        self._interpreter.recording = None

    def recorded(self) -> Measured | None:
        """The times at which the operations of two steps ran; None until the step that follows these two is done.
        Returning the times ends the recording."""
        if (recording := self.recording) is None or not recording.is_full:
            return None
        self.drain()  # ends all recorded operations
        self.forget_recording()
        return recording.measured()

    def step(
        self,
        batches: Sequence[Mapping[str, Tensor]],
        *,
        seeds: Sequence[int],
        learning_rate: float | Sequence[float],
        optimizer: Group | Sequence[Group] | None = None,
        **model_kwargs: Any,
    ) -> StepResult:
        """Do one optimizer step over the slices (micro-batches) `batches`: host tensors `input_ids` and `labels` [rows,
        length]. Slice k runs under the random seed `seeds[k]`; the rounds take the slices in order. Some updates may
        still be running on the CPU when this returns: `drain` waits for them. `learning_rate`: one for all tensors, or
        one per parameter group. `optimizer`: the settings in this step, if they differ from those that the engine was
        made with. `model_kwargs`: further keyword arguments of the model.

        Raises any error of the model, of a copy or of an update. The weights are then those before the step, or
        torn."""
        self._usable(computes=True)
        slices, rounds = self._plan.slices, self._plan.rounds
        if not len(batches) == len(seeds) == rounds * slices:
            raise ValueError(f"{len(batches)} batches, {len(seeds)} seeds for a plan of {rounds} × {slices} slices")
        groups = self._groups if optimizer is None else groups_of(optimizer)
        try:
            return self._step(batches, seeds, self._values(learning_rate, groups), model_kwargs)
        except RuntimeError as error:
            if is_out_of_memory(error):  # free what its frames hold, so that its handler can make a smaller engine
                forget_frames(error)
            raise

    def _step(
        self,
        batches: Sequence[Mapping[str, Tensor]],
        seeds: Sequence[int],
        values: StepValues,
        model_kwargs: Mapping[str, Any],
    ) -> StepResult:
        machine, slices = self._machine, self._plan.slices
        parts = [slice(start, start + slices) for start in range(0, len(batches), slices)]
        tokens = [dict(enumerate(self._shared.tokens(batches[part]))) for part in parts]
        self._memory.expect_loose()
        staged = machine.stage_step([*batches, *tokens], self._staged_bytes)
        self._memory.expect(())
        self._weights.begin()
        before = machine.random_state()
        self._shorter.expect(batches)
        machine.reset_peak()
        with machine.computing():
            given_kwargs = {name: self._rounds.given(value) for name, value in model_kwargs.items()}
        self.torn = self._stepping = True  # torn until all of the step is done
        try:
            with machine.computing(), torch.autograd.set_multithreading_enabled(False):
                if self.recording is not None:
                    self.recording.begin_step(values.number)
                if machine.is_cold:
                    self._memory.expect_loose()
                    self._rounds.warm_up()
                self._cursor.begin(values)
                self._gradients.begin_step(values)
                results: list[Tensor] = []
                for part, rows in zip(parts, staged[len(batches) :], strict=True):
                    self._gradients.begin_round(list(rows.values()))
                    results += self._rounds.run(staged[part], seeds[part], given_kwargs)
                self._cursor.end()
        except BaseException as error:
            if is_out_of_memory(error):  # free what its frames hold, before tensors come back to the device
                forget_frames(error)
            self._take_back()
            raise
        finally:
            self._stepping = False
            machine.set_random_state(before)
        self._weights.check_closed()
        self.steps_done += 1
        self.torn = False
        if not self._warm:
            self._warm = True
            self._cap()
        losses, figures = apart(results)
        return StepResult(
            losses=losses, figures=figures, grad_norm=values.take_grad_norm(), peak_bytes=machine.peak_bytes()
        )

    def _values(self, learning_rate: float | Sequence[float], groups: tuple[Group, ...]) -> StepValues:
        number = self.steps_done + 1
        with self._machine.on_host():
            host_count = torch.full((), float(number))
            count = torch.full((), float(number), device=self._machine.device)
        return StepValues(
            number=number, learning_rate=learning_rate, groups=groups, host_count=host_count, device_count=count
        )

    def _enter(self, block: ModelBlock, *args: Any, **kwargs: Any) -> Any:
        """Run `block` on these arguments, in place of its module's forward."""
        runs: Forward | FullGradients | Rounds
        if self._stepping:
            runs = self._rounds
        elif self._forward_only.running:
            runs = self._forward_only
        elif self._full_gradients.running:
            runs = self._full_gradients
        else:
            raise model_in_engine()
        return runs.enter(block, *args, **kwargs)

    def _usable(self, *, computes: bool = False) -> None:
        """Raise unless the engine can be used. `computes`: the model will run, so autocast is refused, too."""
        if self.torn:
            raise weights_torn()
        if self._closed:
            raise engine_closed()
        if computes:
            refuse_autocast(self._machine.device)

    def _take_back(self) -> None:
        """After an error in a step: return to where the step began, if none of its updates has begun."""
        try:
            with self._machine.computing():
                whole = self._cursor.take_back()
        except BaseException:  # the error came from a queue, or a queue failed as well: the step's own error is raised
            whole = False
        self._tear()
        if whole:
            with self._machine.computing():
                self._weights.take_back()
            self._open()
            self._cursor.forget()
            self.torn = False

    def _tear(self) -> None:
        """After an error that left weights torn: end the threads, and free what the step held."""
        self.torn = True
        self._memory.expect(())
        self._end()
        self._rounds.clear()
        self._machine.synchronize()  # copies may still be using what is freed now
        self._gradients.clear()
        self._weights.drop_transient()

    def drain(self) -> None:
        """Finish every update, so that all weights and states are those after the last step. Raises the first error of
        a copy or an update."""
        self._usable()
        try:
            with self._machine.computing():
                self._cursor.run_carried()
            self._interpreter.drain()
            self._machine.forget_batches()
            if self.recording is not None:
                self.recording.drained()
        except BaseException:
            self._tear()
            raise

    def evaluate(self, batches: Sequence[Mapping[str, Tensor]]) -> Evaluation:
        """The loss of each of `batches` (host tensors `input_ids` and `labels` [rows, length]) with the current weights
        and the model in evaluation mode, within the plan's budget. Finishes pending updates first. Raises UserError
        "evaluation-does-not-fit"."""
        self._usable(computes=True)
        self.drain()
        return self._forward_only.evaluate(batches)

    def check_evaluation(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        """Raise UserError "evaluation-does-not-fit" if evaluating batches of these shapes would exceed the budget.
        Nothing is evaluated."""
        self._usable(computes=True)
        self._forward_only.check_fits(batches)

    def generate(self, prompts: Sequence[Sequence[int]], *, new_tokens: int, pad: int) -> list[list[int]]:
        """Generate greedily with the model's own `generate` and the current weights, within the plan's budget,
        key-value cache included. Returns the new token ids, at most `new_tokens`, for each of `prompts` (lists of token
        ids). The token id `pad` fills up answers that end before others. Finishes pending updates first. Raises
        UserError "generation-does-not-fit"."""
        self._usable(computes=True)
        self.drain()
        return self._forward_only.generate(prompts, new_tokens=new_tokens, pad=pad)

    def check_generation(self, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> None:
        """Raise UserError "generation-does-not-fit" if generating `new_tokens` tokens after each of `prompts` would
        exceed the budget. Nothing is generated."""
        self._usable(computes=True)
        self._forward_only.check_generation(prompts, new_tokens=new_tokens)

    def revise(
        self,
        batches: Sequence[Mapping[str, Tensor]],
        names: Collection[str],
        revise: Revise,
        states: Callable[[], Iterable[tuple[str, Mapping[str, Tensor]]]],
        **model_kwargs: Any,
    ) -> int | None:
        """Replace frozen weights by what `revise` makes of the gradient of each frozen weight in `names`, the sum over
        `batches` with the model in evaluation mode: see `worker.engine.full_gradients`. Then replace trained tensors by
        what `states` gives, as in `replace`. Finishes pending updates first.
        `model_kwargs`: further keyword arguments of the model. Returns the most device bytes in use meanwhile (None
        when they are not counted). After an error some weights are revised and others not: they are `torn`, and
        `load_state`, which brings no frozen weights, does not help."""
        self._usable(computes=True)
        self.drain()
        self.torn = self._half_revised = True
        peak_bytes = self._full_gradients.run(batches, names, revise, states, model_kwargs)
        self.torn = self._half_revised = False
        return peak_bytes

    def stop_metering(self) -> None:
        """Stop counting device bytes on the CPU, where counting takes time: results of `step` and `evaluate` then have
        `peak_bytes` None. On a GPU counting goes on."""
        self.drain()
        self._machine.stop_metering()

    def state(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield (name, tensors by state) of every trained tensor, one at a time, in host memory: with AdamW {"master",
        "exp_avg", "exp_avg_sq"}, fp32. Some are the engine's own tensors, which the next item may change: use or copy
        each before asking for the next."""
        self.drain()
        self._weights.begin()
        yield from self._weights.state()

    def state_to_save(self) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        """Yield (name, tensors by state) as `state` does, in the form in which a checkpoint stores them. For a tensor
        whose optimizer states are on disk, this is a reference to copy them from or, where a checkpoint can name these
        states instead of copying them, only what is not on disk."""
        self.drain()
        self._weights.begin()
        yield from self._weights.state_to_save()

    def masters(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield (name, {"master": fp32 weight}) of every trained tensor, one at a time as `state`. Where the master is
        on disk, the working copy is given instead, which is the master rounded to the working dtype."""
        self.drain()
        yield from self._weights.masters()

    def frozen(self, names: Collection[str] | None = None) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield (name, {"master": weight}) of every tensor that is not trained, in host memory; with `names`, only of
        these."""
        self._usable()
        yield from self._weights.frozen(names)

    def written(self, dtypes: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Any]]:
        """Yield (name, {"weight": tensor}) of each tensor in `dtypes` (name -> dtype), trained or not, one at a time:
        its fp32 value, rounded once to that dtype. Where the fp32 value is on disk, an object to read it piece by piece
        takes the tensor's place."""
        self.drain()
        self._weights.begin()
        yield from self._weights.written(dtypes)

    def load_state(self, tensors: Iterable[tuple[str, Mapping[str, Tensor]]], *, step: int) -> None:
        """Replace all weights and optimizer states by `tensors`, which `state` gave after `step` steps, and continue
        from there. Raises ValueError if they are another model's."""
        if self._half_revised:
            raise weights_torn()
        if not self.torn:
            self.drain()
        elif self._closed:
            self._open()
        self.torn = True  # until all of the state is there
        with self._machine.computing():
            self._weights.load(tensors)
        self._cursor.forget()
        self.torn = False
        self.steps_done = step

    def replace(self, tensors: Iterable[tuple[str, Mapping[str, Tensor]]]) -> None:
        """Replace the weights and states of some tensors between two steps, in the form of `state` and `frozen`, but
        with moments in fp32. Raises ValueError for another model's."""
        self.drain()
        with self._machine.computing():
            self._weights.replace(tensors)

    def close(self) -> None:
        """End the engine's threads and free all memory, that of the model's weights included. Pending updates are not
        done. After `restore`, or a second time, it does nothing."""
        if self._gone:
            return
        self._end()
        self._weights.let_go()
        self._let_go()
        self.torn = False  # there are no weights any more

    def _let_go(self) -> None:
        """Leave nothing on the device. The engine's maker, and the model, may still hold this engine while the next one
        is made, and a single tensor would keep all of this plan's memory from the next one."""
        self._rounds.let_go()
        self._cursor.let_go()
        self._gradients.clear()
        for block in self._blocks:
            block.let_go()
        self._machine.synchronize()  # copies may still be using what is freed now
        self._machine.forget_batches()
        self._machine.forget_threads()
        self._memory.close()
        self._gone = True

    def _end(self) -> None:
        self._closed = True
        self._machine.uncap()
        self._rounds.close()
        self._interpreter.close()

    def restore(self) -> nn.Module:
        """End the engine and return the plain model with its trained weights in host memory. If the weights are torn
        (some before a step, some after it), they come back so. Raises the first error of a copy or an update; the
        weights are then torn."""
        if self.torn:
            with self._machine.computing():
                self._weights.take_back()
            self.torn = False
        else:
            self.drain()
        self._end()
        for block in self._blocks:
            block.give_back_forward()
        self._weights.give_back()
        self._let_go()
        return self._model


# ---- the errors that are raised where an engine, or the model that it has taken over, cannot be used


def model_in_engine() -> UserError:
    """The UserError to raise where the user calls the model itself while an engine holds its weights."""
    return UserError(
        "The model was called while an engine has its weights.",
        code="weights-in-engine",
        exit_code=Exit.USAGE,
        hint="call the engine: step, evaluate, generate; or restore() the model before",
    )


def weights_torn() -> UserError:
    """The UserError to raise where an error has left some weights as before a step and others as after it."""
    return UserError(
        "An error ended a step in the middle of its updates.",
        code="weights-torn",
        hint="load a checkpoint; restore() gives the weights as they are: some before the step, some after",
    )


def engine_closed() -> UserError:
    """The UserError to raise where an engine is used whose threads have ended."""
    return UserError(
        "The engine has ended.", code="engine-closed", exit_code=Exit.USAGE, hint="prepare() the model again"
    )
