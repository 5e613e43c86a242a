"""Defines `offmate service`: the daemon as a service of the user, started by systemd at login."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from offmated.cli.output import say
from offmated.cli.remote import only_here
from offmated.config import KEYS
from offmated.lock import lock_holder
from offmated.paths import Paths
from planner.errors import Exit, UserError

NAME = "offmate.service"
PATIENCE_S = 180

#: Variables that a login shell may have set and jobs need. Passwords and tokens are not copied: they stay in files.
HANDED_ON = (
    "PATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "XDG_CACHE_HOME",
    *(name for key, name in KEYS.items() if key != "notify"),
)

UNIT = """\
# Written by `offmate service install`; `offmate service uninstall` removes it.
[Unit]
Description=offmate: trains language models, one job after another
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
Type=notify
ExecStart={command}
{environment}
StandardOutput=append:{log}
StandardError=inherit
UMask=0077
# SIGTERM is for the daemon alone: it has its jobs save, and asks for the time that takes.
KillMode=mixed
TimeoutStopSec=120
# An upgrade copies the database first, however large it is.
TimeoutStartSec=infinity
WatchdogSec=120
Restart=on-failure
RestartSec=5
# What cannot work is not tried again: wrong settings, a daemon that runs already.
RestartPreventExitStatus={usage}
# A trainer that the kernel ends for its memory is the job's trouble, not the daemon's.
OOMPolicy=continue

[Install]
WantedBy=default.target
"""


@click.group("service")
def service() -> None:
    """Run the daemon as a service: systemd starts it at login, and restarts it if it dies."""


@service.command()
def install() -> None:
    """Write the unit, start the service, and have it start at each login."""
    only_here("service")
    paths = Paths.from_environment()
    systemctl = _systemctl()
    holder = lock_holder(paths)
    if holder is not None and not _is_active(systemctl):
        raise UserError(
            "A daemon runs already; the service cannot start beside it.",
            numbers=(f"process {holder.pid}",),
            hint="offmate down, then again",
            code="already-running",
            exit_code=Exit.USAGE,
        )
    paths.create()
    file = unit_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    before = file.read_bytes() if file.exists() else None
    draft = file.with_name(f".{NAME}.{os.getpid()}")
    draft.touch(mode=0o600)
    draft.write_text(unit_text(paths, os.environ), encoding="utf-8")
    draft.replace(file)
    try:
        _run(systemctl, "daemon-reload")
        _run(systemctl, "enable", NAME)
        _run(systemctl, "restart", NAME, patience_s=None)  # an earlier daemon first saves its jobs
    except UserError:
        for words in (("disable", "--now", NAME), ("reset-failed", NAME)):
            _ask(systemctl, *words)
        file.unlink() if before is None else file.write_bytes(before)
        _ask(systemctl, "daemon-reload")
        raise
    say(f"The daemon runs now, and will start at each login ({file}).")
    if not (Path("/var/lib/systemd/linger") / getpass.getuser()).exists():
        click.echo("To have it run while you are not logged in: loginctl enable-linger")


@service.command()
def uninstall() -> None:
    """End the service and remove its unit. Jobs stay: a running one saves a checkpoint first."""
    only_here("service")
    file, systemctl = unit_file(), _systemctl()
    if not file.exists():
        raise UserError(
            "The service is not installed.",
            numbers=(str(file),),
            hint="offmate service install",
            code="no-service",
            exit_code=Exit.USAGE,
        )
    _run(systemctl, "disable", "--now", NAME, patience_s=None)
    file.unlink()
    _run(systemctl, "daemon-reload")
    click.echo("The service has ended and is removed; jobs and their folders are still there.")


def start_installed(paths: Paths) -> bool:
    """Make systemd start the service, if it is installed for this state folder. Returns False where it is not
    installed, or where systemd does not start it, for example without a session of the user."""
    systemctl = shutil.which("systemctl")
    try:
        unit = unit_file().read_text("utf-8")
    except OSError:
        return False
    mine = (f"Environment={quoted(f'{name}={value}')}\n" for name, value in paths.environment().items())
    return systemctl is not None and all(line in unit for line in mine) and _ask(systemctl, "start", NAME) is None


def unit_file() -> Path:
    """The path at which systemd looks for the user's own unit of the service."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user" / NAME


def unit_text(paths: Paths, environment: Mapping[str, str]) -> str:
    """The content of the systemd unit that runs this installation's daemon on this state folder, with these environment
    variables."""
    handed = {name: environment[name] for name in HANDED_ON if environment.get(name)} | paths.environment()
    command = f"{quoted(sys.executable)} -P -m offmated"
    lines = "\n".join(f"Environment={quoted(f'{name}={value}')}" for name, value in sorted(handed.items()))
    log = str(paths.log).replace("%", "%%")
    return UNIT.format(command=command, environment=lines, log=log, usage=int(Exit.USAGE))


def quoted(text: str) -> str:
    """`text` quoted as one word of a systemd unit file (systemd.syntax(7)), in which "%" does not begin a specifier."""
    safe = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("\n", "\\n")
    return f'"{safe}"'


def _systemctl() -> str:
    path = shutil.which("systemctl")
    if path is None:
        raise UserError(
            "There is no systemd here to start a service.",
            code="no-systemd",
            exit_code=Exit.USAGE,
            hint="offmate up starts the daemon; add it to your login script",
        )
    return path


def _is_active(systemctl: str) -> bool:
    return _ask(systemctl, "is-active", "--quiet", NAME) is None


def _run(systemctl: str, *words: str, patience_s: float | None = PATIENCE_S) -> None:
    if (why := _ask(systemctl, *words, patience_s=patience_s)) is not None:
        log = Paths.from_environment().log
        raise UserError(
            "systemd did not accept the service.",
            numbers=(f"systemctl --user {' '.join(words)}", *why.splitlines()[:5]),
            hint=f"{log} has what the daemon said, if it started",
            code="systemd-failed",
        )


def _ask(systemctl: str, *words: str, patience_s: float | None = PATIENCE_S) -> str | None:
    """Run `systemctl --user` with these words. Returns why it failed, or None."""
    try:
        done = subprocess.run(
            [systemctl, "--user", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=patience_s
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {PATIENCE_S} s"
    return None if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
