"""Files of LLaMA-Factory's v1: what they are in offmate's own keys, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.data.entry import DataEntry
from planner.errors import UserError
from planner.importers.llama_factory_v1 import LLAMA_FACTORY_V1
from planner.job.imported import imported
from planner.job.schema import Job

DATA = "identity: {path: data/identity.json, source: local, converter: alpaca}\n"
DEMO = DATA + "alpaca_en_demo: {path: data/identity.json, source: local, converter: alpaca, size: 500}\n"
HEAD = """model: model
model_class: llm
kernel_config: {name: auto}
quant_config: null
dist_config: {name: fsdp2, dcp_path: null}
train_dataset: data/demo.yaml
micro_batch_size: 1
cutoff_len: 2048
sample_backend: hf
max_new_tokens: 128
"""
ZERO = {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The folder of the files, which v1 is run two above."""
    for name in ("model", "data", "examples/v1"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "data" / "identity.json").write_text(json.dumps([{"instruction": "a", "output": "b"}]))
    (tmp_path / "data" / "demo.yaml").write_text(DEMO)
    (tmp_path / "zero.json").write_text(json.dumps(ZERO))
    (tmp_path / "examples" / "v1" / "model").symlink_to(tmp_path / "model")
    return tmp_path / "examples" / "v1"


def changed(**keys: str | None) -> str:
    """The file, with other lines; None: without."""
    lines = [line for line in HEAD.splitlines() if line.partition(":")[0] not in keys]
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in keys.items() if value is not None)])


def values_of(text: str, place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Job.parse(text, place).model_dump_json())
    return found


def refused(text: str, place: Path) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        Job.parse(text, place)
    return caught.value.numbers


def test_what_a_file_leaves_out_is_as_there_and_told(place: Path) -> None:
    job, notes = Job.parse_with_notes(HEAD, place)
    wanted = {
        "method": "full",
        "max_length": 2048,
        "per_device_train_batch_size": 1,
        "train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-4,
        "num_train_epochs": 3.0,
        "max_steps": None,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.01,
        "decay_all": True,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "max_grad_norm": 1.0,
        "seed": 42,
        "bf16": True,
        "long_rows": "cut",
        "router_aux_loss_coef": 0.0,
        "chat_template": None,
        "packing": False,
    }
    assert {key: getattr(job, key) for key in wanted} == wanted
    assert notes[0].startswith(
        "the file reads as LLaMA-Factory's v1; its defaults for keys that are not given: learning_rate"
    )
    first, second = job.data
    path = str(place.parents[1] / "data" / "identity.json")
    assert (first.path, first.converter, first.draw) == (path, "alpaca", None)
    assert second.draw is not None and (second.draw.seed, second.draw.size, second.draw.skip) == (42, 500, 0)


def test_it_is_the_same_job_when_it_is_written_again_or_kept(place: Path) -> None:
    job = Job.parse(HEAD, place)
    again = imported(HEAD, place, "v1.yaml")
    assert again.startswith("# v1.yaml, a file of LLaMA-Factory's v1, in offmate's words.")
    assert Job.parse(again, place) == job
    (place / "resolved.yaml").write_text(job.resolved_yaml())
    assert Job.from_resolved(place / "resolved.yaml") == job
    assert Job.question(HEAD.replace("data/demo.yaml", "data/gone.yaml"), place).model == job.model


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"max_steps": "10", "learning_rate": "2.0e-5"}, {"max_steps": 10, "learning_rate": 2e-5}),
        ({"max_steps": "-1"}, {"max_steps": None, "num_train_epochs": 3.0}),
        (
            {"global_batch_size": "8", "micro_batch_size": "2"},
            {"train_batch_size": 8, "gradient_accumulation_steps": 4},
        ),
        ({"dp_size": "4"}, {"train_batch_size": 4, "per_device_train_batch_size": 1}),
        ({"dist_config": None}, {"bf16": False}),
        ({"bf16": "false"}, {"bf16": False}),
        ({"batching_strategy": "padding_free", "flash_attn": "flash_attention_2"}, {"attn_implementation": "sdpa"}),
        ({"flash_attn": "eager"}, {"attn_implementation": "eager"}),
        ({"cp_size": "2", "cp_mode": "ulysses"}, {"train_batch_size": 1}),
        (
            {"peft_config": "{name: lora}"},
            {
                "method": "lora",
                "lora_r": 8,
                "lora_alpha": 16.0,
                "lora_dropout": 0.05,
                "lora_target_modules": "all-linear",
                "bf16": True,
            },
        ),
        (
            {"peft_config": "{name: lora, r: 16, lora_alpha: 32, target_modules: q_proj, use_dora: 'true'}"},
            {"lora_r": 16, "lora_alpha": 32.0, "lora_target_modules": ["q_proj"], "use_dora": True},
        ),
        (
            {"peft_config": "{name: lora}", "quant_config": "{name: bnb, quantization_bit: 4}"},
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        ),
        (
            {"peft_config": "{name: lora}", "quant_config": "{name: auto, quantization_bit: 8}"},
            {"load_in_8bit": True, "load_in_4bit": False},
        ),
        ({"quant_config": "{name: auto}"}, {"load_in_4bit": False}),
        (
            {"peft_config": "{name: freeze, freeze_trainable_layers: 2, freeze_extra_modules: null}"},
            {"method": "full", "trainable_layers": 2, "trainable": [r".*\.{layers}\."]},
        ),
        (
            {"optim_config": "{name: muon, wd: 0.1, adamw_betas: [0.9, 0.95], ns_steps: 5}"},
            {
                "optim": "muon",
                "weight_decay": 0.1,
                "adam_beta2": 0.95,
                "muon_adjust_lr_fn": "match_rms_adamw",
                "decay_all": True,
            },
        ),
        ({"dist_config": "{name: deepspeed, config_file: zero.json}"}, {"max_grad_norm": 1.0, "bf16": True}),
        ({"custom_chat_template": "'{{ messages }}'"}, {"chat_template": "{{ messages }}"}),
        ({"train_dataset": "data/identity.json"}, {"long_rows": "cut"}),
    ],
    ids=str,
)
def test_a_key_is_what_it_is_there(keys: dict[str, str | None], wanted: dict[str, Any], place: Path) -> None:
    found = values_of(changed(**keys), place)
    assert {key: found[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"batching_strategy": "dynamic_batching"}, "batching_strategy: batching otherwise than normal and"),
        ({"batching_strategy": "nromal"}, "which have micro_batch_size rows is not supported yet; give one of these"),
        ({"optim_config": "{name: muon, ns_stepz: 4}"}, "optim_config: it has ns_stepz, which is no key of it"),
        ({"lr_scheduler_config": "{name: cosine}"}, "lr_scheduler_config: another shape of the learning rate"),
        ({"model_class": "cls"}, "model_class: a model with another head"),
        (
            {"pref_loss": "simpo"},
            "pref_loss: learning from preferences in a file of v1's is not supported yet; write it",
        ),
        ({"preference": "dpo"}, "preference: learning from preferences in a file of v1's is not supported yet"),
        ({"optim_config": "{name: adam_mini}"}, "optim_config: it is for"),
        ({"optim_config": "{name: muon, momentum: 0.9}"}, "optim_config: momentum is 0.9; only 0.95 is supported"),
        ({"optim_config": "{name: muon}", "peft_config": "{name: lora}"}, "v1 trains adapters by AdamW also with muon"),
        ({"peft_config": "{name: oft}"}, "peft_config: it is for"),
        ({"peft_config": "{name: lora, rank: 4}"}, "peft_config: it has rank, which is no key of it"),
        ({"peft_config": "{name: lora, export_dir: out}", "train_dataset": None}, "export_dir asks for a merged model"),
        ({"quant_config": "{name: gptq, quantization_bit: 4}"}, "quant_config: it is {"),
        ({"dist_config": "{name: fsdp2, dcp_path: weights}"}, "dist_config: dcp_path has weights in PyTorch"),
        ({"dist_config": "{name: deepspeed, config_file: gone.json}"}, "it says how gradients are clipped"),
        (
            {"dist_config": "{name: deepspeed, config_file: zero.json}", "global_batch_size": "4"},
            "global_batch_size: under deepspeed v1 divides the loss",
        ),
        ({"max_grad_norm": "0"}, "max_grad_norm: it is 0, with which v1 learns nothing"),
        ({"train_dataset": None}, "train_dataset: it is missing"),
        ({"train_dataset": "data/gone.yaml"}, "train_dataset: there is no file data/gone.yaml"),
        ({"resume_from_checkpoint": "out/checkpoint-3"}, "resume_from_checkpoint: going on from a checkpoint"),
        ({"micro_batchsize": "3"}, "micro_batchsize: unknown key; did you mean micro_batch_size?"),
        ({"micro_batch_size": "3.5"}, "micro_batch_size: it is 3.5; it must be a whole number"),
        ({"cutoff_len": "long"}, "cutoff_len: it is"),
    ],
    ids=str,
)
def test_what_asks_for_something_else_is_refused_in_one_line_of_its_key(
    keys: dict[str, str | None], told: str, place: Path
) -> None:
    (line,) = refused(changed(**keys), place)
    assert told in line, line


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("converter: pair", "it is for preferences; known are alpaca and sharegpt"),
        ("converter: alpacca", 'converter is "alpacca"; known are alpaca and sharegpt'),
        ("streaming: true", "streaming is true, which v1 does not train on"),
        ("source: ms_hub", "local files and hf_hub are read"),
        ("subset: en", "subset is no key of a dataset"),
        ("size: 0", "size is 0; it must be a number above 0"),
    ],
)
def test_a_dataset_that_is_something_else_is_refused_by_its_name(more: str, told: str, place: Path) -> None:
    key = more.partition(":")[0]
    said = {"path": "data/identity.json", "source": "local"}
    said.pop(key, None)
    text = f"mine: {{{', '.join(f'{name}: {value}' for name, value in said.items())}, {more}}}\n"
    (place.parents[1] / "data" / "demo.yaml").write_text(text)
    (line,) = refused(HEAD, place)
    assert "train_dataset: mine: " in line and told.replace("it is for", "which is for") in line, line


def test_what_is_drawn_before_is_counted_and_refused_where_nobody_knows_how_many(place: Path) -> None:
    demo = place.parents[1] / "data" / "demo.yaml"
    one = "{path: data/identity.json, source: local, converter: alpaca"
    demo.write_text(f"a: {one}, size: 3, weight: 1.5}}\nb: {one}, weight: 0.5}}\n")
    first, second = Job.parse(HEAD, place).data
    assert first.draw is not None and second.draw is not None
    assert (first.draw.skip, second.draw.skip, second.draw.weight) == (0, 7, 0.5)
    demo.write_text(f"b: {one}, weight: 0.5}}\na: {one}, size: 3}}\n")
    assert "a: it is drawn behind a dataset with weight and without size" in refused(HEAD, place)[0]


def test_a_model_that_learns_its_positions_is_refused_where_they_are_counted_from_one(place: Path) -> None:
    (place / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    assert "gpt2 learns a vector for each position" in refused(HEAD, place)[0]
    assert Job.parse(changed(batching_strategy="padding_free"), place).data


def test_clipping_under_deepspeed_is_what_its_own_file_says(place: Path) -> None:
    (place.parents[1] / "zero.json").write_text('{"gradient_clipping": 0.5, "bf16": {"enabled": false}}')
    text = changed(dist_config="{name: deepspeed, config_file: zero.json}", max_grad_norm="2.0")
    job, notes = Job.parse_with_notes(text, place)
    assert (job.max_grad_norm, job.bf16) == (0.5, False)
    assert any("max_grad_norm is 0.5, as DeepSpeed's own file has it, and not 2.0" in note for note in notes)


def test_what_the_command_line_says_comes_above(place: Path) -> None:
    text = f"{HEAD}max_length: 512\n"
    assert Job.parse(text, place, told=("max_length",)).max_length == 512


def test_keys_of_v1_beside_those_of_other_files_are_refused_as_before(place: Path) -> None:
    text = "model_name_or_path: model\ntrain_dataset: data/demo.yaml\ncutoff_len: 3\n"
    assert "a key of LLaMA-Factory's v1 beside model_name_or_path" in refused(text, place)[0]


def test_offmates_own_keys_may_stand_beside_those_of_v1(place: Path) -> None:
    job = Job.parse(f"{HEAD}gpu_budget: 6 GiB\nsave_dtype: float32\nlearning_rate: 3.0e-5\n", place)
    assert (job.gpu_budget, job.save_dtype, job.learning_rate) == (6 * 2**30, "float32", 3e-5)


def test_no_honoured_key_is_forgotten() -> None:
    honoured = {meaning.text for meaning in LLAMA_FACTORY_V1.values() if meaning.kind == "honoured"}
    assert honoured <= Job.model_fields.keys() and DataEntry.model_fields.keys() >= {"converter", "draw"}


def test_all_weights_decay_under_one_rate_only(place: Path) -> None:
    text = "model: model\ndataset: data/identity.json\nmethod: lora\ndecay_all: true\nloraplus_lr_ratio: 16\n"
    text = text.replace("data/", str(place.parents[1] / "data") + "/")
    assert "decay_all: loraplus_lr_ratio says which weights decay" in refused(text, place)[0]
