"""A turn lasts as long as the host issues it, where the device computes it faster."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from planner.candidate.setting import Budgets, Setting
from planner.codec import from_json, to_json
from planner.ilp.instance import make_instance
from planner.machine.hardware import Hardware
from planner.measure.times import OptionTimes
from planner.reports.make_receipt import LAUNCHING, loads
from planner.schedule.chain import Chain
from planner.schedule.compile import OpKind, compile_program
from planner.schedule.simulate import durations_s, simulate
from tests.support.chains import HARDWARE, chain, mixed_plan, resident_plan


def issued(a_chain: Chain, forward_s: float, backward_s: float) -> Chain:
    """The chain with these seconds of issuing for each option of each block."""
    blocks = tuple(
        replace(
            block,
            options=tuple(replace(o, issue_forward_s=forward_s, issue_backward_s=backward_s) for o in block.options),
        )
        for block in a_chain.blocks
    )
    return replace(a_chain, blocks=blocks)


def turns(a_chain: Chain, hardware: Hardware) -> dict[str, float]:
    program = compile_program(resident_plan(a_chain), a_chain)
    found = zip(program.ops, durations_s(program, a_chain, hardware), strict=True)
    return {op.subject: seconds for op, seconds in found if op.kind is OpKind.RUN}


def test_a_turn_lasts_as_long_as_computing_it_or_as_issuing_it() -> None:
    plain, slow = turns(chain(1), HARDWARE), turns(issued(chain(1), 0.7, 1.5), HARDWARE)
    assert list(plain.values()) == [
        0.1,
        1.0,
        1.0,
        2.0,
        0.1,
    ]
    assert list(slow.values()) == pytest.approx([0.7, 1.0, 0.7 + 1.5, 2.0, 1.5])


def test_a_block_whose_issuing_nobody_measured_takes_what_the_machine_says() -> None:
    assert list(turns(chain(1), replace(HARDWARE, launch_s=1.2)).values()) == [1.2, 1.2, 1.2, 2.0, 1.2]
    measured = issued(chain(1), 0.7, 1.5)
    assert turns(measured, replace(HARDWARE, launch_s=1.2)) == turns(measured, HARDWARE)


def test_what_is_issued_between_two_turns_adds_to_the_second_ones_issuing() -> None:
    a_chain, costly = issued(chain(2), 5.0, 5.0), replace(HARDWARE, operation_s=0.25)
    for plan in (resident_plan(a_chain), mixed_plan()):
        program = compile_program(plan, a_chain)
        places = [number for number, op in enumerate(program.ops) if op.kind is OpKind.RUN]
        found = durations_s(program, a_chain, costly)
        others = [place - before - 1 for before, place in itertools.pairwise(places)]
        own = [10.0 if program.ops[place].subject.startswith("H") else 5.0 for place in places[1:]]
        assert [found[place] for place in places[1:]] == pytest.approx(
            [base + 0.25 * count for base, count in zip(own, others, strict=True)]
        )
        around = places[0] + len(program.ops) - 1 - places[-1]
        assert found[places[0]] == pytest.approx(5.0 + 0.25 * around)


def test_where_issuing_limits_a_plan_with_fewer_operations_has_the_shorter_step() -> None:
    a_chain = issued(chain(2), 50.0, 50.0)  # far longer than any copy
    programs = [compile_program(plan, a_chain) for plan in (resident_plan(a_chain), mixed_plan())]
    few, many = (simulate(program, a_chain, HARDWARE).step_s for program in programs)
    assert few == pytest.approx(many, rel=0.01)
    few, many = (simulate(program, a_chain, replace(HARDWARE, operation_s=1.0)).step_s for program in programs)
    fewer = len(programs[1].ops) - len(programs[0].ops)
    assert fewer > 10 and many - few == pytest.approx(fewer, rel=0.2)


def test_the_receipt_says_how_long_issuing_takes_and_how_long_computing() -> None:
    a_chain, costly = issued(chain(2), 5.0, 5.0), replace(HARDWARE, operation_s=0.25)
    program = compile_program(resident_plan(a_chain), a_chain)
    busy = {load.resource: load.busy_s for load in loads(program, a_chain, costly, 100.0)}
    assert busy[LAUNCHING] == pytest.approx(8 * 5.0 + 0.25 * (len(program.ops) - 7))
    assert busy["GPU computing"] == pytest.approx(0.2 + 2 * 3.0 + 1.0)


def test_the_solver_counts_the_issuing_of_the_option_that_takes_least() -> None:
    a_chain = issued(chain(1), 0.3, 0.5)
    first, layer, head = a_chain.blocks
    options = tuple(replace(o, issue_forward_s=0.2) if o.name == "recompute" else o for o in layer.options)
    mixed = replace(a_chain, blocks=(first, replace(layer, options=options), head))
    budgets = Budgets(gpu_bytes=10**6, cpu_bytes=10**7)

    def share_of_issuing(of: Chain, **rates: float) -> float:
        hardware = replace(HARDWARE, **rates)
        setting = Setting(chain=of, hardware=hardware, budgets=budgets, slices=2, clip=False)
        return make_instance(setting).launch

    whole = share_of_issuing(a_chain)
    assert share_of_issuing(mixed) / whole == pytest.approx((3 * 0.3 + 3 * 0.5 - 0.1) / (3 * 0.3 + 3 * 0.5))
    unmeasured = share_of_issuing(chain(1), launch_s=0.48)  # 5 stages
    assert unmeasured == pytest.approx(whole)


def test_measurements_that_were_kept_without_issuing_times_are_read() -> None:
    times = OptionTimes(kind="layer", option="keep", forward_s=1.0, backward_s=2.0)
    for value in (times, HARDWARE):
        document = {k: v for k, v in to_json(value).items() if not k.startswith("issue_") and k != "operation_s"}
        assert from_json(type(value), document) == value
