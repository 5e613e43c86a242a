"""Reads the daemon's settings: from the environment, else from `config.toml` in the state folder, else the defaults."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One of the daemon's settings. `key`: its name in config.toml. `variable`: the environment variable that goes
    before the file. `example`: a value. `default`, `meaning`: sentences in Markdown."""

    key: str
    variable: str
    example: str
    default: str
    meaning: str


SETTINGS = (
    Setting(
        key="listen",
        variable="OFFMATE_LISTEN",
        example="127.0.0.1:8477",
        default="The daemon opens a port of this machine alone when `offmate page` first asks for it: the last one, "
        "or another if that is in use.",
        meaning="The IP address and port at which the API and the page listen, besides the daemon's socket. Host names "
        "are not accepted.",
    ),
    Setting(
        key="window",
        variable="OFFMATE_WINDOW",
        example="23:00-07:00 mon-fri",
        default="Jobs may run at any time.",
        meaning="The hours in which jobs that name no window of their own may have the GPU.",
    ),
    Setting(
        key="yield_minutes",
        variable="OFFMATE_YIELD_MINUTES",
        example="10",
        default="Jobs do not leave the GPU to other programs.",
        meaning="Jobs leave the GPU when another program uses it, and continue when none has used it for so many "
        "minutes, from 0 to 1440. This needs `pip install 'offmate[yield]'`.",
    ),
    Setting(
        key="notify",
        variable="OFFMATE_NOTIFY",
        example="ntfy://my-topic mailto://me:secret@example.org",
        default="No messages are sent.",
        meaning="The addresses to which messages about jobs are sent, in apprise's form, separated by spaces. This "
        "needs `pip install 'offmate[notify]'`. `offmate notify` sends a test message.",
    ),
    Setting(
        key="database_url",
        variable="OFFMATE_DATABASE_URL",
        example="postgresql+psycopg://me@localhost/offmate",
        default="The SQLite file `offmate.db` in the state folder.",
        meaning="The database of jobs and plans, as a URL of SQLAlchemy. The relative path of an SQLite file starts at "
        "the state folder. The URL appears in command lines, which other users can see: put a password into the "
        "driver's own file.",
    ),
    Setting(
        key="redis_url",
        variable="OFFMATE_REDIS_URL",
        example="redis://localhost:6379/0",
        default="The daemon runs a server of its own.",
        meaning="A Redis or Valkey server that you run, as the broker between the daemon and its workers.",
    ),
)
KEYS = {setting.key: setting.variable for setting in SETTINGS}
"""Name in config.toml -> environment variable."""

_RELATIVE_FILE = re.compile(r"(?P<scheme>sqlite(\+\w+)?:///)(?P<file>(?!/|:memory:|file:|\?).+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The values of the settings, whose meanings are in `SETTINGS`. None: not set."""

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
