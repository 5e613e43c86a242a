"""Checkpoints: `checkpoints/step-N/`, complete or not there.

A checkpoint is written to `.step-N.tmp` beside, flushed to disk, then renamed. `manifest.json` lists every file with
its size and checksum and carries a checksum of itself; `latest` reads every byte before it trusts one, and falls back
to the one before. Older ones are removed only when a newer one is durable.

What is in it: masters and moments (fp32, in safetensors), the step, and what the run depends on (`Origin`). The place
in the data is the step (see `worker/data/batches.py`), and no random state is kept: every micro-batch draws from a
generator seeded by (seed, step, slice), nothing else in a run is random. Working copies are roundings of the masters.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from planner.codec import to_json
from planner.disk import check_space, sync
from planner.errors import Exit, UserError, disk_full, first_line, is_disk_full
from planner.job.schema import Job
from planner.schedule.plan import Plan
from worker.storage.shards import FileRecord, Item, read_shards, write_shards

log = logging.getLogger(__name__)

_FREE_KEYS = frozenset(
    {"run_name", "report_to", "output_dir", "save_steps", "save_minutes", "save_total_limit", "gpu_budget",
     "cpu_budget", "gradient_checkpointing", "eval_dataset", "val_size", "eval_strategy", "eval_steps", "eval_on_start",
     "per_device_eval_batch_size", "sample_prompts", "sample_tokens", "schedule", "load_best_model_at_end",
     "early_stopping_patience", "early_stopping_threshold"}
)  # fmt: skip
"""Keys of a job that do not change what is learned (`val_size` does, and is seen in the data's fingerprint)."""


class TornCheckpoint(Exception):
    """A checkpoint that cannot be trusted; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a run's numbers depend on: the job's keys that matter, the data's fingerprint, all steps, the plan's digest.

    Under another plan the same job goes on rightly, though not with the same bits: it is no difference.
    """

    job: dict[str, object]
    data: str
    total_steps: int
    plan: str

    @classmethod
    def of(cls, job: Job, *, data: str, total_steps: int, plan: Plan) -> Origin:
        """The origin of a run of `job`."""
        keys = {key: value for key, value in job.model_dump(mode="json").items() if key not in _FREE_KEYS}
        return cls(job=keys, data=data, total_steps=total_steps, plan=_checksum(to_json(plan))[:16])

    def differences(self, other: Origin) -> tuple[str, ...]:
        """One line per thing that differs, `self` being the older: "learning_rate: 0.1, was 0.2"."""
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
    """The job's keys with those that are newer than its checkpoint at their defaults, as they were before they existed.
    Exact jobs compile nothing, whatever they say of it."""
    defaults = {
        key: field.get_default() for key, field in Job.model_fields.items()
        if key not in _FREE_KEYS and not field.is_required()
    }  # fmt: skip
    keys = {**defaults, **job}
    return {**keys, "compile": "off"} if keys["exact"] else keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose every byte was found right."""

    path: Path
    step: int
    origin: Origin
    files: tuple[str, ...]

    def tensors(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """(parameter, {"master", "exp_avg", "exp_avg_sq"}) or, of trained weights, (parameter, {"weight"}); mapped from
        disk one at a time."""
        return read_shards(self.path / name for name in self.files)


class Checkpoints:
    """The checkpoints of one run, in `folder`. `keep`: how many to keep, None for all. One process at a time."""

    def __init__(self, folder: Path, *, keep: int | None, origin: Origin) -> None:
        self._folder = folder
        self._keep = keep
        self._origin = origin
        self._torn: set[Path] = set()
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".step-*"):
            log.warning("checkpoint: %s was not finished; removed", leftover.name)
            shutil.rmtree(leftover)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; None when there is none. Torn ones are passed over, and it is said.

        Raises UserError when it belongs to a job, data or a length other than now, or when the disk does not answer.
        """
        for path in reversed(_steps(self._folder)):
            try:
                checkpoint = read_checkpoint(path)
            except TornCheckpoint as torn:
                log.warning("checkpoint: %s is damaged and not used: %s", path.name, torn)
                self._torn.add(path)
                continue
            except OSError as error:
                raise UserError(
                    f"The checkpoint {path.name} cannot be read now.", code="checkpoint-not-readable",
                    numbers=(first_line(error),), hint=f"it is kept; see to the disk and the rights of {path}",
                ) from error  # fmt: skip
            if changed := checkpoint.origin.differences(self._origin):
                raise UserError(
                    f"The job has changed since its checkpoint at step {checkpoint.step}.", code="job-changed",
                    exit_code=Exit.USAGE, numbers=changed,
                    hint=f"submit it as a new job, or undo the change; the checkpoint is {path}",
                )  # fmt: skip
            return checkpoint
        return None

    def save(self, step: int, state: Iterable[tuple[str, dict[str, Tensor]]], state_bytes: int) -> Path:
        """Write the checkpoint of `step`; when this returns it is durable, and older ones beyond `keep` are gone.

        `state_bytes` is about what it takes on disk. Raises UserError when the disk has no room, or when the state
        holds a number that is not finite; the checkpoints before stay as they are.
        """
        what = f"the checkpoint of step {step}"
        check_space(self._folder, state_bytes, what)
        try:
            path = write_checkpoint(self._folder, step, self._origin, "state", finite(state, step, self.last()))
        except OSError as error:
            if not is_disk_full(error):
                raise
            raise disk_full(error, what) from error
        self._torn.discard(path)
        self._prune()
        return path

    def last(self) -> Path | None:
        """The folder of the newest checkpoint not known to be torn, unread."""
        whole = [path for path in _steps(self._folder) if path not in self._torn]
        return whole[-1] if whole else None

    def _prune(self) -> None:
        whole = [path for path in _steps(self._folder) if path not in self._torn]
        surplus = whole[: -self._keep] if self._keep is not None else []
        for path in [*surplus, *self._torn, *self._folder.glob(".step-*.old")]:
            hidden = path if path.name.startswith(".") else path.rename(path.with_name(f".{path.name}.old"))
            shutil.rmtree(hidden)  # renamed first: a half-removed folder must not look like a checkpoint
        self._torn.clear()


def write_checkpoint(folder: Path, step: int, origin: Origin, stem: str, items: Iterable[Item]) -> Path:
    """Write `step-N/` in `folder`, with the items in files called `stem-…`; when this returns it is durable. An earlier
    one of the step becomes `.step-N.old`. Nothing new is left where this raises, as on a full disk: OSError."""
    temporary = folder / f".step-{step}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        files = write_shards(temporary, stem, items)
        _write_manifest(temporary, step, origin, files)
        sync(temporary)
        path = folder / f"step-{step}"
        if path.exists():  # a torn one of this very step
            path.rename(folder / f".step-{step}.old")
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(folder)
    return path


def finite(
    state: Iterable[tuple[str, dict[str, Tensor]]], step: int, last: Path | None
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The items of `state`, taken after `step`. Raises UserError at a number that is not finite; `last` is the
    checkpoint to go back to."""
    for name, parts in state:
        for part, tensor in parts.items():
            if not torch.isfinite(tensor.sum()) and not bool(torch.isfinite(tensor).all()):
                raise non_finite(f"{part} of {name}", step, last)
        yield name, parts


def non_finite(what: str, step: int, last: Path | None) -> UserError:
    """The error for a number that is not finite, found after `step`."""
    return UserError(
        f"The training has diverged: {what} is not finite at step {step}.", code="non-finite",
        numbers=(f"last checkpoint: {last}" if last else "there is no checkpoint",),
        hint="use a lower learning_rate, more warmup_steps, or max_grad_norm: 1.0",
    )  # fmt: skip


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in the folder `path`, every file of it read and compared. Raises TornCheckpoint when a file is not
    there or not what was written; OSError when that cannot be told, which says nothing against the checkpoint."""
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
        return Checkpoint(
            path=path, step=manifest["step"], origin=Origin(**manifest["origin"]),
            files=tuple(entry["name"] for entry in manifest["files"]),
        )  # fmt: skip
    except FileNotFoundError:
        raise TornCheckpoint("manifest.json is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        raise TornCheckpoint(f"manifest.json is not a manifest: {error}") from error


def _write_manifest(folder: Path, step: int, origin: Origin, files: list[Path]) -> None:
    manifest: dict[str, object] = {
        "format": 1,
        "step": step,
        "origin": asdict(origin),
        "files": [asdict(FileRecord.of(file)) for file in files],
    }
    path = folder / "manifest.json"
    path.write_text(json.dumps({"manifest": manifest, "blake2b": _checksum(manifest)}, indent=1), "utf-8")
    sync(path)


def _checksum(value: object) -> str:
    """Of a JSON value's content, however it is spaced."""
    content = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(content.encode(), digest_size=32).hexdigest()


def _steps(folder: Path) -> list[Path]:
    """The checkpoint folders by step, unread."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))
