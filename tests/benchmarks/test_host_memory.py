"""What full fine-tuning takes of the host, measured as anonymous memory of the trainer's process. It takes half a
minute: below 50 million parameters PyTorch's own memory is a large part."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.host_memory import bytes_per_parameter, measure


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_weights_masters_moments_and_gradients_take_at_most_fourteen_and_a_half_bytes_a_parameter(
    tmp_path: Path,
) -> None:
    tiny = measure(tmp_path / "tiny", width=64, layers=2)
    found = []
    while len(found) < 2 and (not found or found[-1] > 14.5):  # where threads are held up, malloc keeps more at times
        model = measure(tmp_path / f"model-{len(found)}", width=1664, layers=2)
        assert model.parameters > 50e6
        assert model.planned_host_bytes == pytest.approx(14 * model.parameters, rel=0.1)
        found.append(bytes_per_parameter(model, tiny))
    assert min(found) <= 14.5
