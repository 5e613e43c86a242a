"""What a real daemon finds wrong with a job that is handed in, and what it takes of the daemon to look. Some tests
take seconds: a process looks at each job that is handed in, and imports PyTorch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from transformers import LlamaConfig, LlamaForCausalLM

from offmated.cli.client import Json
from planner.errors import Exit, SeveralErrors, UserError
from tests.support.daemons import House, house
from tests.support.texts import tiny_llama_folder, write_jsonl

MIB = 2**20
JOB = "model: ./model\ndataset: {}\n"


@pytest.fixture(scope="module")
def home() -> Iterator[House]:
    with house() as built:
        yield built


def peak_bytes(house: House) -> int:
    """The most memory that the daemon had so far."""
    assert house.daemon is not None
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{house.daemon.pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def refused(house: House, text: str, turn: Json | None = None) -> UserError:
    with pytest.raises(UserError) as caught:
        house.client.submit(text, str(house.home), turn=turn)  # type: ignore[arg-type]
    assert not list(house.paths.runs.glob(".new-*"))
    return caught.value


def test_an_array_that_is_larger_than_what_is_looked_at_is_taken(home: House) -> None:
    (home.home / "array.json").write_text(json.dumps([{"text": "x" * 10_000}] * 4200))
    assert (home.home / "array.json").stat().st_size > 40 * MIB
    before = peak_bytes(home)
    assert home.client.submit(JOB.format("array.json"), str(home.home))["state"] == "submitted"
    (home.home / "one.json").write_text(json.dumps([{"text": "x" * 41 * MIB}, {"text": "y"}]))
    assert home.client.submit(JOB.format("one.json"), str(home.home))["state"] == "submitted"
    assert peak_bytes(home) < before + 32 * MIB


def test_a_table_of_few_bytes_that_stands_for_gigabytes_takes_nothing_of_the_daemon(home: House) -> None:
    table = pa.table({"text": pa.array(["x" * 2 * MIB] * 1000)})
    parquet.write_table(table, home.home / "large.parquet", compression="zstd")
    assert (home.home / "large.parquet").stat().st_size < 40_000
    before = peak_bytes(home)
    assert home.client.submit(JOB.format("large.parquet"), str(home.home))["state"] == "submitted"
    assert peak_bytes(home) < before + 32 * MIB


def test_data_that_fill_the_memory_are_refused_by_name_with_the_limit(home: House) -> None:
    with (home.home / "wide.jsonl").open("w") as lines:  # a character of four bytes makes all of a text's so wide
        lines.write('{"text": "\U0001f600')
        for _ in range(320):
            lines.write("x" * MIB)
        lines.write('"}\n')
    before = peak_bytes(home)
    error = refused(home, JOB.format("wide.jsonl"))
    (home.home / "wide.jsonl").unlink()
    assert (error.code, error.numbers) == ("takes-too-much", ("more than 2 GiB of memory",))
    assert error.what == f"Reading the dataset {home.home / 'wide.jsonl'} takes too much time or memory."
    assert peak_bytes(home) < before + 32 * MIB


def test_all_that_is_wrong_is_told_at_once_and_first_what_needs_no_file(home: House) -> None:
    write_jsonl(home.home / "other.jsonl", [{"body": "one"}])
    (home.home / "empty.jsonl").write_text("")
    text = JOB.format("[other.jsonl, empty.jsonl]") + "gpu_budget: 900TB\n"
    error = refused(home, text, {"window": "25:00", "after": 99})
    assert isinstance(error, SeveralErrors) and error.exit_code is Exit.NO_SUCH_JOB
    codes = [each.code for each in error.errors]
    assert codes == ["no-such-job", "bad-window", "budget-too-large", "unknown-columns", "empty-dataset"]
    said = str(error)
    assert said.startswith("5 things are wrong with this job.\n  1. There is no job 99.\n     hint: offmate status  ")
    assert "  3. gpu_budget is more than the device has." in said
    assert said.endswith("\n  hint: correct all of them, then try again   [no-such-job]")
    error = refused(home, text.replace("900TB", "6") + "max_steps: 1:30\nmethod: lorra\nlora_r: 4\n")
    assert error.numbers == (
        "line 3: gpu_budget: it is 6; it must be a size like 10GiB or 500MB, or null for the default",
        "line 4: max_steps: YAML reads 1:30 as 90; write the number that is meant, or a text in quotes",
        'line 5: method: it is "lorra"; it must be full, lora or lsp',
    )
    error = refused(home, "model: ./modl\n" + JOB.format("text.jsonl")[15:], {"window": "25:00"})
    assert isinstance(error, SeveralErrors) and [each.code for each in error.errors] == ["missing-file", "bad-window"]


def test_what_a_plan_refuses_of_the_model_is_refused_when_the_job_is_handed_in(home: House) -> None:
    folder = tiny_llama_folder(home.home / "whole")
    LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).save_pretrained(folder)
    job = JOB.format("text.jsonl").replace("./model", "./whole") + "max_length: 64\n"
    lora = job + "method: lora\nlora_target_modules: [q_prj, v_prj]\n"
    assert refused(home, lora).hint.startswith("did you mean q_proj, v_proj? ")
    told = home.client.submit(lora.replace("q_prj, v_prj", "q_proj, v_prj"), str(home.home))["notes"]
    assert any(note.endswith("is called v_prj; did you mean v_proj?") for note in told), told
    assert refused(home, job + "trainable: [model.layrs]\n").code == "trainable-not-there"
    error = refused(home, job + "gpu_budget: 100 KiB\n")
    assert (error.code, error.exit_code) == ("budget-too-small", Exit.DOES_NOT_FIT)
    assert home.client.submit(lora.replace("_prj", "_proj") + "gpu_budget: 1GiB\n", str(home.home))["id"]
