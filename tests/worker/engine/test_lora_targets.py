"""Where LoRA puts its adapters, and what is said where a job names no place for them."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest

from planner.errors import UserError
from planner.models.hf_model import sample_batch, skeleton_model
from tests.support.engine_plans import chain_of
from tests.support.lora_jobs import lora_job
from worker.training.model import load_model


def test_the_skeleton_has_the_adapters_of_the_model(tmp_path: Path) -> None:
    job = lora_job(tmp_path, bf16=True)
    skeleton, model = skeleton_model(job), load_model(job)
    described = [{n: (p.shape, p.dtype, p.requires_grad) for n, p in m.named_parameters()} for m in (skeleton, model)]
    assert described[0] == described[1]
    assert all(p.is_meta for p in skeleton.parameters())
    assert chain_of(skeleton, sample_batch(job)).blocks[1].name == "base_model.model.model.layers.0"


def test_adapters_are_made_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    load_model(lora_job(tmp_path))
    assert [str(warning.message) for warning in recwarn if warning.category is FutureWarning] == []


def test_a_target_that_is_not_in_the_model_is_named(tmp_path: Path) -> None:
    every = "lora_target_modules: all-linear takes all linear layers"
    cases: list[tuple[object, str, str]] = [
        (["nothing_like_it"], "No module of this model is called nothing_like_it.", every),
        (["q_prj", "vprj"], "No module of this model is called q_prj, vprj.", f"did you mean q_proj, v_proj? {every}"),
        (r".*\.q_porj", r"No module of this model matches .*\.q_porj.", every),
    ]
    for targets, what, hint in cases:
        with pytest.raises(UserError) as caught:
            skeleton_model(lora_job(tmp_path, lora_target_modules=targets))
        assert (caught.value.code, caught.value.what, caught.value.hint) == ("lora-targets", what, hint)
        assert caught.value.numbers[0].startswith("its layers are embed_tokens, q_proj, k_proj, v_proj, ")


@pytest.mark.parametrize(
    "keys",
    [
        {"lora_target_modules": r".*mlp\.(\w*\w*\w*\w*\w*)*x"},
        {"rank_pattern": {r"(\w*\w*\w*\w*\w*)*x": 2}},
        {"exclude_modules": r".*mlp\.(\w*\w*\w*\w*\w*)*x"},
    ],
    ids=str,
)
def test_a_pattern_that_only_the_names_of_the_model_make_slow_is_refused_before_peft_matches_it(
    tmp_path: Path, keys: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "planner.keys.lora.too_slow", lambda patterns: None
    )  # as where a name is none of the usual ones
    with pytest.raises(UserError) as caught:
        skeleton_model(lora_job(tmp_path, **keys))
    assert (caught.value.code, caught.value.exit_code) == ("pattern-too-slow", 2)
    assert r"(\w*\w*\w*\w*\w*)*x" in caught.value.numbers[0]


def test_a_target_that_peft_leaves_out_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_model(lora_job(tmp_path, lora_target_modules=["q_proj", "k_porj"]))
    (said,) = [text for text in caplog.messages if "no layer of this model" in text]
    assert said.endswith("is called k_porj; did you mean k_proj?")


def test_pefts_own_targets_are_those_of_the_models_type_and_a_type_without_any_is_refused(tmp_path: Path) -> None:
    model = load_model(lora_job(tmp_path, lora_target_modules="peft-default"))
    trained = {name.split(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert {name.rpartition(".")[2] for name in trained} == {"q_proj", "v_proj"} and len(trained) == 6
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="Please specify `target_modules`") as caught:
        skeleton_model(lora_job(tmp_path / "other", "gpt_oss", lora_target_modules="peft-default"))
    assert (caught.value.code, caught.value.hint) == ("lora-targets", "lora_target_modules: all-linear")


def test_without_peft_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name.split(".")[0] == "peft":
            raise ImportError("No module named 'peft'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError) as caught:
        skeleton_model(lora_job(tmp_path))
    assert str(caught.value) == (
        "LoRA needs the package peft.\n  No module named 'peft'\n  hint: pip install 'offmate[lora]'   [peft-missing]"
    )
