"""The end token that a template of LLaMA-Factory's gives the tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import UserError
from planner.job.imported import imported
from planner.job.schema import Job
from planner.models.tokenizer import load_tokenizer
from tests.support.texts import tiny_llama_folder, write_jsonl
from worker.data.batches import Batches

FULL = "model_name_or_path: model\nstage: sft\nfinetuning_type: full\ndataset: data.jsonl\ncutoff_len: 200\n"
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tiny_llama_folder(tmp_path / "model")
    write_jsonl(tmp_path / "data.jsonl", [{"messages": TALK}])
    return tmp_path


def test_the_tokenizers_end_token_is_the_templates_and_a_note_says_so(folder: Path) -> None:
    job, notes = Job.parse_with_notes(FULL + "template: chatml\n", folder)
    assert load_tokenizer(job).eos_token == "<|im_end|>" and job.add_tokens is None
    told = "in this file of LLaMA-Factory's: template: chatml makes <|im_end|> the tokenizer's end token, as there"
    assert told in notes
    assert Batches(job, load_tokenizer(job)).sample().endswith("⟦yes<|im_end|>\n⟧")
    assert "# template in the file\nspecial_tokens:\n  eos_token: <|im_end|>\n" in imported(
        FULL + "template: chatml\n", folder, "job.yaml"
    )


def test_a_template_whose_end_token_is_added_to_the_vocabulary_says_how_its_row_begins(folder: Path) -> None:
    job, notes = Job.parse_with_notes(FULL + "template: chatml\nresize_vocab: true\n", folder)
    assert job.add_tokens == ("<|im_end|>", "<|im_start|>")
    assert any("tokens of add_tokens that the tokenizer lacks get embedding rows" in note for note in notes)


@pytest.mark.parametrize("lines", ["template: vicuna\n", "template: mistral\n", "template: gemma2\n", ""])
def test_other_templates_leave_the_tokenizer_its_own(folder: Path, lines: str) -> None:
    assert Job.parse(FULL + lines, folder).special_tokens is None


def test_a_job_of_offmates_own_and_one_that_names_its_end_token_keep_theirs(folder: Path) -> None:
    own = "model: model\ndataset: data.jsonl\nchat_template: chatml\n"
    assert Job.parse(own, folder).special_tokens is None
    named = FULL + "template: chatml\nspecial_tokens: {eos_token: <pad>, bos_token: <eos>}\n"
    assert Job.parse(named, folder).special_tokens == {"eos_token": "<pad>", "bos_token": "<eos>"}
    begun = FULL + "template: chatml\nspecial_tokens: {bos_token: <eos>}\n"
    assert Job.parse(begun, folder).special_tokens == {"eos_token": "<|im_end|>", "bos_token": "<eos>"}


def test_texts_end_with_the_templates_end_token_but_those_of_llama3(folder: Path) -> None:
    write_jsonl(folder / "data.jsonl", [{"text": "once"}])
    text = FULL.replace("sft", "pt")
    job = Job.parse(text + "template: qwen\n", folder)
    assert Batches(job, load_tokenizer(job)).sample() == "⟦once<|im_end|>⟧"
    assert Job.parse(text + "template: llama3\n", folder).special_tokens is None


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_token_that_is_not_there_is_added_where_the_vocabulary_grows_and_else_refused(
    folder: Path, method: str
) -> None:
    text = FULL.replace("full", method) + "template: llama3\n"
    with pytest.raises(UserError, match=r"has no token <\|eot_id\|>") as refused:
        load_tokenizer(Job.parse(text.replace("lora", "full"), folder))
    assert refused.value.code == "token-not-there"
    (folder / "model" / "model.safetensors").touch()
    job = Job.parse(text + "resize_vocab: true\n", folder)
    assert (job.add_tokens, load_tokenizer(job).eos_token_id) == (("<|eot_id|>",), 260)
    assert job.lora_modules_to_save == (None if method == "full" else ("embed_tokens", "lm_head"))


def test_adapters_train_no_embedding_for_a_token_that_is_there(folder: Path) -> None:
    (folder / "model" / "model.safetensors").touch()
    job = Job.parse(FULL.replace("full", "lora") + "template: chatml\n", folder)
    assert (job.add_tokens, job.lora_modules_to_save) == (None, None)
    assert load_tokenizer(job).eos_token == "<|im_end|>"
