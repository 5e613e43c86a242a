"""Accepts a submitted job: its run folder and its row in the database are made together, or neither."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from offmated.jobs.job_text import keys_of, notes_on_settings, settings_in, with_settings
from offmated.jobs.longer import Length, link, longer, went_on_from
from offmated.jobs.looking import check_here, look_at, without_budgets
from offmated.jobs.queue_turns import AT_ONCE, Turn
from offmated.jobs.store import KeyTaken, Store
from offmated.jobs.table import JobRow
from offmated.paths import IN_STATE_FOLDER, Paths
from planner.data.local_data import is_local
from planner.errors import Errors, Exit, UserError
from planner.hub import NOT_REACHED
from planner.job.base import content_of, freeze_base, left_for_later
from planner.job.frozen import fingerprint, freeze, package_versions
from planner.job.hub_names import taken_from_hub
from planner.job.output_dir import Place, new_token, run_in
from planner.job.schema import Job
from planner.keys.trackers import missing_package
from planner.keys.window import Window
from planner.run.folder import RunFolder
from planner.units import printable

NAME_LENGTH = 255
_ANY_JOB = ("job", "config")
_DRAFT = ".new-"
TRY_S = 10.0  # so that a disk that hangs does not keep others from submitting


def submit(
    store: Store,
    paths: Paths,
    yaml_text: str,
    folder: Path,
    file_name: str = "job.yaml",
    key: str | None = None,
    turn: Turn = AT_ONCE,
    window: str | None = None,
    *,
    settings: Sequence[str] = (),
) -> tuple[JobRow, tuple[str, ...]]:
    """Check a job, and make its run folder and its row. Returns the row and the notes to the user; if a job was
    accepted under `key` before, the row of that job. `turn`: when the job may start. `window`: the machine's window of
    hours, for jobs that name none. `settings`, each "KEY=VALUE", override the file: the copy that is kept of it has
    them, and notes say so.

    Raises UserError for a job that cannot be run as written; the error calls the job's file `file_name`. In this case,
    and where there is no space for the job, nothing is kept."""
    text = with_settings(yaml_text, settings)

    def take_in() -> tuple[JobRow, tuple[str, ...]]:
        job, notes = _parsed(store, yaml_text, text, folder, file_name, turn, window, settings)
        name = name_of(job, file_name, folder)
        return _take_in(store, paths, job, notes, text, key, turn, window, name=name, folder=folder)

    return _once(store, key, text, take_in)


def check(
    store: Store,
    paths: Paths,
    yaml_text: str,
    folder: Path,
    file_name: str = "job.yaml",
    turn: Turn = AT_ONCE,
    window: str | None = None,
    *,
    settings: Sequence[str] = (),
) -> tuple[str, tuple[str, ...]]:
    """Check a job as `submit` does, and keep nothing of it. Returns the name that lists would show, and the notes to
    the user. The arguments and the errors are those of `submit`. Two things are found only by `submit`, which reads the
    data whole: whether another job did the same work, and whether a file cannot be read to its end."""
    text = with_settings(yaml_text, settings)
    job, notes = _parsed(store, yaml_text, text, folder, file_name, turn, window, settings)
    draft = paths.runs / f"{_DRAFT}{uuid.uuid4().hex}"
    try:
        draft.mkdir(mode=0o700)
        looked = _look(store, paths, RunFolder(draft), job, text, turn, window, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return name_of(job, file_name, folder), (*notes, *taken_from_hub(job), *looked.notes)


def _parsed(
    store: Store,
    yaml_text: str,
    text: str,
    folder: Path,
    file_name: str,
    turn: Turn,
    window: str | None,
    settings: Sequence[str],
) -> tuple[Job, tuple[str, ...]]:
    """The job in `text`, which is `yaml_text` with `settings` in it, and notes on what its file says. A wrong turn is
    raised together with the file's mistakes."""
    wrong = Errors()
    with wrong.apart():
        job, notes = Job.parse_with_notes(text, folder, name=file_name, told=keys_of(settings))
    if wrong.found:
        _check_turn(store, turn, turn.window or window, wrong)
        wrong.refuse()
    return job, (*notes_on_settings(yaml_text, settings), *notes)


def name_of(job: Job, file_name: str, folder: Path) -> str:
    """The name under which lists show a job: its `run_name`; else the file's name; if any job's file may have that name
    (job.yaml), the folder's name; if the folder is the home folder, the model's name."""
    stem = Path(file_name).stem
    name = "" if stem in _ANY_JOB else stem
    if not name and folder != Path.home():
        name = folder.name
    name = job.run_name or name or Path(job.model).name
    return printable(name).replace("\n", " ").replace("\t", " ")[:NAME_LENGTH]


def rerun(
    store: Store,
    paths: Paths,
    job_id: int,
    key: str | None = None,
    turn: Turn = AT_ONCE,
    window: str | None = None,
    length: Length | None = None,
) -> tuple[JobRow, tuple[str, ...]]:
    """Submit job `job_id` again, as a new job: with the same file, on the data that are there now; data of the hub are
    read at the commits of the first job. The new model goes to the new run folder, as the first job's model is where
    the file says. With a `length` the new job continues from the newest checkpoint of the first, on the first job's
    data. Arguments, results and errors are otherwise those of `submit`."""
    row = store.job(job_id)
    if length is not None:
        more = longer(row, length)
        text = more.job.resolved_yaml()
        return _once(
            store,
            key,
            text,
            lambda: _take_in(
                store,
                paths,
                more.job,
                more.notes,
                text,
                key,
                turn,
                window,
                name=row.name,
                again=job_id,
                checkpoint=more.checkpoint,
            ),
        )
    run = RunFolder(Path(row.run_dir))
    before = as_asked(run, Job.from_resolved(run.resolved), budgets=True)
    job = before.model_copy(update={"output_dir": None})
    commits = any(entry.revision for entry in (*job.data, *job.eval_data))
    data_words = "that are there now" + (", those of the hub at the commits that it has" if commits else "")
    notes = [
        f"the same as job {job_id}, on the data {data_words}",
        *(note for note in row.notes if settings_in([note])),
    ]
    if (origin := went_on_from(run)) is not None:
        notes.append(f"from the start; job {job_id} went on from job {origin}")
    if before.output_dir is not None:
        notes.append(f"output_dir is job {job_id}'s: the model goes to the run folder")
    text = job.resolved_yaml()
    return _once(
        store,
        key,
        text,
        lambda: _take_in(store, paths, job, tuple(notes), text, key, turn, window, name=row.name, again=job_id),
    )


def as_asked(run: RunFolder, job: Job, *, budgets: bool = False) -> Job:
    """A copy of `job` with the batch that its file has, since the planner may have split the batch to fit earlier
    budgets. With `budgets` the budgets, too, are the file's: a retry may have changed them, and so did each run out of
    memory."""
    keys: tuple[str, ...] = ()
    if job.train_batch_size is not None:
        keys = ("per_device_train_batch_size", "gradient_accumulation_steps")
    if budgets and (job.gpu_budget, job.cpu_budget) != (None, None):
        keys += ("gpu_budget", "cpu_budget")
    if not keys:
        return job
    submitted = Job.from_resolved(run.submitted)
    return job.model_copy(update={key: getattr(submitted, key) for key in keys})


def _once(
    store: Store, key: str | None, yaml_text: str, take_in: Callable[[], tuple[JobRow, tuple[str, ...]]]
) -> tuple[JobRow, tuple[str, ...]]:
    """The result of `take_in`; where a job was taken in under `key` before, that job."""
    if (row := _submitted(store, key, yaml_text)) is None:
        try:
            return take_in()
        except (KeyTaken, UserError):
            if (row := _submitted(store, key, yaml_text)) is None:  # else: the same submission, sent twice, was faster
                raise
    return row, tuple(row.notes)


def _submitted(store: Store, key: str | None, yaml_text: str) -> JobRow | None:
    """The job that was taken in under `key`. Raises UserError `key-taken` when its file is not `yaml_text`."""
    row = store.submitted(key) if key is not None else None
    if row is not None:
        with suppress(OSError):  # its folder may be gone since
            if RunFolder(Path(row.run_dir)).submitted.read_bytes() != yaml_text.encode():
                raise UserError(
                    f"Job {row.id} was submitted under the same key, and is another one.",
                    code="key-taken",
                    hint="take a new key for each job, such as a UUID",
                    exit_code=Exit.USAGE,
                )
    return row


def _take_in(
    store: Store,
    paths: Paths,
    job: Job,
    notes: Sequence[str],
    yaml_text: str,
    key: str | None,
    turn: Turn,
    window: str | None,
    *,
    name: str,
    again: int | None = None,
    checkpoint: Path | None = None,
    folder: Path | None = None,
) -> tuple[JobRow, tuple[str, ...]]:
    """Take `job` in. `name`: its name in lists. `again`: the job that it repeats. `checkpoint`: where it goes on from.
    `folder`: the folder of its file. Errors are those of `_look`."""
    draft = paths.runs / f"{_DRAFT}{uuid.uuid4().hex}"
    folders: list[Path] = []
    all_notes = [*notes, *(taken_from_hub(job) if again is None else ())]

    def make_folder(job_id: int) -> Path:
        final = paths.run_folder(job_id)
        if final.exists():
            all_notes.extend(_make_room(final))
        draft.rename(final)
        folders.append(final)
        if checkpoint is not None:
            link(checkpoint, RunFolder(final))
        _flush(paths.runs)
        return final

    try:
        draft.mkdir(mode=0o700)
        run = RunFolder(draft)
        looked = _look(store, paths, run, job, yaml_text, turn, window, folder)
        all_notes.extend(looked.notes)
        frozen, base = freeze(job), freeze_base(job, paths.runs)
        all_notes.extend(left_for_later(base))
        _write(run.frozen, json.dumps(frozen))
        _write(run.base, json.dumps(base))
        _write(run.packages, json.dumps(package_versions()))
        _write(run.name, name)
        if checkpoint is not None:
            _write(run.goes_on, f"{checkpoint}\n")
        _flush(draft)
        row = store.add(
            name,
            make_folder,
            looked.turn,
            key=key,
            notes=all_notes,
            output_dir=looked.output_dir,
            fingerprint=fingerprint(job, {**frozen, **content_of(base)}, checkpoint),
            again=again,
        )
        folders.clear()
        for entry in (*job.data, *job.eval_data):
            if not is_local(entry.path):
                RunFolder(Path(row.run_dir)).say(
                    f"{entry.path} is of the Hugging Face hub: it is read when the job has its turn, before all else"
                )
        return row, tuple(row.notes)
    finally:
        for unfinished in (draft, *folders):  # these exist only when something went wrong
            shutil.rmtree(unfinished, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looked:
    """What is known of a job that may be taken in: its turn, the real path of its model folder if it names one, and
    notes to the user."""

    turn: Turn
    output_dir: str | None
    notes: tuple[str, ...]


def _look(
    store: Store,
    paths: Paths,
    run: RunFolder,
    job: Job,
    yaml_text: str,
    turn: Turn,
    window: str | None,
    folder: Path | None,
) -> _Looked:
    """Write `job` and its file's text into `run`, an empty draft of its run folder, and check it. All errors are raised
    together, those known without opening a file first."""
    wrong, output_dir = Errors(), None
    turn = _check_turn(store, turn, turn.window or job.schedule or window, wrong)
    before = len(wrong.found)
    looked_at = check_here(job, paths, wrong)
    if not any(error.code == IN_STATE_FOLDER for error in wrong.found[before:]):
        with wrong.apart():
            output_dir = check_output(job, store)
    notes = [*filter(None, map(missing_package, job.report_to))]
    _write(run.submitted, yaml_text)
    _write(run.resolved, looked_at.resolved_yaml())  # of the job itself, unless its budgets are refused
    with wrong.apart():
        notes.extend(look_at(run, folder))
    wrong.refuse()
    return _Looked(turn=turn, output_dir=output_dir, notes=tuple(notes))


def _check_turn(store: Store, turn: Turn, window: str | None, wrong: Errors) -> Turn:
    """`turn` with `window`, the one that counts, and to begin not before it opens. Errors are added to `wrong`."""
    with wrong.apart():
        if turn.after is not None:
            store.job(turn.after)
    with wrong.apart():
        if window is not None:
            parsed = window_of(window)
            return replace(turn, window=str(parsed), begin_at=parsed.opening(max(time.time(), turn.begin_at or 0.0)))
    return turn


def window_of(text: str) -> Window:
    """Parse a window, the hours in which a job may have the GPU. Raises UserError."""
    try:
        return Window.parse(text)
    except ValueError as error:
        raise UserError(
            "This is not a window of hours.",
            numbers=(str(error),),
            code="bad-window",
            exit_code=Exit.USAGE,
            hint='days and a time zone may follow: "23:00-07:00 mon-fri Europe/Berlin"',
        ) from None


def look_again(run: RunFolder, job: Job) -> None:
    """Raise the UserError with which `job`, whose run folder is `run`, would be refused if it were submitted now. Two
    checks are left out: a hub that does not answer is no reason to refuse, as the job has been accepted already; and
    its next plan says whether the job fits its budgets."""
    draft = run.path.with_name(f"{_DRAFT}{uuid.uuid4().hex}")
    try:
        draft.mkdir(mode=0o700)
        _write(RunFolder(draft).resolved, without_budgets(job).resolved_yaml())
        look_at(RunFolder(draft))
    except UserError as error:
        wrong = Errors()
        wrong.found += (each for each in getattr(error, "errors", (error,)) if each.code != NOT_REACHED)
        wrong.refuse()
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def sweep_drafts(paths: Paths) -> None:
    """Remove the unfinished run folders of submissions that were cut short when a daemon died. Only for a daemon that
    accepts no submissions yet, as then all of them are old. Anything else with such a name, or with other contents, is
    not offmate's and stays."""
    for draft in paths.runs.glob(f"{_DRAFT}*"):
        ours = re.fullmatch("[0-9a-f]{32}", draft.name.removeprefix(_DRAFT)) and not draft.is_symlink()
        if ours and draft.is_dir() and _is_draft(draft):
            shutil.rmtree(draft)


_TRYING = threading.Lock()
"""Held while a folder is tried out. Two threads that try the same folder disturb each other: each makes and removes
it."""


def check_output(job: Job, store: Store, run: RunFolder | None = None) -> str | None:
    """Raise UserError when the model cannot be written where the job says: now, and not after days of training. `run`:
    the run folder of a job that was accepted before. Returns the real path of the model folder, None where the job
    names none."""
    if job.output_dir is None:
        return None
    place = Place(folder=Path(job.output_dir), token=new_token() if run is None else run.token())
    alone = _TRYING.acquire(timeout=TRY_S)
    try:
        place.try_out()
    except UserError as error:
        if error.code == "output-exists" and (number := _job_of(place.folder, store)) is not None:
            more = f"the model there is job {number}'s, which offmate rerun {number} trains again, elsewhere"
            raise UserError(
                error.what,
                code=error.code,
                exit_code=error.exit_code,
                numbers=error.numbers,
                hint=f"{error.hint}; {more}",
            ) from None
        raise
    finally:
        if alone:
            _TRYING.release()
    output_dir = os.path.realpath(job.output_dir)
    store.check_free(output_dir)
    return output_dir


def _job_of(folder: Path, store: Store) -> int | None:
    """The number of the job whose model is in `folder`; None where it is not the model of a job that is known here."""
    run = RunFolder(Path(run_in(folder) or "/"))
    with suppress(UserError, OSError, ValueError):
        row = store.job(int(run.path.name))
        if row.run_dir == str(run.path) and Place(folder=folder, token=run.token()).published() is not None:
            return row.id
    return None


def _make_room(folder: Path) -> tuple[str, ...]:
    """Free the name of a run folder that no row has; returns notes to the user.

    A folder with a job in it may belong to a job that a lost or replaced database no longer knows, even if that job
    only waited: the folder is kept under another name, and `offmate adopt` takes it back.
    """
    if _is_draft(folder) and not RunFolder(folder).resolved.exists():
        shutil.rmtree(folder)
        return ()
    aside = folder.with_name(f"{folder.name}.lost-{time.strftime('%Y%m%d-%H%M%S')}")
    folder.rename(aside)
    return (f"a job {folder.name} that the database does not know was here before; its run folder is now {aside}",)


def _is_draft(folder: Path) -> bool:
    """Whether a run folder holds no more than a submission writes."""
    run = RunFolder(folder)
    return {path.name for path in folder.iterdir()} <= {
        run.submitted.name,
        run.resolved.name,
        run.frozen.name,
        run.base.name,
        run.packages.name,
        run.error.name,
        run.first_notes.name,
        run.looks_at.name,
        run.goes_on.name,
        run.name.name,
    }


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    """Make the folder's entries durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
