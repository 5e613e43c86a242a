"""What commands print, from what the API says."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from rich.console import Console, RenderableType

from offmated.api.report import _figures
from offmated.cli import job_view
from offmated.cli.client import Client
from offmated.cli.follow import News, is_rehearsed
from offmated.cli.plan_view import option_runs
from offmated.jobs.job_text import with_value
from planner.codec import to_json
from planner.errors import UserError
from planner.reports.make_receipt import reference_words
from planner.run.events import Piece
from planner.schedule.items import Item
from planner.schedule.plan import Plan, Stage, stage_order

PLAN = Plan(
    stages=tuple(
        Stage(
            block=block,
            direction=direction,
            prefetch=(Item("w:b1.up"),) if (str(direction), block) == ("F", 0) else (),
            offload=(Item("g:b1.up"), Item("s:b1.up")) if (str(direction), block) == ("B", 1) else (),
            cpu_update=("b1.up",) if (str(direction), block) == ("B", 0) else (),
            gpu_update=("b0.up", "b3.up") if (str(direction), block) == ("B", 0) else (),
        )
        for direction, block in stage_order(4)
    ),
    options=("keep", "recompute", "recompute", "keep"),
    resident=(),
    slices=2,
    step_s=0.5,
    bound_s=0.4,
    gpu_peak_bytes=90 * 2**20,
    gpu_budget_bytes=97 * 2**20,
    cpu_peak_bytes=2**30,
    cpu_budget_bytes=2**34,
    source="oilp",
)
DOCUMENT = {"plan": to_json(PLAN), "rows": 4, "length": 256, "measured": True, "cached": False, "solve_s": 1.5}
JOB: dict[str, Any] = {
    "id": 3,
    "name": "pydoc",
    "state": "running",
    "reason": "",
    "run_dir": "/runs/3",
    "output": None,
    "error": None,
    "created_at": 0.0,
    "started_at": None,
    "ended_at": None,
    "notes": ["mind this"],
    "history": [],
    "last_checkpoint_step": None,
    "label": None,
    "window": None,
    "priority": 0,
    "attempts": 1,
    "hold": None,
    "settings": [],
    "standing": "running",
    "expected": {"starts_at": None, "ends_at": None, "nights": 0},
    "progress": {"step": 120, "total_steps": 200, "loss": 2.3456, "eval_loss": 2.4567, "eta_s": 80.0},
    "plan": {"step_s": 0.5},
    "predicted": {"step_s": 0.5, "gpu_peak_bytes": 90 * 2**20},
    "measured": {"step_s": 0.55, "steps": 118, "gpu_peak_bytes": 89 * 2**20},
}
ERROR = {
    "what": "No schedule fits.",
    "numbers": ["budget 1.0 GiB"],
    "hint": "gpu_budget: 8GiB",
    "code": "budget-too-small",
    "exit_code": 3,
}


def printed(what: RenderableType) -> list[str]:
    """The lines of `what` in a pipe, without the spaces that end them."""
    console = Console(width=1000, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(what)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_plan_is_told_in_nine_lines() -> None:
    assert printed(job_view.plan(DOCUMENT)) == [
        "plan         oilp, made in 1.5 s; measured on this machine",
        "batch        2 micro-batches × 4 rows × 256 tokens = 2048 tokens a step at most; "
        "through each block in 1 round of all 2 slices",
        "step         500.0 ms predicted for full rows",
        "             rough, because memory is so tight that the solver found no plan, and another method did: "
        "within 25.0% of what any schedule takes (400.0 ms)",
        "GPU memory   peak 90.0 MiB of 97.0 MiB, with full rows",
        "host memory  peak 1.0 GiB of 16.0 GiB",
        "blocks       0 keep · 1–2 recompute · 3 keep",
        "updates      1 tensor on the CPU, 2 on the GPU",
        "transfers    up 1 weight; down 1 gradient, 1 optimizer state",
    ]


def test_a_batch_is_told_in_rows_tokens_and_rounds() -> None:
    def batch(rounds: int, slices: int, **rest: Any) -> list[str]:
        plan = to_json(replace(PLAN, rounds=rounds, slices=slices))
        lines = printed(job_view.plan(DOCUMENT | {"plan": plan} | rest))
        return [line.removeprefix("batch").strip() for line in lines[1:3] if line.startswith(("batch", " "))]

    assert batch(1, 1) == ["1 micro-batch × 4 rows × 256 tokens = 1024 tokens a step at most"]
    assert batch(2, 3, rows=1) == [
        "6 micro-batches × 1 row × 256 tokens = 1536 tokens a step at most; through each block in 2 rounds of 3 slices"
    ]
    splits = [{"rows": 4, "slices": 1, "step_s": 0.5}, {"rows": 2, "slices": 2, "step_s": 0.75}]
    assert batch(1, 1, splits=splits)[1] == "the split is the planner's choice; compared by estimate: 2 × 2 (750.0 ms)"


def test_neighbours_treated_alike_are_told_together() -> None:
    assert list(option_runs(["a"])) == ["0 a"]
    assert list(option_runs(["a", "b", "b", "b", "a"])) == ["0 a", "1–3 b", "4 a"]


def test_a_submission_tells_place_folder_notes_and_next_commands() -> None:
    assert printed(job_view.submitted(JOB | {"place": 2})) == [
        "Job 3 (pydoc) is submitted, place 2 in the queue.",
        "run folder  /runs/3",
        "note        mind this",
        "next        offmate status · offmate logs -f 3 · offmate show 3 · offmate cancel 3",
    ]
    for hold, told in (("held", ["held        until offmate release 3"]), ("no-hub", [])):
        lines = printed(job_view.submitted(JOB | {"place": 2, "hold": hold}))
        assert [line for line in lines if line.startswith("held")] == told


def test_the_last_words_of_a_submission_say_whether_the_job_has_shown_that_it_runs() -> None:
    steps = {"step": 12, "total_steps": 100, "step_s": 0.5}
    runs = JOB | {"state": "running", "kept": False, "progress": steps}
    assert is_rehearsed(runs)
    assert printed(job_view.rehearsed(runs)) == [
        "Job 3 has done its first 12 steps, 500.0 ms each. It goes on.  offmate logs -f 3"
    ]
    assert not is_rehearsed(runs | {"progress": steps | {"step": 9}})
    assert is_rehearsed(runs | {"progress": steps | {"step": 4, "total_steps": 4}})
    assert not is_rehearsed(JOB | {"state": "submitted", "kept": False, "progress": None})
    held = JOB | {"state": "waiting", "kept": True, "progress": None, "reason": "held: offmate release 3"}
    assert is_rehearsed(held)
    assert printed(job_view.rehearsed(held)) == [
        "Job 3 is queued and starts by itself later: held: offmate release 3.  offmate logs -f 3"
    ]


def test_a_change_of_a_job_that_is_worked_on_tells_what_becomes_of_it() -> None:
    def told(state: str, hold: str | None, stop_reason: str | None = None, reason: str = "") -> str:
        job = JOB | {"state": state, "hold": hold, "stop_reason": stop_reason, "reason": reason, "place": 1}
        job["standing"] = hold if state == "waiting" else state
        return job_view.changed(job)

    assert told("running", "paused") == "Job 3 saves a checkpoint and pauses."
    assert told("running", "paused", "pause", "saves a checkpoint to pause") == "Job 3 saves a checkpoint to pause."
    assert told("running", None) == "Job 3 runs."
    assert told("planning", "held") == "Job 3 is being planned, and then waits: offmate resume 3."
    assert told("planning", None) == "Job 3 is being planned."
    held = told("waiting", "held", reason="held: offmate release 3")
    assert held == "Job 3 is held, place 1: offmate release 3."


def test_a_beginning_is_not_called_an_end() -> None:
    begun = time.time() + 3600
    for expected, name in (
        ({"starts_at": begun, "ends_at": None, "nights": 0}, "begins"),
        ({"starts_at": begun, "ends_at": begun + 60, "nights": 1}, "done by"),
        ({"starts_at": begun, "ends_at": None, "nights": 100}, "done by"),
    ):
        waiting = JOB | {"state": "waiting", "place": 1, "expected": expected}
        for lines in (printed(job_view.submitted(waiting)), printed(job_view.job(waiting, DOCUMENT))):
            (line,) = (line for line in lines if line.startswith(("begins", "done by")))
            assert line.startswith(name) and line.count("begins") == (name == "begins")


def test_status_tells_progress_loss_time_left_and_reason() -> None:
    waiting = JOB | {
        "id": 4,
        "state": "waiting",
        "standing": "waiting",
        "progress": None,
        "reason": "waits for job 3",
    }
    assert [line.split() for line in printed(job_view.jobs([JOB, waiting]))] == [
        ["ID", "NAME", "STATE", "PROGRESS", "LEFT", "DONE", "BY", "REASON"],
        ["3", "pydoc", "running", "120/200", "60%", "loss", "2.346", "eval", "2.457", "80.0", "s"],
        ["4", "pydoc", "waiting", "waits", "for", "job", "3"],
    ]
    begun, ends = time.time() + 3600, time.time() + 7200
    waiting |= {"expected": {"starts_at": begun, "ends_at": None, "nights": 100}}
    assert "many nights  waits" in printed(job_view.jobs([waiting]))[1]
    waiting |= {"expected": {"starts_at": begun, "ends_at": None, "nights": 0}}
    assert f"begins {job_view.wall(begun)}  waits" in printed(job_view.jobs([waiting]))[1]
    waiting |= {"expected": {"starts_at": begun, "ends_at": ends, "nights": 3}}
    assert f"{job_view.wall(ends)}, 3 nights  waits" in printed(job_view.jobs([waiting]))[1]
    assert printed(job_view.jobs([])) == ["No jobs.  offmate submit job.yaml"]


def test_show_tells_predicted_against_measured() -> None:
    lines = printed(job_view.job(JOB, DOCUMENT))
    assert "step time    500.0 ms predicted, 550.0 ms measured (+10.0%), median of 118 steps" in lines
    assert "GPU peak     90.0 MiB predicted, 89.0 MiB measured (-1.1%)" in lines
    assert "blocks       0 keep · 1–2 recompute · 3 keep" in lines
    assert not any(line.startswith(("ended", "model folder")) for line in lines), "what is not known is left out"


def test_show_tells_that_rows_are_shorter_than_the_plan_is_for() -> None:
    short = {
        "predicted": {"step_s": 0.2, "gpu_peak_bytes": 2**20},
        "measured": {"step_s": 0.19, "steps": 9, "gpu_peak_bytes": None},
    }
    (line,) = (line for line in printed(job_view.job(JOB | short, DOCUMENT)) if line.startswith("step time"))
    assert line.removeprefix("step time    ") == (
        "200.0 ms predicted for rows of this length (500.0 ms if full), 190.0 ms measured (-5.0%), median of 9 steps"
    )


def test_show_tells_what_is_predicted_before_it_is_measured() -> None:
    unmeasured = JOB | {"measured": {"step_s": None, "gpu_peak_bytes": None}}
    lines = printed(job_view.job(unmeasured, DOCUMENT))
    assert "step time    500.0 ms predicted, not measured yet" in lines
    assert "GPU peak     90.0 MiB predicted, not measured yet" in lines
    lines = printed(job_view.job(unmeasured | {"state": "failed"}, DOCUMENT))
    assert "step time    500.0 ms predicted, not measured" in lines


def test_show_tells_file_and_budgets_of_a_job_without_a_plan(tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").write_text("model: a/b\ntokenizer: a/b\ndataset: [c/d]\ngpu_budget: 1073741824\n")
    lines = printed(job_view.job(JOB | {"run_dir": str(tmp_path)}, None))
    assert f"job file     {tmp_path}/job.yaml" in lines
    assert "GPU budget   1.0 GiB" in lines
    assert "host budget  not given" in lines
    assert not any("budget" in line for line in printed(job_view.job(JOB | {"run_dir": str(tmp_path)}, DOCUMENT)))


def test_a_plan_of_a_form_to_come_is_said_to_be_one() -> None:
    to_come = DOCUMENT | {"plan": DOCUMENT["plan"] | {"tiers": 3}}
    assert "written by another version of offmate; this version cannot show it" in " ".join(
        printed(job_view.job(JOB, to_come))
    )


def test_show_tells_attempts_where_there_was_more_than_one() -> None:
    ended = {"started_at": 0.0, "ended_at": 60.0, "ending": "cancelled"}
    first = ended | {"number": 1, "from_step": None, "reached_step": 45, "checkpoint_step": 40}
    second = ended | {"number": 2, "from_step": 40, "reached_step": 50, "checkpoint_step": 50}
    third = ended | {"number": 3, "from_step": 50, "reached_step": None, "checkpoint_step": None}
    fourth = {"number": 4, "started_at": 120.0, "from_step": 50, "ended_at": None}
    lines = printed(job_view.job(JOB | {"history": [first, second, third, fourth]}, None))
    at = next(number for number, line in enumerate(lines) if line.startswith("attempts "))
    assert re.fullmatch(
        r"attempts +1  \S+ \S+, from the start to step 45 \(saved at 40\), \S+ \S+: cancelled", lines[at]
    )
    assert re.fullmatch(r" +2  \S+ \S+, from step 40 to step 50, \S+ \S+: cancelled", lines[at + 1])
    assert re.fullmatch(r" +3  \S+ \S+, from step 50, \S+ \S+: cancelled", lines[at + 2])
    assert re.fullmatch(r" +4  \S+ \S+, from step 50", lines[at + 3])
    assert not any("from step" in line for line in printed(job_view.job(JOB | {"history": [fourth]}, None)))


def test_a_job_that_is_tried_again_says_from_where() -> None:
    waiting = JOB | {"place": 1, "kept": False}
    retried = job_view.retried(waiting | {"last_checkpoint_step": 40})
    assert retried == "Job 3 goes on from step 40; place 1 in the queue."
    assert "starts again from the start" in job_view.retried(waiting)
    paused = waiting | {"kept": True, "reason": "the machine is paused: offmate resume", "standing": "submitted"}
    assert job_view.retried(paused).endswith("; place 1 in the queue: the machine is paused: offmate resume.")


def test_an_ending_that_is_not_the_last_word_says_how_to_go_on() -> None:
    hint = "offmate retry 3 starts it again from the start: it has no checkpoint."
    assert printed(job_view.ended(JOB | {"state": "failed", "error": ERROR})) == [
        "Job 3 has failed.",
        *str(UserError.from_json(ERROR)).splitlines(),
        "offmate retry 3 --gpu-budget SIZE tries it again with another budget.",
    ]
    assert printed(job_view.ended(JOB | {"state": "cancelled"})) == ["Job 3 is cancelled.", hint]
    assert job_view.cancelled(JOB | {"state": "cancelled"}) == f"Job 3 is cancelled.  {hint}"
    saved = job_view.cancelled(JOB | {"state": "cancelled", "last_checkpoint_step": 40})
    assert saved == "Job 3 is cancelled.  offmate retry 3 goes on from step 40, its last checkpoint."
    being = "offmate retry 3 goes on from its last checkpoint, or without one from the start."
    assert job_view.cancelled(JOB) == f"Job 3 is being cancelled.  Then {being}"
    never_begun = JOB | {"state": "planning", "attempts": 0}
    assert job_view.cancelled(never_begun).endswith("  Then offmate retry 3 puts it into the queue again.")


def test_show_tells_an_error_as_it_was_raised() -> None:
    failed = JOB | {"state": "failed", "error": ERROR, "progress": None}
    assert printed(job_view.job(failed, None))[-3:] == [
        "No schedule fits.",
        "  budget 1.0 GiB",
        "  hint: gpu_budget: 8GiB   [budget-too-small]",
    ]


@pytest.mark.parametrize(
    ("state", "error", "code"), [("done", None, 0), ("failed", ERROR, 3), ("failed", None, 1), ("cancelled", None, 1)]
)
def test_the_exit_code_of_run_is_the_jobs(state: str, error: object, code: int) -> None:
    assert job_view.exit_code(JOB | {"state": state, "error": error}) == code


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\n",
        "a: 1",
        "a: 1\ngpu_budget: 5GiB # why\nb: 2\n",
        "a: 1\ngpu_budget:\nb: 2\n",
        "{a: 1, gpu_budget: 3}",
        "{a: 1}",
        "---\na: 1\n",
        "%YAML 1.1\n---\na: 1\n...\n",
        "  a: 1\n  b:\n  - 1\n# end",
        "a: |\n  text\n\n",
    ],
)
def test_a_budget_from_the_command_line_is_written_into_the_file_and_nothing_else_changes(text: str) -> None:
    changed = with_value(text, "gpu_budget", "10GiB")
    assert yaml.safe_load(changed) == yaml.safe_load(text) | {"gpu_budget": "10GiB"}
    kept = [line for line in text.splitlines() if "gpu_budget" not in line and "{" not in line]
    assert [line for line in changed.splitlines() if line in kept] == kept


@pytest.mark.parametrize("text", ["", "- a\n", "a: [", "words", "a: " + 5000 * "["])
def test_a_file_that_is_no_mapping_is_left_as_it_is(text: str) -> None:
    assert with_value(text, "gpu_budget", "10GiB") == text


def test_margin_and_accuracy_stand_beside_the_losses_of_preferences() -> None:
    margins = {"rewards_margins": 0.5, "rewards_accuracies": 0.75, "eval_rewards_margins": 0.25, "eval_kl": 0.125}
    job = JOB | {"progress": JOB["progress"] | margins}
    assert job_view.progress(job) == (
        "120/200 60% loss 2.346 margin 0.500 accuracy 0.750 eval 2.457 margin 0.250 kl 0.125"
    )
    report = "loss 2.346, margin 0.500, accuracy 0.750", "evaluation 2.457, margin 0.250, kl 0.125"
    assert tuple(_figures(job | {"measured": {"step_s": None}}))[:2] == report


def test_a_job_whose_reference_scores_its_answers_is_told_so_and_not_waited_for() -> None:
    scoring = "reference: 120 of 900 rows, 4 min left"
    job = JOB | {"progress": None, "kept": False, "reason": f"{scoring}; attempt 2, from the start"}
    assert is_rehearsed(job)
    assert printed(job_view.rehearsed(job)) == [
        f"Job 3 scores its answers before the first step; {scoring}. It goes on.  offmate logs -f 3"
    ]
    screen = Console(width=1000, highlight=False, markup=False)
    client = cast(Client, SimpleNamespace(events=lambda number, position: pieces.pop(0)))
    done = {"event": "reference", "step": 0, "rows": 900, "seconds": 300.0}
    evaluation = {"event": "eval", "step": 1, "eval_loss": 1.0, "eval_rewards_margins": 0.25}
    pieces = [Piece(events=[done, evaluation], position=9), Piece(events=[], position=9)]
    news = News(client, screen)
    with screen.capture() as capture:
        news.tell(job | {"plan": None})
        news.tell(job | {"plan": None, "reason": "", "progress": JOB["progress"] | {"rewards_margins": 0.5}})
        news._line_due = 0.0
        pieces.append(Piece(events=[], position=9))
        news.tell(job | {"plan": None, "reason": "", "progress": JOB["progress"] | {"rewards_margins": 0.5}})
    assert capture.get().splitlines()[1:] == [
        scoring,
        "reference: 900 rows scored in 5 min",
        "step 1 of 200, eval loss 1.000, margin 0.250",
        "step 120 of 200, loss 2.346, margin 0.500, 80.0 s left",
    ]


def test_a_plan_of_pairs_says_so_and_what_comes_before_the_first_step() -> None:
    told = reference_words(0.15, 0.5, "pair")
    lines = printed(job_view.plan(DOCUMENT | {"unit": "pair", "reference": told}))
    assert "2 micro-batches × 4 pairs × 2 × 256 tokens = 4096 tokens a step at most" in lines[1]
    assert told == (
        "before the first step the reference model scores each pair once, forward only: about 30% of an epoch's time, "
        "150.0 ms for as many as a step has"
    )
    assert [line.strip() for line in lines].count(told) == 1
