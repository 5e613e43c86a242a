"""What a job would train on, as people see it before they submit it. Some tests take seconds: each process that they
start imports PyTorch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sqlalchemy import create_engine

from planner.cache.store import Cache
from planner.cache.tables import metadata
from planner.codec import from_json
from planner.commands.plan_job import plan_job
from planner.counted import Counted
from planner.errors import Exit
from planner.job.schema import Job
from planner.units import format_seconds
from tests.support.daemons import until
from tests.support.preference_jobs import preference_job
from tests.support.texts import CHATML, byte_tokenizer, tiny_llama_folder, write_jsonl
from worker.check.__main__ import main
from worker.prepare import main as prepare


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tiny_llama_folder(tmp_path / "model", chat_template=CHATML)
    byte_tokenizer(chat_template=CHATML).save_pretrained(tmp_path / "model")
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    write_jsonl(tmp_path / "data.jsonl", [{"messages": talk}] * 4)
    file = tmp_path / "job.yaml"
    file.write_text("model: model\ndataset: data.jsonl\nmax_length: 512\ntrain_batch_size: 2\nnum_train_epochs: 3\n")
    return file


def previewed(job: Path, *words: str) -> int:
    """The exit code of the process on the job in this file."""
    resolved = job.with_name("resolved.yaml")
    resolved.write_text(Job.load(job).resolved_yaml())
    return main(["preview", str(resolved), *words])


def test_rows_are_shown_with_what_is_learned_and_all_is_counted(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert previewed(job, "--rows=1") == Exit.DONE
    row = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n"
    tokens = len(byte_tokenizer(chat_template=CHATML)(row.replace("⟦", "").replace("⟧", ""))["input_ids"])
    learned = len(byte_tokenizer(chat_template=CHATML)("yes<|im_end|>")["input_ids"])
    assert capsys.readouterr().out == (
        f"row 1, line 2 of data.jsonl: {tokens} tokens, {learned} of them learned\n{row}\n"
        f"4 rows, {4 * tokens} tokens an epoch, {4 * learned} of them learned ({learned / tokens:.0%})\n"
        f"the longest row has {tokens} tokens, 99% have {tokens} at most; 0 cut at max_length 512\n"
        "2.0 steps an epoch of 2 rows, 6 in all\n"
        f"{12 * tokens} tokens in all, max_length 512\n"
        "note: what is learned ends with <|im_end|>, where the model does not stop (it stops at <eos>): "
        "generation_config.json of the trained model names <|im_end|>, <eos>\n"
        "how long it takes: offmate plan job.yaml\n"
    )


def test_how_long_the_steps_take_is_told_by_a_plan_that_is_kept(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{job.parent / 'offmate.db'}"
    metadata.create_all(create_engine(url))
    job.write_text(job.read_text().replace("train_batch_size: 2", "per_device_train_batch_size: 2"))

    def last_line() -> str:
        assert previewed(job, "--rows=0", f"--database={url}") == Exit.DONE
        return capsys.readouterr().out.splitlines()[-1]

    unknown = "how long it takes: offmate plan job.yaml"
    assert last_line() == unknown
    plan_job(Job.load(job), torch.device("cpu"), cache=Cache(url), measure=False)
    assert last_line() == unknown, "that plan is for rows of max_length"
    prepare(["--job", str(job.with_name("resolved.yaml"))])
    counted = from_json(Counted, json.loads(capsys.readouterr().out))
    plan = plan_job(Job.load(job), torch.device("cpu"), cache=Cache(url), measure=False, counted=counted).plan
    took = f"{format_seconds(6 * plan.step_s)}: 6 steps of {format_seconds(plan.step_s)} with full rows (an estimate)"
    assert last_line() == took
    job.write_text(job.read_text() + "gpu_budget: 900GiB\n")
    assert last_line().startswith(f"{unknown} (")
    auto = job.read_text().replace("gpu_budget: 900GiB\n", "")
    for rows in ("train_batch_size: 2", "per_device_train_batch_size: auto\ntrain_batch_size: 2"):
        job.write_text(auto.replace("per_device_train_batch_size: 2", rows))
        plan_job(Job.load(job), torch.device("cpu"), cache=Cache(url), measure=False)
        assert last_line() == unknown


def test_texts_that_are_joined_without_the_template_are_told_with_what_takes_it(
    job: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jsonl(job.parent / "data.jsonl", [{"question": "hi", "completion": "yes"}] * 4)
    entry = "{path: data.jsonl, %s}"
    text = job.read_text()
    job.write_text(text.replace("data.jsonl", entry % "columns: {prompt: question}"))
    assert previewed(job) == Exit.DONE
    columns = "columns: {instruction: question, output: completion}"
    (note,) = (message for message in caplog.messages if "joined" in message)
    assert note == (
        "data: prompts and completions are joined as they are, without the model's chat template; to use it, give "
        f"type: instructions and {columns}"
    )
    assert "⟧\n\nrow 2, " in capsys.readouterr().out
    job.write_text(text.replace("data.jsonl", entry % f"type: instructions, {columns}"))
    caplog.clear()
    assert previewed(job) == Exit.DONE
    assert "user\nhi<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧" in capsys.readouterr().out
    assert "joined" not in caplog.text


def test_a_batch_larger_than_the_data_is_told(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job.write_text(job.read_text() + "dataset_exact_deduplication: true\nmin_sample_len: 3\n")
    assert previewed(job, "--rows=0") == Exit.DONE
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("1 row, ") and told[2] == "0.5 steps an epoch of 2 rows, 2 in all"
    assert told[4].startswith("note: a step has 2 rows, and the data have 1: each step sees some of them")


def test_what_is_learned_is_green_on_a_terminal(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert previewed(job, "--rows=1", "--color") == Exit.DONE
    assert "assistant\n\033[32myes<|im_end|>\033[0m\n" in capsys.readouterr().out


def test_the_process_writes_its_colours_and_none_of_the_datas(job: Path) -> None:
    answer = {"role": "assistant", "content": "yes"}
    write_jsonl(job.parent / "data.jsonl", [{"messages": [{"role": "user", "content": "\033[31mred"}, answer]}] * 4)
    resolved = job.with_name("resolved.yaml")
    resolved.write_text(Job.load(job).resolved_yaml())
    command = [sys.executable, "-m", "worker.check", "preview", str(resolved), "--rows=1", "--color"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "assistant\n\033[32myes<|im_end|>\033[0m\n" in shown and "\N{REPLACEMENT CHARACTER}[31mred" in shown


def test_what_the_trainer_would_refuse_is_told(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(job.parent / "data.jsonl", [{"messages": [{"role": "user", "content": 3}]}])
    assert previewed(job) == Exit.USAGE
    assert "[broken-record]" in capsys.readouterr().err


def test_records_that_are_left_out_are_told(job: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = job.parent / "data.jsonl"
    data.write_text(data.read_text() + '{"messages": [\n')
    job.write_text(job.read_text() + "broken_rows: skip\n")
    assert previewed(job) == Exit.DONE
    assert "1 record is broken and left out (broken_rows: skip)" in caplog.text
    assert "left out: line 5 of data.jsonl is no JSON" in caplog.text


def test_a_warmup_longer_than_the_run_is_told(job: Path, caplog: pytest.LogCaptureFixture) -> None:
    job.write_text(job.read_text() + "warmup_steps: 10\n")
    with caplog.at_level("WARNING"):
        assert previewed(job) == Exit.DONE
    assert "warmup_steps is 10, and the run has 6 steps: the rate only rises" in caplog.text


@pytest.mark.parametrize("packing", ["false", "true", "wrapped"])
def test_as_json_it_is_one_object_whose_rows_name_the_records_they_are_of(
    job: Path, packing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [f"{'no' * (1 + 6 * (i % 3))} {i}." for i in range(9)]
    lines = [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": s}]}
        for i, s in enumerate(said)
    ]
    write_jsonl(job.parent / "data.jsonl", lines)
    job.write_text(job.read_text().replace("max_length: 512", f"max_length: 50\npacking: {packing}"))
    assert previewed(job, "--rows=3", "--json") == Exit.DONE
    found = json.loads(capsys.readouterr().out)
    assert len(found["shown"]) == 3 and found["max_length"] == 50
    assert found["percentile_99"] <= found["longest"] <= 50
    assert found["cut"] == (None if packing == "wrapped" else 3) and found["step_s"] is None
    assert found["time"].startswith("how long it takes: offmate plan")
    assert any(note.startswith("what is learned ends with <|im_end|>") for note in found["notes"])
    if packing != "wrapped":
        assert any(note.startswith("3 of 9 documents are longer than max_length 50 and cut") for note in found["notes"])
    for row in found["shown"]:
        text = "".join(piece["text"] for piece in row["pieces"])
        seen = [f"line {i + 1} of data.jsonl" for i in range(9) if f"q{i}" in text]
        assert set(seen) <= set(row["places"]) and len(row["places"]) <= len(seen) + 2
        assert packing == "wrapped" or row["places"] == seen


def test_a_refusal_is_told_as_ever_where_json_is_asked_for(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job.parent / "data.jsonl").write_text("no json\n")
    assert previewed(job, "--json") == Exit.USAGE
    told = capsys.readouterr()
    assert told.out == "" and "[dataset-unreadable]" in told.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_the_command_ends_it_and_leaves_no_folder(job: Path, number: signal.Signals) -> None:
    scratch = job.parent / "scratch"
    scratch.mkdir()
    write_jsonl(job.parent / "data.jsonl", [json.loads((job.parent / "data.jsonl").open().readline())] * 200_000)
    # Where the tests run under nohup, or behind a shell's &, their children would ignore these signals, as they should.
    heard = "import signal; signal.signal(1, signal.SIG_DFL); signal.signal(2, signal.SIG_DFL)"
    start = f"{heard}; from offmated.command import main; main()"
    command = [sys.executable, "-P", "-c", start, "preview", str(job)]
    environment = {**os.environ, "TMPDIR": str(scratch), "OFFMATE_HOME": str(job.parent / "state")}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as child:
        until(lambda: [*scratch.glob("offmate-data-*/.data.tmp/tokens.raw")], "the data are being tokenized")
        assert len([*scratch.glob("offmate-*")]) == 2
        child.send_signal(number)
        assert child.wait(60) == 128 + number
    assert [*scratch.glob("offmate-*")] == []


@pytest.mark.parametrize(("preference", "unit"), [("dpo", "pair"), ("orpo", "pair"), ("kto", "answer")])
def test_preferences_are_told_as_pairs_or_answers_with_what_is_scored(
    preference: str, unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(preference_job(tmp_path, preference=preference).resolved_yaml())
    assert main(["preview", str(resolved), "--rows=1"]) == Exit.DONE
    said = capsys.readouterr().out
    assert said.startswith(f"{unit} 1") and "of them scored" in said and "them learned" not in said
    assert f"\n9 {unit}s, " in said and f" steps an epoch of 4 {unit}s, 4 in all" in said
    pass_before = f"before the first step the reference, the model as it is before training, scores 9 {unit}s once"
    assert (pass_before in said) == (preference != "orpo")
