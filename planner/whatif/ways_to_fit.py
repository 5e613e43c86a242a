"""Finds changes with which a job fits that does not fit as it is. Each change was tried; none is guessed."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.errors import UserError
from planner.job.schema import Job
from planner.keys.adapter import takes_from_base
from planner.keys.lora import DEFAULTS, has_no_weights
from planner.optimizers.adamw_8bit import AdamW8bit
from planner.optimizers.table import OPTIMIZERS
from planner.schedule.chain import Block, Option, Tensor
from planner.search.from_disk import with_all_that_may_be_on_disk
from planner.search.problem import Problem
from planner.search.states_on_disk import with_all_on_disk
from planner.units import format_bytes
from planner.whatif.between import alike, between
from planner.whatif.traced import Traced

_SHORTEST = 256  # tokens; below that nobody trains
_REMEMBERED = 16  # problems whose needs are kept, as several pairs ask about each
_EASIER = 0.99  # a change that leaves more than this of a shortage is no part of a pair
_ANY_SIZE = 2**62
_DEVICE, _HOST = frozenset({"device"}), frozenset({"host"})
_BOTH = _DEVICE | _HOST

Trace = Callable[[Job], Traced]
"""Gives what a trace of a job's model finds. Raises UserError for a model that cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A change with which a job fits. `keys`: the changed keys of the job; empty for a change of the machine.
    `least_bytes`: the smallest device memory with which the job then fits."""

    text: str
    keys: tuple[tuple[str, object], ...] = ()
    least_bytes: int

    def __str__(self) -> str:
        return f"{self.text}: at least {format_bytes(self.least_bytes)} of GPU memory{self._to_type()}"

    def _to_type(self) -> str:
        """The keys as they are typed. Those that have LoRA's default values need not be typed."""
        needed = [(key, value) for key, value in self.keys if DEFAULTS.get(key, ()) != value]
        values = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in needed)
        typed = " ".join(f"--set {key}={value}" for key, value in values)
        return f"; {typed}" if typed else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """A change of the job's keys that may make it fit. `kind`: changes of one kind exclude each other. `eases`: which
    memory the job may need less of."""

    kind: str
    text: str
    keys: Mapping[str, object]
    eases: frozenset[str] = _BOTH

    def together_with(self, other: _Change) -> _Change:
        """Both changes as one."""
        kind, text = f"{self.kind}+{other.kind}", f"{self.text}, and {other.text}"
        return _Change(kind=kind, text=text, keys={**self.keys, **other.keys}, eases=self.eases | other.eases)


def ways_to_fit(
    job: Job, problem: Problem, traced: Trace, *, runs: bool, tell: Callable[[str], None] = lambda text: None
) -> Iterator[Way]:
    """Changes with which the job fits the budgets as they are, those first that cost the user least: first single
    changes of its keys, then, if none of these is enough, pairs of them; then shorter rows, and a drive.

    `traced` gives what a trace of a changed job's model finds. `runs`: the job is to run. Adapters need a model's
    weights, so LoRA is then not proposed if the model has none. If the job is only asked about, the model's config is
    enough. `tell` is called with each change before it is tried.
    """
    trials = _Trials(job=job, problem=problem, traced=traced, tell=tell)
    singles = list(_changes(job, traced(job), runs=runs))
    found: set[str] = set()  # kinds of the changes that are enough alone
    for change in singles:
        if change.kind not in found and trials.may_help(change) and (way := trials.way(change)):
            found.add(change.kind)
            yield way
    if problem.clip and (least := _least(replace(problem, clip=False))):
        found.add("clip")
        yield Way(text="no clipping", keys=(("max_grad_norm", 0),), least_bytes=least)
    if not found:
        pairs = (pair for pair in itertools.combinations(singles, 2) if trials.may_fit_together(*pair))
        yield from itertools.islice((way for pair in pairs if (way := trials.way_of_both(*pair))), 1)
    if trials.short_of_device and "slices" not in found:
        yield from trials.shorter_rows([change for change in singles if change.kind not in found])
    yield from _drives(job, problem)


def _changes(job: Job, its: Traced, *, runs: bool) -> Iterator[_Change]:
    """The changes of the job's keys that may make it fit, those first that cost the user least."""
    if job.slice_rows > 1 and not its.by_slice:
        yield _Change(kind="slices", text="the same step in smaller slices", keys=_rows(job, 1), eases=_DEVICE)
    if job.exact and not job.rewards:  # a reward model has no logits
        text = "head and loss in chunks, not bitwise"
        yield _Change(kind="exact", text=text, keys={"exact": False}, eases=_DEVICE)
    if not job.bf16:
        yield _Change(kind="bf16", text="bf16 with fp32 masters", keys={"bf16": True})
    if job.method == "full" and OPTIMIZERS[job.optim].on_disk and not job.disk_paths:
        text = "AdamW's moments in 8 bits, rounded"
        yield _Change(kind="optim", text=text, keys={"optim": AdamW8bit.kind}, eases=_HOST)
    if job.method == "lsp":  # its base changes, so it cannot be in 4 bits
        if job.lsp_rows > 1:
            rows = max(1, job.lsp_rows // 4)
            yield _Change(kind="samples", text="projectors made of fewer rows", keys={"lsp_samples": rows})
        return
    lora: dict[str, object] = {}
    if job.method == "full":
        if runs and has_no_weights(job.model):
            return
        lora = {**DEFAULTS, "method": "lora"}
        without = {"trainable": None, "trainable_layers": None} if job.trainable else {}
        text = "LoRA, without trainable" if without else "LoRA"
        yield _Change(kind="base", text=text, keys={**lora, **without})
        lora |= without
    if job.use_dora or takes_from_base(job.init_lora_weights):  # which no base in 4 bits can have
        return
    packed = lora | {"load_in_4bit": True} | ({"load_in_8bit": False} if job.load_in_8bit else {})
    words = "LoRA on a base in 4 bits" if lora else "a base in 4 bits"
    if not job.load_in_4bit:
        yield _Change(kind="base", text=words, keys=packed)
    if its.has_experts and not job.quantize_moe_experts:
        text, keys = ("experts in 4 bits", {}) if job.load_in_4bit else (f"{words}, experts too", packed)
        yield _Change(kind="base", text=text, keys={**keys, "quantize_moe_experts": True})


def _drives(job: Job, problem: Problem) -> Iterator[Way]:
    """What a drive would allow, for full fine-tuning."""
    plain = OPTIMIZERS[job.optim].on_disk
    storable = job.method == "full" and plain and not problem.hardware.disk_bytes
    if storable and (least := _least(with_all_on_disk(problem))):
        yield Way(text="optimizer states on a drive (disk_paths: a folder there; --drive pcie4)", least_bytes=least)
    mapped = replace(problem, not_in_files=None)
    wholly = job.method == "full" and problem.not_in_files is not None and bool(problem.hardware.disk_bytes)
    if wholly and (least := _least(with_all_on_disk(mapped))):
        yield Way(
            text="weights wholly on the drive, if the model's files had them as they are trained (loading these "
            f"takes memory for all: {problem.not_in_files})",
            least_bytes=least,
        )


@dataclass(kw_only=True)
class _Trials:
    """Tries changes of one job. `short_of_device`: more host memory alone would not be enough."""

    job: Job
    problem: Problem
    traced: Trace
    tell: Callable[[str], None]
    short_of_device: bool = field(init=False)
    short_of_host: bool = field(init=False)
    _tried: dict[str, Problem | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem = self.problem
        self.short_of_device = not replace(problem, cpu_budget_bytes=_ANY_SIZE).fits()
        room_bytes = problem.gpu_budget_bytes + problem.cpu_budget_bytes
        self.short_of_host = not self.short_of_device or problem.standing_bytes() > room_bytes

    def may_help(self, change: _Change) -> bool:
        """Whether the change eases what the job is short of, as far as that is known without a trace."""
        if change.kind == "optim":
            room_bytes = self.problem.gpu_budget_bytes + self.problem.cpu_budget_bytes
            standing = sum(t.bytes + _in_8_bits(t) for t in self.problem.chain.tensors())
            return self.short_of_host and standing <= room_bytes
        short = (_DEVICE if self.short_of_device else frozenset()) | (_HOST if self.short_of_host else frozenset())
        return not change.eases.isdisjoint(short)

    def way(self, change: _Change) -> Way | None:
        """The change as a way, if the job fits with it."""
        self.tell(change.text)
        if change.kind == "exact":
            self._tried[change.text] = most = _without_logits(self.problem)
            if not most.fits():
                return None
        keys, changed = self._changed(change.keys)
        self._tried[change.text] = changed
        if changed is None or not (least := _least(changed)):
            return None
        if change.kind == "slices":
            rows = self._most_rows(changed)
            more = _least(self._changed(_rows(self.job, rows))[1]) if rows > 1 else None
            keys, least = (_rows(self.job, rows), more) if more else (keys, least)
        return Way(text=change.text, keys=tuple(keys.items()), least_bytes=least)

    def way_of_both(self, one: _Change, other: _Change) -> Way | None:
        """Both changes as a way, if the job fits with them. Each was tried alone, or its bound was."""
        for change, more in ((one, other), (other, one)):
            if more.kind == "exact" and not _without_logits(self._problem_of(change)).fits():
                return None
        return self.way(one.together_with(other))

    def may_fit_together(self, one: _Change, other: _Change) -> bool:
        """Whether both changes can be made, and between them ease all that the job is short of."""
        if one.kind == other.kind:
            return False
        eased = [self._has_eased(change) for change in (one, other)]
        if not all(any(its) for its in eased):
            return False
        on_device, on_host = (any(its) for its in zip(*eased, strict=True))
        return (on_device or not self.short_of_device) and (on_host or not self.short_of_host)

    def shorter_rows(self, others: Sequence[_Change]) -> Iterator[Way]:
        """The longest rows that fit, of the job's length halved again and again, in slices of one row; together with
        those of `others`, changes that are not enough alone, that ease what shorter rows cannot."""
        whole = self.traced(self.job).by_slice
        job = self.job if whole else self.job.model_copy(update=_rows(self.job, 1))
        chunks = [change for change in others if change.kind == "exact" and self._has_eased(change)[0]]
        easing = [change for change in others if self._has_eased(change)[1]] if self.short_of_host else []
        least = sorted(easing, key=lambda change: _needs(self._problem_of(change))[1])[:1]
        for together in ([*chunks, *least], least):
            if way := self._longest_rows(job, together):
                yield way
                return
            if not chunks or self._tried.get(self._shorter(job, _SHORTEST, together).text) is not None:
                return  # else the model's head cannot run in chunks

    def _shorter(self, job: Job, length: int, together: Sequence[_Change]) -> _Change:
        """Rows of this length and the slices of `job`, with further changes."""
        keys: dict[str, object] = {"max_length": length, "per_device_train_batch_size": job.slice_rows}
        if job.gradient_accumulation_steps != self.job.gradient_accumulation_steps:
            keys["gradient_accumulation_steps"] = job.gradient_accumulation_steps
        return functools.reduce(_Change.together_with, together, _Change(kind="length", text="shorter rows", keys=keys))

    def _longest_rows(self, job: Job, together: Sequence[_Change]) -> Way | None:
        """The longest rows that fit, with the slices of `job` and further changes."""

        def way(length: int) -> Way | None:
            return self.way(self._shorter(job, length, together))

        lengths = list(itertools.takewhile(lambda n: n > _SHORTEST, (job.max_length >> k for k in itertools.count(1))))
        lengths.append(_SHORTEST)
        near = self._first_that_may_fit(lengths, together) if job.max_length // 2 >= _SHORTEST else None
        if near is None:
            return None
        if found := way(lengths[near]):
            for length in reversed(lengths[:near]):
                if not (longer := way(length)):
                    break
                found = longer
            return found
        if self._tried[self._shorter(job, _SHORTEST, together).text] is None:
            return None  # these changes are not possible, whatever the length
        return next((found for length in lengths[near + 1 :] if (found := way(length))), None)

    def _first_that_may_fit(self, lengths: Sequence[int], together: Sequence[_Change]) -> int | None:
        """The index of the first of these lengths, longest first, at which the job, with changes that were tried, is
        likely to fit; None if no length can fit. Each trace takes seconds, so the search begins here."""
        problem = self._problem_of(together[-1]) if together else self.problem
        if any(change.kind == "exact" for change in together):
            problem = _without_logits(problem)
        whole_bytes, least_bytes = _needs(problem)[0], _needs(_without_activations(problem))[0]
        if least_bytes > problem.gpu_budget_bytes:
            return None
        # The bytes of activations are in proportion to the tokens.
        share = (problem.gpu_budget_bytes - least_bytes) / max(1.0, whole_bytes - least_bytes)
        tokens = share * problem.chain.slice_tokens
        return next((n for n, length in enumerate(lengths) if length <= tokens), len(lengths) - 1)

    def _problem_of(self, change: _Change) -> Problem:
        """The problem of the job with a change that was tried, and that is possible."""
        problem = self._tried[change.text]
        assert problem is not None
        return problem

    def _has_eased(self, change: _Change) -> tuple[bool, bool]:
        """Whether the job with a change that was tried needs less of the device, and less of the host."""
        changed = self._tried.get(change.text)
        if changed is None:
            return False, False
        before, after = _needs(self.problem), _needs(changed)
        return after[0] < _EASIER * before[0], after[1] < _EASIER * before[1]

    def _changed(self, keys: Mapping[str, object]) -> tuple[Mapping[str, object], Problem | None]:
        """The problem of the job with these keys, and the keys, to which `lora_dropout: 0` is added if adapters on
        experts need that. No problem for a job that is not possible, such as LoRA without peft."""
        for more in ({}, {"lora_dropout": 0.0}):
            its = {**keys, **more}
            try:
                job = self.job.model_copy(update=its)
                changed = self.traced(job).problem(job, self.problem.hardware)
            except UserError as error:
                if more or "lora_dropout: 0" not in error.hint:
                    return its, None
                continue
            budgets = {name: getattr(self.problem, name) for name in ("gpu_budget_bytes", "cpu_budget_bytes")}
            return its, with_all_that_may_be_on_disk(replace(changed, **budgets))
        return keys, None

    def _most_rows(self, single_row: Problem) -> int:
        """The most rows of a slice that fit, of the divisors of the step's rows. Chains are interpolated between that
        of one row and that of the job's slice."""
        job, problem = self.job, self.problem
        total = job.slice_rows * job.gradient_accumulation_steps
        low, high = alike(single_row.chain, problem.chain)
        for rows in range(job.slice_rows - 1, 1, -1):
            if total % rows == 0:
                chain = between(low, high, (rows - 1) / (job.slice_rows - 1))
                if replace(problem, chain=chain, slices=total // rows).fits():
                    return rows
        return 1


def _in_8_bits(tensor: Tensor) -> int:
    """The least bytes of a tensor's optimizer states with moments in 8 bits."""
    return (2 + 4 * tensor.has_master) * tensor.elements if tensor.trainable else 0


def _without_logits(problem: Problem) -> Problem:
    """The problem with a head that needs no memory for logits and loss. If this problem does not fit, head and loss in
    chunks cannot make the job fit. Its chain is known without a trace."""
    *blocks, head = problem.chain.blocks
    options = tuple(replace(o, forward_peak_bytes=0, backward_peak_bytes=0) for o in head.options)
    blocks.append(replace(head, options=options, forward_held_bytes=0, forward_frame_bytes=0))
    return replace(problem, chain=replace(problem.chain, blocks=tuple(blocks), lifetimes=(), frame_lifetimes=()))


def _without_activations(problem: Problem) -> Problem:
    """The problem with a model whose activations need no memory, however long its rows are."""
    chain = problem.chain
    options = (Option(name="keep"),)
    blocks = tuple(Block(name=b.name, kind=b.kind, tensors=b.tensors, options=options) for b in chain.blocks)
    chain = replace(
        chain,
        blocks=blocks,
        start_bytes=0,
        between_gpu_bytes=0,
        between_cpu_bytes=0,
        staged_bytes=0,
        slice_tokens=0,
        distinct_tokens=(),
        lifetimes=(),
        frame_lifetimes=(),
    )
    return replace(problem, chain=chain)


@functools.lru_cache(_REMEMBERED)
def _needs(problem: Problem) -> tuple[float, float]:
    """The least device memory with a host of any size, and the bytes of all weights and optimizer states in memory."""
    least = replace(problem, cpu_budget_bytes=_ANY_SIZE).least_bytes()
    return float("inf") if least is None else float(least), float(problem.standing_bytes())


def _rows(job: Job, rows: int) -> dict[str, object]:
    """The keys of a job for so many rows in a slice and the same rows in a step."""
    total = job.slice_rows * job.gradient_accumulation_steps
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": total // rows}


def _least(problem: Problem | None) -> int | None:
    """Device bytes that a problem needs at least; None where they are more than its budget, or there is no problem."""
    least = problem.least_bytes() if problem is not None else None
    return None if problem is None or least is None or least > problem.gpu_budget_bytes else least
