"""A folder with what jobs name, and jobs in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import Exit, UserError
from planner.job.schema import Job

BASE = "model: tiny\ndataset: text.jsonl\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model without weights, one without a tokenizer, a data file, a template and an empty folder."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    (tmp_path / "tiny" / "tokenizer.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    return tmp_path


def parse(extra: str, folder: Path) -> Job:
    return Job.parse(BASE + extra, folder)


def refusal(text: str, folder: Path) -> UserError:
    with pytest.raises(UserError) as caught:
        Job.parse(text, folder)
    assert caught.value.exit_code == Exit.USAGE
    return caught.value
