"""A model's masks of long rows are not made while its memory is planned, and nothing else changes by that."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import GptOssConfig, LlamaConfig, MistralConfig, PretrainedConfig

from planner.graph import fake
from planner.graph.fake import FakeMode, fake_model
from planner.machine.presets import preset
from planner.measure.analysis import analyse, estimate_times
from planner.schedule.chain import Block
from tests.planner.commands.test_ask import job_of

SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = {**SIZES, "vocab_size": 260, "intermediate_size": 64, "dtype": "bfloat16"}
MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "mistral": MistralConfig(**SMALL, sliding_window=32),
    "gpt-oss": GptOssConfig(**SMALL, sliding_window=32, head_dim=16, num_local_experts=4),
}
TRACE = """
import resource, sys
from pathlib import Path
from tests.planner.commands.test_ask import job_of
from planner.measure.analysis import analyse
import torch
analyse(job_of(Path(sys.argv[1]), length=64), torch.device("cpu"), for_gpu=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
analyse(job_of(Path(sys.argv[1]), length=int(sys.argv[2])), torch.device("cpu"), for_gpu=True)
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.parametrize("name", MODELS)
def test_a_chain_is_the_same_whether_masks_are_made_or_not(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MODELS[name].save_pretrained(tmp_path)
    chains = []
    for large in (fake._LARGE, 64 * 64):
        monkeypatch.setattr(fake, "_LARGE", large)
        analysis = analyse(job_of(tmp_path, length=64), torch.device("cpu"), for_gpu=True)
        chains.append(analysis.chain(estimate_times(analysis, preset("rtx3060", bf16=True))))
    made, not_made = chains
    assert list(map(figures, made.blocks)) == list(map(figures, not_made.blocks))
    assert kinds(made.blocks) == kinds(not_made.blocks)
    assert (made.start_bytes, made.frame_bytes, made.frame_lifetimes) == (
        not_made.start_bytes,
        not_made.frame_bytes,
        not_made.frame_lifetimes,
    )


def figures(block: Block) -> tuple[object, ...]:
    frame = block.forward_held_bytes, block.forward_frame_bytes, block.backward_held_bytes, block.backward_frame_bytes
    return block.name, block.options, block.tensors, block.input_bytes, block.output_bytes, frame


def kinds(blocks: Sequence[Block]) -> list[int]:
    """Per block, the first block of its kind."""
    return [[other.kind for other in blocks].index(block.kind) for block in blocks]


def test_rows_of_32768_tokens_are_traced_without_the_memory_of_their_masks(tmp_path: Path) -> None:
    MODELS["mistral"].save_pretrained(tmp_path)
    length = 32768
    words = [sys.executable, "-c", TRACE, str(tmp_path), str(length)]
    more = int(subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert more < length**2 // 4, "a mask takes a byte for each pair of tokens"


def test_only_large_results_of_real_tensors_are_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "_LARGE", 100)
    row, mode = torch.arange(10), FakeMode()
    with fake_model(torch.nn.Linear(2, 2), mode, torch.device("cpu")):
        large: list[Tensor] = [row[:, None] <= row, torch.ones(10, 10), torch.zeros(100), row.expand(10, 10) + 1]
        small: list[Tensor] = [row + 1, torch.ones(3), row.expand(10, 10), row[:, None] <= row[:9]]
        small += [row.expand(10, 10).sum(), row.expand(99, 10).max(1)[0], row.expand(10, 10)[row > 7].nonzero()]
        assert (row.expand(10, 10) < 10).numel() == 100 and int(row.expand(10, 10).max()) == 9
        row.add_(1)
    assert all(isinstance(tensor, FakeTensor) for tensor in large)
    assert not any(isinstance(tensor, FakeTensor) for tensor in small)
    assert row[0] == 1
