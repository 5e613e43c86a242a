"""A job file: what it means, and what is said when it is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from planner.errors import Exit, UserError
from planner.job.aliases import ALIASES, NOT_THERE, NOT_USED, QUANTIZED, REPORTING
from planner.job.schema import CANONICAL, Job
from tests import ROOT

BASE = "model: tiny\ndataset: text.jsonl\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model without weights, one without a tokenizer, a data file, a template and an empty folder."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    (tmp_path / "tiny" / "tokenizer.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    return tmp_path


def parse(extra: str, folder: Path) -> Job:
    return Job.parse(BASE + extra, folder)


def refusal(text: str, folder: Path) -> UserError:
    with pytest.raises(UserError) as caught:
        Job.parse(text, folder)
    assert caught.value.exit_code == Exit.USAGE
    return caught.value


def test_two_keys_are_enough_and_the_rest_has_defaults(folder: Path) -> None:
    job = parse("", folder)
    assert job.model == job.tokenizer == str(folder / "tiny")
    assert job.dataset == (str(folder / "text.jsonl"),)
    assert job.max_length == 1024
    assert job.per_device_train_batch_size == 8
    assert job.gradient_accumulation_steps == 1
    assert job.learning_rate == 5e-5
    assert job.max_grad_norm == 1.0
    assert job.gpu_budget is None
    assert job.exact and not job.bf16


def test_a_resolved_job_reads_back_equal(folder: Path) -> None:
    job = parse("gpu_budget: 10GiB\nlearning_rate: 5e-5\nchat_template: template.jinja\noutput_dir: out\n", folder)
    (folder / "resolved.yaml").write_text(job.resolved_yaml())
    assert Job.from_resolved(folder / "resolved.yaml") == job
    assert set(yaml.safe_load(job.resolved_yaml())) == set(Job.model_fields)


def test_a_resolved_id_stays_one_whatever_stands_beside_it(folder: Path) -> None:
    job = Job.parse("model: output/tiny\ndataset: [data/set, checkpoints]\nrun_name: x\n", folder)
    (folder / "resolved.yaml").write_text(job.resolved_yaml())
    for name in ("output", "data", "checkpoints"):
        (folder / name).mkdir()
    assert Job.from_resolved(folder / "resolved.yaml") == job


def test_a_resolved_path_that_has_gone_is_named(folder: Path) -> None:
    (folder / "resolved.yaml").write_text(parse("", folder).resolved_yaml())
    (folder / "text.jsonl").unlink()
    with pytest.raises(UserError, match="there is no dataset at") as caught:
        Job.from_resolved(folder / "resolved.yaml")
    assert caught.value.exit_code == Exit.USAGE


def test_relative_paths_start_at_the_file_and_not_at_the_shell(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "job.yaml").write_text(BASE + "output_dir: ../out\n")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    job = Job.load(folder / "job.yaml")
    assert job.model == str(folder / "tiny")
    assert job.output_dir == str(folder.parent / "out")


def test_a_job_without_a_model_has_one_mistake(folder: Path) -> None:
    error = refusal("dataset: text.jsonl", folder)
    assert error.numbers == ("model: it is missing; it must be a path or Hugging Face id",)


def test_the_tokenizer_is_the_models_when_none_is_given(folder: Path) -> None:
    assert parse("tokenizer: null", folder) == parse("", folder)


def test_hub_ids_stay_as_they_are(folder: Path) -> None:
    job = Job.parse("model: Qwen/Qwen3-0.6B\ndataset: [roneneldan/TinyStories, text.jsonl]", folder)
    assert (job.model, job.tokenizer) == ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")
    assert job.dataset == ("roneneldan/TinyStories", str(folder / "text.jsonl"))


def test_axolotls_list_of_datasets_is_read(folder: Path) -> None:
    job = Job.parse("base_model: tiny\ndatasets:\n  - {path: text.jsonl, type: alpaca}\n  - path: owner/set\n", folder)
    assert job.dataset == (str(folder / "text.jsonl"), "owner/set")


VALUES = {"packing": "true", "learning_rate": "1e-4", "lr_scheduler_type": "cosine", "warmup_steps": "0.1",
          "num_train_epochs": "2", "method": "full", "chat_template": "template.jinja", "max_length": "64",
          "lora_r": "0", "lora_target_modules": "null", "tokenizer": "tiny", "optim": "adamw_torch",
          "per_device_train_batch_size": "2", "model": "tiny", "dataset": "text.jsonl",
          "eval_dataset": "text.jsonl", "val_size": "0.1", "eval_strategy": "no",
          "per_device_eval_batch_size": "2"}  # fmt: skip


SPELLED_OTHERWISE = ("train_on_inputs", "assistant_only_loss", "use_peft", "base_model", "model_name_or_path")
"""Aliases with values of their own, or that tell whose a file is."""


@pytest.mark.parametrize(
    "alias",
    [alias for aliases in ALIASES.values() for alias in aliases if alias not in SPELLED_OTHERWISE],
)
def test_an_alias_means_its_canonical_key(alias: str, folder: Path) -> None:
    key = CANONICAL[alias]
    base = {"model": "tiny", "dataset": "text.jsonl"}
    base.pop(key, None)
    lines = [f"{name}: {value}" for name, value in base.items()]
    assert Job.parse("\n".join([*lines, f"{alias}: {VALUES[key]}"]), folder) == Job.parse(
        "\n".join([*lines, f"{key}: {VALUES[key]}"]), folder
    )


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("learning_rate: 5e-5", "learning_rate", 5e-5),
        ("learning_rate: 1", "learning_rate", 1.0),
        ("gpu_budget: 10GiB", "gpu_budget", 10 * 2**30),
        ("gpu_budget: 1.5 GB", "gpu_budget", 1_500_000_000),
        ("cpu_budget: 4096", "cpu_budget", 4096),
        ("max_grad_norm: 0", "max_grad_norm", None),
        ("max_grad_norm: null", "max_grad_norm", None),
        ("max_steps: -1", "max_steps", None),
        ("save_total_limit: null", "save_total_limit", None),
        ("save_minutes: 0", "save_minutes", None),
        ("save_minutes: 5", "save_minutes", 5.0),
        ("warmup_ratio: 0.03", "warmup_steps", 0.03),
        ("adapter: null", "method", "full"),
        ("train_on_inputs: true", "train_on", "all"),
        ("train_on_inputs: false", "train_on", "completions"),
        ("use_peft: false", "method", "full"),
        ("chat_template: tokenizer_default", "chat_template", None),
        ("report_to: wandb", "report_to", "none"),
        ("report_to: [tensorboard, wandb]", "report_to", "none"),
        ("run_name: 2024-02-30", "run_name", "2024-02-30"),
        ("run_name: 2024-02-03", "run_name", "2024-02-03"),
        ("report_to: []", "report_to", "none"),
        ("chat_template: template.jinja", "chat_template", "{{ messages }}"),
        (
            "chat_template: '{% for m in messages %}{% endfor %}'",
            "chat_template",
            "{% for m in messages %}{% endfor %}",
        ),
    ],
)
def test_a_value_is_read_as_people_write_it(line: str, field: str, value: object, folder: Path) -> None:
    assert getattr(parse(line, folder), field) == value


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("micro_batch_size: auto", ("auto", 1, 8)),
        ("micro_batch_size: auto\ntrain_batch_size: 32", ("auto", 1, 32)),
        ("micro_batch_size: auto\ngradient_accumulation_steps: 1", ("auto", 1, 8)),
        ("train_batch_size: 32", ("auto", 1, 32)),
        ("train_batch_size: 32\nmicro_batch_size: 4", (4, 8, 32)),
        ("train_batch_size: 32\ngradient_accumulation_steps: 4", (8, 4, 32)),
        ("train_batch_size: 32\nmicro_batch_size: 4\ngradient_accumulation_steps: 8", (4, 8, 32)),
        ("micro_batch_size: 4\ngradient_accumulation_steps: 8", (4, 8, None)),
    ],
)
def test_the_rows_of_a_step_are_those_of_a_micro_batch_times_their_number(
    lines: str, found: tuple[object, ...], folder: Path
) -> None:
    job = parse(lines, folder)
    assert (job.per_device_train_batch_size, job.gradient_accumulation_steps, job.train_batch_size) == found
    (folder / "resolved.yaml").write_text(job.resolved_yaml())
    assert Job.from_resolved(folder / "resolved.yaml") == job


def test_a_split_that_was_decided_reads_back(folder: Path) -> None:
    job = parse("train_batch_size: 32", folder).with_slices(4)
    (folder / "resolved.yaml").write_text(job.resolved_yaml())
    assert Job.from_resolved(folder / "resolved.yaml") == job
    assert (job.slice_rows, job.gradient_accumulation_steps, job.is_split) == (4, 8, True)


@pytest.mark.parametrize("value", ["false", "no", "'no'", "null", "0", "0.0", "[]", "none"])
def test_a_key_of_something_that_is_not_there_may_be_switched_off(value: str, folder: Path) -> None:
    assert parse("".join(f"{key}: {value}\n" for key in NOT_THERE), folder) == parse("", folder)


@pytest.mark.parametrize("key", [*(key for keys in NOT_USED.values() for key in keys), "report_to", "wandb_watch"])
def test_a_key_that_changes_nothing_is_accepted_and_said_once(key: str, folder: Path) -> None:
    job, notes = Job.parse_with_notes(BASE + f"{key}: 10\n", folder)
    assert job == parse("", folder)
    assert len([note for note in notes if note.startswith(f"not used: {key} (")]) == 1
    _, silent = Job.parse_with_notes(BASE + f"{key}: false\n", folder)
    assert silent == job.notes, "switched off there is nothing to say"


def test_who_asks_torch_to_compile_is_told_the_key_that_does(folder: Path) -> None:
    _, notes = Job.parse_with_notes(BASE + "torch_compile: true\n", folder)
    assert "not used: torch_compile (with exact: false, compile: auto compiles layers where that is faster)" in notes


AXOLOTL = """
base_model: tiny
load_in_8bit: false
load_in_4bit: false
strict: false
datasets:
  - path: text.jsonl
    type: alpaca
    ds_type: json
    split: train
dataset_prepared_path: last_run_prepared
val_set_size: 0.05
output_dir: ./outputs/out
sequence_len: 2048
sample_packing: true
eval_sample_packing: false
adapter:
lora_model_dir:
lora_dropout:
wandb_project: mine
wandb_entity:
wandb_watch: all
gradient_accumulation_steps: 8
micro_batch_size: 1
num_epochs: 1
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 2e-5
train_on_inputs: false
bf16: true
fp16:
tf32: false
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
resume_from_checkpoint:
logging_steps: 1
xformers_attention:
flash_attention: true
sdp_attention: true
warmup_ratio: 0.1
evals_per_epoch: 2
saves_per_epoch: 1
debug:
deepspeed:
weight_decay: 0.0
fsdp:
fsdp_config:
special_tokens:
"""


def test_a_whole_file_of_axolotl_is_read_and_says_what_became_of_it(folder: Path) -> None:
    job, notes = Job.parse_with_notes(AXOLOTL, folder)
    assert (job.max_length, job.slice_rows, job.gradient_accumulation_steps, job.warmup_steps) == (2048, 1, 8, 0.1)
    assert (job.val_size, job.optim, job.train_on, job.packing) == (0.05, "adamw_torch_fused", "completions", True)
    assert notes[0] == (
        "in offmate's names: base_model is model, datasets is dataset, val_set_size is val_size, sequence_len is "
        "max_length, sample_packing is packing, adapter is method, micro_batch_size is per_device_train_batch_size, "
        "num_epochs is num_train_epochs, optimizer is optim, lr_scheduler is lr_scheduler_type, train_on_inputs is "
        "train_on, warmup_ratio is warmup_steps"
    )
    assert (
        "not used: wandb_project, wandb_watch (nothing is reported to other programs; metrics.jsonl has all figures)"
        in notes
    )
    assert "not used: flash_attention, sdp_attention (attention is what attn_implementation says)" in notes
    assert set(yaml.safe_load(job.resolved_yaml())) == set(Job.model_fields), "offmate's own names only"


def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_known_one(folder: Path) -> None:
    assert str(refusal(BASE + "learnign_rate: 1e-4\n", folder)) == (
        "job.yaml has one mistake.\n"
        "  line 3: learnign_rate: unknown key; did you mean learning_rate?\n"
        "  hint: correct the file and try again; docs/jobs.md lists every key   [unknown-key]"
    )


def test_all_mistakes_are_told_at_once_in_the_files_order(folder: Path) -> None:
    error = refusal("seed: -4\npacking: 1\nmodel: ./nowhere\nbits: 4\n", folder)
    assert str(error) == (
        "job.yaml has 5 mistakes.\n"
        "  dataset: it is missing; it must be a path or Hugging Face id, or a list of them\n"
        "  line 1: seed: it is -4; it must be a whole number, 0 or more, below 2^63\n"
        "  line 2: packing: it is 1; it must be true, false or wrapped\n"
        f"  line 3: model: there is no model folder at {folder / 'nowhere'}\n"
        "  line 4: bits: unknown key\n"
        "  hint: correct the file and try again; docs/jobs.md lists every key   [bad-job]"
    )


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("learning_rate: fast", "wrong-type", 'learning_rate: it is "fast"; it must be a number above 0'),
        ("learning_rate: 0", "bad-value", "it must be a number above 0"),
        ("learning_rate: .inf", "bad-value", "it must be a number above 0"),
        ("max_length: 12.5", "wrong-type", "it must be a whole number of tokens from 2 to 10^7"),
        ("packing: 'yes'", "wrong-type", "it must be true, false or wrapped"),
        ("bf16: maybe", "wrong-type", "it must be true or false"),
        ("seed: true", "wrong-type", "it must be a whole number, 0 or more"),
        ("adam_beta1: 1.0", "bad-value", "a number from 0 up to, not including, 1"),
        ("gpu_budget: 10XB", "bad-value", "a size like 10GiB or 500MB"),
        ("gpu_budget: 0", "bad-value", "a size like 10GiB or 500MB"),
        ("gpu_budget: true", "wrong-type", "a size like 10GiB or 500MB"),
        ("optim: sgd", "bad-value", "it must be adamw_torch_fused or adamw_torch"),
        ("attn_implementation: flex", "bad-value", "it must be sdpa or eager"),
        ("stage: dpo", "not-there", 'stage: it is "dpo"; offmate trains on texts and conversations'),
        ("resume_from_checkpoint: ./old", "not-there", "a job starts at its model"),
        ("dataset_text_field: body", "not-there", "the column must be called text"),
        ("torch_dtype: bfloat16", "not-there", "bf16: true computes in bf16 with fp32 masters"),
        ("use_peft: 1", "wrong-type", "it is 1; it must be true or false"),
        ("fp16: true", "not-there", "fp16 training (bf16: true is) is not there yet"),
        ("train_on_inputs: maybe", "wrong-type", 'it is "maybe"; it must be true or false'),
        ("optimizer: lion", "bad-value", "their states are fp32 and need no GPU memory"),
        ("special_tokens: {eos_token: x}", "not-there", "only pad_token may change here"),
        ("plugins: [axolotl.integrations.kd.KDPlugin]", "not-there", "axolotl.integrations.kd.KDPlugin is not there"),
        ("warmup_ratio: 3", "bad-value", "a share of all steps, below 1"),
        ("warmup_steps: 1.5", "bad-value", "1 or more must be a whole number of steps"),
        ("run_name: ''", "bad-value", "it must be text"),
        ('run_name: "a\\nb"', "bad-value", "it must be text without control characters"),
        ('run_name: "a\\n"', "bad-value", "it must be text without control characters"),
        ('run_name: "\\e[31m"', "bad-value", "it must be text without control characters"),
        ('output_dir: "a\\0"', "bad-value", "path, or null"),
        ("max_length: 99999999999999999999", "bad-value", "it must be a whole number of tokens from 2 to 10^7"),
        ("per_device_train_batch_size: 1000000001", "bad-value", "it must be a whole number from 1 to 10^9, or auto"),
        ("micro_batch_size: most", "wrong-type", 'it is "most"; it must be a whole number from 1 to 10^9, or auto'),
        ("micro_batch_size: auto\ngradient_accumulation_steps: 4", "bad-value", "give train_batch_size instead"),
        ("train_batch_size: 10\nmicro_batch_size: 4", "bad-value", "it is 10; it must be micro_batch_size × a whole"),
        (
            "train_batch_size: 8\nmicro_batch_size: 4\ngradient_accumulation_steps: 4",
            "bad-value",
            "it is 8; it must be micro_batch_size × gradient_accumulation_steps, or leave one of the three out",
        ),
        ("train_batch_size: 0", "bad-value", "it must be a whole number from 1 to 10^9, or null"),
        ("save_steps: 99999999999999999999", "bad-value", "it must be a whole number from 1 to 10^9"),
        ("warmup_steps: 99999999999999999999", "bad-value", "a whole number of steps"),
        ("num_train_epochs: 1e300", "bad-value", "at most 10^6"),
        ("gpu_budget: 99999999999TiB", "bad-value", "a size like 10GiB or 500MB"),
        ("seed: 9223372036854775808", "bad-value", "below 2^63"),
        ("method: qlora", "not-there", "a quantized base model is not there yet"),
        ("load_in_4bit: true\nadapter: qlora\nlora_r: 8\nlora_alpha: 16", "not-there", "a quantized base model"),
        ("lora_r: 8", "bad-value", "lora_r: it is for method: lora; give that too"),
        ("method: lora", "bad-value", "method: lora needs a model with weights, and "),
        ("finetuning_type: dpo", "not-there", "finetuning_type: dpo is not there yet"),
        ("method: magic", "bad-value", 'it is "magic"; it must be full or lora'),
        ("exact: 0", "wrong-type", "it must be true or false"),
        ("max_length: 8\nsequence_len: 9", "two-names", "sequence_len: max_length is given too"),
        ("cutoff_len: 8\nsequence_len: 9", "two-names", "cutoff_len is given too, and both mean max_length"),
        ("tokenizer: ./nowhere", "missing-file", "there is no tokenizer folder at"),
        ("chat_template: vicuna", "missing-file", "leave the key out to use the tokenizer's own"),
        ("chat_template: text.jsonl", "bad-value", "is not a Jinja template"),
        ("output_dir: 3", "wrong-type", "it must be a path"),
        ("tokenizer: ~nobody-of-this-name/x", "missing-file", "there is no home folder ~nobody-of-this-name"),
        ("output_dir: ~nobody-of-this-name", "missing-file", "there is no home folder ~nobody-of-this-name"),
        ("seed: {1: {b: 2}, 2: [3]}", "wrong-type", 'it is {"1": {"b": 2}, "2": [3]}'),
        ("seed: {!!binary aGk=: 1}", "wrong-type", "it is {b'hi': 1}"),
        ("seed: !!timestamp 2024-02-03", "wrong-type", 'it is "2024-02-03"'),
        ("eval_strategy: steps", "bad-value", "there is nothing to evaluate on; give val_size, eval_dataset or"),
        ("eval_on_start: true", "bad-value", "there is nothing to evaluate on; give val_size, eval_dataset or"),
        ("evaluation_strategy: best\nval_size: 1", "bad-value", 'it is "best"; it must be no, steps or epoch'),
        ("val_set_size: 2.5", "bad-value", "it is 2.5; 1 or more must be a whole number"),
        ("val_size: -1", "bad-value", "it is -1; it must be a share of the rows below 1, a whole number of rows"),
        ("val_size: 3\neval_steps: 2.5", "bad-value", "eval_steps: it is 2.5; 1 or more must be a whole number"),
        ("val_set_size: 3\neval_dataset: text.jsonl", "bad-value", "val_set_size: eval_dataset is given too"),
        (
            "sample_prompts: ['a', '']",
            "bad-value",
            'it is ["a", ""]; it must be a text, or a list of texts or of lists',
        ),
        ("sample_prompts: ['']", "bad-value", "messages with role and content, none of them empty"),
        ("save_minutes: -1", "bad-value", "it must be a number above 0, or 0 or null for never"),
        ("sample_prompts: [{a: b}]", "wrong-type", "a list of texts or of lists of messages with role and content"),
        ("sample_prompts: [[{role: user}]]", "wrong-type", "it must be a text, or a list of texts or of lists of"),
        ("test_datasets: gone.jsonl", "missing-file", "test_datasets: there is no dataset at"),
        *((f"{key}: 1", "not-there", "leave this key out") for key in NOT_THERE if key not in QUANTIZED),
    ],
)
def test_a_line_is_refused_with_key_reason_and_code(line: str, code: str, words: str, folder: Path) -> None:
    error = refusal(BASE + line + "\n", folder)
    assert (error.code, words in str(error)) == (code, True), str(error)
    assert error.numbers[0].startswith("line ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: tiny\ndataset: gone.jsonl", "there is no dataset at"),
        ("model: tiny\ndataset: empty", "holds no .jsonl, .json, .csv, .parquet, .txt file"),
        ("model: tiny/missing\ndataset: text.jsonl", "there is no model folder at"),
        ("model: .\ndataset: text.jsonl", "has no config.json"),
        ("model: bare\ndataset: text.jsonl", "tokenizer: "),
        ("model: tiny\ntokenizer: .\ndataset: text.jsonl", "has no tokenizer files"),
    ],
)
def test_a_missing_file_is_named(text: str, words: str, folder: Path) -> None:
    error = refusal(text, folder)
    assert error.code == "missing-file"
    assert words in str(error)


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("", "bad-yaml", "is not a list of keys and values"),
        ("- a\n- b", "bad-yaml", "is not a list of keys and values"),
        ("just words", "bad-yaml", "is not a list of keys and values"),
        ("1: 2", "bad-yaml", "is not a list of keys and values"),
        ("model: [", "bad-yaml", "(line 1)"),
        ("? [a]\n: b", "bad-yaml", "unhashable key (line 1)"),
        ("model: !!python/object:os.system x", "bad-yaml", "could not determine a constructor"),
        ("seed: !!int abc", "bad-yaml", '"abc" is no int (line 1)'),
        ("run_name: \x07", "bad-yaml", "special characters are not allowed"),
        ("seed: " + 5000 * "[", "file-too-long", "lists and mappings more than 32 deep (line 1)"),
        ("run_name: &a [*a]", "bad-yaml", "*a stands for something that it is a part of (line 1)"),
        ("seed: !!int ''", "bad-yaml", '"" is no int (line 1)'),
        ("packing: !!bool maybe", "bad-yaml", '"maybe" is no bool (line 1)'),
        ("run_name: !!timestamp 2024-02-30", "bad-yaml", '"2024-02-30" is no timestamp (line 1)'),
        ("run_name: !!timestamp soon", "bad-yaml", '"soon" is no timestamp (line 1)'),
        ("seed: " + 5000 * "1", "bad-yaml", "is no int (line 1)"),
        (BASE + "seed: 1\nseed: 2", "duplicate-key", "seed is given twice, first in line 3 (line 4)"),
        (BASE + "dataset_name: {a: 1, a: 2}", "duplicate-key", "a is given twice"),
    ],
)
def test_a_file_that_is_no_job_is_refused(text: str, code: str, words: str, folder: Path) -> None:
    error = refusal(text, folder)
    assert (error.code, words in str(error)) == (code, True), str(error)


def test_a_file_that_cannot_be_read_is_refused(folder: Path) -> None:
    (folder / "latin.yaml").write_bytes(b"model: \xff\n")
    for name, words in (("gone.yaml", "No such file"), ("latin.yaml", "not UTF-8"), ("tiny", "directory")):
        with pytest.raises(UserError, match=words) as caught:
            Job.load(folder / name)
        assert caught.value.exit_code == Exit.USAGE


def test_notes_say_what_a_key_means_here(folder: Path) -> None:
    notes = parse("gradient_checkpointing: true\nmax_steps: 5\nnum_train_epochs: 1\n", folder).notes
    assert [note.split()[0] for note in notes] == ["gradient_checkpointing", str(folder / "tiny"), "max_steps"]
    (folder / "tiny" / "model.safetensors").touch()
    assert parse("", folder).notes == ()


def test_a_job_does_not_change(folder: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse("", folder).seed = 3  # type: ignore[misc]


def test_docs_describe_every_key_alias_default_and_code() -> None:
    root = ROOT
    docs = (root / "docs" / "jobs.md").read_text()
    rows = {cells[1].strip(" `"): cells for line in docs.splitlines() if len(cells := line.split("|")) > 5}
    for key, field in Job.model_fields.items():
        assert key in rows, f"docs/jobs.md has no row for {key}"
        default = "" if field.is_required() else yaml.safe_dump(field.default).splitlines()[0].strip()
        if key != "tokenizer" and default:
            assert yaml.safe_load(rows[key][3].strip(" `")) == field.default, key
        assert all(f"`{alias}`" in rows[key][4] for alias in ALIASES.get(key, ())), key
    others = (*NOT_THERE, *(key for keys in NOT_USED.values() for key in keys))
    assert [key for key in others if f"`{key}`" not in docs] == []
    assert [f"{beginning}…" for beginning in REPORTING if f"`{beginning}…`" not in docs] == []


@pytest.mark.parametrize(
    ("lines", "every"),
    [
        ("val_size: 0.1", None),
        ("val_size: 5\neval_strategy: epoch\neval_steps: 3", None),
        ("val_size: 5\neval_strategy: steps", 500),
        ("val_set_size: 5\neval_steps: 7", 7),
        ("val_size: 5\neval_steps: 0.1", 21),
        ("test_datasets: [{path: text.jsonl, type: completion}]\neval_batch_size: 4\neval_steps: 2", 2),
    ],
)
def test_evaluation_comes_by_epoch_unless_steps_are_given(lines: str, every: int | None, folder: Path) -> None:
    job = Job.parse(BASE + lines, folder)
    assert job.eval_every(205) == every


def test_evaluation_that_is_switched_off_asks_for_nothing(folder: Path) -> None:
    for lines in (
        "val_set_size: 0", "eval_strategy: no\nval_size: 0.1\neval_steps: 5", "eval_steps: null\nval_size:",
        'eval_strategy: "no"\neval_dataset: text.jsonl\neval_on_start: true',
    ):  # fmt: skip
        assert Job.parse(BASE + lines, folder) == Job.parse(BASE, folder)


def test_prompts_are_texts_or_messages_and_read_back_equal(folder: Path, tmp_path: Path) -> None:
    job = Job.parse(BASE + "sample_prompts: [hello, [{role: user, content: hi}]]", folder)
    assert job.sample_prompts == ("hello", ({"role": "user", "content": "hi"},))
    (tmp_path / "resolved.yaml").write_text(job.resolved_yaml())
    assert Job.from_resolved(tmp_path / "resolved.yaml") == job
    assert Job.parse(BASE + "sample_prompts: hello", folder).sample_prompts == ("hello",)


LORA = "model: trained\ndataset: text.jsonl\nmethod: lora\n"


@pytest.fixture
def lora_folder(folder: Path) -> Path:
    """With a model that has weights."""
    shutil.copytree(folder / "tiny", folder / "trained")
    (folder / "trained" / "model.safetensors").touch()
    return folder


def test_lora_has_the_defaults_of_trl_and_other_methods_have_none(lora_folder: Path) -> None:
    lora, full = Job.parse(LORA, lora_folder), parse("", lora_folder)
    assert (lora.lora_r, lora.lora_alpha, lora.lora_dropout, lora.lora_target_modules) == (16, 32, 0.05, "all-linear")
    assert (full.lora_r, full.lora_alpha, full.lora_dropout, full.lora_target_modules) == (None, None, None, None)
    (lora_folder / "resolved.yaml").write_text(lora.resolved_yaml())
    assert Job.from_resolved(lora_folder / "resolved.yaml") == lora


@pytest.mark.parametrize(
    ("lines", "targets"),
    [
        ("lora_target_modules: [q_proj, v_proj]", ("q_proj", "v_proj")),
        ("lora_target: q_proj, v_proj", ("q_proj", "v_proj")),
        ("lora_target: all", "all-linear"),
        ("lora_target_linear: true", "all-linear"),
        ("lora_target_modules: null", "all-linear"),
    ],
)
def test_the_modules_of_lora_are_read_as_people_write_them(lines: str, targets: object, lora_folder: Path) -> None:
    assert Job.parse(LORA + lines, lora_folder).lora_target_modules == targets
    as_axolotl = LORA.replace("method", "adapter") + f"lora_rank: 8\nlora_alpha: 16\nlora_dropout: 0\n{lines}\n"
    job = Job.parse(as_axolotl, lora_folder)
    assert (job.lora_r, job.lora_alpha, job.lora_dropout, job.lora_target_modules) == (8, 16, 0, targets)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("lora_r: 0", "it is 0; it must be a whole number from 1"),
        ("lora_dropout: 1", "it must be a number from 0 up to, not including, 1"),
        ("lora_alpha: 0", "it must be a number above 0"),
        ("lora_target_modules: []", "it is []; it must be all-linear, or a list of modules' names"),
        ("lora_target_modules: 3", "it is 3; it must be all-linear, or a list of modules' names"),
        ("lora_target_modules: [1]", "it must be all-linear, or a list of modules' names"),
    ],
)
def test_a_wrong_key_of_lora_is_refused(line: str, words: str, lora_folder: Path) -> None:
    assert words in str(refusal(LORA + line, lora_folder))
