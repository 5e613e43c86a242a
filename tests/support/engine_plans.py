"""Chains of real tiny models and hand-written plans that mix everything, for tests of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from planner.measure.analysis import Analysis, analyse_model
from planner.measure.times import OptionTimes, Times
from planner.optimizers.adamw import AdamWGroup
from planner.optimizers.adamw_8bit import AdamW8bit
from planner.optimizers.base import Group
from planner.optimizers.muon import Muon, MuonGroup
from planner.optimizers.table import NONE, AnyOptimizer
from planner.schedule.chain import Chain
from planner.schedule.compile import compile_program
from planner.schedule.items import Item
from planner.schedule.memory_use import gpu_peak_bytes
from planner.schedule.plan import Plan, Stage, stage_order
from planner.schedule.verify import verify
from tests.support.tiny_models import batch_of


def chain_of(
    model: nn.Module,
    batch: dict[str, torch.Tensor] | None = None,
    device: torch.device | None = None,
    *,
    arranged: bool = False,
    optimizers: Mapping[str, AnyOptimizer] = NONE,
    chunk_rows: int = 0,
) -> Chain:
    """The model's chain for slices like `batch`: true bytes, made-up times. `optimizers`: of parameters that
    AdamW does not train; `chunk_rows`: of a head in chunks."""
    analysis = analyse_model(
        model,
        batch or batch_of(),
        device=device or torch.device("cpu"),
        arranged=arranged,
        optimizers=optimizers,
        chunk_rows=chunk_rows,
    )
    return timed(analysis)


def timed(analysis: Analysis) -> Chain:
    """The chain with made-up times."""
    times = tuple(
        OptionTimes(kind=kind, option=option, forward_s=1.0, backward_s=2.0)
        for kind, pairs in analysis.pairs.items()
        for option in pairs
    )
    updates = tuple(replace(its, optimizer=its.optimizer.timed(gpu_s=1.0, cpu_s=1.0)) for its in analysis.updates)
    return analysis.chain(Times(options=times, device="none", measured=False, updates=updates))


def mixed_plan(chain: Chain, *, slices: int = 1, rounds: int = 1, clip: bool = False, ahead: bool = False) -> Plan:
    """Three layers. The first one's weights stream and the CPU updates them in the same step; the second one's
    likewise, but their update runs beside the next forward; the third one's weights and states travel and are updated
    on the device. Everything else is resident. The options are keep, recompute, offload. In rounds the gradients of all
    three travel. `ahead`: the second one's updates do not wait for the norm."""
    w, g, s = ({i: [Item.of(c, t.name) for t in b.tensors] for i, b in enumerate(chain.blocks)} for c in "wgs")
    names = {i: [t.name for t in b.tensors] for i, b in enumerate(chain.blocks)}
    ends = list(dict.fromkeys([*names[0], *names[4]]))
    tied = names[0] == names[4]
    lines = {
        "F0": {"prefetch": w[1]},
        "F1": {"prefetch": w[2], "evict": w[1]},
        "F2": {"prefetch": w[3], "evict": w[2]},
        "H4": {"prefetch": s[3]},
        "B3": {"prefetch": w[2]},
        "B2": {"prefetch": w[1], "offload": g[2], "evict": w[2]},
        "B1": {"offload": g[1], "evict": [*w[1], *g[2]]},
        "B0": {"evict": [*g[1], *g[0]]},
    }
    if rounds > 1:
        add(lines["H4"], prefetch=g[3])
        add(lines["B3"], prefetch=g[2], offload=g[3], evict=g[3])
        add(lines["B1"], prefetch=g[1])
    if clip:
        add(lines["B0"], gpu_update=[*ends, *names[3]], cpu_update=names[1] if ahead else [*names[1], *names[2]])
        add(lines["B1"], cpu_update=names[2] if ahead else [])
        add(lines["B0"], offload=[*w[3], *s[3]], evict=[*g[3], *w[3], *s[3], *([] if tied else g[4])])
    else:
        add(lines["F0"], cpu_update=names[2])
        add(lines["B3"], gpu_update=names[3], offload=[*w[3], *s[3]], evict=[] if rounds > 1 else g[3])
        add(lines["B2"], evict=[*w[3], *s[3]])
        add(lines["B0"], gpu_update=names[0], cpu_update=names[1])
        if not tied:
            add(lines["H4"], gpu_update=names[4], evict=g[4])
    wanted = zip(chain.blocks, ("keep", "keep", "recompute", "offload", "keep"), strict=True)
    options = tuple(o if any(o == one.name for one in b.options) else b.options[0].name for b, o in wanted)
    return make_plan(
        chain,
        lines,
        options=options,
        resident=[Item.of(c, n) for n in ends for c in "ws"],
        slices=slices,
        rounds=rounds,
        clip=clip,
    )


def streaming_plan(chain: Chain, *, slices: int = 1, clip: bool = False) -> Plan:
    """Any number of layers, without clipping. Weights that one layer has for itself travel; those of every other such
    layer are updated on the device, with states that travel, the rest on the CPU. The options take turns."""
    assert not clip
    users, last = chain.users(), len(chain.blocks) - 1
    lines: dict[str, dict[str, list[str]]] = {f"{d}{i}": {} for d, i in stage_order(last + 1)}
    moved: list[str] = []
    for index, block in enumerate(chain.blocks[1:last], start=1):
        names = [t.name for t in block.tensors if users[t.name] == (index,)]
        w, g, s = ([Item.of(c, name) for name in names] for c in "wgs")
        add(lines[f"F{index - 1}"], prefetch=w)
        add(lines[f"F{index}"], evict=w)
        add(lines[f"B{index + 1}" if index + 1 < last else f"H{last}"], prefetch=w)
        moved += names
        if index % 2:
            add(lines[f"B{index}"], offload=g, evict=w)
            add(lines[f"B{index - 1}"], evict=g)
            add(lines["B0"], cpu_update=names)
        else:
            add(lines[f"B{index + 1}" if index + 1 < last else f"H{last}"], prefetch=s)
            add(lines[f"B{index}"], gpu_update=names, offload=[*w, *s], evict=g)
            add(lines[f"B{index - 1}"], evict=[*w, *s])
    for name, used in users.items():
        if name not in moved:
            stage = f"H{last}" if used == (last,) else f"B{used[0]}"
            add(lines[stage], gpu_update=[name], evict=[Item.gradient(name)])
    kept = [Item.of(c, name) for name in users if name not in moved for c in "ws"]
    options = [b.options[i % len(b.options)].name for i, b in enumerate(chain.blocks)]
    return make_plan(chain, lines, options=tuple(options), resident=kept, slices=slices, rounds=1, clip=clip)


def resident_plan(
    chain: Chain, *, option: str = "keep", slices: int = 1, rounds: int = 1, clip: bool = False, copy_turns: int = 1
) -> Plan:
    """All weights and states stay on the device and are updated there. `copy_turns`: for offloaded activations."""
    users, last = chain.users(), len(chain.blocks) - 1
    trained = [t.name for t in chain.tensors() if t.trainable]
    lines: dict[str, dict[str, list[str]]] = {}
    for direction, index in stage_order(last + 1):
        done = [n for n in trained if users[n][0] == index and (index == last or direction.value == "B")]
        if clip:
            done = trained if direction.value == "B" and index == 0 else []
        lines[f"{direction}{index}"] = {"gpu_update": done, "evict": [Item.gradient(n) for n in done]}
    options = tuple(option if any(o.name == option for o in b.options) else b.options[0].name for b in chain.blocks)
    resident = [*map(Item.weight, users), *map(Item.states, trained)]
    rest = {"slices": slices, "rounds": rounds, "clip": clip, "copy_turns": copy_turns}
    return make_plan(chain, lines, options=options, resident=resident, **rest)


def add(line: dict[str, list[str]], **lists: list[str]) -> None:
    for field, items in lists.items():
        line[field] = [*line.get(field, ()), *items]


def make_plan(chain, lines, *, options, resident, **rest) -> Plan:
    """A plan that `verify` accepts, with a budget of its peak. `rest`: fields of the plan."""
    stages = tuple(
        Stage(direction=d, block=i, **{k: tuple(v) for k, v in lines.get(f"{d}{i}", {}).items()})
        for d, i in stage_order(len(options))
    )
    plan = Plan(stages=stages, options=options, resident=tuple(resident), **rest)
    program = compile_program(plan, chain)
    verify(program, chain)
    return replace(plan, gpu_budget_bytes=gpu_peak_bytes(program, chain))


def rounded_of(model: nn.Module) -> dict[str, AnyOptimizer]:
    """Moments in 8 bits of all parameters but the first, an embedding. Some are no whole blocks of 256."""
    return dict.fromkeys(list(dict(model.named_parameters()))[1:], AdamW8bit())


def adamw(model: nn.Module) -> AdamWGroup:
    """Weights of two dimensions decay."""
    decay = frozenset(n for n, p in model.named_parameters() if p.dim() > 1)
    return AdamWGroup(betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1, decay_names=decay)


def muon(model: nn.Module) -> tuple[Group, ...]:
    """Muon for matrices, `adamw` for the rest."""
    rest, matrices = adamw(model), frozenset(Muon.chosen(model))
    others = frozenset(name for name, _ in model.named_parameters()) - matrices
    own = MuonGroup(weight_decay=rest.weight_decay, decay_names=rest.decay_names, names=matrices)
    return replace(rest, names=others), own
