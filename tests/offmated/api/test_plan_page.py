"""A job's plan as a page, drawn by the real planner's process."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from offmated.api import plan_page
from planner.codec import to_json
from planner.errors import UserError
from planner.run.folder import RunFolder
from planner.search.problem import Problem
from tests.support import chains
from tests.support.served import JOB, served


def write_plan(run: RunFolder) -> None:
    chain = chains.chain()
    plan = Problem(
        chain=chain,
        hardware=chains.HARDWARE,
        gpu_budget_bytes=12_000,
        cpu_budget_bytes=10**6,
        slices=1,
        clip=False,
    ).plan()
    answer = {"plan": to_json(plan), "chain": to_json(chain), "hardware": to_json(chains.HARDWARE), "measured": True}
    run.plan.write_text(json.dumps(answer))


def test_a_plan_is_drawn_once_there_is_one(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with pytest.raises(UserError) as told:
        plan_page.draw(run, 3, "mine")
    assert told.value.code == "no-plan"
    write_plan(run)
    assert b"<title>mine" in plan_page.draw(run, 3, "mine")
    run.plan.write_text("{}")
    with pytest.raises(UserError) as told:
        plan_page.draw(run, 3, "mine")
    assert (told.value.code, bool(told.value.numbers)) == ("no-picture", True)


def test_what_is_in_the_page_reaches_nothing_else() -> None:
    name = "a </title><script>fetch('/shutdown')</script>"
    with served() as built:
        job = built.client.submit(f"{JOB}run_name: {json.dumps(name)}\n", str(built.folder))
        write_plan(RunFolder(Path(job["run_dir"])))
        transport = httpx.HTTPTransport(uds=str(built.paths.api_socket))
        with httpx.Client(transport=transport, base_url="http://here", timeout=120) as client:
            answer = client.get(f"/jobs/{job['id']}/plan.html")
        policy = answer.headers["content-security-policy"]
        assert answer.status_code == 200 and "sandbox" in policy and "connect-src" not in policy
        assert b"<script>fetch" not in answer.content
