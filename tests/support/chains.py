"""Small chains and hand-written plans for tests, in the domain's own language."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.machine.hardware import Hardware
from planner.schedule.chain import Block, Chain, Option, Tensor
from planner.schedule.compile import Program
from planner.schedule.items import Item
from planner.schedule.plan import Plan, Stage, stage_order


def tensor(name: str, elements: int = 100, trainable: bool = True) -> Tensor:
    """An fp32 tensor: 4 bytes per element, 8 of optimizer states."""
    return Tensor(
        name=name,
        elements=elements,
        bytes=4 * elements,
        gradient_bytes=4 * elements * trainable,
        state_bytes=8 * elements * trainable,
        trainable=trainable,
    )


def block(name: str, *tensors: Tensor, saved: int = 1000, seconds: float = 1.0) -> Block:
    """A layer with the three options; its input and output are 50 bytes."""
    options = (
        Option(
            name="keep",
            saved_bytes=saved,
            forward_s=seconds,
            backward_s=2 * seconds,
            forward_peak_bytes=saved + 50,
            backward_peak_bytes=100,
        ),
        Option(
            name="recompute",
            forward_s=seconds,
            backward_s=3 * seconds,
            forward_peak_bytes=saved // 2,
            backward_peak_bytes=saved + 100,
            recipe="recompute",
        ),
        Option(
            name="offload",
            offloaded_bytes=saved // 2,
            forward_s=seconds,
            backward_s=2.2 * seconds,
            forward_peak_bytes=saved,
            backward_peak_bytes=saved // 2 + 100,
            recipe="offload",
        ),
    )
    return Block(
        name=name,
        kind="layer",
        tensors=tensors,
        options=options,
        input_bytes=50,
        output_bytes=50,
        forward_held_bytes=50,
        forward_frame_bytes=50,
        backward_held_bytes=50,
        backward_frame_bytes=50,
    )


def chain(layers: int = 2, tied: bool = False) -> Chain:
    """Embedding "e", layers with "l<i>.a" and "l<i>.b", head "h" (or the embedding again)."""
    embedding = Block(
        name="embedding",
        kind="embedding",
        tensors=(tensor("e"),),
        output_bytes=50,
        forward_frame_bytes=50,
        backward_held_bytes=50,
        options=(
            Option(
                name="keep",
                forward_s=0.1,
                backward_s=0.1,
                forward_peak_bytes=50,
                backward_peak_bytes=0,
                reads_input=False,
                reads_weights=(),
            ),
        ),
    )
    middle = [block(f"layer{i}", tensor(f"l{i}.a"), tensor(f"l{i}.b", 200)) for i in range(layers)]
    head = Block(
        name="head",
        kind="head",
        tensors=(tensor("e") if tied else tensor("h"),),
        input_bytes=50,
        forward_held_bytes=50,
        forward_frame_bytes=54,
        options=(Option(name="keep", forward_s=0.5, backward_s=0.5, forward_peak_bytes=700),),
    )
    return Chain(blocks=(embedding, *middle, head), frame_bytes=10, start_bytes=0, frame_tensors=(tensor("norm", 1),))


HARDWARE = Hardware(
    name="test",
    gpu_bytes=10**6,
    cpu_bytes=10**7,
    h2d_bytes_per_s=1000.0,
    d2h_bytes_per_s=1000.0,
    gpu_update_parameters_per_s=10000.0,
    cpu_update_parameters_per_s=500.0,
    cpu_memory_bytes_per_s=1e5,
)


def plan(text: str, *, options: str, resident: str = "", slices: int = 1, rounds: int = 1, clip: bool = False) -> Plan:
    """A plan from stage lines (stages without a line do nothing beside computing), options and resident items."""
    given = {s.name: s for s in (Stage.parse(line.strip()) for line in text.strip().splitlines() if line.strip())}
    names = tuple(options.split())
    stages = tuple(given.get(f"{d}{i}", Stage(direction=d, block=i)) for d, i in stage_order(len(names)))
    there = tuple(map(Item, resident.split()))
    return Plan(stages=stages, options=names, resident=there, slices=slices, rounds=rounds, clip=clip)


def resident_plan(
    a_chain: Chain, *, option: str = "keep", slices: int = 1, rounds: int = 1, clip: bool = False
) -> Plan:
    """Everything stays on the device, every tensor is updated there."""
    tensors = list(a_chain.tensors())
    users = a_chain.users()
    last = len(a_chain.blocks) - 1
    stages = []
    for direction, index in stage_order(len(a_chain.blocks)):
        done = [t.name for t in tensors if users[t.name][0] == index and (index == last or str(direction) == "B")]
        if clip:
            done = [t.name for t in tensors] if (str(direction), index) == ("B", 0) else []
        stages.append(
            Stage(block=index, direction=direction, gpu_update=tuple(done), evict=tuple(map(Item.gradient, done)))
        )
    options = tuple(option if any(o.name == option for o in b.options) else "keep" for b in a_chain.blocks)
    items = tuple(Item.of(kind, t.name) for t in tensors for kind in "ws")
    return Plan(stages=tuple(stages), options=options, resident=items, slices=slices, rounds=rounds, clip=clip)


# The first layer's second tensor streams and is updated by the CPU, as is the second layer's first one, whose update
# overlaps the next forward; its second tensor travels with its states and is updated on the GPU.
MIXED = """
F0 prefetch=w:l0.b cpu=l1.a
F1 prefetch=w:l1.a,w:l1.b evict=w:l0.b
F2 evict=w:l1.a
H3 prefetch=w:l1.a gpu=h evict=g:h
B2 prefetch=w:l0.b,s:l1.b gpu=l1.b evict=w:l1.a,g:l1.b
B1 offload=w:l1.b,s:l1.b,g:l1.a,g:l0.b evict=w:l1.b,s:l1.b,g:l1.a,w:l0.b,g:l0.b gpu=l0.a
B0 cpu=l0.b gpu=e evict=g:e,g:l0.a
"""


def mixed_plan(slices: int = 1, options: str = "keep recompute offload keep") -> Plan:
    """Both update sides, all three options, weights and states that travel, for `chain(2)`."""
    return plan(MIXED, options=options, resident="w:e s:e w:h s:h w:l0.a s:l0.a", slices=slices)


# The same with gradients that come back for the next round: those of the weights that the CPU updates, and that of the
# weight that travels with its states.
ROUNDS = """
F0 prefetch=w:l0.b cpu=l1.a
F1 prefetch=w:l1.a,w:l1.b evict=w:l0.b
F2 evict=w:l1.a
H3 prefetch=w:l1.a,g:l1.a,g:l1.b gpu=h evict=g:h
B2 prefetch=w:l0.b,s:l1.b,g:l0.b offload=g:l1.b gpu=l1.b evict=w:l1.a,g:l1.b
B1 offload=w:l1.b,s:l1.b,g:l1.a,g:l0.b evict=w:l1.b,s:l1.b,g:l1.a,w:l0.b,g:l0.b gpu=l0.a
B0 cpu=l0.b gpu=e evict=g:e,g:l0.a
"""


def rounds_plan(rounds: int = 2, slices: int = 2, options: str = "keep recompute offload keep") -> Plan:
    """`mixed_plan` in rounds."""
    return plan(ROUNDS, options=options, resident="w:e s:e w:h s:h w:l0.a s:l0.a", slices=slices, rounds=rounds)


def without_a_wait(program: Program) -> Iterator[Program]:
    """The program with one wait taken away, for each of its waits."""
    for number, op in enumerate(program.ops):
        for wait in op.waits:
            damaged = replace(op, waits=tuple(w for w in op.waits if w != wait))
            yield replace(program, ops=(*program.ops[:number], damaged, *program.ops[number + 1 :]))


def frozen_on_disk(a_chain):
    """The chain with layers that are not trained, and that the host has no copy of."""

    def frozen(t):
        return replace(t, gradient_bytes=0, state_bytes=0, trainable=False, on_disk=True)

    first, *layers, last = a_chain.blocks
    layers = [replace(b, tensors=tuple(frozen(t) for t in b.tensors)) for b in layers]
    return replace(a_chain, blocks=(first, *layers, last))


def with_masters(a_chain):
    """The chain with weights and gradients in two bytes, and an fp32 master among the states."""

    def narrow(t):
        trained = {"gradient_bytes": 2 * t.elements, "state_bytes": 12 * t.elements} if t.trainable else {}
        return replace(t, bytes=2 * t.elements, **trained)

    blocks = [replace(b, tensors=tuple(narrow(t) for t in b.tensors)) for b in a_chain.blocks]
    return replace(a_chain, blocks=tuple(blocks))
