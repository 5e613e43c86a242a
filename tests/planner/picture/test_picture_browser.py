"""The page in a real browser: it draws, it answers to the mouse, it asks for nothing. Skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.picture.basis import Basis
from planner.picture.drawing import Drawing, draw
from planner.picture.page import page
from planner.schedule.chain import Chain
from planner.schedule.items import Item
from planner.schedule.plan import Direction, Plan
from planner.search.problem import Problem
from tests.support.browser import Browser, browser, find_browser
from tests.support.chains import HARDWARE, chain, resident_plan, rounds_plan
from tests.support.llama import RTX_3060, llama

FOUND = find_browser()
pytestmark = pytest.mark.skipif(FOUND is None, reason="no browser here")


@pytest.fixture(scope="module")
def drawing() -> Drawing:
    chain = llama(6)
    plan = Problem(
        chain=chain,
        hardware=RTX_3060,
        gpu_budget_bytes=6 * 10**9,
        cpu_budget_bytes=60 * 10**9,
        slices=2,
        clip=False,
    ).plan()
    return draw(plan, chain, RTX_3060, title="six layers <&>", basis=Basis.ESTIMATED)


@pytest.fixture(scope="module")
def file(drawing: Drawing, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    path.write_text(page(drawing), "utf-8")
    return path


@pytest.fixture(scope="module")
def real() -> Iterator[Browser]:
    assert FOUND is not None
    with browser(FOUND) as started:
        yield started


@pytest.fixture
def shown(real: Browser, file: Path) -> Iterator[Browser]:
    """The page, freshly opened; whatever a test does with it, nothing may go wrong in it."""
    real.open(file)
    yield real
    assert real.problems == []


def streamed(chain: Chain, slices: int) -> Plan:
    """Weights and states of every layer travel for each use, its activations too; the GPU updates everything."""
    everything = resident_plan(chain, option="offload", slices=slices)
    stages = []
    for stage in everything.stages:
        travelling = [t.name for t in chain.blocks[stage.block].tensors if 0 < stage.block < len(chain.blocks) - 1]
        weights = tuple(map(Item.weight, travelling))
        items = weights + tuple(map(Item.states, travelling))
        if stage.direction is Direction.FORWARD:
            stages.append(replace(stage, prefetch=weights, evict=weights))
        else:
            stages.append(replace(stage, prefetch=items, offload=items, evict=stage.evict + items))
    ends = (chain.blocks[0], chain.blocks[-1])
    home = {Item.of(kind, t.name) for block in ends for t in block.tensors for kind in "ws"}
    return replace(everything, stages=tuple(stages), resident=tuple(i for i in everything.resident if i in home))


def box(shown: Browser, name: str) -> dict[str, Any]:
    found: dict[str, Any] = shown.ask(f"document.getElementById('{name}').getBoundingClientRect().toJSON()")
    return found


def colours(shown: Browser, x: float, y: float, width: float, height: float) -> int:
    """How many colours a piece of the chart has."""
    found: int = shown.ask(
        f"""(() => {{
          const data = document.getElementById("base").getContext("2d").getImageData({x}, {y}, {width}, {height}).data;
          return new Set(new Uint32Array(data.buffer)).size;
        }})()"""
    )
    return found


def tip(shown: Browser) -> str:
    found: str = shown.ask("document.getElementById('tip').hidden ? '' : document.getElementById('tip').innerText")
    return found


def test_the_page_opens_from_a_file_and_asks_for_nothing_else(shown: Browser, file: Path) -> None:
    assert shown.requests == [file.as_uri()]
    assert shown.ask("document.title") == "six layers <&> · offmate plan"
    assert shown.ask("document.querySelectorAll('.card').length") == 4


def test_every_queue_and_the_memory_are_drawn(shown: Browser) -> None:
    for top, height in ((48, 46), (102, 34), (144, 34), (186, 34), (260, 220)):
        assert colours(shown, 130, top + 4, 1000, height - 8) > 2, f"nothing is drawn at {top}"


def test_pointing_at_a_turn_tells_what_it_is_and_what_it_waited_for(shown: Browser, drawing: Drawing) -> None:
    chart = box(shown, "chart")
    shown.point(chart["x"] + 300, chart["y"] + 70)
    text = tip(shown)
    assert "ward of layer" in text or "Head with its loss" in text
    assert "takes" in text and ("aited" in text or "Did not wait" in text)
    shown.point(chart["x"] + 300, chart["y"] + 400)
    assert "on the GPU" in tip(shown) and "below the budget" in tip(shown)
    shown.point(5, 5)
    assert tip(shown) == ""


def test_dragging_and_zooming_change_what_is_shown(shown: Browser) -> None:
    chart = box(shown, "chart")
    x, y = chart["x"] + 400, chart["y"] + 70

    def picture() -> str:
        found: str = shown.ask("document.getElementById('base').toDataURL()")
        return found

    whole = picture()
    shown.wheel(x, y, -200, control=True)
    zoomed = picture()
    shown.drag(x, y, by=-150)
    moved = picture()
    assert len({whole, zoomed, moved}) == 3
    shown.ask("document.getElementById('whole').click()")
    shown.frame()
    assert picture() == whole


def test_the_strip_and_the_keys_choose_what_is_shown(shown: Browser) -> None:
    strip = box(shown, "overview")
    right, y = strip["x"] + strip["width"] - 15, strip["y"] + 20
    pictures = [shown.ask("document.getElementById('base').toDataURL()")]
    shown.drag(right, y, by=-500)
    pictures.append(shown.ask("document.getElementById('base').toDataURL()"))
    for key in ("ArrowRight", "+", "0"):
        shown.ask(f"document.getElementById('chart').dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))")
        shown.frame()
        pictures.append(shown.ask("document.getElementById('base').toDataURL()"))
    assert len(set(pictures)) == 4 and pictures[-1] == pictures[0]


def test_the_wheel_alone_scrolls_the_page(shown: Browser) -> None:
    chart = box(shown, "chart")
    before = shown.ask("document.getElementById('base').toDataURL()")
    shown.wheel(chart["x"] + 400, chart["y"] + 70, 120)
    assert shown.ask("document.getElementById('base').toDataURL()") == before
    assert "wheel zooms" in shown.ask("document.getElementById('hint').innerText")


def test_a_block_opens_to_its_tensors(shown: Browser, drawing: Drawing) -> None:
    assert shown.ask("document.querySelectorAll('tr.block').length") == len(drawing.chain.blocks)
    shown.ask("document.querySelectorAll('tr.block')[1].click()")
    rows = shown.ask("[...document.querySelectorAll('td.inside tbody tr')].map(row => row.innerText)")
    assert [row.split("\t")[0] for row in rows] == [t.name for t in drawing.chain.blocks[1].tensors]
    shown.ask("document.querySelectorAll('tr.block')[1].click()")
    assert shown.ask("document.querySelectorAll('td.inside').length") == 0


def test_light_and_dark_narrow_and_wide_fit_the_window(real: Browser, file: Path) -> None:
    seen = set()
    for dark in (False, True):
        for width in (380, 1400):
            real.open(file, width=width, dark=dark)
            assert real.ask("document.documentElement.scrollWidth") <= width
            seen.add(real.ask("getComputedStyle(document.body).backgroundColor"))
    assert len(seen) == 2
    assert real.problems == []


NOTES_WORDS = """
  window.words = [];
  const fill = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const part = { left: 0, start: 0, right: 1, end: 1, center: 0.5 }[this.textAlign];
    const width = this.measureText(text).width;
    if (this.canvas.id === "base") window.words.push([text, x - part * width, y - 6, width, 12]);
    return fill.apply(this, arguments);
  };
  const clear = CanvasRenderingContext2D.prototype.scale;
  CanvasRenderingContext2D.prototype.scale = function (...by) {
    if (this.canvas.id === "base") window.words = [];
    return clear.apply(this, by);
  };
"""
"""Has the chart's words noted, with left, top, width and height in pixels, anew each time that it is drawn."""


@pytest.mark.parametrize("width", [320, 360, 412, 700, 1280])
@pytest.mark.parametrize("budget_part", [1.0, 1.3, 1.75, 4.0])
def test_no_word_of_the_chart_is_cut_or_lies_on_another(
    real: Browser, drawing: Drawing, tmp_path: Path, width: int, budget_part: float
) -> None:
    """The plan as it is, and with budgets above what it uses: in sight of it, and far above."""
    plan = replace(drawing.plan, gpu_budget_bytes=int(budget_part * drawing.plan.gpu_budget_bytes))
    (tmp_path / "plan.html").write_text(page(replace(drawing, plan=plan)), "utf-8")
    with real.page.context.browser.new_context() as context:
        context.add_init_script(NOTES_WORDS)
        shown = Browser(context.new_page())
        shown.open(tmp_path / "plan.html", width=width, height=800)
        room = shown.ask("document.getElementById('base').clientWidth")
        for _ in range(5):
            words = shown.ask("window.words")
            assert any(text.startswith("budget ") for text, *_ in words)
            assert [text for text, x, _, w, _ in words if x < 0 or x + w > room] == []
            assert [(a, b) for number, a in enumerate(words) for b in words[:number] if _touch(a, b)] == []
            shown.page.click("#in")
            shown.frame()
        assert shown.problems == []


def _touch(one: list[Any], other: list[Any]) -> bool:
    (_, x, y, w, h), (_, left, top, width, height) = one, other
    return bool(x < left + width and left < x + w and y < top + height and top < y + h)


def test_a_table_that_is_wider_than_its_window_says_so_and_keeps_its_first_column(real: Browser, file: Path) -> None:
    real.open(file, width=360, height=800)
    assert real.page.is_visible("#sideways")
    before = real.ask("document.querySelector('#blocks tbody td').getBoundingClientRect().left")
    real.ask("document.querySelector('.scroll').scrollLeft = 200")
    real.frame()
    assert real.ask("document.querySelector('.scroll').scrollLeft") == 200
    assert real.ask("document.querySelector('#blocks tbody td').getBoundingClientRect().left") == before
    real.open(file, width=1400, height=800)
    assert not real.page.is_visible("#sideways")


def test_fifteen_thousand_operations_stay_smooth(real: Browser, tmp_path: Path) -> None:
    chain = llama(126)
    drawn = draw(streamed(chain, slices=8), chain, RTX_3060, title="large", basis=Basis.ESTIMATED)
    assert len(drawn.program.ops) > 14_000
    file = tmp_path / "large.html"
    file.write_text(page(drawn), "utf-8")
    real.open(file)
    middle_ms = real.ask(
        """(async () => {
          const times = [];
          for (let turn = 0; turn < 15; turn++) {
            const start = performance.now();
            document.getElementById(turn % 2 ? "out" : "in").click();
            await new Promise((done) => requestAnimationFrame(() => done()));
            times.push(performance.now() - start);
          }
          return times.sort((a, b) => a - b)[7];
        })()"""
    )
    assert middle_ms < 150, "a frame takes too long, even for a busy machine"
    assert real.problems == []


def test_each_round_has_its_own_phases_on_the_ruler(real: Browser, tmp_path: Path) -> None:
    drawing = draw(rounds_plan(2), chain(2), HARDWARE, title="rounds", basis=Basis.GIVEN)
    (tmp_path / "plan.html").write_text(page(drawing), "utf-8")
    real.open(tmp_path / "plan.html")
    written = real.ask(
        """new Promise((done) => {
            const found = [], write = CanvasRenderingContext2D.prototype.fillText;
            CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
                if (text === "forward" || text === "backward") found.push([text, x]);
                return write.call(this, text, x, y);
            };
            document.getElementById("whole").click();
            requestAnimationFrame(() => requestAnimationFrame(() => done(found)));
        })"""
    )
    assert [name for name, _ in written] == 4 * ["forward", "backward"], "two steps of two rounds"
    assert [x for _, x in written] == sorted(x for _, x in written)
    assert real.problems == []
