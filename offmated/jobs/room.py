"""Jobs whose disk is full: what they need, and whether it is there."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import Room
from planner.run.folder import RunFolder

_SPARE_BYTES = 64 * 2**20  # or a twentieth of a small disk


def needing(error: Mapping[str, Any], run: RunFolder) -> dict[str, Any]:
    """The error of a full disk with what the job needs to go on. Where it does not say, it is what the newest
    checkpoint takes, and more than there is: so each try that ends there again asks for more."""
    if Room.of(error.get("needs")) is not None:
        return dict(error)
    step = run.last_checkpoint_step()
    saved = [] if step is None else [*(run.checkpoints / f"step-{step}").glob("*")]
    disk = shutil.disk_usage(run.path)
    spare = min(_SPARE_BYTES, disk.total // 20)
    bytes_needed = max(disk.free, sum(file.stat().st_size for file in saved)) + spare
    return {**error, "needs": {"folder": str(run.path), "bytes": bytes_needed}}


def missing_bytes(error: Mapping[str, Any] | None) -> int:
    """How much is missing of what `error` needs; 0 where it is there, or nothing is known to be needed."""
    needs = Room.of((error or {}).get("needs"))
    return max(0, needs.bytes - _free_bytes(needs.folder)) if needs is not None else 0


def _free_bytes(folder: str) -> int:
    """Of the disk that has this folder, or will have it. Raises OSError when the disk does not answer."""
    path = Path(folder)
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free
