"""A trained model stops where it was taught to end: plain transformers, adapters, merged models, GGUF files. Some
tests take seconds: a model is traced for its plan, and again for its engine."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

from planner.importers.templates import named_template
from planner.job.schema import Job
from planner.models.tokenizer import load_tokenizer
from planner.run.folder import RunFolder
from tests.support.lora_jobs import lora_job, model_folder
from tests.support.runs import make_run
from tests.support.texts import byte_tokenizer, make_job, sentences, tiny_llama_folder, write_jsonl
from tests.worker.engine.test_lora import run_of
from worker.data.batches import Batches
from worker.export import main as export
from worker.sample import answers
from worker.sample import main as sample
from worker.training.ends import ends_of_files, ends_of_model, tell_ends
from worker.training.gguf import LLAMA_CPP
from worker.training.metrics import read_metrics
from worker.training.model import load_model
from worker.training.run import run_job
from worker.training.stop import StopRequest

END, OLD = 259, 256  # <|im_end|>, <eos>
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def of_talks(job: Job, tmp_path: Path) -> Job:
    """The job, on conversations under ChatML."""
    data = write_jsonl(tmp_path / "talks.jsonl", [{"messages": TALK}] * 8)
    return job.model_copy(update={"dataset": (str(data),), "chat_template": named_template("chatml")})


def full_run(tmp_path: Path, **keys: Any) -> RunFolder:
    """A run of full fine-tuning on conversations that is done."""
    job, run = make_run(tmp_path, "llama", **{"max_length": 64, "max_steps": 1, **keys})
    run.resolved.write_text(of_talks(job, tmp_path).resolved_yaml(), "utf-8")
    assert run_job(run, StopRequest())
    return run


def ids(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))["eos_token_id"]


def test_a_base_model_that_learned_chatml_stops_at_its_end_mark(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    run = full_run(tmp_path, learning_rate=3e-2, max_steps=40, eval_steps=40, sample_prompts=[[TALK[0]]], val_size=2)
    model, tokenizer = (kind.from_pretrained(run.output) for kind in (AutoModelForCausalLM, AutoTokenizer))
    asked = tokenizer.apply_chat_template([TALK[0]], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**asked, max_new_tokens=20, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(said) == "yes<|im_end|>"
    assert ids(run.output / "generation_config.json") == [END, OLD]
    assert ids(run.output / "config.json") == OLD and tokenizer.eos_token == "<eos>"  # of no tool, nothing else changes
    assert (
        "data: what is learned ends with <|im_end|>, where the model does not stop (it stops at <eos>): "
        "generation_config.json of the trained model names <|im_end|>, <eos>"
    ) in caplog.messages
    card = (run.output / "README.md").read_text("utf-8")
    told = "`generation_config.json` names `<|im_end|>`, `<eos>`: generation stops there."
    assert f"The model was taught to end with `<|im_end|>`. {told}" in card
    (shown,) = (event["text"] for event in read_metrics(run.metrics) if event["event"] == "sample")
    assert shown == "yes"
    capsys.readouterr()
    assert (sample([str(run.path), "hi", "--raw"]), sample([str(run.path), "hi"])) == (0, 0)
    assert capsys.readouterr() == ("yes<|im_end|>\nyes\n", "")


def test_a_file_of_llama_factory_gives_the_tokenizer_its_templates_end_token(tmp_path: Path) -> None:
    _, run = make_run(tmp_path, "llama", max_steps=1, max_length=64)
    data = write_jsonl(tmp_path / "talks.jsonl", [{"messages": TALK}] * 8)
    text = f"model_name_or_path: model\nstage: sft\nfinetuning_type: full\ndataset: {data}\ntemplate: chatml\n"
    keys = "max_steps: 1\ncutoff_len: 64\nper_device_train_batch_size: 2\n"
    run.resolved.write_text(Job.parse(text + keys, tmp_path).resolved_yaml())
    assert run_job(run, StopRequest())
    assert AutoTokenizer.from_pretrained(run.output).eos_token == "<|im_end|>"
    assert (ids(run.output / "config.json"), ids(run.output / "generation_config.json")) == (END, [END, OLD])


def lora_run(tmp_path: Path) -> tuple[Job, RunFolder]:
    """A LoRA job on conversations that is done, and its run."""
    job = of_talks(lora_job(tmp_path, max_length=64, max_steps=1), tmp_path)
    run = run_of(job, tmp_path / "run")
    assert run_job(run, StopRequest())
    return job, run


def test_beside_adapters_lies_where_they_stop_and_the_merged_model_stops_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, run = lora_run(tmp_path)
    (old,) = ends_of_files(job)
    assert ids(run.output / "generation_config.json") == [END, old]
    card = (run.output / "README.md").read_text("utf-8")
    assert f"Its base does not stop there: give `generate` `eos_token_id=[{END}, {old}]`." in card
    assert f"peft does not read the file, so give its generate eos_token_id=[{END}, {old}]" in caplog.text
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(job.model), run.output)
    assert plain.generation_config.eos_token_id == old, "as peft has it, who does not read the file"
    assert export([str(run.path), str(tmp_path / "merged")]) == 0
    card = (tmp_path / "merged" / "README.md").read_text("utf-8")
    assert "library_name: transformers\n" in card and " trained on talks.jsonl in 1 step" in card
    assert 'names `<|im_end|>`, `"`: generation stops there.' in card and "Adapters" not in card
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.generation_config.eos_token_id == [END, old] and merged.config.eos_token_id == old
    first = _first_token(plain, run.output)
    (run.output / "generation_config.json").write_text(json.dumps({"eos_token_id": [first, old]}))
    assert answers(run, ("hi",), 4) == [""], "its first token is the end"
    assert answers(run, ("hi",), 4, raw=True) == [byte_tokenizer().decode([first])]


def _first_token(model: Any, folder: Path) -> int:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = tokenizer.apply_chat_template([TALK[0]], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return int(model.generate(**asked, max_new_tokens=1, do_sample=False, pad_token_id=0)[0, -1])


@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_converter_is_given_a_tokenizer_that_ends_as_was_taught(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = full_run(tmp_path) if method == "full" else lora_run(tmp_path)[1]
    before = {file.name: file.read_bytes() for file in run.output.iterdir() if file.is_file()}
    script = tmp_path / "elsewhere" / "convert_hf_to_gguf.py"
    script.parent.mkdir()
    script.write_text(  # as llama.cpp's takes the end token: that of the tokenizer, if tokenizer.json has it as a token
        "import json, pathlib, sys\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "read = lambda name: json.loads((folder / name).read_text())\n"
        "assert (folder / 'model.safetensors').is_file() and (folder / 'config.json').is_file()\n"
        "end = read('tokenizer_config.json')['eos_token']\n"
        "(found,) = (t['id'] for t in read('tokenizer.json')['added_tokens'] if t['content'] == end and t['special'])\n"
        "pathlib.Path(sys.argv[sys.argv.index('--outfile') + 1]).write_text(str(found))\n"
    )
    monkeypatch.setenv(LLAMA_CPP, str(script))
    target = tmp_path / "m.gguf"
    assert export([str(run.path), str(target), "--gguf=auto"]) == 0
    assert target.read_text() == str(END)
    assert {file.name: file.read_bytes() for file in run.output.iterdir() if file.is_file()} == before


@pytest.mark.parametrize(("own", "wanted"), [(None, [OLD]), (5, [OLD, 5]), ([5, 6], [OLD, 5, 6]), ([OLD, 5], None)])
def test_the_tokenizers_end_token_that_texts_end_with_is_named_beside_those_of_the_config(
    tmp_path: Path, own: int | list[int] | None, wanted: list[int] | None
) -> None:
    folder = tiny_llama_folder(tmp_path / "model")
    config = LlamaConfig.from_pretrained(folder)
    config.eos_token_id = own
    config.save_pretrained(folder)
    job = make_job(folder, write_jsonl(tmp_path / "data.jsonl", sentences(3)))
    model, tokenizer = load_model(job), load_tokenizer(job)
    before = ends_of_model(model)
    assert before == ends_of_files(job) == (() if own is None else (own,) if isinstance(own, int) else tuple(own))
    ends = tell_ends(job, model, tokenizer, Batches(job, tokenizer))
    assert (ends.taught, bool(ends.new)) == ((OLD,), wanted is not None)
    found: Any = model
    assert found.generation_config.eos_token_id == (own if wanted is None else wanted)
    assert found.config.eos_token_id == {None: OLD, 5: OLD}.get(own if not isinstance(own, list) else 0, wanted or own)


def test_a_generation_config_with_a_fault_of_its_own_is_written_all_the_same(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", sentences(1))
    job = of_talks(make_job(model_folder(tmp_path / "model", "llama"), data, max_length=64), tmp_path)
    faulty = {"eos_token_id": OLD, "do_sample": False, "temperature": 0.6}
    (Path(job.model) / "generation_config.json").write_text(json.dumps(faulty))
    model, tokenizer = load_model(job), load_tokenizer(job)
    assert ends_of_files(job) == (OLD,)
    tell_ends(job, model, tokenizer, Batches(job, tokenizer))
    found: Any = model
    found.save_pretrained(tmp_path / "out")
    saved = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (saved.eos_token_id, saved.temperature) == ([END, OLD], 0.6)
