"""Threads of the engine, and the number of OpenMP threads with which each computes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from tests import ROOT
from worker.runtime.threads import compute_with

_BESIDE_PLAIN = """
import sys
import torch
from tests.support.engine_plans import adamw, chain_of, mixed_plan
from tests.support.engines import CPU, data
from tests.support.tiny_models import make_model
from worker.engine.engine import Engine

torch.manual_seed(0)
values = [torch.randn(8, 256, 2, 32).transpose(1, 2).requires_grad_() for _ in range(3)]

def gradients():
    attended = torch.nn.functional.scaled_dot_product_attention(*values, is_causal=True)
    return torch.autograd.grad(attended.square().sum(), values)

before = gradients()
if sys.argv[1] == "engine":
    model = make_model("llama")
    chain = chain_of(model)
    plan = mixed_plan(chain, slices=2)
    engine = Engine(model, plan=plan, chain=chain, optimizer=adamw(model), max_grad_norm=None, device=CPU)
    batches, rest = data(0, 2)
    engine.step(batches, learning_rate=1e-3, **rest)
else:
    torch.set_num_threads(torch.get_num_threads())
print(all(map(torch.equal, before, gradients())))
"""


def same_bits_after(what: str) -> bool:
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", _BESIDE_PLAIN, what]
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()[-1] == "True"


def test_an_engine_changes_no_bit_of_what_plain_pytorch_computes_on_two_threads() -> None:
    """Slow: two processes import torch, and one traces a model."""
    if same_bits_after("set_num_threads"):
        pytest.skip("on this machine MKL computes the same, whoever chooses its threads")
    assert same_bits_after("engine")


def test_a_thread_computes_with_the_threads_of_the_process() -> None:
    before, seen = torch.get_num_threads(), []
    try:
        torch.set_num_threads(3)
        thread = threading.Thread(target=lambda: (compute_with(3), seen.append(torch.get_num_threads())))
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert seen == [3]
