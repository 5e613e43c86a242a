"""What the page asks of the API beside what commands ask: to check a file without submitting it, and a job's keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from planner.errors import UserError
from tests.support.served import JOB, Served, served

WRONG = "cpu_budget: 1EiB\noutput_dir: {state}/runs\n"  # each is found by a check of its own


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with served() as built:
        yield built


@pytest.fixture(scope="module")
def raw(shared: Served) -> Iterator[httpx.Client]:
    transport = httpx.HTTPTransport(uds=str(shared.paths.api_socket))
    with httpx.Client(transport=transport, base_url="http://offmated", timeout=120) as client:
        yield client


def body(shared: Served, text: str, **more: Any) -> dict[str, Any]:
    return {"yaml": text, "folder": str(shared.folder), "name": "night.yaml", **more}


def refused(answer: httpx.Response) -> str:
    assert answer.status_code == 422
    return str(UserError.from_json(answer.json()))


def test_a_checked_job_has_the_name_and_the_notes_of_a_submitted_one_and_is_not_kept(
    shared: Served, raw: httpx.Client
) -> None:
    asked = body(shared, f"{JOB}output_dir: ./trained\n", settings=["learning_rate=1e-4"], window="23:00-07:00")
    before = raw.get("/jobs").json()["total"]
    checked = raw.post("/jobs/check", json=asked)
    assert checked.status_code == 200
    assert raw.get("/jobs").json()["total"] == before and list(shared.paths.runs.iterdir()) == []
    assert not (shared.folder / "trained").exists()
    submitted = raw.post("/jobs", json=asked).json()
    assert checked.json() == {"name": submitted["name"], "notes": submitted["notes"]}
    assert checked.json()["name"] == "night" and len(submitted["notes"]) > 1
    raw.post(f"/jobs/{submitted['id']}/cancel")


@pytest.mark.parametrize(
    ("text", "more"),
    [
        (JOB + WRONG, {}),
        (JOB + WRONG, {"after": 10**6}),
        (JOB + "learning_rate: fast\n", {"window": "never"}),
        (JOB, {"settings": ["="]}),
        ("model: [", {}),
    ],
)
def test_a_check_finds_what_a_submission_finds(
    shared: Served, raw: httpx.Client, text: str, more: dict[str, Any]
) -> None:
    asked = body(shared, text.format(state=shared.paths.state), **more)
    assert refused(raw.post("/jobs/check", json=asked)) == refused(raw.post("/jobs", json=asked))


@pytest.mark.parametrize("route", ["/jobs", "/jobs/check"])
def test_a_folder_is_absolute_or_below_a_home(
    shared: Served, raw: httpx.Client, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("", ".", "jobs", "~nobody-of-that-name/jobs"):
        told = refused(raw.post(route, json=body(shared, JOB, folder=folder)))
        assert "[relative-folder]" in told and f'it is "{folder}"' in told
    monkeypatch.setenv("HOME", str(shared.folder.parent))
    taken = raw.post(route, json=body(shared, JOB, folder=f"~/{shared.folder.name}"))
    assert taken.is_success, taken.text
    elsewhere = refused(raw.post(route, json=body(shared, JOB, folder="~")))
    assert f"there is no dataset at {shared.folder.parent}/text.jsonl" in elsewhere


def test_keys_are_all_of_the_job_and_those_that_are_not_the_defaults(shared: Served, raw: httpx.Client) -> None:
    text = f"{JOB}learning_rate: 1e-4\nweight_decay: 0.0\nreport_to: [tensorboard]\n"
    number = raw.post("/jobs", json=body(shared, text)).json()["id"]
    answer = raw.get(f"/jobs/{number}/keys").json()
    assert set(answer["changed"]) == {"model", "dataset", "learning_rate", "report_to"}
    assert answer["keys"]["tokenizer"] == answer["keys"]["model"] == str(shared.folder / "model")
    assert (answer["keys"]["weight_decay"], answer["keys"]["report_to"]) == (0.0, ["tensorboard"])
    resolved = shared.paths.run_folder(number) / "resolved.yaml"
    resolved.write_text("model: a/b\ntokenizer: c/d\nseed: 42\nof_another_version: 1\n")
    assert raw.get(f"/jobs/{number}/keys").json()["changed"] == ["model", "tokenizer", "of_another_version"]
    resolved.unlink()
    assert "[missing-file]" in refused(raw.get(f"/jobs/{number}/keys"))
    assert raw.get("/jobs/999999/keys").status_code == 404
