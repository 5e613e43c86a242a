"""The keys that say which weights full fine-tuning trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.job.schema import Job
from tests.planner.conftest import parse, refusal

AXOLOTL = "base_model: tiny\nlearning_rate: 1e-4\ndatasets: [{path: text.jsonl, type: completion}]\n"
LLAMA_FACTORY = "model_name_or_path: tiny\ndataset: text.jsonl\ncutoff_len: 64\nfinetuning_type: freeze\n"
OURS = "model: tiny\ndataset: text.jsonl\n"


def test_patterns_and_numbers_of_layers_are_read(folder: Path) -> None:
    job = parse("trainable: lm_head\n", folder)
    assert (job.method, job.trainable, job.trainable_layers) == ("full", ("lm_head",), None)
    job = parse("trainable_layers: -2\n", folder)
    assert (job.trainable, job.trainable_layers) == ((r".*\.{layers}\.",), -2)
    (folder / "resolved.yaml").write_text(job.resolved_yaml())
    assert Job.from_resolved(folder / "resolved.yaml") == job
    for line in ("trainable:\n", "trainable: []\n", "trainable_layers: null\n", "unfrozen_parameters:\n"):
        assert parse(line, folder).trainable is None


def test_dots_in_axolotls_patterns_stand_for_themselves(folder: Path) -> None:
    lines = r"unfrozen_parameters: ['^lm_head.weight$', 'model.layers.4[4-9]+.mlp', 'a.+b', 'c\.d']"
    job = Job.parse(AXOLOTL + lines, folder)
    assert job.trainable == (r"^lm_head\.weight$", r"model\.layers\.4[4-9]+\.mlp", "a.+b", r"c\.d")


@pytest.mark.parametrize(
    ("lines", "layers", "patterns"),
    [
        ("", 2, (r".*\.{layers}\.",)),
        ("freeze_trainable_layers: -3\nfreeze_trainable_modules: all\n", -3, (r".*\.{layers}\.",)),
        (
            "freeze_trainable_modules: mlp,self_attn\nfreeze_extra_modules: embed_tokens\n",
            2,
            (r".*\.{layers}\.mlp", r".*\.{layers}\.self_attn", ".*embed_tokens"),
        ),
    ],
)
def test_freezing_of_llama_factory_is_read(lines: str, layers: int, patterns: tuple[str, ...], folder: Path) -> None:
    job, notes = Job.parse_with_notes(LLAMA_FACTORY + lines, folder)
    assert (job.method, job.trainable_layers, job.trainable) == ("full", layers, patterns)
    assert not any("says nothing" in note for note in notes)
    _, notes = Job.parse_with_notes(LLAMA_FACTORY.replace("freeze", "full") + "freeze_trainable_layers: 3\n", folder)
    assert "not used: freeze_trainable_layers (it has no effect without finetuning_type: freeze)" in notes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (OURS + "trainable: [3]", "it must be a list of patterns of parameters' names"),
        (OURS + "trainable: ['a(']", '"a(" is no pattern'),
        (OURS + "trainable: ['(.*.*.*.*.*)*x']", '"(.*.*.*.*.*)*x" takes too long to match: leave out repeats'),
        (OURS + "trainable: ['a.{layers}']", "{layers} in a pattern and trainable_layers belong together"),
        (OURS + "trainable: [a]\ntrainable_layers: 1", "{layers} in a pattern and trainable_layers belong together"),
        (OURS + "trainable_layers: 1.5", "it must be a whole number of layers"),
        (OURS + "method: lora\ntrainable_layers: 1", "it is for method: full; adapters are trained alone"),
        (
            AXOLOTL + "unfrozen_parameters: ['^model.embed_tokens.weight$[:32000]']",
            "training some rows of a weight is not supported yet; give its name",
        ),
        (
            AXOLOTL + "unfrozen_parameters: ['lm_head.weight$[3]']",
            "training some rows of a weight is not supported yet",
        ),
    ],
)
def test_what_cannot_be_trained_alone_is_refused(text: str, words: str, folder: Path) -> None:
    (folder / "tiny" / "model.safetensors").touch()
    assert words in str(refusal(text, folder))
