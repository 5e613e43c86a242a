"""What people are told of their jobs, by way of apprise to a server of the test's own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from offmated.api.report import MOST, report
from offmated.config import Config
from offmated.jobs import listing, queue_changes
from offmated.jobs.migrate import upgrade
from offmated.jobs.queue_forecast import MOST_NIGHTS, Expected
from offmated.jobs.queue_turns import AT_ONCE, Turn
from offmated.jobs.states import JobState, StopReason
from offmated.jobs.store import Store
from offmated.paths import Paths
from offmated.service import notifier
from offmated.service.notifier import Notifier, forget_others
from offmated.service.notify import address_names, send
from planner.errors import Exit, UserError
from planner.hub import not_reached
from planner.run.folder import RunFolder
from planner.run.processes import Process
from tests.support.daemons import until
from worker.training.metrics import Metrics

ME = Process.current()
ERROR = UserError("It went wrong.", numbers=("3 of 4",), hint="mend it", code="wrong")


class Receiver:
    """A server that keeps what it is sent, and refuses while it is `away`."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.asked = 0
        self.away = False
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                receiver.asked += 1
                if not receiver.away:
                    receiver.got.append(body)
                self.send_response(503 if receiver.away else 200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"json://127.0.0.1:{self.server.server_address[1]}/secret-word"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.server.shutdown()
    made.server.server_close()


class Home:
    """A store, and who tells of it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.paths = Paths.at(folder)
        self.paths.runs.mkdir(parents=True)
        self.store = Store(f"sqlite:///{self.paths.database}")
        upgrade(self.store.engine, self.paths)
        self.environment = {**self.paths.environment(), "OFFMATE_NOTIFY": url}
        self.notifier = self.again()

    def again(self, number: int = 0) -> Notifier:
        """That of a daemon that starts now, for the address with this number."""
        names = address_names(self.environment["OFFMATE_NOTIFY"])
        return Notifier(self.store, self.paths.state, self.environment, names[number])

    def add(self, name: str, turn: Turn = AT_ONCE) -> int:
        def folder(number: int) -> Path:
            self.paths.run_folder(number).mkdir()
            return self.paths.run_folder(number)

        number = self.store.add(name, folder, turn).id
        if turn.held:
            return number
        planned = self.store.take(number, JobState.PLANNING, ME)
        assert planned is not None
        self.store.end(planned, 0)
        return number

    def end(
        self, number: int, code: int = 0, *, error: UserError | None = None, stop: StopReason | None = None
    ) -> None:
        """Have a job work, and end."""
        row = self.store.take(number, JobState.RUNNING, ME)
        assert row is not None
        run = RunFolder(Path(row.run_dir))
        with Metrics(run.metrics) as metrics:
            metrics.write("start", step=0, total_steps=3)
            for step in (1, 2, 3):
                metrics.write("step", step=step, loss=2.5, step_s=0.5, predicted_step_s=0.4)
            if code == 0:
                metrics.write(
                    "end",
                    step=3,
                    status="done",
                    output="/models/it",
                    step_s=0.5,
                    predicted_step_s=0.4,
                    measured_steps=3,
                )
        if error is not None:
            run.write_error(error)
        if stop is not None:
            self.store.stop(number, stop)
        self.store.end(row, code)

    def titles(self) -> list[str]:
        """All there is to tell now, as though each was taken at once."""
        found = []
        while (message := self.notifier.next()) is not None:
            found.append(message.title)
            self.notifier.taken(message)
            assert len(found) < 10
        return found


@pytest.fixture
def home(tmp_path: Path, receiver: Receiver) -> Home:
    made = Home(tmp_path, receiver.url)
    assert made.titles() == []
    return made


def test_a_done_and_a_failed_job_arrive_at_the_address_once(home: Home, receiver: Receiver) -> None:
    home.end(home.add("pydoc"))
    home.add("next")

    def told(count: int) -> bool:
        home.notifier.tick()
        return len(receiver.got) >= count and home.notifier._sending is None

    until(lambda: told(1), "the message has come")
    assert receiver.got[0]["title"] == "offmate: job 1 (pydoc) is done"
    assert receiver.got[0]["message"] == "/models/it"
    home.end(2, 1, error=ERROR)
    home.add("another")
    home.notifier = home.again()  # what was told survives a daemon
    until(lambda: told(2), "the other has come")
    assert receiver.got[1]["title"] == "offmate: job 2 (next) has failed"
    assert receiver.got[1]["message"] == "It went wrong.\n3 of 4\nmend it"
    assert home.notifier.next() is None


def test_a_server_that_is_away_is_asked_again_and_nothing_is_lost(
    home: Home, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notifier, "FIRST_DELAY_S", 0.0)
    receiver.away = True
    home.end(home.add("pydoc"))
    home.notifier = home.again()

    def tried() -> bool:
        home.notifier.tick()
        return receiver.asked > 1

    until(tried, "it was tried again")
    receiver.away = False
    until(lambda: home.notifier.tick() or receiver.got, "it has come")  # type: ignore[func-returns-value]
    assert "was not told" in caplog.text and "secret-word" not in caplog.text


def test_an_address_that_does_not_answer_keeps_no_other_waiting_and_has_it_sent_once(
    home: Home, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "FIRST_DELAY_S", 0.0)
    home.environment["OFFMATE_NOTIFY"] += " json://127.0.0.1:1/other-word"
    good, dead = home.again(), home.again(1)
    assert (good.next(), dead.next()) == (None, None)
    home.end(home.add("pydoc"))
    home.add("next")
    refused: list[str] = []
    monkeypatch.setattr(notifier.log, "warning", lambda *words: refused.append(str(words)))

    def tried() -> bool:
        good.tick()
        dead.tick()
        return len(refused) > 1 and len(receiver.got) > 0 and good._sending is None

    until(tried, "one was told, the other refused twice")
    assert (len(receiver.got), good.next(), home.again().next()) == (1, None, None)
    waiting = home.again(1).next()
    assert waiting is not None and waiting.title == "job 1 (pydoc) is done"


def test_many_cancelled_jobs_silence_nobody(home: Home) -> None:
    for _ in range(listing.FORESEEN + 1):
        home.store.stop(home.add("gone", Turn(held=True)), StopReason.CANCEL)
    home.end(home.add("pydoc"))
    message = home.notifier.next()
    assert message is not None and message.title == "job 52 (pydoc) is done"


def test_what_ended_while_nobody_was_to_be_told_is_no_news_later(home: Home) -> None:
    here = address_names(home.environment["OFFMATE_NOTIFY"])
    forget_others(home.store, here)
    home.end(home.add("pydoc"))
    home.end(home.add("other"))
    assert home.again().next() is not None
    queue_changes.pause_all(home.store)
    forget_others(home.store, ())
    assert home.again().next() is None
    assert queue_changes.is_paused(home.store), "other wishes stay"


def test_several_at_once_are_one_message_and_cancelled_ones_none(home: Home) -> None:
    one, other, gone = home.add("a"), home.add("b"), home.add("c")
    home.add("another")
    home.end(one)
    home.end(other, 1, error=ERROR)
    home.store.stop(gone, StopReason.CANCEL)
    message = home.notifier.next()
    assert message is not None
    assert (message.title, message.body) == ("2 jobs have ended", "job 1 (a) is done\njob 2 (b) has failed")
    home.notifier.taken(message)
    assert home.notifier.next() is None


def test_a_job_without_room_is_told_once_an_attempt(home: Home) -> None:
    full = UserError("full", code="disk-full", exit_code=Exit.FAILED)
    number = home.add("big")
    home.end(number, 1, error=full)
    assert home.titles() == ["job 1 (big) needs room"]
    assert home.titles() == []


def test_the_report_comes_when_the_queue_is_empty_and_when_a_window_has_ended(home: Home) -> None:
    home.end(home.add("a"))
    home.end(home.add("b"))
    assert home.titles() == ["2 jobs have ended", "report: 2 done; the queue is empty"]
    assert home.titles() == []
    held = home.add("held", Turn(held=True))
    home.end(home.add("c"))
    home.end(home.add("d"))
    assert home.titles() == ["2 jobs have ended", "report: 2 done; 1 in the queue"], "what is held works no more either"
    home.store.stop(held, StopReason.CANCEL)
    night = home.add("long", Turn(window="23:00-07:00"))
    home.end(night, Exit.STOPPED, stop=StopReason.WINDOW)
    queue_changes.until_next_window(home.store, home.store.job(night))
    assert home.titles() == ["report: 1 cancelled; 1 in the queue"]
    assert home.titles() == []


def test_the_report_does_not_come_while_a_job_waits_for_the_hub_which_it_asks_again(home: Home) -> None:
    offline = home.add("offline")
    home.end(offline, 1, error=not_reached("the dataset a/b", TimeoutError()))
    home.end(home.add("a"))
    home.end(home.add("b"))
    assert home.titles() == ["2 jobs have ended"]
    home.store.stop(offline, StopReason.CANCEL)
    assert home.titles() == ["report: 2 done, 1 cancelled; the queue is empty"]


def test_the_report_tells_what_ran_step_times_against_the_plan_and_what_is_next(home: Home) -> None:
    since = time.time() - 1
    home.end(home.add("a"))
    home.end(home.add("b"), 1, error=ERROR)
    home.add("c", Turn(held=True))
    found = report(home.store, since)
    assert found["title"] == "1 done, 1 failed; 1 in the queue"
    assert found["lines"][0].startswith("1 a: done; loss 2.500; 3 steps of 500.0 ms, planned 400.0 ms; ")
    assert found["lines"][1:] == ["2 b: failed: It went wrong.", "next: 3 c: held: offmate release 3"]
    assert report(home.store, time.time() + 1)["title"] == "no job has ended; 1 in the queue"


def test_the_report_counts_all_that_ended_and_lists_the_last_of_them(home: Home) -> None:
    since = time.time() - 1
    for number in range(MOST + 2):
        home.end(home.add(f"j{number}"), *([1] if number == MOST + 1 else []))
    found = report(home.store, since)
    assert found["title"] == f"{MOST + 1} done, 1 failed; the queue is empty"
    assert found["lines"][0] == "2 that ended before these: offmate status --all"
    assert [line.split()[1] for line in found["lines"][1:]] == [f"j{number}:" for number in range(2, MOST + 2)]


def test_the_report_tells_what_takes_more_nights_than_anybody_plans(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.add("endless", Turn(window="23:00-07:00"))
    monkeypatch.setattr(listing, "forecast", lambda works, now: {1: Expected(starts_at=now, nights=MOST_NIGHTS)})
    assert report(home.store, time.time())["lines"] == ["next: 1 endless, done after many nights"]


@pytest.mark.parametrize(
    ("urls", "code"),
    [
        ("nonsense", "bad-notify"),
        ("json://127.0.0.1:1/secret", "not-notified"),
        ("x://secret", "bad-notify"),
        ("me:secret@example.org", "bad-notify"),
        ("my.secret!word://x", "bad-notify"),
        ("://secret", "bad-notify"),
    ],
)
def test_an_address_that_does_not_work_is_told_without_its_secrets(urls: str, code: str) -> None:
    with pytest.raises(UserError) as caught:
        send(urls, "title", "body")
    assert caught.value.code == code
    assert "secret" not in str(caught.value)


def test_the_settings_show_no_address(tmp_path: Path) -> None:
    assert "secret" not in repr(Config.load(Paths.at(tmp_path), {"OFFMATE_NOTIFY": "mailto://me:secret@example.org"}))
