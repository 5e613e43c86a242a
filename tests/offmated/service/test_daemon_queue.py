"""The queue's commands against a real daemon with real processes; only planner and trainer are stand-ins. Some tests
take seconds: they start a daemon, its broker and its workers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from offmated.cli import main
from offmated.cli.client import Json
from planner.errors import Exit
from planner.run.folder import RunFolder
from planner.units import printable
from tests.support.daemons import HELD_AT, House, house, until
from tests.support.disks import small_disk


@pytest.fixture(scope="module")
def home() -> Iterator[House]:
    with house() as built:
        yield built


def offmate(house: House, *words: str) -> Result:
    """What the command says, in this process: `test_cli.py` runs the program itself."""
    at_home = [str(house.home / word) if word == "job.yaml" else word for word in words]
    return CliRunner().invoke(main, at_home, prog_name="offmate", env=house.environment)


def said(house: House, *words: str) -> str:
    done = offmate(house, *words)
    assert done.exit_code == 0, done.output
    return done.stdout


def submitted(house: House, name: str, *options: str, steps: int = 3) -> int:
    text = f"model: ./model\ndataset: text.jsonl\nmax_steps: {steps}\nrun_name: {name}\nsave_steps: 1000\n"
    (house.home / "job.yaml").write_text(text)
    number: int = json.loads(said(house, "submit", "job.yaml", "--json", *options))["id"]
    return number


def started(house: House, *numbers: int) -> list[int]:
    """The jobs in the order in which they were started."""
    jobs = [house.job(number) for number in numbers]
    return [job["id"] for job in sorted(jobs, key=lambda job: job["started_at"])]


def paused(house: House, number: int) -> Json:
    """The job, once its trainer has ended and it waits."""
    until(lambda: house.living_trainers(number) == [], "the trainer has ended")
    return house.wait_for(number, "waiting")


def test_a_paused_job_frees_the_gpu_and_goes_on_from_its_checkpoint(home: House) -> None:
    number = submitted(home, "held", steps=60)
    home.wait_until_held(number)
    assert said(home, "pause", str(number)) == f"Job {number} saves a checkpoint and pauses.\n"
    job = paused(home, number)
    assert (job["hold"], job["last_checkpoint_step"], job["crashes"]) == ("paused", HELD_AT, 0)
    assert job["history"][-1]["ending"] == "paused"
    next_one = submitted(home, "next")
    assert home.wait_for(next_one, "done", "failed")["state"] == "done", "others have the GPU meanwhile"
    assert re.search(rf"paused .*offmate resume {number}", said(home, "status"))
    home.release(number)
    assert f"Job {number} is waiting" in said(home, "resume", str(number))
    job = home.wait_for(number, "done", "failed")
    assert (job["state"], job["attempts"], job["hold"]) == ("done", 2, None)
    assert [event["step"] for event in home.events(number) if event["event"] == "start"] == [0, HELD_AT]


def test_a_paused_job_stays_so_when_the_daemon_is_killed_and_starts_again() -> None:
    with house() as own:
        number = submitted(own, "held", steps=60)
        own.wait_until_held(number)
        said(own, "pause", str(number))
        assert own.daemon is not None
        own.daemon.kill()
        own.daemon.wait()
        own.release(number)
        own.up()
        paused(own, number)
        other = submitted(own, "other")
        own.wait_for(other, "done")
        assert own.job(number)["state"] == "waiting"
        said(own, "resume", str(number))
        assert own.wait_for(number, "done", "failed")["state"] == "done"


def test_a_paused_machine_works_on_nothing_and_goes_on_when_resumed(home: House) -> None:
    number = submitted(home, "held", steps=60)
    home.wait_until_held(number)
    assert said(home, "pause").startswith("No job runs until offmate resume")
    try:
        paused(home, number)
        other = submitted(home, "other")
        assert home.job(other)["reason"] == "the machine is paused: offmate resume"
        said(home, "cancel", str(other))
        place = f"place {home.job(number)['place'] + 1} in the queue: the machine is paused: offmate resume."
        assert said(home, "retry", str(other)).endswith(f" it has no checkpoint; {place}\n")
        home.release(number)
    finally:
        said(home, "resume")
    for one in (number, other):
        assert home.wait_for(one, "done", "failed")["state"] == "done"
    assert (home.job(number)["attempts"], home.job(number)["crashes"]) == (2, 0)


def test_a_job_without_room_waits_leaves_the_gpu_to_others_and_goes_on_by_itself(home: House) -> None:
    with small_disk(2**20) as disk:
        ballast = disk / "somebody's"
        ballast.write_bytes(bytes(3 * 2**18))
        number = submitted(home, "needy", "--hold", steps=HELD_AT + 5)
        (home.paths.run_folder(number) / "disk").write_text(str(disk))
        said(home, "release", str(number))
        until(lambda: home.job(number)["hold"] == "no-room", "it has no room")
        told = r"waiting for room .* 256\.0 KiB missing at .*; goes on by itself"
        assert re.search(told, said(home, "status"), re.MULTILINE)
        reason = home.job(number)["reason"]
        assert reason.startswith("waiting for room: 256.0 KiB missing"), "for programs it is all in one"
        other = submitted(home, "other")
        assert home.wait_for(other, "done", "failed")["state"] == "done"
        ballast.unlink()
        job = home.wait_for(number, "done", "failed")
    assert (job["state"], job["crashes"], job["error"]) == ("done", 0, None)


def test_a_job_that_does_not_reach_the_hub_waits_for_it_while_others_are_planned() -> None:
    with house() as own:
        number = submitted(own, "offline")
        until(lambda: own.job(number)["hold"] == "no-hub", "it waits for the hub")
        assert re.search(r"submitted +waits for the hub; tried again at \d\d:\d\d$", said(own, "status"), re.MULTILINE)
        assert own.wait_for(submitted(own, "other"), "done", "failed")["state"] == "done"
        assert own.daemon is not None
        own.daemon.kill()
        own.daemon.wait()
        own.up()
        assert own.job(number)["hold"] == "no-hub"
        said(own, "resume", str(number))  # at once
        until(lambda: own.job(number)["hold"] == "no-hub", "it asked in vain")
        first, second = logged(own, number)
        words = r"waits for the hub, tried again at \d\d:\d\d: The Hugging Face hub cannot be reached for the config of"
        assert re.search(words, first) and re.search(words, second)
        gone = submitted(own, "offline")
        until(lambda: own.job(gone)["hold"] == "no-hub", "it waits for the hub")
        assert said(own, "cancel", str(gone)).startswith(f"Job {gone} is cancelled.")
        own.release(number)
        said(own, "resume", str(number))
        job = own.wait_for(number, "done", "failed")
        assert (job["state"], job["crashes"], job["error"]) == ("done", 0, None)


def logged(house: House, number: int) -> list[str]:
    """What a job's log says of its tries, once it says so of the last."""
    log = RunFolder(house.paths.run_folder(number)).log
    until(lambda: log.read_text().count("hub") >= 2, "the log says so")
    planning, *lines = log.read_text().splitlines()
    assert planning.endswith("planning")
    return [line for line in lines if not line.startswith("planner here") and "reading the data" not in line]


def test_jobs_have_their_turns_as_they_were_submitted_moved_and_held(home: House) -> None:
    first = submitted(home, "held", steps=30)
    home.wait_until_held(first)
    plain, urgent = submitted(home, "plain"), submitted(home, "b", "--priority", "5")
    held = submitted(home, "c", "--hold")
    behind = submitted(home, "d", "--after", str(plain), "--priority", "9")
    last = submitted(home, "e", "--label", "night")
    for number in (plain, urgent, behind, last):
        home.wait_for(number, "waiting")
    assert f"place 2: waits for job {first}" in said(home, "move", str(last), "--first")
    (line,) = said(home, "status", "--label", "night").splitlines()[1:]
    assert line.split()[1:3] == ["e", "[night]"]
    reasons = {job["id"]: job["reason"] for job in home.client.queue()}
    assert reasons[held] == f"held: offmate release {held}"
    assert reasons[behind] == f"begins after job {plain}, which is waiting"
    home.release(first)
    for number in (plain, urgent, behind, last):
        home.wait_for(number, "done")
    assert started(home, plain, urgent, behind, last) == [last, urgent, plain, behind]
    assert home.job(held)["state"] == "submitted"
    said(home, "release", str(held))
    assert home.wait_for(held, "done", "failed")["state"] == "done"


def test_a_job_out_of_memory_is_planned_again_with_less_and_fails_only_after_some_tries(home: House) -> None:
    hungry, insatiable = submitted(home, "hungry", steps=9), submitted(home, "insatiable", steps=40)
    job = home.wait_for(hungry, "done", "failed")
    assert (job["state"], job["attempts"], job["crashes"]) == ("done", 3, 0)
    assert [attempt["from_step"] for attempt in job["history"]] == [None, 2, 4], "from its checkpoint"
    assert "The GPU ran out of memory" in job["history"][0]["ending"]
    log = "".join(home.client.logs(hungry))
    assert "planned again with gpu_budget 920 B, before 1000 B, to go on from step 2; try 1 of 3" in log
    assert "planned again with gpu_budget 846 B, before 920 B, to go on from step 4; try 2 of 3" in log
    job = home.wait_for(insatiable, "done", "failed")
    assert (job["state"], job["attempts"], job["error"]["code"]) == ("failed", 4, "out-of-memory")


def test_wait_ends_with_the_jobs_and_says_how(home: House) -> None:
    right, wrong = submitted(home, "right", "--label", "both"), submitted(home, "wrong", "--label", "both")
    done = offmate(home, "wait", str(right), str(wrong))
    assert done.exit_code == Exit.FAILED
    assert f"Job {right} is done" in done.stdout
    assert f"Job {wrong} has failed." in done.stdout
    assert offmate(home, "wait", str(right)).exit_code == 0
    assert offmate(home, "wait", "--label", "both").exit_code == 0, "none is left"
    assert offmate(home, "wait", "99999").exit_code == Exit.NO_SUCH_JOB


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("move", "1"), Exit.USAGE),
        (("move", "1", "--first", "--priority", "3"), Exit.USAGE),
        (("hold", "99999"), Exit.NO_SUCH_JOB),
        (("pause", "x"), Exit.USAGE),
        (("resume", "1"), Exit.USAGE),
        (("submit", "job.yaml", "--begin", "soon"), Exit.USAGE),
        (("submit", "job.yaml", "--after", "9999"), 4),
        (("submit", "job.yaml", "--priority", "1001"), Exit.USAGE),
    ],
)
def test_what_cannot_be_done_is_said_without_a_traceback(home: House, words: tuple[str, ...], code: int) -> None:
    submitted(home, "there")
    done = offmate(home, *words)
    assert done.exit_code == code, done.stderr
    assert done.stderr and isinstance(done.exception, SystemExit), done.exception


def test_no_name_steers_what_commands_say_and_json_has_it_whole(home: House) -> None:
    name = "a\N{RIGHT-TO-LEFT OVERRIDE}b\N{ZERO WIDTH SPACE}c"
    text = "model: ./model\ndataset: text.jsonl\nmax_steps: 3\n"
    setting = f"wandb_project={name}"
    number = home.client.submit(text, str(home.home), f"{name}.yaml", {"held": True}, settings=[setting])["id"]
    for words in (("status",), ("show", str(number)), ("report",), ("hold", str(number)), ("cancel", str(number))):
        told = said(home, *words)
        assert printable(told) == told and str(number) in told, words
    assert 'a\ufffdb\ufffdc wandb_project="a\ufffdb\ufffdc"' in said(home, "status")
    told = said(home, "status", "--json")
    assert printable(told) == told
    (job,) = (job for job in json.loads(told) if job["id"] == number)
    assert job["settings"] == [f'wandb_project="{name}"'], "for programs it is what it was"
