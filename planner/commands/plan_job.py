"""Plans a job: analyses the model, measures times or estimates them, and takes a kept plan or searches for a new
one."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from planner.arrange.pack import can_arrange
from planner.cache import store as kept
from planner.cache.store import Cache, CachedPlan, Question
from planner.codec import from_json, to_json
from planner.commands.answer import Answer
from planner.commands.tell import SILENT, Tell
from planner.counted import Counted
from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.machine.drives import check_place
from planner.machine.hardware import Hardware
from planner.machine.this_machine import check_budgets
from planner.measure.analysis import Analysis, analyse, estimate_times, measure_times
from planner.measure.choose_compiled import why_off
from planner.measure.drive import expected_shares, with_own_drive, with_rates
from planner.measure.machine_rates import measure_hardware
from planner.measure.repeatable import Kernels, kernels_in_force
from planner.measure.target import find_target
from planner.measure.times import Times
from planner.models.files_of_weights import model_read_rate, why_not_in_files
from planner.models.hf_model import beyond_positions, working_dtype
from planner.optimizers.table import ADAMW, OPTIMIZERS
from planner.reports.make_receipt import reference_s, reference_words
from planner.schedule.activation_turns import stored_activations
from planner.schedule.chain import Chain
from planner.schedule.disk_use import DiskUse, disk_use
from planner.schedule.plan import Plan
from planner.search.activations_on_disk import may_be_stored, most_on_disk
from planner.search.from_disk import disk_bytes, may_be_read, with_disk
from planner.search.make_plan import without_loss
from planner.search.problem import Problem
from planner.search.states_on_disk import check_disk_budget, disk_need_bytes, states_on_disk
from planner.units import format_bytes, format_bytes_down
from planner.whatif.batch_size import WANTED, ranked
from planner.whatif.trace import as_traced, traced
from planner.whatif.traced import Traced
from planner.whatif.ways_to_fit import ways_to_fit

log = logging.getLogger(__name__)


def plan_job(
    job: Job,
    device: torch.device,
    *,
    cache: Cache | None,
    measure: bool,
    counted: Counted | None = None,
    tell: Tell = SILENT,
) -> Answer:
    """The plan of a job on this machine. Raises UserError; if no plan fits, the error names changes of the job that
    would fit.

    A kept plan made from measurements is taken first. Otherwise a plan is made from a kept measurement. Otherwise, with
    `measure`, the blocks are measured now; without it, the plan's times are estimated. Without `measure` a GPU is not
    touched, because a job may be running on it: then the plan is always an estimate. It is an estimate, too, if the
    plan depends on the job's tokens and these are not counted yet (`planner.schedule.chain.Chain`).

    The plan is for rows as long as the longest one `counted`, or as long as `max_length` if nothing was counted.

    If the job leaves the split of a step into micro-batches to the planner, the splits that are fastest by the estimate
    are measured, and the fastest of them is taken. Without `measure` the first split by the estimate is taken, and the
    plan is an estimate.

    Measurements use the kernels that the job will use: deterministic ones if it asks for them. `tell` is told what is
    being done.
    """
    with _its_kernels(job):
        answer = _planned(_as_long_as_its_rows(job, counted), device, cache, measure, _distinct_tokens(counted), tell)
    reference = ""
    if job.refers:
        seconds = reference_s(answer.plan, answer.chain, answer.hardware)
        reference = reference_words(seconds, answer.plan.step_s, job.unit)
    return replace(answer, disk=_told_use(job, answer.plan, answer.chain), unit=job.unit, reference=reference)


def check_fits(job: Job, device: torch.device) -> None:
    """Raise the UserError with which `plan_job` would refuse a job that does not fit, as far as its blocks and their
    bytes show this. No plan is searched for, nothing is measured, and a GPU is not touched."""
    with _its_kernels(job):
        smallest = _smallest(lambda of: _Planning(of, device, None, measure=False, distinct_tokens=()), job)
        smallest.check_fits()


def kept_plan(job: Job, device: torch.device, cache: Cache, counted: Counted | None = None) -> Answer | None:
    """The plan that `plan_job` would take from `cache`; None if it would have to measure or search. The job itself must
    give the split of its step into micro-batches. Raises UserError."""
    assert job.is_split
    job, distinct_tokens = _as_long_as_its_rows(job, counted), _distinct_tokens(counted)
    with _its_kernels(job):
        return _Planning(job, device, cache, measure=False, distinct_tokens=distinct_tokens).kept()


def _as_long_as_its_rows(job: Job, counted: Counted | None) -> Job:
    return job if counted is None else job.with_lengths(counted.lengths)


def _distinct_tokens(counted: Counted | None) -> tuple[int, ...]:
    return () if counted is None else counted.distinct_tokens


def _its_kernels(job: Job) -> AbstractContextManager[None]:
    return Kernels().taken() if job.deterministic else nullcontext()


def _told_use(job: Job, plan: Plan, chain: Chain) -> DiskUse | None:
    """How much of the optimizer states and activations is on disk, and what that does to the drives; also logged. None
    if nothing is. Raises UserError if the job's disk_budget has no room for it."""
    need = disk_need_bytes(plan, chain, homes=job.state_homes)
    need += sum(stored_activations(plan, chain).values())
    use = disk_use(
        plan,
        chain,
        job.disk_paths or (),
        job.disk_rated_writes,
        steps=job.max_steps,
        parts=lambda: expected_shares(list(map(Path, job.disk_paths or ())), need),
    )
    if use is None:
        if job.disk_paths:
            log.info("disk: nothing goes to %s, as all has room in host memory", ", ".join(job.disk_paths))
        return None
    for folder in job.disk_paths or ():
        check_place(Path(folder))
    check_disk_budget(need, job.disk_budget, homes=job.state_homes)
    log.info(
        "disk: what the host's budget has no room for takes %s of %s; %s",
        format_bytes(need),
        ", ".join(job.disk_paths or ()),
        "; ".join(use.lines()),
    )
    return use


def _planned(
    job: Job, device: torch.device, cache: Cache | None, measure: bool, distinct_tokens: tuple[int, ...], tell: Tell
) -> Answer:
    def planning(of: Job) -> _Planning:
        return _Planning(of, device, cache, measure=measure, distinct_tokens=distinct_tokens, tell=tell)

    if measure and (reason := _why_not_compiled(job, device)):
        log.info("compile: off, because %s", reason)
    if job.is_split:
        return planning(job).answer_or_ways()
    target = find_target(device, working_dtype(job), measure=measure)
    check_budgets(job.gpu_budget, job.cpu_budget, gpu_bytes=target.gpu_bytes, ram_bytes=target.ram_bytes)
    splits = tuple(ranked(job, target.device, with_own_drive(job, target.machine), distinct_tokens=distinct_tokens))
    answers: list[Answer] = []
    for split in splits:
        try:
            its = planning(job.with_slices(split.rows))
            answers.append(its.answer() if measure else its.preview())
        except UserError as error:  # its interpolated bytes were a little too low: the traced ones do not fit
            if error.exit_code is not Exit.DOES_NOT_FIT:
                raise
        if len(answers) == (WANTED if measure else 1):
            break
    if not answers:  # the error of the smallest split names what would fit
        return _smallest(planning, job).answer_or_ways()
    return replace(min(answers, key=lambda answer: answer.plan.step_s), splits=splits)


def _smallest(planning: Callable[[Job], _Planning], job: Job) -> _Planning:
    """The planning of the job with the smallest slices that it allows."""
    if job.is_split:
        return planning(job)
    assert job.train_batch_size is not None
    try:
        return planning(job.with_slices(1))
    except UserError as error:
        if error.code != "loss-per-slice":
            raise
        return planning(job.with_slices(job.train_batch_size))


def _why_not_compiled(job: Job, device: torch.device) -> str | None:
    return why_off(job.compile, device, exact=job.exact, deterministic=job.deterministic)


class _Planning:
    def __init__(
        self,
        job: Job,
        device: torch.device,
        cache: Cache | None,
        *,
        measure: bool,
        distinct_tokens: tuple[int, ...],
        tell: Tell = SILENT,
    ) -> None:
        self.job, self.cache, self.measure, self.tell = job, cache, measure, tell
        tell.doing("reading the model")
        self.target = find_target(device, working_dtype(job), measure=measure)
        check_budgets(job.gpu_budget, job.cpu_budget, gpu_bytes=self.target.gpu_bytes, ram_bytes=self.target.ram_bytes)
        if (note := beyond_positions(job)) is not None:
            log.warning("model: %s", note)
        self.machine = with_own_drive(job, self.target.machine)
        # Plans for a GPU give tensors places, also where they are estimates. Host memory does not need places.
        arranged = device.type == "cuda" and can_arrange()
        for_gpu = self.target.device.type == "cpu" and self.machine.is_gpu
        self.analysis: Analysis = analyse(job, self.target.device, arranged=arranged, for_gpu=for_gpu)
        self.lengths = job.max_length, self.analysis.batch["labels"].shape[1]
        self.not_in_files = why_not_in_files(job, self.analysis.model)
        several = job.gradient_accumulation_steps > 1
        self.asks_for_data = several and any(t.row_bytes for tensors in self.analysis.tensors for t in tensors)
        self.distinct_tokens = distinct_tokens if self.asks_for_data else ()
        self.optimizer = OPTIMIZERS[job.optim]
        self.kernels = kernels_in_force(device)
        self.estimate = estimate_times(self.analysis, self.machine)
        self.compiling = self.target.final and _why_not_compiled(job, self.target.device) is None

    def answer(self) -> Answer:
        """A final plan if one is possible, else an estimate."""
        knows_enough = self.measure or not self.asks_for_data or self.distinct_tokens
        final = self._final() if self.target.final and knows_enough else None
        return final or self.preview()

    def kept(self) -> Answer | None:
        """The kept plan of this job, from measurements or else from an estimate; None if there is neither."""
        measured = self._found(self._question(self.machine, measured=True)) if self.target.final else None
        return measured or self._found(self._question(self.machine, measured=False))

    def answer_or_ways(self) -> Answer:
        """A final plan if one is possible, else an estimate. If nothing fits, the UserError names what does: more
        memory, if the machine has it, or changes of the job, each planned by the estimate."""
        try:
            return self.answer()
        except UserError as error:
            if error.exit_code is not Exit.DOES_NOT_FIT:
                raise
            chain = self.analysis.chain(self.estimate, self.distinct_tokens)
            budget_bytes = self.job.gpu_budget or self.machine.gpu_bytes
            problem = Problem(
                chain=replace(chain, lifetimes=(), frame_lifetimes=()),
                hardware=self.machine,
                gpu_budget_bytes=without_loss(budget_bytes) if chain.lifetimes else budget_bytes,
                cpu_budget_bytes=self.job.cpu_budget or self.machine.cpu_bytes,
                slices=self.job.gradient_accumulation_steps,
                clip=self.job.max_grad_norm is not None,
                not_in_files=self.not_in_files,
            )
            problem = with_disk(problem)
            ways = ways_to_fit(self.job, problem, self._traced, runs=True, tell=self._tries)
            numbers = (*error.numbers, *(f"fits with {way}" for way in ways))
            least = problem.least_bytes()
            larger = "offmate plan job.yaml --hardware rtx4090 asks about another machine"
            hint = error.hint if least is None or least <= self.target.gpu_bytes else larger
            raise UserError(
                error.what, code=error.code, numbers=numbers, hint=hint, exit_code=error.exit_code
            ) from None

    def _traced(self, job: Job) -> Traced:
        if job is self.job:
            return as_traced(self.analysis, job, self.machine, runs=True)
        return traced(job, self.machine, self.target.device, runs=True)

    def _tries(self, change: str) -> None:
        self.tell.doing(f"what would make it fit: {change}")

    def check_fits(self) -> None:
        """Raise UserError if no plan fits the budgets."""
        job, machine = self.job, self.machine
        with_disk(
            Problem(
                chain=self.analysis.chain(self.estimate, self.distinct_tokens),
                hardware=machine,
                gpu_budget_bytes=job.gpu_budget or machine.gpu_bytes,
                cpu_budget_bytes=job.cpu_budget or machine.cpu_bytes,
                slices=job.gradient_accumulation_steps,
                clip=job.max_grad_norm is not None,
                not_in_files=self.not_in_files,
            )
        ).check_fits()

    def preview(self) -> Answer:
        """A plan made from estimated times, kept or new."""
        question = self._question(self.machine, measured=False)
        return self._found(question) or self._solve(question, self.estimate, self.machine)

    def _final(self) -> Answer | None:
        """A plan from measurements; None where there are none and they may not be made."""
        final = self._question(self.machine, measured=True)
        if (cached := self._found(final)) is not None:
            return cached
        measurement = self._kept_measurement()
        if measurement is None and self.measure:
            measurement = self._measure()
        if measurement is None:
            return None
        times, hardware = measurement
        return self._solve(final, times, hardware)

    def _question(self, machine: Hardware, *, measured: bool) -> Question:
        job, chain = self.job, self.analysis.chain(self.estimate, self.distinct_tokens)
        return Question(
            chain=chain,
            machine=machine.name,
            gpu_budget_bytes=job.gpu_budget or machine.gpu_bytes,
            cpu_budget_bytes=job.cpu_budget or machine.cpu_bytes,
            slices=job.gradient_accumulation_steps,
            clip=job.max_grad_norm is not None,
            measured=measured,
            dtype=str(working_dtype(job)),
            optimizer=self.optimizer.kind,
            exact=job.exact,
            compiling=self.compiling,
            weights_in_files=self.not_in_files is None,
            disk_bytes=min(machine.disk_bytes, most_on_disk(chain, job.gradient_accumulation_steps)),
            kernels=self.kernels,
        )

    def _found(self, question: Question) -> Answer | None:
        if self.cache is None:
            return None
        key = question.key()
        cached = self.cache.find_plan(key)
        if cached is None:
            return None
        return Answer(
            rows=self.job.slice_rows,
            lengths=self.lengths,
            plan=cached.plan,
            chain=cached.chain,
            hardware=cached.hardware,
            measured=question.measured,
            cached=True,
            solve_s=0.0,
            key=key,
            measurement=cached.measurement,
            kernels=question.kernels,
        )

    def _solve(self, question: Question, times: Times, hardware: Hardware) -> Answer:
        self.tell.doing("solving")
        start = time.monotonic()
        problem = Problem(
            chain=self.analysis.chain(times, self.distinct_tokens),
            hardware=replace(hardware, disk_bytes=self.machine.disk_bytes),
            gpu_budget_bytes=question.gpu_budget_bytes,
            cpu_budget_bytes=question.cpu_budget_bytes,
            slices=question.slices,
            clip=question.clip,
            not_in_files=self.not_in_files,
        )
        stores = question.measured and bool(self.job.disk_paths) and may_be_stored(problem)
        if stores:  # the drives' rates decide whether activations go there
            problem = replace(problem, hardware=with_rates(self.job, problem.hardware))
        readable = question.measured and may_be_read(problem)
        rate = readable and model_read_rate(self.job)
        if rate and stores:
            rate = min(rate, problem.hardware.disk_read_bytes_per_s)  # the planner has one drive for everything
        if rate:
            problem = replace(problem, hardware=replace(problem.hardware, disk_read_bytes_per_s=rate))
        problem = with_disk(problem)
        chain, hardware = problem.chain, problem.hardware
        if states_on_disk(chain) and question.measured:
            hardware = with_rates(self.job, hardware)
        if size := disk_bytes(chain):
            hardware = replace(hardware, disk_read_bytes_per_s=rate or hardware.disk_read_bytes_per_s)
            log.info(
                "disk: %s of frozen weights are read from the model's files at %s/s: the host's budget has no room for"
                " them, or is of more use for activations",
                format_bytes(size),
                format_bytes_down(int(hardware.disk_read_bytes_per_s)),
            )
        plan = replace(problem, hardware=hardware).plan()
        solve_s = time.monotonic() - start
        key, measurement = question.key(), self._measurement_key() if question.measured else None
        if self.cache is not None:
            cached = CachedPlan(plan=plan, chain=chain, hardware=hardware, solve_s=solve_s, measurement=measurement)
            self.cache.keep_plan(key, cached, model=self.job.model)
        return Answer(
            rows=self.job.slice_rows,
            lengths=self.lengths,
            plan=plan,
            chain=chain,
            hardware=hardware,
            measured=question.measured,
            cached=False,
            solve_s=solve_s,
            key=key,
            measurement=measurement,
            kernels=question.kernels,
        )

    def _measurement_key(self) -> str:
        kinds = {kind: sorted(by_option) for kind, by_option in self.analysis.pairs.items()}
        # The head's measurement includes all that is not in the other blocks.
        *blocks, head = self.analysis.names.kinds
        kinds[head] += [f"{count} of {kind}" for kind, count in sorted(Counter(blocks).items())]
        kinds[head] += [f"{t.name}: {t.bytes}" for t in self.analysis.frame_tensors]
        kinds[head].append(f"chunks of {self.analysis.chunk_rows}")
        if self.compiling:
            kinds["compiled where faster"] = []
        if self.kernels:
            kinds[f"kernels: {self.kernels}"] = []
        if self.optimizer.own_rates:
            kinds[f"updates of {self.optimizer.kind}"] = []
        if self.analysis.updates:
            kinds["updates"] = [json.dumps(to_json(update)) for update in self.analysis.updates]
        slices = min(2, self.job.gradient_accumulation_steps)  # 2: gradients are added to those of an earlier slice
        return kept.measurement_key(kinds, machine=self.machine.name, threads=torch.get_num_threads(), slices=slices)

    def _kept_measurement(self) -> tuple[Times, Hardware] | None:
        key = self._measurement_key()
        document = self.cache.find_measurement(key) if self.cache is not None else None
        if document is None:
            return None
        try:
            return from_json(Times, document["times"]), from_json(Hardware, document["hardware"])
        except (ValueError, KeyError) as error:  # another version wrote it in another form
            log.info("the measurement kept under %s is not used: %s", key[:12], error)
            return None

    def _measure(self) -> tuple[Times, Hardware]:
        self.tell.doing("measuring")
        optimizer = self.optimizer() if self.optimizer.own_rates else ADAMW
        hardware = measure_hardware(self.target.device, working_dtype(self.job), optimizer=optimizer)
        times = measure_times(
            self.analysis,
            self.target.device,
            hardware,
            slices=self.job.gradient_accumulation_steps,
            compiling=self.compiling,
        )
        if self.cache is not None:
            document = {"times": to_json(times), "hardware": to_json(hardware)}
            self.cache.keep_measurement(self._measurement_key(), document, device=hardware.name)
        return times, hardware
