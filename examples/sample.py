"""Write on from a prompt with a trained model folder: python examples/sample.py FOLDER [PROMPT]"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def sample(folder: str, prompt: str) -> str:
    """`prompt` and the text that the model in `folder` adds to it, the same one every time."""
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(0)
    tokens = model.generate(**inputs, max_new_tokens=80, do_sample=True, temperature=0.7, top_k=50)
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True))


if __name__ == "__main__":
    print(sample(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "The statement"))
