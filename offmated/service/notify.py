"""Sends one message to the addresses in the settings: `python -m offmated.service.notify` reads {"title", "body"} from
stdin, and "address" where only one address is to get it. It runs in a process of its own, as the package that sends is
large and servers may be slow. Exit code 1, with the reason on stderr: the message did not reach all addresses."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import re
import sys

from offmated.config import Config
from offmated.paths import Paths
from planner.errors import Exit, UserError


def check_notify(urls: str | None) -> None:
    """Raise UserError if the settings ask for notifications (`urls`) and the package that sends them is not
    installed."""
    if urls is not None and importlib.util.find_spec("apprise") is None:
        raise UserError(
            "Notifications need the package apprise.",
            code="no-apprise",
            hint="pip install 'offmate[notify]'",
            exit_code=Exit.USAGE,
        )


def address_names(urls: str | None) -> tuple[str, ...]:
    """A name of 12 characters for each address in `urls`, to be used where the address must not be shown. An address
    always has the same name."""
    return tuple(dict.fromkeys(map(_name, (urls or "").split())))


def send(urls: str, title: str, body: str, *, address: str | None = None) -> None:
    """Send a message to all of `urls`, which are in apprise's form and separated by spaces; with `address`, a name from
    `address_names`, only to that one. Raises UserError; its texts contain no address, as many are secrets."""
    check_notify(urls)
    import apprise  # late, as only this process needs it

    recipients = apprise.Apprise()
    for number, url in enumerate(urls.split(), 1):
        if address not in (None, _name(url)):
            continue
        if not recipients.add(url):
            scheme = re.match("[A-Za-z0-9]+://", url)
            raise UserError(
                f"Address {number} of notify is not one that apprise knows.",
                code="bad-notify",
                exit_code=Exit.USAGE,
                numbers=(f"it begins with {scheme[0]}" if scheme else "it does not begin with a scheme, like ntfy://",),
                hint="https://appriseit.com lists the forms, such as ntfy://topic",
            )
    if not recipients:
        raise UserError(
            "This address is not in the settings any more.",
            code="bad-notify",
            exit_code=Exit.USAGE,
            hint="offmate down, offmate up",
        )
    failed = [server.service_name for server in recipients if not server.notify(title=title, body=body)]
    if failed:
        raise UserError(
            "The message was not taken.",
            code="not-notified",
            numbers=tuple(map(str, failed)),
            hint="is the network there, is the address right?",
        )


def _name(url: str) -> str:
    return hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def main() -> int:
    """Send the message that is read from stdin. Returns the exit code."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    message = json.load(sys.stdin)
    try:
        urls = Config.load(Paths.from_environment()).notify
        if urls is None:
            raise UserError(
                "The settings have no address to notify.",
                code="no-notify",
                exit_code=Exit.USAGE,
                hint='notify = "ntfy://your-topic" in config.toml in the state folder; then offmate down, offmate up',
            )
        send(urls, message["title"], message["body"], address=message.get("address"))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
