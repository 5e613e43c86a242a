"""Selects and shows the jobs that `offmate status` lists."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from offmated.cli import job_view
from offmated.cli.client import Client
from offmated.jobs.states import FINAL

WATCH_S = 2.0
LAST, FIRST = 10, 50
"""`LAST`: how many of the jobs that are over are listed, the last ones; `FIRST`: how many of the queue, the first ones.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The jobs that `offmate status` shows: some that are over, the last one last, then the queue. `before`: how many
    more are over; `behind`: how many more wait. `paused`: whether the whole machine is paused. `label`: the label that
    was asked for."""

    jobs: list[dict[str, Any]]
    before: int = 0
    behind: int = 0
    paused: bool = False
    label: str | None = None


def listing(client: Client, everything: bool, label: str | None = None) -> Listing:
    """Get the last jobs that are over and the first of the queue; with `everything`, all jobs; with a `label`, only
    those that have it."""
    if everything:
        return Listing(jobs=[*list(client.jobs(*FINAL, label=label))[::-1], *client.queue(label)], label=label)
    over, queue = client.ended(*FINAL, limit=LAST, label=label), client.queue_page(FIRST, label)
    return Listing(
        jobs=over["jobs"][::-1] + queue["jobs"],
        before=over["total"] - len(over["jobs"]),
        behind=queue["total"] - len(queue["jobs"]),
        paused=queue["paused"],
        label=label,
    )


def watch(screen: Console, look: Callable[[], RenderableType]) -> None:
    """Show on `screen` what `look` returns, again and again until Ctrl-C; only once where `screen` is not a
    terminal."""
    if not screen.is_terminal:
        screen.print(look())
        return
    with suppress(KeyboardInterrupt), Live(look(), console=screen, auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_S)
            live.update(look(), refresh=True)


def view(listing: Listing) -> RenderableType:
    """The listed jobs as a table, with a line on how many jobs it leaves out."""
    more = [f"{listing.before} older ones"] if listing.before else []
    more += [f"{listing.behind} that wait behind these"] if listing.behind else []
    words = [Text(f"Not listed: {' and '.join(more)}.  offmate status --all")] if more else []
    if listing.paused:
        words.append(Text("The machine is paused: no job runs until offmate resume."))
    return Group(job_view.jobs(listing.jobs, listing.label), *words)
