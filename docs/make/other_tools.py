"""Makes docs/reference/other-tools.md: what offmate makes of each key that other tools document."""

from __future__ import annotations

import re

from offmated.cli.keys import meanings
from offmated.cli.keys import page as tables
from planner.job.described import sections


def page() -> str:
    """Return the page as Markdown, in which offmate's keys are links to their descriptions."""
    ours = {key.name for section in sections() for key in section.keys}

    def linked(row: re.Match[str]) -> str:
        key, other = row[1], row[2] or row[1]
        link = f"[`{other}`](keys.md#{other})"
        return f"| `{key}` | {f'is {link}' if row[2] else f'as it is here: {link}'} |" if other in ours else row[0]

    return re.sub(r"^\| `(\w+)` \| (?:is `(\w+)`|as it is here) \|$", linked, tables(meanings()), flags=re.MULTILINE)
