"""Finds the experiment trackers (wandb, mlflow, …) to which a job file, with the keys of any supported tool, asks to
report metrics.

A job file has no secrets: these stay in the trackers' own files and environment variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from urllib.parse import parse_qsl, urlsplit

from planner.keys.source import SWITCHED_OFF, Mistake, Source, shown

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
"""The trackers that are supported. Each is the name of a Python package, and of an optional extra of offmate."""
SETTINGS = {
    "wandb": ("wandb_project", "wandb_entity", "wandb_mode"),
    "trackio": ("trackio_project_name", "trackio_space_id"),
    "mlflow": ("mlflow_experiment_name", "mlflow_tracking_uri"),
}
"""Tracker -> the keys that say where it stores metrics."""
_ASKING = {"wandb_project": "wandb", "trackio_project_name": "trackio", "mlflow_experiment_name": "mlflow"}
"""axolotl's keys for a project; each of them switches its tracker on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """What a job file asks of experiment trackers.

    `trackers`: those to report to; `others`: "key: name" of those that offmate does not support; `idle`: tracker ->
    keys of it that have no effect, because the tracker is not asked for; `mistakes`: mistakes in these keys.
    """

    trackers: tuple[str, ...]
    others: tuple[str, ...]
    idle: Mapping[str, tuple[str, ...]]
    mistakes: tuple[Mistake, ...]


def reports(keys: Sequence[str], source: Source) -> Reports:
    """Return which experiment trackers a job file asks for. `keys`: the names under which the file gives them, such as
    `report_to` or `use_wandb`. axolotl's keys for projects, such as `wandb_project`, ask for their tracker, too."""
    file, trackers, off, others, mistakes = source.values, list[str](), list[str](), list[str](), list[Mistake]()
    for key in keys:
        value = file[key]
        if key.startswith("use_"):
            if value is not None and not isinstance(value, bool):
                text = f"it is {shown(value)}; it must be true or false"
                mistakes.append(source.mistake(key, "wrong-type", text))
            (trackers if value is True else off).append(key.removeprefix("use_"))
            continue
        for entry in value if isinstance(value, list) else [value]:
            if entry in TRACKERS:
                trackers.append(str(entry))
            elif isinstance(entry, str) and entry not in SWITCHED_OFF:
                others.append(f"{key}: {entry}")
            elif entry not in SWITCHED_OFF:
                text = f"it is {shown(value)}; it must be none, or some of {', '.join(TRACKERS)}"
                mistakes.append(source.mistake(key, "wrong-type", text))
    if "report_to" not in keys:
        trackers += [name for key, name in _ASKING.items() if file.get(key) not in SWITCHED_OFF and name not in off]
    if file.get("wandb_mode") == "disabled":
        trackers = [name for name in trackers if name != "wandb"]
    uri = file.get("mlflow_tracking_uri")
    if isinstance(uri, str) and _has_secret(uri):
        text = (
            "it has a user, a password or a key, which others may read in job files; put it into "
            "MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, where the "
            "daemon starts"
        )
        mistakes.append(source.mistake("mlflow_tracking_uri", "secret-in-job", text))
    idle = {
        name: tuple(key for key in settings if file.get(key) not in SWITCHED_OFF)
        for name, settings in SETTINGS.items()
        if name not in trackers
    }
    return Reports(
        trackers=tuple(dict.fromkeys(trackers)),
        others=tuple(others),
        mistakes=tuple(mistakes),
        idle={name: idle_keys for name, idle_keys in idle.items() if idle_keys},
    )


def missing_package(tracker: str) -> str | None:
    """Return a note for the user if the tracker's package is not installed; else None."""
    if find_spec(tracker) is not None:
        return None
    return (
        f"report_to: the package {tracker} is not installed, so figures go to metrics.jsonl only; "
        f"pip install 'offmate[{tracker}]', then offmate down, offmate up"
    )


def _has_secret(uri: str) -> bool:
    try:
        parts = urlsplit(uri)
        names = " ".join(name for name, _ in parse_qsl(parts.query, keep_blank_values=True))
        return "@" in parts.netloc or re.search("key|token|pass|secret|auth|sig", names, re.IGNORECASE) is not None
    except ValueError:
        return "@" in uri or "?" in uri
