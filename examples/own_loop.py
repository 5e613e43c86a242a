"""Your own training loop, with less GPU memory than the training needs: python examples/own_loop.py [STEPS]

A small model learns to write like this machine's Python library, from its source, byte by byte. Everything but the
three lines with `engine` is what a loop in plain PyTorch has, and so are the numbers. With a model of yours:

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", dtype=torch.bfloat16)
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from offmate import prepare

ROWS, LENGTH = 8, 64


def batch_of(text: torch.Tensor, step: int) -> dict[str, torch.Tensor]:
    """Pieces of `text` [bytes], drawn at random: input_ids and labels [ROWS, LENGTH]."""
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH, (ROWS,), generator=draw)
    ids = torch.stack([text[start : start + LENGTH] for start in starts.tolist()])
    return {"input_ids": ids, "labels": ids}


def main(steps: int) -> float:
    """Train for `steps` steps; the last loss."""
    text = torch.tensor(list(Path(textwrap.__file__).read_bytes()))
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=4,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps + 1)

    # measure=False: a plan at once, from an estimate of this machine; without it the blocks are timed first.
    engine = prepare(model, batch_of(text, 0), optimizer=optimizer, gpu_budget="16MB", max_grad_norm=1.0, measure=False)

    print(
        f"The device holds {engine.plan.gpu_peak_bytes / 1e6:.1f} MB at most; weights, gradients and moments alone "
        f"are {16 * sum(p.numel() for p in model.parameters()) / 1e6:.1f} MB."
    )
    for step in range(steps):
        loss = engine.step(batch_of(text, step))
        schedule.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step + 1}: loss {loss:.3f}, gradient {engine.grad_norm:.2f}")

    model = engine.restore()

    prompt = torch.tensor([list(b"def wrap(")])
    print(bytes(model.eval().generate(prompt, max_new_tokens=60, do_sample=False)[0].tolist()).decode(errors="replace"))
    return float(loss)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
