"""Full fine-tuning of some weights under a plan, against plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from planner.errors import UserError
from planner.job.schema import Job
from planner.models.hf_model import skeleton_model
from planner.reports.make_receipt import disk_shares
from planner.reports.receipt import Asked
from tests.support.lora_jobs import engine_of, lora_job, plan_of, steps_of, steps_with
from tests.worker.engine.test_lora import _After, run_of
from worker.training.learning_rate import decay_names
from worker.training.metrics import read_metrics
from worker.training.model import load_model
from worker.training.run import run_job
from worker.training.stop import StopRequest


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def some_job(tmp_path: Path, name: str = "llama", **keys: object) -> Job:
    return lora_job(tmp_path, name, **{"method": "full", "lora_r": None, "lora_dropout": None, **keys})


def plain(job: Job, trained: set[str], count: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """As one would write it: losses, and the weights that are trained."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    decaying = decay_names(model)
    groups = [
        {"params": [p for n, p in model.named_parameters() if n in trained & names], "weight_decay": decay}
        for names, decay in ((decaying, job.weight_decay), (trained - decaying, 0.0))
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=job.learning_rate, fused=True)
    return steps_with([optimizer], model, job, count)


def in_layer(number: int) -> set[str]:
    parts = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    parts += ["input_layernorm", "post_attention_layernorm"]
    return {f"model.layers.{number}.{part}.weight" for part in parts}


MLP = {f"model.layers.1.mlp.{x}_proj.weight" for x in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("name", "keys", "trained"),
    [
        ("llama", {"trainable": [r"model\.layers\.1\.mlp", "lm_head"]}, {*MLP, "lm_head.weight"}),
        ("llama", {"trainable_layers": -1, "gradient_accumulation_steps": 1}, in_layer(0)),
        (
            "qwen2",
            {"trainable": ["model.embed_tokens", ".*{layers}.self_attn.q_proj"], "trainable_layers": 1},
            {"model.embed_tokens.weight", *(f"model.layers.2.self_attn.q_proj.{kind}" for kind in ("weight", "bias"))},
        ),
    ],
    ids=["parts", "first-layer", "tied-embedding-and-last-layer"],
)
def test_training_some_weights_equals_plain_pytorch_in_every_bit(
    tmp_path: Path, name: str, keys: dict[str, object], trained: set[str]
) -> None:
    job = some_job(tmp_path, name, **keys)
    plan, chain = plan_of(job)
    still = [t for t in (*chain.tensors(), *chain.frame_tensors) if t.name not in trained]
    assert still and all(not t.trainable and t.gradient_bytes == t.state_bytes == 0 for t in still)
    losses, wanted = plain(job, trained, 3)
    engine, model = engine_of(job, plan, chain)
    found, peaks = [], []
    for batches, seeds, items in steps_of(job, 3):
        result = engine.step(batches, seeds=seeds, learning_rate=job.learning_rate, num_items_in_batch=items)
        found += result.losses
        peaks.append(result.peak_bytes)
    assert all(torch.equal(a, b) for a, b in zip(found, losses, strict=True))
    state = {name: parts["master"] for name, parts in engine.state()}
    assert state.keys() == wanted.keys() == trained
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in state.items())
    assert 0.9 * plan.gpu_peak_bytes <= max(peaks) <= plan.gpu_peak_bytes
    base = dict(AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32).named_parameters())
    after = dict(engine.restore().named_parameters())
    assert all(torch.equal(after[name], p) for name, p in base.items() if name not in trained)
    asked = Asked(model="m", dtype="fp32", length=1, rows=1, slices=1, clip=False)
    (written,) = (share.bytes for share in disk_shares(chain, asked) if "model" in share.name)
    assert written == 2 * sum(p.nbytes for p in model.parameters()), "the whole model is written"


def test_a_run_that_was_stopped_and_resumed_writes_the_whole_model(tmp_path: Path) -> None:
    job = some_job(tmp_path, trainable=["model.layers.2.mlp"], max_steps=3, output_dir=str(tmp_path / "out"))
    run = run_of(job, tmp_path / "run")
    assert not run_job(run, _After(run, 1))
    names = {f"model.layers.2.mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
    losses, trained = plain(job, names, 3)
    numbers = 3 * sum(p.numel() for p in trained.values())
    saved = sum(file.stat().st_size for file in (run.checkpoints / "step-1").glob("*.safetensors"))
    assert 4 * numbers <= saved < 5 * numbers
    assert run_job(run, StopRequest())
    steps = [event["loss"] for event in read_metrics(run.metrics) if event["event"] == "step"]
    assert steps == [float(torch.stack(losses[2 * n : 2 * n + 2]).sum()) for n in range(3)]
    base = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32).state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    assert found.keys() == base.keys()
    assert all(torch.equal(tensor, trained.get(name, base[name])) for name, tensor in found.items())


def test_layers_are_counted_in_the_whole_model_where_only_its_first_are_loaded(tmp_path: Path) -> None:
    job = some_job(tmp_path, trainable_layers=2)
    names = {name for name, p in load_model(job, layers=2).named_parameters() if p.requires_grad}
    assert names == in_layer(1)


OTHERS = {"method": "lora", "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    "keys", [{"trainable": [r"model\.layers\.2\."]}, {**OTHERS, "layers_to_transform": [2]}], ids=["full", "lora"]
)
def test_a_job_that_trains_none_of_the_layers_that_are_loaded_is_told_so(
    tmp_path: Path, keys: dict[str, object]
) -> None:
    job = some_job(tmp_path, **keys)
    with pytest.raises(UserError) as refused:
        load_model(job, layers=1)
    assert refused.value.code == "layers-left-out" and refused.value.numbers == ("here 1 of 3 layers",)
    assert refused.value.hint is not None and refused.value.hint.startswith("--layers 3, ")
    assert any(p.requires_grad for p in load_model(job, layers=3).parameters())


def test_patterns_of_layers_that_are_not_loaded_say_nothing(tmp_path: Path) -> None:
    job = some_job(tmp_path, **OTHERS, rank_pattern={r"layers\.2\.self_attn\.q_proj": 8, "layers.0.*q_proj": 2})
    trained = {name: p.shape for name, p in load_model(job, layers=1).named_parameters() if p.requires_grad}
    assert len(trained) == 2 and {min(shape) for shape in trained.values()} == {2}


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("llama", {"trainable": ["model.layers.0", "layers.1"]}, "trainable: layers.1"),
        ("llama", {"trainable": ["model.layers.9."]}, "some that it has: model.embed_tokens.weight, model.norm.weight"),
        ("qwen2", {"trainable": ["lm_head"]}, "trainable: lm_head"),
        ("qwen2", {"trainable": [r"model\.layers\.2\.mlp", "lm_head"]}, "trainable: lm_head"),
    ],
)
def test_a_pattern_of_nothing_in_the_model_is_refused(
    tmp_path: Path, name: str, keys: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError) as refused:
        skeleton_model(some_job(tmp_path, name, **keys))
    tied = "lm_head.weight is tied: give model.embed_tokens.weight"
    assert (refused.value.hint == tied) is (name == "qwen2")
    assert refused.value.code == "trainable-not-there" and words in refused.value.numbers[0] + refused.value.numbers[-1]


AXOLOTL = """
base_model: {model}
datasets: [{{path: {data}, type: completion}}]
learning_rate: 0.01
adapter: lora
lora_r: 4
lora_alpha: 8
lora_target_linear: true
unfrozen_parameters: {patterns}
"""


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        ("['.+lora_']", ""),
        ("['^base_model.+lora_A', '.+.lora_B']", ""),
        ("['^model.layers.*', '^lm_head.*']", "names of adapters begin with base_model.model."),
        ("['.+layers.1.+lora_']", "does not match base_model.model.model.layers.0.mlp.down_proj.lora_A.default.weight"),
        ("['.+lora_', '.+lm_head']", "it matches base_model.model.lm_head.weight"),
        ("['.+layers.']", "it matches base_model.model.model.layers.0.input_layernorm.weight"),
    ],
)
def test_beside_adapters_the_patterns_of_axolotl_mean_parameters_of_pefts_model(
    tmp_path: Path, patterns: str, words: str
) -> None:
    made = lora_job(tmp_path)
    text = AXOLOTL.format(model=made.model, data=made.data[0].path, patterns=patterns)
    job = Job.parse(text, tmp_path)
    file = tmp_path / "resolved.yaml"
    file.write_text(job.resolved_yaml(), "utf-8")
    assert Job.from_resolved(file) == job
    if words:
        for load in (skeleton_model, load_model):
            with pytest.raises(UserError) as refused:
                load(job)
            assert refused.value.code == "trainable-beside-adapters" and words in str(refused.value)
        return
    without = load_model(job.model_copy(update={"trainable": None}))
    wanted = {name for name, p in without.named_parameters() if p.requires_grad}
    assert wanted == {name for name, p in load_model(job).named_parameters() if p.requires_grad}
