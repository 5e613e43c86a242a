"""The CUDA path as it is, on a device that is late: bit by bit what plain PyTorch computes on the same device. Some
tests take seconds: models are traced and trained on an emulated device."""

from __future__ import annotations

import pytest
import torch

from tests.support.cuda.device import Device
from tests.support.cuda.streams import Mood
from tests.support.engines import own_threads
from tests.support.late_engines import Case, differences

pytestmark = pytest.mark.emulated

BF16 = torch.bfloat16
CASES = (
    Case("llama", "mixed"),
    Case("llama", "mixed", slices=2, clip=0.5),
    Case("llama", "mixed", BF16, slices=2, rounds=2),
    Case("llama", "mixed", BF16, rounds=2, clip=0.5),
    Case("llama", "ahead", slices=2, clip=0.5),
    Case("llama", "ahead", BF16, clip=0.5),
    Case("llama", "offload", BF16, slices=2),
    Case("llama", "offload-all", slices=2, clip=0.5),
    Case("llama", "streaming", slices=2),
    Case("gpt2", "mixed", BF16),
    Case("gpt2", "mixed", slices=2, clip=0.5),
    Case("gpt2", "ahead", BF16, slices=2, clip=0.5),
    Case("gpt2", "offload-all", BF16),
    Case("gpt2", "streaming", BF16, slices=3),
    Case("qwen2", "keep", slices=2),
    Case("bloom", "recompute", slices=2, rounds=2),
    Case("llama", "ahead", BF16, slices=2, clip=0.5, rounded=True),
    Case("qwen2", "mixed", slices=2, rounded=True),
    Case("llama", "mixed", BF16, slices=2, clip=0.5, muon=True),
    Case("qwen2", "mixed", slices=2, muon=True),
)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: str(CASES[n]))
def test_a_late_device_computes_what_plain_pytorch_does_there(number: int, device: Device) -> None:
    mood = Mood.drawn(number)
    assert not differences(device, CASES[number], mood, drains=bool(number % 2)), mood
    assert own_threads() == []
