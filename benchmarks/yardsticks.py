"""What a plan is held against: the fastest plan that needs no solver."""

from __future__ import annotations

from planner.candidate.candidate import Candidate, assemble
from planner.candidate.evaluate import predicted_step_s
from planner.candidate.setting import Budgets, Setting
from planner.greedy.streaming import candidates
from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain
from planner.schedule.compile import compile_program
from planner.schedule.memory_use import cpu_peak_bytes, gpu_peak_bytes


def greedy_step_s(chain: Chain, hardware: Hardware, budgets: Budgets) -> float | None:
    """The simulated step of the fastest greedy plan within the budgets, without clipping; None where none fits."""

    def fits(candidate: Candidate) -> bool:
        plan = assemble(chain, candidate, slices=1, clip=False)
        device = gpu_peak_bytes(compile_program(plan, chain), chain)
        return device <= budgets.gpu_bytes and cpu_peak_bytes(plan, chain) <= budgets.cpu_bytes

    setting = Setting(chain=chain, hardware=hardware, budgets=budgets, slices=1, clip=False)
    programs = (
        compile_program(assemble(chain, candidate, slices=1, clip=False), chain)
        for candidate in candidates(setting, fits)
    )
    return min((predicted_step_s(program, chain, hardware) for program in programs), default=None)
