"""The API as its own OpenAPI description has it, asked what nobody would ask: no answer is a 5xx."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase

from offmated.api.app import Services, make_app
from planner.run.processes import Process
from tests.support.served import JOB, served

schemathesis = pytest.importorskip("schemathesis")

OPERATIONS = {
    "GET /health",
    "GET /healthz",
    "GET /metrics",
    "POST /jobs",
    "GET /jobs",
    "GET /queue",
    "GET /jobs/{job_id}",
    "GET /jobs/{job_id}/plan",
    "GET /jobs/{job_id}/plan.html",
    "GET /jobs/{job_id}/logs",
    "POST /jobs/{job_id}/cancel",
    "GET /jobs/{job_id}/events",
    "POST /jobs/{job_id}/retry",
    "POST /page",
    "POST /shutdown",
}


def test_no_request_is_answered_with_a_mistake_of_ours() -> None:
    with served() as built:
        for _ in range(2):
            built.client.submit(JOB, str(built.folder))
        health = {"state": "running", "process": str(Process.current()), "started_at": 0.0, "children": {}}
        services = Services(
            store=built.store,
            paths=built.paths,
            wake=lambda: None,
            shut_down=lambda: None,
            closing=lambda: True,  # a log that is followed ends
            health=lambda: health,
            page=lambda: "http://here/#token",
        )
        schema = schemathesis.openapi.from_asgi("/openapi.json", make_app(services))
        asked = set()
        for found in schema.get_all_operations():
            operation = found.ok()
            asked.add(operation.label)
            _ask(operation.as_strategy())
        assert asked >= OPERATIONS


def _ask(strategy: hypothesis.strategies.SearchStrategy[schemathesis.Case]) -> None:
    @hypothesis.given(strategy)
    @hypothesis.settings(
        max_examples=12,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=[schemathesis.checks.not_a_server_error])

    ask()
