"""Says where offmate keeps its files. No other module knows.

State (`$OFFMATE_HOME`, or `$XDG_STATE_HOME/offmate`, or `~/.local/state/offmate`): the database, the broker's files,
the run folders. Sockets: `<state>/run`, not `$XDG_RUNTIME_DIR`, which is removed when the user logs out although the
daemon and its training go on. `$XDG_RUNTIME_DIR` is used only where sockets below the state folder would have too long
a path.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.errors import Exit, UserError

SOCKET_PATH_BYTES = 107  # sun_path of sockaddr_un is 108 bytes on Linux, with its final zero
IN_STATE_FOLDER = "in-state-folder"
"""The code of the error for a job's folder that lies in offmate's own folders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """Files and folders of one installation. Nothing exists before `create()`."""

    state: Path
    runtime: Path

    @classmethod
    def at(cls, home: Path) -> Paths:
        """Everything below one folder, as with `$OFFMATE_HOME`."""
        home = home.absolute()
        return cls(state=home, runtime=home / "run")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Paths:
        """The paths this user's environment names."""
        if home := environment.get("OFFMATE_HOME"):
            return cls.at(_expanded(home))
        paths = cls.at((_xdg(environment, "XDG_STATE_HOME") or Path.home() / ".local" / "state") / "offmate")
        runtime = _xdg(environment, "XDG_RUNTIME_DIR")
        if runtime is None or _bytes(paths.longest_socket) <= SOCKET_PATH_BYTES:
            return paths
        return cls(state=paths.state, runtime=runtime / "offmate")

    def environment(self) -> dict[str, str]:
        """The environment variables with which a child process finds the same paths."""
        if self.runtime == self.state / "run":
            return {"OFFMATE_HOME": str(self.state)}
        return {
            "OFFMATE_HOME": "",
            "XDG_STATE_HOME": str(self.state.parent),
            "XDG_RUNTIME_DIR": str(self.runtime.parent),
        }

    @property
    def database(self) -> Path:
        """The default database, SQLite."""
        return self.state / "offmate.db"

    @property
    def backups(self) -> Path:
        """Copies of the database from before its upgrades."""
        return self.state / "backups"

    @property
    def config(self) -> Path:
        """The user's settings, if any; they may contain passwords."""
        return self.state / "config.toml"

    @property
    def log(self) -> Path:
        """The log of a daemon in the background and of its children."""
        return self.state / "daemon.log"

    @property
    def log_before(self) -> Path:
        """The earlier log, put aside when it had grown long."""
        return self.state / "daemon.log.1"

    @property
    def token(self) -> Path:
        """The token that lets in a browser, or a program of another machine."""
        return self.state / "api-token"

    @property
    def lock(self) -> Path:
        """The lock file that the running daemon holds."""
        return self.state / "daemon.lock"

    @property
    def broker(self) -> Path:
        """The private broker's folder."""
        return self.state / "broker"

    @property
    def runs(self) -> Path:
        """Parent of the run folders."""
        return self.state / "runs"

    @property
    def api_socket(self) -> Path:
        """Where the API listens."""
        return self.runtime / "offmated.sock"

    @property
    def broker_socket(self) -> Path:
        """Where the private broker listens."""
        return self.runtime / "broker.sock"

    @property
    def longest_socket(self) -> Path:
        """The socket with the longest path."""
        return max((self.api_socket, self.broker_socket), key=_bytes)

    def run_folder(self, job_id: int) -> Path:
        """The folder of one job: everything about it except its row."""
        return self.runs / str(job_id)

    def check_outside(self, name: str, place: Path, *, may_hold: bool = False) -> None:
        """Raise UserError where `place`, named by the key or command `name`, is in offmate's own folders after links
        are followed, as offmate removes files there. Also where it contains these folders, unless it `may_hold` them.
        """
        real = Path(os.path.realpath(place))
        for folder in (Path(os.path.realpath(each)) for each in (self.state, self.runtime)):
            holds = real in folder.parents
            if (holds and not may_hold) or folder in (real, *real.parents):
                raise UserError(
                    f"{name} {place} {'holds' if holds else 'is in'} offmate's own state folder.",
                    numbers=(f"state folder {folder}", *((f"{place} is {real}",) if real != place else ())),
                    hint="give a folder of its own",
                    code=IN_STATE_FOLDER,
                    exit_code=Exit.USAGE,
                )

    def create(self) -> None:
        """Make the folders, closed to other users whatever the umask, and close offmate's own files and folders that
        exist already.

        An existing state folder keeps its permissions, as it may hold more than offmate's files. Raises UserError when
        the sockets' paths are too long, when the folders cannot be made or are another user's, and for a new state
        folder that every user can write.
        """
        length = _bytes(self.longest_socket)
        if length > SOCKET_PATH_BYTES:
            raise UserError(
                "The path of offmate's sockets is too long for the system.",
                numbers=(f"{self.longest_socket}", f"{length} bytes, at most {SOCKET_PATH_BYTES}"),
                hint="set OFFMATE_HOME to a shorter path",
                code="socket-path-too-long",
                exit_code=Exit.USAGE,
            )
        try:
            _make(self.state)
            if self.state.stat().st_mode & stat.S_IWOTH and not self.database.exists():
                raise _unusable(f"{self.state} can be written by every user")
            for folder in (self.runtime, self.broker, self.runs):
                _make(folder)
            for folder in (self.runtime, self.broker, self.runs, self.backups):
                if folder.is_dir():
                    folder.chmod(0o700)
            for file in (self.log, self.log_before, self.lock, self.token, *self.state.glob(f"{self.database.name}*")):
                if file.is_file():
                    file.chmod(0o600)
            if self.config.is_file() and self.config.stat().st_uid == os.getuid():  # addresses may hold passwords
                self.config.chmod(0o600)
        except OSError as error:
            raise _unusable(str(error)) from None


def _make(folder: Path) -> None:
    """Make a folder and the missing folders above it, each for this user alone; `mkdir` with `parents` would leave
    those above to the umask."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)


def _unusable(number: str) -> UserError:
    return UserError(
        "The state folder cannot be used.",
        numbers=(number,),
        hint="set OFFMATE_HOME to a folder of your own",
        code="state-folder",
        exit_code=Exit.USAGE,
    )


def _expanded(home: str) -> Path:
    try:
        return Path(home).expanduser()
    except RuntimeError as error:  # ~ of a user who does not exist
        raise _unusable(f"OFFMATE_HOME={home}: {error}") from None


def _bytes(path: Path) -> int:
    return len(os.fsencode(path))


def _xdg(environment: Mapping[str, str], name: str) -> Path | None:
    """The XDG folder `name`; the specification says that relative paths are to be ignored."""
    path = Path(environment.get(name, ""))
    return path if path.is_absolute() else None
