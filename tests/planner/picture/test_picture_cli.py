"""`--trace` and `--html`, asked of the planner process and of the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from offmated.cli import main as offmate
from offmated.cli.client import Client
from offmated.cli.pictures import draw_plan
from offmated.paths import Paths
from planner.__main__ import main
from planner.codec import to_json
from planner.errors import UserError
from planner.search.problem import Problem
from tests.support import chains as small
from tests.support.llama import RTX_3060, llama


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to work in, with a state folder of its own."""
    monkeypatch.setenv("OFFMATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path


@pytest.fixture
def files(here: Path) -> Path:
    """chain.json and hardware.json."""
    (here / "chain.json").write_text(json.dumps(to_json(llama(2))))
    (here / "hardware.json").write_text(json.dumps(to_json(replace(RTX_3060, gpu_bytes=10**10, cpu_bytes=10**11))))
    return here


def page_data(file: Path) -> dict[str, Any]:
    text = file.read_text()
    found: dict[str, Any] = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    return found


def test_offmate_plan_draws_what_it_answers(files: Path) -> None:
    words = ["plan", "--chain", "chain.json", "--hardware", "hardware.json"]
    done = CliRunner().invoke(offmate, [*words, "--html", "plan.html", "--trace", "trace.json"])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-2:] == [
        "The timeline is in trace.json; open it at ui.perfetto.dev",
        "The plan as a page is in plan.html",
    ]
    data = page_data(files / "plan.html")
    assert (data["title"], len(data["blocks"])) == ("chain", 4)
    names = {event["name"] for event in json.loads((files / "trace.json").read_text())["traceEvents"]}
    assert {"run@H3:H3.0", "GPU in use"} <= names


def test_json_stays_json_when_a_picture_is_drawn(files: Path) -> None:
    words = ["plan", "--chain", "chain.json", "--hardware", "hardware.json", "--json"]
    done = CliRunner().invoke(offmate, [*words, "--html", "plan.html"])
    answer = json.loads(done.output)
    assert page_data(files / "plan.html")["plan"]["step_s"] == pytest.approx(answer["step_s"])


def test_a_folder_that_is_not_there_is_told_before_anything_is_planned(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["solve", "--chain", "nowhere.json", "--hardware", "hardware.json", "--html", "none/plan.html"]
    assert main(words) == 2
    assert capsys.readouterr().err == (
        "The file none/plan.html cannot be written: there is no such folder.\n"
        "  hint: name another file   [cannot-write]\n"
    )


def plan_file(run: Path) -> Path:
    """plan.json in a job's run folder."""
    chain = small.chain()
    plan = Problem(
        chain=chain,
        hardware=small.HARDWARE,
        gpu_budget_bytes=12_000,
        cpu_budget_bytes=10**6,
        slices=1,
        clip=False,
    ).plan()
    answer = {"plan": to_json(plan), "chain": to_json(chain), "hardware": to_json(small.HARDWARE), "measured": True}
    run.mkdir()
    (run / "plan.json").write_text(json.dumps(answer))
    return run / "plan.json"


def test_a_plan_of_a_run_folder_is_drawn_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_file(here / "run")
    assert main(["picture", str(plan), "--title", "mine", "--html", "plan.html"]) == 0
    assert json.loads(capsys.readouterr().out) == {"drawn": ["plan.html"]}
    data = page_data(here / "plan.html")
    assert (data["title"], data["plan"]["basis"]) == ("mine", "measured on this machine")
    assert main(["picture", str(here / "none.json"), "--html", "plan.html"]) == 2
    assert "There is no plan in" in capsys.readouterr().err


def test_a_jobs_plan_is_drawn_when_it_has_one(here: Path) -> None:
    job = {"id": 3, "name": "mine", "run_dir": str(here / "run")}
    client = Client(Paths.at(here))
    draw_plan(client, job, None, None)
    with pytest.raises(UserError) as told:
        draw_plan(client, job, None, here / "plan.html")
    assert told.value.code == "no-plan"
    plan_file(here / "run")
    draw_plan(client, job, here / "trace.json", here / "plan.html")
    assert page_data(here / "plan.html")["title"] == "mine"
    assert json.loads((here / "trace.json").read_text())["otherData"] == {"title": "mine"}
