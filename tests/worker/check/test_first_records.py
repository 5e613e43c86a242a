"""What the first records of a job's data say at submission: what the trainer would, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from planner.data.entry import DataEntry
from planner.errors import Exit, UserError
from planner.job.data_check import check_data, is_rendered
from planner.job.schema import Job
from planner.models.hf_model import model_config
from planner.models.tokenizer import load_tokenizer
from planner.run.folder import RunFolder
from tests.support.texts import CHATML, byte_tokenizer, make_job, tiny_llama_folder, write_jsonl
from worker.check.__main__ import main
from worker.check.first_records import MOST, look
from worker.data.batches import Batches
from worker.data.sources import first_of_hub

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
UNLEARNED = [TALK[0], TALK[1] | {"train": False}]
WITHOUT_SYSTEM = CHATML.replace("in messages", "in messages if m.role != 'system'")
REFUSES = "{{ raise_exception('roles must alternate') if messages[0]['role'] == 'assistant' }}" + CHATML


def looked_at(job: Job, template: str = CHATML) -> None:
    look(job, job.data, byte_tokenizer(chat_template=template))
    look(job, job.eval_data, byte_tokenizer(chat_template=template))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tiny_llama_folder(tmp_path / "model", chat_template=CHATML)


@pytest.mark.parametrize(
    ("records", "template", "code", "number"),
    [
        ([{"messages": TALK}, {"messages": TALK[::-1]}], REFUSES, "chat-template-refuses", "line 2 of data.jsonl"),
        ([{"messages": TALK}], "{{ messages[9].content }}", "chat-template-refuses", "line 1 of data.jsonl"),
        ([{"messages": [*TALK[:1], TALK[1] | {"reasoning_content": "so"}]}], CHATML, "template-drops", "line 1"),
        ([{"messages": [{"role": "system", "content": "so"}, *TALK]}], WITHOUT_SYSTEM, "template-drops", 'turn: "so"'),
        ([{"messages": UNLEARNED}] * 3, CHATML, "nothing-to-train", "3 documents"),
        ([{"prompt": "p" * 90, "completion": "late"}], CHATML, "nothing-to-train", "1 document,"),
        ([{"text": "x" * 90}], CHATML, "rows-too-long", "1 of 1"),
    ],
)
def test_what_would_end_the_job_in_its_turn_is_told_at_submission(
    model: Path, tmp_path: Path, records: list[dict[str, Any]], template: str, code: str, number: str
) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", records)
    keys = {"long_rows": "refuse"} if "text" in records[0] else {}
    job = make_job(model, data, max_length=64, **keys)
    check_data(job)  # which sees nothing of it
    with pytest.raises(UserError) as told:
        looked_at(job, template)
    assert told.value.code == code and told.value.exit_code is Exit.USAGE
    assert any(number in line for line in told.value.numbers), told.value.numbers
    with pytest.raises(UserError) as later:
        Batches(job, byte_tokenizer(chat_template=template))
    assert later.value.code == code


def test_a_mask_that_learns_nothing_of_the_first_records_is_refused_however_many_follow(
    model: Path, tmp_path: Path
) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [{"messages": UNLEARNED}] * MOST + [{"messages": TALK}])
    with pytest.raises(UserError, match=rf"^The first {MOST} records have nothing to learn\."):
        looked_at(make_job(model, data))
    write_jsonl(data, [{"messages": UNLEARNED}] * (MOST - 1) + [{"messages": TALK}])
    looked_at(make_job(model, data))


def test_a_min_sample_len_that_leaves_nothing_is_refused_where_all_is_seen(model: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [{"messages": TALK}] * MOST)
    job = make_job(model, data, min_sample_len=1000, max_length=2000)
    with pytest.raises(UserError) as told:
        looked_at(job)
    with pytest.raises(UserError) as later:
        Batches(job, byte_tokenizer(chat_template=CHATML))
    assert (
        str(told.value)
        == str(later.value)
        == (
            f"Every document has fewer tokens than min_sample_len.\n  {MOST} documents, the longest of 26 tokens\n"
            "  hint: min_sample_len: 26 or less takes some of them   [nothing-to-train]"
        )
    )
    long = {"messages": [TALK[0], TALK[1] | {"content": "a" * 999}]}
    write_jsonl(data, [*([{"messages": TALK}] * MOST), long])
    looked_at(job)


def test_what_the_trainer_takes_is_taken(model: Path, tmp_path: Path) -> None:
    talks = write_jsonl(tmp_path / "talks.jsonl", [{"messages": UNLEARNED}, {"messages": TALK}, {"messages": []}])
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": "x" * 90}])
    (tmp_path / "rows.csv").write_text("instruction,output\nsay hi,hi\n")
    (tmp_path / "whole.json").write_text(json.dumps([{"conversations": [{"from": "gpt", "value": "hi"}]}]))
    for file in (talks, texts, tmp_path / "rows.csv", tmp_path / "whole.json"):
        job = make_job(model, file, max_length=64)
        looked_at(job)
        Batches(job, byte_tokenizer(chat_template=CHATML))
    # A second entry may have what the first has not, also one that nobody reads here.
    mute = write_jsonl(tmp_path / "mute.jsonl", [{"messages": UNLEARNED}])
    looked_at(make_job(model, [mute, talks]))
    looked_at(make_job(model, talks, eval_dataset=str(texts)))
    with pytest.raises(UserError, match="nothing to"):
        looked_at(make_job(model, talks, eval_dataset=str(mute)))


@pytest.mark.parametrize("preference", ["dpo", "kto"])
def test_of_preferences_the_first_records_are_judged_as_the_trainer_does(
    preference: str, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": [TALK[1] | {"content": "no"}]}
    mark = {"prompt": TALK[:1], "completion": TALK[1:], "label": True}
    record = one if preference == "dpo" else mark
    records = [record, record, record if preference == "dpo" else {**record, "label": False}]
    job = make_job(model, write_jsonl(tmp_path / "data.jsonl", records), preference=preference, max_length=64)
    looked_at(job)
    assert not caplog.records
    with pytest.raises(UserError) as refused:
        looked_at(job.model_copy(update={"max_length": 4}))
    assert refused.value.code == "nothing-to-train"
    unit = "pairs" if preference == "dpo" else "answers"
    assert f"3 {unit}, none whose answers begin within max_length 4" in refused.value.numbers[0]
    broken = {**record, "prompt": TALK}
    looked = make_job(model, write_jsonl(tmp_path / "data.jsonl", [record, broken]), preference=preference)
    with pytest.raises(UserError, match=r"line 2 of data\.jsonl"):
        looked_at(looked)


def test_only_data_that_are_more_than_texts_need_a_tokenizer_at_submission(model: Path, tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": "x"}])
    talks = write_jsonl(tmp_path / "talks.jsonl", [{"messages": TALK}])
    long = write_jsonl(tmp_path / "long.jsonl", [{"messages": [TALK[0] | {"content": "x" * 2**17}, TALK[1]]}])
    assert not is_rendered(make_job(model, texts))
    assert is_rendered(make_job(model, talks)) and is_rendered(make_job(model, [texts, talks]))
    assert is_rendered(make_job(model, texts, eval_dataset=str(talks)))
    assert is_rendered(make_job(model, long)), "no row within a glance"


def test_a_tokenizer_that_does_not_load_is_told(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [{"messages": TALK}])
    run = tmp_path / "run"
    run.mkdir()
    (run / "resolved.yaml").write_text(make_job(model, data).resolved_yaml())
    assert main(["first-records", str(run)]) == Exit.DONE
    (model / "tokenizer.json").write_text("{")
    assert main(["first-records", str(run)]) == Exit.USAGE
    assert json.loads((run / "error.json").read_text())["code"] == "tokenizer-not-usable"
    assert "[tokenizer-not-usable]" in capsys.readouterr().err


def test_what_is_odd_of_a_template_is_told_once(model: Path, tmp_path: Path) -> None:
    talks = [write_jsonl(tmp_path / f"{name}.jsonl", [{"messages": TALK}] * 8) for name in "ab"]
    run = tmp_path / "run"
    run.mkdir()

    def told(**keys: object) -> tuple[str, ...] | None:
        job = make_job(model, talks, eval_dataset=str(talks[0]), special_tokens={"bos_token": "<eos>"}, **keys)
        (run / "resolved.yaml").write_text(job.resolved_yaml())
        assert main(["first-records", str(run)]) == Exit.DONE
        return RunFolder(run).read_first_notes()

    (note,) = told() or ()
    assert note == (
        "what is learned ends with <|im_end|>, where the model does not stop (it stops at <eos>): "
        "generation_config.json of the trained model names <|im_end|>, <eos>"
    )
    note, ends = told(chat_template="llama3") or ("", "")
    assert ends.startswith("nothing that is learned ends with an end token, so the model is not taught to stop")
    assert note.startswith("the chat template ends answers with <|eot_id|>, which is no token of this tokenizer")
    note, ends = told(chat_template=CHATML.partition("{% if add")[0]) or ("", "")
    assert ends.startswith("what is learned ends with <|im_end|>")
    assert note.startswith("the chat template has no generation prompt: in training")
    assert 'answers stand behind "<|im_start|>' in note


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose folders `datasets` takes for datasets of the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("worker.data.hub_files.check_reached", lambda *_: None)
    (tmp_path / "owner" / "set").mkdir(parents=True)
    return write_jsonl(tmp_path / "owner" / "set" / "data.jsonl", [{"messages": TALK}] * (MOST + 9))


@pytest.mark.parametrize("offline", [False, True])
def test_a_dataset_of_the_hub_is_looked_at_by_its_first_records(
    model: Path, tmp_path: Path, hub: Path, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    job = make_job(model, hub, max_length=64)

    def at(entry: DataEntry, template: str = CHATML) -> None:
        look(job, (entry,), byte_tokenizer(chat_template=template))

    first = first_of_hub(DataEntry(path="owner/set"), MOST)
    assert first is not None and (first.columns, len(first.rows), first.whole) == (("messages",), MOST, False)
    at(DataEntry(path="owner/set"))
    for entry, template, code, number in (
        (DataEntry(path="owner/set"), "{{ messages[9].content }}", "chat-template-refuses", "line 1 of data.jsonl"),
        (DataEntry(path="owner/set", split="test"), CHATML, "dataset-unreadable", "test"),
        (DataEntry(path="owner/set", columns={"text": "body"}), CHATML, "unknown-columns", "body"),
    ):
        with pytest.raises(UserError) as told:
            at(entry, template)
        assert told.value.code == code and any(number in line for line in told.value.numbers), told.value
    assert first_of_hub(DataEntry(path="owner/set", split="train[:1%]"), MOST) is None, "a part is left to the job"


def test_what_is_not_on_a_machine_that_asks_no_hub_is_said(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("huggingface_hub.constants.HF_HUB_OFFLINE", "datasets.config.HF_HUB_OFFLINE"):
        monkeypatch.setattr(name, True)
    with pytest.raises(UserError) as told:
        first_of_hub(DataEntry(path="nobody/nothing"), MOST)
    assert told.value.code == "hub-offline"
    job = make_job(model, write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}]))
    with pytest.raises(UserError) as told:
        model_config(job.model_copy(update={"model": "nobody/nothing"}))
    assert told.value.code == "hub-offline"


def test_a_revision_of_a_model_and_its_tokenizer_is_the_one_that_is_used(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = cache / "models--owner--tiny"
    for name, commit, width in (("main", "a" * 40, 16), ("v2", "b" * 40, 32)):
        shutil.copytree(model, repository / "snapshots" / commit)
        config = repository / "snapshots" / commit / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": width}))
        (repository / "snapshots" / commit / "chat_template.jinja").write_text(f"{{{{ '{name}' }}}}")
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    job = make_job(model, write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}]))
    for revision, width, name in ((None, 16, "main"), ("v2", 32, "v2"), ("b" * 40, 32, "v2")):
        its = job.model_copy(update={"model": "owner/tiny", "tokenizer": "owner/tiny", "model_revision": revision})
        assert model_config(its).hidden_size == width
        assert load_tokenizer(its).chat_template == f"{{{{ '{name}' }}}}"


def test_the_dtype_that_a_model_is_written_in_is_told_where_it_computes_in_another(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    data = write_jsonl(tmp_path / "d.jsonl", [{"messages": TALK}])
    for bf16, told in ((True, 1), (False, 0)):
        run = tmp_path / f"run-{bf16}"
        run.mkdir()
        RunFolder(run).write_resolved(make_job(model, data, bf16=bf16).resolved_yaml())
        assert main(["first-records", str(run)]) == 0
        notes = RunFolder(run).read_first_notes() or ()
        assert sum("The trained model is written in float32 (like its base" in note for note in notes) == told
