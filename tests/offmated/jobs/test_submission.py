"""Taking jobs in, with a real database."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from huggingface_hub import constants

from offmated.jobs import retry as again
from offmated.jobs import submission
from offmated.jobs.adopt import adopt
from offmated.jobs.migrate import upgrade
from offmated.jobs.retry import retry
from offmated.jobs.smaller import MOST_NOTCHES, take_a_notch
from offmated.jobs.states import JobState, StopReason
from offmated.jobs.store import Store
from offmated.jobs.submission import rerun, submit, sweep_drafts
from offmated.paths import Paths
from planner.counted import Counted
from planner.errors import Exit, UserError
from planner.job.frozen import changed_packages
from planner.job.output_dir import Place
from planner.job.schema import Job
from planner.machine.this_machine import ram_bytes
from planner.out_of_memory import host_memory_not_registered
from planner.run.folder import RunFolder
from tests.offmated.jobs.conftest import JOB


def test_a_run_folder_that_a_lost_database_knew_is_kept_and_the_user_told(store: Store, paths: Paths) -> None:
    trained = paths.runs / "1" / "output" / "model.safetensors"
    trained.parent.mkdir(parents=True)
    trained.write_text("trained for a week")
    row, notes = submit(store, paths, JOB, paths.state.parent)
    assert row.run_dir == str(paths.runs / "1")
    (aside,) = (folder for folder in paths.runs.iterdir() if folder.name != "1")
    assert aside.name.startswith("1.lost-")
    assert (aside / "output" / "model.safetensors").read_text() == "trained for a week"
    assert not (paths.runs / "1" / "output").exists()
    assert notes[-1].endswith(f"its run folder is now {aside}")


def test_a_job_that_only_waited_when_the_database_was_lost_is_kept_too(store: Store, paths: Paths) -> None:
    row, _ = submit(store, paths, JOB + "run_name: first\n", paths.state.parent)
    new = Store(f"sqlite:///{paths.database}.new")
    upgrade(new.engine, paths)
    another, notes = submit(new, paths, JOB, paths.state.parent)
    assert another.run_dir == row.run_dir and "does not know" in notes[-1]
    assert [taken.name for taken in adopt(new, paths).rows] == ["first"]


def test_drafts_of_submissions_that_were_cut_short_are_swept_and_nothing_else(paths: Paths, tmp_path: Path) -> None:
    empty, half, fuller = (paths.runs / f".new-{letter * 32}" for letter in "abc")
    for draft in (empty, half, fuller):
        draft.mkdir()
    (half / "job.yaml").write_text("model: ")
    (fuller / "output").mkdir()
    mine, link, file = paths.runs / ".new-ideas", paths.runs / f".new-{'d' * 32}", paths.runs / f".new-{'e' * 32}"
    mine.mkdir()
    (tmp_path / "elsewhere").mkdir()
    link.symlink_to(tmp_path / "elsewhere")
    file.write_text("a file")
    (paths.runs / "1").mkdir()
    sweep_drafts(paths)
    assert sorted(paths.runs.iterdir()) == sorted([fuller, mine, link, file, paths.runs / "1"])
    assert (tmp_path / "elsewhere").is_dir()


def test_a_job_that_is_there_already_is_told_of_and_taken_in(store: Store, paths: Paths) -> None:
    home = paths.state.parent

    def told(text: str) -> list[str]:
        _, notes = submit(store, paths, text, home)
        return [note for note in notes if "is the same on the same data" in note]

    assert told(JOB) == []
    assert told(JOB + "run_name: another\nschedule: 23:00-07:00\n") == [
        "job 1, which is submitted, is the same on the same data; offmate cancel 2 takes this one back"
    ], "its name and its hours change nothing"
    assert told(JOB + "seed: 7\n") == [], "another job"
    _, notes = rerun(store, paths, 3)
    assert not any("is the same on" in note for note in notes), "that was asked for"
    for number in (1, 2):
        store.stop(number, StopReason.CANCEL)
    assert told(JOB) == [], "what was cancelled is not there"
    (home / "text.jsonl").write_text('{"text": "two"}\n')
    assert told(JOB) == [], "other data"


def test_the_same_once_more_says_that_data_of_the_hub_stay_at_their_commits(
    store: Store, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "look_at", lambda run, folder: ())  # it would ask the hub
    hub = JOB.replace("text.jsonl", f"[{{path: owner/set, revision: {'a' * 40}}}]")
    for text, more in ((JOB, ""), (hub, ", those of the hub at the commits that it has")):
        row, _ = submit(store, paths, text, paths.state.parent)
        _, notes = rerun(store, paths, row.id)
        assert f"the same as job {row.id}, on the data that are there now{more}" in notes


def test_an_output_folder_with_a_jobs_model_names_the_command_that_trains_it_again(store: Store, paths: Paths) -> None:
    home, text = paths.state.parent, f"{JOB}output_dir: out\n"
    row, _ = submit(store, paths, text, home)
    run = RunFolder(Path(row.run_dir))
    store.stop(row.id, StopReason.CANCEL)
    mine = Place(folder=home / "out", token=run.token())
    mine.finish(mine.begin(), run=str(run.path), step=1)
    with pytest.raises(UserError, match="is not empty") as refused:
        submit(store, paths, text, home)
    plain = "give another output_dir, or move what is there"
    assert refused.value.hint == f"{plain}; the model there is job 1's, which offmate rerun 1 trains again, elsewhere"
    (run.path / "token").write_text("of another run of that number")
    with pytest.raises(UserError, match="is not empty") as refused:
        submit(store, paths, text, home)
    assert refused.value.hint == plain


def test_the_versions_of_what_trains_are_kept_and_told_where_they_changed(store: Store, paths: Paths) -> None:
    row, _ = submit(store, paths, JOB, paths.state.parent)
    before = RunFolder(Path(row.run_dir)).read_packages()
    assert before is not None and {"offmate", "torch", "transformers"} <= before.keys()
    assert changed_packages(before) == changed_packages(None) == ()
    other = {**before, "torch": "2.1.0"}
    del other["numpy"]
    assert changed_packages(other) == (
        f"torch {before['torch']}, at its submission 2.1.0",
        f"numpy {before['numpy']}, at its submission none",
    )
    assert changed_packages({**before, "peft": "0.1"}) != ()


def test_what_a_submission_that_was_cut_short_left_gives_way(store: Store, paths: Paths) -> None:
    (paths.runs / "1").mkdir()
    (paths.runs / "1" / "job.yaml").write_text("model: another\n")
    _, notes = submit(store, paths, JOB, paths.state.parent)
    assert [folder.name for folder in paths.runs.iterdir()] == ["1"]
    assert (paths.runs / "1" / "job.yaml").read_text() == JOB
    assert not any("lost" in note for note in notes)


@pytest.mark.usefixtures("looks")
def test_data_that_cannot_be_trained_on_leave_nothing_behind(store: Store, paths: Paths) -> None:
    (paths.state.parent / "text.jsonl").write_text('{"body": "one"}\n')
    with pytest.raises(UserError, match="found: body") as caught:
        submit(store, paths, JOB, paths.state.parent)
    assert caught.value.exit_code is Exit.USAGE
    assert (store.jobs(), list(paths.runs.iterdir())) == ([], [])


def test_the_log_says_which_data_nobody_has_looked_at(
    store: Store, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "look_at", lambda run, folder: ())  # which would ask the hub
    row, _ = submit(store, paths, JOB.replace("text.jsonl", "[owner/set, text.jsonl]"), paths.state.parent)
    (line,) = RunFolder(Path(row.run_dir)).tail_of_log(9)
    assert line.endswith("owner/set is of the Hugging Face hub: it is read when the job has its turn, before all else")


def test_a_model_that_is_no_folder_and_no_download_is_said_to_be_asked_of_the_hub(
    store: Store, paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "look_at", lambda run, folder: ())  # which would ask the hub
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    hub = JOB.replace("./model", "models/llama-8b")
    row, notes = submit(store, paths, hub, paths.state.parent)
    assert notes[-1] == (
        "model: there is no folder models/llama-8b beside the job file, and no download of it; it is taken as a name on"
        " the Hugging Face hub"
    )
    (tmp_path / "models--models--llama-8b" / "snapshots").mkdir(parents=True)
    store.stop(row.id, StopReason.CANCEL)
    for text in (hub, JOB):
        assert not any("Hugging Face" in note for note in submit(store, paths, text, paths.state.parent)[1])
    _, notes = submit(store, paths, JOB.replace("text.jsonl", "[data/talks, text.jsonl]"), paths.state.parent)
    assert notes[-1].startswith("dataset: there is no file or folder data/talks beside the job file, and no download")


def test_a_budget_beyond_the_machine_is_refused_before_anything_is_kept(store: Store, paths: Paths) -> None:
    with pytest.raises(UserError, match="cpu_budget is more than the host has") as caught:
        submit(store, paths, JOB + f"cpu_budget: {ram_bytes() + 1}\n", paths.state.parent)
    assert (caught.value.code, caught.value.exit_code) == ("budget-too-large", Exit.USAGE)
    assert (store.jobs(), list(paths.runs.iterdir())) == ([], [])


def test_a_budget_without_its_unit_is_refused_before_anything_is_kept(store: Store, paths: Paths) -> None:
    with pytest.raises(UserError, match="gpu_budget: it is 8; it must be a size like 10GiB") as caught:
        submit(store, paths, JOB + "gpu_budget: 8\n", paths.state.parent)
    assert (caught.value.code, caught.value.exit_code) == ("bad-value", Exit.USAGE)
    assert (store.jobs(), list(paths.runs.iterdir())) == ([], [])
    number, run = a_cancelled_job(store, paths)
    before = run.resolved.read_bytes()
    with pytest.raises(UserError, match="cpu_budget is 8 bytes"):
        retry(store, number, cpu_budget=8)
    assert run.resolved.read_bytes() == before


def test_what_was_said_at_submission_is_kept(store: Store, paths: Paths) -> None:
    row, notes = submit(store, paths, f"{JOB}gradient_checkpointing: true\n", paths.state.parent)
    assert len(notes) == 2
    assert tuple(store.job(row.id).notes) == notes


def a_cancelled_job(store: Store, paths: Paths, text: str = JOB, *, checkpoint: bool = False) -> tuple[int, RunFolder]:
    """A job with a measured plan, of which a part may be trained."""
    row, _ = submit(store, paths, text, paths.state.parent)
    run = RunFolder(Path(row.run_dir))
    run.write_plan({"measured": True})
    if checkpoint:
        (run.checkpoints / "step-3").mkdir(parents=True)
    store.stop(row.id, StopReason.CANCEL)
    return row.id, run


def test_a_job_with_a_checkpoint_goes_on_under_its_plan(store: Store, paths: Paths) -> None:
    number, run = a_cancelled_job(store, paths, checkpoint=True)
    assert retry(store, number).state is JobState.WAITING
    assert run.read_plan() == {"measured": True}


def test_a_job_that_is_trained_goes_on_to_its_model_folder(store: Store, paths: Paths) -> None:
    number, run = a_cancelled_job(store, paths)
    (run.trained / "step-9").mkdir(parents=True)
    assert retry(store, number).state is JobState.WAITING


def test_a_job_is_not_tried_again_while_its_place_is_no_good(store: Store, paths: Paths) -> None:
    number, _ = a_cancelled_job(store, paths, f"{JOB}output_dir: out\n")
    place = paths.state.parent / "out"
    place.write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        retry(store, number)
    assert store.job(number).state is JobState.CANCELLED
    place.unlink()
    retry(store, number)


def test_budgets_that_one_retry_changed_hold_for_the_next(store: Store, paths: Paths) -> None:
    number, run = a_cancelled_job(store, paths, checkpoint=True)
    assert retry(store, number, gpu_budget=2**25).state is JobState.SUBMITTED
    store.stop(number, StopReason.CANCEL)
    assert retry(store, number).state is JobState.SUBMITTED, "the old plan was for another budget"
    assert Job.from_resolved(run.resolved).gpu_budget == 2**25


OUT_OF_MEMORY = UserError("out of memory", code="out-of-memory").to_json()


def lowered(run: RunFolder) -> list[int]:
    """Have the job run out of GPU memory until that helps no more; returns its budgets."""
    found: list[int] = []
    while len(found) < 9:
        budget = Job.from_resolved(run.resolved).gpu_budget or 2**25
        run.write_plan({"measured": True, "plan": {"gpu_budget_bytes": budget}})
        if not take_a_notch(run, OUT_OF_MEMORY):
            break
        found.append(Job.from_resolved(run.resolved).gpu_budget or 0)
    return found


@pytest.mark.parametrize("budget", [None, 2**24])
def test_a_job_that_is_tried_again_is_helped_again(budget: int | None, store: Store, paths: Paths) -> None:
    number, run = a_cancelled_job(store, paths, checkpoint=True)
    first = lowered(run)
    assert len(first) == MOST_NOTCHES and first == sorted(first, reverse=True)
    retry(store, number, gpu_budget=budget)
    assert Job.from_resolved(run.resolved).gpu_budget == (budget or first[-1])
    assert len(lowered(run)) == MOST_NOTCHES


@pytest.mark.parametrize(
    ("had_bytes", "wanted"), [(2**35, int(0.92 * 2**34)), (2**32, 2**32), (0, None)], ids=["much", "less", "none"]
)
def test_where_too_little_of_the_hosts_memory_can_be_registered_the_next_plan_has_what_could(
    had_bytes: int, wanted: int | None, store: Store, paths: Paths
) -> None:
    _, run = a_cancelled_job(store, paths)
    run.write_plan({"measured": True, "plan": {"cpu_budget_bytes": 2**34}})
    error = host_memory_not_registered(2**20, had_bytes, RuntimeError("out of memory (2)"))
    assert take_a_notch(run, error.to_json()) is (wanted is not None)
    assert Job.from_resolved(run.resolved).cpu_budget == wanted
    assert (run.read_plan() is None) is (wanted is not None)


@pytest.mark.parametrize(("lines", "asked"), [("", (None, None)), ("gpu_budget: 32 MiB\n", (2**25, None))])
def test_a_job_handed_in_once_more_has_the_budgets_of_its_file(
    lines: str, asked: tuple[int | None, ...], store: Store, paths: Paths
) -> None:
    number, run = a_cancelled_job(store, paths, JOB + lines)
    lowered(run)
    retry(store, number, cpu_budget=2**20)
    assert Job.from_resolved(run.resolved).cpu_budget == 2**20
    again, _ = rerun(store, paths, number)
    job = Job.from_resolved(RunFolder(Path(again.run_dir)).resolved)
    assert (job.gpu_budget, job.cpu_budget) == asked


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_job_that_begins_again_leaves_its_split_to_the_planner_again(
    checkpoint: bool, store: Store, paths: Paths
) -> None:
    number, run = a_cancelled_job(store, paths, f"{JOB}train_batch_size: 32\n", checkpoint=checkpoint)
    run.write_resolved(Job.from_resolved(run.resolved).with_slices(16).resolved_yaml())
    retry(store, number, gpu_budget=2**25)
    job = Job.from_resolved(run.resolved)
    assert (job.gpu_budget, job.train_batch_size, job.is_split) == (2**25, 32, checkpoint)
    assert job.gradient_accumulation_steps == (2 if checkpoint else 1)


def test_of_two_retries_at_once_one_counts_and_its_budget(
    store: Store, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, run = a_cancelled_job(store, paths)
    check = again.look_again
    taken: list[int] = []

    def attempt(budget: int) -> None:
        try:
            retry(store, number, gpu_budget=budget)
            taken.append(budget)
        except UserError as error:
            assert error.code == "not-to-retry"

    second = threading.Thread(target=attempt, args=(2**26,))

    def check_while_another_comes(run: RunFolder, job: Job) -> None:
        monkeypatch.setattr(again, "look_again", check)
        second.start()
        second.join(2.0)  # it ends within that, were it not held up
        check(run, job)

    monkeypatch.setattr(again, "look_again", check_while_another_comes)
    attempt(2**25)
    second.join(10)
    assert taken == [Job.from_resolved(run.resolved).gpu_budget]


def test_a_job_that_is_looked_at_for_long_keeps_no_other_from_being_tried_again(
    store: Store, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, _ = a_cancelled_job(store, paths)
    quick, _ = a_cancelled_job(store, paths)
    check, looks, other = again.look_again, threading.Event(), threading.Event()

    def check_for_long(run: RunFolder, job: Job) -> None:
        if run.path.name == str(slow):
            looks.set()
            assert other.wait(60), "the other one waits for it"
        check(run, job)

    monkeypatch.setattr(again, "look_again", check_for_long)
    first = threading.Thread(target=retry, args=(store, slow))
    first.start()
    assert looks.wait(60)
    second = threading.Thread(target=lambda: (retry(store, quick), other.set()))
    second.start()
    second.join(30)
    assert other.is_set() and store.job(slow).state is JobState.CANCELLED
    first.join(60)
    assert store.job(slow).state is store.job(quick).state is JobState.SUBMITTED


def test_the_log_of_a_job_says_which_files_were_allowed_to_change(store: Store, paths: Paths) -> None:
    number, run = a_cancelled_job(store, paths)
    text, tokenizer = paths.state.parent / "text.jsonl", paths.state.parent / "model" / "tokenizer.json"
    text.write_text('{"text": "other"}\n')
    tokenizer.write_text("[]")
    retry(store, number, allow_changed_data=True, allow_changed_model=True)
    lines = [line.partition("--allow-changed-")[2] for line in run.log.read_text().splitlines()]
    assert list(filter(None, lines)) == [
        f"data: {text}: 128 bytes, now 18",
        f"model: {tokenizer}: other content",
    ]
    store.stop(number, StopReason.CANCEL)
    retry(store, number, allow_changed_model=True)
    assert run.log.read_text().endswith("--allow-changed-model: no file has changed\n")


def test_data_that_changed_are_trained_on_only_where_that_is_said(store: Store, paths: Paths) -> None:
    number, _ = a_cancelled_job(store, paths)
    (paths.state.parent / "text.jsonl").write_text('{"text": "other"}\n')
    with pytest.raises(UserError, match="not those that the job was submitted with") as refused:
        retry(store, number)
    assert (refused.value.code, store.job(number).state) == ("data-changed", JobState.CANCELLED)
    assert refused.value.hint.endswith(f"offmate retry {number} --allow-changed-data")
    assert retry(store, number, allow_changed_data=True).state is JobState.SUBMITTED
    store.stop(number, StopReason.CANCEL)
    retry(store, number)  # they are the job's now


def test_data_that_were_read_need_not_be_there_as_they_were(store: Store, paths: Paths) -> None:
    number, run = a_cancelled_job(store, paths, checkpoint=True)
    (run.path / "data").mkdir()
    (run.path / "data" / "corpus.json").touch()
    (paths.state.parent / "text.jsonl").write_text('{"text": "other"}\n')
    assert retry(store, number).state is JobState.WAITING


def test_a_base_that_changed_is_trained_only_where_that_is_said(store: Store, paths: Paths) -> None:
    number, run = a_cancelled_job(store, paths)
    tokenizer = paths.state.parent / "model" / "tokenizer.json"
    tokenizer.write_text("[]")
    with pytest.raises(UserError, match="of the model are not those that the job was submitted with") as refused:
        retry(store, number)
    assert (refused.value.code, refused.value.numbers) == ("base-changed", (f"{tokenizer}: other content",))
    assert store.job(number).state is JobState.CANCELLED
    text, frozen = paths.state.parent / "text.jsonl", run.frozen.read_text()
    before = text.read_text()
    text.write_text('{"text": "two"}\n')
    with pytest.raises(UserError, match="of the model are not those"):
        retry(store, number, allow_changed_data=True)
    assert run.frozen.read_text() == frozen, "what is refused allows nothing"
    text.write_text(before)
    (run.path / "data").mkdir()
    (run.path / "data" / "corpus.json").touch()
    run.write_counted(Counted(longest=3, lengths=(4, 4), distinct_tokens=(3,)))
    assert retry(store, number, allow_changed_model=True).state is JobState.SUBMITTED
    assert not run.is_tokenized and run.read_counted() is None, "they were the other tokenizer's"
    store.stop(number, StopReason.CANCEL)
    retry(store, number)  # it is the job's now


def test_what_a_checkpoint_rests_on_stays_where_the_base_may_be_another(store: Store, paths: Paths) -> None:
    number, run = a_cancelled_job(store, paths, checkpoint=True)
    (run.path / "data").mkdir()
    (run.path / "data" / "corpus.json").touch()
    (paths.state.parent / "model" / "tokenizer.json").write_text("[]")
    assert retry(store, number, allow_changed_model=True).state is JobState.WAITING
    assert run.is_tokenized and run.last_checkpoint_step() == 3


def test_a_job_of_before_bases_were_noted_goes_on(store: Store, paths: Paths) -> None:
    number, run = a_cancelled_job(store, paths)
    run.base.unlink()
    (paths.state.parent / "model" / "tokenizer.json").write_text("[]")
    assert retry(store, number).state is JobState.SUBMITTED and run.read_base() is None


def test_a_job_on_another_base_is_not_called_the_same(store: Store, paths: Paths) -> None:
    home = paths.state.parent
    submit(store, paths, JOB, home)
    (home / "model" / "tokenizer.json").write_text("{}")
    _, notes = submit(store, paths, JOB, home)
    assert any("is the same on the same data" in note for note in notes), "it was only written anew"
    (home / "model" / "tokenizer.json").write_text("[]")
    _, notes = submit(store, paths, JOB, home)
    assert not any("is the same on" in note for note in notes)


@pytest.mark.usefixtures("looks")
def test_a_download_that_is_not_complete_is_refused_and_nothing_is_left(store: Store, paths: Paths) -> None:
    """It was taken in as a model without weights, and trained from random ones."""
    index = paths.state.parent / "model" / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    with pytest.raises(UserError, match="missing: model-00001-of-00001") as refused:
        submit(store, paths, JOB, paths.state.parent)
    assert refused.value.code == "weights-not-usable" and store.jobs() == [] and not list(paths.runs.iterdir())


@pytest.mark.usefixtures("looks")
def test_weights_whose_reading_may_run_code_are_refused_and_not_read(store: Store, paths: Paths) -> None:
    weights = paths.state.parent / "model" / "pytorch_model.bin"
    weights.write_bytes(f"cos\nsystem\n(S'touch {paths.state.parent}/ran'\ntR.".encode())
    with pytest.raises(UserError, match=r"a pickle of more than tensors \(os.system\)") as refused:
        submit(store, paths, JOB, paths.state.parent)
    assert refused.value.code == "weights-not-usable" and "safetensors" in refused.value.hint
    assert store.jobs() == [] and not list(paths.runs.iterdir()) and not (paths.state.parent / "ran").exists()


def test_what_the_command_line_sets_stands_above_the_file_and_is_kept_with_the_job(store: Store, paths: Paths) -> None:
    text, home = JOB + "learning_rate: 2e-4  # as ever\n", paths.state.parent
    settings = ["learning_rate=1e-5", "num_train_epochs=2"]
    row, notes = submit(store, paths, text, home, key="one", settings=settings)
    run = RunFolder(Path(row.run_dir))
    assert run.submitted.read_text() == JOB + "learning_rate: 1.0e-05  # as ever\nnum_train_epochs: 2\n"
    job = Job.from_resolved(run.resolved)
    assert (job.learning_rate, job.num_train_epochs) == (1e-5, 2)
    assert notes[:2] == ("--set learning_rate=1e-05, in place of the file's 0.0002", "--set num_train_epochs=2")
    again, _ = submit(store, paths, text, home, key="one", settings=settings)
    assert again.id == row.id
    with pytest.raises(UserError) as other:
        submit(store, paths, text, home, key="one", settings=["learning_rate=1e-6"])
    assert other.value.code == "key-taken"


def test_a_setting_that_nobody_knows_is_refused_as_in_a_file(store: Store, paths: Paths) -> None:
    with pytest.raises(UserError) as found:
        submit(store, paths, JOB, paths.state.parent, settings=["lerning_rate=1"])
    assert found.value.what == "--set has one mistake."
    assert found.value.numbers == ("--set lerning_rate: unknown key; did you mean learning_rate?",)


@pytest.mark.parametrize(
    ("file", "run_name", "name"),
    [
        ("qwen-notes.yaml", None, "qwen-notes"),
        ("qwen.lora.yml", None, "qwen.lora"),
        ("notes", None, "notes"),
        ("job.yaml", None, "a folder"),
        ("config.yml", None, "a folder"),
        ("", None, "a folder"),
        ("qwen-notes.yaml", "mine", "mine"),
        ("job.yaml", "job", "job"),
        ("two\nlines\x1b\u202e.yaml", None, "two lines\ufffd\ufffd"),
        (f"{'long' * 80}.yaml", None, ("long" * 80)[:255]),
    ],
)
def test_a_job_is_called_as_its_file_or_folder(
    store: Store, paths: Paths, file: str, run_name: str | None, name: str
) -> None:
    folder = paths.state.parent / "a folder"
    folder.mkdir()
    text = JOB.replace("./model", "../model").replace("text.jsonl", "../text.jsonl")
    text += f"run_name: {run_name}\n" if run_name else ""
    row, _ = submit(store, paths, text, folder, file)
    assert row.name == name
    assert rerun(store, paths, row.id)[0].name == name


def test_a_job_in_the_home_folder_is_called_as_its_model(
    store: Store, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(paths.state.parent))
    assert submit(store, paths, JOB, paths.state.parent)[0].name == "model"
