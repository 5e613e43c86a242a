"""What watching programs are told, and a run's numbers as CSV; of real runs of a real daemon."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

import httpx
import pytest
from click.testing import CliRunner

from offmated.api import monitoring
from offmated.cli import main
from offmated.cli.metrics import COLUMNS, as_csv
from tests.support.daemons import HELD_AT, House, house


@pytest.fixture(scope="module")
def shared() -> Iterator[House]:
    with house() as built:
        yield built


def figures(text: str) -> dict[str, float]:
    """The samples of an answer, each line of which is one, or describes one."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# (HELP|TYPE) [a-z_]+ .+", line), line
            continue
        name, value = line.rsplit(" ", 1)
        assert re.fullmatch(r'[a-z_]+(\{[a-z]+="([^"\\\\]|\\\\.)*"(,[a-z]+="([^"\\\\]|\\\\.)*")*\})?', name), line
        found[name] = float(value)
    return found


def test_figures_of_the_daemon_and_of_the_job_that_runs(shared: House) -> None:
    shared.wait_for(shared.submit("evaluated", steps=4), "done")
    number = shared.submit("held", steps=60)
    shared.wait_until_held(number)
    address, token = shared.client.page_url().split("#")
    assert httpx.get(f"{address}healthz").text == "ok\n"
    assert httpx.get(f"{address}metrics").status_code == 401
    answer = httpx.get(f"{address}metrics", headers={"Authorization": f"Bearer {token}"})
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = figures(answer.text)
    job = f'{{job="{number}",name="held"}}'
    assert found[f"offmate_job_step{job}"] == HELD_AT
    assert (found[f"offmate_job_steps{job}"], found[f"offmate_job_gpu_peak_bytes{job}"]) == (60, 800)
    done = len(list(shared.client.jobs("done")))
    assert (found['offmate_jobs{state="running"}'], found['offmate_jobs{state="done"}']) == (1, done) and done
    assert found['offmate_child_restarts_total{child="broker"}'] == 0
    shared.release(number)


def test_labels_may_hold_anything() -> None:
    assert monitoring._sample("x", {"name": 'a "b" \\ c\nd'}, 3) == 'x{name="a \\"b\\" \\\\ c\\nd"} 3.0'


def test_a_runs_numbers_as_csv(shared: House, monkeypatch: pytest.MonkeyPatch) -> None:
    number = shared.submit("evaluated", steps=4)
    shared.wait_for(number, "done")
    monkeypatch.setenv("OFFMATE_HOME", str(shared.paths.state))
    answer = CliRunner().invoke(main, ["metrics", str(number)])
    assert answer.exit_code == 0
    rows = list(csv.DictReader(io.StringIO(answer.output)))
    assert [(row["step"], row["loss"], row["eval_loss"]) for row in rows] == [
        ("1", "5.0", ""),
        ("2", "2.5", "2.0"),
        ("3", str(5.0 / 3), ""),
        ("4", "1.25", "1.0"),
    ]
    assert rows[0]["tokens"] == "64" and rows[0]["predicted_step_s"] == ""


def test_steps_that_were_done_again_count_once_and_those_that_were_lost_do_not() -> None:
    def step(number: int, loss: float) -> dict[str, object]:
        return {"event": "step", "step": number, "loss": loss}

    start = {"event": "start", "step": 0, "total_steps": 3}
    lines = list(as_csv([start, step(1, 3.0), step(2, 2.0), start | {"step": 1}, step(2, 2.5)]))
    assert lines[0] == ",".join(COLUMNS)
    assert [line.split(",")[:3] for line in lines[1:]] == [["1", "", "3.0"], ["2", "", "2.5"]]
    assert list(as_csv([start, step(1, 3.0), start])) == lines[:1]


def test_figures_of_preferences_have_columns_where_there_are_some() -> None:
    step = {"event": "step", "step": 1, "loss": 1.0}
    plain, *_ = as_csv([step])
    assert plain == ",".join(COLUMNS)
    evaluation = {"event": "eval", "step": 1, "eval_loss": 2.0, "eval_rewards_margins": 0.25}
    names, row = as_csv([step | {"rewards_margins": 0.5, "kl": None}, evaluation])
    assert names == f"{plain},rewards_margins,eval_rewards_margins"
    assert row.endswith(",0.5,0.25")
