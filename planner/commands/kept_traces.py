"""Keeps traces of models in files, so that a second question about a model needs neither a trace nor torch."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from planner.cache.store import PLANNER
from planner.codec import from_json, to_json
from planner.commands.question import config_file
from planner.fast_imports import lasting_imports
from planner.job.pins import revision_of
from planner.job.schema import Job
from planner.machine.hardware import Hardware
from planner.whatif.traced import Traced

log = logging.getLogger(__name__)

_MOST = 64  # files; the ones used longest ago give way
_OF_THE_MACHINE = ("gpu_budget", "cpu_budget", "disk_paths", "disk_budget", "disk_rated_writes")
_PACKAGES = (
    *("offmate", "torch", "transformers", "peft", "bitsandbytes"),
    *("kernels", "flash-linear-attention", "causal-conv1d", "mamba-ssm"),  # which change the code of some models
)
_WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")


class Traces:
    """The traces of one process's questions. `folder`: where they are kept for later ones; None: nowhere."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._known: dict[str, Traced] = {}

    def of(self, job: Job, hardware: Hardware) -> Traced:
        """The trace of the job's model, kept or made now; it does not depend on the figures of `hardware`. Raises
        UserError for a model that cannot be used."""
        key = _key(job, hardware)
        known = key or f"{hardware.is_gpu}: {job.resolved_yaml()}"
        if known in self._known:
            return self._known[known]
        found = None if key is None else self._read(key)
        if found is None:
            with lasting_imports():  # torch takes seconds to import
                from planner.whatif.trace import traced
            found = traced(job, hardware)
            if key is not None:
                self._keep(key, found)
        self._known[known] = found
        return found

    def _read(self, key: str) -> Traced | None:
        if self._folder is None:
            return None
        file = self._folder / f"{key}.json"
        try:
            found = from_json(Traced, json.loads(file.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.info("the trace kept in %s is not used: %s", file, error)
            return None
        with suppress(OSError):
            os.utime(file)
        return found

    def _keep(self, key: str, found: Traced) -> None:
        """Keep the trace in a file, if that is possible, and remove those that are too many."""
        if self._folder is None:
            return
        with suppress(OSError):
            for folder in (self._folder.parent, self._folder):  # offmate's files are for this user alone
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, written = tempfile.mkstemp(dir=self._folder, suffix=".part")
            with os.fdopen(descriptor, "w") as stream:
                json.dump(to_json(found), stream)
            Path(written).replace(self._folder / f"{key}.json")
            used = sorted(self._folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
            for file in used[_MOST:]:
                file.unlink(missing_ok=True)


def _key(job: Job, hardware: Hardware) -> str | None:
    """A hexadecimal digest of what a trace depends on: the job's keys but for those of the machine, the model's config,
    its files of weights, this machine, the versions of packages. None if the config is not on this machine, or if the
    job takes adapters from elsewhere."""
    config = config_file(job.model, revision_of(job))
    if config is None or job.adapter_name_or_path is not None:
        return None
    slices = min(2, job.gradient_accumulation_steps)  # with several, gradients are added up
    changes = dict.fromkeys(_OF_THE_MACHINE) | {"gradient_accumulation_steps": slices}
    files = ((file.name, file.stat()) for kind in _WEIGHTS for file in config.parent.glob(kind))
    weights = sorted((name, status.st_size, status.st_mtime_ns) for name, status in files)
    parts = {
        "job": job.model_copy(update=changes).resolved_yaml(),
        "config": config.read_text("utf-8", errors="replace"),
        "weights": weights,
        "versions": {name: _version(name) for name in _PACKAGES},
        "planner": PLANNER,
        "for_gpu": hardware.is_gpu,
        "machine": platform.node(),  # its compiler decides whether states can be packed
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
