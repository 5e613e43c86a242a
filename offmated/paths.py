"""Defines where offmate keeps its files. No other module knows.

State (`$OFFMATE_HOME`, or `$XDG_STATE_HOME/offmate`, or `~/.local/state/offmate`): the database, the broker's files,
the run folders. Sockets: `<state>/run`, not `$XDG_RUNTIME_DIR`, which is removed when the user logs out although the
daemon and its training go on. `$XDG_RUNTIME_DIR` is used only where sockets below the state folder would have too long
a path. Traces of models: `traces` in `$OFFMATE_HOME`, or in `$XDG_CACHE_HOME/offmate`, or in `~/.cache/offmate`."""

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
    """The paths of the files and folders of one installation. Before `create()` none of them need exist."""

    state: Path
    runtime: Path

    @classmethod
    def at(cls, home: Path) -> Paths:
        """The paths of an installation whose files are all below `home`, as with `$OFFMATE_HOME`."""
        home = home.absolute()
        return cls(state=home, runtime=home / "run")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Paths:
        """The paths that the user's environment variables determine."""
        if home := environment.get("OFFMATE_HOME"):
            return cls.at(_expanded(home))
        paths = cls.at((_xdg(environment, "XDG_STATE_HOME") or Path.home() / ".local" / "state") / "offmate")
        runtime = _xdg(environment, "XDG_RUNTIME_DIR")
        if runtime is None or _bytes(paths.longest_socket) <= SOCKET_PATH_BYTES:
            return paths
        return cls(state=paths.state, runtime=runtime / "offmate")

    def environment(self) -> dict[str, str]:
        """The environment variables to give to a child process, so that it uses the same paths."""
        if self.runtime == self.state / "run":
            return {"OFFMATE_HOME": str(self.state)}
        return {
            "OFFMATE_HOME": "",
            "XDG_STATE_HOME": str(self.state.parent),
            "XDG_RUNTIME_DIR": str(self.runtime.parent),
        }

    @property
    def database(self) -> Path:
        """The path of the default database, an SQLite file."""
        return self.state / "offmate.db"

    @property
    def backups(self) -> Path:
        """The folder for copies of the database that are made before upgrades."""
        return self.state / "backups"

    @property
    def config(self) -> Path:
        """The file with the user's settings. It need not exist, and may contain passwords."""
        return self.state / "config.toml"

    @property
    def log(self) -> Path:
        """The log file of a daemon in the background and of its child processes."""
        return self.state / "daemon.log"

    @property
    def log_before(self) -> Path:
        """The file that keeps the earlier part of the log, which is moved there when the log has grown long."""
        return self.state / "daemon.log.1"

    @property
    def token(self) -> Path:
        """The file with the token that a browser, or a program on another machine, must show to use the API."""
        return self.state / "api-token"

    @property
    def page_port(self) -> Path:
        """The file with the port that the page had last, where the settings give none."""
        return self.state / "page-port"

    @property
    def lock(self) -> Path:
        """The file on which the running daemon holds the lock that keeps a second one from starting."""
        return self.state / "daemon.lock"

    @property
    def broker(self) -> Path:
        """The folder of the private broker (Redis or Valkey server)."""
        return self.state / "broker"

    @property
    def runs(self) -> Path:
        """The folder that contains the run folders, one for each job."""
        return self.state / "runs"

    @property
    def api_socket(self) -> Path:
        """The socket file at which the daemon's API listens."""
        return self.runtime / "offmated.sock"

    @property
    def broker_socket(self) -> Path:
        """The socket file at which the private broker listens."""
        return self.runtime / "broker.sock"

    @property
    def longest_socket(self) -> Path:
        """The socket file with the longest path, to check the system's limit with."""
        return max((self.api_socket, self.broker_socket), key=_bytes)

    def run_folder(self, job_id: int) -> Path:
        """The folder of job `job_id`, with everything about the job except its row in the database."""
        return self.runs / str(job_id)

    def check_outside(self, name: str, place: Path, *, may_hold: bool = False) -> None:
        """Raise UserError if `place`, the path given by the key or command `name`, is inside offmate's own folders,
        links followed, because offmate removes files there. It is also raised if `place` contains these folders, unless
        `may_hold`."""
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
        """Make the folders with permissions for this user alone, whatever the umask, and take other users' permissions
        from offmate's files and folders that exist already.

        An existing state folder keeps its permissions, as it may hold more than offmate's files. Raises UserError when
        the sockets' paths are too long, when a folder cannot be made or belongs to another user, and when the state
        folder is new but every user could write to it."""
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


def traces_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder for traces of models: `traces` in `$OFFMATE_HOME`, or in the user's cache folder. What is in it may be
    removed at any time: `offmate plan` makes it anew. It may be there before the state folder."""
    if home := environment.get("OFFMATE_HOME"):
        return _expanded(home).absolute() / "traces"
    return (_xdg(environment, "XDG_CACHE_HOME") or Path.home() / ".cache") / "offmate" / "traces"


def _xdg(environment: Mapping[str, str], name: str) -> Path | None:
    """The XDG folder `name`; the specification says that relative paths are to be ignored."""
    path = Path(environment.get(name, ""))
    return path if path.is_absolute() else None
