"""Computes what a plan costs, where each byte goes, and what limits the speed, as values of
`planner.reports.receipt`."""

from __future__ import annotations

from dataclasses import replace

from planner.machine.drives import RATED_SIZES
from planner.machine.hardware import Hardware
from planner.reports.receipt import Asked, Load, Receipt, Share, Solved
from planner.schedule.activation_turns import stored_activations
from planner.schedule.chain import Chain, Tensor
from planner.schedule.compile import OpKind, Program, Queue, compile_program
from planner.schedule.disk_use import ACCEPT, DiskUse, step_activation_bytes, step_weight_bytes
from planner.schedule.issuing import issue_s
from planner.schedule.items import Item
from planner.schedule.memory_use import cpu_parts, parts_at_peak
from planner.schedule.plan import Direction, Plan
from planner.schedule.simulate import durations_s, host_traffic_bytes, issuing_s, simulate, written_bytes
from planner.units import format_seconds

LAUNCHING = "launching the GPU's operations"
_TOGETHER = 8  # micro-batches for which the trainer copies weights once when it runs the model forward only


def status_of(plan: Plan, gap: float) -> str:
    """The status of a plan: "optimal" if its step time is proven to be within `gap` (0.01 = 1%) of the optimum of the
    integer program, or of the lower bound for any schedule; otherwise "feasible"."""
    near_solver = plan.step_s <= plan.lp_step_s * (1 - plan.solver_gap) * (1 + gap)
    near_bound = plan.step_s <= plan.bound_s * (1 + gap)
    return "optimal" if near_solver or near_bound else "feasible"


def cpu_update_share(plan: Plan, chain: Chain) -> float:
    """The share (0 to 1) of the trained parameters that the CPU updates under the plan."""
    updated = plan.cpu_updated()
    trained = [t for t in _tensors(chain) if t.trainable]
    return sum(t.elements for t in trained if t.name in updated) / max(1, sum(t.elements for t in trained))


def receipt(
    plan: Plan, chain: Chain, hardware: Hardware, asked: Asked, *, gap: float, rated_writes: int | str | None = None
) -> Receipt:
    """The receipt of a plan: its status, speed, and use of memory and disks. Changes that would help are not included.
    `rated_writes`: the job's key `disk_rated_writes`."""
    program = compile_program(plan, chain)
    tokens = plan.rounds * plan.slices * chain.slice_tokens
    return Receipt(
        status=status_of(plan, gap),
        asked=asked,
        hardware=hardware,
        parameters=sum(t.elements for t in _tensors(chain)),
        trained_parameters=sum(t.elements for t in _tensors(chain) if t.trainable),
        gpu_budget_bytes=plan.gpu_budget_bytes,
        cpu_budget_bytes=plan.cpu_budget_bytes,
        disk=disk_shares(
            chain,
            asked,
            chain.stored_bytes(plan.cpu_updated()),
            sum(stored_activations(plan, chain).values()),
            chain.passing_bytes(plan.cpu_updated()),
        ),
        disk_use=_disk_use(plan, chain, hardware, rated_writes),
        gpu_peak_bytes=plan.gpu_peak_bytes,
        cpu_peak_bytes=plan.cpu_peak_bytes,
        gpu=gpu_shares(program, chain),
        host=host_shares(plan, chain),
        step_s=plan.step_s,
        lp_step_s=plan.lp_step_s,
        bound_s=plan.bound_s,
        solver_gap=plan.solver_gap,
        tokens_per_step=tokens,
        tokens_per_s=tokens / plan.step_s,
        options=plan.options,
        cpu_update_share=cpu_update_share(plan, chain),
        loads=loads(program, chain, hardware, plan.step_s),
    )


def no_fit(
    chain: Chain, hardware: Hardware, asked: Asked, *, budgets: tuple[int, int], least: tuple[int | None, int | None]
) -> Receipt:
    """The receipt of a job that does not fit. `budgets`, `least`: bytes of the device and of the host, as given and as
    needed (None: no budget is enough)."""
    return Receipt(
        status="infeasible",
        asked=asked,
        hardware=hardware,
        parameters=sum(t.elements for t in _tensors(chain)),
        trained_parameters=sum(t.elements for t in _tensors(chain) if t.trainable),
        gpu_budget_bytes=budgets[0],
        cpu_budget_bytes=budgets[1],
        disk=disk_shares(chain, asked),
        tokens_per_step=asked.slices * chain.slice_tokens,
        least_gpu_budget_bytes=least[0],
        least_cpu_budget_bytes=least[1],
    )


def _tensors(chain: Chain) -> tuple[Tensor, ...]:
    return (*chain.tensors(), *chain.frame_tensors)


def gpu_shares(program: Program, chain: Chain) -> tuple[Share, ...]:
    """What the device holds at its peak, by purpose; the bytes add up to the peak."""
    peak = parts_at_peak(program, chain).peak
    moving = {op.subject for op in program.ops if op.kind is OpKind.FREE}
    staying = sum(t.bytes for t in chain.tensors() if Item.weight(t.name) not in moving)
    return _shares(
        ("weights that stay", staying),
        ("weights in flight", peak.weights_bytes - staying),
        ("gradients", peak.gradients_bytes),
        ("optimizer states", peak.states_bytes),
        ("saved activations", peak.saved_bytes),
        ("activations in flight", peak.offloaded_bytes),
        ("between blocks", peak.waiting_bytes),
        ("the running block", peak.running_bytes),
        ("outside the blocks", peak.frame_bytes),
    )


def host_shares(plan: Plan, chain: Chain) -> tuple[Share, ...]:
    """What the host holds, by purpose; the bytes add up to the plan's host memory."""
    parts = cpu_parts(plan, chain)
    update = next((kind.host_scratch for kind in chain.optimizers if kind.host_scratch), "")
    passing = "weights and gradients" if chain.passing_bytes(plan.cpu_updated()) else "weights"
    return _shares(
        ("working copies of weights", parts.weights_bytes),
        ("masters and moments", parts.states_bytes),
        ("gradients", parts.gradients_bytes),
        ("offloaded activations", parts.offloaded_bytes),
        ("weights and states before the norm", parts.kept_bytes),
        (f"{passing} on their way from disk", parts.ring_bytes),
        ("states on their way from and to disk", parts.state_ring_bytes),
        ("activations on their way to and from disk", parts.activation_ring_bytes),
        (update, parts.products_bytes),
        ("changes of projectors", parts.between_bytes),
    )


def disk_shares(
    chain: Chain, asked: Asked, stored: int = 0, activations: int = 0, weights: int = 0
) -> tuple[Share, ...]:
    """The most that a run takes on disks, by purpose: the kept checkpoints, one that is being written while the others
    are still there, the trained model, and what is on drives during training.

    `stored`: bytes of optimizer states on drives; if only a single checkpoint is kept, the states are its content, and
    take their space twice. `activations`: bytes of the activations of one round. `weights`: bytes of gradients and
    working copies of tensors that are entirely on disk.
    """
    named = asked.keep == 1
    checkpoint = chain.saved_bytes - stored * named
    model = sum(t.bytes for t in _tensors(chain) if t.trainable or asked.whole)
    copies = asked.keep or 1
    each = "each checkpoint, all are kept" if asked.keep is None else f"checkpoints kept: {copies}"
    return _shares(
        ("optimizer states on drives" + ", twice" * named, stored * (1 + named)),
        (each, copies * checkpoint),
        ("a checkpoint being written", checkpoint),
        ("frozen weights that checkpoints build on", (copies + 1) * chain.replaced_bytes),
        ("the trained model, twice", 2 * model),
        ("gradients and working copies on drives", weights),
        ("activations on drives", activations),
    )


def _disk_use(plan: Plan, chain: Chain, hardware: Hardware, rated_writes: int | str | None) -> DiskUse | None:
    activations, weights = step_activation_bytes(plan, chain), step_weight_bytes(plan, chain)
    written = chain.stored_bytes(plan.cpu_updated()) + weights + activations
    rated = rated_writes if isinstance(rated_writes, int) else hardware.disk_rated_bytes
    stated = isinstance(rated_writes, int) or rated != RATED_SIZES * hardware.disk_bytes
    use = DiskUse(
        written_bytes=written,
        rated_bytes=rated,
        stated=stated,
        accepted=rated_writes == ACCEPT,
        activation_bytes=activations,
        again_bytes=chain.stored_bytes(plan.trailing()),
        weight_bytes=weights,
    )
    return use if written else None


def _shares(*pairs: tuple[str, int]) -> tuple[Share, ...]:
    return tuple(Share(name=name, bytes=size) for name, size in pairs if size)


def _issued_in_no_time(chain: Chain) -> Chain:
    return replace(
        chain,
        blocks=tuple(
            replace(b, options=tuple(replace(o, issue_forward_s=0.0, issue_backward_s=0.0) for o in b.options))
            for b in chain.blocks
        ),
    )


def loads(program: Program, chain: Chain, hardware: Hardware, step_s: float) -> tuple[Load, ...]:
    """How long each resource (GPU, CPU, link, drive, …) works in a step, the busiest first."""
    timeline = simulate(program, chain, hardware)
    on_device = sum(s.end_s - s.start_s for s in timeline.spans if s.op.kind is OpKind.UPDATE)
    busy = dict(timeline.busy_s)
    # A turn takes as long as its operations compute, or as long as they take to launch: whichever is longer.
    turns = [number for number, op in enumerate(program.ops) if op.kind is OpKind.RUN]
    sustained = hardware.disk_sustained_bytes_per_s
    alone_s = durations_s(program, _issued_in_no_time(chain), replace(hardware, launch_s=0.0, operation_s=0.0))
    seconds = {
        "GPU computing": sum(alone_s[number] for number in turns),
        LAUNCHING: sum(issuing_s(program, chain, hardware)),
        "GPU updates": on_device,
        "link to the GPU": busy[Queue.H2D],
        "link from the GPU": busy[Queue.D2H],
        "CPU updates": busy[Queue.CPU],
        "reads from disk": busy[Queue.DISK_READ],
        "writes to disk": busy[Queue.DISK_WRITE],
        "writes that drives sustain": written_bytes(program) / sustained if sustained else 0.0,
        "host memory bandwidth": host_traffic_bytes(program, chain) / hardware.cpu_memory_bytes_per_s,
    }
    busy_loads = (Load(resource=name, busy_s=s, share=min(1.0, s / step_s)) for name, s in seconds.items() if s)
    return tuple(sorted(busy_loads, key=lambda load: -load.busy_s))


def reference_s(plan: Plan, chain: Chain, hardware: Hardware) -> float:
    """About how many seconds a reference model takes to score as many micro-batches as a step has: those of computing
    forward, or of copying the weights that do not stay on the device, or of reading those on disk, whichever are more.
    Where the device has room for fewer than `_TOGETHER` micro-batches at a time, copies take longer than this."""
    options = [block.option(name) for block, name in zip(chain.blocks, plan.options, strict=True)]
    computing_s = sum(max(o.forward_s, issue_s(o, Direction.FORWARD, hardware)) for o in options)
    moving = [tensor for tensor in chain.tensors() if Item.weight(tensor.name) not in plan.resident]
    copies_s = sum(tensor.bytes for tensor in moving) / hardware.h2d_bytes_per_s
    read_bytes = sum(tensor.bytes for tensor in moving if tensor.on_disk)
    reads_s = read_bytes / hardware.disk_read_bytes_per_s if read_bytes else 0.0
    return plan.rounds * plan.slices * max(computing_s, copies_s / _TOGETHER, reads_s / _TOGETHER)


def reference_words(seconds: float, step_s: float, unit: str) -> str:
    """What people are told of the pass that scores all answers before the first step. `seconds`: as `reference_s` gives
    them; `unit`: what a row of the data is, in a word."""
    return (
        f"before the first step the reference model scores each {unit} once, forward only: about "
        f"{seconds / step_s:.0%} of an epoch's time, {format_seconds(seconds)} for as many as a step has"
    )


def solved(plan: Plan, chain: Chain, *, gap: float, solve_s: float) -> Solved:
    """The answer to `solve`: the figures and stages of `plan`, made for a chain from a file."""
    return Solved(
        status=status_of(plan, gap),
        step_s=plan.step_s,
        lp_step_s=plan.lp_step_s,
        bound_s=plan.bound_s,
        solver_gap=plan.solver_gap,
        solve_s=solve_s,
        gpu_peak_bytes=plan.gpu_peak_bytes,
        cpu_peak_bytes=plan.cpu_peak_bytes,
        options=plan.options,
        cpu_update_share=cpu_update_share(plan, chain),
        source=plan.source,
        rounds=plan.rounds,
        slices=plan.slices,
        resident=plan.resident,
        stages=plan.stages,
    )
