"""Lets people train with the engine in a training loop of their own: one line before the loop, one in it, one after it.

For example (examples/own_loop.py is a whole program):

    engine = prepare(model, batch, optimizer=optimizer, gpu_budget="6GiB")
    for batch in batches:
        loss = engine.step(batch)
        scheduler.step()
    model = engine.restore()
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from planner.arrange.pack import can_arrange
from planner.errors import Exit, UserError
from planner.graph import take_turns
from planner.job.room import STATE_BYTES_PER_PARAMETER
from planner.machine.this_machine import check_budgets
from planner.measure.analysis import Analysis, analyse_model, estimate_times, measure_times
from planner.measure.choose_compiled import why_off
from planner.measure.machine_rates import measure_hardware
from planner.measure.target import find_target
from planner.schedule.chain import Chain, slice_size
from planner.schedule.plan import Plan
from planner.search.problem import Problem
from planner.units import counted, format_bytes, format_seconds, parse_bytes
from worker.data.padding import IGNORED, num_items
from worker.data.seeds import micro_batch_seed
from worker.engine.engine import Engine
from worker.lent_model import ModelGuard, check_model, keep_weights_in, lend
from worker.runtime.arena import take_over
from worker.storage.checkpoint import Checkpoints, Origin
from worker.torch_optimizers import TorchOptimizers

log = logging.getLogger(__name__)

_METERED = 2  # steps

Batch = Mapping[str, Tensor]
"""The arguments of the model's forward, tensors by name. A language model's include `input_ids` and `labels` [rows,
length], int64. The forward returns the loss, or an object with a `loss`."""


def prepare(
    model: nn.Module,
    batch: Batch | Sequence[Batch],
    *,
    optimizer: Optimizer | Sequence[Optimizer],
    gpu_budget: str | int | None = None,
    cpu_budget: str | int | None = None,
    max_grad_norm: float | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    measure: bool = True,
    compile: str = "off",
) -> LoopEngine:
    """Make an engine that trains `model` within memory budgets, with the numbers of plain PyTorch.

    `batch` is a sample of the largest shape that will come, or a list of samples for a step of several micro-batches,
    whose gradients add up. `model` is on the CPU, in fp32 or in bf16 (then masters and moments are fp32); parameters
    that do not require grad are not trained. `optimizer` is a fresh AdamW over all parameters that require grad, or a
    list of an AdamW and a Muon that share them. Groups' learning rates are read at every step, so torch's schedulers
    work. Budgets are bytes or texts like "6GiB"; the default is the memory that is free. Clipping: `max_grad_norm`,
    None for none. Micro-batch k of step n runs under `torch.manual_seed(worker.data.seeds.micro_batch_seed(seed, n,
    k))`. `measure`: time the model's blocks on the device first, which takes seconds; otherwise the plan rests on an
    estimate. `compile`: "auto" lets inductor compile the layers (measuring then takes minutes) and uses compiled code
    where it is faster; losses and gradients then differ in the last bits.

    Raises UserError for a model, an optimizer or a batch that the engine cannot train with, and where no plan fits the
    budgets."""
    batches = _listed(batch)
    check_model(model)
    _check_sample(model, batches, "prepare()")
    if compile not in ("auto", "off"):
        raise UserError(
            f"compile is {compile!r}; it must be auto or off.",
            code="compile-not-usable",
            exit_code=Exit.USAGE,
            hint='prepare(..., compile="auto")',
        )
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    arranged = place.type == "cuda" and compile == "off" and can_arrange() and take_over() is not None
    with contextlib.ExitStack() as undo:
        lend(model, place, undo)
        undo.callback(take_turns(model, _largest(batches), place))
        optimizers = TorchOptimizers(optimizer, model)
        analysis = analyse_model(
            model, _largest(batches), device=place, arranged=arranged, optimizers=optimizers.kinds(model)
        )
        if len(batches) > 1 and not analysis.sums_slices:
            raise UserError(
                f"{type(model).__name__} averages its loss within each micro-batch.",
                code="loss-per-slice",
                exit_code=Exit.USAGE,
                numbers=(f"{len(batches)} micro-batches, and its loss does not use num_items_in_batch",),
                hint="prepare it with one, larger, batch",
            )
        analysis.check_slices(len(batches))
        if analysis.inexact:
            log.info("model: results equal plain PyTorch's within rounding, because %s", "; ".join(analysis.inexact))
        dtype, clip = next(model.parameters()).dtype, max_grad_norm is not None
        compiling = compile == "auto" and _compiles(place, measure=measure)
        plan, chain = _plan(
            analysis,
            place,
            dtype,
            gpu_budget,
            cpu_budget,
            len(batches),
            clip=clip,
            measure=measure,
            compiling=compiling,
        )
        log.info(
            "plan: a step takes %s, the device holds %s at most",
            format_seconds(plan.step_s),
            format_bytes(plan.gpu_peak_bytes),
        )
        engine = Engine(
            model,
            plan=plan,
            chain=chain,
            optimizer=optimizers.settings(),
            max_grad_norm=max_grad_norm,
            device=place,
            metered=True,
        )
        keep_weights_in(model, undo)
        guard = ModelGuard(model, map(model.get_submodule, analysis.names.all))
        return LoopEngine(engine, model, plan, _largest(batches), optimizers, guard, seed=seed, undo=undo.pop_all())


class LoopEngine:
    """The engine that `prepare` returns: it does a user's training steps under a plan.

    plan         the plan it works under
    grad_norm    the global norm of the last step's gradients before clipping; None without clipping
    peak_bytes   the most bytes of device memory in use during the last step; None before the first step. On the CPU,
                 where counting takes time, only the first two steps are counted, and the second one's value is kept

    Until `restore` the model's parameters are shapes without content. When `step` returns, some updates may still be
    running on the CPU."""

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        plan: Plan,
        sample: Batch,
        optimizers: TorchOptimizers,
        guard: ModelGuard,
        *,
        seed: int,
        undo: contextlib.ExitStack,
    ) -> None:
        self.plan = plan
        self.grad_norm: Tensor | None = None
        self.peak_bytes: int | None = None
        self._engine, self._model, self._sample, self._optimizers = engine, model, sample, optimizers
        self._guard, self._seed, self._undo = guard, seed, undo
        self._metered = 0

    @property
    def steps_done(self) -> int:
        """The number of optimizer steps done so far, including those before the checkpoint that `load` has loaded."""
        return self._engine.steps_done

    def step(self, batch: Batch | Sequence[Batch]) -> Tensor:
        """Do one optimizer step over as many micro-batches as `prepare` was given. Returns the loss, a 0-dimensional
        tensor on the device: the model's own for one micro-batch, the mean over all trained tokens for several.

        Raises UserError for a batch that the plan is not for, and any error of the model. After an error before the
        step's first update, as in the model's forward, the weights are those before the step, and the next step may
        follow. After a later error only `load`, `restore` and `close` work ("weights-torn")."""
        batches = _listed(batch)
        self._check(batches)
        seeds = [micro_batch_seed(self._seed, self.steps_done, k) for k in range(len(batches))]
        several = {"num_items_in_batch": torch.tensor(sum(map(self._num_items, batches)))} if len(batches) > 1 else {}
        rates, settings = self._optimizers.learning_rates(), self._optimizers.settings()
        with self._using(steps=True):
            result = self._engine.step(batches, seeds=seeds, learning_rate=rates, optimizer=settings, **several)
        self._optimizers.saw_step()
        self.grad_norm = result.grad_norm
        self._keep_peak(result.peak_bytes)
        return result.losses[0] if len(batches) == 1 else torch.stack(result.losses).sum()

    def _keep_peak(self, peak_bytes: int | None) -> None:
        if peak_bytes is None:  # counting has stopped
            return
        self.peak_bytes = peak_bytes
        self._metered += 1
        if self._metered == _METERED:
            self._engine.stop_metering()

    def evaluate(self, batch: Batch | Sequence[Batch]) -> Tensor:
        """The loss, in evaluation mode and with the current weights, of a batch, or of several batches together: then
        the mean over all their tokens. Stays within the budget. Raises UserError where the batches do not fit it, and
        where several batches have no tokens to weigh them by, or not one label to predict."""
        batches = _listed(batch)
        _check_sample(self._model, batches, "evaluate()")
        if len(batches) > 1 and not all({"input_ids", "labels"} <= batch.keys() for batch in batches):
            raise _unfit(f"{len(batches)} batches, and no tokens to weigh them by", "give evaluate() one at a time")
        if len(batches) == 1:
            with self._using(steps=False):
                return self._engine.evaluate(batches).losses[0]
        counts = [self._num_items(b) for b in batches]
        if not any(counts):
            raise _unfit("none has a label to predict", "give evaluate() labels other than -100")
        # The mean over no token is NaN, so batches without a label to predict are left out.
        with self._using(steps=False):
            losses = torch.stack(self._engine.evaluate([b for b, n in zip(batches, counts, strict=True) if n]).losses)
        weights = torch.tensor([n for n in counts if n], device=losses.device)
        return (losses * weights).sum() / weights.sum()

    def generate(self, prompts: Sequence[Sequence[int]], *, new_tokens: int, pad: int = 0) -> list[list[int]]:
        """Generate greedily with the model's own `generate` and the current weights, within the budget. Returns the new
        token ids, at most `new_tokens`, for each of `prompts` (lists of token ids). The token id `pad` fills up an
        answer that ends before others. Raises UserError where the prompts do not fit, where there is none or one is
        empty, and where the model has no `generate`."""
        if not hasattr(self._model, "generate"):
            raise UserError(
                f"{type(self._model).__name__} has no generate() and cannot write texts.",
                code="generation-not-usable",
                exit_code=Exit.USAGE,
                hint="use a model of transformers with a language-modelling head (…ForCausalLM)",
            )
        if not prompts or not all(map(len, prompts)):
            number = f"prompt {list(map(len, prompts)).index(0)} of {len(prompts)} has no token" if prompts else "none"
            raise UserError(
                "There is no text to continue.",
                code="empty-prompt",
                exit_code=Exit.USAGE,
                numbers=(number,),
                hint="give generate() lists of at least one token; bos_token_id starts from nothing",
            )
        with self._using(steps=False):
            return self._engine.generate(prompts, new_tokens=new_tokens, pad=pad)

    @contextlib.contextmanager
    def _using(self, *, steps: bool) -> Iterator[None]:
        """A context in which the engine runs the model. Raises UserError "model-changed" where the user has changed the
        model."""
        self._guard.check(steps=steps)
        try:
            yield
        finally:
            self._guard.settle()

    def _num_items(self, batch: Batch) -> int:
        """The number of tokens that the loss is the mean over. An encoder-decoder predicts the first label, too."""
        return int((batch["labels"] != IGNORED).sum()) if _is_encoder_decoder(self._model) else num_items(batch)

    def _check(self, batches: Sequence[Batch]) -> None:
        if len(batches) != self.plan.rounds * self.plan.slices:
            passed = counted(len(batches), "micro-batch", "micro-batches")
            raise _unfit(
                f"{passed}, the plan is for {self.plan.rounds * self.plan.slices}",
                "give as many as prepare() was given",
            )
        for batch in batches:
            if batch.keys() != self._sample.keys():
                raise _unfit(
                    f"it has {', '.join(sorted(batch))}; the plan is for {', '.join(sorted(self._sample))}",
                    "give prepare() a sample with the same entries",
                )
            for name, tensor in batch.items():
                room = self._sample[name].shape
                if len(tensor.shape) != len(room) or any(n > m for n, m in zip(tensor.shape, room, strict=True)):
                    raise _unfit(
                        f"{name} has shape {list(tensor.shape)}, the plan is for {list(room)} at most",
                        "give prepare() a sample of the largest shape",
                    )

    def save(self, path: Path | str) -> Path:
        """Write a checkpoint, all that training needs to go on, into the folder `path`/step-N, where N is the number of
        steps done. Once it is on disk, older checkpoints in `path` are removed. Returns its folder. Raises UserError
        when the disk is full or a weight or moment is not finite."""
        trained = sum(p.numel() for p in self._model.parameters() if p.requires_grad)
        needed = STATE_BYTES_PER_PARAMETER * trained + 2**20
        return _checkpoints(Path(path)).save(self.steps_done, self._engine.state(), needed)

    def load(self, path: Path | str) -> None:
        """Continue from the newest checkpoint that `save` wrote into `path`, bit for bit as if training had not
        stopped. The state of a learning-rate scheduler is not part of it. Raises UserError where there is no undamaged
        checkpoint, and ValueError when it is another model's."""
        last = _checkpoints(Path(path)).latest()
        if last is None:
            raise UserError(f"There is no checkpoint in {path}.", code="no-checkpoint", exit_code=Exit.USAGE)
        self._engine.load_state(last.tensors(), step=last.step)
        self._optimizers.forget()
        self._guard.settle()

    def restore(self) -> nn.Module:
        """End the engine and return the plain model on the CPU, with its trained weights and in the training or
        evaluation mode that it had. After an error in the middle of a step's updates some weights are those before the
        step and some those after; the log says so."""
        if self._engine.torn:
            log.warning(
                "restore: an error ended step %d in the middle of its updates: some weights are those before it, "
                "some those after",
                self.steps_done + 1,
            )
        self._keep_norm()
        model = self._engine.restore()
        self._undo.close()
        return model

    def close(self) -> None:
        """End the engine and free the weights: the model is not given back."""
        self._keep_norm()
        self._engine.close()

    def _keep_norm(self) -> None:
        """Move `grad_norm` to the host: a tensor on the device would keep all of the engine's memory there."""
        if self.grad_norm is not None:
            self.grad_norm = self.grad_norm.cpu()


def _listed(batch: Batch | Sequence[Batch]) -> list[Batch]:
    return [batch] if isinstance(batch, Mapping) else list(batch)


def _largest(batches: Sequence[Batch]) -> Batch:
    return max(batches, key=lambda batch: slice_size({name: t.shape for name, t in batch.items()}))


def _unfit(number: str, hint: str) -> UserError:
    return UserError(
        "This batch does not fit the plan.", code="batch-not-usable", exit_code=Exit.USAGE, numbers=(number,), hint=hint
    )


def _check_sample(model: nn.Module, batches: Sequence[Batch], receiver: str) -> None:
    wanted = ("input_ids", "labels") if _is_language_model(model) else ()
    for batch in batches:
        if not batch:
            raise _unfit("it is empty", f"give {receiver} what the model's forward takes")
        if missing := [name for name in wanted if name not in batch]:
            raise _unfit(f"it has no {missing[0]}", f"give {receiver} a batch with input_ids and labels")
    if not batches:
        raise _unfit("there is none", f"give {receiver} a batch, or a list of them")


def _is_language_model(model: nn.Module) -> bool:
    """Whether the model's forward takes tokens."""
    return "input_ids" in inspect.signature(model.forward).parameters


def _is_encoder_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _compiles(device: torch.device, *, measure: bool) -> bool:
    reason = why_off("auto", device, exact=False) if measure else "nothing is measured"
    if reason:
        log.info("compile: off, because %s", reason)
    return reason is None


def _plan(
    analysis: Analysis,
    device: torch.device,
    dtype: torch.dtype,
    gpu_budget: str | int | None,
    cpu_budget: str | int | None,
    slices: int,
    *,
    clip: bool,
    measure: bool,
    compiling: bool,
) -> tuple[Plan, Chain]:
    target = find_target(device, dtype, measure=True)
    gpu, cpu = (None if size is None else parse_bytes(size) for size in (gpu_budget, cpu_budget))
    check_budgets(gpu, cpu, gpu_bytes=target.gpu_bytes, ram_bytes=target.ram_bytes)
    hardware = measure_hardware(device, dtype) if measure else target.machine
    if measure:
        times = measure_times(analysis, device, hardware, slices=slices, compiling=compiling)
    else:
        times = estimate_times(analysis, hardware)
    chain = analysis.chain(times)
    plan = Problem(
        chain=chain,
        hardware=hardware,
        gpu_budget_bytes=gpu or hardware.gpu_bytes,
        cpu_budget_bytes=cpu or hardware.cpu_bytes,
        slices=slices,
        clip=clip,
    ).plan()
    return plan, chain


def _checkpoints(folder: Path) -> Checkpoints:
    return Checkpoints(folder, keep=1, origin=Origin(job={}, data="", total_steps=0, plan=""))
