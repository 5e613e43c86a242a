"""Rounds the integer program's fractions of tensors to whole tensors.

For each block the integer program says how many bytes get each placement (`planner.ilp.program.Totals`), such as
"updated by the CPU". Here whole tensors are chosen for these bytes. The difference is passed on to the next block, in
the direction in which memory adds up over the blocks. So each such sum stays within one tensor of the program's sum, on
the side that needs less memory. In several rounds, the program then distributes the rounded bytes over the stages once
more. In one round, `planner.search.list_schedule` chooses the stages by simulating the step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.candidate.candidate import Candidate, Side, TensorSchedule, at_home, settled
from planner.candidate.evaluate import Evaluation, evaluate, host_bytes
from planner.candidate.setting import Setting
from planner.ilp.columns import Columns, limits_of
from planner.ilp.instance import make_instance, tensor_lists
from planner.ilp.program import Solution, Totals, solve_oilp
from planner.ilp.rows import update_of_first_on_cpu, update_of_first_on_device
from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain, Tensor
from planner.search.place_transfers import timed_schedules
from planner.search.placements import Placement, in_their_stages
from planner.search.repair import tightened

REMEMBERED = 64  # settings whose results are cached: `fits`, `hope_s` and `plan` begin with the same ones
_TOLERANCE = 1e-6
_ATTEMPTS = 4  # attempts to make whole tensors fit, for each way of rounding
_SHARE = 0.01  # of a budget: the step by which it is made smaller
_SUMS = 4096  # the most sums of tensor sizes that are compared for one block


@dataclass(slots=True)
class Carry:
    """The rounding error so far when whole tensors are chosen for the integer program's bytes, per kind of placement
    (such as "updated by the CPU"): positive where the tensors had too few bytes, negative where too many. `up`:
    rounding always gives at least the wanted bytes."""

    of: dict[str, float]
    up: bool

    def take(
        self, kind: str, tensors: Sequence[Tensor], target: float, size: Callable[[Tensor], int], least: float = 0.0
    ) -> list[Tensor]:
        """Return tensors whose sizes sum to about `target` plus the rounding error so far, or to `least` where that is
        more, and note the new error. If rounding is `up`, the sum is at least that; otherwise it is as near to that as
        possible. `kind`: the kind of placement whose error counts; `size`: gives a tensor's bytes."""
        wanted = target + self.of[kind]
        taken = _subset([t for t in tensors if size(t)], max(wanted, least), size, up=self.up)
        self.of[kind] = wanted - sum(size(t) for t in taken)
        return taken


def _subset(tensors: Sequence[Tensor], target: float, size: Callable[[Tensor], int], *, up: bool) -> list[Tensor]:
    """Return the tensors whose sizes sum to about the target: the nearest sum or, with `up`, the nearest that is no
    less (all tensors where even these are too few). Of equal sums, the one of larger tensors is taken. Exact for a
    dozen tensors; for many more, not all sums are tried."""
    slack = _TOLERANCE * sum(size(t) for t in tensors)
    sums: dict[int, tuple[Tensor, ...]] = {0: ()}
    for tensor in sorted(tensors, key=lambda t: (-size(t), t.name)):
        for total, chosen in list(sums.items()):
            sums.setdefault(total + size(tensor), (*chosen, tensor))
        if len(sums) > _SUMS:
            nearest = sorted(sums, key=lambda total: abs(total - target))[: _SUMS // 2]
            sums = {total: sums[total] for total in (0, *nearest)}
    enough = [total for total in sums if total >= target - slack]
    if up and not enough:
        return list(tensors)
    return list(sums[min(enough if up else sums, key=lambda total: abs(total - target))])


def choose_placements(
    chain: Chain,
    hardware: Hardware,
    totals: Totals,
    limits: dict[str, list[float]],
    *,
    up: bool,
    tight: bool = False,
) -> list[Placement]:
    """Return a placement (who updates it, and when it is off the device) for each tensor that may leave the device,
    near the bytes per block and kind in `totals`. `up`: no running sum over the blocks is below the integer program's.

    `limits`: the most bytes of each kind per block (`planner.ilp.columns.limits_of`); where a limit is 0, that
    placement is not possible. `tight`: each block gets at least the program's bytes for it, even where other blocks
    have too many; a kind of placement may stand in for another that frees as much memory. This is needed near the least
    possible budget, where a block has no room for tensors that it should not keep.
    """
    carry = Carry(dict.fromkeys(totals.of, 0.0), up)
    trainable, frozen = tensor_lists(chain, hardware)
    staying = settled(chain, hardware)
    chosen: list[dict[str, list[Tensor]]] = [{} for _ in chain.blocks]
    for i in reversed(range(len(chain.blocks))):  # backward releases the last block first
        left = list(trainable[i])
        target = {kind: of[i] for kind, of in totals.of.items()}
        states = sum(t.state_bytes for t in left) / max(1, sum(t.bytes for t in left))
        if tight:
            target["N"] += target["X"]  # away after backward, whoever updates it
            target["Y"] += states * target["X"]  # away from the device, on the way or for good
        if "V" in target:
            target["X"] -= target["V"]
        for kind in ("X", "N", "D"):
            may = left if limits[kind][i] else []
            if kind == "X" and "V" in target:
                stored = [t for t in may if t.states_on_disk]
                may = [t for t in may if not t.states_on_disk]
                wholly = [t for t in stored if t.on_disk]  # the host has no copies of them
                stored = [t for t in stored if not t.on_disk]
                target["V"] -= sum(t.bytes for t in wholly)
                taken = carry.take("V", stored, target["V"], _weight, target["V"] if tight else 0.0)
                chosen[i]["V"] = wholly + taken
            least = target[kind] if kind in "XN" and tight else 0.0
            chosen[i][kind] = carry.take(kind, may, target[kind], _weight, least)
            if kind == "X":
                chosen[i]["X"] += chosen[i].get("V", [])
            left = [t for t in left if t not in chosen[i][kind]]
            if kind == "X" and tight:
                target["N"] -= sum(t.bytes for t in chosen[i]["X"])
                target["Y"] -= sum(t.state_bytes for t in chosen[i]["X"])
        chosen[i]["R"] = carry.take("R", frozen[i] if limits["R"][i] else [], target["R"], _weight)
        on_gpu = [t for t in (*trainable[i], *staying[i]) if limits["Y"][i] and t not in chosen[i]["X"]]
        chosen[i]["Y"] = carry.take("Y", on_gpu, target["Y"], _states, target["Y"] if tight else 0.0)
    trailing = sum(totals.of.get("U", ()))
    for i in range(len(chain.blocks)):
        kinds = chosen[i]
        kinds["U"] = []
        for tensor in kinds.get("V", ()):  # the first blocks' gradients come last
            if tensor.bytes <= trailing and tensor.can_trail and limits["U"][i]:
                kinds["U"].append(tensor)
                trailing -= tensor.bytes
        left = [t for t in trainable[i] if limits["K"][i] and not any(t in kinds[kind] for kind in ("X", "N", "D"))]
        kinds["K"] = carry.take("K", left, totals.of["K"][i], _weight)
        current = [*kinds["X"], *kinds["N"], *frozen[i]] if limits["E"][i] else []
        sent = sum(t.bytes for t in (*kinds["D"], *kinds["K"]))
        # Off the device after forward, whenever the host got its copy.
        away = totals.of["E"][i] + (totals.of["D"][i] + totals.of["K"][i] - sent if tight else 0.0)
        kinds["E"] = carry.take("E", current, away, _weight, away if tight else 0.0)
    return placements_of(chain, hardware, chosen)


def placements_of(chain: Chain, hardware: Hardware, chosen: Sequence[dict[str, list[Tensor]]]) -> list[Placement]:
    """Return the placements (who updates it, and when it is off the device) of all tensors that may leave the device.
    `chosen`: for each block, the tensors of each kind of placement."""
    trainable, frozen = tensor_lists(chain, hardware)
    staying = settled(chain, hardware)
    return [
        _placement(i, tensor, kinds)
        for i, kinds in enumerate(chosen)
        for tensor in (*trainable[i], *frozen[i], *staying[i])
    ]


def _weight(tensor: Tensor) -> int:
    return tensor.bytes


def _states(tensor: Tensor) -> int:
    return tensor.state_bytes


def _placement(block: int, tensor: Tensor, chosen: dict[str, list[Tensor]]) -> Placement:
    send = next((kind for kind in ("D", "K") if tensor in chosen[kind]), "")
    on_cpu = tensor in chosen["X"]
    return Placement(
        tensor=tensor,
        block=block,
        side=Side.CPU if on_cpu else Side.GPU if tensor.trainable else Side.NOBODY,
        after_backward=on_cpu or tensor in chosen["N"] or tensor in chosen["R"],
        after_forward=bool(send) or tensor in chosen["E"],
        send=send,
        states_travel=tensor in chosen["Y"],
        trails=tensor in chosen.get("U", ()),
    )


def rounded_totals(chain: Chain, placements: Sequence[Placement]) -> Totals:
    """Return the bytes of each kind of placement (such as "updated by the CPU") in each block, for these placements of
    whole tensors."""
    stored, trailing = any(p.tensor.states_on_disk for p in placements), any(p.trails for p in placements)
    kinds_of_all = (*"XNREDKY", *("V" if stored else ""), *("U" if trailing else ""))
    of: dict[str, list[float]] = {kind: [0.0] * len(chain.blocks) for kind in kinds_of_all}
    for placement in placements:
        kinds = []
        if placement.after_backward:
            kinds.append({Side.CPU: "X", Side.GPU: "N", Side.NOBODY: "R"}[placement.side])
            if placement.side is Side.CPU and placement.tensor.states_on_disk:
                kinds += ["V", *("U" if placement.trails else "")]
        if placement.after_forward:
            kinds.append(placement.send or "E")
        for kind in kinds:
            of[kind][placement.block] += placement.tensor.bytes
        if placement.states_travel:
            of["Y"][placement.block] += placement.tensor.state_bytes
    return Totals(of=of)


@functools.lru_cache(REMEMBERED)
def hoped(setting: Setting, *, gap: float, below_s: float = math.inf) -> tuple[Solution, ...]:
    """Return the solutions of the planner's integer program for a setting, the shortest step first; empty where there
    is none. `gap`: how far from the optimum a solution may be, as a share of the time. `below_s`: only steps of fewer
    seconds are looked for; SolverGaveUp is raised if the solver neither finds nor excludes one.

    Where the first block is one tensor (the embedding, which is larger than a layer), there are two solutions: one with
    the device updating this tensor and one with the CPU. A program that may split the tensor finds a step that whole
    tensors cannot come near. (One program with a binary variable for the side takes longer than both.) Each plan has
    one of the two sides, so the two solutions prove together as much as the program that may split the tensor.
    """
    instance = make_instance(setting)

    def solve(more: Callable[[Columns], object] | None = None) -> Solution | None:
        return solve_oilp(instance, gap=gap, more=more, below_s=below_s)

    found: list[Solution | None] = []
    if instance.first_is_one_tensor:
        found = [solve(update_of_first_on_device), solve(update_of_first_on_cpu)]
    if not found or (None in found and below_s == math.inf):  # a side may have no solution, or the solver found none
        found = [solve()]
    return tuple(sorted((solution for solution in found if solution), key=lambda solution: solution.step_s))


def rounded_candidate(setting: Setting, solution: Solution, *, gap: float, source: str) -> Evaluation | None:
    """Return a candidate plan of whole tensors near the integer program's `solution`, evaluated; None where none was
    found that fits the budgets. `source`: what the candidate is called in logs.

    Where whole tensors do not fit although the solution's fractions did, the program's solution for budgets that are
    smaller by about the excess is rounded instead. Near the least possible budget it has no solution for less, and then
    each block is rounded separately.
    """
    instance = make_instance(setting)
    limits = limits_of(instance)
    for up, tight in ((True, False), (True, True), (False, False)):
        fractions: Solution | None = solution
        smaller, same_options = setting, True
        for _ in range(_ATTEMPTS):
            if fractions is None:
                break
            placements = choose_placements(
                setting.chain, setting.hardware, fractions.totals, limits, up=up, tight=tight
            )
            found, (gpu_excess, cpu_excess) = _fitting(setting, placements, fractions.options, source)
            if found is not None:
                return found
            smaller = _less(smaller, gpu_excess, cpu_excess)
            fractions = None
            if same_options:
                fractions = solve_oilp(make_instance(smaller), gap=gap, options=solution.options)
                same_options = fractions is not None  # with still less memory they would not fit either
            fractions = fractions or solve_oilp(make_instance(smaller), gap=gap)
    return None


def _fitting(
    setting: Setting, placements: Sequence[Placement], options: Sequence[int], source: str
) -> tuple[Evaluation | None, tuple[int, int]]:
    """Return the candidate for these placements, evaluated, if it fits the budgets; else None, and by how many bytes
    the budgets of device and host should be smaller."""
    chain = setting.chain
    moving = {placement.tensor.name for placement in placements}
    home = [at_home(chain, tensor, setting.clip) for tensor in chain.tensors() if tensor.name not in moving]
    names = tuple(block.options[o].name for block, o in zip(chain.blocks, options, strict=True))
    schedules = _schedules(setting, placements, options)
    if schedules is None:  # mostly since the host has no room for whole tensors, whenever they move
        schedules = in_their_stages(setting, placements)
        candidate = Candidate(options=names, schedules=(*schedules, *home), source=source)
        excess = host_bytes(candidate, setting) - setting.budgets.cpu_bytes
        return None, (0, max(0, math.ceil(excess / 2)))  # other tensors are chosen then: mostly half is enough
    candidate = Candidate(options=names, schedules=(*schedules, *home), source=source)
    seen = evaluate(setting, candidate)
    if min(seen.room_bytes) < 0:
        seen = evaluate(setting, tightened(chain, candidate, seen.room_bytes))
    return (seen, (0, 0)) if seen.fits else (None, (-min(0, *seen.room_bytes), -min(0, seen.host_bytes)))


def _schedules(
    setting: Setting, placements: Sequence[Placement], options: Sequence[int]
) -> list[TensorSchedule] | None:
    """Return a schedule for each placement. In one round it has the times that need the least memory, and simulating
    the step chooses better ones later. In several rounds its times are those of the integer program's flows; None where
    the program finds none."""
    if setting.rounds == 1:
        return in_their_stages(setting, placements)
    flows = solve_oilp(
        make_instance(setting),
        gap=0.0,
        options=tuple(options),
        totals=rounded_totals(setting.chain, placements),
    )
    return None if flows is None else timed_schedules(setting, placements, flows)


def _less(setting: Setting, gpu_bytes: int, cpu_bytes: int) -> Setting:
    """Return the setting with budgets smaller by these numbers of bytes; by a hundredth where both are 0."""
    budgets = setting.budgets
    if not (gpu_bytes or cpu_bytes):
        gpu_bytes, cpu_bytes = int(budgets.gpu_bytes * _SHARE), int(budgets.cpu_bytes * _SHARE)
    gpu_bytes, cpu_bytes = max(0, budgets.gpu_bytes - gpu_bytes), max(0, budgets.cpu_bytes - cpu_bytes)
    return replace(setting, budgets=replace(budgets, gpu_bytes=gpu_bytes, cpu_bytes=cpu_bytes))
