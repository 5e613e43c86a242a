"""Puts a trained model into its output folder, which must be empty or not exist yet, and which only this run may fill.

Nothing is written through symbolic links or over files that are not the run's. All files are first written to a folder
with an unguessable name, inside the output folder where that exists, else beside it. They are then renamed into place
without replacing anything. Only files that the run made are removed, by their names. Does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from planner.disk import sync, sync_tree
from planner.errors import Exit, Room, UserError, is_disk_full
from planner.units import format_bytes

MARK = "offmate.json"
"""The file in a model folder that names its run (by the random "token") and lists all files of the folder ("files")."""

_PREFIX = ".offmate-"
_LONG = "model-00001-of-00001.safetensors.index.json"  # the longest name that a model's file can have
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An output folder (`folder`, an absolute path) of one run. The run recognizes its own files in it by `token`, a
    random name from `new_token`."""

    folder: Path
    token: str

    def published(self) -> int | None:
        """Return the training step of this run's model in the folder; None where the folder has no model of this
        run."""
        mark = _mark(self.folder)
        return mark.step if mark is not None and mark.token == self.token else None

    def check(self) -> None:
        """Raise UserError if the run may not use the folder: unless it does not exist, is empty, or has only files of
        this run."""
        with self._told():
            for path in (self.folder, *self.folder.parents):
                if path.is_symlink() and not path.exists():
                    raise _unwritable(self.folder, f"{path} is a link to {path.readlink()}, which is not there")
                if path != self.folder and path.exists() and not path.is_dir():
                    raise _unwritable(self.folder, f"{path} is not a folder")
            if not self.folder.exists() or self.published() is not None:
                return
            if not self.folder.is_dir() or self._others():
                raise self._taken()

    def try_out(self, needed_bytes: int = 0) -> None:
        """Check the folder as `check` does, and try everything that publishing a model does, with a meaningless file.
        Nothing of it is left behind.

        Raises UserError where any of this fails, or where the disk has less than `needed_bytes` free.
        """
        self.check()
        probe = Place(folder=self.folder, token=new_token())
        with self._told(), contextlib.ExitStack() as undo:
            parents = [parent for parent in self.folder.parents if not parent.exists()]
            undo.callback(_remove_empty, [self.folder, *parents] if not self.folder.exists() else [])
            undo.callback(probe.clear)
            staging = probe.begin()
            _write(staging / _LONG)
            sync(staging)
            if staging.parent == self.folder:
                _put(staging / _LONG, self.folder / f"{probe._name}{_LONG}")
                (self.folder / f"{probe._name}{_LONG}").unlink()
            else:
                with contextlib.suppress(FileExistsError):  # another submission may try it at the same time
                    self.folder.mkdir()  # fails for a name too long, or with characters that this disk does not allow
                    self.folder.rmdir()
                staging.rename(staging.with_name(f"{staging.name}-"))
                staging.with_name(f"{staging.name}-").rename(staging)
            sync(staging.parent)
            free = shutil.disk_usage(staging).free
        if free < needed_bytes:
            raise UserError(
                f"The disk of the output folder {self.folder} has no room for the trained model.",
                code="disk-full",
                numbers=(f"needed {format_bytes(needed_bytes)}, free {format_bytes(free)}",),
                hint="free some space there, or give another output_dir",
                needs=Room(str(self.folder), needed_bytes),
            )

    def begin(self) -> Path:
        """Return a new folder of this run in which the caller writes files, for `finish` to put in place. What an
        earlier attempt left is removed first. Raises OSError."""
        self.clear()
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        staging = (self.folder if self.folder.is_dir() else self.folder.parent) / self._name
        staging.mkdir()
        return staging

    def finish(self, staging: Path, *, run: str, step: int) -> None:
        """Move all files from `staging`, the folder that `begin` returned, into the output folder: all of them or none.
        `run` (the run's id) and `step` (the training step) are noted in the file `MARK`.

        Raises UserError where another program has put something into the output folder meanwhile; that then stays as it
        is.
        """
        files = sorted(path.relative_to(staging).as_posix() for path in staging.rglob("*") if not path.is_dir())
        mark = {"format": 2, "run": run, "step": step, "token": self.token, "files": files}
        (staging / MARK).write_text(json.dumps(mark, indent=1) + "\n", "utf-8")
        sync_tree(staging)
        self.check()
        with self._told():
            if staging.parent != self.folder:
                staging.rename(self.folder)  # the system refuses this unless the target is an empty folder or nothing
                sync(self.folder.parent)
                return
            try:
                for path in sorted(staging.iterdir(), key=lambda path: path.name == MARK):  # MARK comes last
                    _put(path, self.folder / path.name)
            except OSError:
                self.clear()
                raise
            staging.rmdir()
            sync(self.folder)

    def clear(self) -> None:
        """Remove what this run began to write here and did not finish. Raises OSError."""
        for parent in (self.folder, self.folder.parent):
            staging = parent / self._name
            if staging.is_symlink() or not staging.is_dir():
                continue
            mark = _mark(staging)
            if parent == self.folder and mark is not None:  # it ended between the renames, before that of MARK
                _remove(self.folder, [name for name in mark.files if _has_left(staging / name, self.folder / name)])
            shutil.rmtree(staging)

    def withdraw(self) -> None:
        """Remove the files of this run's model from the folder, if there are any, and the folder if it is then empty.
        Raises OSError."""
        mark = _mark(self.folder)
        if mark is not None and mark.token == self.token:
            _remove(self.folder, [*mark.files, MARK])
            _remove_empty([self.folder])

    @property
    def _name(self) -> str:
        return f"{_PREFIX}{self.token}"

    def _others(self) -> list[str]:
        """Return the names of everything in the folder that is not this run's."""
        return sorted(path.name for path in self.folder.iterdir() if path.name != self._name)

    def _taken(self) -> UserError:
        others = self._others() if self.folder.is_dir() else []
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        return UserError(
            f"The output folder {self.folder} is not empty.",
            code="output-exists",
            exit_code=Exit.USAGE,
            numbers=(f"there is {others[0]}{more}" if others else "it is a file",),
            hint="give another output_dir, or move what is there",
        )

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Turn an OSError in the `with` block into a UserError."""
        try:
            yield
        except OSError as error:
            if is_disk_full(error):
                raise UserError(
                    f"The disk of the output folder {self.folder} has no room.",
                    code="disk-full",
                    numbers=(f"{error.filename}: {error.strerror}",),
                    hint="free some space there, or give another output_dir",
                ) from error
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                raise self._taken() from error
            raise _unwritable(self.folder, f"{error.filename or self.folder.parent}: {error.strerror}") from error


def delivered(job_says: str | None, run_folders_own: Path, token: str) -> Path | None:
    """Return the folder that has the finished model of the run with this `token`: `job_says`, the output folder of its
    job, or `run_folders_own`, the run folder's own output, which receives the model where the job's folder refuses it.
    None where neither has it."""
    places = (Place(folder=Path(folder), token=token) for folder in (job_says, run_folders_own) if folder is not None)
    return next((place.folder for place in places if place.published() is not None), None)


def run_in(folder: Path) -> str | None:
    """Return the id of the run whose model is in `folder`, as the file `MARK` there says; None where there is none."""
    mark = _mark(folder)
    return None if mark is None else mark.run


def new_token() -> str:
    """Return a random name of 32 hexadecimal digits, which is unique and cannot be guessed."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    run: str
    token: str
    step: int
    files: tuple[str, ...]


def _mark(folder: Path) -> _Mark | None:
    """Return the content of a folder's `MARK`; None where there is none, or where this version did not write it."""
    try:
        mark = json.loads((folder / MARK).read_text("utf-8"))
        files = tuple(name for name in mark["files"] if isinstance(name, str) and _is_inside(name))
        return _Mark(run=str(mark["run"]), token=str(mark["token"]), step=int(mark["step"]), files=files)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_inside(name: str) -> bool:
    return not name.startswith("/") and ".." not in name.split("/")


def _write(path: Path) -> None:
    with path.open("xb") as file:
        file.write(bytes(4096))
        file.flush()
        os.fsync(file.fileno())


def _put(path: Path, target: Path) -> None:
    """Rename `path` to `target`. Raises FileExistsError if `target` exists."""
    if path.is_dir():
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        path.rename(target)
        return
    try:
        os.link(path, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(target):  # without links, as on FAT, a rename would replace it
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        path.rename(target)
    else:
        path.unlink()


def _has_left(staged: Path, put: Path) -> bool:
    """Return whether a file has its new name `put` already, and perhaps no longer its old one, `staged`."""
    return not staged.exists() or (put.exists() and staged.samefile(put))


def _remove(folder: Path, names: list[str]) -> None:
    """Remove the named files of a folder, and their own folders where these are then empty."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
        _remove_empty([folder / parent for parent in list(Path(name).parents)[:-1]])


def _remove_empty(folders: list[Path]) -> None:
    """Remove those of the folders that exist and are empty; inner ones must come first."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _unwritable(folder: Path, reason: str) -> UserError:
    return UserError(
        f"The output folder {folder} cannot be made.",
        code="output-unwritable",
        exit_code=Exit.USAGE,
        numbers=(reason,),
        hint="give another output_dir",
    )
