"""Writes and reads checkpoints, the folders `checkpoints/step-N/`, each of which is complete or absent.

A checkpoint is written to `.step-N.tmp` beside its final name, flushed to disk, then renamed. `manifest.json` lists
every file with its size and checksum and carries a checksum of itself. `latest` reads every byte of a checkpoint before
it trusts it, and falls back to the previous one. Older checkpoints are removed only when a newer one is durable.

A checkpoint holds masters and moments (fp32, in safetensors), the step, and what the run depends on (`Origin`). Where
a run replaces frozen weights, it holds these, too, in files of their own. As long as they stay the same, a checkpoint
has the files of the one before as hard links, so that they are written once and removed with the last. Damage to such a
file is damage to all checkpoints that have it: the run then goes on from one before the change.
Optimizer states that are on disk anyway (`worker/storage/states.py`) may be named instead of copied: the checkpoint
then says where they are and gives their sums, and they are not overwritten while it is the newest. The step is the
place in the data (see `worker/data/batches.py`). No random state is kept: every micro-batch draws from a generator
seeded by (seed, step, slice), and nothing else in a run is random. Working copies are roundings of the masters.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from planner.codec import from_json, to_json
from planner.disk import check_space, sync
from planner.errors import Exit, UserError, disk_full, first_line, is_disk_full
from planner.job.schema import Job
from planner.keys.trackers import SETTINGS
from planner.schedule.plan import Plan
from worker.storage.shards import FileRecord, Item, Streamed, Written, read_shards, write_shards
from worker.storage.states import StatesOnDisk
from worker.storage.states_record import StatesRecord

log = logging.getLogger(__name__)

_NAMED, _FROZEN = "states.json", "frozen"
_FREE_KEYS = frozenset(
    {
        "run_name",
        "report_to",
        "output_dir",
        "save_dtype",
        "save_steps",
        "save_minutes",
        "save_total_limit",
        "gpu_budget",
        "cpu_budget",
        "disk_paths",
        "disk_budget",
        "disk_rated_writes",
        "gradient_checkpointing",
        "eval_dataset",
        "val_size",
        "eval_strategy",
        "eval_steps",
        "eval_on_start",
        "per_device_eval_batch_size",
        "sample_prompts",
        "sample_tokens",
        "schedule",
        "load_best_model_at_end",
        "early_stopping_patience",
        "early_stopping_threshold",
    }.union(*SETTINGS.values())
)
"""Keys of a job that `Origin` leaves out, as they do not change what is learned. `val_size` does change it, but shows
in the data's fingerprint."""


_LENGTH = ("num_train_epochs", "max_steps")


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """Frozen weights of `bytes` bytes as a run has replaced them after step `since`; `weights` yields them."""

    since: int
    bytes: int
    weights: Callable[[], Iterable[Item]]


class TornCheckpoint(Exception):
    """Raised for a checkpoint that cannot be trusted, because files are missing or damaged; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a run's numbers depend on: the job's keys that matter, the data's fingerprint, the total number of steps,
    and the plan's digest. A checkpoint records it.

    `differences` does not count another plan: the job goes on correctly under it, though not with the same bits."""

    job: dict[str, object]
    data: str
    total_steps: int
    plan: str

    @classmethod
    def of(cls, job: Job, *, data: str, total_steps: int, plan: Plan) -> Origin:
        """The origin of a run of `job` on data with the fingerprint `data`, under `plan`."""
        keys = {key: value for key, value in job.model_dump(mode="json").items() if key not in _FREE_KEYS}
        return cls(job=keys, data=data, total_steps=total_steps, plan=_checksum(to_json(plan))[:16])

    def of_length(self, other: Origin) -> Origin:
        """A copy of this origin with the length (epochs or steps) of `other`, for a longer run that goes on from a
        shorter one."""
        job = {**self.job, **{key: other.job[key] for key in _LENGTH if key in other.job}}
        return replace(self, job=job, total_steps=other.total_steps)

    def differences(self, other: Origin) -> tuple[str, ...]:
        """A line of text for each difference between the older origin `self` and the newer `other`, such as
        "learning_rate: 0.1, was 0.2". Another plan is no difference."""
        before, now = _as_learned(self.job), _as_learned(other.job)
        lines = [
            f"{key}: {now.get(key)}, was {before.get(key)}"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]
        if self.data != other.data:
            lines.append(f"data: fingerprint {other.data}, was {self.data}")
        if self.total_steps != other.total_steps:
            lines.append(f"steps in all: {other.total_steps}, was {self.total_steps}")
        return tuple(lines)


def _as_learned(job: dict[str, object]) -> dict[str, object]:
    """The job's keys, completed for comparison. A key that is newer than the checkpoint gets its default, which is how
    jobs ran before the key existed. `compile` counts as off in exact jobs, which never compile."""
    defaults = {
        key: field.get_default()
        for key, field in Job.model_fields.items()
        if key not in _FREE_KEYS and not field.is_required()
    }
    keys = {**defaults, **job}
    return {**keys, "compile": "off"} if keys["exact"] else keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk whose every byte was read and found right. Optimizer states that it only names, `states`,
    are the exception: they are read when asked for. `evaluations`: (step, loss) of each evaluation so far; None where
    the checkpoint was written without them. `frozen`: its files with frozen weights that the run has replaced."""

    path: Path
    step: int
    origin: Origin
    files: tuple[str, ...]
    states: StatesRecord | None = None
    evaluations: tuple[tuple[int, float], ...] | None = None
    frozen: tuple[str, ...] = ()

    def frozen_tensors(self) -> Iterator[Item]:
        """Yield (parameter, {"master": weight}) of the frozen weights that the run has replaced, one at a time, as
        tensors mapped from disk."""
        yield from read_shards(self.path / file for file in self.frozen)

    def tensors(self, *, taken_over: bool = False) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield (parameter, {"master", "exp_avg", "exp_avg_sq"}), or (parameter, {"weight"}) for trained weights, one
        parameter at a time, as tensors mapped from disk. `taken_over`: yield only what the checkpoint itself holds,
        because the engine already uses the states on disk that the checkpoint names. Raises UserError "states-torn",
        "disk-failed"."""
        nothing: Mapping[str, Iterator[Mapping[str, Tensor]]] = {}
        with contextlib.nullcontext(nothing) if taken_over or self.states is None else self.states.read() as states:
            named = dict(states)
            for name, parts in read_shards(self.path / file for file in self.files):
                yield name, {**parts, **next(named.pop(name, iter([{}])))}
            for name, of_it in named.items():
                yield name, dict(next(of_it))


class Checkpoints:
    """The checkpoints of one run, in `folder`. `keep`: how many of them to keep; None for all. `longer`: the run goes
    on from a shorter run, whose checkpoint is in `folder`. Only one process at a time may use the folder."""

    def __init__(self, folder: Path, *, keep: int | None, origin: Origin, longer: bool = False) -> None:
        self._longer = longer
        self._folder = folder
        self._keep = keep
        self._origin = origin
        self._torn: set[Path] = set()
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".step-*"):
            log.warning("checkpoint: %s was not finished; removed", leftover.name)
            shutil.rmtree(leftover)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is complete and undamaged, after reading all of it; None when there is none.
        Damaged ones are skipped with a warning in the log.

        Raises UserError "job-changed" when the job, its data or its length differ from the checkpoint's, and
        "checkpoint-not-readable" when the disk does not answer."""
        for path in reversed(_steps(self._folder)):
            try:
                checkpoint = read_checkpoint(path)
            except TornCheckpoint as torn:
                log.warning("checkpoint: %s is damaged and not used: %s", path.name, torn)
                self._torn.add(path)
                continue
            except OSError as error:
                raise UserError(
                    f"The checkpoint {path.name} cannot be read now.",
                    code="checkpoint-not-readable",
                    numbers=(first_line(error),),
                    hint=f"it is kept; check the disk and the rights of {path}",
                ) from error
            origin = checkpoint.origin.of_length(self._origin) if self._longer else checkpoint.origin
            if changed := origin.differences(self._origin):
                raise UserError(
                    f"The job has changed since its checkpoint at step {checkpoint.step}.",
                    code="job-changed",
                    exit_code=Exit.USAGE,
                    numbers=changed,
                    hint=f"submit it as a new job, or undo the change; the checkpoint is {path}",
                )
            return checkpoint
        return None

    def save(
        self,
        step: int,
        state: Iterable[Written],
        state_bytes: int,
        states: StatesOnDisk | None = None,
        evaluations: Sequence[tuple[int, float]] | None = None,
        frozen: Frozen | None = None,
    ) -> Path:
        """Write the checkpoint of `step` from `state`. When this returns, it is safely on disk, and older checkpoints
        beyond `keep` are removed. Returns its folder.

        `state_bytes`: about the bytes that the checkpoint takes on disk. `states`: the optimizer states on disk; if
        they have two places for each piece, they are named and not copied, and nothing may be written to them
        meanwhile. `evaluations`: (step, loss) of each evaluation so far. `frozen`: the frozen weights that the run has
        replaced. Raises UserError when the disk has no room, or when the state holds a number that is not finite;
        earlier checkpoints then stay as they are."""
        purpose = f"the checkpoint of step {step}"
        at = states if states is not None and states.homes > 1 else None
        check_space(self._folder, state_bytes + (0 if frozen is None else self._new_bytes(frozen)), purpose)
        if states is not None and (name := states.not_finite()) is not None:
            raise non_finite(f"a state of {name}", step, self.last())
        named = at.flush() if at is not None else None
        try:
            items = finite(state, step, self.last())
            path = write_checkpoint(
                self._folder, step, self._origin, "state", items, named, evaluations, frozen, before=self.last()
            )
        except BaseException as error:
            if at is not None and not (self._folder / f"step-{step}").exists():
                at.withdrawn()  # if it exists, nobody can know which of the two checkpoints survives a power cut
            if not isinstance(error, OSError) or not is_disk_full(error):
                raise
            raise disk_full(error, purpose) from error
        if at is not None:
            at.published()
        self._torn.discard(path)
        self._prune(states)
        return path

    def last(self) -> Path | None:
        """The folder of the newest checkpoint that is not known to be damaged; None without one. Its files are not
        read."""
        whole = [path for path in _steps(self._folder) if path not in self._torn]
        return whole[-1] if whole else None

    def _new_bytes(self, frozen: Frozen) -> int:
        """The bytes of frozen weights that the next checkpoint writes anew; 0 where it can link those of the last."""
        last = self.last()
        try:
            manifest = json.loads((last / "manifest.json").read_text("utf-8"))["manifest"] if last is not None else {}
        except (OSError, ValueError, KeyError):
            manifest = {}
        return 0 if manifest.get("frozen") == frozen.since else frozen.bytes

    def _prune(self, states: StatesOnDisk | None) -> None:
        whole = [path for path in _steps(self._folder) if path not in self._torn]
        surplus = whole[: -self._keep] if self._keep is not None else []
        still_named = set(states.files() if states is not None else ()).union(
            *(_named_files(path) for path in whole if path not in surplus)
        )
        for path in [*surplus, *self._torn, *self._folder.glob(".step-*.old")]:
            for file in _named_files(path) - still_named:
                file.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # it is not empty, or not there
                    file.parent.rmdir()
            hidden = path if path.name.startswith(".") else path.rename(path.with_name(f".{path.name}.old"))
            shutil.rmtree(hidden)  # renamed first: a half-removed folder must not look like a checkpoint
        self._torn.clear()


def write_checkpoint(
    folder: Path,
    step: int,
    origin: Origin,
    stem: str,
    items: Iterable[Written],
    named: StatesRecord | None = None,
    evaluations: Sequence[tuple[int, float]] | None = None,
    frozen: Frozen | None = None,
    before: Path | None = None,
) -> Path:
    """Write the checkpoint folder `step-N/` in `folder`, with the `items` in files called `stem-…`. Returns its path.
    `named`: a record of optimizer states that stay in files elsewhere. `frozen`: replaced frozen weights; where the
    checkpoint `before` has the same, its files are linked. When this returns, the checkpoint is safely on
    disk; an earlier one of the same step has become `.step-N.old`. Raises OSError, for example on a full disk, and then
    leaves nothing new."""
    temporary = folder / f".step-{step}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        files = write_shards(temporary, stem, items)
        if named is not None:
            (temporary / _NAMED).write_text(json.dumps(to_json(named)), "utf-8")
            sync(temporary / _NAMED)
            files.append(temporary / _NAMED)
        linked = [] if frozen is None else _linked(frozen, before, temporary)
        if frozen is not None and not linked:
            files += write_shards(temporary, _FROZEN, frozen.weights())
        records = [*map(FileRecord.of, files), *linked]
        _write_manifest(temporary, step, origin, records, evaluations, None if frozen is None else frozen.since)
        sync(temporary)
        path = folder / f"step-{step}"
        if path.exists():  # a torn checkpoint of this same step
            path.rename(folder / f".step-{step}.old")
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(folder)
    return path


def finite(state: Iterable[Written], step: int, last: Path | None) -> Iterator[Written]:
    """Yield the items of `state`, the tensors after step `step`, and check them. Raises UserError "non-finite" at a
    number that is not finite; `last` is the checkpoint that the message offers to go back to. Tensors that are streamed
    from disk were checked when they were written there, and are not checked again."""
    for name, parts in state:
        for part, tensor in (parts.rest if isinstance(parts, Streamed) else parts).items():
            if not torch.isfinite(tensor.sum()) and not bool(torch.isfinite(tensor).all()):
                raise non_finite(f"{part} of {name}", step, last)
        yield name, parts  # type: ignore[misc]


def non_finite(quantity: str, step: int, last: Path | None) -> UserError:
    """Make the UserError "non-finite" for the quantity `quantity`, which is not finite after step `step`. `last`: the
    checkpoint that the message offers to go back to."""
    return UserError(
        f"The training has diverged: {quantity} is not finite at step {step}.",
        code="non-finite",
        numbers=(f"last checkpoint: {last}" if last else "there is no checkpoint",),
        hint="use a lower learning_rate, more warmup_steps, or max_grad_norm: 1.0",
    )


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the checkpoint in the folder `path`, and compare every file with its manifest (names, sizes, checksums).
    Raises TornCheckpoint when a file is missing or is not what was written, and OSError when a file cannot be read now,
    which does not mean that the checkpoint is damaged."""
    try:
        sealed = json.loads((path / "manifest.json").read_text("utf-8"))
        manifest = sealed["manifest"]
        if _checksum(manifest) != sealed["blake2b"]:
            raise TornCheckpoint("manifest.json does not match its checksum")
        for record in (FileRecord(**entry) for entry in manifest["files"]):
            file = path / record.name
            if not file.is_file():
                raise TornCheckpoint(f"{record.name} is missing")
            if file.stat().st_size != record.bytes:
                raise TornCheckpoint(f"{record.name} has {file.stat().st_size} bytes, not {record.bytes}")
            if FileRecord.of(file) != record:
                raise TornCheckpoint(f"{record.name} does not match its checksum")
        files = tuple(entry["name"] for entry in manifest["files"])
        evaluations = manifest.get("evaluations")
        return Checkpoint(
            path=path,
            step=manifest["step"],
            origin=Origin(**manifest["origin"]),
            files=tuple(name for name in files if name != _NAMED and not name.startswith(_FROZEN)),
            frozen=tuple(name for name in files if name.startswith(_FROZEN)),
            states=_named(path) if _NAMED in files else None,
            evaluations=None if evaluations is None else tuple((int(at), float(loss)) for at, loss in evaluations),
        )
    except FileNotFoundError:
        raise TornCheckpoint("manifest.json is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        raise TornCheckpoint(f"manifest.json is not a manifest: {error}") from error


def _named(path: Path) -> StatesRecord:
    return from_json(StatesRecord, json.loads((path / _NAMED).read_text("utf-8")))


def _named_files(path: Path) -> set[Path]:
    """The files of optimizer states that a checkpoint names; empty where its record is missing or unreadable."""
    try:
        return set(map(Path, _named(path).files))
    except (OSError, ValueError):
        return set()


def _linked(frozen: Frozen, before: Path | None, into: Path) -> list[FileRecord]:
    """Link the files of frozen weights of the checkpoint `before` into the folder `into`. Returns their records; empty
    where that checkpoint has other weights or none, or where the file system has no hard links."""
    if before is None:
        return []
    try:
        manifest = json.loads((before / "manifest.json").read_text("utf-8"))["manifest"]
        records = [FileRecord(**entry) for entry in manifest["files"] if entry["name"].startswith(_FROZEN)]
        if manifest.get("frozen") != frozen.since:
            return []
        for record in records:
            os.link(before / record.name, into / record.name)
    except (OSError, ValueError, KeyError, TypeError):
        for file in into.glob(f"{_FROZEN}*"):
            file.unlink()
        return []
    return records


def _write_manifest(
    folder: Path,
    step: int,
    origin: Origin,
    records: Iterable[FileRecord],
    evaluations: Sequence[tuple[int, float]] | None,
    frozen: int | None,
) -> None:
    manifest: dict[str, object] = {
        "format": 1,
        "step": step,
        "origin": asdict(origin),
        "files": [asdict(record) for record in records],
        **({} if evaluations is None else {"evaluations": [list(each) for each in evaluations]}),
        **({} if frozen is None else {"frozen": frozen}),
    }
    path = folder / "manifest.json"
    path.write_text(json.dumps({"manifest": manifest, "blake2b": _checksum(manifest)}, indent=1), "utf-8")
    sync(path)


def _checksum(value: object) -> str:
    """The checksum of a JSON value's content, whatever its spacing."""
    content = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(content.encode(), digest_size=32).hexdigest()


def _steps(folder: Path) -> list[Path]:
    """The checkpoint folders in order of their steps; their files are not read."""
    folders = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step-")))
