"""Tokens that a job adds: the model has rows for them, which are trained as in plain PyTorch, or it is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from planner.errors import UserError
from planner.job.schema import Job
from planner.models.hf_model import skeleton_model
from planner.models.tokenizer import load_tokenizer
from tests.support.lora_jobs import engine_of, finished_run, lora_job, plain_steps, plan_of
from tests.support.texts import write_jsonl
from worker.data.batches import Batches
from worker.data.seeds import micro_batch_seed
from worker.training.merged import write_merged

NEW = ["<call>", "<answer>", "<tool>"]
STEPS = 3
FULL = {"method": "full", "lora_r": None, "lora_dropout": None}


def job_of(tmp_path: Path, **keys: object) -> Job:
    job = lora_job(tmp_path, **{"weight_decay": 0.0, "max_steps": STEPS, "add_tokens": NEW, **keys})
    write_jsonl(tmp_path / "data.jsonl", [{"text": f"<call>{i} of <tool>{i}<answer>"} for i in range(9)])
    return job


def plain(job: Job, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What one would write: add, resize, train."""
    model = AutoModelForCausalLM.from_pretrained(job.model)
    tokenizer = AutoTokenizer.from_pretrained(job.tokenizer)
    tokenizer.add_tokens(list(job.add_tokens or ()))
    torch.manual_seed(job.seed)
    model.resize_token_embeddings(len(tokenizer))
    if job.method == "lora":
        torch.manual_seed(job.seed)
        config = LoraConfig(
            r=job.lora_r,
            lora_alpha=job.lora_alpha,
            lora_dropout=job.lora_dropout,
            target_modules="all-linear",
            modules_to_save=list(job.lora_modules_to_save or ()),
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, config)
    monkeypatch.setattr("tests.support.lora_jobs.byte_tokenizer", lambda: load_tokenizer(job))
    return plain_steps(model.train(), job, STEPS)


@pytest.mark.parametrize("keys", [FULL, {"lora_modules_to_save": ["embed_tokens", "lm_head"]}], ids=["full", "lora"])
def test_their_rows_are_trained_as_in_plain_pytorch(
    tmp_path: Path, keys: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, **keys)
    losses, weights = plain(job, monkeypatch)
    plan, chain = plan_of(job)
    engine, model = engine_of(job, plan, chain)
    batches = Batches(job, load_tokenizer(job))
    assert model.get_input_embeddings().weight.shape[0] == 260 + len(NEW)  # type: ignore[operator]
    assert max(int(batch["input_ids"].max()) for step in range(STEPS) for batch in batches.step(step)) == 262
    found = []
    for number in range(STEPS):
        step = batches.step(number)
        seeds = [micro_batch_seed(job.seed, number, k) for k in range(len(step))]
        items = torch.tensor(batches.num_items(step))
        result = engine.step(step, seeds=seeds, learning_rate=job.learning_rate, num_items_in_batch=items)
        found += result.losses
    state = {name: parts["master"] for name, parts in engine.state()}
    assert [loss.item() for loss in found] == [loss.item() for loss in losses]
    assert state.keys() == weights.keys() and all(torch.equal(w, state[name]) for name, w in weights.items())
    engine.close()


def test_what_is_written_knows_them(tmp_path: Path) -> None:
    job = job_of(tmp_path, lora_modules_to_save=["embed_tokens", "lm_head"])
    folder = finished_run(job, tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(folder.output)
    assert len(tokenizer) == 263 and len(tokenizer("<tool>")["input_ids"]) == 1
    base = AutoModelForCausalLM.from_pretrained(job.model)
    base.resize_token_embeddings(len(tokenizer))
    trained = dict(PeftModel.from_pretrained(base, folder.output).named_parameters())
    (rows,) = [p for name, p in trained.items() if "embed_tokens.modules_to_save" in name]
    assert rows.shape[0] == 263
    write_merged(job, folder.output, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    base = AutoModelForCausalLM.from_pretrained(job.model)
    base.resize_token_embeddings(len(tokenizer))
    wanted = PeftModel.from_pretrained(base, folder.output).merge_and_unload().state_dict()
    assert merged.keys() == wanted.keys() and all(torch.equal(merged[name], wanted[name]) for name in wanted)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "merged")) == 263


def test_adapters_alone_are_refused_as_nobody_would_learn_them(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        skeleton_model(job_of(tmp_path))
    assert refused.value.code == "tokens-not-learned"
    assert refused.value.hint == "lora_modules_to_save: [embed_tokens, lm_head]"
    whole = job_of(tmp_path, lora_modules_to_save=["embed_tokens", "lm_head"])
    assert skeleton_model(whole).get_input_embeddings().weight.shape[0] == 263  # type: ignore[operator]


def test_a_tokenizer_that_is_longer_than_the_embedding_adds_nothing(tmp_path: Path) -> None:
    job = job_of(tmp_path, add_tokens=["a"])  # it is there and has its row, whatever others have
    settings = json.loads((Path(job.model) / "config.json").read_text()) | {"vocab_size": 259}
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "config.json").write_text(json.dumps(settings))
    short = job.model_copy(update={"model": str(tmp_path / "short")})
    assert skeleton_model(short).get_input_embeddings().weight.shape[0] == 259  # type: ignore[operator]


def test_frozen_weights_are_refused_likewise(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        skeleton_model(job_of(tmp_path, **FULL, trainable=[".*mlp", "model.embed_tokens"]))
    assert refused.value.code == "tokens-not-learned" and refused.value.numbers[0].endswith("; frozen: lm_head.weight")
    for keys in ({"trainable": ["model.embed_tokens", "lm_head"]}, {"trainable": [".*mlp"], "add_tokens": ["a"]}):
        assert skeleton_model(job_of(tmp_path, **{**FULL, **keys})).training


def test_tokens_and_rows_that_are_there_stay_what_they_are(tmp_path: Path) -> None:
    job = job_of(tmp_path, add_tokens=["a"], **FULL)
    assert skeleton_model(job).get_input_embeddings().weight.shape[0] == 260  # type: ignore[operator]
    (tmp_path / "wide").mkdir()
    settings = json.loads((Path(job.model) / "config.json").read_text()) | {"vocab_size": 320}
    (tmp_path / "wide" / "config.json").write_text(json.dumps(settings))
    wide = job_of(tmp_path, **FULL).model_copy(update={"model": str(tmp_path / "wide")})
    assert skeleton_model(wide).get_input_embeddings().weight.shape[0] == 320  # type: ignore[operator]
