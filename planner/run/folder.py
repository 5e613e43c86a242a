"""Reads and writes the run folder of a job. The planner and the trainer write it; every process reads it."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from planner.codec import from_json, json_object
from planner.counted import Counted
from planner.errors import UserError, is_disk_full
from planner.run.events import Piece, events_of
from planner.units import printable

_TAIL_BYTES = 16 * 1024
_PIECE_BYTES = 2**20
_NEW = ".new"  # ends the name of a file that is being written
_ERROR_FIELDS = {"what", "numbers", "hint", "code", "exit_code"}


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one job, `runs/<id>/` in the state folder. The properties are paths in it. A `read_` method returns
    None or something empty for a file that is not written yet, or that is broken."""

    path: Path

    @property
    def submitted(self) -> Path:
        """Path of the job file, exactly as the user submitted it."""
        return self.path / "job.yaml"

    @property
    def resolved(self) -> Path:
        """Path of the job file as offmate understands it: canonical key names, defaults filled in, absolute paths."""
        return self.path / "resolved.yaml"

    @property
    def plan(self) -> Path:
        """Path of plan.json, which the planner writes and the trainer follows."""
        return self.path / "plan.json"

    @property
    def tokens(self) -> Path:
        """Path of the counts of the data's rows and tokens (a `planner.counted.Counted` in JSON)."""
        return self.path / "tokens.json"

    @property
    def frozen(self) -> Path:
        """Path of a record that identifies the job's data files as they were when the job was submitted."""
        return self.path / "frozen.json"

    @property
    def base(self) -> Path:
        """Path of a record that identifies the files of the job's model and tokenizer as they were when the job was
        submitted."""
        return self.path / "base.json"

    @property
    def begun(self) -> Path:
        """Path of the adapters' initial values. The file exists only if initialization also changed the base weights
        (PiSSA, for example): then a merge needs these values."""
        return self.path / "begun.safetensors"

    @property
    def goes_on(self) -> Path:
        """Path of an empty file. It exists if this run continues an earlier, shorter run, from a copy of that run's
        checkpoint."""
        return self.path / "goes-on"

    @property
    def name(self) -> Path:
        """Path of the job's name as lists show it, kept here in case the database is lost."""
        return self.path / "name.txt"

    def read_name(self) -> str | None:
        """The job's name from name.txt; None if the file is missing, as for jobs of older versions, or empty."""
        try:
            return self.name.read_text("utf-8").strip() or None
        except (OSError, UnicodeDecodeError):
            return None

    @property
    def packages(self) -> Path:
        """Path of the versions of the Python packages that train, as they were when the job was submitted."""
        return self.path / "packages.json"

    @property
    def is_tokenized(self) -> bool:
        """Whether the data have been read and tokenized, which happens once per job."""
        return (self.path / "data" / "corpus.json").exists()

    @property
    def timeline(self) -> Path:
        """Path of timeline.json: when the operations of two training steps ran (see `planner.schedule.measured`). It is
        drawn beside the plan."""
        return self.path / "timeline.json"

    @property
    def metrics(self) -> Path:
        """Path of metrics.jsonl: the trainer's events (losses, times, evaluations), one JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        """Path of the job's log, with the output of the planner and the trainer."""
        return self.path / "log.txt"

    @property
    def error(self) -> Path:
        """Path of error.json, the last `UserError` of the planner or the trainer."""
        return self.path / "error.json"

    @property
    def looks_at(self) -> Path:
        """Path of a file with the name of what the process that checks a submission is reading at the moment, such as a
        data file. If that process is killed, the error names it."""
        return self.path / "looks_at.txt"

    @property
    def first_notes(self) -> Path:
        """Path of notes on the job's first records, which are shown to the person who submits it."""
        return self.path / "first_notes.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints, one subfolder `step-N/` each. A subfolder with such a name is complete."""
        return self.path / "checkpoints"

    @property
    def trained(self) -> Path:
        """Folder of the trained weights, in a subfolder `step-N/`, from the last step until the model folder is
        written."""
        return self.path / "trained"

    @property
    def best(self) -> Path:
        """Folder of the weights with the best evaluation so far, in a subfolder `step-N/`, if the job wants these as
        its result."""
        return self.path / "best"

    @property
    def reference(self) -> Path:
        """Folder of the reference model's scores of all answers, for a job that learns from preferences."""
        return self.path / "reference"

    @property
    def output(self) -> Path:
        """Folder for the trained model if the job names no other `output_dir`, or if that one cannot be written."""
        return self.path / "output"

    @property
    def process(self) -> Path:
        """Path of the identity (`planner.run.processes.Process`) of the running planner or trainer, so that a restarted
        daemon can find the process."""
        return self.path / "process"

    def last_checkpoint_step(self) -> int | None:
        """The number N of the latest `step-N/` among checkpoints and trained weights; None if there is none."""
        folders = (folder for parent in (self.checkpoints, self.trained) for folder in parent.glob("step-*"))
        names = (folder.name.removeprefix("step-") for folder in folders)
        return max((int(name) for name in names if name.isdigit()), default=None)

    def has_saved(self) -> bool:
        """Whether the run has saved a checkpoint or trained weights. A checkpoint copied from the run that it continues
        does not count."""
        only_given = self.goes_on.exists() and not self.metrics.exists()
        return not only_given and self.last_checkpoint_step() is not None

    def token(self) -> str:
        """A random hexadecimal word by which the run recognizes files and folders that it made outside its own folder.
        The first call makes the word."""
        path = self.path / "token"
        if not path.exists():
            mine = self.path / f".token-{secrets.token_hex(4)}{_NEW}"
            try:
                _write_text(mine, secrets.token_hex(16))
                os.link(mine, path)
            except FileExistsError:  # another process was faster: its word is the run's
                pass
            finally:
                mine.unlink(missing_ok=True)
        return path.read_text("utf-8")

    def states_on(self, disk: str) -> Path:
        """The subfolder of `disk` for this run's optimizer states on that drive."""
        return Path(disk) / f"offmate-{self.token()}"

    def read_plan(self) -> dict[str, Any] | None:
        """The content of plan.json; None if it is not there or broken."""
        return _read_object(self.plan)

    def read_counted(self) -> Counted | None:
        """The content of tokens.json, the counts of the job's data; None if the data have not been counted, or were
        counted by a version that did not note the lengths of rows."""
        try:
            return from_json(Counted, _read_object(self.tokens))
        except ValueError:
            return None

    def read_frozen(self) -> dict[str, Any] | None:
        """The content of frozen.json, the record of the job's data; None for jobs of older versions, which have no such
        file."""
        return _read_object(self.frozen)

    def read_base(self) -> dict[str, Any] | None:
        """The content of base.json, the record of the model's files; None for jobs of older versions, which have no
        such file."""
        return _read_object(self.base)

    def write_base(self, base: Mapping[str, Mapping[str, Any]] | None) -> None:
        """Write base.json if `base` differs from its content. None means that nothing is known, and nothing is written.
        A concurrent reader finds the old file or the new one, complete."""
        if base is not None and base != self.read_base():
            _write_object(self.base, base)

    def forget_tokens(self) -> None:
        """Delete the tokenized data and their counts, so that the next start reads and tokenizes the data again."""
        shutil.rmtree(self.path / "data", ignore_errors=True)
        self.tokens.unlink(missing_ok=True)

    def has_trained(self) -> bool:
        """Whether the trained weights from after the last step are there."""
        return any(self.trained.glob("step-*"))

    def read_packages(self) -> dict[str, Any] | None:
        """The content of packages.json, package names and versions; None for jobs of older versions, which have no such
        file."""
        return _read_object(self.packages)

    def write_frozen(self, frozen: dict[str, dict[str, Any]]) -> None:
        """Write frozen.json, the record of the job's data; a concurrent reader finds the old file or the new one,
        complete."""
        _write_object(self.frozen, frozen)

    def read_notches(self) -> list[dict[str, Any]]:
        """How the memory budgets were lowered, one entry for each time that the job ran out of memory, in order."""
        notches = (_read_object(self.path / "notches.json") or {}).get("notches")
        return notches if isinstance(notches, list) else []

    def write_notches(self, notches: list[dict[str, Any]]) -> None:
        """Write notches.json, the record of lowered memory budgets; a concurrent reader finds the old file or the new
        one, complete."""
        _write_object(self.path / "notches.json", {"notches": notches})

    def forget_notches(self) -> None:
        """Delete the record of lowered memory budgets, so that the job's full budgets hold again."""
        (self.path / "notches.json").unlink(missing_ok=True)

    def read_error(self) -> dict[str, Any] | None:
        """The content of error.json, a `UserError` in JSON form; None if the file is missing, broken, or lacks a
        field."""
        error = _read_object(self.error)
        return error if error is not None and error.keys() >= _ERROR_FIELDS else None

    def read_first_notes(self) -> tuple[str, ...] | None:
        """The notes in first_notes.json; None if there is no such file."""
        notes = (_read_object(self.first_notes) or {}).get("notes")
        return tuple(map(str, notes)) if isinstance(notes, list) else None

    def write_first_notes(self, notes: Sequence[str]) -> None:
        """Write the notes on the job's first records; a concurrent reader finds the old file or the new one,
        complete."""
        _write_object(self.first_notes, {"notes": list(notes)})

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Write plan.json, the planner's answer; a concurrent reader finds the old file or the new one, complete."""
        _write_object(self.plan, plan)

    def write_timeline(self, timeline: dict[str, Any]) -> None:
        """Write timeline.json, the times of two steps; a concurrent reader finds the old file or the new one,
        complete."""
        _write_object(self.timeline, timeline)

    def write_counted(self, counted: Counted) -> None:
        """Write tokens.json, the counts of the data; a concurrent reader finds the old file or the new one,
        complete."""
        _write_object(self.tokens, asdict(counted))

    def write_resolved(self, text: str) -> None:
        """Write resolved.yaml, the job with its defaults; a concurrent reader finds the old file or the new one,
        complete."""
        _write_text(self.resolved, text)

    def write_error(self, error: UserError) -> None:
        """Write error.json, the last error; a concurrent reader finds the old file or the new one, complete."""
        _write_object(self.error, error.to_json())

    def read_metrics(self) -> list[dict[str, Any]]:
        """All events in metrics.jsonl, in order. Broken lines are left out, and so is a last line that is still being
        written."""
        return self.all_metrics().events

    def all_metrics(self) -> Piece:
        """All lines of metrics.jsonl as one `Piece`: events, positions and broken lines. A last line that is still
        being written is left out."""
        content = self.metrics.read_bytes() if self.metrics.exists() else b""
        lines = content.split(b"\n")[:-1]
        return Piece.of(lines, sum(map(len, lines)) + len(lines))

    def metrics_after(self, position: int) -> Piece:
        """The lines of metrics.jsonl from byte `position` on, at most about 1 MiB of them. To read on, pass the
        returned `Piece.position`, which is the byte after the last line; it equals `position` if there are no more
        lines."""
        nothing = Piece(events=[], position=position)
        if not self.metrics.exists():
            return nothing
        with self.metrics.open("rb") as file:
            if position >= os.fstat(file.fileno()).st_size:  # even where `position` is more than any file has
                return nothing
            file.seek(position)
            piece = file.read(_PIECE_BYTES) + file.readline()  # on to the end of the line that the piece ends in
        lines = piece.split(b"\n")[:-1]
        return Piece.of(lines, position + sum(map(len, lines)) + len(lines))

    def recent_metrics(self) -> list[dict[str, Any]]:
        """The first event behind those on the reference model, the last evaluation, and the events in the last 16 KiB
        of metrics.jsonl. The file is not read as a whole, so that listing many jobs stays quick."""
        if not self.metrics.exists():
            return []
        with self.metrics.open("rb") as file:
            head = file.readline()
            while head.startswith(b'{"event": "reference"'):
                head = file.readline()
            behind = file.tell()
            size = file.seek(0, os.SEEK_END)
            start = file.seek(max(behind, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
            if start > behind:
                lines = lines[1:]  # the piece began in the middle of a line
                lines.insert(0, _last_line(file, b'{"event": "eval"', end=start))
        return events_of([head, *lines] if head.endswith(b"\n") else [])

    def first_metrics(self) -> list[dict[str, Any]]:
        """The events in the first 16 KiB of metrics.jsonl."""
        if not self.metrics.exists():
            return []
        with self.metrics.open("rb") as file:
            return events_of(file.read(_TAIL_BYTES).split(b"\n")[:-1])

    def metrics_end(self) -> int:
        """The byte offset in metrics.jsonl after its last complete line. A restarted trainer writes its first event
        there, over a half-written last line, if any."""
        if not self.metrics.exists():
            return 0
        with self.metrics.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else nullcontext(b"") as content:
                return content.rfind(b"\n") + 1

    def last_event(self, kind: str, since: int) -> dict[str, Any] | None:
        """The last event whose "event" field is `kind`, at byte `since` or later; None if there is none. Only the last
        16 KiB of metrics.jsonl are searched."""
        if not self.metrics.exists():
            return None
        with self.metrics.open("rb") as file:
            start = file.seek(max(since, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        events = events_of(lines if start == since else lines[1:])
        return next((event for event in reversed(events) if event["event"] == kind), None)

    def say(self, text: str) -> None:
        """Append `text` to the job's log, with the time and the mark [offmate]. If the disk is full, the line is lost:
        a job must not fail because of its log."""
        try:
            with self.log.open("a", encoding="utf-8") as log:
                log.write(f"[offmate] {time.strftime('%Y-%m-%d %H:%M:%S')} {printable(text)}\n")
        except OSError as error:
            if not is_disk_full(error):
                raise

    def tidy(self) -> None:
        """Delete unfinished files that a process left when it was killed while it wrote. Call this only when no process
        writes."""
        for draft in self.path.glob(f".*{_NEW}"):
            draft.unlink()

    def tail_of_log(self, lines: int) -> tuple[str, ...]:
        """The last `lines` lines of the job's log, from at most its last 16 KiB."""
        if not self.log.exists():
            return ()
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            return tuple(file.read().decode(errors="replace").splitlines()[-lines:])


def _last_line(file: BinaryIO, beginning: bytes, *, end: int) -> bytes:
    """The last line that starts with `beginning`, at or before byte `end`; empty if there is none."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = content.rfind(b"\n" + beginning, 0, end + len(beginning))
        content.seek(at + 1)
        return content.readline() if at >= 0 else b""


def _write_object(path: Path, value: Mapping[str, Any]) -> None:
    _write_text(path, json.dumps(value) + "\n")


def _write_text(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}{_NEW}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # otherwise a power cut may leave an empty file under the new name
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        return json_object(path.read_bytes())
    except FileNotFoundError:
        return None
