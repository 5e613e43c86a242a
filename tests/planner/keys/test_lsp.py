"""The keys of LSP."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.job.planned import NOT_PLANNED
from planner.job.schema import Job
from planner.keys.lsp import LspKeys
from tests.planner.conftest import parse, refusal

OURS = "model: tiny\ndataset: text.jsonl\n"
LSP = f"{OURS}method: lsp\n"
AXOLOTL = "base_model: tiny\nlearning_rate: 1e-4\ndatasets: [{path: text.jsonl, type: completion}]\n"
LLAMA_FACTORY = "model_name_or_path: tiny\ndataset: text.jsonl\ncutoff_len: 64\n"
DEFAULTS = {
    "lsp_size": 512,
    "lsp_nonzeros": 16,
    "lsp_check_steps": 1000,
    "lsp_threshold": 0.5,
    "lsp_samples": None,
    "lsp_fit_steps": 0,
}


@pytest.fixture
def trained(folder: Path) -> Path:
    """The folder, whose model has weights."""
    (folder / "tiny" / "model.safetensors").touch()
    return folder


OPTIM = "under method: lsp is not supported; leave optim out: AdamW trains cores"
ROWS = "a whole number of rows, or null for as many as have 16384 tokens"


def keys_of(job: Job) -> dict[str, object]:
    return {key: getattr(job, key) for key in LspKeys.model_fields}


def test_the_keys_have_defaults_under_every_method(trained: Path) -> None:
    job = Job.parse(LSP, trained)
    assert (job.method, keys_of(job)) == ("lsp", DEFAULTS)
    assert (job.lora_r, job.lora_target_modules, job.trainable) == (None, None, None)
    assert keys_of(parse("", trained)) == keys_of(parse("method: lora\n", trained)) == DEFAULTS


def test_the_keys_are_read(trained: Path) -> None:
    lines = "lsp_size: 64\nlsp_nonzeros: 4\nlsp_check_steps: 10\nlsp_threshold: 0\nlsp_samples: 2\nlsp_fit_steps: 5\n"
    job = Job.parse(LSP + lines + "trainable: [model.norm]\nsave_dtype: bfloat16\n", trained)
    assert list(keys_of(job).values()) == [64, 4, 10, 0.0, 2, 5]
    assert (job.trainable, job.save_dtype) == (("model.norm",), "bfloat16")


@pytest.mark.parametrize("beginning", [LSP, f"{AXOLOTL}adapter: lsp\n", f"{LLAMA_FACTORY}finetuning_type: lsp\n"])
def test_null_stands_for_dense_projectors_and_the_missing_key_for_the_default(beginning: str, trained: Path) -> None:
    dense, default = (Job.parse(beginning + line, trained) for line in ("lsp_nonzeros: null\n", ""))
    assert (dense.method, dense.lsp_nonzeros, default.lsp_nonzeros) == ("lsp", None, 16)
    assert Job.parse(beginning + "lsp_nonzeros:\nlsp_size: 100\n", trained).lsp_size == 100, "a multiple of nothing"
    assert Job.parse(beginning + "lsp_size: null\n", trained).lsp_size == 512, "null is the default of all other keys"


@pytest.mark.parametrize(
    "text",
    [
        OURS,
        f"{OURS}method: lora\n",
        LSP,
        f"{LSP}lsp_nonzeros: null\nlsp_size: 100\n",
        f"{LSP}lsp_size: 96\nlsp_nonzeros: 3\nlsp_fit_steps: 7\nlsp_threshold: 0\ntrainable: [lm_head]\n",
    ],
)
def test_a_job_reads_back_equal_and_may_be_submitted_again(text: str, trained: Path) -> None:
    job = Job.parse(text, trained)
    (trained / "resolved.yaml").write_text(job.resolved_yaml())
    assert Job.from_resolved(trained / "resolved.yaml") == job
    assert Job.load(trained / "resolved.yaml") == job


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("lsp_size: 64", "line 3: lsp_size: it is for method: lsp; give that too"),
        ("lsp_nonzeros: 4", "line 3: lsp_nonzeros: it is for method: lsp; give that too"),
        ("method: full\nlsp_fit_steps: 4", "line 4: lsp_fit_steps: it is for method: lsp; give that too"),
        (
            "method: lora\nlsp_threshold: 0.1",
            "line 4: lsp_threshold: it is for method: lsp; leave it out, or give that in place of lora",
        ),
        ("method: magic\nlsp_size: 64", 'method: it is "magic"; it must be full, lora or lsp'),
    ],
)
def test_the_keys_are_refused_without_the_method(lines: str, words: str, trained: Path) -> None:
    error = refusal(OURS + lines, trained)
    assert words in str(error) and len(error.numbers) == 1


def test_keys_that_ask_for_nothing_are_accepted_without_the_method(trained: Path) -> None:
    lines = "lsp_nonzeros: null\nlsp_fit_steps: 0\nlsp_size: 512\nlsp_samples: null\n"
    assert parse(lines, trained) == parse("", trained)


OF_LORA = "it is for method: lora; leave it out, or give that in place of lsp"
BITS = "the base changes under method: lsp, so it cannot be in 4 or 8 bits; leave this key out"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        *(
            (line, f"{line.partition(':')[0]}: {OF_LORA}")
            for line in (
                "lora_r: 8",
                "lora_alpha: 8",
                "lora_dropout: 0.1",
                "lora_target_modules: all-linear",
                "lora_target_parameters: [e]",
                "lora_modules_to_save: [lm_head]",
                "exclude_modules: [q]",
                "layers_to_transform: 0",
                "rank_pattern: {q: 2}",
                "init_lora_weights: pissa",
                "use_dora: true",
                "use_rslora: true",
                "loraplus_lr_ratio: 16",
                "quantize_moe_experts: true",
            )
        ),
        ("load_in_4bit: true", f"load_in_4bit: {BITS}"),
        ("load_in_8bit: true", f"load_in_8bit: {BITS}"),
        ("quantization_bit: 4", f"quantization_bit: {BITS}"),
        (
            "optim: muon",
            f"optim: muon {OPTIM}",
        ),
        (
            "trainable_layers: 2",
            "trainable_layers: it is for method: full; under method: lsp name the weights to train whole in trainable",
        ),
        ("trainable: ['a(']", 'trainable: "a(" is no pattern'),
        ("lsp_size: 100", "lsp_size: it is 100; it must be a multiple of lsp_nonzeros, which is 16"),
        (
            "lsp_size: 64\nlsp_nonzeros: 6",
            "lsp_size: it is 64; it must be a multiple of lsp_nonzeros, which is 6",
        ),
        ("lsp_nonzeros: 6", "lsp_nonzeros: it is 6; lsp_size must be a multiple of it, and is 512"),
        (
            "lsp_fit_steps: 10\nlsp_nonzeros: null",
            "lsp_fit_steps: only projectors with zeros are learned, and lsp_nonzeros is null; leave one of them out",
        ),
        ("lsp_size: 0", "lsp_size: it is 0; it must be a whole number from 1 to 32768"),
        ("lsp_size: big", 'lsp_size: it is "big"; it must be a whole number from 1 to 32768'),
        ("lsp_size: true", "lsp_size: it is true; it must be a whole number from 1 to 32768"),
        ("lsp_nonzeros: 0", "lsp_nonzeros: it is 0; it must be a whole number from 1 to 10^9, or null for dense"),
        ("lsp_nonzeros: 1.5", "lsp_nonzeros: it is 1.5; it must be a whole number from 1 to 10^9, or null for dense"),
        ("lsp_check_steps: 0", "lsp_check_steps: it is 0; it must be a whole number from 1 to 10^9"),
        ("lsp_threshold: -0.1", "lsp_threshold: it is -0.1; it must be a number, 0 or more"),
        (
            "lsp_samples: 0",
            f"lsp_samples: it is 0; it must be {ROWS}",
        ),
        ("lsp_fit_steps: -1", "lsp_fit_steps: it is -1; it must be a whole number from 0 to 10^9"),
    ],
)
def test_what_does_not_go_with_lsp_is_refused_in_one_line(line: str, words: str, trained: Path) -> None:
    error = refusal(LSP + line, trained)
    assert f"line 4: {words}" in str(error) and len(error.numbers) == 1


def test_an_adapter_is_not_continued_with_lsp(trained: Path) -> None:
    (trained / "made").mkdir()
    (trained / "made" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "target_modules": ["q"]}')
    (trained / "made" / "adapter_model.safetensors").touch()
    assert f"adapter_name_or_path: {OF_LORA}" in str(refusal(f"{LSP}adapter_name_or_path: made\n", trained))


def test_a_model_without_weights_is_refused(folder: Path) -> None:
    assert "method: lsp needs a model with weights, and " in str(refusal(LSP, folder))


def test_keys_of_lora_in_a_tools_file_are_told_and_not_used(trained: Path) -> None:
    text = f"{AXOLOTL}adapter: lsp\nlora_r: 8\nlora_target_linear: true\n"
    job, notes = Job.parse_with_notes(text, trained)
    assert (job.method, job.lora_r) == ("lsp", None)
    assert "not used: lora_r, lora_target_linear (it has no effect without method: lora)" in notes


@pytest.mark.parametrize(("rate", "method", "told"), [("2e-5", "lsp", 1), ("3e-5", "lsp", 0), ("2e-5", "full", 0)])
def test_a_rate_that_is_too_small_for_cores_is_told(rate: str, method: str, told: int, trained: Path) -> None:
    notes = parse(f"method: {method}\nlearning_rate: {rate}\n", trained).notes
    wanted = "learning_rate is 2e-05: so small a rate hardly moves the cores of lsp; its authors train with 1e-4."
    assert notes.count(wanted) == len(notes) == told


def test_the_plan_depends_on_the_size_of_cores_and_on_the_rows_of_a_check(trained: Path) -> None:
    assert LspKeys.model_fields.keys() - NOT_PLANNED == {"lsp_size", "lsp_nonzeros", "lsp_samples", "lsp_fit_steps"}
    lines = "lsp_check_steps: 7\nlsp_threshold: 0.1\n"
    assert Job.question(LSP + lines, trained) == Job.question(LSP, trained)
    for line in ("lsp_size: 64", "lsp_nonzeros: null", "lsp_samples: 4", "lsp_fit_steps: 3"):
        assert Job.question(LSP + line, trained) != Job.question(LSP, trained)
