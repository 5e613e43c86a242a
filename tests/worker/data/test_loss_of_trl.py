"""The loss of a batch is that of TRL's own trainer on the same records, within rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from planner.importers.templates import named_template
from tests.support.texts import byte_tokenizer, make_job, tiny_llama_folder, write_jsonl
from tests.support.tiny_models import make_model
from worker.data.batches import Batches

TALKS = [
    [("user", "hi"), ("assistant", "yes"), ("user", "so?"), ("assistant", "no")],
    [("user", "2+2?"), ("assistant", "four, as far as I know")],
    [("user", "again"), ("assistant", "a")],
]
RECORDS = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in TALKS]
VOCABULARY = 300


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(chat_template=named_template(template))
    tokenizer.add_special_tokens({"bos_token": "<eos>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def model() -> torch.nn.Module:
    return make_model("llama", vocabulary=VOCABULARY, dropout=0.0)


def trls_loss(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, *, packing: bool) -> float:
    """The mean over all learned tokens of the records, as its trainer has it."""
    config = SFTConfig(
        output_dir=str(tmp_path / "trl"),
        use_cpu=True,
        report_to=[],
        assistant_only_loss=True,
        packing=packing,
        max_length=512,
        per_device_train_batch_size=len(RECORDS),
        bf16=False,
    )
    trainer = SFTTrainer(model(), config, train_dataset=Dataset.from_list(RECORDS), processing_class=tokenizer)
    (batch,) = trainer.get_train_dataloader()
    items = (batch["labels"][:, 1:] != -100).sum()
    return float(trainer.compute_loss(trainer.model, batch, num_items_in_batch=items).detach())


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("template", ["qwen3", "llama3", "gemma3", "phi"])
def test_the_loss_of_conversations_under_a_named_template_is_trls(tmp_path: Path, template: str, packing: bool) -> None:
    tokenizer = tokenizer_of(template)
    data = write_jsonl(tmp_path / "data.jsonl", RECORDS)
    rows = 1 if packing else len(RECORDS)
    keys = {"max_length": 512, "packing": packing, "per_device_train_batch_size": rows}
    found = Batches(make_job(tiny_llama_folder(tmp_path / "model"), data, **keys), tokenizer)
    (batch,) = found.step(0)
    assert found.steps_per_epoch == 1
    items = torch.tensor(found.num_items([batch]))
    ours = float(model()(**batch, num_items_in_batch=items).loss.detach())
    assert ours == pytest.approx(trls_loss(tmp_path, tokenizer, packing=packing), rel=1e-6)
