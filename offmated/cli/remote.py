"""Finds the daemon of another machine: `OFFMATE_HOST` says where it listens, `OFFMATE_TOKEN` is its token."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from planner.errors import Exit, UserError, check_linux

HOST, TOKEN = "OFFMATE_HOST", "OFFMATE_TOKEN"


@dataclass(frozen=True, slots=True)
class Remote:
    """The address and token of another machine's daemon. `url` has no path, as in `http://127.0.0.1:8477`."""

    url: str
    token: str = field(repr=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Remote | None:
        """The daemon that `OFFMATE_HOST` and `OFFMATE_TOKEN` name; None where they name none. Raises UserError
        `bad-host` where the address is not valid, or the token is missing."""
        named = environment.get(HOST, "").strip()
        if not named:
            return None
        try:
            parts = urlsplit(named if "//" in named else f"http://{named}")
            usable = (
                parts.scheme in ("http", "https")
                and parts.hostname
                and parts.port
                and parts.username is None
                and not (parts.path.strip("/") or parts.query or parts.fragment)
            )
        except ValueError:
            usable = False
        if not usable:
            raise UserError(
                "The daemon's address is not valid.",
                numbers=(f"{HOST}={named}",),
                code="bad-host",
                exit_code=Exit.USAGE,
                hint="a host and a port: http://127.0.0.1:8477",
            )
        token = environment.get(TOKEN, "").strip()
        if not (token and token.isascii() and token.isprintable()):
            raise UserError(
                f"{HOST} is set, and {TOKEN} is not a token.",
                numbers=(f"{HOST}={named}",),
                code="bad-host",
                hint="the token is in the file api-token in the state folder of that machine",
                exit_code=Exit.USAGE,
            )
        return cls(f"{parts.scheme}://{parts.netloc}", token)

    def unanswered(self, *why: str) -> UserError:
        """The error to raise where nothing answers at this address; `why`: further lines for its text. It says nothing
        about jobs, since perhaps only a tunnel ended."""
        return UserError(
            "The daemon does not answer.",
            numbers=(self.url, *why),
            code="daemon-silent",
            hint="check that it listens there (`listen` in its config.toml), or that the tunnel (ssh -L) is up",
            exit_code=Exit.DAEMON_NOT_RUNNING,
        )


def only_here(subject: str) -> None:
    """Raise UserError `not-remote` where the environment names another machine's daemon, because `subject`, a command
    or option, works with this machine's daemon only; and `linux-only` where this machine can have none."""
    if (remote := Remote.from_environment()) is not None:
        raise UserError(
            f"{subject} works only with this machine's daemon.",
            numbers=(f"{HOST}={remote.url}",),
            code="not-remote",
            hint=f"type it on that machine, or unset {HOST}",
            exit_code=Exit.USAGE,
        )
    check_linux()
