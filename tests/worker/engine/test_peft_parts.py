"""PiSSA and OLoRA: adapters that take over a part of the model's own weights, against peft's in plain PyTorch. Some
tests take seconds: a model is traced for its plan, and again for its engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from planner.errors import UserError
from planner.job.schema import Job
from planner.models.files_of_weights import why_not_in_files
from planner.models.hf_model import skeleton_model
from planner.run.folder import RunFolder
from tests.support.lora_jobs import config_of_peft, engine_of, lora_job, plain_peft, plain_steps, plan_of, steps_of
from tests.support.texts import byte_tokenizer
from tests.worker.engine.test_lora import _After, run_of
from worker.sample import answers
from worker.training.learning_rate import learning_rates
from worker.training.merged import write_merged
from worker.training.metrics import read_metrics
from worker.training.run import run_job
from worker.training.stop import StopRequest


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama", {"init_lora_weights": "pissa", "rank_pattern": {"down_proj": 8}}),
        ("llama", {"init_lora_weights": "pissa_niter_4", "bf16": True, "use_rslora": True}),
        ("llama", {"init_lora_weights": "olora", "lora_modules_to_save": ["lm_head"]}),
        ("llama", {"init_lora_weights": "olora", "bf16": True}),
        ("gpt2", {"init_lora_weights": "pissa", "lora_target_modules": ["c_attn", "c_proj"]}),
    ],
    ids=["pissa-ranks", "pissa-by-iterations-bf16-rslora", "olora-whole-module", "olora-bf16", "pissa-transposed"],
)
def test_adapters_with_parts_of_the_weights_equal_plain_peft_in_every_bit(
    tmp_path: Path, name: str, keys: dict[str, object]
) -> None:
    job = lora_job(tmp_path, name, **keys)
    plan, chain = plan_of(job)
    assert any(stage.prefetch for stage in plan.stages), "nothing travels: the test shows little"
    losses, trained = plain_peft(job, 2)
    engine, _ = engine_of(job, plan, chain)
    found = []
    for batches, seeds, items in steps_of(job, 2):
        rates = learning_rates(job, 0, 6)
        found += engine.step(batches, seeds=seeds, learning_rate=rates, num_items_in_batch=items).losses
    state = {name: parts["master"].clone() for name, parts in engine.state()}
    engine.close()
    assert all(torch.equal(a, b) for a, b in zip(found, losses, strict=True))
    assert state.keys() == trained.keys() and all(torch.equal(t, trained[n]) for n, t in state.items())


def plain_model(job: Job) -> Any:
    base = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    torch.manual_seed(job.seed)
    return get_peft_model(base, config_of_peft(job)).train()


@pytest.mark.parametrize(
    "keys",
    [
        {"init_lora_weights": "pissa_niter_4", "rank_pattern": {"down_proj": 8}, "alpha_pattern": {"q_proj": 3.0}},
        {"init_lora_weights": "olora", "use_rslora": True, "lora_modules_to_save": ["lm_head"]},
    ],
    ids=["pissa", "olora-rslora-whole-module"],
)
def test_what_is_trained_is_written_as_lora_on_the_model_as_published(tmp_path: Path, keys: dict[str, Any]) -> None:
    out = tmp_path / "out"
    job = lora_job(tmp_path, max_steps=4, output_dir=str(out), lora_dropout=0.0, **keys)
    run = run_of(job, tmp_path / "run")
    assert not run_job(run, _After(run, 2))
    begun = run.begun.read_bytes()
    assert run_job(run, StopRequest()) and run.begun.read_bytes() == begun
    plain = plain_model(job)
    plain.peft_config["default"].init_lora_weights = True
    plain.save_pretrained(tmp_path / "begun")
    losses, _ = plain_steps(plain, job, 4)
    steps = [event["loss"] for event in read_metrics(run.metrics) if event["event"] == "step"]
    assert steps == [float(torch.stack(losses[2 * n : 2 * n + 2]).sum()) for n in range(4)]
    plain.save_pretrained(tmp_path / "peft", path_initial_model_for_weight_conversion=str(tmp_path / "begun"))
    wanted, found = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "peft", out))
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    whole = {f"base_model.model.{name}.weight" for name in job.lora_modules_to_save or ()}
    assert found.keys() - wanted.keys() == whole, "peft leaves these out, and they were trained"
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in (tmp_path / "peft", out)]
    assert [{**config, "target_modules": sorted(config["target_modules"])} for config in configs[:1]] == [
        {**config, "target_modules": sorted(config["target_modules"])} for config in configs[1:]
    ]
    asked = torch.tensor([byte_tokenizer()("the")["input_ids"]])
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(job.model), out).eval()
    with torch.no_grad():
        logits = plain.eval()(asked).logits
        torch.testing.assert_close(loaded(asked).logits, logits, rtol=0, atol=2e-5)
        assert (PeftModel.get_base_model(loaded).eval()(asked).logits - logits).abs().max() < 1e-4
    said = plain.generate(input_ids=asked, attention_mask=asked > -1, max_new_tokens=4, do_sample=False, pad_token_id=0)
    text = byte_tokenizer().decode(said[0, asked.shape[1] :], skip_special_tokens=True)
    assert answers(run, ("the",), 4, as_text=True) == [text]
    write_merged(job, out, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    by_peft = loaded.merge_and_unload().state_dict()
    assert all(torch.equal(merged[name], tensor) for name, tensor in by_peft.items())
    longer = lora_job(tmp_path, adapter_name_or_path=str(out), lora_r=None, lora_dropout=None)
    assert (longer.lora_r, longer.init_lora_weights) == (8, True)


def test_a_run_reads_its_beginning_once_and_is_not_gone_on_with_where_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(lora_job(tmp_path, max_steps=3, init_lora_weights="olora"), tmp_path / "run")
    assert not run_job(run, _After(run, 1))
    read: list[Path] = []
    monkeypatch.setattr("planner.models.peft_parts.load_file", lambda file: read.append(file) or load_file(file))
    assert not run_job(run, _After(run, 2))
    assert read == [run.begun], "of a large model it is large"
    run.begun.unlink()
    with pytest.raises(UserError, match="initial values of the job's adapters are lost") as refused:
        run_job(run, StopRequest())
    assert refused.value.code == "beginning-gone"


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("llama", {"init_lora_weights": "pissa", "lora_r": 129}, "its rank 129 is more than the 128 of its weight"),
        ("llama", {"init_lora_weights": "pissa", "lora_target_modules": ["embed_tokens"]}, "it is no linear layer"),
        ("gpt2", {"init_lora_weights": "olora", "lora_target_modules": ["c_proj"]}, "its weight lies transposed"),
        ("gpt2", {"init_lora_weights": "pissa", "lora_target_modules": ["lm_head"]}, "its weight is another layer's"),
        ("mixtral", {"init_lora_weights": "pissa", "lora_dropout": 0.0}, "it is no linear layer"),
    ],
)
def test_a_layer_that_gives_no_part_is_named(tmp_path: Path, name: str, keys: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as refused:
        skeleton_model(lora_job(tmp_path, name, **keys))
    assert refused.value.code == "lora-targets" and words in refused.value.numbers[1]


def test_weights_without_their_parts_are_in_no_file(tmp_path: Path) -> None:
    job = lora_job(tmp_path)
    assert why_not_in_files(job, skeleton_model(job)) is None
    job = lora_job(tmp_path, init_lora_weights="pissa")
    model: nn.Module = skeleton_model(job)
    assert why_not_in_files(job, model) == "adapters take over a part of them"
    with_parts, without = (
        Job.question(f"model: {job.model}\ndataset: x.jsonl\nmethod: lora\n{line}", tmp_path)
        for line in ("init_lora_weights: pissa\n", "init_lora_weights: gaussian\n")
    )
    assert with_parts != without
    assert RunFolder(tmp_path).begun.parent == tmp_path
