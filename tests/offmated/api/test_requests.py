"""Whatever is sent, the answer is an answer or a person's error: never a 5xx. The real server, on its socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.served import JOB, Served, served


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    with served() as built:
        built.client.submit(JOB, str(built.folder))
        yield built


@pytest.fixture(scope="module")
def raw(shared: Served) -> Iterator[httpx.Client]:
    transport = httpx.HTTPTransport(uds=str(shared.paths.api_socket))
    with httpx.Client(transport=transport, base_url="http://offmated", timeout=120) as client:
        yield client


def refused(answer: httpx.Response) -> dict[str, Any]:
    """The fields of a person's error."""
    assert 400 <= answer.status_code < 500, answer.text
    fields: dict[str, Any] = answer.json()
    assert {"what", "numbers", "hint", "code", "exit_code"} == fields.keys()
    return fields


def submit(raw: httpx.Client, shared: Served, extra: str) -> httpx.Response:
    return raw.post("/jobs", json={"yaml": JOB + extra, "folder": str(shared.folder)})


@pytest.mark.parametrize(
    "extra",
    [
        "seed: 0x" + 200_000 * "f",
        "seed: 1" + 100_000 * ":59",
        'run_name: "\\ud800"',
        'run_name: "a\\0b"',
        'output_dir: "\\ud83d/x"',
        'output_dir: "a\\0b"',
        'chat_template: "/\\0"',
        "output_dir: /" + 5000 * "x",
        "tokenizer: ./" + 5000 * "x",
        "eval_dataset: {path: ~nobody-at-all/x}",
    ],
)
def test_a_value_that_cannot_be_is_a_persons_error(raw: httpx.Client, shared: Served, extra: str) -> None:
    assert refused(submit(raw, shared, extra))["exit_code"] == 2


@pytest.mark.parametrize("name", ["a\0b", 300 * "x", "../state"])
def test_what_cannot_be_a_run_folder_is_told_as_such(raw: httpx.Client, name: str) -> None:
    answer = raw.post("/adopt", content=json.dumps({"folders": [name]}), headers={"content-type": "application/json"})
    assert refused(answer)["code"] == "not-a-run"


@pytest.mark.parametrize(
    ("method", "url", "body"),
    [
        ("GET", "/jobs/1/events?position=-1", None),
        ("GET", f"/jobs/1/events?position={2**63}", None),
        ("GET", "/jobs/0", None),
        ("GET", f"/jobs/{10**30}", None),
        ("GET", "/nothing/of/the/kind", None),
        ("DELETE", "/jobs/1", None),
        ("POST", "/jobs/1/retry", b'{"gpu_budget": NaN}'),
        ("POST", "/jobs/1/retry", b'{"gpu_budget": 1e999}'),
        ("POST", "/jobs/1/retry", b'{"gpu_budget": ' + 5000 * b"9" + b"}"),
        ("POST", "/jobs/1/retry", b'{"gpu_budget": "\\ud800"}'),
        ("POST", "/jobs", b'{"yaml": "\\ud800", "folder": "/"}'),
        ("POST", "/jobs", b'{"yaml": "a: 1", "folder": "/\\ud800"}'),
        ("POST", "/jobs", b'{"yaml": "a: 1", "folder": "/\\u0000", "name": "\\u001b[2J"}'),
        ("POST", "/jobs", b'{"yaml": "a: \\ud800"'),
        ("POST", "/jobs", 100_000 * b"["),
        ("POST", "/jobs", b"\xff\xfe"),
        ("POST", "/jobs", b""),
    ],
)
def test_a_request_that_is_none_is_a_persons_error(
    raw: httpx.Client, method: str, url: str, body: bytes | None
) -> None:
    fields = refused(raw.request(method, url, content=body, headers={"content-type": "application/json"}))
    assert "\x1b" not in json.dumps(fields, ensure_ascii=False)


def test_a_position_beyond_every_file_has_no_events(raw: httpx.Client, shared: Served) -> None:
    metrics = shared.paths.run_folder(1) / "metrics.jsonl"
    metrics.write_text('{"event": "start", "step": 0}\n')
    for position in (30, 10**18, 2**63 - 1):
        answer = raw.get("/jobs/1/events", params={"position": position})
        nothing = {"events": [], "position": position, "lines": 0, "broken": []}
        assert (answer.status_code, answer.json()) == (200, nothing)
    metrics.unlink()


NUMBERS = st.one_of(st.integers(-3, 3), st.sampled_from([2**31 - 1, 2**31, 10**18, 2**63, 10**30]), st.text(max_size=5))
JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([2**63, 10**400, "\x00", "~", "/"]),
        st.floats(),
        st.text(st.characters(), max_size=10),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)
FIELDS = st.dictionaries(st.sampled_from(["yaml", "folder", "name", "gpu_budget", "cpu_budget", "key"]), JSON)
BODIES = st.one_of(st.binary(max_size=30), FIELDS.map(lambda value: json.dumps(value).encode()))


@settings(max_examples=300, deadline=None)
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "HEAD", "OPTIONS"]),
    path=st.sampled_from(["", "/plan", "/logs", "/events", "/cancel", "/retry", "/x"]),
    number=NUMBERS,
    query=st.dictionaries(
        st.sampled_from(["position", "follow", "after", "before", "limit", "state", "over"]), NUMBERS, max_size=3
    ),
    body=BODIES,
)
def test_no_request_ends_in_an_error_of_the_daemon(
    raw: httpx.Client, method: str, path: str, number: object, query: dict[str, object], body: bytes
) -> None:
    where = quote(str(number), safe="", errors="replace")
    query.pop("follow", None) if query.get("follow") == 1 else None  # of a job that goes on for ever
    asked = "&".join(f"{name}={quote(str(value), safe='', errors='replace')}" for name, value in query.items())
    headers = {"content-type": "application/json"}
    for url in (f"/jobs/{where}{path}?{asked}", f"/jobs?{asked}"):
        assert raw.request(method, url, content=body, headers=headers).status_code < 500
