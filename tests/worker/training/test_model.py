"""The model that a run starts from, and the model folder that it leaves."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from planner.errors import UserError
from planner.models.tokenizer import load_tokenizer
from tests.support.lora_jobs import lora_job
from tests.support.model_folders import write_model
from tests.support.short_runs import equal, tiny_job
from tests.support.texts import byte_tokenizer, make_job, sentences, tiny_llama_folder, write_jsonl
from tests.support.tiny_models import config_of
from worker.data.batches import Batches
from worker.storage.model_folder import Output
from worker.training.model import check_reach, load_model, tell_special_tokens

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_model_folder_loads_with_the_trained_weights(tmp_path: Path, name: str, bf16: bool) -> None:
    folder = tiny_llama_folder(tmp_path / "model")
    if name == "gpt2":  # tied embeddings
        config_of("gpt2", vocabulary=260).save_pretrained(folder)
    job = make_job(folder, write_jsonl(tmp_path / "d.jsonl", sentences(4)), max_length=32, bf16=bf16, max_steps=2)
    model = load_model(job)
    output = Output(model, torch.bfloat16 if bf16 else torch.float32)
    trained = {n: torch.randn_like(p, dtype=torch.float32) for n, p in model.named_parameters()}
    for parameter in model.parameters():  # an engine leaves only shapes behind
        parameter.data = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    dtype = torch.bfloat16 if bf16 else torch.float32
    state = ((n, {"master": t}) for n, t in trained.items())
    write_model(tmp_path / "out", output, model, load_tokenizer(job), state, dtype=dtype)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.dtype == dtype
    assert loaded.config.use_cache
    parameters = dict(loaded.named_parameters())
    assert parameters.keys() == trained.keys()
    assert all(torch.equal(parameters[n], t.to(dtype)) for n, t in trained.items())
    assert load_tokenizer(make_job(tmp_path / "out", tmp_path / "d.jsonl")).eos_token_id == 256
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_pickled_weights_of_tensors_are_loaded_and_others_refused_in_words(tmp_path: Path) -> None:
    job = tiny_job(tmp_path)
    weights = {name: torch.full_like(tensor, 0.5) for name, tensor in load_model(job).state_dict().items()}
    file = Path(job.model) / "pytorch_model.bin"
    torch.save(weights, file)
    assert all(tensor.eq(0.5).all() for tensor in load_model(job).parameters())
    file.write_bytes(b"ctorch._utils\n_rebuild_nothing\n.")  # a name that only PyTorch knows to be none
    with pytest.raises(UserError, match=r"The weights of .* cannot be loaded") as refused:
        load_model(job)
    assert refused.value.code == "weights-not-usable"


def test_a_folder_without_weights_starts_as_plain_pytorch_would(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    job = tiny_job(tmp_path)
    model = load_model(job)
    torch.manual_seed(42)
    plain = AutoModelForCausalLM.from_config(model.config)
    assert equal(dict(model.named_parameters()), dict(plain.named_parameters()))
    assert "has no weights; starting from random ones under seed 42" in caplog.text


def test_a_folder_with_weights_starts_from_them(tmp_path: Path) -> None:
    job = tiny_job(tmp_path)
    saved = load_model(job)
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.normal_()
    saved.save_pretrained(tmp_path / "model")
    model = load_model(job)
    assert equal(dict(model.named_parameters()), dict(saved.named_parameters()))
    assert (model.training, model.config.use_cache) == (True, False)


def test_torn_weights_are_an_error(tmp_path: Path) -> None:
    job = tiny_job(tmp_path)
    load_model(job).save_pretrained(tmp_path / "model")
    weights = tmp_path / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"The weights of .* cannot be loaded"):
        load_model(job)


def test_a_tokenizer_of_another_model_is_an_error(tmp_path: Path) -> None:
    job = tiny_job(tmp_path)
    with pytest.raises(UserError, match="token 260 is in the data, the model has 260"):
        check_reach(job, load_model(job), 260, 64)
    check_reach(job, load_model(job), Batches(job, byte_tokenizer()).largest_token, 64)


def test_an_embedding_with_an_adapter_has_as_many_rows(tmp_path: Path) -> None:
    job = lora_job(tmp_path, lora_target_modules=["embed_tokens", "q_proj"])
    check_reach(job, load_model(job), 259, 64)
    with pytest.raises(UserError, match="token 260 is in the data, the model has 260"):
        check_reach(job, load_model(job), 260, 64)


def test_more_tokens_than_learned_positions_are_an_error(tmp_path: Path) -> None:
    folder = tiny_llama_folder(tmp_path / "m")
    config_of("gpt2", vocabulary=260).save_pretrained(folder)
    job = make_job(folder, write_jsonl(tmp_path / "d.jsonl", sentences(3)), max_length=129)
    with pytest.raises(UserError, match="max_length 129, rows of 129 tokens, positions 128"):
        check_reach(job, load_model(job), 256, 129)


def test_a_token_that_is_there_may_end_texts_and_the_model_says_so(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, special_tokens={"eos_token": "!"}, max_length=128)
    tokenizer, before = load_tokenizer(job), byte_tokenizer()
    (end,) = before("!")["input_ids"]
    assert (tokenizer.eos_token, tokenizer.eos_token_id, len(tokenizer)) == ("!", end, len(before))
    assert Batches(job, tokenizer).step(0)[0]["input_ids"].eq(end).any(1).all()
    model = load_model(job)
    tell_special_tokens(job, model, tokenizer)
    assert model.config.eos_token_id == end and end in torch.tensor(model.generation_config.eos_token_id)


def test_a_token_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no token <new>") as refused:
        load_tokenizer(tiny_job(tmp_path, special_tokens={"eos_token": "!", "additional_special_tokens": ["<new>"]}))
    assert refused.value.code == "token-not-there"
