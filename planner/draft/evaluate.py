"""What a draft does: bytes, seconds, and whether its program is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.draft.draft import Draft, assemble
from planner.draft.setting import Setting
from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain
from planner.schedule.compile import Program, compile_program, order_program
from planner.schedule.memory import cpu_peak_bytes, gpu_peak_bytes, gpu_usage
from planner.schedule.plan import Plan
from planner.schedule.simulate import host_traffic_bytes, ordered_step_s, simulate
from planner.schedule.verify import verify


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a draft does: its plan, bytes left on the device per stage and on the host, below zero where it does not
    fit, and seconds of a step."""

    plan: Plan
    room_bytes: Sequence[int]
    host_bytes: int
    step_s: float

    @property
    def fits(self) -> bool:
        return min(self.room_bytes) >= 0 and self.host_bytes >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rating:
    """What a draft does: its plan and program, seconds of a step, per stage the bytes that the budget leaves free."""

    plan: Plan
    program: Program
    step_s: float
    room_bytes: Sequence[int]


def predicted_step_s(program: Program, chain: Chain, hardware: Hardware) -> float:
    """The simulated step, and not less than the host's memory takes for all transfers and CPU updates of a step."""
    return max(simulate(program, chain, hardware).step_s, _host_memory_s(program, chain, hardware))


def _host_memory_s(program: Program, chain: Chain, hardware: Hardware) -> float:
    return host_traffic_bytes(program, chain) / hardware.cpu_memory_bytes_per_s


def assembled(draft: Draft, setting: Setting) -> Plan:
    """The draft's plan."""
    return assemble(setting.chain, draft, slices=setting.slices, rounds=setting.rounds, clip=setting.clip)


def device_bytes(draft: Draft, setting: Setting) -> int:
    """Its peak on the device."""
    return gpu_peak_bytes(order_program(assembled(draft, setting), setting.chain), setting.chain)


def host_bytes(draft: Draft, setting: Setting) -> int:
    """Its bytes on the host."""
    return cpu_peak_bytes(assembled(draft, setting), setting.chain)


class Judge:
    """Looks at the drafts of one problem."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def fits(self, draft: Draft) -> bool:
        """Whether the budgets are kept."""
        s = self.setting
        plan = assembled(draft, s)
        if cpu_peak_bytes(plan, s.chain) > s.budgets.cpu_bytes:
            return False
        return gpu_peak_bytes(order_program(plan, s.chain), s.chain) <= s.budgets.gpu_bytes

    def look(self, draft: Draft) -> Look:
        """What the draft does, without a program that could run: a fraction of the time."""
        s = self.setting
        plan = assembled(draft, s)
        program = order_program(plan, s.chain)
        step_s = ordered_step_s(program, s.chain, s.hardware)
        return Look(
            plan=plan, room_bytes=self._room_bytes(plan, program),
            host_bytes=s.budgets.cpu_bytes - cpu_peak_bytes(plan, s.chain),
            step_s=max(step_s, _host_memory_s(program, s.chain, s.hardware)),
        )  # fmt: skip

    def _room_bytes(self, plan: Plan, program: Program) -> list[int]:
        """Per stage, what the budget leaves free."""
        order = {stage.name: number for number, stage in enumerate(plan.stages)}
        room = [self.setting.budgets.gpu_bytes] * len(order)
        for usage in gpu_usage(program, self.setting.chain):
            number = order[usage.op.stage]
            room[number] = min(room[number], self.setting.budgets.gpu_bytes - usage.peak_bytes)
        return room

    def rating(self, draft: Draft) -> Rating:
        """What the draft's program does."""
        s = self.setting
        plan = assembled(draft, s)
        program = compile_program(plan, s.chain)
        return Rating(
            plan=plan, program=program, step_s=predicted_step_s(program, s.chain, s.hardware),
            room_bytes=self._room_bytes(plan, program),
        )  # fmt: skip

    def proven(self, draft: Draft) -> Plan:
        """The plan with its prediction. One that `verify` rejects is our bug: InvalidProgram."""
        s = self.setting
        rating = self.rating(draft)
        verify(rating.program, s.chain, gpu_budget_bytes=s.budgets.gpu_bytes)
        return replace(
            rating.plan,
            step_s=rating.step_s,
            gpu_peak_bytes=s.budgets.gpu_bytes - min(rating.room_bytes),
            cpu_peak_bytes=cpu_peak_bytes(rating.plan, s.chain),
            gpu_budget_bytes=s.budgets.gpu_bytes,
            cpu_budget_bytes=s.budgets.cpu_bytes,
        )
