"""Kernels that repeat: on a CPU always, else where bits are compared or a job asks for them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils import deterministic

from planner.errors import Exit, UserError
from planner.measure.repeatable import (
    Kernels,
    NotRepeatableError,
    kernels_in_force,
    repeatable_on_cpu,
    with_fallback,
)
from planner.run.folder import RunFolder
from tests import ROOT
from tests.support.texts import make_job
from worker import trainer
from worker.training.stop import StopRequest

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def gradient() -> Tensor:
    """Of four biases of which each of many tokens has one, as GPT-OSS's experts read theirs."""
    generator = torch.Generator().manual_seed(0)
    biases = torch.zeros((4, 64), requires_grad=True)
    chosen = torch.randint(4, (4096,), generator=generator)
    (biases[chosen] * torch.randn((4096, 64), generator=generator)).sum().backward()
    assert biases.grad is not None
    return biases.grad


def refused() -> Tensor:
    """Of an operation that has no deterministic kernel, on the CPU either."""
    return torch.zeros(4).put(torch.tensor([1]), torch.ones(1))


def attention_backend() -> SDPBackend:
    """What PyTorch takes for attention now."""
    query = torch.randn(1, 2, 8, 16)
    return SDPBackend(torch._fused_sdp_choice(query, query, query))


def test_the_gradient_of_an_indexed_tensor_has_the_same_bits_each_time() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    with repeatable_on_cpu():
        first = gradient()
        assert all(torch.equal(gradient(), first) for _ in range(50))
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kernels", [repeatable_on_cpu, Kernels().taken, Kernels(("put_",)).taken])
def test_all_is_as_before_afterwards_and_memory_is_not_filled_meanwhile(kernels) -> None:
    fills, environment = deterministic.fill_uninitialized_memory, dict(os.environ)
    backend = attention_backend()
    with kernels():
        assert torch.are_deterministic_algorithms_enabled() and not deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert (deterministic.fill_uninitialized_memory, attention_backend()) == (fills, backend)
    assert not torch.is_deterministic_algorithms_warn_only_enabled() and os.environ == environment


def test_cublas_is_told_before_it_begins_and_what_the_user_has_told_it_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with Kernels().taken():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with Kernels().taken():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_size_of_cublas_workspaces_that_pytorch_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with Kernels().taken():
        pass  # where there is no card nobody reads it
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(UserError) as told, Kernels().taken():
        pytest.fail("it was taken")
    assert str(told.value) == (
        "An environment variable lets the results of cuBLAS differ from run to run.\n"
        '  CUBLAS_WORKSPACE_CONFIG is ":0:0"\n'
        "  hint: unset CUBLAS_WORKSPACE_CONFIG, or set it to :4096:8 or :16:8; start offmate again   "
        "[cublas-workspace]"
    )
    assert not torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":0:0"


def test_an_operation_without_such_a_kernel_is_refused_and_named_in_every_thread() -> None:
    caught: list[Exception] = []

    def work() -> None:
        try:
            refused()
        except RuntimeError as error:
            caught.append(error)

    with pytest.raises(NotRepeatableError) as told, Kernels().taken():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        raise ValueError("the step failed") from caught[0]
    assert str(told.value) == (
        "This job has an operation that does not give the same bits each time.\n"
        "  put_ has no deterministic kernel in PyTorch\n"
        "  hint: leave deterministic: true out; the bits of two runs may then differ   [not-deterministic]"
    )
    assert told.value.exit_code is Exit.USAGE
    again = NotRepeatableError.of(told.value)
    assert again is not None and again.operation == "put_"
    assert "attn_implementation: eager" in NotRepeatableError("_flash_attention_backward").hint
    with pytest.raises(ValueError, match="any other"), Kernels().taken():
        raise ValueError("any other")


def test_what_refuses_is_warned_of_and_attention_is_then_computed_by_products(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried: list[tuple[Kernels, SDPBackend]] = []

    def act(kernels: Kernels) -> Tensor:
        tried.append((kernels, attention_backend()))
        return refused()

    with pytest.warns(UserWarning, match="put_ does not have a deterministic"):
        assert with_fallback(act, required=False).tolist() == [0, 1, 0, 0]
    assert tried == [(Kernels(), SDPBackend.FLASH_ATTENTION), (Kernels(("put_",)), SDPBackend.MATH)]
    assert caplog.messages == [
        "put_ has no deterministic kernel in PyTorch: all is done once more. Kernels: deterministic ones but for put_, "
        "which has none and may differ from run to run; attention is computed by matrix products (SDPBackend.MATH)"
    ]
    tried.clear()
    with pytest.raises(NotRepeatableError):
        with_fallback(act, required=True)
    assert len(tried) == 1, "a job that asks for such kernels would end so, too"


def test_where_attention_refuses_all_else_stays_strict() -> None:
    def act(kernels: Kernels) -> str:
        if attention_backend() != SDPBackend.MATH:
            raise RuntimeError("_some_attention_backward does not have a deterministic implementation, but …")
        with pytest.raises(RuntimeError, match="put_ does not have"):
            refused()
        return str(kernels)

    assert with_fallback(act, required=False) == (
        "deterministic ones only; _some_attention_backward has none, so attention is computed by matrix products "
        "(SDPBackend.MATH)"
    )


def test_one_that_refuses_again_is_an_error() -> None:
    def act(kernels: Kernels) -> None:
        raise RuntimeError("some_attention does not have a deterministic implementation, but …")

    with pytest.raises(NotRepeatableError, match="some_attention"):
        with_fallback(act, required=False)


def test_measurements_know_the_kernels_that_they_were_made_in() -> None:
    assert (kernels_in_force(CPU), kernels_in_force(CUDA)) == ("", "")
    with repeatable_on_cpu():
        assert kernels_in_force(CPU) == "", "as training takes them there"
    for kernels, words in ((Kernels(), "strict"), (Kernels(("put_",)), "warning, MATH")):
        with kernels.taken():
            assert kernels_in_force(CUDA) == words
            assert kernels_in_force(CPU) == ("" if kernels == Kernels() else words)
    with Kernels(("some_attention",)).taken():
        assert kernels_in_force(CUDA) == "strict, MATH"


@pytest.mark.parametrize(
    ("cuda", "asked", "enabled", "warns"),
    [
        (False, False, True, True),
        (True, False, False, False),
        (False, True, True, False),
        (True, True, True, False),
    ],
)
def test_training_takes_such_kernels_on_a_cpu_and_on_a_card_where_it_is_asked_for(
    cuda: bool, asked: bool, enabled: bool, warns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[bool, bool]] = []

    def run_job(folder: RunFolder, stop: StopRequest) -> bool:
        warned = torch.is_deterministic_algorithms_warn_only_enabled()
        taken.append((torch.are_deterministic_algorithms_enabled(), warned))
        return False

    monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
    monkeypatch.setattr("worker.training.run.run_job", run_job)
    run = RunFolder(tmp_path)
    run.write_resolved(make_job("model", "data", deterministic=asked).resolved_yaml())
    assert trainer._train(run, StopRequest()) == Exit.STOPPED
    assert taken == [(enabled, warns)]


def test_nobody_else_asks_pytorch_for_deterministic_kernels() -> None:
    sources = [path for name in ("planner", "worker", "offmated") for path in (ROOT / name).rglob("*.py")]
    asking = [path.name for path in sources if "use_deterministic_algorithms(" in path.read_text("utf-8")]
    assert asking == ["repeatable.py"]
