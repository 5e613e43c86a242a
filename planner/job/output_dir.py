"""Where a trained model goes: a folder that is empty or does not exist yet, and that only its own run may fill.

Nothing is written through links or over files that are not the run's. All files are first made in a folder with an
unguessable name, inside the output folder where that exists, else beside it. Renames that replace nothing then put them
in place. Only files that the run made are removed, by their names. Light: no torch.
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
"""The file in a model folder that names its run, under "token", and all the folder's files, under "files"."""

_PREFIX = ".offmate-"
_LONG = "model-00001-of-00001.safetensors.index.json"  # as long as a name of a model's files can be
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The output folder `folder`, an absolute path, of the run that recognizes its own files by `token` (see
    `new_token`)."""

    folder: Path
    token: str

    def published(self) -> int | None:
        """The step of this run's model in the folder; None where there is none."""
        mark = _mark(self.folder)
        return mark.step if mark is not None and mark.token == self.token else None

    def check(self) -> None:
        """Raise UserError unless the folder does not exist, is empty, or holds what this run has put there."""
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
        """`check`, and try all that publishing does with a meaningless file. Leaves nothing behind.

        Raises UserError when any of it fails, or when the disk has less than `needed_bytes` left.
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
        """A new folder of this run, for the files that `finish` puts in place. Removes what an earlier attempt left.
        Raises OSError."""
        self.clear()
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        staging = (self.folder if self.folder.is_dir() else self.folder.parent) / self._name
        staging.mkdir()
        return staging

    def finish(self, staging: Path, *, run: str, step: int) -> None:
        """Move the content of `staging`, the folder from `begin`, into the output folder, all or nothing. The file
        `MARK` gets the id `run` and the number `step`.

        Raises UserError when something has come into the folder meanwhile; that then stays as it is.
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
                for path in sorted(staging.iterdir(), key=lambda path: path.name == MARK):  # last: then all is there
                    _put(path, self.folder / path.name)
            except OSError:
                self.clear()
                raise
            staging.rmdir()
            sync(self.folder)

    def clear(self) -> None:
        """Remove what this run has begun to write here and has not finished. Raises OSError."""
        for parent in (self.folder, self.folder.parent):
            staging = parent / self._name
            if staging.is_symlink() or not staging.is_dir():
                continue
            mark = _mark(staging)
            if parent == self.folder and mark is not None:  # ended between the renames; MARK's is last
                _remove(self.folder, [name for name in mark.files if _has_left(staging / name, self.folder / name)])
            shutil.rmtree(staging)

    def withdraw(self) -> None:
        """Remove the files of this run's model from the folder, if they are there, and the folder if nothing else is in
        it. Raises OSError."""
        mark = _mark(self.folder)
        if mark is not None and mark.token == self.token:
            _remove(self.folder, [*mark.files, MARK])
            _remove_empty([self.folder])

    @property
    def _name(self) -> str:
        return f"{_PREFIX}{self.token}"

    def _others(self) -> list[str]:
        """The names of all in the folder that is not this run's."""
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
        """Turns an OSError into a UserError."""
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
    """The folder with the finished model of the run `token`: the one that its job names, or the one in the run folder,
    where the model goes if that place refuses it. None where it is in neither."""
    places = (Place(folder=Path(folder), token=token) for folder in (job_says, run_folders_own) if folder is not None)
    return next((place.folder for place in places if place.published() is not None), None)


def new_token() -> str:
    """A name that is unique and that nobody can guess."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    token: str
    step: int
    files: tuple[str, ...]


def _mark(folder: Path) -> _Mark | None:
    """The content of a folder's MARK; None where there is none, or one that this version did not write."""
    try:
        mark = json.loads((folder / MARK).read_text("utf-8"))
        files = tuple(name for name in mark["files"] if isinstance(name, str) and _is_inside(name))
        return _Mark(token=str(mark["token"]), step=int(mark["step"]), files=files)
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
    """Rename `path` to `target`, which must not be there. Raises FileExistsError."""
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
    """Whether a file has its new name `put` already, and perhaps no longer its old one, `staged`."""
    return not staged.exists() or (put.exists() and staged.samefile(put))


def _remove(folder: Path, names: list[str]) -> None:
    """Remove files of a folder by their names, and the folders of these files that are then empty."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
        _remove_empty([folder / parent for parent in list(Path(name).parents)[:-1]])


def _remove_empty(folders: list[Path]) -> None:
    """Remove those of these folders, the innermost first, that exist and are empty."""
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
