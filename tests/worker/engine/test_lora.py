"""LoRA: adapters of peft trained under a plan, against peft's own training in plain PyTorch. Some tests take seconds:
a model is traced for its plan, and again for its engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from planner.codec import to_json
from planner.errors import UserError
from planner.job.frozen import freeze
from planner.job.schema import Job
from planner.measure.machine_rates import estimate_hardware
from planner.models.peft_lora import plain_name
from planner.run.folder import RunFolder
from planner.schedule.compile import OpKind, compile_program
from planner.schedule.memory_use import gpu_peak_bytes
from tests.support.lora_jobs import engine_of, lora_job, plain_peft, plan_of, steps_of
from tests.support.model_folders import write_model
from tests.support.texts import byte_tokenizer
from worker.sample import answers
from worker.storage.model_folder import Output
from worker.training.learning_rate import learning_rates
from worker.training.metrics import read_metrics
from worker.training.model import load_model
from worker.training.run import run_job
from worker.training.stop import StopRequest

EXPERTS = {"lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "lora_dropout": 0.0}


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama", {"bf16": True, "max_length": 24}),  # so that slices differ in length
        ("gpt2", {"lora_target_modules": ["c_attn", "c_proj"]}),
        ("llama", {"use_rslora": True, "lora_target_modules": r".*layers\.[01]\..*(q|v)_proj"}),
        ("llama", {"use_dora": True, "lora_dropout": 0.0, "lora_modules_to_save": ["embed_tokens", "lm_head"]}),
        ("llama", {"optim": "muon", "lora_modules_to_save": ["lm_head"]}),
        (
            "llama",
            {
                "loraplus_lr_ratio": 16.0,
                "loraplus_lr_embedding": 1e-3,
                "lora_modules_to_save": ["norm"],
                "lora_target_modules": ["q_proj", "up_proj", "embed_tokens"],
            },
        ),
        ("mixtral", {**EXPERTS, "lora_target_modules": ["q_proj"]}),
        ("mixtral", {**EXPERTS, "lora_target_modules": "peft-default"}),
        ("llama", {"lora_target_modules": ["all-linear", "embed_tokens", "lm_head"]}),
        ("gpt_oss", {**EXPERTS, "lora_target_modules": [], "bf16": True}),
        (
            "llama",
            {
                "lora_target_modules": ["q_proj", "down_proj", "v_proj"],
                "layers_to_transform": [0, 2],
                "init_lora_weights": "gaussian",
                "layers_pattern": ["layers"],
                "rank_pattern": {"down_proj": 8},
                "alpha_pattern": {r"layers\.2\..*q_proj": 3.0},
            },
        ),
        (
            "llama",
            {
                "exclude_modules": "|".join((".*mlp.*", ".*o_proj")),
                "init_lora_weights": "orthogonal",
                "gradient_accumulation_steps": 1,
            },
        ),
    ],
    ids=[
        "llama-bf16-2-slices",
        "gpt2-2-slices",
        "llama-rslora-by-pattern",
        "llama-dora-whole-modules",
        "llama-muon",
        "llama-loraplus",
        "mixtral-experts",
        "mixtral-experts-and-pefts-own",
        "llama-all-linear-and-more",
        "gpt-oss-experts-alone-bf16",
        "llama-some-layers-and-ranks",
        "llama-but-for-some-orthogonal",
    ],
)
def test_lora_under_a_plan_equals_plain_peft_in_every_bit(tmp_path: Path, name: str, keys: dict[str, object]) -> None:
    job = lora_job(tmp_path, name, **keys)
    plan, chain = plan_of(job)
    assert any(stage.prefetch for stage in plan.stages), "nothing travels: the test shows little"
    losses, trained = plain_peft(job, 3)
    engine, model = engine_of(job, plan, chain)
    found, peaks = [], []
    for batches, seeds, items in steps_of(job, 3):
        result = engine.step(batches, seeds=seeds, learning_rate=learning_rates(job, 0, 6), num_items_in_batch=items)
        found += result.losses
        peaks.append(result.peak_bytes)
    state = {name: parts["master"].clone() for name, parts in engine.state()}
    assert all(torch.equal(a, b) for a, b in zip(found, losses, strict=True))
    assert state.keys() == trained.keys() and all(torch.equal(t, trained[n]) for n, t in state.items())
    assert 0.9 * plan.gpu_peak_bytes <= max(peaks) <= plan.gpu_peak_bytes
    frozen = dict(AutoModelForCausalLM.from_pretrained(job.model, dtype=model.dtype).named_parameters())
    own = [(name, p) for name, p in engine.restore().named_parameters() if name not in trained]
    restored = {plain_name(name).replace(".original_module", ""): parameter for name, parameter in own}
    assert restored.keys() == frozen.keys()
    assert all(torch.equal(restored[name], parameter) for name, parameter in frozen.items())


def test_frozen_weights_travel_one_way_and_have_no_gradients_and_no_states(tmp_path: Path) -> None:
    job = lora_job(tmp_path)
    plan, chain = plan_of(job)
    program = compile_program(plan, chain)
    frozen = {t.name for t in chain.tensors() if not t.trainable}
    assert all(
        t.gradient_bytes == t.state_bytes == 0 for t in (*chain.tensors(), *chain.frame_tensors) if not t.trainable
    )
    touched = {(op.kind, name) for op in program.ops for name in (op.subject[2:], *op.names) if name in frozen}
    assert {kind for kind, _ in touched} == {OpKind.ALLOC, OpKind.FETCH, OpKind.FREE}
    engine, model = engine_of(job, plan, chain)
    host = engine._weights.host.items
    assert {item[0] for item in host if item[2:] in frozen} == {"w"}
    before = {item: host[item][0].clone() for item in host if item[2:] in frozen}
    assert before
    for batches, seeds, items in steps_of(job, 2):
        engine.step(batches, seeds=seeds, learning_rate=1e-2, num_items_in_batch=items)
    assert all(torch.equal(host[item][0], weight) for item, weight in before.items())
    assert gpu_peak_bytes(program, chain) < sum(p.nbytes for p in model.parameters())
    engine.close()


def test_a_model_with_adapters_is_evaluated_and_writes_as_plain_peft_would(tmp_path: Path) -> None:
    job = lora_job(tmp_path)
    engine, _ = engine_of(job, *plan_of(job))
    plain = load_model(job)
    for name, parts in engine.state():  # fresh adapters give nothing
        random = torch.Generator().manual_seed(len(name))
        parts["master"].copy_(plain.get_parameter(name).data.normal_(std=0.1, generator=random))
    engine.load_state([(name, dict(parts)) for name, parts in engine.state()], step=1)
    plain.eval()
    (batch, *_), _, _ = next(steps_of(job, 1))
    with torch.no_grad():
        assert torch.equal(engine.evaluate([batch]).losses[0], plain(**batch).loss)
        prompts = [[1, 2, 3, 4], [7, 8, 9, 10]]
        wanted = plain.generate(
            input_ids=torch.tensor(prompts),
            attention_mask=torch.ones(2, 4, dtype=torch.long),
            max_new_tokens=6,
            do_sample=False,
            use_cache=True,
            pad_token_id=257,
        )
    assert engine.generate(prompts, new_tokens=6, pad=257) == wanted[:, 4:].tolist()
    engine.close()


class _After(StopRequest):
    """Asks for a stop once the run has done `count` steps."""

    def __init__(self, run: RunFolder, count: int) -> None:
        super().__init__()
        self.run, self.count = run, count

    @property
    def asked(self) -> bool:
        return sum(event["event"] == "step" for event in read_metrics(self.run.metrics)) >= self.count

    @asked.setter
    def asked(self, value: bool) -> None:
        pass


def run_of(job: Job, folder: Path) -> RunFolder:
    """A run folder as a trainer finds it."""
    plan, chain = plan_of(job)
    run = RunFolder(folder)
    run.path.mkdir()
    run.write_frozen(freeze(job))
    run.resolved.write_text(job.resolved_yaml(), "utf-8")
    parts = {
        "plan": to_json(plan),
        "chain": to_json(chain),
        "hardware": to_json(estimate_hardware(torch.device("cpu"))),
    }
    run.plan.write_text(json.dumps({"format": 1, **parts}))
    return run


def test_a_run_of_lora_that_was_stopped_and_resumed_equals_plain_peft_in_every_bit(tmp_path: Path) -> None:
    job = lora_job(tmp_path, max_steps=4, output_dir=str(tmp_path / "out"), loraplus_lr_ratio=4.0)
    run = run_of(job, tmp_path / "run")
    assert not run_job(run, _After(run, 2))
    saved = sum(file.stat().st_size for file in (run.checkpoints / "step-2").glob("*.safetensors"))
    losses, trained = plain_peft(job, 4)
    numbers = 3 * sum(p.numel() for p in trained.values())
    assert 4 * numbers <= saved < 5 * numbers
    assert run_job(run, StopRequest())
    steps = [event["loss"] for event in read_metrics(run.metrics) if event["event"] == "step"]
    assert steps == [float(torch.stack(losses[2 * n : 2 * n + 2]).sum()) for n in range(4)]
    base = AutoModelForCausalLM.from_pretrained(job.model)
    plain = PeftModel.from_pretrained(base, tmp_path / "out")
    found = dict(plain.named_parameters())
    assert all(torch.equal(found[name], tensor) for name, tensor in trained.items())
    tokenizer = byte_tokenizer()
    asked = torch.tensor([tokenizer("the")["input_ids"]])
    said = plain.generate(input_ids=asked, attention_mask=asked > -1, max_new_tokens=4, do_sample=False, pad_token_id=0)
    wanted = tokenizer.decode(said[0, asked.shape[1] :], skip_special_tokens=True)
    assert answers(run, ("the",), 4, as_text=True) == [wanted]


def test_what_adapters_say_ends_where_the_jobs_special_tokens_say(tmp_path: Path) -> None:
    job = lora_job(tmp_path, max_steps=1, output_dir=str(tmp_path / "out"))
    run = run_of(job, tmp_path / "run")
    assert run_job(run, StopRequest())
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(job.model), tmp_path / "out")
    tokenizer = byte_tokenizer()
    asked = torch.tensor([tokenizer("the")["input_ids"]])
    said = plain.generate(input_ids=asked, attention_mask=asked > -1, max_new_tokens=4, do_sample=False, pad_token_id=0)
    first = int(said[0, asked.shape[1]])
    end = tokenizer.convert_ids_to_tokens(first)
    resolved = yaml.safe_load(run.resolved.read_text("utf-8")) | {"special_tokens": {"eos_token": end}}
    run.resolved.write_text(json.dumps(resolved))
    assert answers(run, ("the",), 4, as_text=True) == [""], "its first token is the end"


def test_the_output_is_an_adapter_that_peft_loads(tmp_path: Path) -> None:
    job = lora_job(tmp_path, bf16=True)
    model = load_model(job)
    base = {n.removeprefix("base_model.model."): p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    output = Output(model, torch.float32)
    trained = {n: torch.randn_like(p) for n, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    for parameter in model.parameters():  # an engine leaves only shapes behind
        parameter.data = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    state = ((name, {"master": tensor}) for name, tensor in trained.items())
    write_model(tmp_path / "out", output, model, byte_tokenizer(), state, dtype=torch.float32)
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= files
    assert not any(name.startswith("model") for name in files)
    assert output.weight_bytes == sum(t.nbytes for t in trained.values())
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16), tmp_path / "out"
    )
    found = dict(loaded.named_parameters())
    assert all(torch.equal(found[name], tensor) for name, tensor in trained.items())
    assert loaded.peft_config["default"].base_model_name_or_path == job.model
    assert len(base) + len(trained) == len(found)


def test_a_job_goes_on_from_an_adapter_as_peft_does(tmp_path: Path) -> None:
    job = lora_job(tmp_path, gradient_accumulation_steps=1, lora_target_modules=["q_proj", "down_proj"])
    with torch.no_grad():
        first = load_model(job)
        for parameter in first.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    first.save_pretrained(tmp_path / "first")
    job = lora_job(tmp_path, gradient_accumulation_steps=1, adapter_name_or_path=str(tmp_path / "first"), lora_r=4)
    assert job.lora_target_modules == ("down_proj", "q_proj")
    base = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    plain = PeftModel.from_pretrained(base, tmp_path / "first", is_trainable=True).train()
    engine, _ = engine_of(job, *plan_of(job))
    ((batch,), (seed,), items), *_ = steps_of(job, 1)
    torch.manual_seed(seed)
    assert torch.equal(
        engine.step([batch], seeds=[seed], learning_rate=1e-2, num_items_in_batch=items).losses[0],
        plain(**batch, num_items_in_batch=items).loss,
    )
    engine.close()
    of_two_layers = dict(load_model(job, layers=2).named_parameters())
    assert all(torch.equal(p, plain.get_parameter(name)) for name, p in of_two_layers.items() if "lora" in name)
    config = tmp_path / "first" / "adapter_config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"lora_alpha": 2 * settings["lora_alpha"]}))
    alpha = settings["lora_alpha"]
    assert why_not(job) == ("adapter-changed", f"lora_alpha: {2 * alpha}, at the submission {float(alpha)}")
    config.write_text(json.dumps(settings))
    file = tmp_path / "first" / "adapter_model.safetensors"
    whole, name = load_file(file), "base_model.model.model.embed_tokens.weight"
    embeddings = base.get_input_embeddings().weight.detach().clone()
    save_file({**whole, name: embeddings}, file)
    load_model(job)
    save_file({**whole, name: embeddings + 0.5}, file)
    assert why_not(job) == ("adapter-not-usable", f"{name} is another than the model's")
    save_file({**whole, "base_model.model.other.lora_A.weight": embeddings}, file)
    assert why_not(job) == ("adapter-not-usable", "base_model.model.other.lora_A.weight is not in both")
    file.write_bytes(b"none")
    assert why_not(job)[0] == "adapter-not-usable"
    file.unlink()
    assert why_not(job)[0] == "adapter-not-readable"


@pytest.mark.parametrize(
    ("name", "keys", "made"),
    [
        ("mixtral", {"lora_dropout": 0.0}, {"rank_pattern": {r".*\.gate_up_proj": 8}}),
        ("gpt_oss", {**EXPERTS, "lora_target_modules": []}, {"lora_target_modules": ()}),
        (
            "llama",
            {"lora_target_modules": ["q_proj", "up_proj"], "layers_to_transform": 2, "rank_pattern": {"q_proj": 2}},
            {"layers_to_transform": (2,), "rank_pattern": {"q_proj": 2}},
        ),
    ],
)
def test_adapters_of_experts_and_of_some_layers_are_written_as_peft_does_and_gone_on_from(
    tmp_path: Path, name: str, keys: dict[str, object], made: dict[str, object]
) -> None:
    job = lora_job(tmp_path, name, **keys)
    model = load_model(job)
    trained = {n: torch.randn_like(p) for n, p in model.named_parameters() if p.requires_grad}
    state = ((name, {"master": tensor}) for name, tensor in trained.items())
    write_model(tmp_path / "first", Output(model, torch.float32), model, byte_tokenizer(), state, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    plain = dict(PeftModel.from_pretrained(base, tmp_path / "first").named_parameters())
    job = lora_job(tmp_path, name, adapter_name_or_path=str(tmp_path / "first"), lora_r=4, lora_dropout=None)
    assert {key: getattr(job, key) for key in made} == made
    found = {name: p for name, p in load_model(job).named_parameters() if p.requires_grad}
    assert found.keys() == trained.keys()
    assert all(torch.equal(p, trained[name]) and torch.equal(p, plain[name]) for name, p in found.items())


def test_a_run_begins_with_the_adapter_it_was_submitted_with_and_goes_on_without_it(tmp_path: Path) -> None:
    load_model(lora_job(tmp_path)).save_pretrained(tmp_path / "first")
    run = run_of(lora_job(tmp_path, max_steps=2, adapter_name_or_path=str(tmp_path / "first")), tmp_path / "run")
    assert not run_job(run, _After(run, 1))
    file = tmp_path / "first" / "adapter_model.safetensors"
    save_file({name: weight + 1 for name, weight in load_file(file).items()}, file)
    assert not run_job(run, _After(run, 0)), "it goes on from its checkpoint"
    shutil.move(run.checkpoints, tmp_path / "kept")
    with pytest.raises(UserError, match="not those that the job was submitted with") as refused:
        run_job(run, StopRequest())
    assert refused.value.code == "data-changed" and refused.value.numbers[0].startswith(f"{file}: ")
    shutil.rmtree(run.checkpoints, ignore_errors=True)
    shutil.move(tmp_path / "kept", run.checkpoints)
    shutil.rmtree(tmp_path / "first")
    assert not run_job(run, _After(run, 0)), "it goes on from its checkpoint"


def why_not(job: Job) -> tuple[str, str]:
    with pytest.raises(UserError) as refused:
        load_model(job)
    return refused.value.code, refused.value.numbers[0]
