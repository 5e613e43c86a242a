"""`offmate clean`, `rerun`, and `status` of a paused machine, as people type them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from offmated.cli import main
from offmated.jobs.states import JobState
from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.run.processes import Process
from tests.support.served import JOB, Served, served

ME = Process.current()


@pytest.fixture
def home() -> Iterator[Served]:
    with served() as built:
        yield built


def offmate(home: Served, *words: str) -> Result:
    return CliRunner().invoke(main, words, prog_name="offmate", env=home.paths.environment())


def test_a_paused_machine_says_so_also_with_an_empty_queue(home: Served) -> None:
    assert "paused" not in offmate(home, "status").stdout
    offmate(home, "pause")
    assert offmate(home, "status").stdout.splitlines() == [
        "No jobs.  offmate submit job.yaml",
        "The machine is paused: no job runs until offmate resume.",
    ]
    offmate(home, "resume")


def test_clean_says_how_much_and_removes_nothing_unasked(home: Served) -> None:
    row = home.store.job(home.client.submit(JOB, str(home.folder))["id"])
    for phase in (JobState.PLANNING, JobState.RUNNING):
        taken = home.store.take(row.id, phase, ME)
        assert taken is not None
        if phase is JobState.RUNNING:
            saved = Path(row.run_dir) / "checkpoints" / "step-3" / "weights"
            saved.parent.mkdir(parents=True)
            saved.write_bytes(bytes(2**21))
        home.store.end(taken, 0)
    assert offmate(home, "clean").stdout.splitlines()[-1] == "0 B are free again.", "it is not old enough"
    done = offmate(home, "clean", "--days", "0")
    assert (done.exit_code, saved.exists()) == (Exit.USAGE, True)
    assert done.stdout.splitlines()[1].split()[-2:] == ["2.0", "MiB"]
    assert "Nothing was removed: 2.0 MiB could be." in done.stderr and "--yes" in done.stderr
    found = json.loads(offmate(home, "clean", "--days", "0", "--yes", "--json").stdout)
    assert (found["bytes"], saved.exists()) == (2**21, False)
    assert offmate(home, "clean", "99").exit_code == Exit.NO_SUCH_JOB


def test_a_job_is_handed_in_once_more_and_its_model_does_not_go_where_the_first_one_is(home: Served) -> None:
    out = home.folder / "out"
    text = f"{JOB}output_dir: {out}\nlearning_rate: 3.0e-4\nrun_name: first\n"
    first = home.client.submit(text, str(home.folder))["id"]
    again = json.loads(offmate(home, "rerun", str(first), "--label", "again", "--hold", "--json").stdout)
    assert (again["name"], again["label"], again["hold"]) == ("first", "again", "held")
    assert again["id"] > first
    assert [str(first) in note for note in again["notes"]] == [True, True]
    jobs = [Job.from_resolved(home.paths.run_folder(number) / "resolved.yaml") for number in (first, again["id"])]
    assert jobs[0].model_copy(update={"output_dir": None}) == jobs[1]
    assert Job.load(home.paths.run_folder(again["id"]) / "job.yaml").learning_rate == 3e-4
    assert offmate(home, "rerun", "99").exit_code == Exit.NO_SUCH_JOB


def test_a_job_that_is_held_or_has_a_window_says_what_releases_it_and_what_that_takes(home: Served) -> None:
    (home.folder / "job.yaml").write_text(JOB)
    told = offmate(home, "submit", str(home.folder / "job.yaml"), "--hold", "--window", "23:00-07:00").stdout
    number = told.split()[1]
    assert f"held        until offmate release {number}" in told, told
    said = offmate(home, "release", number).stdout
    assert said.endswith(" Its window 23:00-07:00 no longer counts.\n")
    offmate(home, "hold", number)
    assert "window" not in offmate(home, "release", number).stdout


def test_several_jobs_are_changed_at_once_and_one_that_cannot_be_keeps_no_other_from_it(home: Served) -> None:
    first, second = (str(home.client.submit(JOB, str(home.folder))["id"]) for _ in range(2))
    for command, words in (("hold", "held"), ("release", "waits for"), ("pause", "paused"), ("resume", "waits for")):
        done = offmate(home, command, first, "9999", second, first)
        lines = done.stdout.splitlines()
        assert [line.split()[1] for line in lines] == [first, second] and words in lines[1], done.output
        assert command in ("release", "resume") or words in lines[0], done.output
        assert (done.exit_code, done.stderr.splitlines()[0]) == (Exit.NO_SUCH_JOB, "There is no job 9999.")
    done = offmate(home, "cancel", first, second)
    assert (done.exit_code, done.stdout.count(" is cancelled.  ")) == (Exit.DONE, 2)
    again = offmate(home, "cancel", second, first)
    assert (again.exit_code, again.stderr.count("[job-ended]")) == (Exit.USAGE, 2)
    tried = offmate(home, "retry", first, second, "9999", "--json")
    assert [str(job["id"]) for job in json.loads(tried.stdout)] == [first, second]
    assert tried.exit_code == Exit.NO_SUCH_JOB
    assert json.loads(offmate(home, "cancel", first, "--json").stdout)["state"] == "cancelled"
    offmate(home, "cancel", second)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--priority", "5000"],
            "--priority 5000 is not a priority.\n"
            "  hint: a whole number from -1000 to 1000; the default is 0   [bad-priority]\n",
        ),
        (["--priority", "high"], "--priority high is not a priority.\n"),
        (
            ["--begin", "soon"],
            '--begin soon is not a time.\n  hint: write 23:00, "2026-12-24 18:00" or +2h30m   [bad-time]\n',
        ),
        (["--begin", "+99999999999d"], "--begin +99999999999d is not a time.\n"),
    ],
)
def test_an_option_that_is_none_is_told_as_all_errors_are(home: Served, words: list[str], said: str) -> None:
    done = offmate(home, "submit", "job.yaml", *words)
    assert done.exit_code == Exit.USAGE and done.stderr.startswith(said)


def test_a_job_goes_on_by_a_request_of_its_own_and_a_word_that_is_not_known_is_refused(home: Served) -> None:
    first = home.client.submit(f"{JOB}max_steps: 2\n", str(home.folder))["id"]
    for phase in (JobState.PLANNING, JobState.RUNNING):
        taken = home.store.take(first, phase, ME)
        assert taken is not None
        home.store.end(taken, 0)
    saved = home.paths.run_folder(first) / "checkpoints" / "step-2" / "manifest.json"
    saved.parent.mkdir(parents=True)
    saved.write_text("{}")
    more = json.loads(offmate(home, "rerun", str(first), "--max-steps", "5", "--json").stdout)
    assert Job.from_resolved(home.paths.run_folder(more["id"]) / "resolved.yaml").max_steps == 5
    with pytest.raises(UserError) as refused:
        home.client._object("POST", f"/jobs/{first}/rerun", {"max_steps": 5})
    assert refused.value.code == "bad-request"


def test_a_model_is_asked_once_no_job_has_the_gpu_and_export_may_be_told_to_merge(home: Served) -> None:
    number = home.client.submit(JOB, str(home.folder))["id"]
    for phase in (JobState.PLANNING, JobState.RUNNING):
        taken = home.store.take(number, phase, ME)
        assert taken is not None
        if phase is JobState.PLANNING:
            home.store.end(taken, 0)
    asked = offmate(home, "sample", str(number), "hi", "--raw")
    assert (asked.exit_code, "[gpu-busy]" in asked.stderr) == (Exit.USAGE, True)
    assert "or type offmate pause, and offmate resume afterwards" in asked.stderr
    home.store.end(taken, 0)
    assert offmate(home, "export", "99", "merged", "--merge").exit_code == Exit.NO_SUCH_JOB, "the option is known"
