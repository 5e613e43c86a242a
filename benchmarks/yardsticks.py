"""What a plan is held against: the fastest plan that needs no solver, and the best step of whole tensors in stages."""

from __future__ import annotations

from dataclasses import dataclass

from planner.draft.draft import Draft, assemble
from planner.draft.evaluate import predicted_step_s
from planner.draft.setting import Budgets, Setting
from planner.greedy.candidates import instant
from planner.ilp.instance import make_instance
from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain
from planner.schedule.compile import compile_program
from planner.schedule.memory import cpu_peak_bytes, gpu_peak_bytes
from planner.search.per_tensor_ilp import solve_whole


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTensors:
    """The O-ILP with a binary per tensor and fate: the best step found, and what the solver proved it is not below.

    Its transfers may be split over stages, so no plan whose transfers end with their stages is faster; one whose
    transfers run on from stage to stage may be.
    """

    step_s: float
    bound_s: float


def whole_tensors(
    chain: Chain, hardware: Hardware, budgets: Budgets, *, time_limit_s: float, gap: float
) -> WholeTensors | None:
    """None where none was found in time."""
    instance = make_instance(chain, hardware, budgets=budgets, slices=1, clip=False)
    whole = solve_whole(instance, chain, hardware, time_limit_s=time_limit_s, gap=gap)
    return None if whole is None else WholeTensors(step_s=whole.solution.step_s, bound_s=whole.bound_s)
