"""What a plan is held against: the fastest plan that needs no solver."""

from __future__ import annotations

from planner.draft.draft import Draft, assemble
from planner.draft.evaluate import predicted_step_s
from planner.draft.setting import Budgets, Setting
from planner.greedy.candidates import instant
from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain
from planner.schedule.compile import compile_program
from planner.schedule.memory import cpu_peak_bytes, gpu_peak_bytes


def greedy_step_s(chain: Chain, hardware: Hardware, budgets: Budgets) -> float | None:
    """The simulated step of the fastest greedy plan within the budgets, without clipping; None where none fits."""

    def fits(draft: Draft) -> bool:
        plan = assemble(chain, draft, slices=1, clip=False)
        device = gpu_peak_bytes(compile_program(plan, chain), chain)
        return device <= budgets.gpu_bytes and cpu_peak_bytes(plan, chain) <= budgets.cpu_bytes

    setting = Setting(chain=chain, hardware=hardware, budgets=budgets, slices=1, clip=False)
    programs = (
        compile_program(assemble(chain, draft, slices=1, clip=False), chain) for draft in instant(setting, fits)
    )
    return min((predicted_step_s(program, chain, hardware) for program in programs), default=None)

