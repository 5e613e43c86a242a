"""Room from jobs that are over: what goes, and above all what stays."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from offmated.jobs.clean import clean
from offmated.jobs.migrate import upgrade
from offmated.jobs.states import JobState
from offmated.jobs.store import Store
from offmated.paths import Paths
from planner.errors import UserError
from planner.run.folder import RunFolder
from planner.run.processes import Process

ME = Process.current()
ENDS = {"done": 0, "failed": 1}
GOES = (
    "checkpoints/step-2/weights",
    "checkpoints/step-4/weights",
    "data/corpus.json",
    "reference/k.npy",
    "trained/step-4/x",
)
STAYS = ("job.yaml", "resolved.yaml", "plan.json", "metrics.jsonl", "log.txt", "output/model.safetensors")


class Home:
    def __init__(self, folder: Path) -> None:
        self.paths = Paths(state=folder, runtime=Path("/tmp/unused-by-these-tests"))
        self.paths.runs.mkdir()
        self.store = Store(f"sqlite:///{self.paths.database}")
        upgrade(self.store.engine, self.paths)

    def job(self, end: str) -> RunFolder:
        """A job that has ended so, or runs, with all that a run leaves: 1000 bytes a file."""

        def folder(number: int) -> Path:
            self.paths.run_folder(number).mkdir()
            return self.paths.run_folder(number)

        row = self.store.add("job", folder)
        planned = self.store.take(row.id, JobState.PLANNING, ME)
        assert planned is not None
        self.store.end(planned, 0)
        run = RunFolder(Path(row.run_dir))
        begun = self.store.take(row.id, JobState.RUNNING, ME)
        assert begun is not None
        for name in (*GOES, *STAYS):
            (run.path / name).parent.mkdir(parents=True, exist_ok=True)
            (run.path / name).write_bytes(bytes(1000))
        run.log.write_text(1000 * "x")
        if end == "failed":
            run.write_error(UserError("It went wrong.", code="wrong"))
        if end in ENDS:
            self.store.end(begun, ENDS[end])
            run.error.unlink(missing_ok=True)
        return run


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def there(run: RunFolder) -> set[str]:
    return {str(file.relative_to(run.path)) for file in run.path.rglob("*") if file.is_file()}


def test_what_would_go_is_told_and_then_goes_and_the_rest_stays(home: Home) -> None:
    done, failed, running = home.job("done"), home.job("failed"), home.job("running")
    (told,) = clean(home.store, remove=False)
    assert (told.id, told.state, told.bytes) == (1, JobState.DONE, 5000)
    assert there(done) == {*GOES, *STAYS}, "asking removes nothing"
    assert clean(home.store, remove=True) == (told,)
    assert there(done) == set(STAYS)
    assert there(failed) == there(running) == {*GOES, *STAYS}
    assert clean(home.store, remove=True) == ()


def test_a_job_that_failed_keeps_what_it_would_go_on_from_unless_that_is_said(home: Home) -> None:
    run = home.job("failed")
    with pytest.raises(UserError) as caught:
        clean(home.store, [1], remove=True)
    assert caught.value.code == "job-unfinished"
    assert home.store.job(1).last_checkpoint_step == 4
    clean(home.store, [1], unfinished=True, remove=True)
    assert there(run) == set(STAYS)
    assert home.store.job(1).last_checkpoint_step is None


@pytest.mark.parametrize(("numbers", "code"), [([1], "job-not-over"), ([7], "no-such-job")])
def test_a_job_that_runs_or_is_not_there_is_refused(home: Home, numbers: list[int], code: str) -> None:
    run = home.job("running")
    with pytest.raises(UserError) as caught:
        clean(home.store, numbers, unfinished=True, remove=True)
    assert caught.value.code == code
    assert there(run) == {*GOES, *STAYS}


def test_only_what_has_been_over_for_long_goes(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.job("done")
    assert clean(home.store, older_s=3600, remove=True) == ()
    later = time.time() + 3601
    monkeypatch.setattr(time, "time", lambda: later)
    assert [job.id for job in clean(home.store, older_s=3600, remove=True)] == [1]


def test_what_a_link_leads_to_stays_and_a_removal_that_was_cut_short_is_done(home: Home, tmp_path: Path) -> None:
    run = home.job("done")
    elsewhere = tmp_path / "elsewhere"
    (run.path / "data").rename(elsewhere)
    (run.path / "data").symlink_to(elsewhere)
    (run.path / ".gone-1").mkdir()
    (run.path / ".gone-1" / "weights").write_bytes(bytes(500))
    (freed,) = clean(home.store, remove=True)
    assert freed.bytes == 4500
    assert (elsewhere / "corpus.json").exists()
    assert there(run) == set(STAYS)


def test_optimizer_states_on_other_disks_go_with_the_checkpoints_and_nothing_else_there(
    home: Home, tmp_path: Path
) -> None:
    run, disks = home.job("done"), [tmp_path / "drive one", tmp_path / "2", tmp_path / "is not there"]
    run.resolved.write_text("disk_paths:\n" + "".join(f"- {disk}\n" for disk in disks))
    photo = disks[0] / "photo.png"
    for disk in disks[:2]:
        run.states_on(str(disk)).mkdir(parents=True)
        (run.states_on(str(disk)) / "states-0a.bin").write_bytes(bytes(700))
    for other in (photo, run.states_on(str(disks[1])) / "photo.png"):
        other.write_bytes(bytes(300))
    (freed,) = clean(home.store, remove=False)
    assert freed.bytes == 5000 + 2 * 700
    assert clean(home.store, remove=True) == (freed,)
    left = sorted(file for disk in disks for file in disk.rglob("*"))
    folder = run.states_on(str(disks[1]))
    assert left == sorted([photo, folder, folder / "photo.png"])
    assert clean(home.store, remove=True) == ()
