"""The model card: which of a job's keys it tells."""

from __future__ import annotations

import pytest

from planner.job.schema import Job
from worker.training.card import model_card


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
def test_a_card_tells_the_optimizer_and_the_tokenizers_revision(
    keys: dict[str, str], told: dict[str, str]
) -> None:  # fmt: skip
    job = Job(model="owner/tiny", tokenizer="owner/other", dataset=("owner/data",), **keys)
    rows = dict(row.strip("| ").split(" | ") for row in model_card(job, (), 1).splitlines() if row.startswith("| "))
    asked = {"optim", "muon_adjust_lr_fn", "tokenizer_revision"}
    assert {key: value for key, value in rows.items() if key in asked} == told
    assert rows["learning_rate"] == str(job.learning_rate)
