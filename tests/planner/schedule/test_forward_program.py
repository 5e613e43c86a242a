"""Forward programs: what stays, what travels and when; and the engine's evaluation under them."""

from __future__ import annotations

import collections
import gc
from dataclasses import replace

import pytest
import torch

from planner.errors import Exit, UserError
from planner.schedule.compile import OpKind
from planner.schedule.forward_program import ForwardBytes, TooLarge, forward_peak_bytes, forward_program
from planner.schedule.items import Item
from planner.schedule.verify import InvalidProgram, verify
from tests.support.chains import chain, mixed_plan, plan, without_a_wait
from tests.support.engine_plans import mixed_plan as engine_plan
from tests.support.engine_plans import resident_plan
from tests.support.engines import chain_for
from tests.support.tiny_models import NAMES, batch_of

torch.set_num_threads(1)
CPU = torch.device("cpu")
BYTES = ForwardBytes(start=20, held=(10, 50, 50, 50, 4), peak=(60, 300, 300, 100))
# the frame; resident weights and states
RESIDENT = 10 + 3 * (400 + 800)


def names(program):
    return [op.name for op in program.ops]


def test_weights_come_as_early_as_there_is_room_and_go_after_their_block():
    least = RESIDENT + 1200 + 300  # both tensors of one layer, of which l0.a stays in the first
    program = forward_program(mixed_plan(), chain(), BYTES, slices=1, budget_bytes=least)
    assert names(program) == [
        "alloc@F0:w:l0.b",
        "fetch@F0:w:l0.b",
        "alloc@F0:w:l1.a",
        "fetch@F0:w:l1.a",
        "run@F0:F0.0",
        "run@F1:F1.0",
        "free@F1:w:l0.b",
        "alloc@F2:w:l1.b",
        "fetch@F2:w:l1.b",
        "run@F2:F2.0",
        "free@F2:w:l1.a",
        "free@F2:w:l1.b",
        "run@F3:F3.0",
    ]
    verify(program, chain(), gpu_budget_bytes=least, measured=BYTES)
    assert forward_peak_bytes(program, chain(), BYTES) == least


def test_with_room_for_all_every_copy_is_issued_at_once():
    program = forward_program(mixed_plan(), chain(), BYTES, slices=2, budget_bytes=10**6)
    assert [op.stage for op in program.ops if op.kind is OpKind.FETCH] == ["F0"] * 3
    assert [op.subject for op in program.ops if op.kind is OpKind.RUN][:4] == ["F0.0", "F0.1", "F1.0", "F1.1"]
    verify(program, chain(), gpu_budget_bytes=10**6, measured=BYTES)


def test_every_wait_of_a_forward_program_is_needed():
    program = forward_program(mixed_plan(), chain(), BYTES, slices=2, budget_bytes=RESIDENT + 1700)
    assert sum(len(op.waits) for op in program.ops) > 4
    for damaged in without_a_wait(program):
        with pytest.raises(InvalidProgram, match="nothing orders them"):
            verify(damaged, chain())


def test_a_forward_above_its_budget_is_rejected():
    program = forward_program(mixed_plan(), chain(), BYTES, slices=1, budget_bytes=10**6)
    peak = forward_peak_bytes(program, chain(), BYTES)
    verify(program, chain(), gpu_budget_bytes=peak, measured=BYTES)
    with pytest.raises(InvalidProgram, match=f"the peak is {peak} bytes"):
        verify(program, chain(), gpu_budget_bytes=peak - 1, measured=BYTES)


TRAVELLING_STATES = plan(
    """
    F1 offload=s:e evict=s:e
    B1 prefetch=s:e
    B0 gpu=e,h,l0.a,l0.b evict=g:e,g:h,g:l0.a,g:l0.b
    """,
    options="keep keep keep",
    resident="w:e s:e w:h s:h w:l0.a s:l0.a w:l0.b s:l0.b",
    clip=True,
)


def test_states_leave_where_room_is_needed_and_what_never_moves_stays():
    small = chain(1)
    measured = ForwardBytes(start=0, held=(0, 0, 0, 0), peak=(10, 10, 10))
    all_of_it = 10 + 3 * (400 + 800) + 800 + 1600 + 10
    fits = forward_program(TRAVELLING_STATES, small, measured, slices=1, budget_bytes=all_of_it)
    assert fits.resident == TRAVELLING_STATES.resident
    less = forward_program(TRAVELLING_STATES, small, measured, slices=1, budget_bytes=all_of_it - 1)
    assert set(TRAVELLING_STATES.resident) - set(less.resident) == {"s:e"}
    assert forward_peak_bytes(less, small, measured) == all_of_it - 800
    with pytest.raises(TooLarge) as error:
        forward_program(TRAVELLING_STATES, small, measured, slices=1, budget_bytes=all_of_it - 801)
    assert error.value.least_bytes == all_of_it - 800


@pytest.fixture
def make(make):
    """make(name, plan function, gpu_budget_bytes=…) -> (engine, plain engine)."""

    def build(name, plan_of=engine_plan, *, gpu_budget_bytes=None, **options):
        def budgeted(chain, **shape):
            plan = plan_of(chain, **shape)
            return plan if gpu_budget_bytes is None else replace(plan, gpu_budget_bytes=gpu_budget_bytes)

        return make(name, budgeted, metered=True, **options)

    return build


def plain_losses(plain, batches):
    plain.model.eval()
    with torch.no_grad():
        losses = [plain.model(**batch).loss for batch in batches]
    plain.model.train()
    return losses


def step(engine, plain, number):
    batch = batch_of(number)
    given = {"seeds": [number], "learning_rate": 1e-2, "num_items_in_batch": 30}
    results = [each.step([batch], **given) for each in (engine, plain)]
    assert torch.equal(results[0].losses[0], results[1].losses[0])


def batches(count):
    """Of several lengths, some with ignored labels."""
    return [batch_of(50 + k, length=(16, 8)[k == 1], padded=k % 2 == 0) for k in range(count)]


@pytest.mark.sweep(16)
@pytest.mark.parametrize("plan_of", [engine_plan, resident_plan], ids=["mixed", "resident"])
@pytest.mark.parametrize(("name", "dtype"), [*((n, torch.float32) for n in NAMES), ("gpt2", torch.bfloat16)], ids=str)
def test_losses_are_those_of_the_plain_model_with_the_last_updates_in_it(make, name, dtype, plan_of):
    engine, plain = make(name, plan_of, dtype=dtype)
    for number in range(3):  # one of the mixed plan's updates is left to the next step each time
        step(engine, plain, number)
        got, expected = engine.evaluate(batches(5)).losses, plain_losses(plain, batches(5))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert engine._model.training and all(m.training for m in engine._model.modules())


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bytes_stay_within_the_least_budget_and_are_those_predicted(make, name):
    a_chain = chain_for(name)
    probe, _ = make(name)
    measured = probe._forward_only._measure(batches(1))
    with pytest.raises(TooLarge) as error:
        forward_program(engine_plan(a_chain), a_chain, measured, slices=1, budget_bytes=1)
    least = error.value.least_bytes
    engine, plain = make(name, gpu_budget_bytes=least)
    step(engine, plain, 0)
    result = engine.evaluate(batches(1))
    assert torch.equal(result.losses[0], plain_losses(plain, batches(1))[0])
    assert least - 2048 < result.peak_bytes <= least  # what is charged for scalars of the step is not there
    tight, _ = make(name, gpu_budget_bytes=least - 1)
    with pytest.raises(
        UserError, match=r"(?s)Evaluation does not fit the GPU budget.*\[evaluation-does-not-fit\]"
    ) as told:
        tight.evaluate(batches(1))
    assert told.value.exit_code is Exit.DOES_NOT_FIT


def test_several_batches_share_one_journey_of_the_weights(make):
    engine, _ = make("llama")
    fetched = []
    fetch = engine._weights.device.fetch
    engine._weights.device.fetch = lambda *items: (fetched.extend(items), fetch(*items))
    engine.evaluate(batches(6))
    assert sorted(fetched) == sorted(set(fetched)) and len(fetched) > 10


def states_leave_plan(a_chain, *, clip):
    """The embedding's states are on the device between steps, and travel within."""
    embedding = [t.name for t in a_chain.blocks[0].tensors]
    states = tuple(map(Item.states, embedding))
    base = resident_plan(a_chain, clip=clip)
    stages = [
        replace(s, offload=states, evict=states)
        if s.name == "F1"
        else replace(s, prefetch=states)
        if s.name == "B1"
        else s
        for s in base.stages
    ]
    return replace(base, stages=tuple(stages))


def test_states_that_left_for_an_evaluation_come_back_as_they_were(make):
    a_chain = chain_for("llama")
    probe, _ = make("llama", states_leave_plan)
    measured = probe._forward_only._measure(batches(1))
    with pytest.raises(TooLarge) as error:
        forward_program(states_leave_plan(a_chain, clip=False), a_chain, measured, slices=1, budget_bytes=1)
    engine, plain = make("llama", states_leave_plan, gpu_budget_bytes=error.value.least_bytes)
    for number in range(3):
        step(engine, plain, number)
        result = engine.evaluate(batches(1))
        assert torch.equal(result.losses[0], plain_losses(plain, batches(1))[0])
        assert result.peak_bytes <= error.value.least_bytes
    assert engine._weights.device.items.keys() == engine._weights._resident
    expected = dict(plain.state())
    for name, parts in engine.state():
        assert all(torch.equal(tensor, expected[name][part]) for part, tensor in parts.items()), name


def test_training_goes_on_after_an_evaluation_that_failed(make):
    engine, plain = make("llama")
    step(engine, plain, 0)
    bad = {name: tensor.clone() for name, tensor in batches(1)[0].items()}
    bad["input_ids"][0, 3] = 10**6
    with pytest.raises(IndexError):
        engine.evaluate([batches(1)[0], bad, batches(1)[0]])
    step(engine, plain, 1)
    assert torch.equal(engine.evaluate(batches(1)).losses[0], plain_losses(plain, batches(1))[0])


def test_evaluation_changes_neither_the_random_state_nor_what_is_on_the_device(make):
    engine, plain = make("gpt2")
    step(engine, plain, 0)
    before, now = torch.get_rng_state(), engine._machine.meter.now
    engine.evaluate(batches(3))
    gc.collect()
    assert torch.equal(torch.get_rng_state(), before)
    assert engine._machine.meter.now <= now


PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 13], [3]]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", NAMES)
def test_generation_gives_the_tokens_of_generate_and_weights_travel_once_for_each(make, name):
    engine, plain = make(name)
    step(engine, plain, 0)
    fetched = collections.Counter()
    fetch = engine._weights.device.fetch
    engine._weights.device.fetch = lambda *items: (fetched.update(items), fetch(*items))
    answers = engine.generate(PROMPTS, new_tokens=12, pad=0)
    assert answers == plain.generate(PROMPTS, new_tokens=12, pad=0)
    tokens = len(answers[0])
    assert len(fetched) > 10 and set(fetched.values()) == {tokens}
    step(engine, plain, 1)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_generation_makes_smaller_groups_to_stay_within_the_budget_cache_included(make, name):
    probe, _ = make(name)
    a_chain = chain_for(name)
    measured = probe._forward_only._measure_generation(1, 5, 12)
    with pytest.raises(TooLarge) as error:
        forward_program(engine_plan(a_chain), a_chain, measured, slices=1, budget_bytes=1)
    least = error.value.least_bytes
    engine, plain = make(name, gpu_budget_bytes=least)
    alone = [plain.generate([prompt], new_tokens=12, pad=0)[0] for prompt in PROMPTS]
    assert engine.generate(PROMPTS, new_tokens=12, pad=0) == alone
    assert 0.9 * least < engine._machine.meter.peak <= least
    tight, _ = make(name, gpu_budget_bytes=least - 1)
    with pytest.raises(
        UserError, match=r"(?s)Generation does not fit the GPU budget.*\[generation-does-not-fit\]"
    ) as told:
        tight.generate(PROMPTS, new_tokens=12, pad=0)
    assert told.value.exit_code is Exit.DOES_NOT_FIT
