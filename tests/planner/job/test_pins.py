"""Commits of what a job has of the hub: from the hub where it answers, else those of the last download."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from planner.data.entry import DataEntry
from planner.job.pins import pin, pinned, told
from planner.job.schema import Job
from planner.models.tokenizer import load_tokenizer
from planner.run.folder import RunFolder
from tests.support.texts import make_job, tiny_llama_folder, write_jsonl

OLD, NEW, ASKED = "a" * 40, "b" * 40, "c" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where downloads are; the hub is not to be asked."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def downloaded(cache: Path, repository: str, name: str, commit: str) -> None:
    ref = cache / repository / "refs" / name
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(commit)


def job_of_the_hub(tmp_path: Path) -> Job:
    """With a model, and two datasets of three, of the hub."""
    local = make_job(tiny_llama_folder(tmp_path / "model"), write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}]))
    named = DataEntry(path="owner/other", revision="v1")
    return local.model_copy(
        update={
            "model": "owner/tiny",
            "tokenizer": "owner/tiny",
            "dataset": (*local.dataset, "owner/set", named),
        }
    )


def test_what_was_downloaded_last_is_pinned_and_said(tmp_path: Path, cache: Path) -> None:
    job = job_of_the_hub(tmp_path)
    assert pinned(job) == job, "nobody knows"
    downloaded(cache, "models--owner--tiny", "main", OLD)
    downloaded(cache, "datasets--owner--set", "main", OLD)
    downloaded(cache, "datasets--owner--other", "v1", NEW)
    downloaded(cache, "datasets--owner--other", "main", OLD)
    found = pinned(job)
    assert found.model_revision == OLD
    assert found.dataset == (
        job.dataset[0],
        DataEntry(path="owner/set", revision=OLD),
        DataEntry(path="owner/other", revision=NEW),
    )
    assert found.tokenizer_revision is None, "it is the model's"
    assert list(told(job, found)) == [
        f"the model owner/tiny, main, is commit {OLD}",
        f"the dataset owner/set, main, is commit {OLD}",
        f"the dataset owner/other, v1, is commit {NEW}",
    ]
    downloaded(cache, "models--owner--tiny", "main", "no commit")
    assert pinned(job).model_revision is None


def test_a_tokenizer_of_another_repository_has_a_commit_of_its_own(tmp_path: Path, cache: Path) -> None:
    job = job_of_the_hub(tmp_path).model_copy(update={"tokenizer": "owner/words", "dataset": ("/a.jsonl",)})
    downloaded(cache, "models--owner--words", "main", NEW)
    found = pinned(job)
    assert (found.model_revision, found.tokenizer_revision) == (None, NEW)
    assert list(told(job, found)) == [f"the tokenizer owner/words, main, is commit {NEW}"]
    for commit in (OLD, NEW):
        folder = cache / "models--owner--words" / "snapshots" / commit
        tiny_llama_folder(folder, chat_template=f"of {commit}")
    downloaded(cache, "models--owner--words", "main", OLD)
    assert load_tokenizer(found).chat_template == f"of {NEW}"
    downloaded(cache, "models--owner--tiny", "dev", OLD)
    of_its_own = job_of_the_hub(tmp_path).model_copy(update={"tokenizer_revision": "dev"})
    assert pinned(of_its_own).tokenizer_revision == OLD
    assert load_tokenizer(job).chat_template == f"of {OLD}"


def test_a_run_keeps_its_commits_whatever_is_uploaded_later(tmp_path: Path, cache: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.write_resolved(job_of_the_hub(tmp_path).resolved_yaml())
    downloaded(cache, "models--owner--tiny", "main", OLD)
    assert pin(run).model_revision == OLD
    downloaded(cache, "models--owner--tiny", "main", NEW)
    assert pin(run) == Job.from_resolved(run.resolved)
    assert yaml.safe_load(run.resolved.read_text())["model_revision"] == OLD
    assert run.log.read_text().count("is commit") == 1


def test_a_run_with_a_checkpoint_stays_as_it_is(tmp_path: Path, cache: Path) -> None:
    """Its checkpoint is of a job without commits, and another job would be refused."""
    run = RunFolder(tmp_path / "run")
    (run.checkpoints / "step-4").mkdir(parents=True)
    run.write_resolved(job_of_the_hub(tmp_path).resolved_yaml())
    downloaded(cache, "models--owner--tiny", "main", OLD)
    assert pin(run).model_revision is None


@contextmanager
def hub(status: int, asked: list[str], *, page: bool = False) -> Iterator[str]:
    """A hub on this machine that knows one commit; `page`: what a hotel's network says in place of any page."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b"<html>" if page else json.dumps({"id": "owner/tiny", "sha": ASKED}).encode())

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("status", "commit"), [(200, ASKED), (404, OLD)])
def test_the_hub_is_asked_first(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, status: int, commit: str
) -> None:
    downloaded(cache, "models--owner--tiny", "main", OLD)
    asked: list[str] = []
    with hub(status, asked) as url:
        its_hub(monkeypatch, url)
        job = job_of_the_hub(tmp_path).model_copy(update={"dataset": ("/a.jsonl",)})
        assert pinned(job).model_revision == commit
        assert pinned(pinned(job)).model_revision == commit
        assert [path for path in asked if path.startswith("/api/models")] == 2 * ["/api/models/owner/tiny"]


def its_hub(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)


def test_a_repository_is_asked_for_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tuple(DataEntry(path="owner/set", split=f"train[{k}%:]") for k in range(3))
    asked: list[str] = []
    with hub(200, asked) as url:
        its_hub(monkeypatch, url)
        job = job_of_the_hub(tmp_path).model_copy(update={"dataset": parts, "eval_dataset": parts[:1]})
        found = pinned(job)
    assert {entry.revision for entry in (*found.data, *found.eval_data)} == {ASKED}
    assert sorted(asked) == ["/api/datasets/owner/set", "/api/models/owner/tiny"]
    assert len(list(told(job, found))) == 2


def test_a_hub_that_is_not_there_is_asked_once_in_all(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    with hub(503, asked) as url:
        its_hub(monkeypatch, url)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
        assert pinned(job_of_the_hub(tmp_path)).model_revision is None
    assert set(asked) == {"/api/models/owner/tiny"}


def test_what_is_no_answer_of_a_hub_counts_as_none(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloaded(cache, "models--owner--tiny", "main", OLD)
    with hub(200, [], page=True) as url:
        its_hub(monkeypatch, url)
        assert pinned(job_of_the_hub(tmp_path)).model_revision == OLD
    its_hub(monkeypatch, "http://127.0.0.1:1")
    assert pinned(job_of_the_hub(tmp_path)).model_revision == OLD
    its_hub(monkeypatch, "http://[1")
    assert pinned(job_of_the_hub(tmp_path)).model_revision == OLD
    wrong = job_of_the_hub(tmp_path).model_copy(update={"model": "a--b/../c"})
    assert pinned(wrong).model_revision is None
