"""A job is refused for its first records, with nothing kept; what cannot be looked at is left to its turn. Some tests
take seconds: a process looks at each job that is handed in, and imports PyTorch."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from offmated.jobs.store import Store
from offmated.jobs.submission import submit
from offmated.paths import Paths
from planner.errors import Exit, UserError
from planner.run.folder import RunFolder
from tests.support.texts import CHATML, tiny_llama_folder, write_jsonl

pytestmark = pytest.mark.usefixtures("looks")
JOB = "model: ./model\ndataset: talks.jsonl\n"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    tiny_llama_folder(tmp_path / "model", chat_template="{{ messages[1].content }}")
    write_jsonl(tmp_path / "talks.jsonl", [{"messages": [{"role": "assistant", "content": "alone"}]}])
    paths = Paths.at(tmp_path / "state")
    paths.runs.mkdir(parents=True)
    return paths


def test_a_conversation_that_the_template_refuses_is_refused_while_the_person_is_there(
    store: Store, paths: Paths
) -> None:
    with pytest.raises(UserError, match="The chat template refuses a conversation") as told:
        submit(store, paths, JOB, paths.state.parent)
    assert told.value.exit_code is Exit.USAGE
    assert told.value.numbers[0] == "line 1 of talks.jsonl"
    assert not list(paths.runs.iterdir()) and not store.jobs()


def test_a_mistake_of_the_template_is_told_once_and_not_of_each_record(store: Store, paths: Paths) -> None:
    folder = paths.state.parent
    talk = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
    write_jsonl(folder / "talks.jsonl", [talk] * 40)

    def told(template: str, keys: str = "") -> UserError:
        tiny_llama_folder(folder / "model", chat_template=template)
        with pytest.raises(UserError) as refused:
            submit(store, paths, JOB + keys, folder)
        return refused.value

    file, broken = f"the template: that of the tokenizer, {folder}/model/chat_template.jinja", "a\n{% if x %}\n{{ b }"
    error = told(broken)
    assert (error.what, error.code) == ("The chat template has a mistake, whatever the data are.", "bad-chat-template")
    assert error.numbers == ("line 3 of the template: unexpected '}'", file)
    (folder / "own.jinja").write_text("{{ messages | nofilter }}")
    error = told(CHATML, "chat_template: own.jinja\n")
    of_job = "the template: chat_template of the job"
    assert error.numbers == ("line 1 of the template: No filter named 'nofilter'.", of_job)
    error = told("{{ messages[9].content }}", "broken_rows: skip\n")
    assert error.what == "The chat template refuses every conversation."
    reason = "all 40 that it was given: UndefinedError: list object has no element 9"
    assert error.numbers == (reason, file, "the first: line 1 of talks.jsonl")
    error = told("{{ raise_exception('no') if messages[0].content == 'hi' }}" + CHATML)
    assert error.what == "The chat template refuses every conversation."
    other = {"messages": [{"role": "user", "content": "other"}, talk["messages"][1]]}
    write_jsonl(folder / "talks.jsonl", [other, talk])
    error = told("{{ raise_exception('no') if messages[0].content == 'hi' }}" + CHATML)
    assert error.what == "The chat template refuses a conversation." and error.numbers[0] == "line 2 of talks.jsonl"


def test_what_of_the_first_records_is_left_out_or_cut_is_noted(store: Store, paths: Paths) -> None:
    folder, ask = paths.state.parent, {"role": "user", "content": "hi"}
    tiny_llama_folder(folder / "model", chat_template=CHATML)
    good = {"messages": [ask, {"role": "assistant", "content": "y" * 40}]}
    write_jsonl(folder / "talks.jsonl", [good] * 5 + [{"messages": []}, {"mesages": []}, {"messages": [ask]}])
    _, notes = submit(store, paths, JOB + "max_length: 60\n", folder)
    assert f"of the first 8 records of {folder}/talks.jsonl 2 are empty and left out" in notes
    cut = "of the first records, 5 of 6 documents are longer than max_length 60 and cut"
    assert any(note.startswith(cut) for note in notes)
    assert "of the first records, 1 of 6 rows have nothing to learn and are left out" in notes


def test_what_is_no_json_and_what_the_template_refuses_are_told_at_once(store: Store, paths: Paths) -> None:
    with (paths.state.parent / "talks.jsonl").open("a") as lines:
        lines.write("{\n")
    with pytest.raises(UserError) as told:
        submit(store, paths, JOB, paths.state.parent)
    assert told.value.numbers[0] == "2 of the first 2 records"
    assert told.value.numbers[1].startswith("line 1 of talks.jsonl: The chat template refuses a conversation")
    assert told.value.numbers[2].startswith("line 2 of talks.jsonl is no JSON")
    assert not list(paths.runs.iterdir()) and not store.jobs()


def test_a_template_that_is_not_the_tokenizers_is_noted_and_what_the_look_prints_and_who_outlives_it_say_nothing(
    store: Store, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"role": "user", "content": "hi"}
    write_jsonl(paths.state.parent / "talks.jsonl", [{"messages": [asked, {"role": "assistant", "content": "yes"}]}])
    python, lives = paths.state.parent / "python", paths.state.parent / "lives"
    child = f"sleep 300 & echo $! > {lives}"
    python.write_text(f'#!/bin/sh\n{child}\n{sys.executable} "$@"; code=$?\necho bye; exit $code\n')
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    try:
        row, notes = submit(store, paths, JOB + "chat_template: phi\n", paths.state.parent)
    finally:
        os.kill(int(lives.read_text()), signal.SIGTERM)
    assert notes[-1].startswith("the chat template ends answers with <|end|>, which is no token of this tokenizer")
    assert not RunFolder(Path(row.run_dir)).first_notes.exists()


def test_a_job_whose_records_cannot_be_looked_at_is_taken_in_with_a_note(
    store: Store, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    _, notes = submit(store, paths, JOB, paths.state.parent)
    assert notes[-1] == "the job could not be looked at: what is wrong with it is told when it has its turn"


def test_where_the_process_that_looks_is_killed_no_file_is_blamed(
    store: Store, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = paths.state.parent / "python"
    python.write_text('#!/bin/sh\nprintf "the dataset talks.jsonl" > "$5/looks_at.txt"\nkill -9 $$\n')
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(UserError) as told:
        submit(store, paths, JOB, paths.state.parent)
    assert told.value.code == "look-killed"
    assert told.value.what == "The process that looked at the dataset talks.jsonl was killed by signal 9 (SIGKILL)."
    assert "memory" in told.value.numbers[0] and not store.jobs()


@pytest.fixture
def _no_hub(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(paths.state / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(paths.state / "hub"))
    with socket.create_server(("127.0.0.1", 0)) as server:  # whose port nobody listens on, once it is closed
        monkeypatch.setenv("HF_ENDPOINT", "http://{}:{}".format(*server.getsockname()))


@pytest.mark.usefixtures("_no_hub")
def test_names_that_are_neither_here_nor_to_be_asked_for_are_refused_with_what_is_near(
    store: Store, paths: Paths
) -> None:
    home = paths.state.parent
    shutil.copytree(home / "model", home / "models" / "tiny-llama")
    shutil.copy(home / "talks.jsonl", home / "model" / "talks.jsonl")
    with pytest.raises(UserError) as told:
        submit(store, paths, "model: mdels/tiny-lama\ndataset: data/talk\n", home)
    assert told.value.code == "hub-not-reached"
    first, why, hint, second, _, data = told.value.numbers
    assert (
        first == ("1. model: there is no folder mdels/tiny-lama, and the Hugging Face hub cannot be asked for it.")
        and "refused" in why.lower()
    )
    assert hint.strip().startswith("hint: did you mean ./models/tiny-llama? Else give the path of a folder (model:")
    assert second.startswith("2. dataset: there is no file or folder data/talk, and")
    assert data.strip().startswith("hint: did you mean ./talks.jsonl or ./model/talks.jsonl? Else give the path of a")
    assert not list(paths.runs.iterdir()) and not store.jobs()


@pytest.mark.usefixtures("_no_hub")
def test_of_a_hub_that_is_not_reached_what_is_downloaded_is_taken_and_the_rest_left_to_the_jobs_turn(
    store: Store, paths: Paths
) -> None:
    (paths.state / "hub" / "models--owner--model" / "snapshots").mkdir(parents=True)
    _, notes = submit(store, paths, "model: owner/model\ndataset: talks.jsonl\n", paths.state.parent)
    assert notes[-1].startswith(
        "the tokenizer owner/model, the model owner/model could not be looked at: what is wrong there is told when the "
        "job has its turn. "
    )
    assert sum("could not be looked at" in note for note in notes) == 1
