"""Puts a run together (job, plan, data, model, engine, checkpoints), trains, and writes the model folder."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from planner.codec import from_json
from planner.errors import Exit, UserError, disk_full, first_line, is_disk_full
from planner.graph import EAGER
from planner.job.base import BESIDE_WEIGHTS, PARTS, keep_base
from planner.job.frozen import check_frozen
from planner.job.output_dir import Place
from planner.job.room import check_room, checkpoint_bytes
from planner.job.schema import Job
from planner.keys.adapter import takes_from_base
from planner.machine.hardware import Hardware
from planner.models.encoder_decoder import has_pairs
from planner.models.hf_model import masked_of, other_reference, pairs_of
from planner.models.peft_parts import as_published
from planner.models.quantized import other_on_cuda
from planner.models.rope import rope_border
from planner.models.tokenizer import load_tokenizer
from planner.models.written import written_dtype
from planner.optimizers.base import shares
from planner.out_of_memory import told_to_people
from planner.run.folder import RunFolder
from planner.run.step_times import step_times
from planner.schedule.chain import Chain
from planner.schedule.compile import compile_program
from planner.schedule.disk_use import disk_use
from planner.schedule.earlier import chain_of, plan_of
from planner.schedule.plan import Plan
from planner.schedule.verify import verify
from planner.units import counted, format_bytes, format_seconds
from worker.data.batches import Batches
from worker.engine.engine import Engine
from worker.engine.stored_states import Scratch
from worker.runtime.arena import take_over
from worker.storage.checkpoint import Checkpoint, Checkpoints, Origin
from worker.storage.model_folder import Output
from worker.storage.states import StatesOnDisk
from worker.storage.trained import TrainedWeights, room_kept, weights_room
from worker.subspace.change import Projectors
from worker.training.best import Best, known_losses
from worker.training.card import model_card
from worker.training.changes import Changes
from worker.training.delivery import Delivery, without_overflow
from worker.training.ends import tell_ends
from worker.training.evaluation import Evaluations
from worker.training.learning_rate import optimizer_of
from worker.training.loop import Training, Trains
from worker.training.metrics import Metrics, read_metrics, steps_trained, tell_broken_lines
from worker.training.model import check_reach, load_model
from worker.training.reference import Reference, gone
from worker.training.rehearsal import Rehearsal
from worker.training.samples import Samples
from worker.training.step_forecast import StepForecast
from worker.training.stop import StopRequest
from worker.training.stored import forget_stores, open_scratch, open_store, parts_of_drives, passing_store
from worker.training.timeline import Timeline

log = logging.getLogger(__name__)


def run_job(folder: RunFolder, stop: StopRequest) -> bool:
    """Train the job of the run folder `folder`, from its last checkpoint if there is one. Returns True at the end of
    the run, False if a stop was asked for. Raises UserError."""
    if torch.cuda.is_available():
        take_over()
    with told_to_people(
        "The GPU ran out of memory, although the plan should fit.",
        hint="give a smaller gpu_budget, so that other programs have room",
    ):
        return refer_to_other(folder, stop) and _Run(folder).train(stop)


def refer_to_other(folder: RunFolder, stop: StopRequest) -> bool:
    """Compute the reference's log-probabilities with the job's `ref_model`, where it has one and they are not known.
    That model is in memory only meanwhile. Returns False where a stop was asked for. Raises UserError
    "ref-model-differs" for a model of another shape than the job's, whose plan it uses."""
    job = Job.from_resolved(folder.resolved)
    if job.ref_model is None:
        return True
    keep_base(job, folder)
    plan, chain, _ = read_plan(folder)
    batches = batches_of(folder, job, load_tokenizer(job))
    begun = folder.last_checkpoint_step() is not None
    reference = Reference(job, batches, folder, plan, begun=begun)
    if reference.complete:
        return True
    if begun:
        raise gone(folder)
    log.info("reference: %s", job.ref_model)
    try:
        return _score_by_other(job, folder, plan, chain, reference, stop)
    finally:
        gc.collect()  # engine and model know each other; the job's own model is read next


def _score_by_other(
    job: Job, folder: RunFolder, plan: Plan, chain: Chain, reference: Reference, stop: StopRequest
) -> bool:
    revision = job.model_revision if job.ref_model == job.model else None
    other = {
        "model": job.ref_model,
        "model_revision": revision,
        "adapter_name_or_path": None,
        "init_lora_weights": True,
    }
    model = load_model(job.model_copy(update=other))
    shapes = {tensor.name: tensor.elements for tensor in (*chain.tensors(), *chain.frame_tensors)}
    if shapes != {name: getattr(p, "holds", p.numel()) for name, p in model.named_parameters()}:
        raise other_reference(job)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with (
        passing_store(job, plan, chain, model) as states,
        open_scratch(job, plan, chain) as scratch,
        closing(engine_of(job, model, plan, chain, device, states, scratch)) as engine,
        Metrics(folder.metrics) as metrics,
    ):
        stop.begin()
        return reference.compute(engine, metrics, stop)


def batches_of(folder: RunFolder, job: Job, tokenizer: PreTrainedTokenizerBase) -> Batches:
    """The batches of a run folder's job. Its tokens are kept in the folder. Raises UserError."""
    return Batches(
        job,
        tokenizer,
        folder.path / "data",
        folder.read_frozen(),
        pairs=pairs_of(job),
        masked=masked_of(job),
        border=rope_border(job),
    )


def engine_of(
    job: Job,
    model: nn.Module,
    plan: Plan,
    chain: Chain,
    device: torch.device,
    states: StatesOnDisk | None = None,
    scratch: Scratch | None = None,
) -> Engine:
    """The engine that trains the job's `model` under `plan`. It counts device bytes."""
    return Engine(
        model,
        plan=plan,
        chain=chain,
        optimizer=optimizer_of(job, model),
        max_grad_norm=job.max_grad_norm,
        device=device,
        metered=True,
        states=states,
        scratch=scratch,
    )


class _Run:
    """The parts of a run, put together so that the cheap steps that may fail come first."""

    def __init__(self, folder: RunFolder) -> None:
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.folder, self.job = folder, (job := Job.from_resolved(folder.resolved))
        if job.lr_scheduler_type == "constant" and job.warmup_steps:
            log.warning("lr_scheduler_type constant has no warm-up, warmup_steps is not used; constant_with_warmup has")
        place = Place(folder=Path(job.output_dir) if job.output_dir else folder.output, token=folder.token())
        if place.published() is None:
            place.try_out()
        self._check_base(only_written=place.published() is not None or folder.has_trained())
        self.plan, self.chain, hardware = read_plan(folder)
        if eager := self.plan.options.count(EAGER.name):
            log.info("plan: %d of %d blocks run by their own code, recomputed", eager, len(self.chain.blocks))
        self.tokenizer = load_tokenizer(job)
        self.batches = batches_of(folder, job, self.tokenizer)
        self.reference: Reference | None = None
        self.width = sum(_planned_lengths(folder, job, self.batches))
        self.forecast = StepForecast(self.plan, self.chain, hardware, self.width)
        log.info("data: the first row, what is learned between ⟦ and ⟧:\n%s", self.batches.sample())
        total = self.batches.total_steps
        self.origin = Origin.of(job, data=self.batches.fingerprint, total_steps=total, plan=self.plan)
        self.checkpoints = Checkpoints(
            folder.checkpoints, keep=job.save_total_limit, origin=self.origin, longer=folder.goes_on.exists()
        )
        self.trained = TrainedWeights(folder.trained, origin=self.origin)
        begun = folder.begun if takes_from_base(job.init_lora_weights) else None
        begins = (begun is not None or job.adapter_name_or_path is not None) and self._begins(place)
        self.model = load_model(self._as_it_begins(begins), begun=begun, begins=begins)
        if torch.cuda.is_available() and (other := other_on_cuda(self.model)) is not None:
            log.info("model: %s", other)
        check_reach(job, self.model, self.batches.largest_token, max(self.batches.lengths))
        ends = tell_ends(job, self.model, self.tokenizer, self.batches)
        self.samples = Samples.of(job, self.tokenizer, self.model)
        converted = functools.partial(as_published, begun) if begun is not None else None
        self.projectors = Projectors(self.model, job) if job.method == "lsp" else None
        output = Output(
            self.model,
            written_dtype(job),
            converted=converted,
            stops=bool(ends.new),
            added=self.projectors.added if self.projectors is not None else (),
        )
        self.parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        stored = self.chain.stored_bytes(self.plan.cpu_updated())
        self.state_bytes = checkpoint_bytes(job, self.chain.saved_bytes, stored)
        for line in shares(self.chain.optimizers, self.parameters):
            log.info("optimizer: %s", line)
        self.delivery = Delivery(
            run=folder,
            place=place,
            output=output,
            trained=self.trained,
            card=lambda step: model_card(
                job,
                read_metrics(folder.metrics),
                step,
                pairs=has_pairs(self.model),
                stops=ends.line(job, self.tokenizer),
            ),
        )

    def _check_base(self, *, only_written: bool = False) -> None:
        """Raise UserError where the base has changed. `only_written`: check only the parts that go to the model folder,
        as the training itself is done."""
        keep_base(self.job, self.folder, parts=BESIDE_WEIGHTS if only_written else PARTS)

    def _begins(self, place: Place) -> bool:
        """Whether the run begins from the start: no model folder, trained weights or checkpoint. Raises UserError."""
        return place.published() is None and self.trained.find() is None and self.checkpoints.latest() is None

    def _as_it_begins(self, begins: bool) -> Job:
        """The job as the model is loaded for it. Where steps were done, the adapter that the job goes on from is left
        out: the checkpoint holds what became of it, and its files may have changed or gone. Raises UserError where the
        adapter is to be read and has changed."""
        job = self.job
        if job.adapter_name_or_path is None:
            return job
        if not begins:
            return job.model_copy(update={"adapter_name_or_path": None})
        check_frozen(job.model_copy(update={"dataset": (), "eval_dataset": None}), self.folder.read_frozen())
        return job

    def train(self, stop: StopRequest) -> bool:
        """Train from the last checkpoint to the end or to a request to stop. If all steps are done already, only write
        the model folder. Returns whether the run came to its end."""
        total, place = self.batches.total_steps, self.delivery.place
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        published = place.published() is not None
        weights = None if published else self.trained.find()
        if published or weights is not None:
            step = steps_trained(read_metrics(self.folder.metrics)) or total  # fewer than total where it ended early
            with Metrics(self.folder.metrics) as metrics:
                self._write_start(metrics, step, step, device)
                stop.begin()
                return self._until_end(metrics, lambda: step, lambda: self._deliver_only(weights))
        self._check_base()  # again: it may have changed while data and model were read
        last = self.checkpoints.latest()
        if self.job.refers:
            self.reference = Reference(self.job, self.batches, self.folder, self.plan, begun=last is not None)
        if last is not None and self.reference is not None and not self.reference.complete:
            raise gone(self.folder)
        if last is None and self.folder.goes_on.exists():
            raise UserError(
                "The checkpoint that this job goes on from is gone, or damaged.",
                code="cannot-go-on",
                numbers=(str(self.folder.checkpoints),),
                hint="offmate rerun the first job begins from the start",
            )
        weight_bytes = self.delivery.output.weight_bytes
        free_bytes = check_room(
            self.folder.path,
            place,
            checkpoint_bytes=self.state_bytes + self.chain.replaced_bytes,
            weight_bytes=weight_bytes,
            best=self.job.load_best_model_at_end,
        )
        _tell_checkpoints(self.job, self.state_bytes, free_bytes)
        if self.projectors is not None:
            log.info(
                "checkpoints: the first after a change of projectors has %s more", format_bytes(self.projectors.bytes)
            )
        reserved = room_kept(self.folder.path, weights_room(weight_bytes))
        use = disk_use(
            self.plan,
            self.chain,
            self.job.disk_paths or (),
            self.job.disk_rated_writes,
            steps=total,
            parts=lambda: parts_of_drives(self.job, self.plan, self.chain, self.model, last),
        )
        if use is not None:
            log.info("disk: %s", "; ".join(use.lines()))
            if last is None:
                use.check()
        states = open_store(self.job, self.plan, self.chain, self.model, run=self.folder, last=last)
        store: AbstractContextManager[object] = nullcontext() if states is None else closing(states)
        scratch = open_scratch(self.job, self.plan, self.chain, self.folder)
        with (
            reserved as give_room,
            store,
            scratch as turns,
            closing(engine_of(self.job, self.model, self.plan, self.chain, device, states, turns)) as engine,
            Metrics(self.folder.metrics) as metrics,
        ):
            resume(engine, last, self.origin, taken_over=states is not None and states.resumed)
            changes = self._changes(engine, metrics)
            if changes is not None and last is not None:
                changes.resume(last)
            self._write_start(metrics, engine.steps_done, last.step if last else None, device)
            stop.begin()
            return self._until_end(
                metrics,
                lambda: engine.steps_done,
                lambda: self._train(engine, metrics, stop, give_room, states, last, changes),
            )

    def _write_start(self, metrics: Metrics, step: int, resumed_from: int | None, device: torch.device) -> None:
        tell_broken_lines(self.folder)
        metrics.write(
            "start",
            step=step,
            total_steps=self.batches.total_steps,
            resumed_from=resumed_from,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        )

    def _changes(self, engine: Engine, metrics: Metrics) -> Changes | None:
        """The changes of projectors of this run; None where there are none."""
        if self.projectors is None:
            return None
        return Changes(projectors=self.projectors, engine=engine, batches=self.batches, metrics=metrics)

    def _train(
        self,
        engine: Engine,
        metrics: Metrics,
        stop: StopRequest,
        give_room: Callable[[], None],
        states: StatesOnDisk | None,
        last: Checkpoint | None,
        changes: Changes | None,
    ) -> tuple[bool, Path | None]:
        """Train, and write the trained weights and the model folder. Returns whether that is done, and the path of the
        model folder."""
        events = read_metrics(self.folder.metrics)
        written = frozenset((event["event"], event["step"]) for event in events)
        best = None
        if Best.wanted(self.job):
            best_weights = TrainedWeights(self.folder.best, origin=self.origin)
            best = Best(job=self.job, kept=best_weights, write=lambda where: self._write(where, engine))
        training = Training(
            job=self.job,
            engine=engine,
            batches=self.batches,
            checkpoints=self.checkpoints,
            metrics=metrics,
            stop=stop,
            state_bytes=self.state_bytes,
            states=states,
            evaluations=Evaluations(
                job=self.job,
                engine=engine,
                batches=self.batches,
                metrics=metrics,
                stop=stop,
                samples=self.samples,
                done=written,
                losses=known_losses(events, last),
            ),
            predicted_s=self.forecast.step_s,
            width=self.width,
            best=best,
            changes=changes,
            timeline=Timeline(engine=engine, width=self.width, write=self.folder.write_timeline),
        )
        if engine.steps_done == 0:
            Rehearsal(
                checkpoints=self.folder.checkpoints,
                checkpoint_bytes=self.state_bytes,
                origin=self.origin,
                states=engine.state if states is None else engine.masters,
                evaluations=training.evaluations,
                write_files=lambda folder: self.delivery.output.write_files(folder, self.model, self.tokenizer),
                metrics=metrics,
                stop=stop,
            ).run()
            if stop.asked:
                return False, None
            if self.reference is not None and not self.reference.complete:
                assert self.job.ref_model is None, "it is computed before this model is loaded"
                if not self.reference.compute(engine, metrics, stop):
                    return False, None
        if not training.run():
            return False, None
        give_room()
        chosen = best.chosen(training.evaluations.losses) if best is not None else None
        weights = self._write(self.trained, engine) if chosen is None else self.trained.take(chosen)
        if best is not None:
            best.kept.remove()
        return self._deliver_only(weights)

    def _write(self, where: TrainedWeights, engine: Engine) -> Checkpoint:
        """Write the engine's current weights. Raises UserError on a full disk."""
        dtypes = without_overflow(
            self.delivery.output.dtypes, lambda: itertools.chain(engine.masters(), engine.frozen())
        )
        try:
            weights = engine.written(dtypes)
            if self.projectors is not None:
                weights = self.projectors.merged(engine, weights)
            return where.write(weights, step=engine.steps_done)
        except OSError as error:
            if not is_disk_full(error):
                raise
            raise disk_full(error, "the trained weights") from error

    def _deliver_only(self, weights: Checkpoint | None) -> tuple[bool, Path]:
        """Write the model folder from `weights`; None: it exists already. Returns True and its path."""
        forget_stores(self.job, self.folder)  # not needed any more: the trained weights are written
        if weights is None:
            path = self.delivery.place.folder
            self.delivery.tidy()
        else:
            path = self.delivery.deliver(weights, self.model, self.tokenizer)
        log.info("the trained model is in %s", path)
        return True, path

    def _until_end(
        self, metrics: Metrics, step: Callable[[], int], act: Callable[[], tuple[bool, Path | None]]
    ) -> bool:
        """Call `act` and return whether the run came to its end. In any case write the last line of metrics.jsonl,
        which says how the run ended."""
        try:
            done, path = act()
        except BaseException:
            try:
                _write_end(metrics, self.folder, self.plan, step(), "failed", None)
            except (OSError, ValueError) as error:  # perhaps the disk is full; the error raised below then says so
                log.warning("the last line of metrics.jsonl could not be written: %s", first_line(error))
            raise
        _write_end(metrics, self.folder, self.plan, step(), "done" if done else "stopped", path)
        return done


def read_plan(folder: RunFolder) -> tuple[Plan, Chain, Hardware]:
    """Read and verify the plan in a run folder. Returns it with its chain (the model's blocks with sizes and times) and
    the hardware that it assumes. Raises UserError "no-plan" where there is none that can be read, and "plan-not-usable"
    where it would not compute what it should."""
    try:
        document = json.loads(folder.plan.read_text("utf-8"))
        plan, chain = plan_of(document["plan"]), chain_of(document["chain"])
        hardware = from_json(Hardware, document["hardware"])
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        reason = "there is none" if isinstance(error, FileNotFoundError) else str(error)
        raise UserError(
            "The run folder has no plan to train under.",
            code="no-plan",
            numbers=(f"{folder.plan}: {reason}",),
            hint=f"python -m planner plan {folder.path} --measure",
        ) from error
    try:
        verify(compile_program(plan, chain), chain, gpu_budget_bytes=plan.gpu_budget_bytes)
    except (ValueError, KeyError, IndexError) as error:
        raise UserError(
            "The plan in the run folder would not compute what it should.",
            code="plan-not-usable",
            numbers=(f"{folder.plan}: {first_line(error)}",),
            hint=f"offmate plans forget {str(document.get('key'))[:12]}, then submit the job again",
        ) from error
    return plan, chain, hardware


def _rows_of(read: int, labels: int) -> str:
    return f"rows of {counted(read, 'token')} and {counted(labels, 'label')}"


def _planned_lengths(folder: RunFolder, job: Job, batches: Batches) -> tuple[int, int]:
    """The row lengths in tokens, of inputs and of labels, of the largest slice that the plan is for. Raises UserError
    "rows-longer-than-planned" where the data have longer rows, for which the plan has no memory."""
    document = folder.read_plan() or {}
    read = document.get("length", job.max_length)  # earlier versions planned for max_length, and not all said so
    labels = document.get("label_length", job.max_target_length or read)
    lengths = batches.lengths
    if lengths[0] > read or lengths[1] > labels:
        raise UserError(
            "The data have longer rows than the plan is for.",
            code="rows-longer-than-planned",
            numbers=(f"{_rows_of(*lengths)}; planned for {_rows_of(read, labels)}",),
            hint="offmate retry ID --allow-changed-data counts and plans them anew",
        )
    return read, labels


def resume(engine: Trains, last: Checkpoint | None, origin: Origin, *, taken_over: bool = False) -> None:
    """Bring `engine` to the state of the checkpoint `last`; None: it stays at the start. `taken_over`: the engine
    already has the optimizer states on disk that the checkpoint names. Raises UserError "cannot-go-on" where the
    checkpoint's tensors have other shapes than the model's, which happens where the user allowed another base."""
    if last is None:
        return
    try:
        engine.load_state(last.tensors(taken_over=taken_over), step=last.step)
    except ValueError as error:
        raise UserError(
            "The checkpoint is not of the model that is there now.",
            code="cannot-go-on",
            exit_code=Exit.USAGE,
            numbers=(first_line(error),),
            hint="offmate rerun ID trains that from the start",
        ) from error
    log.info("checkpoint: going on from step %d (%s)", last.step, last.path)
    if last.origin.plan != origin.plan:
        log.warning("the plan is not that of the checkpoint: from here on results need not be equal to the last bit")


def _tell_checkpoints(job: Job, state_bytes: int, free_bytes: int) -> None:
    """Log when checkpoints come, and how much disk space they take."""
    most = 1 + (job.save_total_limit or 0)  # the oldest is removed only when the newest is on disk
    times = f"every {counted(job.save_steps, 'step')}"
    times += f" or {counted(job.save_minutes, 'minute')}" if job.save_minutes else ""
    how_many = "all are kept" if most == 1 else f"the last {most - 1} are kept" if most > 2 else "the last one is kept"
    log.info("checkpoints: %s, %s each; %s", times, format_bytes(state_bytes), how_many)
    if most * state_bytes > free_bytes:
        log.warning(
            "checkpoints: the disk has room for %d beside the model, wanted are up to %d at a time; save_total_limit: 1"
            " wants two",
            free_bytes // state_bytes,
            most,
        )


def _write_end(metrics: Metrics, folder: RunFolder, plan: Plan, step: int, status: str, output: Path | None) -> None:
    """Write this process's last line to metrics.jsonl: how the run ended, and measured beside planned values."""
    times = step_times(read_metrics(folder.metrics))
    peak, predicted_s = times.gpu_peak_bytes, times.predicted_step_s or plan.step_s
    metrics.write(
        "end",
        step=step,
        status=status,
        output=str(output) if output else None,
        step_s=times.step_s,
        measured_steps=times.steps,
        gpu_peak_bytes=peak,
        predicted_step_s=predicted_s,
        predicted_gpu_peak_bytes=plan.gpu_peak_bytes,
    )
    if times.step_s is not None:
        took, planned = format_seconds(times.step_s), format_seconds(predicted_s)
        log.info("a step took %s, the median of %d; planned %s for such steps", took, times.steps, planned)
    if peak is not None:
        log.info("the device held %s at most, planned %s", format_bytes(peak), format_bytes(plan.gpu_peak_bytes))
