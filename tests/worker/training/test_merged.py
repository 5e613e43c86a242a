"""Adapters merged into their base, file by file: what peft's own merge in memory gives, in every bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from planner.errors import UserError
from planner.job.schema import Job
from planner.machine.this_machine import free_ram_bytes
from planner.models.hf_model import skeleton_model
from planner.models.peft_lora import load_adapter
from planner.models.tokenizer import load_tokenizer
from planner.units import format_bytes
from tests.support.lora_jobs import config_of_peft, lora_job
from worker.export import main
from worker.storage.model_folder import Output
from worker.training.base_files import weight_files
from worker.training.card import model_card
from worker.training.merged import _sizes, write_merged
from worker.training.model import load_model

EXPERTS = {"lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "lora_dropout": 0.0}


def adapters_of(job: Job, folder: Path) -> Path:
    """Adapters as training leaves them: nothing in them is zero."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(job.model), config_of_peft(job))
    torch.manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.rand_like(parameter)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(job.model).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "keys", "dtype"),
    [
        ("llama", {"use_rslora": True}, torch.bfloat16),
        ("llama", {"use_dora": True}, torch.float32),
        ("llama", {"load_in_4bit": True}, torch.float32),
        ("llama", {"lora_modules_to_save": ["embed_tokens", "lm_head"]}, torch.bfloat16),
        ("gpt2", {"lora_target_modules": ["c_attn", "c_proj"], "lora_modules_to_save": ["ln_f"]}, torch.float32),
        ("mixtral", {**EXPERTS, "lora_target_modules": ["q_proj"]}, torch.bfloat16),
        ("mixtral", {"lora_dropout": 0.0}, torch.float32),
        ("gpt_oss", {**EXPERTS, "lora_target_modules": []}, torch.float32),
        (
            "llama",
            {
                "lora_target_modules": ["q_proj", "v_proj"],
                "layers_to_transform": [1],
                "rank_pattern": {"v_proj": 8},
                "alpha_pattern": {"q_proj": 3},
                "init_lora_weights": "orthogonal",
            },
            torch.float32,
        ),
    ],
    ids=[
        "sharded-bf16-rslora",
        "dora",
        "trained-on-4-bits",
        "whole-modules",
        "gpt2",
        "experts-each-in-the-files",
        "experts-named-by-peft",
        "experts-in-one-piece",
        "some-layers",
    ],
)
def test_a_merged_model_is_what_peft_merges_in_every_bit(
    tmp_path: Path, name: str, keys: dict[str, Any], dtype: torch.dtype
) -> None:
    job = lora_job(tmp_path, name, **keys)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype)
    model.save_pretrained(tmp_path / "base", max_shard_size="200KB")
    AutoTokenizer.from_pretrained(job.model).save_pretrained(tmp_path / "base")
    job = job.model_copy(update={"model": str(tmp_path / "base"), "lora_dropout": 0.0})
    adapters = adapters_of(job, tmp_path / "adapters")
    write_merged(job, adapters, tmp_path / "merged")
    files = [sorted(file.name for file in (tmp_path / n).glob("*.safetensors")) for n in ("base", "merged")]
    assert files[0] == files[1] and len(files[0]) > 1
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    base = AutoModelForCausalLM.from_pretrained(job.model, dtype="auto")
    wanted = PeftModel.from_pretrained(base, adapters).merge_and_unload().state_dict()
    assert found.dtype == dtype and found.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in found.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")("the")
    assert not list((tmp_path / "merged").glob("adapter_*"))
    (tmp_path / "another").touch()
    mode = (tmp_path / "another").stat().st_mode
    assert {file.name: file.stat().st_mode for file in (tmp_path / "merged").iterdir()} == {
        file.name: mode for file in (tmp_path / "merged").iterdir()
    }


@pytest.mark.parametrize(
    "keys",
    [
        {"lora_target_modules": ["c_attn"], "lora_modules_to_save": ["wte"]},
        {"lora_target_modules": ["c_attn"], "lora_modules_to_save": ["wte", "lm_head"]},
        {"lora_target_modules": ["c_attn", "wte"]},
        {"lora_target_modules": ["c_attn", "lm_head"]},
    ],
    ids=["whole-embedding", "both-whole", "embedding", "head"],
)
def test_what_was_trained_at_one_end_stays_there_where_both_are_one_in_the_base(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    job = lora_job(tmp_path, "gpt2", **keys)
    adapters = adapters_of(job, tmp_path / "adapters")
    write_merged(job, adapters, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert not merged.config.tie_word_embeddings
    assert not torch.equal(merged.transformer.wte.weight, merged.lm_head.weight)
    apart = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(job.model), adapters).eval()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, apart(tokens).logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("named", [True, False], ids=["config-names-it", "config-names-none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_memory_it_is_merged_in_the_dtype_of_the_base_and_takes_what_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, named: bool
) -> None:
    job = lora_job(tmp_path, add_tokens=["<tool>"], lora_modules_to_save=["embed_tokens", "lm_head"])
    AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype).save_pretrained(job.model)
    config = Path(job.model) / "config.json"
    if not named:
        config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "dtype"}))
    for beside in ("preprocessor_config.json", "hf_quant_config.json", "tokenizer.model"):
        config.with_name(beside).write_text("{}")
    trained: Any = load_model(job)
    torch.manual_seed(3)
    for p in trained.parameters():
        p.data += 0.05 * torch.rand_like(p) if p.requires_grad else 0
    trained.save_pretrained(tmp_path / "adapters", save_embedding_layers=False)
    base_bytes = sum(p.numel() * (4 if "lora_" in name else 2) for name, p in trained.named_parameters())
    needed = base_bytes + 4 * 4 * max(p.numel() for name, p in trained.named_parameters() if "base_layer" in name)
    monkeypatch.setattr("worker.training.merged.free_ram_bytes", lambda: needed - 1)
    with pytest.raises(UserError, match="there is not enough of it free") as refused:
        write_merged(job, tmp_path / "adapters", tmp_path / "merged")
    assert refused.value.numbers == (f"needed {format_bytes(needed)}, free {format_bytes(needed - 1)}",)
    monkeypatch.setattr("worker.training.merged.free_ram_bytes", lambda: needed)
    there: list[int] = []

    def counted(model: Any, folder: str) -> None:
        there.append(sum(p.nbytes for p in model.parameters()))
        load_adapter(model, folder)

    monkeypatch.setattr("worker.training.merged.load_adapter", counted)
    write_merged(job, tmp_path / "adapters", tmp_path / "merged")
    assert there == [base_bytes]
    base = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype)
    base.resize_token_embeddings(261)
    wanted = PeftModel.from_pretrained(base, tmp_path / "adapters").merge_and_unload().state_dict()
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert found.keys() == wanted.keys() and all(torch.equal(found[n], w.to(dtype)) for n, w in wanted.items())
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert (tmp_path / "merged" / "preprocessor_config.json").is_file()
    assert not (tmp_path / "merged" / "hf_quant_config.json").exists()
    assert not (tmp_path / "merged" / "tokenizer.model").exists()


@pytest.mark.parametrize(
    "keys",
    [{}, {"add_tokens": ["<end>"], "lora_modules_to_save": ["embed_tokens", "lm_head"]}],
    ids=["in-files", "in-memory"],
)
def test_the_merged_model_ends_its_answers_where_the_job_says(tmp_path: Path, keys: dict[str, Any]) -> None:
    job = lora_job(tmp_path, special_tokens={"eos_token": "<end>" if keys else "!"}, **keys)
    cast(Any, load_model(job)).save_pretrained(tmp_path / "adapters", save_embedding_layers=False)
    tokenizer = load_tokenizer(job)
    older = Path(job.model) / "special_tokens_map.json"
    older.write_text(json.dumps({"eos_token": tokenizer.decode(256)}))
    tokenizer.save_pretrained(tmp_path / "adapters")
    write_merged(job, tmp_path / "adapters", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token_id == tokenizer.eos_token_id
    assert merged.config.eos_token_id == tokenizer.eos_token_id == (260 if keys else 0)
    assert tokenizer.eos_token_id in torch.tensor(merged.generation_config.eos_token_id)
    assert merged.config.dtype == torch.float32


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_that_are_published_one_by_one_are_saved_from_copies(tmp_path: Path, name: str) -> None:
    job = lora_job(tmp_path, name, lora_target_modules=["q_proj"])
    config = Path(job.model) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 40, "layer_types": None}))
    model = skeleton_model(job)
    size, most = _sizes(model, torch.bfloat16)
    numbers = {name: p.numel() for name, p in model.named_parameters()}
    assert size == sum(n * (4 if "lora_" in name else 2) for name, n in numbers.items())
    experts = [n for name, n in numbers.items() if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(experts) == 80
    assert most - size == (2 * sum(experts) if name == "mixtral" else 16 * max(experts))


def test_no_more_memory_is_free_than_a_control_group_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2**20 < free_ram_bytes() <= psutil.virtual_memory().total
    monkeypatch.setattr("planner.machine.this_machine.ram_bytes", lambda: 2**20)
    assert free_ram_bytes() == 2**20


def test_the_room_asked_for_is_enough_for_adapters_and_whole_modules(tmp_path: Path) -> None:
    job = lora_job(tmp_path, "llama", lora_modules_to_save=["embed_tokens", "lm_head"], bf16=True)
    model = load_model(job)
    asked = Output(model, torch.float32).weight_bytes
    cast(Any, model).save_pretrained(
        tmp_path / "made",
        state_dict={n: p.detach().float() for n, p in model.named_parameters() if p.requires_grad},
        save_embedding_layers=False,
    )
    written = (tmp_path / "made" / "adapter_model.safetensors").stat().st_size
    assert 0.9 * asked < written < asked + 2**16


def test_what_cannot_be_merged_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = lora_job(tmp_path)
    run, folder = tmp_path / "run", tmp_path / "merged"
    run.mkdir()
    (run / "resolved.yaml").write_text(job.resolved_yaml())
    assert main([str(run), str(folder)]) == 2
    assert "[nothing-to-merge]" in capsys.readouterr().err
    adapters_of(job, run / "output")
    for file in Path(job.model).glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    assert main([str(run), str(folder)]) == 2
    assert "[not-mergeable]" in capsys.readouterr().err
    for file in Path(job.model).glob("*.bin"):
        file.rename(file.with_suffix(".safetensors"))
    assert main([str(run), str(folder)]) == 0 and (folder / "model.safetensors").is_file()
    with pytest.raises(UserError, match="is not empty"):
        write_merged(job, run / "output", folder)
    assert {path.name for path in tmp_path.iterdir() if "merged" in path.name} == {"merged"}


def test_an_export_says_what_it_does_and_shows_no_bars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # In memory, by transformers, which shows bars.
    job = lora_job(tmp_path, "gpt2", lora_target_modules=["c_attn"], lora_modules_to_save=["wte"])
    run = tmp_path / "run"
    run.mkdir()
    (run / "resolved.yaml").write_text(job.resolved_yaml())
    adapters_of(job, run / "output")
    transformers_logging.enable_progress_bar()
    capsys.readouterr()
    assert main([str(run), str(tmp_path / "merged")]) == 0
    said = capsys.readouterr()
    assert said.err == f"merging the adapters of {run / 'output'} into {job.model}\n"
    assert said.out == f"The model with its adapters merged into it is in {tmp_path / 'merged'}.\n"


def test_only_the_files_that_the_base_is_loaded_from_are_taken(tmp_path: Path) -> None:
    job = lora_job(tmp_path)
    adapters, base, other = adapters_of(job, tmp_path / "adapters"), Path(job.model), b"the base under other names"
    # As Mistral publishes it: the weights once more, and what its own loader reads first.
    for name in ("consolidated.safetensors", "consolidated.safetensors.index.json", "params.json"):
        (base / name).write_bytes(other)
    (base / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    write_merged(job, adapters, tmp_path / "one")
    names = {file.name for file in (tmp_path / "one").iterdir()}
    assert "model.safetensors" in names and "config.json" in names
    assert not {name for name in names if "consolidated" in name or "index" in name or name == "params.json"}

    AutoModelForCausalLM.from_pretrained(base).save_pretrained(tmp_path / "sharded", max_shard_size="200KB")
    job = job.model_copy(update={"model": str(tmp_path / "sharded")})
    index = tmp_path / "sharded" / "model.safetensors.index.json"
    shards = sorted((tmp_path / "sharded").glob("model-*.safetensors"))
    text = index.read_text("utf-8")
    shards[-1].with_name("twice.safetensors").write_bytes(shards[0].read_bytes())
    index.write_text(text.replace(shards[-1].name, "twice.safetensors"), "utf-8")
    with pytest.raises(UserError, match="another form") as refused:
        write_merged(job, adapters, tmp_path / "two")
    assert refused.value.code == "not-mergeable" and f"is in {shards[0].name} and in twice" in refused.value.numbers[0]
    index.write_text(text.replace(shards[-1].name, "gone.safetensors"), "utf-8")
    with pytest.raises(UserError, match="another form") as refused:
        write_merged(job, adapters, tmp_path / "two")
    assert "has no gone.safetensors" in refused.value.numbers[0] and not (tmp_path / "two").exists()
    index.write_text(text, "utf-8")  # what is beside the shards is none of them
    write_merged(job, adapters, tmp_path / "two")
    found = {file.name for file in (tmp_path / "two").glob("*.safetensors*")}
    assert found == {index.name, *(shard.name for shard in shards)}


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}'])
def test_a_broken_index_is_told_as_such(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match="is no index of weights"):
        weight_files(tmp_path)


def test_a_revision_of_the_base_is_what_is_trained_named_and_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = lora_job(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(job.model)
    repository = tmp_path / "hub" / "models--owner--tiny"
    (repository / "refs").mkdir(parents=True)
    for name, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        base.save_pretrained(repository / "snapshots" / commit)
        AutoTokenizer.from_pretrained(job.model).save_pretrained(repository / "snapshots" / commit)
        (repository / "refs" / name).write_text(commit)
        weight = base.model.embed_tokens.weight.detach().clone()  # in the end that of v2
        with torch.no_grad():
            base.model.embed_tokens.weight.add_(1.0)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    its = job.model_copy(update={"model": "owner/tiny", "model_revision": "v2"})
    model = cast(Any, load_model(its))
    assert torch.equal(model.get_input_embeddings().weight, weight)
    assert model.peft_config["default"].revision == "v2"
    assert "| model_revision | v2 |" in model_card(its, (), 1)
    there = job.model_copy(update={"model": str(repository / "snapshots" / ("b" * 40))})
    adapters = adapters_of(there, tmp_path / "adapters")
    write_merged(its, adapters, tmp_path / "merged")
    write_merged(there, adapters, tmp_path / "wanted")
    merged, wanted = (tmp_path / name / "model.safetensors" for name in ("merged", "wanted"))
    assert merged.read_bytes() == wanted.read_bytes()
