"""What it costs that slices' activations between two blocks, and the inputs that blocks keep, are on the device.

    nice python benchmarks/interface.py [--cases lora long ...] [--plans] [--json FILE]

Each case is planned several times with nothing else changed: "before" with the options keep, recompute and offload;
"waiting free" as if what slices hold between two blocks had no size, which bounds what its offloading could gain;
"inputs free" as if what blocks keep of it for their backward had none either; "input sent" with an option that sends
the block's input to the host and recomputes from it; "built" with one more that sends what offload does and the input.

Printed are the step by the solver (with --plans: by `make_plan`, rounded and simulated), the rounds it chose, the least
device memory any plan needs, the gain over "before" and the planner's own seconds. Where a bound exceeds its step, the
line says so and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import chains
from benchmarks.chains import GB, Batch, Shape, head_s, layer_figures, llama_chain
from planner.candidate.setting import Budgets, Setting
from planner.errors import UserError
from planner.ilp.instance import make_instance
from planner.ilp.lower_bound import lower_bound_s
from planner.ilp.program import solve_oilp
from planner.machine.cards import CARDS
from planner.machine.hardware import Hardware
from planner.machine.presets import preset, usable_cpu_bytes, usable_gpu_bytes
from planner.schedule.chain import Block, Chain, Option, Tensor
from planner.search.make_plan import in_rounds
from planner.search.problem import Problem

GAP = 0.002
_GIB = 2**30
_RANK = 16  # of LoRA's adapters
_CHUNK_ROWS = 1024

LLAMA3_8B = replace(chains.LLAMA3_70B, name="8B", layers=32, width=4096, inner=14336, heads=32)
LLAMA3_3B = replace(chains.LLAMA3_70B, name="3B", layers=28, width=3072, inner=8192, heads=24)
LLAMA3_70B = replace(chains.LLAMA3_70B, name="70B")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job: `slices` of `rows` × `length` tokens a step, full fine-tuning or LoRA, on a card with so much memory."""

    group: str
    shape: Shape
    card: str
    gpu_gib: int
    host_gib: int
    rows: int
    length: int
    slices: int
    lora: bool = False
    cpu_updates: bool = True

    @property
    def name(self) -> str:
        how = "LoRA" if self.lora else "full" if self.cpu_updates else "full, no CPU updates"
        return (
            f"{self.shape.name} {how}, {self.gpu_gib}/{self.host_gib} GiB ({self.card}), "
            f"{self.slices} × {self.rows} × {self.length}"
        )

    @property
    def clip(self) -> bool:
        """With clipping, all that the device updates is there at the step's end: too much without CPU updates."""
        return self.cpu_updates

    def hardware(self) -> Hardware:
        machine = preset(self.card, bf16=True, cpu_memory_bytes=self.host_gib * _GIB)
        return replace(machine, gpu_bytes=usable_gpu_bytes(self.gpu_gib * _GIB))


CARDS_GIB = (("rtx4060ti", 8), ("rtx3060", 12), ("rtx4090", 24))


def cases() -> Iterator[Case]:
    """What people with 8, 12 and 24 GB cards do."""
    for card, gib in CARDS_GIB:
        on_card = {"card": card, "gpu_gib": gib}
        for shape, host, cpu_updates in ((LLAMA3_8B, 128, True), (LLAMA3_3B, 64, True), (LLAMA3_3B, 64, False)):
            yield Case(
                group="full" if cpu_updates else "no-updates",
                shape=shape,
                host_gib=host,
                rows=4,
                length=1024,
                slices=8,
                cpu_updates=cpu_updates,
                **on_card,
            )
        yield Case(group="lora", shape=LLAMA3_8B, host_gib=64, rows=4, length=1024, slices=8, lora=True, **on_card)
        for length in (16384, 32768, 65536):
            yield Case(
                group="long-lora", shape=LLAMA3_8B, host_gib=128, rows=1, length=length, slices=1, lora=True, **on_card
            )
        for length in (16384, 32768):
            for slices in (1, 4):
                yield Case(group="long", shape=LLAMA3_3B, host_gib=128, rows=1, length=length, slices=slices, **on_card)
    for slices in (4, 8):
        yield Case(
            group="lora-70b",
            shape=LLAMA3_70B,
            card="rtx4090",
            gpu_gib=24,
            host_gib=256,
            rows=2,
            length=1024,
            slices=slices,
            lora=True,
        )


def chain_of(case: Case, hardware: Hardware) -> Chain:
    """The chain with the head in chunks of rows; of LoRA with frozen weights and one tensor of adapters a layer."""
    batch = Batch(rows=case.rows, length=case.length, number_bytes=2, state_bytes=12)
    memory_bytes_per_s = 0.8 * CARDS[case.card].memory_bytes_per_s
    rate = hardware.flops_per_s
    layer = layer_figures(case.shape, batch, flops_per_s=rate, memory_bytes_per_s=memory_bytes_per_s, scores=False)
    if case.lora:  # no gradients of weights
        layer = replace(layer, backward_s=layer.forward_s)
    chain = llama_chain(case.shape, batch, layer, head_forward_s=head_s(case.shape, batch, flops_per_s=rate))
    *body, head = chain.blocks
    chunk_bytes = 3 * 4 * min(batch.tokens, _CHUNK_ROWS) * case.shape.outputs
    gradient_bytes = 0 if case.lora else 4 * head.tensors[0].elements
    in_chunks = replace(
        head.options[0], forward_peak_bytes=chunk_bytes + gradient_bytes + head.input_bytes, chunk_rows=_CHUNK_ROWS
    )
    blocks = (*body, replace(head, options=(in_chunks,)))
    if case.lora:
        blocks = tuple(_adapted(block, case.shape) for block in blocks)
    return replace(chain, blocks=blocks)


def _adapted(block: Block, shape: Shape) -> Block:
    tensors = tuple(replace(t, trainable=False, gradient_bytes=0, state_bytes=0) for t in block.tensors)
    if block.kind != "layer":
        return replace(block, tensors=tensors)
    h, k, f = shape.width, shape.key_width, shape.inner
    count = _RANK * (2 * (h + h) + 2 * (h + k) + 3 * (h + f))
    adapters = Tensor(
        name=f"{block.name}.adapters", elements=count, bytes=4 * count, gradient_bytes=4 * count, state_bytes=8 * count
    )
    return replace(block, tensors=(*tensors, adapters))


def _without_waiting(chain: Chain) -> Chain:
    blocks = tuple(replace(b, forward_held_bytes=0, backward_held_bytes=0) for b in chain.blocks)
    return replace(chain, blocks=blocks)


def _without_inputs(chain: Chain) -> Chain:
    return replace(chain, blocks=tuple(replace(b, input_bytes=0) for b in _without_waiting(chain).blocks))


def _sending_inputs(chain: Chain, names: dict[str, str]) -> Chain:
    """With one more option for each one named, called `names[…]`: the same, and the block's input is sent."""

    def sent(block: Block, option: Option) -> Option:
        size = option.offloaded_bytes + block.input_bytes
        return replace(option, name=names[option.name], offloaded_bytes=size, reads_input=False)

    def more(block: Block) -> Block:
        added = (sent(block, option) for option in block.options if option.name in names)
        return replace(block, options=(*block.options, *added))

    return replace(chain, blocks=tuple(more(block) for block in chain.blocks))


VARIANTS: dict[str, Callable[[Chain], Chain]] = {
    "before": lambda chain: chain,
    "waiting free": _without_waiting,
    "inputs free": _without_inputs,
    "input sent": lambda chain: _sending_inputs(chain, {"recompute": "offload-input"}),
    "built": lambda chain: _sending_inputs(chain, {"recompute": "offload-input", "offload": "offload-all"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One variant of one case; `step_s` is infinite where nothing fits, or where the solver knows no step that does."""

    case: str
    variant: str
    step_s: float
    bound_s: float
    rounds: int
    least_gpu_bytes: int
    options: dict[str, int]
    own_s: float = 0.0


def solve(case: Case, variant: str, *, plans: bool) -> Seen:
    """Ask for the best step of a variant."""
    hardware = case.hardware()
    chain = VARIANTS[variant](chain_of(case, hardware))
    gpu, cpu = hardware.gpu_bytes, usable_cpu_bytes(case.host_gib * _GIB)
    try:
        least = (
            Problem(
                chain=chain,
                hardware=hardware,
                gpu_budget_bytes=0,
                cpu_budget_bytes=cpu,
                slices=case.slices,
                clip=case.clip,
                cpu_updates=case.cpu_updates,
            )
            .least()
            .gpu_bytes
        )
    except UserError:
        return Seen(
            case=case.name, variant=variant, step_s=math.inf, bound_s=0.0, rounds=0, least_gpu_bytes=0, options={}
        )
    step_s, bound_s, rounds, options = math.inf, 0.0, 0, tuple[str, ...]()
    started = time.process_time()
    if least <= gpu and plans:
        plan = Problem(
            chain=chain,
            hardware=hardware,
            gpu_budget_bytes=gpu,
            cpu_budget_bytes=cpu,
            slices=case.slices,
            clip=case.clip,
            cpu_updates=case.cpu_updates,
        ).plan()
        step_s, bound_s, rounds, options = plan.step_s, plan.bound_s, plan.rounds, plan.options
    elif least <= gpu:
        budgets = Budgets(gpu_bytes=gpu, cpu_bytes=cpu, cpu_updates=case.cpu_updates)
        step = Setting(chain=chain, hardware=hardware, budgets=budgets, slices=case.slices, clip=case.clip)
        bounds = []
        for way in in_rounds(step):
            found = solve_oilp(make_instance(way), gap=GAP)
            bounds.append(lower_bound_s(way))
            if found is not None and found.step_s < step_s:
                step_s, rounds = found.step_s, way.rounds
                options = tuple(b.options[o].name for b, o in zip(chain.blocks, found.options, strict=True))
        bound_s = min(bounds)
    layers = options[1:-1]
    counts = {name: layers.count(name) for name in sorted(set(layers))}
    return Seen(
        case=case.name,
        variant=variant,
        step_s=step_s,
        bound_s=bound_s,
        rounds=rounds,
        least_gpu_bytes=least,
        options=counts,
        own_s=time.process_time() - started,
    )


def line(seen: Seen, before: Seen) -> str:
    """One row."""
    gain = 1 - seen.step_s / before.step_s if math.isfinite(before.step_s) else math.nan
    step = f"{seen.step_s:8.2f} s" if math.isfinite(seen.step_s) else "  none    "
    over = "" if seen.bound_s <= seen.step_s * (1 + 1e-6) else "  BOUND ABOVE THE STEP"
    return (
        f"  {seen.variant:15} {step}  rounds {seen.rounds:2d}  least {seen.least_gpu_bytes / GB:6.2f} GB  "
        f"gain {100 * gain:6.2f}%  bound {seen.bound_s:8.2f} s  own {seen.own_s:5.1f} s  {seen.options}{over}"
    )


def main() -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = sorted({case.group for case in cases()})
    parser.add_argument("--cases", nargs="*", choices=groups, default=groups)
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--plans", action="store_true", help="whole plans instead of the solver's answers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Seen] = []
    for case in cases():
        if case.group not in options.cases:
            continue
        print(case.name, flush=True)
        before = solve(case, "before", plans=options.plans)
        for variant in options.variants:
            rows.append(before if variant == "before" else solve(case, variant, plans=options.plans))
            print(line(rows[-1], before), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return int(any(row.bound_s > row.step_s * (1 + 1e-6) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
