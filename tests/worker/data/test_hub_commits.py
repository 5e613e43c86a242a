"""Datasets of the hub at a commit, where the hub is not reached."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from datasets import DatasetInfo, Features, Value
from datasets.arrow_writer import ArrowWriter

from planner.data.entry import DataEntry
from planner.errors import UserError
from worker.data.sources import open_source

OLDER, NEWER, NEVER = ("a" * 40, "b" * 40, "c" * 40)


@pytest.fixture(params=["parquet"])
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What `datasets` keeps of two commits that were trained on, one after the other."""
    builder_name = request.param
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    for name in ("huggingface_hub.constants.HF_HUB_OFFLINE", "datasets.config.HF_HUB_OFFLINE"):
        monkeypatch.setattr(name, True)
    features = Features({"text": Value("string")})
    for at, commit in enumerate((OLDER, NEWER)):
        folder = tmp_path / "owner___set" / "default" / "0.0.0" / commit
        folder.mkdir(parents=True)
        writer = ArrowWriter(path=str(folder / "set-train.arrow"), features=features)
        writer.write({"text": f"of {commit}"})
        writer.finalize()
        split = {"name": "train", "num_examples": 1, "num_bytes": 9, "dataset_name": "set"}
        DatasetInfo(
            features=features,
            builder_name=builder_name,
            dataset_name="set",
            config_name="default",
            version="0.0.0",
            splits={"train": split},
        ).write_to_directory(str(folder))
        os.utime(folder, (at, at))


@pytest.mark.usefixtures("downloaded")
def test_without_the_hub_a_dataset_is_that_of_its_commit_or_none() -> None:
    for commit in (OLDER, NEWER):
        found = open_source(DataEntry(path="owner/set", revision=commit))
        assert [row.record for row in found.rows()] == [{"text": f"of {commit}"}]
    with pytest.raises(UserError) as told:
        open_source(DataEntry(path="owner/set", revision=NEVER))
    assert told.value.code == "hub-offline"


@pytest.mark.usefixtures("downloaded")
def test_a_commit_that_only_the_hub_has_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(UserError) as told:
        open_source(DataEntry(path="owner/set", revision=NEVER))
    assert told.value.code == "hub-not-reached"


@pytest.mark.usefixtures("downloaded")
@pytest.mark.parametrize("downloaded", ["json", "csv"], indirect=True)
def test_what_a_reader_that_guesses_has_made_is_not_trained_on() -> None:
    with pytest.raises(UserError) as told:
        open_source(DataEntry(path="owner/set", revision=OLDER))
    assert told.value.code == "hub-offline" and "a reader that guesses" in told.value.numbers[0]
