"""Computes the numbers of the integer program (O-ILP) from a chain on a machine: per block, in units that suit a
solver.

Solvers work with absolute tolerances near 1e-7 and go wrong on numbers as large as bytes. `unit_bytes` and `unit_s` are
chosen so that a model has a few units of bytes and a step a few units of time: about GB and seconds for a 7B model on a
home machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.candidate.candidate import movable, settled
from planner.candidate.setting import Budgets, Setting
from planner.candidate.update_ahead import ahead_bytes
from planner.ilp.stored import Stored, beside_bytes, stored_of
from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain, Tensor
from planner.schedule.issuing import least_issue_s
from planner.schedule.memory_use import activation_slot_bytes, products_bytes, ring_bytes, state_ring_bytes
from planner.schedule.peak_moments import Moment, kept_bytes, moments, standing_bytes
from planner.schedule.update_work import update_work


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One option of a block, for all slices (micro-batches) of a round: computing time and transfers, in scaled units.
    `hosted`: the offloaded bytes that stay on the host; `stored`: those that go on to disk, through host memory slots
    of size `slot`."""

    index: int
    forward: float
    backward: float
    kept: float
    offloaded: float
    hosted: float = 0.0
    stored: float = 0.0
    slot: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The smallest and the largest value of a ratio (something per byte of weight) over those trainable tensors of a
    block that may leave the device."""

    least: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """The numbers of one integer program, in scaled units; the legend in `planner.ilp.program` explains the symbols.
    Lists are per block; `stage_…` are per stage.

    The program treats every trainable weight as an average one (`gradient_ratio`, `parameter_ratio`, `cpu_ratio`). This
    is exact if all have one dtype and AdamW as their optimizer. The spreads are for `planner.ilp.lower_bound`, which
    must be right in any case.
    """

    unit_bytes: float
    unit_s: float
    slices: int
    rounds: int
    clip: bool
    weights: list[float]  # of trainable tensors that may leave
    wholly_on_disk: list[float]  # part of `weights` without copies on the host: the CPU has to update it
    frozen: list[float]  # of frozen tensors that may leave
    on_disk: list[float]  # the fraction of `frozen` that the host reads from disk
    ring: float  # host memory through which weights and states on disk pass, and that of work between steps
    between: float  # device memory that work between steps takes
    products: float  # host memory for scratch of the CPU update that needs most
    apart: list[float]  # part of `weights` whose CPU updates need no scratch memory
    stored: Stored | None  # which states of the trainable tensors that may leave are on disk
    states: list[float]  # of these trainable tensors, and of those of which only the states may leave
    gradients: list[float]
    cpu_updatable: list[bool]
    first_is_one_tensor: bool  # block 0 has one trainable tensor that may leave, for either side to update
    choices: list[list[Choice]]
    stores_activations: bool  # any block has an option whose activations go to disk
    state_ratio: list[float]  # bytes of states per byte of weight, of the trainable tensors that may leave
    gradient_ratio: float  # bytes of gradient per byte of trainable weight
    host_gradient_ratio: float  # bytes of gradients that do not overwrite the weight, less what packing saves
    parameter_ratio: float  # parameters, in unit_bytes, per byte of trainable weight
    gpu_ratio: float  # work of an update on the device (`planner.schedule.update_work`) per byte of weight
    cpu_ratio: float  # work of an update on the CPU per byte of weight
    gpu_work: list[float]
    gradient_spread: list[Spread]
    host_gradient_spread: list[Spread]
    parameter_spread: list[Spread]
    gpu_spread: list[Spread]
    cpu_spread: list[Spread]
    state_spread: list[Spread]
    ahead_spread: list[Spread]
    stage_update: list[float]  # time of updates that are always on the device
    stage_standing: list[float]  # bytes always there in a stage: frame, pinned weights and states, tied gradients
    moments: list[Moment]
    disk: float
    disk_write: float
    disk_room: float  # room on disk for all that a step writes
    disk_both: float  # rate of bytes that are read and then written again
    disk_sustained: float  # rate of writing that the drive sustains for hours; 0: no limit
    d2h: float
    h2d: float
    host: float
    gpu_update: float
    cpu_update: float
    launch: float
    shared_compute: float
    gpu_budget: float
    cpu_budget: float

    @property
    def blocks(self) -> int:
        """The number of blocks, L in the legend."""
        return len(self.weights)

    @property
    def stages(self) -> int:
        """The number of stages in a cycle, T = 2L - 1 for L blocks."""
        return 2 * self.blocks - 1


def make_instance(setting: Setting) -> Instance:
    """The scaled numbers of the integer program for one planning problem."""
    chain, hardware, budgets = setting.chain, setting.hardware, setting.budgets
    slices, clip, rounds = setting.slices, setting.clip, setting.rounds
    free = movable(chain, hardware)
    trainable = [[t for t in tensors if t.trainable and t.bytes] for tensors in free]
    names = {t.name for tensors in free for t in tensors}
    staying = settled(chain, hardware)
    total = sum(t.bytes + t.state_bytes for t in chain.tensors())
    need = _need_bytes(chain, slices, rounds)
    unit_bytes = need / 16
    slowest = sum(max(o.forward_s + o.backward_s for o in block.options) for block in chain.blocks) * slices
    unit_s = max(slowest, total / hardware.h2d_bytes_per_s / 4, 1e-9) / 10
    weights = [sum(t.bytes for t in tensors) for tensors in trainable]
    moving = [t for tensors in trainable for t in tensors]
    moving_bytes = max(1, sum(weights))
    rate = unit_s / unit_bytes
    on_gpu, on_cpu = update_work(chain, hardware)
    last, updates = len(chain.blocks) - 1, chain.update_rates(hardware)
    choices = [_choices(chain, index, budgets, slices, unit_bytes, unit_s) for index in range(last + 1)]
    return Instance(
        unit_bytes=unit_bytes,
        unit_s=unit_s,
        slices=slices,
        rounds=rounds,
        clip=clip,
        weights=[w / unit_bytes for w in weights],
        wholly_on_disk=[sum(t.bytes for t in tensors if t.on_disk) / unit_bytes for tensors in trainable],
        frozen=[sum(t.bytes for t in tensors if not t.trainable) / unit_bytes for tensors in free],
        on_disk=[_on_disk(tensors) for tensors in free],
        ring=(ring_bytes(chain) + state_ring_bytes(chain) + chain.between_cpu_bytes) / unit_bytes,
        between=chain.between_gpu_bytes / unit_bytes,
        products=products_bytes(chain, names) / unit_bytes,
        apart=[sum(t.bytes for t in tensors if not t.host_scratch_bytes) / unit_bytes for tensors in trainable],
        stored=stored_of(
            chain, trainable, rounds, unit_bytes, anywhere=setting.states_anywhere, room_bytes=hardware.disk_bytes
        ),
        states=[
            sum(t.state_bytes for t in (*tensors, *others)) / unit_bytes
            for tensors, others in zip(trainable, staying, strict=True)
        ],
        gradients=[sum(t.gradient_bytes for t in tensors) / unit_bytes for tensors in trainable],
        # Block 0 has no gap between its backward and its forward: its update is waited for, once a step.
        cpu_updatable=[budgets.cpu_updates and (index > 0 or rounds == 1) for index in range(last + 1)],
        first_is_one_tensor=len(trainable[0]) == 1 and budgets.cpu_updates and rounds == 1,
        choices=choices,
        stores_activations=any(choice.stored for of_block in choices for choice in of_block),
        state_ratio=[_ratio(tensors) for tensors in trainable],
        gradient_ratio=sum(t.gradient_bytes for t in moving) / moving_bytes,
        host_gradient_ratio=sum(beside_bytes(chain, t, rounds, stored=False) for t in moving) / moving_bytes,
        parameter_ratio=sum(t.elements for t in moving) / moving_bytes,
        gpu_ratio=sum(on_gpu[t.name] for t in moving) / moving_bytes,
        cpu_ratio=sum(on_cpu[t.name] for t in moving) / moving_bytes,
        gpu_work=[sum(on_gpu[t.name] for t in tensors) / unit_bytes for tensors in trainable],
        gradient_spread=[_spread([t.gradient_bytes / t.bytes for t in tensors]) for tensors in trainable],
        host_gradient_spread=[
            _spread([beside_bytes(chain, t, rounds, stored=_stored(t, setting)) / t.bytes for t in tensors])
            for tensors in trainable
        ],
        parameter_spread=[_spread([t.elements / t.bytes for t in tensors]) for tensors in trainable],
        gpu_spread=[_spread([on_gpu[t.name] / t.bytes for t in tensors]) for tensors in trainable],
        cpu_spread=[_spread([on_cpu[t.name] / t.bytes for t in tensors]) for tensors in trainable],
        state_spread=[_spread([t.state_bytes / t.bytes for t in tensors]) for tensors in trainable],
        ahead_spread=[
            _spread([ahead_bytes(chain, t.with_states(on_disk=_stored(t, setting)), rounds) / t.bytes for t in tensors])
            for tensors in trainable
        ],
        stage_update=_pinned_updates(chain, hardware, names, clip, unit_s, on_gpu),
        stage_standing=_standing(chain, names, staying, slices, clip, rounds, unit_bytes),
        moments=list(moments(chain, slices, clip, rounds)),
        disk=hardware.disk_read_bytes_per_s * rate,
        disk_write=hardware.disk_write_bytes_per_s * rate,
        disk_room=min(hardware.disk_bytes, rounds * need) / unit_bytes,
        disk_both=rate / hardware.disk_s_per_byte,
        disk_sustained=hardware.disk_sustained_bytes_per_s * rate,
        d2h=hardware.d2h_bytes_per_s * rate * budgets.rate_scale.d2h,
        h2d=hardware.h2d_bytes_per_s * rate * budgets.rate_scale.h2d,
        host=hardware.cpu_memory_bytes_per_s * rate,
        gpu_update=updates.gpu * rate,
        cpu_update=updates.cpu * rate * budgets.rate_scale.cpu,
        launch=least_issue_s(chain, hardware, slices) / unit_s,
        shared_compute=hardware.shared_compute,
        gpu_budget=min(budgets.gpu_bytes, need) / unit_bytes,
        cpu_budget=min(budgets.cpu_bytes, need) / unit_bytes,
    )


def _on_disk(tensors: list[Tensor]) -> float:
    frozen = [t for t in tensors if not t.trainable]
    return sum(t.bytes for t in frozen if t.on_disk) / max(1, sum(t.bytes for t in frozen))


def _stored(tensor: Tensor, setting: Setting) -> bool:
    return tensor.states_on_disk and not setting.states_anywhere


def _ratio(tensors: list[Tensor]) -> float:
    return sum(t.state_bytes for t in tensors) / max(1, sum(t.bytes for t in tensors))


def _spread(ratios: list[float]) -> Spread:
    return Spread(least=min(ratios, default=0.0), most=max(ratios, default=0.0))


def _need_bytes(chain: Chain, slices: int, rounds: int) -> int:
    """More bytes than any plan of the chain could use, on the device or on the host."""
    tensors = sum(t.bytes + t.state_bytes + t.gradient_bytes for t in chain.tensors())
    activations = sum(max(kept_bytes(b, o) + o.offloaded_bytes for o in b.options) for b in chain.blocks)
    every = moments(chain, slices, True, rounds)
    most = max(moment.fixed_bytes + sum(moment.bytes_of.values()) for moment in every)
    standing = max(standing_bytes(chain, slices, True, rounds))
    return max(1, standing + 2 * tensors + 2 * slices * activations + most)


def _choices(chain: Chain, index: int, budgets: Budgets, slices: int, unit_bytes: float, unit_s: float) -> list[Choice]:
    block = chain.blocks[index]
    allowed = [o for o in block.options if budgets.activation_offload or not o.offloaded_bytes] or list(block.options)
    # The head runs forward and backward in one stage: nothing is kept in between.
    bytes_scale = 0.0 if index == len(chain.blocks) - 1 else slices / unit_bytes
    return [
        Choice(
            index=block.options.index(option),
            forward=slices * option.forward_s / unit_s,
            backward=slices * option.backward_s / unit_s,
            kept=kept_bytes(block, option) * bytes_scale,
            offloaded=option.offloaded_bytes * bytes_scale,
            hosted=0.0 if option.on_disk else option.offloaded_bytes * bytes_scale,
            stored=option.stored_bytes * bytes_scale,
            slot=activation_slot_bytes(option) / unit_bytes,
        )
        for option in allowed
    ]


def _pinned_updates(
    chain: Chain, hardware: Hardware, free: set[str], clip: bool, unit_s: float, work: Mapping[str, float]
) -> list[float]:
    last = len(chain.blocks) - 1
    updated = [0.0] * (2 * last + 1)
    users = chain.users()
    for tensor in chain.tensors():
        if tensor.trainable and tensor.name not in free:
            updated[2 * last - (0 if clip else users[tensor.name][0])] += work[tensor.name]
    updated[-1] += sum(work[t.name] for t in chain.frame_tensors if t.trainable)
    return [n / chain.update_rates(hardware).gpu / unit_s for n in updated]


def _standing(
    chain: Chain, free: set[str], staying: list[list[Tensor]], slices: int, clip: bool, rounds: int, unit_bytes: float
) -> list[float]:
    """Bytes on the device in each stage whatever the solver decides. They include complete gradients of pinned tensors:
    with clipping these wait for the norm, and in rounds they stay all the time (`standing_bytes` has a tied one's)."""
    pinned = [t for t in chain.tensors() if t.name not in free]
    resident = sum(t.bytes + t.state_bytes for t in pinned)
    resident -= sum(t.state_bytes for tensors in staying for t in tensors)
    bytes_at = [resident + standing for standing in standing_bytes(chain, slices, clip, rounds)]
    users, last = chain.users(), len(chain.blocks) - 1
    for tensor in pinned if clip or rounds > 1 else ():
        last_use = 2 * last - users[tensor.name][0]
        waits = range(last_use + 1, 2 * last + 1)
        if rounds > 1:
            waits = range(0) if len(users[tensor.name]) > 1 else range(2 * last + 1)
        for stage in waits if tensor.trainable else ():
            bytes_at[stage] += tensor.gradient_bytes if stage != last_use else 0  # the stage that adds to it counts it
    return [b / unit_bytes for b in bytes_at]


def tensor_lists(chain: Chain, hardware: Hardware) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Two lists over blocks: the trainable tensors that may leave the device, and the frozen ones."""
    free = movable(chain, hardware)
    return (
        [[t for t in tensors if t.trainable] for tensors in free],
        [[t for t in tensors if not t.trainable] for tensors in free],
    )
