"""Programs that the solver was seen to go wrong on."""

from __future__ import annotations

from planner.candidate.setting import Budgets, Setting
from planner.ilp.instance import make_instance
from planner.ilp.program import solve_oilp
from planner.machine.hardware import Hardware
from planner.schedule.chain import Block, Chain, Option, Tensor
from tests.support.printed_oilp import printed_step


def test_a_chain_of_frozen_ends_and_empty_layers_crashes_no_solver() -> None:
    # HiGHS died of a segmentation fault in its presolve, or found the program infeasible: see `planner.ilp.solver`.
    def frozen(name: str) -> Tensor:
        return Tensor(name=name, elements=251, bytes=1004, gradient_bytes=0, state_bytes=0, trainable=False)

    options = (
        Option(
            name="keep",
            saved_bytes=1458,
            forward_s=1.0,
            backward_s=1.26,
            forward_peak_bytes=1508,
            backward_peak_bytes=265,
            backward_first_peak_bytes=265,
            reads_input=False,
        ),
        Option(
            name="recompute",
            forward_s=1.0,
            backward_s=2.26,
            forward_peak_bytes=1448,
            backward_peak_bytes=1723,
            recipe="recompute",
        ),
        Option(
            name="offload",
            offloaded_bytes=729,
            forward_s=1.0,
            backward_s=1.38,
            forward_peak_bytes=1458,
            backward_peak_bytes=265,
            recipe="offload",
        ),
    )
    layers = [
        Block(
            name=f"layer{i}",
            kind="layer",
            tensors=(),
            options=options,
            input_bytes=7,
            output_bytes=50,
            forward_held_bytes=488,
            forward_frame_bytes=361,
            backward_held_bytes=93,
            backward_frame_bytes=131,
        )
        for i in range(2)
    ]
    first = Option(
        name="keep",
        forward_s=2.3,
        backward_s=1.21,
        forward_peak_bytes=50,
        backward_peak_bytes=778,
        reads_input=False,
        reads_weights=(),
    )
    last = Option(name="keep", forward_s=2.3, backward_s=0.96, forward_peak_bytes=1128)
    chain = Chain(
        blocks=(
            Block(
                name="embedding",
                kind="embedding",
                tensors=(frozen("e"),),
                options=(first,),
                output_bytes=50,
                forward_frame_bytes=304,
                backward_held_bytes=50,
            ),
            *layers,
            Block(
                name="head",
                kind="head",
                tensors=(frozen("h"),),
                options=(last,),
                input_bytes=50,
                forward_held_bytes=50,
                forward_frame_bytes=54,
            ),
        ),
        frame_bytes=230,
        start_bytes=1,
        slice_tokens=2,
    )
    machine = Hardware(
        name="slow",
        gpu_bytes=10**6,
        cpu_bytes=10**7,
        h2d_bytes_per_s=200.0,
        d2h_bytes_per_s=200.0,
        gpu_update_parameters_per_s=200.0,
        cpu_update_parameters_per_s=5000.0,
        cpu_memory_bytes_per_s=100000.0,
    )
    budgets = Budgets(gpu_bytes=3163, cpu_bytes=10**9)
    instance = make_instance(Setting(chain=chain, hardware=machine, budgets=budgets, slices=3, clip=False))
    solution = solve_oilp(instance, gap=1e-6)
    printed = printed_step(instance)
    assert solution is not None and printed is not None
    assert abs(solution.step_s / printed - 1) < 1e-4
