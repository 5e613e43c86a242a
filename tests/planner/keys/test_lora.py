"""The keys of LoRA."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from planner.job.schema import Job
from tests.planner.conftest import parse, refusal

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
        ("lora_target_modules: '.*self_attn\\.(q|v)_proj'", r".*self_attn\.(q|v)_proj"),
        ("lora_target: all", "all-linear"),
        ("lora_target_linear: true", "all-linear"),
        ("lora_target_modules: [all-linear]", "all-linear"),
        ("lora_target_modules: ['.*q_proj']", ".*q_proj"),
        ("lora_target_modules: [q_proj]", ("q_proj",)),
        ("lora_target_modules: peft-default", "peft-default"),
        ("lora_target_linear: true\nlora_target_modules: [lm_head]", ("all-linear", "lm_head")),
        ("lora_target_linear: true\nlora_target_modules:", "all-linear"),
        ("lora_target_linear: false\nlora_target_modules: [lm_head]", ("lm_head",)),
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
        ("lora_target_modules: '(q'", 'it is "(q", and that is no pattern'),
        ("lora_target_modules: '(.*.*.*.*.*)*x'", 'it is "(.*.*.*.*.*)*x", which takes too long to match'),
        ("exclude_modules: '([a-z._0-9]+)*[A-Z]'", "which takes too long to match: leave out repeats inside of"),
        ("rank_pattern: {'(.*.*.*.*.*)*x': 2}", "which takes too long to match"),
        ("lora_modules_to_save: ['(.*.*.*.*.*)*x']", "which takes too long to match"),
        ("lora_target_modules: [all, lm_head]", "all stands alone; all-linear may have other names beside it"),
        ("lora_target_modules: [peft-default, lm_head]", "peft-default stands alone"),
        ("lora_target_modules: 3", "it is 3; it must be all-linear, peft-default, a list of modules' names, or"),
        ("loraplus_lr_ratio: 16\noptim: muon", "optim is muon, under which all weights have learning_rate"),
        ("loraplus_lr_ratio: 16\nembedding_lr: 1e-4", "embedding_lr is given too, and both set another learning"),
        ("loraplus_lr_embedding: 1e-4", "it has no effect without loraplus_lr_ratio: give that too"),
        ("embedding_lr_scale: -1", "it must be a number above 0, or null"),
        ("init_lora_weights: corda", "it must be true, false, gaussian, orthogonal, pissa, pissa_niter_N"),
        ("init_lora_weights: pissa_niter_0", "it must be true, false, gaussian, orthogonal, pissa, pissa_niter_N"),
        ("init_lora_weights: pissa\nload_in_4bit: true", "pissa on a base in 4 bits is not supported"),
        ("init_lora_weights: olora\nuse_dora: true", "olora together with DoRA is not supported"),
        ("init_lora_weights: olora\nlora_target_parameters: [e]", "it is olora, which is for layers"),
        ("init_lora_weights: orthogonal\nlora_r: 3", "it is orthogonal, which needs an even lora_r, and that is 3"),
        ("init_lora_weights: orthogonal\nload_in_4bit: true", "orthogonal on a base in 4 or 8 bits is not supported"),
        ("layers_to_transform: [0, 1]", "with it lora_target_modules must be a list of modules' names"),
        (
            ("layers_to_transform: 0\nlora_target_modules: [all-linear, q]"),
            "lora_target_modules must be a list of modules' names",
        ),
        ("layers_to_transform: [-1]\nlora_target: q", "it must be the number of a layer, from 0"),
        ("layers_pattern: h", "it says where layers_to_transform counts; give that too"),
        ("rank_pattern: {q_proj: 0}", "it must be a mapping of modules' names, or patterns, to whole numbers"),
        ("rank_pattern: {'q(': 2}", 'it is "q(", and that is no pattern'),
        ("exclude_modules: 'q('", 'it is "q(", and that is no pattern'),
        (
            "lora_target_parameters: [e]\nlora_dropout: 0.1",
            "it is 0.1; adapters on parameters (lora_target_parameters) have none: give lora_dropout: 0",
        ),
        ("lora_target_parameters: [e]\nuse_dora: true", "DoRA is for layers"),
        ("lora_target_parameters: [e]\ninit_lora_weights: orthogonal", "it is orthogonal, which is for layers"),
        ("lora_target_modules: [{a: 1}]", "it must be all-linear, peft-default, a list of modules' names, or"),
        ("lora_target_modules: [1]", "it must be all-linear, peft-default, a list of modules' names, or"),
    ],
)
def test_a_wrong_key_of_lora_is_refused(line: str, words: str, lora_folder: Path) -> None:
    assert words in str(refusal(LORA + line, lora_folder))


def test_which_layers_have_adapters_is_read_as_people_write_it(lora_folder: Path) -> None:
    job = Job.parse(LORA + "lora_target_parameters: experts.down_proj\nlayers_to_transform:\n", lora_folder)
    assert (job.lora_target_parameters, job.lora_dropout, job.lora_target_modules) == (
        ("experts.down_proj",),
        0.0,
        "all-linear",
    )
    assert Job.parse(LORA + "lora_target_parameters: [e]\nlora_dropout:\n", lora_folder).lora_dropout == 0
    data = "datasets: [{path: text.jsonl, type: completion}]\n"
    axolotl = f"base_model: trained\nlearning_rate: 1e-4\n{data}adapter: lora\nlora_r: 8\nlora_alpha: 16\n"
    job = Job.parse(axolotl + "lora_target_parameters: [experts.down_proj]\n", lora_folder)
    assert (job.lora_target_parameters, job.lora_target_modules) == (("experts.down_proj",), ())
    text = "lora_target_modules: [q]\npeft_layers_to_transform: 0\npeft_layers_pattern: h\npeft_init_lora_weights: "
    job = Job.parse(axolotl + text + "gaussian\n", lora_folder)
    assert (job.layers_to_transform, job.layers_pattern, job.init_lora_weights) == ((0,), ("h",), "gaussian")
    assert Job.parse(axolotl + text + "false\n", lora_folder).init_lora_weights is True, "axolotl gives peft nothing"
    trl = "model_name_or_path: trained\ndataset_name: text.jsonl\nuse_peft: true\nlora_target_parameters: [down_proj]\n"
    assert Job.parse(trl, lora_folder).lora_dropout == 0
    lines = ("loraplus_lr_ratio: 16", "layers_to_transform: 0", "init_lora_weights: false", "lora_target_parameters: e")
    for line in lines:
        wrong = refusal(f"model: trained\ndataset: text.jsonl\n{line}", lora_folder)
        assert "it is for method: lora; give that too" in str(wrong)


def test_rates_of_loraplus_in_files_of_llama_factory_are_told_where_they_mean_something_else(lora_folder: Path) -> None:
    text = "model_name_or_path: trained\ndataset: text.jsonl\ncutoff_len: 64\nloraplus_lr_embedding: 1.0e-4\n"
    job, notes = Job.parse_with_notes(text, lora_folder)
    assert job.loraplus_lr_embedding == 1e-6
    assert "not used: loraplus_lr_embedding (it has no effect without loraplus_lr_ratio)" in notes
    for targets, told in (("all", False), ("q_proj,embed_tokens", True)):
        lines = f"loraplus_lr_ratio: 16\nlora_target: {targets}\n"
        job, notes = Job.parse_with_notes(text + lines, lora_folder)
        assert job.loraplus_lr_embedding == 1e-4
        assert ("and there for B alone" in str(notes)) is told


def adapter(folder: Path, **config: object) -> Path:
    """A folder with the config of an adapter, and a file where its weights would be."""
    (folder / "made").mkdir()
    kind = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "lora_dropout": 0.2, "target_modules": ["q_proj"]}
    (folder / "made" / "adapter_config.json").write_text(json.dumps({**kind, **config}))
    (folder / "made" / "adapter_model.safetensors").touch()
    return folder


def test_a_job_that_goes_on_from_an_adapter_has_its_shape(lora_folder: Path) -> None:
    adapter(lora_folder)
    same = "lora_r: 4\nlora_dropout: 0.2\n"
    for lines in ("", same, same + "lora_target: q_proj\n", same + "lora_target_linear: true\nadditional_target: ''\n"):
        job = Job.parse(LORA + "adapter_name_or_path: made\n" + lines, lora_folder)
        assert (job.lora_r, job.lora_alpha, job.lora_dropout, job.lora_target_modules) == (4, 12, 0.2, ("q_proj",))
    (lora_folder / "resolved.yaml").write_text(job.resolved_yaml())
    assert Job.from_resolved(lora_folder / "resolved.yaml") == job
    shutil.rmtree(lora_folder / "made")
    assert Job.from_resolved(lora_folder / "resolved.yaml") == job, "what it is stands in the job"
    adapter(lora_folder, target_modules=["v_proj"], r=8, peft_type="IA3")
    assert Job.from_resolved(lora_folder / "resolved.yaml") == job, "whatever is there by now"


def test_an_adapter_at_some_layers_is_told_where_the_file_wants_all_of_them(lora_folder: Path) -> None:
    adapter(lora_folder)
    for line, said in (
        ("lora_target: all", 1),
        ("lora_target_linear: true", 1),
        ("lora_target: q_proj", 0),
        ("", 0),
        ("lora_target_modules: peft-default", 1),
        ("lora_target_linear: true\nlora_target_modules: [q_proj]", 1),
    ):
        _, notes = Job.parse_with_notes(LORA + f"adapter_name_or_path: made\n{line}\n", lora_folder)
        assert sum("the adapter that the job continues is at q_proj" in note for note in notes) == said, line
    wider = "adapter_name_or_path: made\nlora_target_linear: true\nlora_target_modules: [lm_head]\n"
    assert 'the adapter has ["q_proj"]' in str(refusal(LORA + wider, lora_folder))


@pytest.mark.parametrize(("its", "said"), [("v2", 1), ("main", 0), (None, 0)])
def test_an_adapter_for_another_revision_of_the_base_is_told(its: str | None, said: int, lora_folder: Path) -> None:
    adapter(lora_folder, revision=its)
    _, notes = Job.parse_with_notes(LORA + "adapter_name_or_path: made\n", lora_folder)
    wanted = 'model_revision: it is null; the adapter that the job continues was made for "v2"'
    assert notes.count(wanted) == said


def test_what_an_adapters_config_leaves_out_is_as_in_peft(lora_folder: Path) -> None:
    adapter(lora_folder)
    path = lora_folder / "made" / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"]}))
    job = Job.parse(LORA + "adapter_name_or_path: made\n", lora_folder)
    assert (job.lora_r, job.lora_alpha, job.lora_dropout) == (8, 8.0, 0.0)
    path.write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    assert "has no target_modules" in str(refusal(LORA + "adapter_name_or_path: made\n", lora_folder))


@pytest.mark.parametrize(
    ("config", "line", "words"),
    [
        ({}, "lora_r: 8", "lora_r: it is 8; the adapter has 4"),
        ({}, "use_dora: true", "use_dora: it is true; the adapter has false"),
        ({"peft_type": "IA3"}, "", 'the adapter is "IA3"; only LORA is supported'),
        ({"layer_replication": [[0, 2]]}, "", "the adapter has layer_replication"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern: {q_proj: 3}", 'the adapter has {"q_proj": 2}'),
        ({}, "layers_to_transform: 0", "layers_to_transform: it is 0; the adapter has null"),
        ({}, "lora_target_modules: [v_proj]", 'lora_target_modules: it is ["v_proj"]; the adapter has ["q_proj"]'),
        ({}, "lora_target_modules: '.*q_proj'", 'it is ".*q_proj"; the adapter has ["q_proj"]'),
        ({"target_modules": ".*q_proj"}, "lora_target: q_proj", 'it is "q_proj"; the adapter has ".*q_proj"'),
        ({"modules_to_save": ["lm_head"]}, "lora_modules_to_save: [embed_tokens]", 'the adapter has ["lm_head"]'),
        ({}, "additional_target: lm_head", "the adapter has null"),
        ({"init_lora_weights": "pissa"}, "", 'the adapter has init_lora_weights: "pissa", which is not supported yet'),
        ({"init_lora_weights": "olora"}, "", "the adapter has init_lora_weights"),
        ({"velora_config": {"num_groups": 4}}, "", "the adapter has velora_config"),
        ({}, "adapter_name_or_path: gone", "there is no adapter_config.json in"),
        ({}, "adapter_name_or_path: gone,adapter", "several adapters are not supported yet: merge all but the last"),
    ],
)
def test_an_adapter_that_is_another_is_refused(
    config: dict[str, object], line: str, words: str, lora_folder: Path
) -> None:
    adapter(lora_folder, **config)
    path = "" if line.startswith("adapter") else "adapter_name_or_path: made\n"
    assert words in str(refusal(LORA + path + line, lora_folder))
