"""The fronts of options beside what PyTorch's partitioner saves of the same graph at each memory budget.

    nice python benchmarks/partitioner.py

Its minimum cut and its knapsack (`torch._functorch.config.activation_memory_budget`) choose the values to save; bytes
and the time of what runs again are counted alike for both, as `planner.graph.front` counts them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
import torch._functorch.partitioners as partitioners
from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from planner.graph import Joint, trace_block
from planner.graph.fake import FakeMode
from planner.graph.front import Cutter, Saved, hull

BUDGETS = [k / 20 for k in range(21)]


@dataclass(frozen=True, slots=True)
class Case:
    """A layer without weights and what it is called with, in bf16."""

    name: str
    layer: torch.nn.Module
    arguments: tuple[torch.Tensor, ...]
    rest: dict[str, Any]


def cases() -> list[Case]:
    """A layer of Llama with 8 B parameters, all of them trained or frozen, and one of GPT-2 XL with dropout."""
    found = []
    llama = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        attn_implementation="sdpa",
    )
    for trained in (True, False):
        with torch.device("meta"):
            layer = LlamaDecoderLayer(llama, 0).to(torch.bfloat16).requires_grad_(trained)
        x = torch.empty(1, 4096, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
        places = LlamaRotaryEmbedding(llama)(torch.empty(1, dtype=torch.bfloat16), torch.arange(4096)[None])
        there = tuple(t.to("meta") for t in places)
        found.append(Case(f"Llama, {'trained' if trained else 'frozen'}", layer, (x,), {"position_embeddings": there}))
    gpt2 = GPT2Config(n_embd=1600, n_head=25, n_layer=1, attn_implementation="sdpa")
    with torch.device("meta"):
        block = GPT2Block(gpt2, 0).to(torch.bfloat16).train()
    x = torch.empty(4, 1024, 1600, dtype=torch.bfloat16, device="meta", requires_grad=True)
    return [*found, Case("GPT-2 XL", block, (x,), {})]


def theirs(joint: Joint, cutter: Cutter) -> tuple[list[Saved], float]:
    """What PyTorch saves at each budget, by our count, and its own seconds."""
    graph, internal = joint.module.graph, cast(Any, partitioners)
    held = set(joint.params.values())
    primals = [n for n in graph.nodes if n.op == "placeholder" and "tangents" not in n.name]
    static = [i for i, n in enumerate(primals) if n in held]
    info = internal.classify_nodes(joint.module, static, len(joint.outputs))
    for node in reversed(graph.nodes):
        required = node.op == "output" or info.is_required_fw(node)
        node.dist_from_bw = int(1e9) if required else 0
        if required and node.op != "output":
            node.dist_from_bw = min([int(1e9), *(user.dist_from_bw + 1 for user in node.users)])
    start = time.process_time()
    chosen: list[Sequence[Any]] = [internal.choose_saved_values_set(graph, info, budget) for budget in BUDGETS]
    spent_s = time.process_time() - start
    savers = cutter.savers
    sets = ({savers[s] for node in nodes for s in cutter.storages.of[node] if s in savers} for nodes in chosen)
    return list(map(cutter.saved, sets)), spent_s


def behind(points: Sequence[Saved], other: Saved) -> float:
    """How much more runs again than with `other`, as a share of all that can, where blocks mix `points` so that they
    save as much on average."""
    again = points[0].again
    for few, many in pairwise(points):
        if few.bytes <= other.bytes:
            share = (other.bytes - few.bytes) / max(1, many.bytes - few.bytes)
            again = few.again + min(1.0, share) * (many.again - few.again)
    return (again - other.again) / points[0].again


def main() -> None:
    for case in cases():
        mode = FakeMode()
        arguments = [mode.empty(t, torch.device("cpu")).requires_grad_() for t in case.arguments]
        rest = {key: tuple(mode.empty(t, torch.device("cpu")) for t in value) for key, value in case.rest.items()}
        joint = trace_block(case.layer, arguments, rest)
        start = time.process_time()
        cutter = Cutter(joint)
        ours = hull(cutter)
        own_s = time.process_time() - start
        found, spent_s = theirs(joint, cutter)
        off = [behind(ours, other) for other in dict.fromkeys(found)]
        print(
            f"{case.name}: {len(ours)} points in {own_s:.2f} s, PyTorch {len(off)} in {spent_s:.2f} s; at its bytes, "
            f"ours run more again by {min(off):+.1%} to {max(off):+.1%} of all",
            flush=True,
        )
        for name, points in (("ours", ours), ("PyTorch's", dict.fromkeys(found))):
            print("  ", name, " ".join(f"{p.bytes / 2**20:.0f}:{p.again / 2**20:.0f}" for p in points))


if __name__ == "__main__":
    main()
