"""What is said when a job file is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import Exit, UserError
from planner.importers.tools import SHORT
from planner.job.schema import Job
from tests.planner.conftest import BASE, refusal


def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_known_one(folder: Path) -> None:
    assert str(refusal(BASE + "learnign_rate: 1e-4\n", folder)) == (
        "job.yaml has one mistake.\n"
        "  line 3: learnign_rate: unknown key; did you mean learning_rate?\n"
        "  hint: correct the file and try again; `offmate keys` lists all keys   [unknown-key]"
    )


@pytest.mark.parametrize(("short", "key"), SHORT.items())
def test_an_everyday_name_is_refused_with_the_key_that_has_it(short: str, key: str, folder: Path) -> None:
    assert key in Job.model_fields
    (line,) = refusal(BASE + f"{short}: 1\n", folder).numbers
    assert line == f"line 3: {short}: unknown key; did you mean {key}?"


def test_all_mistakes_are_told_at_once_in_the_files_order(folder: Path) -> None:
    error = refusal("seed: -4\npacking: 1\nmodel: ./nowhere\nbits: 4\n", folder)
    assert str(error) == (
        "job.yaml has 5 mistakes.\n"
        "  dataset: it is missing; it must be a path or Hugging Face id, or a list of them\n"
        "  line 1: seed: it is -4; it must be a whole number, 0 or more, below 2^63\n"
        "  line 2: packing: it is 1; it must be true, false or wrapped\n"
        f"  line 3: model: there is no model folder at {folder / 'nowhere'}\n"
        "  line 4: bits: unknown key\n"
        "  hint: correct the file and try again; `offmate keys` lists all keys   [bad-job]"
    )


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("learning_rate: fast", "wrong-type", 'learning_rate: it is "fast"; it must be a number above 0'),
        ("learning_rate: 0", "bad-value", "it must be a number above 0"),
        ("learning_rate: .inf", "bad-value", "it must be a number above 0"),
        ("max_length: 12.5", "wrong-type", "it must be a whole number of tokens from 2 to 10^7"),
        ("packing: 'yes'", "wrong-type", "it must be true, false or wrapped"),
        ("bf16: maybe", "wrong-type", "it must be true, false or auto"),
        ("seed: true", "wrong-type", "it must be a whole number, 0 or more"),
        ("adam_beta1: 1.0", "bad-value", "a number from 0 up to, not including, 1"),
        ("gpu_budget: 10XB", "bad-value", "a size like 10GiB or 500MB"),
        ("gpu_budget: 0", "bad-value", "a size like 10GiB or 500MB"),
        ("gpu_budget: true", "wrong-type", "a size like 10GiB or 500MB"),
        ("optim: sgd", "bad-value", "it must be adamw_torch_fused, adamw_torch, adamw_8bit or muon"),
        ("attn_implementation: flex", "bad-value", "it must be sdpa or eager"),
        ("stage: dpo", "bad-value", "which is LLaMA-Factory's word; give preference: dpo in its place"),
        ("resume_from_checkpoint: ./old", "not-there", "a job starts from its model"),
        ("torch_dtype: float16", "not-there", "bf16: true computes in bf16 with fp32 masters"),
        ("use_peft: 1", "wrong-type", "it is 1; it must be true or false"),
        (
            "fp16: true",
            "not-there",
            "fp16 training is not supported yet; give bf16: true in its place, or leave both out to compute in fp32",
        ),
        ("train_on_inputs: maybe", "wrong-type", 'it is "maybe"; it must be true or false'),
        ("optimizer: lion", "bad-value", "adamw_8bit or muon; their states need no GPU memory"),
        ("special_tokens: {eos_token: [x, y]}", "bad-value", "a mapping of eos_token and its like to a token"),
        ("special_tokens: {additional_special_tokens: x}", "bad-value", "additional_special_tokens to a list"),
        (
            "plugins: [axolotl.integrations.kd.KDPlugin]",
            "not-there",
            "axolotl.integrations.kd.KDPlugin is not supported",
        ),
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
        (
            "interleave_probs: [1.0]",
            "bad-value",
            "interleave_probs: it is for mix_strategy: interleave_under, interleave_over or interleave_once",
        ),
        (
            "mix_strategy: interleave_over\ninterleave_probs: 0.5,0.5",
            "bad-value",
            "it has 2 shares, and dataset has 1 entry",
        ),
        ("mix_strategy: interleave_over\ninterleave_probs: [0.5]", "bad-value", "its shares sum to 0.5"),
        (
            "mix_strategy: shuffle",
            "bad-value",
            "it must be concat, interleave_under, interleave_over or interleave_once",
        ),
        ("model_revision: v2", "bad-value", "model_revision: it is of a model on the hub, and "),
        ("method: qlora", "not-there", "qlora trains adapters on a base in 4 bits; give load_in_4bit: true, too"),
        ("load_in_4bit: true", "bad-value", "load_in_4bit: it is for method: lora; give that too"),
        ("method: lora\nload_in_4bit: true\nuse_dora: true", "not-there", "use_dora: DoRA on a base in 4 or 8 bits"),
        ("load_in_8bit: true", "bad-value", "load_in_8bit: it is for method: lora; give that too"),
        ("load_in_8bit: true\nmethod: lora\nload_in_4bit: true", "bad-value", "a base is in 4 or in 8 bits"),
        ("load_in_8bit: true\nmethod: lora\ngptq: true", "not-there", "gptq: a base quantized in another way than"),
        ("quantization_bit: 3", "not-there", "it is 3; only a base in 4 or 8 bits is supported"),
        (
            "load_in_4bit: true\nmethod: lora\nbnb_config_kwargs: {bnb_4bit_quant_type: fp4}",
            "not-there",
            "bnb_4bit_quant_type is a key of the job itself in offmate",
        ),
        ("lora_r: 8", "bad-value", "lora_r: it is for method: lora; give that too"),
        ("method: lora", "bad-value", "method: lora needs a model with weights, and "),
        ("finetuning_type: dpo", "not-there", "finetuning_type: dpo is not supported yet"),
        ("method: lsp", "bad-value", "method: lsp needs a model with weights, and "),
        ("lsp: 8", "unknown-key", "lsp: unknown key; did you mean method?"),
        ("method: magic", "bad-value", 'it is "magic"; it must be full, lora or lsp'),
        ("exact: 0", "wrong-type", "it must be true or false"),
        ("max_length: 8\nsequence_len: 9", "two-names", "sequence_len: max_length is given too"),
        ("cutoff_len: 8\nsequence_len: 9", "two-names", "cutoff_len is given too, and both mean max_length"),
        ("tokenizer: ./nowhere", "missing-file", "there is no tokenizer folder at"),
        ("chat_template: wizard", "missing-file", "leave the key out to use the tokenizer's own"),
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
    ],
)
def test_a_line_is_refused_with_key_reason_and_code(line: str, code: str, words: str, folder: Path) -> None:
    error = refusal(BASE + line + "\n", folder)
    assert (error.code, words in str(error)) == (code, True), str(error)
    assert error.numbers[0].startswith("line ")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("interleave_probs: [1.0, 0.0]", "interleave_probs: one is 0: interleave_over goes on until every entry"),
        ("interleave_probs: '1,0'", "interleave_probs: one is 0: interleave_over goes on until every entry"),
        ("val_size: 1", "val_size: mix_strategy: interleave_over repeats records, so what is held out would be"),
        ("dataset_exact_deduplication: true", "mix_strategy: interleave_over repeats records, and this key leaves "),
    ],
)
def test_what_cannot_be_where_records_are_repeated_is_refused(lines: str, words: str, folder: Path) -> None:
    base = "model: tiny\ndataset: [text.jsonl, {path: text.jsonl, max_samples: 1}]\nmix_strategy: "
    (line,) = refusal(f"{base}interleave_over\n{lines}\n", folder).numbers
    assert words in line
    Job.parse(f"{base}interleave_under\n{lines}\n", folder)


def test_an_entry_that_is_there_twice_is_refused_where_what_is_there_twice_is_left_out(folder: Path) -> None:
    base = "model: tiny\ndataset: [text.jsonl, text.jsonl]\n"
    (line,) = refusal(f"{base}dataset_exact_deduplication: true\n", folder).numbers
    words = "it would leave out all of entry 2 of dataset, which equals an earlier one; list it once"
    assert line == f"line 3: dataset_exact_deduplication: {words}"
    Job.parse(base, folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: tiny\ndataset: gone.jsonl", "there is no dataset at"),
        ("model: tiny\ndataset: empty", "holds no .jsonl, .json, .ndjson, .csv, .parquet, .arrow, .txt file"),
        ("model: owner/Qwen2.5--7B\ndataset: text.jsonl", "there is no model folder at"),
        ("model: owner/model.git\ndataset: text.jsonl", "there is no model folder at"),
        ("model: Qwen3-8B.\ndataset: text.jsonl", "there is no model folder at"),
        (f"model: {97 * 'a'}\ndataset: text.jsonl", "there is no model folder at"),
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
        ("", "bad-yaml", "is not a mapping of keys to values"),
        ("- a\n- b", "bad-yaml", "is not a mapping of keys to values"),
        ("just words", "bad-yaml", "is not a mapping of keys to values"),
        ("1: 2", "bad-yaml", "is not a mapping of keys to values"),
        ("model: [", "bad-yaml", "(line 1)"),
        ("model: a\npacking true\nseed: 3\n", "bad-yaml", "could not find expected ':' (line 2)"),
        ("model: a\nseed: 3\npacking true\n\n# c\n", "bad-yaml", "could not find expected ':' (line 3)"),
        ("# c\nmodel a\nseed: 3\n", "bad-yaml", "mapping values are not allowed here (line 2)"),
        ("--- model: x\n", "bad-yaml", "mapping values are not allowed here (line 1)"),
        ("# c\n\n---\nmodel: a\nx: y: z\n", "bad-yaml", "mapping values are not allowed here (line 5)"),
        ("model: a\nseed: 1\npacking: x: y\n", "bad-yaml", "mapping values are not allowed here (line 3)"),
        ("model a # : c\nseed: 3\n", "bad-yaml", "but found '<block mapping start>' (line 1)"),
        ("model: a\nrun_name: x\n  y: 3\n", "bad-yaml", "mapping values are not allowed here (line 3)"),
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


@pytest.mark.parametrize("line", ['{"text": "a"}', '{"messages": []}'])
def test_data_given_for_a_job_file_are_called_so(line: str, folder: Path) -> None:
    with pytest.raises(UserError, match=r"data\.jsonl, which looks like a data file and not like a job file: "):
        Job.parse(f"{line}\n{line}\n", folder, name="data.jsonl")
