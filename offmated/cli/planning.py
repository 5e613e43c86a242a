"""`offmate plan`: the planner in a process of its own, as it needs torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from offmated.config import Config
from offmated.paths import Paths
from planner.errors import Exit
from planner.job import Job


def make_plan(text: str, folder: Path, name: str, *, measure: bool, device: str | None) -> dict[str, Any]:
    """plan.json, less its chain, of the job file `text` in `folder`, which errors call `name`.

    Uses the daemon's caches where there are any. Raises UserError for a file that is wrong, and `click.exceptions.Exit`
    with the planner's exit code when the planner refuses: it has said why on stderr by then.
    """
    job = Job.parse(text, folder, name=name)
    paths = Paths.from_environment()
    with tempfile.TemporaryDirectory(prefix="offmate-") as scratch:
        resolved = Path(scratch) / "job.yaml"
        resolved.write_text(job.resolved_yaml(), "utf-8")
        command = [sys.executable, "-P", "-m", "planner", "plan", "--job", str(resolved)]
        url = Config.load(paths).database_url
        if paths.database.exists() or url != f"sqlite:///{paths.database}":
            command += ["--database", url]
        command += ["--measure"] if measure else []
        command += ["--device", device] if device else []
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if answer.returncode != Exit.DONE:
        raise click.exceptions.Exit(answer.returncode if answer.returncode > 0 else Exit.FAILED)
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found
