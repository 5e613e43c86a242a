"""What a run has recorded, beside its plan: in the page's data, and drawn by a real browser where there is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.codec import to_json
from planner.picture.basis import Basis
from planner.picture.document import document
from planner.picture.drawing import AROUND, STEPS, Drawing, draw
from planner.picture.files import Pictures, redraw
from planner.picture.page import page
from planner.picture.trace import ns
from planner.schedule.measured import TIMELINE, Measured, measured
from tests.support import chains as small
from tests.support.browser import browser, find_browser
from tests.support.chains import resident_plan

FOUND = find_browser()
SLOWER = 1.5


def ran(drawing: Drawing) -> Measured:
    """As the plan has it, but slower; the clock begins anywhere."""
    spans = {
        (7 + step, place): (10**12 + ns(SLOWER * span.start_s), 10**12 + ns(SLOWER * span.end_s))
        for step in range(STEPS)
        for place, span in enumerate(drawing.steps[AROUND + step])
    }
    return measured(drawing.program, 7, spans)


@pytest.fixture(scope="module")
def planned() -> Drawing:
    chain = small.chain()
    plan = resident_plan(chain, option="offload", slices=2)
    return draw(plan, chain, small.HARDWARE, title="x", basis=Basis.MEASURED)


def test_times_begin_where_the_first_step_computes_and_a_step_ends_where_the_next_one_does(planned: Drawing) -> None:
    found = ran(planned)
    first = next(n for n, op in enumerate(planned.program.ops) if op.kind.value == "run")
    assert found.first_step == 7 and found.start_ns[0][first] == 0
    assert found.step_ns(planned.program) == found.start_ns[1][first] == pytest.approx(SLOWER * planned.step_s * 1e9)


def test_a_step_without_all_its_turns_is_no_measurement(planned: Drawing) -> None:
    with pytest.raises(ValueError, match="turns"):
        measured(planned.program, 7, {(7, n): (0, 1) for n in range(len(planned.program.ops))})


def drawn(planned: Drawing, found: Measured) -> Drawing:
    asked: dict[str, Any] = {"title": "x", "basis": Basis.MEASURED}
    return draw(planned.plan, planned.chain, planned.hardware, measured=found, **asked)


def test_the_page_has_what_ran_and_room_for_it(planned: Drawing) -> None:
    found = ran(planned)
    data: Any = document(drawn(planned, found))
    assert data["measured"]["start_ns"] == to_json(found.start_ns) and data["measured"]["first_step"] == 7
    assert data["end_ns"] > data["planned_end_ns"] == document(planned)["end_ns"]
    assert document(planned)["measured"] is None


def test_what_another_program_did_is_not_drawn(planned: Drawing) -> None:
    other = resident_plan(small.chain(), option="keep", slices=2)
    asked: dict[str, Any] = {"title": "x", "basis": Basis.MEASURED}
    assert draw(other, small.chain(), small.HARDWARE, measured=ran(planned), **asked).measured is None


@pytest.mark.parametrize("written", ["whole", "broken", "missing"])
def test_a_plan_is_drawn_with_what_lies_beside_it(planned: Drawing, tmp_path: Path, written: str) -> None:
    parts = {"plan": planned.plan, "chain": planned.chain, "hardware": planned.hardware, "measured": True}
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({name: to_json(part) for name, part in parts.items()}))
    text = json.dumps(to_json(ran(planned)))
    if written != "missing":
        (tmp_path / TIMELINE).write_text(text if written == "whole" else text[: len(text) // 2])
    redraw(file, Pictures(html=tmp_path / "page.html"), title="x")
    assert ('"measured":null' in (tmp_path / "page.html").read_text()) == (written != "whole")


@pytest.mark.skipif(FOUND is None, reason="no browser here")
def test_a_browser_draws_what_ran_below_what_was_planned_and_tells_both(planned: Drawing, tmp_path: Path) -> None:
    assert FOUND is not None
    with browser(FOUND) as shown:
        heights = []
        for name, drawing in (("plan", planned), ("ran", drawn(planned, ran(planned)))):
            (tmp_path / f"{name}.html").write_text(page(drawing), "utf-8")
            shown.open(tmp_path / f"{name}.html")
            heights.append(shown.ask("document.getElementById('chart').getBoundingClientRect().height"))
        assert heights[1] > heights[0]
        assert "50% longer than planned" in shown.ask("document.getElementById('ran').innerText")
        at = shown.ask("document.getElementById('chart').getBoundingClientRect().toJSON()")
        shown.point(at["x"] + 500, at["y"] + 48 + 46 + 8)
        said = shown.ask("document.getElementById('tip').innerText")
        assert "step 7 of the run" in said and "took" in said and "planned" in said
        row = """(() => {
          const data = document.getElementById("base").getContext("2d").getImageData(150, 98, 900, 12).data;
          return new Set(new Uint32Array(data.buffer)).size;
        })()"""
        assert shown.ask(row) > 2
        assert shown.problems == []
