"""Reads the daemon's settings: from the environment, else from `config.toml` in the state folder, else the defaults.

database_url = "postgresql+psycopg://me@localhost/offmate"     # OFFMATE_DATABASE_URL
redis_url = "redis://localhost:6379/0"                         # OFFMATE_REDIS_URL
listen = "127.0.0.1:8477"                                      # OFFMATE_LISTEN
window = "23:00-07:00 mon-fri"                                 # OFFMATE_WINDOW
yield_minutes = "10"                                           # OFFMATE_YIELD_MINUTES
notify = "ntfy://my-topic mailto://me:secret@example.org"      # OFFMATE_NOTIFY
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field

from offmated.paths import Paths
from planner.errors import Exit, UserError, first_line

KEYS = {
    "database_url": "OFFMATE_DATABASE_URL",
    "redis_url": "OFFMATE_REDIS_URL",
    "listen": "OFFMATE_LISTEN",
    "window": "OFFMATE_WINDOW",
    "notify": "OFFMATE_NOTIFY",
    "yield_minutes": "OFFMATE_YIELD_MINUTES",
}

_RELATIVE_FILE = re.compile(r"(?P<scheme>sqlite(\+\w+)?:///)(?P<file>(?!/|:memory:|file:|\?).+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The daemon's settings. `database_url`: any SQLAlchemy URL. `redis_url`: a broker that the user runs; None: the
    daemon runs a private one. `listen`: the TCP address at which the API listens, besides its socket; None: none, until
    somebody asks for the page. `window`: the hours in which jobs that name none may have the GPU, the text of a
    `planner.keys.window.Window`. `notify`: addresses in apprise's form, separated by spaces, to which messages on jobs
    are sent. `yield_minutes`: jobs leave the GPU to other programs, and go on when none has used it for so many
    minutes; None: they do not leave it.

    The database URL appears in command lines, which other users can see: a password belongs in the driver's own
    file."""

    database_url: str
    redis_url: str | None = None
    listen: str | None = None
    window: str | None = None
    notify: str | None = field(default=None, repr=False)
    yield_minutes: str | None = None

    @classmethod
    def load(cls, paths: Paths, environment: Mapping[str, str] = os.environ) -> Config:
        """Read the settings that are in force. Raises UserError for a file that cannot be read as settings.

        A relative path of an SQLite file is below the state folder, so that commands, daemon and planners, which run in
        different folders, mean the same file."""
        values = _read(paths)
        for key, variable in KEYS.items():
            if environment.get(variable):
                values[key] = environment[variable]
        database_url = values.get("database_url", f"sqlite:///{paths.database}")
        if relative := _RELATIVE_FILE.fullmatch(database_url):
            database_url = f"{relative['scheme']}{paths.state}/{relative['file']}"
        others = {key: values.get(key) for key in KEYS if key != "database_url"}
        return cls(database_url=database_url, **others)


def _read(paths: Paths) -> dict[str, str]:
    try:
        text = paths.config.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(paths, first_line(error)) from None
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _wrong(paths, f"{error}") from None
    for key, value in values.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(KEYS)}"
            raise _wrong(paths, f"unknown key {key}", hint)
        if not isinstance(value, str) or not value:
            raise _wrong(paths, f"{key} is {json.dumps(value, default=str)}, not a text in quotes")
    return values


def _wrong(paths: Paths, number: str, hint: str = "") -> UserError:
    return UserError(
        "The settings file cannot be used.",
        numbers=(str(paths.config), number),
        hint=hint,
        code="bad-config",
        exit_code=Exit.USAGE,
    )
