"""What the page does with jobs, in a real browser on a real daemon: submits a file, moves jobs, compares them, shows
their keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from planner.errors import UserError
from planner.keys.source import MOST_CHARACTERS
from tests.support.browser import Browser, browser, find_browser
from tests.support.daemons import House, house, until

FOUND = find_browser()
pytestmark = pytest.mark.skipif(FOUND is None, reason="no browser here")

JOB = "model: ./model\ndataset: text.jsonl\n"
SMILE = "\N{SLIGHTLY SMILING FACE}"
"""One character, which is four bytes of UTF-8 and two units of UTF-16."""
DROPPED = """([name, text]) => {
    const files = new DataTransfer();
    files.items.add(new File([text], name));
    return files;
}"""


@pytest.fixture(scope="module")
def shared() -> Iterator[House]:
    """Jobs 1 and 2 are done, with evaluations; 3 runs for as long as the tests do."""
    with house() as built:
        for rate in ("1e-4", "3e-4"):
            text = f"{JOB}run_name: evaluated\nmax_steps: 12\nlearning_rate: {rate}\n"
            built.wait_for(built.client.submit(text, str(built.home))["id"], "done")
        built.wait_until_held(built.submit("held", steps=60))
        yield built


@pytest.fixture(scope="module")
def started() -> Iterator[Browser]:
    assert FOUND is not None
    with browser(FOUND) as found:
        yield found


@pytest.fixture
def page(shared: House, started: Browser) -> Iterator[Browser]:
    """The page, opened as a person opens it; whatever a test does with it, nothing may go wrong in it. Jobs that the
    test leaves in the queue are cancelled, so that no other test finds them there."""
    before = queue(shared)
    started.problems.clear()
    started.open(shared.client.page_url())
    started.page.wait_for_selector("#job:not([hidden])")
    started.ask("document.querySelector('#folder').value = '~'")  # and not what a test before has left
    yield started
    left = [number for number in queue(shared) if number not in before]
    for number in left:
        shared.client.cancel(number)
    # A job that is being planned is cancelled when its planner has ended.
    until(lambda: not {*left} & {*queue(shared)}, "they are cancelled")
    assert [problem for problem in started.problems if "status of 422" not in problem] == []


@pytest.fixture
def waiting(shared: House, page: Browser) -> list[int]:
    """Three jobs at the end of the queue, which are the test's own."""
    made = [shared.submit(name) for name in ("first", "second", "third")]
    for number in made:
        shared.wait_for(number, "waiting")
    # The page lists a job that is being planned in front of others: what it shows is to be no older than this.
    page.page.wait_for_selector(f"#queue tbody tr:last-child:has([data-at=up-{made[-1]}]):has-text('waiting')")
    return made


@contextmanager
def held(page: Browser, path: str) -> Iterator[None]:
    """While the context lasts, the first request for `path` waits. After it the answer is there, and the page has
    asked the daemon once more for all that it shows."""
    waiting: list[Any] = []
    address = f"**{path}"
    page.page.route(address, lambda route: waiting.append(route), times=1)
    yield
    assert len(waiting) == 1, "it was asked for"
    with page.page.expect_response(address):
        waiting[0].continue_()
    with page.page.expect_response("**/health"):
        pass
    page.frame()


def drop(page: Any, name: str, text: str) -> None:
    """A file falls onto the page."""
    files = page.evaluate_handle(DROPPED, [name, text])
    page.dispatch_event("body", "drop", {"dataTransfer": files})


def queue(shared: House) -> list[int]:
    return [int(job["id"]) for job in shared.client.queue()]


def said(shared: House, text: str, folder: str, name: str) -> str:
    """The error that a command prints for such a file."""
    with pytest.raises(UserError) as caught:
        shared.client.submit(text, folder, name)
    return str(caught.value)


def test_a_dropped_file_is_checked_and_then_submitted_by_a_click(page: Browser, shared: House) -> None:
    before = queue(shared)
    drop(page.page, "dropped.yaml", f"{JOB}max_steps: 3\n")
    page.page.wait_for_selector("#answer.refused")  # its paths are not in the home folder
    page.page.fill("#folder", str(shared.home))
    page.page.keyboard.press("Tab")
    page.page.wait_for_selector("#submit:enabled")
    answer = page.page.inner_text("#answer")
    assert answer.startswith("It can be submitted, as dropped.") and "has no weights" in answer
    assert "max_steps: 3" in page.page.inner_text("#hand pre")
    assert queue(shared) == before, "looking submits nothing"
    page.page.dblclick("#submit")
    page.page.wait_for_selector("#title >> text=dropped")
    (number,) = set(queue(shared)) - set(before)
    assert page.page.inner_text("#answer").startswith(
        f"Job {number} (dropped) is submitted, place {len(before) + 1} in the queue."
    )
    assert shared.job(number)["notes"] and page.page.locator("#answer dt", has_text="note").count() == 1


def test_a_file_is_chosen_with_the_button(page: Browser, shared: House) -> None:
    with page.page.expect_file_chooser() as chooser:
        page.page.click("#choose")
    chooser.value.set_files({"name": "chosen.yaml", "mimeType": "", "buffer": JOB.encode()})
    page.page.fill("#folder", str(shared.home))
    page.page.keyboard.press("Tab")
    page.page.wait_for_selector("#submit:enabled")
    page.page.click("#away")
    assert not page.page.is_visible("#hand")
    page.page.reload()
    assert page.page.input_value("#folder") == str(shared.home), "it is remembered"


@pytest.mark.parametrize(
    "text",
    [
        "model: ./model\ndatset: text.jsonl\n",
        "model: [\n",
        "x" * 2**19,
        "\n" * 2**21,
        f"model: ./model\n#{SMILE * 2**18}\ndataset: text.jsonl\n",
        "dataset: text.jsonl",
    ],
    ids=["key", "yaml", "long", "long of lines", "long of four bytes each", "no model"],
)
def test_a_wrong_file_is_told_as_commands_tell_it(page: Browser, shared: House, text: str) -> None:
    page.ask(f"document.querySelector('#folder').value = '{shared.home}'")
    drop(page.page, "wrong.yaml", text)
    page.page.wait_for_selector("#answer.refused")
    assert page.ask("document.querySelector('#answer p').textContent") == said(
        shared, text[: MOST_CHARACTERS + 1], str(shared.home), "wrong.yaml"
    )
    assert page.page.is_disabled("#submit")


def test_a_file_is_taken_whole_whatever_its_characters_are(page: Browser, shared: House) -> None:
    page.ask(f"document.querySelector('#folder').value = '{shared.home}'")
    drop(page.page, "smiles.yaml", f"model: ./model\n#{SMILE * 200_000}\ndataset: text.jsonl\n")
    page.page.wait_for_selector("#submit:enabled", timeout=20_000)
    shown = page.ask("document.querySelector('#hand pre').textContent")
    assert shown.count(SMILE) == 200_000 and shown.endswith("dataset: text.jsonl\n")


def test_of_two_files_the_later_one_is_taken_although_the_first_is_read_later(page: Browser, shared: House) -> None:
    page.ask(f"document.querySelector('#folder').value = '{shared.home}'")
    page.ask(
        """(() => {
            const own = Blob.prototype.arrayBuffer;
            Blob.prototype.arrayBuffer = async function () {
                Blob.prototype.arrayBuffer = own;
                await new Promise((go) => { window.readFirst = go; });
                return own.call(this);
            };
        })()"""
    )
    drop(page.page, "first.yaml", f"{JOB}max_steps: 1\n")
    until(lambda: page.ask("Boolean(window.readFirst)"), "the first file is about to be read")
    drop(page.page, "later.yaml", f"{JOB}max_steps: 2\n")
    page.page.wait_for_selector("#submit:enabled")
    page.ask("window.readFirst()")
    with page.page.expect_response("**/health"):  # the page has gone on
        pass
    assert page.page.inner_text("#hand h2") == "later.yaml"
    assert "max_steps: 2" in page.page.inner_text("#hand pre")
    assert page.page.inner_text("#answer").startswith("It can be submitted, as later.")
    page.page.click("#away")


@pytest.mark.parametrize(
    ("folder", "code"), [("", "relative-folder"), ("jobs", "relative-folder"), ("/nowhere", "bad-job")]
)
def test_a_folder_that_cannot_be_is_told(page: Browser, shared: House, folder: str, code: str) -> None:
    drop(page.page, "job.yaml", JOB)
    page.page.fill("#folder", folder)
    page.page.keyboard.press("Tab")
    page.page.wait_for_selector(f"#answer.refused >> text=[{code}]")
    shown = page.ask("document.querySelector('#answer p').textContent")
    assert shown == said(shared, JOB, folder, "job.yaml")
    assert ("/nowhere/text.jsonl" in shown) == (folder == "/nowhere")
    page.page.fill("#folder", str(shared.home))
    page.page.keyboard.press("Tab")
    page.page.wait_for_selector("#submit:enabled")


def test_what_is_no_text_and_several_files_are_refused_by_the_page(page: Browser) -> None:
    page.ask(
        """(() => {
            const files = new DataTransfer();
            files.items.add(new File([new Uint8Array([255, 254])], "model.bin"));
            document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: files, bubbles: true }));
        })()"""
    )
    page.page.wait_for_selector("#answer.refused >> text=Cannot read the job file model.bin: it is not UTF-8 text.")
    page.ask(
        """(() => {
            const files = new DataTransfer();
            for (const name of ["a.yaml", "b.yaml"]) files.items.add(new File(["a"], name));
            document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: files, bubbles: true }));
        })()"""
    )
    page.page.wait_for_selector("#answer.refused >> text=Drop one at a time.")
    assert page.page.is_disabled("#submit")


def test_without_the_token_nothing_is_submitted_moved_or_read(started: Browser, shared: House) -> None:
    before, browser = queue(shared), started.page.context.browser
    assert browser is not None
    with browser.new_context() as stranger:
        page = stranger.new_page()
        page.goto(shared.client.page_url().split("#")[0])
        page.wait_for_selector("#trouble:not([hidden])")
        assert page.input_value("#folder") == "~"
        drop(page, "job.yaml", JOB)
        page.wait_for_selector("#answer.refused >> text=[no-token]")
        assert page.is_disabled("#submit")
        page.evaluate("document.querySelector('#submit').disabled = false")
        page.click("#submit")
        page.wait_for_selector("#answer.refused >> text=[no-token]")
        stranger.add_cookies([{"name": "token", "value": shared.paths.token.read_text(), "url": page.url}])
        asked = [("POST", "/jobs"), ("POST", "/jobs/check"), ("POST", "/jobs/3/move"), ("GET", "/jobs/1/keys")]
        for method, path in asked:
            body = "" if method == "GET" else ', body: \'{"to": "first"}\''
            fetched = f'fetch("{path}", {{method: "{method}"{body}}}).then(answer => answer.status)'
            assert page.evaluate(fetched) == 401, path
    assert queue(shared) == before


def test_jobs_change_places_by_keyboard_and_keep_the_focus(page: Browser, shared: House, waiting: list[int]) -> None:
    first, second, third = waiting
    running = [number for number in queue(shared) if number not in waiting]
    assert queue(shared) == [*running, first, second, third]
    up = page.page.get_by_role("button", name=f"Move {third} · third up")
    up.focus()
    page.page.keyboard.press("Enter")
    page.page.wait_for_selector(f"#moved >> text=Job {third} is waiting, place {len(running) + 2}: ")
    assert queue(shared) == [*running, first, third, second]
    page.page.keyboard.press("Enter")
    page.page.wait_for_selector(f"#moved >> text=Job {third} is waiting, place {len(running) + 1}: ")
    page.page.wait_for_selector(f"[data-at=up-{third}][aria-disabled=true]")
    assert page.ask("document.activeElement.dataset.at") == f"up-{third}"
    page.page.keyboard.press("Enter")  # there is no place before
    page.page.keyboard.press("Tab")
    for place in (2, 3):
        page.page.keyboard.press("Enter")
        page.page.wait_for_selector(f"#moved >> text=Job {third} is waiting, place {len(running) + place}: ")
    assert queue(shared) == [*running, first, second, third]
    assert page.page.get_by_role("button", name="Move 3 · held up").count() == 0


def test_jobs_change_places_by_drag(page: Browser, shared: House, waiting: list[int]) -> None:
    first, second, third = waiting
    running = [number for number in queue(shared) if number not in waiting]
    rows, top = page.page.locator("#queue tbody tr"), len(running)
    rows.nth(top + 2).drag_to(rows.nth(top), target_position={"x": 200, "y": 4})
    until(lambda: queue(shared) == [*running, third, first, second], "it is moved to the front")
    page.page.wait_for_selector(f"#queue tbody tr:nth-child({top + 1}) >> text={third} · third")
    rows.nth(top).drag_to(rows.nth(top + 2), target_position={"x": 200, "y": 30})
    until(lambda: queue(shared) == [*running, first, second, third], "it is moved to the end")


def test_a_move_that_came_too_late_is_told_as_commands_tell_it(
    page: Browser, shared: House, waiting: list[int]
) -> None:
    number = waiting[-1]
    page.ask("import('/page/dom.js').then(dom => { window.old = dom.find('#queue tbody tr:last-child .up'); })")
    shared.client.cancel(number)
    until(lambda: shared.job(number)["state"] == "cancelled", "it is cancelled")
    page.ask("window.old.click()")
    page.page.wait_for_selector("#ask[open]")
    with pytest.raises(UserError) as caught:
        shared.client.move(number, to="first")
    assert page.ask("document.querySelector('#ask p').textContent") == str(caught.value)
    page.page.click("#ask .yes")


@pytest.mark.parametrize("dark", [False, True])
def test_jobs_are_compared_by_their_curves_and_keys(page: Browser, shared: House, dark: bool) -> None:
    page.open(shared.client.page_url(), dark=dark)
    page.page.get_by_label("Compare 1 · evaluated").check()
    page.page.wait_for_selector("#compare >> text=Choose another job")
    page.page.get_by_label("Compare 2 · evaluated").check()
    page.page.get_by_label("Compare 3 · held").check()
    page.page.wait_for_selector("#compare .u-label >> text=3 · held")
    labels = page.page.locator("#compare .u-label").all_text_contents()
    both = [f"{number} · evaluated{more}" for number in (1, 2) for more in ("", ", evaluation")]
    assert labels == ["step", *both, "3 · held"]
    colours = page.ask("[...document.querySelectorAll('#compare .u-marker')].map(mark => mark.style.borderColor)")
    own = page.ask("getComputedStyle(document.documentElement).getPropertyValue('--run-1')")
    assert own == "#3b7fe0" and colours[-5] == colours[-4] != colours[-3] == colours[-2] != colours[-1]
    cells = "[...document.querySelectorAll('.differing tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    table = {name: values for name, *values in page.ask(cells)}
    assert table["Key"] == ["1 · evaluated", "2 · evaluated", "3 · held"]
    assert table["learning_rate"] == ["0.0001", "0.0003", "0.00005"]
    assert table["run_name"] == ["evaluated", "evaluated", "held"]
    assert "model" not in table and "seed" not in table
    box = page.page.locator("#compare .u-over").bounding_box()
    assert box is not None
    page.point(box["x"] + box["width"] - 1, box["y"] + 20)
    values = page.page.locator("#compare .u-value").all_text_contents()
    assert values[0] == "20" and values[-1] == "0.25", "the mouse is at the last step"
    page.page.get_by_label("Compare 1 · evaluated").uncheck()
    page.page.wait_for_selector("#compare .u-label >> text=1 · evaluated", state="detached")
    again = page.ask("[...document.querySelectorAll('#compare .u-marker')].map(mark => mark.style.borderColor)")
    assert again[-1] == colours[-1], "a job keeps its colour"
    page.page.click("#none")
    page.page.wait_for_selector("#compare", state="hidden")


def test_a_late_answer_about_a_job_that_is_no_longer_compared_is_not_shown(page: Browser) -> None:
    page.page.reload()  # or the page has its keys
    compared = page.page.get_by_label("Compare 1 · evaluated")
    with held(page, "/jobs/1/keys"):
        with page.page.expect_request("**/jobs/1/keys"):
            compared.check()
        compared.uncheck()
        page.page.wait_for_selector("#title >> text=3 · held")
        page.ask(
            """new MutationObserver((changes) => {
                window.wasShown ||= changes.some(({ target }) => !target.hidden);
            }).observe(document.querySelector("#compare"), { attributes: true })"""
        )
    assert not page.ask("window.wasShown")


def test_a_late_answer_about_a_job_that_was_chosen_before_is_not_shown(page: Browser) -> None:
    page.page.reload()
    with held(page, "/jobs/1/keys"):
        with page.page.expect_request("**/jobs/1/keys"):
            page.page.click("#done button >> text=1 · evaluated")
        page.page.click("#done button >> text=2 · evaluated")
        page.page.wait_for_selector("#title >> text=2 · evaluated")
        page.ask(
            """(() => {
                const title = document.querySelector("#title");
                window.titles = [];
                new MutationObserver(() => window.titles.push(title.textContent)).observe(title, { childList: true });
            })()"""
        )
    until(lambda: page.ask("window.titles.length"), "the job is shown once more")
    assert set(page.ask("window.titles")) == {"2 · evaluated"}


def test_a_job_shows_the_keys_that_are_not_the_defaults_and_then_all(page: Browser, shared: House) -> None:
    page.page.click("#done button >> text=2 · evaluated")
    page.page.wait_for_selector("#title >> text=2 · evaluated")
    pairs = "[...document.querySelectorAll('{} dt')].map(name => [name.textContent, name.nextSibling.textContent])"
    changed = dict(page.ask(pairs.format("#keys > dl")))
    assert changed == {
        "model": str(shared.home / "model"),
        "dataset": str(shared.home / "text.jsonl"),
        "learning_rate": "0.0003",
        "max_steps": "12",
        "run_name": "evaluated",
    }
    assert not page.page.is_visible("#keys details dl")
    page.page.click("#keys summary")
    every = dict(page.ask(pairs.format("#keys details dl")))
    assert changed.items() < every.items() and every["weight_decay"] == "0" and every["gpu_budget"] == "null"


def test_damaged_keys_are_told_and_all_else_is_shown(page: Browser, shared: House) -> None:
    number = shared.submit("damaged")
    shared.wait_for(number, "waiting")
    (shared.paths.run_folder(number) / "resolved.yaml").write_text("[")
    page.page.click("#queue button >> text=damaged")
    page.page.wait_for_selector("#keys p >> text=[bad-yaml]")
    assert page.page.inner_text("#state").startswith("waiting")


@pytest.mark.parametrize("dark", [False, True])
def test_everything_fits_a_phone(page: Browser, shared: House, dark: bool) -> None:
    page.open(shared.client.page_url(), width=400, height=800, dark=dark)
    page.page.get_by_label("Compare 1 · evaluated").check()
    page.page.get_by_label("Compare 2 · evaluated").check()
    page.page.wait_for_selector("#compare .u-label >> text=2 · evaluated")
    drop(page.page, "job.yaml", f"{JOB}{'x' * 300}: 1\n")
    page.page.wait_for_selector("#answer.refused")
    page.page.click("#keys summary")
    assert page.ask("document.documentElement.scrollWidth") <= 400


def test_the_colours_of_compared_jobs_stand_out_on_both_panels(page: Browser) -> None:
    """WCAG's contrast of 3 for what is drawn. The colours are the same on the light and the dark panel."""

    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for dark in (False, True):
        page.page.emulate_media(color_scheme="dark" if dark else "light")
        named = "getComputedStyle(document.documentElement).getPropertyValue('--{}')"
        panel = light(page.ask(named.format("panel")))
        for number in range(1, 9):
            drawn = light(page.ask(named.format(f"run-{number}")))
            assert (max(panel, drawn) + 0.05) / (min(panel, drawn) + 0.05) >= 3, (number, dark)
