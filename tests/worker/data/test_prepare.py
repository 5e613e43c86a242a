"""A job's data is tokenized and counted before its final plan, which for tied weights depends on it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sqlalchemy import create_engine

from planner.cache.store import Cache
from planner.cache.tables import metadata
from planner.commands.plan_job import plan_job
from planner.counted import Counted
from planner.errors import Exit
from planner.job.schema import Job
from planner.run.folder import RunFolder
from tests.support.disks import no_room_beyond
from tests.support.texts import byte_tokenizer, make_job, sentences, tiny_llama_folder, write_jsonl
from worker.data.batches import Batches
from worker.prepare import main

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)


def tiny_job(folder: Path, *, tied: bool) -> Job:
    model = tiny_llama_folder(folder / f"model-{tied}")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    keys = {"max_length": 32, "gpu_budget": "2MB", "gradient_accumulation_steps": 3, "max_steps": 2}
    return make_job(model, write_jsonl(folder / "data.jsonl", sentences(30)), per_device_train_batch_size=2, **keys)


def run_folder(folder: Path, job: Job) -> RunFolder:
    run = RunFolder(folder / "run")
    run.path.mkdir()
    run.resolved.write_text(job.resolved_yaml(), "utf-8")
    return run


def test_the_data_are_counted_and_stay_for_the_trainer(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, tied=True)
    run = run_folder(tmp_path, job)
    assert run.read_counted() is None
    assert main([str(run.path)]) == Exit.DONE
    assert run.read_counted() == Batches(job, byte_tokenizer(), tmp_path / "other").counted()
    assert (run.path / "data" / "tokens.npy").exists()


@pytest.mark.parametrize("file_bytes", [1000, 3600])
@pytest.mark.parametrize("read_before", [False, True])
def test_data_for_which_there_is_no_room_end_the_job_with_the_reason(
    tmp_path: Path, file_bytes: int, read_before: bool
) -> None:
    job = tiny_job(tmp_path, tied=False)
    run = run_folder(tmp_path, job)
    if read_before:  # then `datasets` has its copy already
        Batches(job, byte_tokenizer(), tmp_path / "other")
    with no_room_beyond(file_bytes):
        assert main([str(run.path)]) == Exit.FAILED
    error = run.read_error()
    assert error is not None and error["code"] == "disk-full"
    assert sorted(path.name for path in run.path.iterdir()) == ["base.json", "error.json", "log.txt", "resolved.yaml"]
    assert main([str(run.path)]) == Exit.DONE


def test_data_that_cannot_be_read_end_the_job_with_the_reason(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, tied=True)
    (tmp_path / "data.jsonl").write_text("not json\n", "utf-8")
    run = run_folder(tmp_path, job)
    assert main([str(run.path)]) == Exit.USAGE
    error = run.read_error()
    assert error is not None and "data.jsonl" in json.dumps(error)


def test_a_tied_models_plan_is_final_only_when_its_data_are_counted(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'offmate.db'}"
    metadata.create_all(create_engine(url))
    cache, job = Cache(url), tiny_job(tmp_path, tied=True)
    counts = Counted(longest=32, lengths=(32, 32), distinct_tokens=(20, 30, 35))
    final = plan_job(job, CPU, cache=cache, measure=True, counted=counts)
    assert final.measured and final.chain.distinct_tokens == counts.distinct_tokens
    preview = plan_job(job, CPU, cache=cache, measure=False)
    assert not preview.measured and preview.chain.distinct_tokens == ()
    again = plan_job(job, CPU, cache=cache, measure=True, counted=counts)
    assert again.cached and again.plan == final.plan
    other = plan_job(job, CPU, cache=cache, measure=True, counted=replace(counts, distinct_tokens=(20, 30, 36)))
    assert not other.cached and other.measurement == final.measurement


def test_an_untied_models_plan_does_not_depend_on_the_data(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'offmate.db'}"
    metadata.create_all(create_engine(url))
    cache, job = Cache(url), tiny_job(tmp_path, tied=False)
    counts = Counted(longest=32, lengths=(32, 32), distinct_tokens=(20, 30, 35))
    final = plan_job(job, CPU, cache=cache, measure=True, counted=counts)
    found = plan_job(job, CPU, cache=cache, measure=False)
    assert found.measured and found.cached and found.plan == final.plan


def test_data_that_changed_since_the_submission_are_not_read(tmp_path: Path) -> None:
    run = run_folder(tmp_path, tiny_job(tmp_path, tied=False))
    run.write_frozen({str(tmp_path / "gone.jsonl"): {"bytes": 1, "hash": ""}})
    assert main([str(run.path)]) == Exit.USAGE
    error = run.read_error()
    assert error is not None and error["code"] == "data-changed" and not run.is_tokenized
