"""Models, configs and tokenizers with code of their own."""

from __future__ import annotations

import builtins
import json
import logging
from pathlib import Path

import pytest
from transformers import AutoConfig

from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.models.hf_model import model_config, skeleton_model
from planner.models.tokenizer import load_tokenizer
from tests.support.texts import tiny_llama_folder
from worker.training.model import load_model

OWN = {"AutoConfig": "own_code.Own", "AutoModelForCausalLM": "own_code.Own", "AutoModel": "own_code.Own"}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder, with code in it that says when it ran; whoever is asked whether it may says yes."""
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tiny_llama_folder(tmp_path / "model")
    (folder / "own_code.py").write_text(
        f"from pathlib import Path\nPath({str(tmp_path / 'it-ran')!r}).touch()\n"
        "from transformers import LlamaConfig\nclass Own(LlamaConfig): model_type = 'own'\n"
    )
    return folder


def change(file: Path, **keys: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **keys}))


def job_of(folder: Path) -> Job:
    return Job(model=str(folder), tokenizer=str(folder), dataset=("none",))


NAMED = "\n".join(f"  auto_map: {key}: {place}" for key, place in OWN.items())


@pytest.mark.parametrize("model_type", ["unheard-of", "vit"])
def test_a_model_that_only_its_own_code_can_read_is_refused_by_name(model: Path, model_type: str) -> None:
    change(model / "config.json", auto_map=OWN, model_type=model_type)
    for load in (skeleton_model, load_model):
        with pytest.raises(UserError) as caught:
            load(job_of(model))
        said = f"{model} is a model with code of its own, which offmate never runs.\n{NAMED}\n"
        assert str(caught.value).startswith(said)
        assert (caught.value.code, caught.value.exit_code) == ("model-has-own-code", Exit.USAGE)
    assert not (model.parent / "it-ran").exists()


def test_where_transformers_knows_a_model_its_own_code_is_not_run_and_it_is_said(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    change(model / "config.json", auto_map=OWN)
    change(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own_code.Own", None]})
    skeleton_model(job_of(model))
    load_model(job_of(model))
    load_tokenizer(job_of(model))
    assert "model: its own code (own_code) is not run; LlamaForCausalLM is transformers'" in caplog.text
    assert not (model.parent / "it-ran").exists()


@pytest.mark.parametrize("places", [["own_code.Own", None], "own_code.Own"])
def test_a_tokenizer_that_only_its_own_code_can_read_is_refused_by_name(model: Path, places: object) -> None:
    auto_map = {"AutoTokenizer": places} if isinstance(places, list) else places
    change(model / "config.json", model_type="unheard-of")
    change(model / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="OwnTokenizer")
    with pytest.raises(UserError) as caught:
        load_tokenizer(job_of(model))
    if isinstance(places, list):
        assert caught.value.code == "tokenizer-has-own-code"
        assert caught.value.numbers == ("auto_map: AutoTokenizer: own_code.Own, None",)
    assert caught.value.exit_code == Exit.USAGE
    assert not (model.parent / "it-ran").exists()


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "null",
        "5",
        '"x"',
        "{",
        '{"model_type": 5}',
        '{"model_type": "llama", "auto_map": 5}',
        '{"model_type": "llama", "auto_map": ["x"]}',
        '{"model_type": "llama", "hidden_size": 0}',
        '{"model_type": "llama", "hidden_size": "much"}',
        '{"model_type": "gpt2", "n_head": 0}',
        '{"model_type": "llava", "text_config": {"model_type": "own", "auto_map": {"AutoConfig": "own_code.Own"}}}',
    ],
)
def test_no_config_ends_in_anything_but_one_error(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    try:
        skeleton_model(job_of(model))
    except UserError as error:
        assert error.code == "model-not-usable"
    assert not (model.parent / "it-ran").exists()


def test_a_config_is_read_once_and_again_when_its_file_has_changed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one caller changes in its config, another does not see."""
    reads: list[object] = []
    read = AutoConfig.from_pretrained
    monkeypatch.setattr(
        AutoConfig, "from_pretrained", lambda *names, **keys: reads.append(names) or read(*names, **keys)
    )
    first, second = model_config(job_of(model)), model_config(job_of(model))
    first.vocab_size += 1
    assert len(reads) == 1 and not first.use_cache
    assert model_config(job_of(model)).vocab_size == second.vocab_size == first.vocab_size - 1
    change(model / "config.json", vocab_size=second.vocab_size + 7)
    assert model_config(job_of(model)).vocab_size == second.vocab_size + 7 and len(reads) == 2
