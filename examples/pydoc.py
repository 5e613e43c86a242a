"""Prepare the example job: real English text, a tokenizer trained on it, and the shape of a small Llama.

    python examples/pydoc.py            # writes .demo/pydoc/ beside this folder; examples/pydoc.yaml reads it there

The text is the Python language reference that ships with every CPython (`pydoc_data.topics`), so nothing is downloaded.
The model folder has a config and a tokenizer and no weights: training starts from random weights under the job's seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, PreTrainedTokenizerFast

PASSAGE_CHARACTERS = 900  # about 256 tokens of this tokenizer, the example's max_length
END = "<|end|>"


def passages() -> Iterator[str]:
    """The reference cut at blank lines into passages of about `PASSAGE_CHARACTERS`."""
    for _, topic in sorted(topics.items()):
        passage = ""
        for paragraph in topic.split("\n\n"):
            if passage and len(passage) + len(paragraph) > PASSAGE_CHARACTERS:
                yield passage.strip("\n")
                passage = ""
            passage += paragraph + "\n\n"
        yield passage.strip("\n")


def prepare(folder: Path) -> None:
    """Write `text.jsonl` and `model/` (config and tokenizer) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [text for text in passages() if text]
    with (folder / "text.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in rows)

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(rows, vocab_size=2048, special_tokens=[END], show_progress=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, eos_token=END, pad_token=END, model_max_length=512
    ).save_pretrained(folder / "model")
    end = tokenizer.token_to_id(END)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
        tie_word_embeddings=False,
    ).save_pretrained(folder / "model")
    print(f"{len(rows)} passages and a model of 4 layers are in {folder}")


if __name__ == "__main__":
    prepare(Path(__file__).resolve().parent.parent / ".demo" / "pydoc")
