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
