"""A state folder with its database, and a job that can be handed in."""

from __future__ import annotations

from pathlib import Path

import pytest

from offmated.jobs.migrate import upgrade
from offmated.jobs.store import Store
from offmated.paths import Paths

CONFIG = (
    '{"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,'
    ' "num_attention_heads": 2}'
)
JOB = "model: ./model\ndataset: text.jsonl\n"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(CONFIG)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "text.jsonl").write_text('{"text": "one"}\n' * 8)
    paths = Paths.at(tmp_path / "state")
    paths.runs.mkdir(parents=True)
    return paths


@pytest.fixture
def store(paths: Paths) -> Store:
    store = Store(f"sqlite:///{paths.database}")
    upgrade(store.engine, paths)
    return store


@pytest.fixture
def looks() -> None:
    """Asked for by tests of the look at a job that is handed in, a process of half a second, or five with PyTorch."""


@pytest.fixture(autouse=True)
def nothing_is_looked_at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the fixture `looks` a job is taken in as it is: the tests are about what comes then."""
    if "looks" not in request.fixturenames:
        monkeypatch.setattr("offmated.jobs.submission.look_at", lambda run, folder=None: ())
