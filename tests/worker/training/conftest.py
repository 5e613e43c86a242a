"""What the tests of short runs share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.fixture
def one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training on one thread, with a data cache of the test's own."""
    torch.set_num_threads(1)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
