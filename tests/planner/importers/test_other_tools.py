"""Keys of other tools' files, one cause at a time: honoured, said to have no effect, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.errors import UserError
from planner.importers.base import REWARDS
from planner.job.schema import Job

START = {
    "axolotl": "base_model: model\ndatasets: [{path: text.jsonl, type: completion}]\nlearning_rate: 0.0002\n",
    "axolotl alone": "base_model: model\nlearning_rate: 0.0002\n",
    "LLaMA-Factory": "model_name_or_path: model\nstage: sft\ndataset: text.jsonl\n",
    "axolotl without a rate": "base_model: model\ndatasets: [{path: text.jsonl, type: completion}]\n",
    "LLaMA-Factory alone": "model_name_or_path: model\nstage: sft\n",
    "TRL": "model_name_or_path: model\ndataset_name: text.jsonl\n",
    "TRL alone": "model_name_or_path: model\n",
}

OTHER = f"{REWARDS} is not supported yet; a file for it cannot be run here"
LEAVE_OUT = "is not supported yet; leave this key out"
OPTIMIZER = (
    'optimizer: it is "{}"; it must be adamw_torch_fused, adamw_torch, adamw_8bit or muon; their states need no GPU '
    "memory"
)
PROJECTED = (
    "an optimizer with projected gradients (GaLore, APOLLO) is not supported yet; leave this key out and give "
    "method (adapter, finetuning_type): lsp, which is there for that purpose"
)
BF16 = "masters and moments stay fp32; save_dtype is bfloat16."


@pytest.fixture
def place(folder: Path) -> Path:
    (folder / "tiny").rename(folder / "model")
    (folder / "model" / "model.safetensors").touch()
    (folder / "data").mkdir()
    mine = {"file_name": "../text.jsonl"}
    info = {"mine": mine, "seen": {**mine, "columns": {"images": "pictures"}}}
    (folder / "data" / "dataset_info.json").write_text(json.dumps(info))
    return folder


@pytest.mark.parametrize(
    ("tool", "lines", "told"),
    [
        (
            "axolotl alone",
            "pretraining_dataset: [{path: text.jsonl, skip: 3, split: 'train[5:]'}]\nmax_steps: 5",
            ["pretraining_dataset: skip is given, and split names a part, too; keep one of them"],
        ),
        (
            "TRL",
            "max_length: null",
            [
                "max_length: it is null, and TRL then cuts no row; give a number of tokens, at least those of the longest"  # noqa: E501
                " row"
            ],
        ),
        (
            "LLaMA-Factory",
            "ignore_pad_token_for_loss: false",
            ["ignore_pad_token_for_loss: it is false; learning the padding is not supported yet; leave this key out"],
        ),
        (
            "LLaMA-Factory",
            "tokenized_path: saves/tokenized",
            [
                "tokenized_path: reading data that are tokenized already is not supported yet; "
                "give the dataset itself, and leave this key out"
            ],
        ),
        ("axolotl", "liger_use_token_scaling: true", [f"liger_use_token_scaling: another loss {LEAVE_OUT}"]),
        *(
            ("TRL", f"{key}: {value}", [f"{key}: {OTHER}"])
            for key, value in (
                ("use_vllm", "true"),
                ("temperature", 0.7),
            )
        ),
        (
            "TRL alone",
            "datasets: [{path: text.jsonl, columns: [chosen]}]",
            [
                'datasets: columns is ["chosen"]; a record is messages, prompt and completion, or text; another name is '  # noqa: E501
                "given as {text: name}"
            ],
        ),
        (
            "TRL alone",
            "datasets: [{path: text.jsonl, fraction: 0.5}]",
            ["datasets: fraction is not supported: it asks for shares of a mixture; give split, like train[:10%]"],
        ),
        ("axolotl", "optimizer: came_pytorch\nadam_beta3: 0.9\nadam_epsilon2: 1", [OPTIMIZER.format("came_pytorch")]),
        (
            "axolotl",
            "optimizer: galore_adamw\noptim_args: {rank: 8}\noptim_target_modules: [mlp]",
            [f'optimizer: it is "galore_adamw"; {PROJECTED}'],
        ),
        (
            "axolotl",
            "optimizer: adamw_torch\noptim_target_modules: [mlp]",
            [f"optim_target_modules: another optimizer {LEAVE_OUT}"],
        ),
        (
            "TRL",
            "optim: apollo_adamw\noptim_args: rank=8\noptim_target_modules: [mlp]",
            [f'optim: it is "apollo_adamw"; {PROJECTED}'],
        ),
        ("axolotl", "optimizer: q_galore_adamw8bit", [f'optimizer: it is "q_galore_adamw8bit"; {PROJECTED}']),
        ("LLaMA-Factory", "use_galore: true\ngalore_rank: 8", [f"use_galore: {PROJECTED}"]),
        ("LLaMA-Factory", "use_apollo: true\napollo_rank: 8", [f"use_apollo: {PROJECTED}"]),
        ("LLaMA-Factory", "use_badam: true", [f"use_badam: another optimizer {LEAVE_OUT}"]),
        ("axolotl", "relora: true\nrelora_steps: 10", [f"relora: training some weights only {LEAVE_OUT}"]),
        ("axolotl", "relora_steps: 10", [f"relora_steps: training some weights only {LEAVE_OUT}"]),
        (
            "LLaMA-Factory",
            "quantization_bit: 3\nquantization_method: eetq",
            ["quantization_bit: it is 3; only a base in 4 or 8 bits is supported"],
        ),
        (
            "LLaMA-Factory",
            "quantization_bit: 4\nquantization_method: hqq",
            [
                "quantization_method: a base quantized in another way than load_in_4bit and load_in_8bit is not "
                "supported yet; give one of them instead"
            ],
        ),
        (
            "LLaMA-Factory alone",
            "dataset: seen\ntemplate: qwen2_vl",
            ["dataset: seen has images; offmate trains on texts and conversations"],
        ),
        *(
            (
                "LLaMA-Factory alone",
                f"dataset: {names}",
                [f"dataset: {name} is not in data/dataset_info.json; give its file or its hub id" for name in "bc"],
            )
            for names in ("mine, b, c", "[mine, b, c]")
        ),
        ("axolotl", "load_in_4bit: true", ["load_in_4bit: it is for method: lora; give that too"]),
        (
            "axolotl without a rate",
            "num_epochs: 2",
            ["learning_rate: it is missing; axolotl has no default for it"],
        ),
        (
            "axolotl alone",
            "datasets: [{path: text.jsonl}, {path: text.jsonl, shards: 2}, {path: text.jsonl, oh: 1}]",
            [
                "datasets: shards is not supported: it asks for a shard of the data; give split, like train[:5%]",
                "datasets: an entry has no key oh",
            ],
        ),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line_per_cause(tool: str, lines: str, told: list[str], place: Path) -> None:
    with pytest.raises(UserError) as refused:
        Job.parse(f"{START[tool]}{lines}\n", place)
    numbers = [line.partition(": ")[2] if line.startswith("line ") else line for line in refused.value.numbers]
    assert [line.replace(f"{place}/", "") for line in numbers] == told


@pytest.mark.parametrize(
    ("tool", "lines", "means"),
    [
        (
            "axolotl",
            "model_config: {output_router_logits: true, router_aux_loss_coef: null}",
            {"router_aux_loss_coef": "auto"},
        ),
        ("TRL", "use_peft: true\nlora_target_modules: [all-linear]", {"lora_target_modules": "all-linear"}),
        ("TRL", "max_seq_length: null", {"max_length": 1024}),
        ("TRL", "learning_rate: ''", {"learning_rate": 2e-5}),
        ("axolotl", "test_datasets: []", {"eval_dataset": None}),
        (
            "TRL alone",
            "datasets: [{path: text.jsonl, columns: [text]}]\nstreaming: false\ntest_split_size: 0.1\nuse_peft: true",
            {"lora_r": 16, "lora_target_modules": "peft-default", "val_size": 0.1},
        ),
        ("LLaMA-Factory", "optim: adamw_torch\ntokenized_path: null", {"optim": "adamw_torch"}),
    ],
)
def test_what_is_asked_for_is_what_the_job_has(tool: str, lines: str, means: dict[str, object], place: Path) -> None:
    job = Job.parse(f"{START[tool]}{lines}\n", place)
    assert {key: getattr(job, key) for key in means} == means


@pytest.mark.parametrize(
    ("tool", "lines", "note"),
    [
        ("LLaMA-Factory", "finetuning_type: full\npure_bf16: true", f"pure_bf16: {BF16}"),
        ("LLaMA-Factory", "pure_bf16: true", "pure_bf16: adapters, and masters and moments, stay fp32."),
        ("axolotl", "bf16: full", f"bf16: full: {BF16}"),
        ("axolotl", "bfloat16: true", f"bfloat16: {BF16}"),
        (
            "LLaMA-Factory",
            "packing: true",
            "in this file of LLaMA-Factory's: packed documents do not attend to one another, as with neat_packing;"
            " without it they do in LLaMA-Factory; max_length is 2047, as packed rows are one token shorter than "
            "cutoff_len there",
        ),
        (
            "TRL alone",
            "datasets: [{path: text.jsonl}]\ntest_split_size: 0.1\neval_strategy: 'no'",
            "in this file of TRL's: nothing is evaluated, so the rows of val_size are trained on; TRL leaves them out",
        ),
        (
            "LLaMA-Factory",
            "create_new_adapter: true",
            "not used: create_new_adapter (it has no effect without adapter_name_or_path)",
        ),
        (
            "LLaMA-Factory",
            "finetuning_type: full\nlora_rank: 8\nlora_target: all",
            "not used: lora_rank, lora_target (it has no effect without method: lora)",
        ),
        (
            "axolotl",
            "loraplus_lr_ratio: 16\npeft_init_lora_weights: gaussian",
            "not used: peft_init_lora_weights, loraplus_lr_ratio (it has no effect without method: lora)",
        ),
        (
            "TRL",
            "lora_r: 8\nuse_dora: true\nlora_dropout: 0",
            "not used: lora_r, use_dora (it has no effect without method: lora)",
        ),
    ],
)
def test_what_is_done_otherwise_or_not_at_all_is_said(tool: str, lines: str, note: str, place: Path) -> None:
    _, notes = Job.parse_with_notes(f"{START[tool]}{lines}\n", place)
    assert note in notes


def test_documents_that_are_apart_there_too_need_no_words(place: Path) -> None:
    for lines in ("packing: true\nneat_packing: true", "neat_packing: true", "packing: false"):
        _, notes = Job.parse_with_notes(f"{START['LLaMA-Factory']}{lines}\n", place)
        assert not any("with neat_packing; without it" in note for note in notes)


def test_a_null_asks_for_no_attention_and_needs_no_words(place: Path) -> None:
    _, notes = Job.parse_with_notes("model: model\ndataset: text.jsonl\nattn_implementation: null\n", place)
    assert notes == ()


def test_the_folder_and_the_columns_of_an_entry_are_trls(place: Path) -> None:
    (place / "set" / "en").mkdir(parents=True)
    (place / "set" / "en" / "a.jsonl").write_text('{"messages": []}\n')
    entries = "{path: owner/set, data_dir: en}, {path: owner/set, data_dir: en, data_files: [a.jsonl, b.jsonl]}"
    lines = f"datasets: [{entries}, {{path: set, data_dir: en, columns: [messages]}}]\n"
    hub, files, here = Job.parse(START["TRL alone"] + lines, place).data
    assert (hub.data_files, files.data_files) == ((), ("en/a.jsonl", "en/b.jsonl"))
    assert (hub.data_dir, files.data_dir) == ("en", None)
    assert Job.parse(START["TRL alone"] + "datasets: [{path: json, data_dir: set/en}]\n", place).dataset == (
        str(place / "set" / "en"),
    )
    assert (here.path, here.type) == (str(place / "set" / "en"), "messages")
    talk = {"messages": [{"role": "user", "content": "a"}], "tools": "[]", "chat_template_kwargs": {"a": 1}}
    assert here.mapped(talk) == {"messages": talk["messages"]} and here.names(("messages",)) == ("messages",)


def test_an_optimizer_that_is_no_text_is_a_mistake_of_the_file(tmp_path: Path) -> None:
    text = "model: m\ndataset: d.jsonl\noptim: [adamw]\noptim_args: x\n"
    with pytest.raises(UserError, match=r"optim: it is \[\"adamw\"\]; it must be adamw_torch_fused"):
        Job.parse(text, tmp_path)
