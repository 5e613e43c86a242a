"""Computes what a candidate costs in bytes and seconds, and proves that its program is right."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.candidate.candidate import Candidate, assemble
from planner.candidate.setting import Setting
from planner.candidate.stage_model import StageModel
from planner.machine.hardware import Hardware
from planner.schedule.activation_turns import stored_activations
from planner.schedule.chain import Chain
from planner.schedule.compile import Program, compile_program, order_program
from planner.schedule.memory_use import between_bytes, cpu_peak_bytes, gpu_peak_bytes, gpu_peaks
from planner.schedule.plan import Plan
from planner.schedule.simulate import least_step_s, simulate
from planner.schedule.verify import verify

_REMEMBERED = 128  # candidates whose bytes are kept
_FEW = 4  # plans that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a candidate costs. `room_bytes`: bytes left of the budget on the device, per stage; `host_bytes`: on the
    host; `disk_bytes`: on disk, for activations. They are below 0 if the candidate does not fit. `step_s`: seconds of a
    step. `operations`: how many operations its stage model (`planner.candidate.stage_model`) has."""

    candidate: Candidate
    plan: Plan
    room_bytes: Sequence[int]
    host_bytes: int
    disk_bytes: int
    step_s: float
    operations: int

    @property
    def fits(self) -> bool:
        """Whether the candidate fits the budgets of the device, the host and the disk."""
        return min(*self.room_bytes, self.host_bytes, self.disk_bytes) >= 0


def evaluate(setting: Setting, candidate: Candidate) -> Evaluation:
    """Compute what the candidate costs. This does not prove that its program is right: `proven` does."""
    model = StageModel(setting, candidate)
    chain, hardware = setting.chain, setting.hardware
    return Evaluation(
        candidate=candidate,
        plan=model.plan,
        room_bytes=_room_bytes(model.plan, model.program, setting),
        host_bytes=setting.budgets.cpu_bytes - cpu_peak_bytes(model.plan, chain),
        disk_bytes=_disk_room(model.plan, setting),
        step_s=max(model.step_s(), least_step_s(model.program, chain, hardware)),
        operations=model.size,
    )


def _disk_room(plan: Plan, setting: Setting) -> int:
    """Bytes left on disk beside states and activations; 0 if no activations are on disk. (If states alone have no room,
    an error elsewhere says so, and how much they need.)"""
    stored = plan.rounds * sum(stored_activations(plan, setting.chain).values())
    if not stored:
        return 0
    updated, chain = plan.cpu_updated(), setting.chain
    return setting.hardware.disk_bytes - chain.stored_bytes(updated) - chain.passing_bytes(updated) - stored


def predicted_step_s(program: Program, chain: Chain, hardware: Hardware) -> float:
    """Seconds of the simulated step, or, if that is longer, what the host's memory or the drive takes for all that a
    step moves (`least_step_s`)."""
    return max(simulate(program, chain, hardware).step_s, least_step_s(program, chain, hardware))


def assembled(candidate: Candidate, setting: Setting) -> Plan:
    """The plan that the candidate's schedules make."""
    return assemble(setting.chain, candidate, slices=setting.slices, rounds=setting.rounds, clip=setting.clip)


def device_bytes(candidate: Candidate, setting: Setting) -> int:
    """The candidate's peak on the device, in bytes."""
    return _device_bytes(*_what_takes_memory(candidate, setting))


def host_bytes(candidate: Candidate, setting: Setting) -> int:
    """The total bytes that the candidate's plan needs on the host."""
    return _host_bytes(*_what_takes_memory(candidate, setting))


def fits(candidate: Candidate, setting: Setting) -> bool:
    """Whether the candidate fits the budgets of the device and the host."""
    if host_bytes(candidate, setting) > setting.budgets.cpu_bytes:
        return False
    return device_bytes(candidate, setting) <= setting.budgets.gpu_bytes


def _what_takes_memory(candidate: Candidate, setting: Setting) -> tuple[Candidate, Setting]:
    """The candidate and the setting without what does not matter for the bytes that they need."""
    any_budgets = replace(setting.budgets, gpu_bytes=0, cpu_bytes=0)
    return replace(candidate, source=""), replace(setting, budgets=any_budgets)


# The same candidates are asked about for several budgets: while the least budget is looked for, and then by `plan`.
@functools.lru_cache(_REMEMBERED)
def _device_bytes(candidate: Candidate, setting: Setting) -> int:
    program = order_program(_remembered_plan(candidate, setting), setting.chain, by_pieces=False)
    return gpu_peak_bytes(program, setting.chain)


@functools.lru_cache(_REMEMBERED)
def _host_bytes(candidate: Candidate, setting: Setting) -> int:
    return cpu_peak_bytes(_remembered_plan(candidate, setting), setting.chain)


@functools.lru_cache(_FEW)
def _remembered_plan(candidate: Candidate, setting: Setting) -> Plan:
    return assembled(candidate, setting)


def _room_bytes(plan: Plan, program: Program, setting: Setting) -> list[int]:
    """Per stage, the bytes that the device's budget leaves free. What work between two steps lacks counts to the first
    stage: then too much stays on the device."""
    order = {stage.name: number for number, stage in enumerate(plan.stages)}
    room = [setting.budgets.gpu_bytes] * len(order)
    for stage, peak in gpu_peaks(program, setting.chain):
        number = order[stage]
        free_bytes = setting.budgets.gpu_bytes - peak
        if free_bytes < room[number]:
            room[number] = free_bytes
    if (lacking := setting.budgets.gpu_bytes - between_bytes(program, setting.chain)) < 0:
        room[0] = min(room[0], lacking)
    return room


def proven(candidate: Candidate, setting: Setting) -> Plan:
    """The candidate's plan with its predicted time and memory. Raises InvalidProgram if `verify` rejects its program,
    which is a bug of the planner."""
    plan = assembled(candidate, setting)
    program = compile_program(plan, setting.chain)
    verify(program, setting.chain, gpu_budget_bytes=setting.budgets.gpu_bytes)
    return replace(
        plan,
        step_s=predicted_step_s(program, setting.chain, setting.hardware),
        gpu_peak_bytes=gpu_peak_bytes(program, setting.chain),
        cpu_peak_bytes=cpu_peak_bytes(plan, setting.chain),
        gpu_budget_bytes=setting.budgets.gpu_bytes,
        cpu_budget_bytes=setting.budgets.cpu_bytes,
    )
