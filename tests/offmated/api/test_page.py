"""The page in a real browser, on a real daemon: what it shows, what it does when asked, and whom it asks."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from offmated.cli.job_view import wall
from planner.units import format_seconds
from tests.support.browser import Browser, browser, find_browser
from tests.support.daemons import HELD_AT, House, house, until

FOUND = find_browser()
pytestmark = pytest.mark.skipif(FOUND is None, reason="no browser here")

PHONE = {"width": 360, "height": 800}
JOB = "model: ./model\ndataset: text.jsonl\n"
STEERS = "\N{RIGHT-TO-LEFT OVERRIDE}\N{ZERO WIDTH SPACE}"
SHOWN = "\N{REPLACEMENT CHARACTER}" * 2


@pytest.fixture(scope="module")
def shared() -> Iterator[House]:
    """One job is done, one has failed, one runs, one waits."""
    with house() as built:
        built.wait_for(built.submit("evaluated", steps=12), "done")
        built.wait_for(built.submit("wrong"), "failed")
        built.wait_until_held(built.submit("held", steps=60))
        built.wait_for(built.submit("<b>bold</b> & last"), "waiting")
        built.client.submit(
            f"{JOB}max_steps: 30\n",
            str(built.home),
            f"steers{STEERS}.yaml",
            {"label": "night", "held": True},
            settings=["learning_rate=1e-4", f"wandb_project=a{STEERS}b"],
        )
        yield built


@pytest.fixture(scope="module")
def started() -> Iterator[Browser]:
    assert FOUND is not None
    with browser(FOUND) as found:
        yield found


@pytest.fixture
def page(shared: House, started: Browser) -> Iterator[Browser]:
    """The page, opened as a person opens it; whatever a test does with it, nothing may go wrong in it."""
    started.problems.clear()
    started.open(shared.client.page_url())
    started.page.wait_for_selector("#job:not([hidden])")
    yield started
    assert started.problems == []


def text(page: Browser, selector: str) -> str:
    return page.page.inner_text(selector)


def rows(page: Browser, table: str) -> list[str]:
    cells = "row => [...row.cells].map(cell => cell.textContent).join(' | ')"  # however the row is laid out
    return list(page.ask(f"[...document.querySelectorAll('{table} tbody tr')].map({cells})"))


def test_the_job_that_runs_is_there_with_its_figures_and_curves(page: Browser) -> None:
    assert text(page, "#title") == "3 · held"
    assert text(page, "#progress p").startswith(f"step {HELD_AT} of 60, ")
    assert page.ask("document.querySelector('#progress i').style.width").startswith("33.3")
    cards = text(page, "#cards")
    assert "Loss\n0.25" in cards
    assert "800 B\nplanned 900 B, budget 1000 B" in cards
    assert "Tokens a second" in cards and "predicted 100.0 ms" in cards
    assert page.page.locator(".uplot canvas").count() == 2
    assert text(page, "#loss .u-legend").startswith("step")
    assert page.ask("document.title") == "33% · offmate"


def test_the_queue_and_what_has_ended_are_there(page: Browser) -> None:
    assert rows(page, "#queue")[0].startswith("1 | 3 · held | running | step 20 of 60")
    assert rows(page, "#queue")[1].startswith("2 | 4 · <b>bold</b> & last | waiting | waits for job 3; done by ")
    ended = [row.split(" | ")[1:4] for row in rows(page, "#done")]
    assert [row[:2] for row in ended] == [["2 · wrong", "failed"], ["1 · evaluated", "done"]]
    assert ended[1][2].endswith(" eval"), "whose loss it is"


def test_label_and_settings_are_there_and_no_name_steers_the_text(page: Browser) -> None:
    row = rows(page, "#queue")[2]
    named = f'5 · steers{SHOWN}nightlearning_rate=0.0001wandb_project="a{SHOWN}b"'
    assert row == f"3 | {named} | held | offmate release 5"
    page.page.click("#queue button >> text=steers")
    page.page.wait_for_selector("#title >> text=5 · ")
    told = text(page, "#job h2")
    assert told.startswith(f"5 · steers{SHOWN}") and "night" in told and "learning_rate=0.0001" in told
    assert not any(steers in page.page.inner_text("body") for steers in STEERS)


def test_times_and_durations_are_those_of_commands(page: Browser) -> None:
    words = 'import("/page/words.js")'
    for away_s in (-7 * 86400, 60, 20 * 3600, 3 * 86400, 5.9 * 86400, 40 * 86400):
        assert page.ask(f"{words}.then(words => words.moment({time.time() + away_s}))") == wall(time.time() + away_s)
    for seconds in (2e-5, 0.0123, 0.5, 3.44, 119.9, 120, 3599, 7199, 7260, 200_000):
        assert page.ask(f"{words}.then(words => words.duration({seconds}))") == format_seconds(seconds)


def test_another_job_is_shown_when_it_is_chosen_and_stays_with_the_address(page: Browser, shared: House) -> None:
    page.page.click("#done button >> text=evaluated")
    page.page.wait_for_selector("#title >> text=1 · evaluated")
    assert text(page, "#state") == "done"
    assert page.page.is_visible("#samples") and not page.page.is_visible("#cancel")
    page.page.click("#samples summary")
    assert "Why?" in text(page, "#samples")
    page.page.reload()
    page.page.wait_for_selector("#title >> text=1 · evaluated")
    assert shared.paths.token.read_text() not in page.page.url


def test_the_log_shows_its_end(page: Browser) -> None:
    page.page.click("#log summary")
    page.page.wait_for_selector("#log pre >> text=trainer here, from step 0")


def test_what_changes_something_is_asked_first(page: Browser, shared: House) -> None:
    page.page.click("#queue button >> text=bold")
    page.page.wait_for_selector("#title >> text=4 · ")
    page.page.click("#cancel")
    assert text(page, "#ask h2") == "Cancel job 4?"
    page.page.click("#ask button >> text=No")
    assert shared.job(4)["state"] == "waiting"
    page.page.click("#cancel")
    page.page.click("#ask .yes")
    until(lambda: shared.job(4)["state"] == "cancelled", "it is cancelled")
    page.page.wait_for_selector("#retry:not([hidden])")
    page.page.click("#retry")
    page.page.click("#ask .yes")
    until(lambda: shared.job(4)["state"] in ("submitted", "planning", "waiting"), "it is tried again")


def test_a_job_is_paused_and_resumed(page: Browser, shared: House) -> None:
    page.page.click("#queue button >> text=bold")
    page.page.wait_for_selector("#title >> text=4 · ")
    page.page.click("#pause")
    assert text(page, "#ask h2") == "Pause job 4?"
    page.page.click("#ask .yes")
    page.page.wait_for_selector("#resume:not([hidden])")
    page.page.wait_for_selector("#state >> text=paused: offmate resume 4")
    paused = "2 | 4 · <b>bold</b> & last | paused | offmate resume 4"
    until(lambda: paused in rows(page, "#queue"), "the queue shows that job 4 is paused")
    page.page.click("#resume")
    page.page.click("#ask .yes")
    page.page.wait_for_selector("#pause:not([hidden])")
    assert shared.job(4)["hold"] is None


def test_it_asks_this_daemon_only_and_never_shows_the_token_in_an_address(page: Browser, shared: House) -> None:
    address, token = shared.client.page_url().split("#")
    assert all(url.startswith((address, "data:")) for url in page.requests)
    assert not [url for url in page.requests[1:] if token in url]


def test_the_plan_opens_in_a_tab_of_its_own(page: Browser, shared: House) -> None:
    with page.page.context.expect_page() as opened:
        page.page.click("#plan")
    opened.value.wait_for_url("**/plan.html?until=*")
    assert shared.paths.token.read_text() not in opened.value.url
    opened.value.close()


def test_a_browser_without_the_token_is_told_what_to_type(started: Browser, shared: House) -> None:
    address = shared.client.page_url().split("#")[0]
    context = started.page.context.browser
    assert context is not None
    with context.new_context() as stranger:
        page = stranger.new_page()
        page.goto(address)
        page.wait_for_selector("#trouble:not([hidden])")
        assert "offmate page gives an address" in page.inner_text("#trouble")
        assert not page.is_visible("main")
        page.goto(shared.client.page_url())  # in the same tab: only what is behind the "#" changes
        page.wait_for_selector("main:not([hidden])")
        assert "#" not in page.url


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone(page: Browser, shared: House, dark: bool) -> None:
    page.open(shared.client.page_url(), **PHONE, dark=dark)
    page.page.wait_for_selector("#job:not([hidden])")
    assert page.ask("document.documentElement.scrollWidth") <= PHONE["width"]


def test_a_daemon_that_goes_is_said_and_one_that_comes_is_found(started: Browser) -> None:
    with house() as own:
        (own.paths.config).write_text('listen = "127.0.0.1:0"\n')
        started.open(own.client.page_url())
        started.page.wait_for_selector("#idle:not([hidden])")
        own.down()
        started.page.wait_for_selector("#trouble:not([hidden])")
        assert "offmate up" in text(started, "#trouble")
    started.problems.clear()  # requests that nobody answered
