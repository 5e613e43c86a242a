"""The strict mode on the emulated device. Where an operation refuses is seen on the CPU (test_verify_resume.py): a card
refuses as an operation is issued, the emulated device only as it computes."""

from __future__ import annotations

import pytest
import torch

from planner.measure.repeatable import Kernels
from tests.support.cuda.device import Device
from tests.support.cuda.streams import Mood
from tests.support.late_engines import Case, differences

pytestmark = pytest.mark.emulated


@pytest.mark.parametrize(
    "case", [Case("llama", "mixed", slices=2, clip=0.5), Case("gpt2", "mixed", torch.bfloat16, slices=2)], ids=str
)
def test_a_plan_has_plain_pytorchs_bits_under_the_strict_mode(device: Device, case: Case) -> None:
    with Kernels().taken():
        assert differences(device, case, Mood(), steps=2) == []
