"""What full fine-tuning takes of the host, measured as anonymous memory of the trainer's process."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.host_memory import bytes_per_parameter, measure


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_weights_masters_moments_and_gradients_take_at_most_fourteen_and_a_half_bytes_a_parameter(
    tmp_path: Path,
) -> None:
    tiny, model = (measure(tmp_path / str(width), width=width, layers=2) for width in (64, 1664))
    assert model.parameters > 50e6
    assert model.planned_host_bytes == pytest.approx(14 * model.parameters, rel=0.1)
    assert bytes_per_parameter(model, tiny) <= 14.5
