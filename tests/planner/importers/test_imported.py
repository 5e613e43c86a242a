"""A file of another tool in offmate's words."""

from __future__ import annotations

from pathlib import Path

from planner.job.imported import imported


def test_each_key_has_its_value_and_a_comment_saying_where_it_comes_from(folder: Path) -> None:
    text = """\
base_model: tiny
datasets:
  - path: text.jsonl
    type: completion
    split: train[:50%]
chat_template: chatml
sequence_len: 2048
learning_rate: 1e-5
optimizer: adamw_bnb_8bit
wandb_project: mine
deepspeed:
"""
    assert (
        imported(text, folder, "axolotl.yml")
        == f"""\
# axolotl.yml, a file of axolotl's, in offmate's words.
model: {folder}/tiny  # base_model in the file
# datasets in the file
dataset:
- path: {folder}/text.jsonl
  split: train[:50%]
  type: text
chat_template: chatml
max_length: 2048  # sequence_len in the file
per_device_train_batch_size: 1  # what axolotl does where nothing is said
learning_rate: 1.0e-05
lr_scheduler_type: cosine  # what axolotl does where nothing is said
warmup_steps: 0.03  # what axolotl does where nothing is said
num_train_epochs: 1.0  # what axolotl does where nothing is said
optim: adamw_8bit  # optimizer in the file
bf16: auto  # what axolotl does where nothing is said
# what axolotl does where nothing is said
report_to:
- wandb
wandb_project: mine
long_rows: split  # what axolotl does where nothing is said

# {folder}/tiny has no weights: the model starts from random ones under seed 42.
# optim: adamw_8bit rounds AdamW's moments; adamw_torch has them in fp32, 6 bytes more a parameter.
"""
    )


def test_a_name_that_says_that_a_column_is_not_used_is_explained(folder: Path) -> None:
    text = "base_model: tiny\ndatasets:\n- path: text.jsonl\n  type: chat_template\nchat_template: chatml\n"
    said = imported(f"{text}learning_rate: 1e-5\n", folder, "axolotl.yml")
    assert "# datasets in the file; '': not used\ndataset:\n" in said and "    train: ''\n" in said


def test_offmates_own_file_stays_what_it_is(folder: Path) -> None:
    text = "model: tiny\ndataset: text.jsonl\nmax_steps: 3\n"
    lines = imported(text, folder, "job.yaml").splitlines()
    assert lines[:4] == [
        "# job.yaml, in offmate's words.",
        f"model: {folder}/tiny",
        f"dataset: {folder}/text.jsonl",
        "max_steps: 3",
    ]


def test_keys_that_follow_from_others_of_the_file_name_these(folder: Path) -> None:
    text = """\
model_name_or_path: tiny
stage: pt
finetuning_type: freeze
freeze_trainable_layers: 3
freeze_extra_modules: embed_tokens
dataset: text.jsonl
"""
    lines = imported(text, folder, "freeze.yaml").splitlines()
    assert lines[2:7] == [
        "# freeze_extra_modules in the file",
        "trainable:",
        r"- .*\.{layers}\.",
        "- .*embed_tokens",
        "trainable_layers: 3  # freeze_trainable_layers in the file",
    ]
    assert "packing: wrapped  # stage in the file" in lines
    bare = imported(text.replace("freeze_trainable_layers: 3\n", ""), folder, "freeze.yaml")
    assert "trainable_layers: 2  # what LLaMA-Factory does where nothing is said" in bare


def test_the_best_model_follows_from_saves_that_are_at_evaluations(folder: Path) -> None:
    text = "base_model: tiny\ndatasets: [{path: text.jsonl, type: completion}]\nlearning_rate: 1e-4\n"
    text += "val_set_size: 0.5\n"
    one = imported(text + "evals_per_epoch: 4\nsaves_per_epoch: 1\n", folder, "axolotl.yml")
    assert "load_best_model_at_end: true  # saves_per_epoch, evals_per_epoch in the file\n" in one
    other = imported(text + "evals_per_epoch: 1\nsaves_per_epoch: 4\n", folder, "axolotl.yml")
    assert "load_best_model_at_end" not in other.partition("# not used")[0]
