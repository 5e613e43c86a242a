"""The model card: which of a job's keys it tells."""

from __future__ import annotations

import pytest

from planner.job.schema import Job
from worker.training.card import _ALWAYS, _NEVER, model_card


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({}, {"optim": "adamw_torch_fused"}),
        ({"optim": "adamw_8bit"}, {"optim": "adamw_8bit"}),
        ({"optim": "muon"}, {"optim": "muon", "muon_adjust_lr_fn": "match_rms_adamw"}),
        ({"tokenizer_revision": "v3"}, {"optim": "adamw_torch_fused", "tokenizer_revision": "v3"}),
    ],
    ids=str,
)
def test_a_card_tells_the_optimizer_and_the_tokenizers_revision(keys: dict[str, str], told: dict[str, str]) -> None:
    job = Job(model="owner/tiny", tokenizer="owner/other", dataset=("owner/data",), **keys)
    rows = dict(row.strip("| ").split(" | ") for row in model_card(job, (), 1).splitlines() if row.startswith("| "))
    asked = {"optim", "muon_adjust_lr_fn", "tokenizer_revision"}
    assert {key: value for key, value in rows.items() if key in asked} == told
    assert rows["learning_rate"] == str(job.learning_rate)


KEYS: dict[str, object] = {
    "method": "lora",
    "lora_r": 4,
    "lora_alpha": 8.0,
    "lora_dropout": 0.0,
    "loraplus_lr_ratio": 16.0,
    "loraplus_lr_embedding": 1e-4,
    "rank_pattern": {"a|b": 8},
    "init_lora_weights": "gaussian",
    "exclude_modules": "up_proj",
    "lora_modules_to_save": ("norm",),
    "add_tokens": ("<a>",),
    "exact": False,
    "max_grad_norm": None,
    "val_size": 0.1,
    "trainable": ("a",),
}
OWN = {
    "adapter_name_or_path": "/home/me/adapter",
    "output_dir": "/home/me/out",
    "disk_paths": ("/home/me/drive",),
    "gpu_budget": 2**33,
    "wandb_entity": "me",
    "sample_prompts": ("who?",),
}


def test_a_card_tells_all_that_is_not_as_by_default_and_nothing_of_the_machine() -> None:
    job = Job(model="owner/tiny", tokenizer="owner/tiny", dataset=("owner/data",)).model_copy(update={**KEYS, **OWN})
    card = model_card(job, (), 1)
    rows = dict(row.strip("| ").split(" | ") for row in card.splitlines() if row.startswith("| "))
    usual = {"max_length", "optim", "learning_rate", "lr_scheduler_type", "seed", "key"}
    assert rows.keys() - usual == KEYS.keys() | {"adapter_name_or_path"}
    assert rows["adapter_name_or_path"] == "adapter" and "/home" not in card
    assert (rows["rank_pattern"], rows["exact"], rows["max_grad_norm"]) == (r'{"a\|b": 8}', "false", "null")


def test_the_exceptions_of_a_card_are_keys_of_jobs() -> None:
    assert Job.model_fields.keys() >= _NEVER | _ALWAYS


@pytest.mark.parametrize(
    ("keys", "unit", "told"),
    [
        (
            {"preference": "dpo"},
            "pair",
            "It learned from preferences by DPO with beta 0.1; the reference is the model as it was before this "
            "training.",
        ),
        (
            {"preference": "kto", "preference_beta": 0.5, "ref_model": "/home/me/other"},
            "answer",
            "It learned from preferences by KTO with beta 0.5; the reference is other.",
        ),
        (
            {"preference": "orpo"},
            "pair",
            "It learned from preferences by ORPO with beta 0.1, without a reference model.",
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_card_tells_how_a_model_learned_from_preferences(keys: dict[str, object], unit: str, told: str) -> None:
    plain = Job(model="owner/tiny", tokenizer="owner/tiny", dataset=("owner/data",))
    plain = plain.model_copy(update={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2})
    events = [
        {"event": "step", "step": 3, "loss": 0.5, "rewards_margins": 0.25},
        {"event": "eval", "step": 3, "eval_loss": 0.75, "eval_rewards_accuracies": 1.0},
    ]
    card = model_card(plain.model_copy(update=keys), events, 3)
    assert told in card.splitlines() and f"3 steps of 8 {unit}s" in card and "/home" not in card
    assert "- loss of the last step: 0.5000, margin 0.250" in card.splitlines()
    assert "- loss of the evaluation: 0.7500, accuracy 1.000" in card.splitlines()
    assert f"- {keys['preference']}" in card.splitlines(), "a tag"
    assert "preferences" not in model_card(plain, (), 3) and "3 steps of 8 rows" in model_card(plain, (), 3)
