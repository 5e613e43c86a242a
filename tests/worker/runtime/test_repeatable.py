"""On a CPU a run has the same bits each time, also where PyTorch's own kernels add in any order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils import deterministic

from planner.errors import Exit
from planner.run.folder import RunFolder
from worker import trainer
from worker.runtime.repeatable import take_repeatable_kernels
from worker.training.stop import StopRequest


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    threads, fills = torch.get_num_threads(), deterministic.fill_uninitialized_memory
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    deterministic.fill_uninitialized_memory = fills


def gradient() -> Tensor:
    """Of four biases of which each of many tokens has one, as GPT-OSS's experts read theirs."""
    generator = torch.Generator().manual_seed(0)
    biases = torch.zeros((4, 64), requires_grad=True)
    chosen = torch.randint(4, (4096,), generator=generator)
    (biases[chosen] * torch.randn((4096, 64), generator=generator)).sum().backward()
    assert biases.grad is not None
    return biases.grad


def test_the_gradient_of_an_indexed_tensor_has_the_same_bits_each_time() -> None:
    torch.set_num_threads(2)
    take_repeatable_kernels()
    first = gradient()
    assert all(torch.equal(gradient(), first) for _ in range(50))


def test_memory_is_not_filled_for_it() -> None:
    take_repeatable_kernels()
    assert torch.are_deterministic_algorithms_enabled()
    assert not deterministic.fill_uninitialized_memory


@pytest.mark.parametrize("cuda", [False, True])
def test_training_takes_such_kernels_on_a_cpu_and_the_fast_ones_on_a_card(
    cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bool] = []

    def run_job(folder: RunFolder, stop: StopRequest) -> bool:
        taken.append(torch.are_deterministic_algorithms_enabled())
        return False

    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    monkeypatch.setattr("worker.training.run.run_job", run_job)
    assert trainer._train(RunFolder(tmp_path), StopRequest()) == Exit.STOPPED
    assert taken == [not cuda]
