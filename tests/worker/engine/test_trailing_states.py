"""States on disk that trail their weight: plain PyTorch's numbers whether the norm clips or not, in any order, and
whatever stops the process or the machine between the weight and its states."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from planner.errors import UserError
from planner.schedule.compile import OpKind, Queue, compile_program
from planner.schedule.memory_use import cpu_parts
from planner.schedule.verify import verify
from tests.support.chaos_engine import ChaosInterpreter, Mood
from tests.support.engine_plans import adamw, chain_of, mixed_plan
from tests.support.engines import CPU, PAIRS, assert_same, assert_same_state, data, learning_rate, run
from tests.support.plain_engine import PlainEngine
from tests.support.stored_states import Drive, PowerCut
from tests.support.tiny_models import make_model
from tests.worker.engine.test_left_out import choosing
from tests.worker.engine.test_states_on_disk import PIECE, on_disk
from worker.engine.block_calls import Call
from worker.engine.engine import Engine
from worker.runtime.cpu import CpuMachine
from worker.storage.states import StatesOnDisk
from worker.training.stored import stored_tensors

torch.set_num_threads(1)
BF16, COUNT = torch.bfloat16, 2  # micro-batches of a step
SHAPES = {"slices": {"slices": 2}, "rounds": {"rounds": 2, "slices": 1}}
KINDS = {"llama": lambda: make_model("llama", BF16), "choosing": lambda: choosing(BF16)}
CHAINS = {}


def chain_for(kind):
    if kind not in CHAINS:
        CHAINS[kind] = on_disk(chain_of(KINDS[kind]()))
    return CHAINS[kind]


def trailing(plan):
    """The plan with states that trail: from the first stage of the step on, and from the head's."""
    second, first = ([name for name in plan.stages[-1].cpu_update if f"layers.{k}." in name] for k in (1, 0))
    assert len(first) > 3 and len(second) > 3
    lists = {"F0": (*second, first[0]), "H4": tuple(first[1:3])}
    stages = (replace(s, states_update=lists.get(s.name, ())) for s in plan.stages)
    return replace(plan, stages=tuple(stages))


def plain(clip, kind="llama"):
    model = KINDS[kind]()
    return PlainEngine(model, optimizer=adamw(model), max_grad_norm=clip)


@pytest.fixture
def make(tmp_path):
    engines = []

    def build(clip, *, shape="slices", kind="llama", found=None, folder="0", homes=2, **of_store):
        model, chain = KINDS[kind](), chain_for(kind)
        plan = trailing(mixed_plan(chain, clip=True, **SHAPES[shape]))
        program = compile_program(plan, chain)
        verify(program, chain)
        store = StatesOnDisk(
            [tmp_path / folder],
            stored_tensors(plan, chain, model),
            piece_elements=PIECE,
            homes=homes,
            record=found,
            **of_store,
        )
        engine = Engine(
            model, plan=plan, chain=chain, device=CPU, optimizer=adamw(model), max_grad_norm=clip, states=store
        )
        engine.plan, engine.chain, engine.store, engine.program = plan, chain, store, program
        engine._rounds.codes = PAIRS if kind == "llama" else {}
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.close()
        engine.store.close()


def median_norm():
    norms = sorted(float(norm) for _, norm in run(plain(1e9), range(6), COUNT))
    return (norms[2] + norms[3]) / 2


@pytest.mark.sweep(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("clips", ["always", "never", "now and then"])
def test_steps_are_plain_pytorchs_whether_the_norm_clips_or_not(shape, clips, make):
    clip = {"always": 1e-2, "never": 1e6, "now and then": median_norm()}[clips]
    engine, same = make(clip, shape=shape), plain(clip)
    found, wanted = run(engine, range(3), COUNT), run(same, range(3), COUNT)
    engine.drain()  # what trails is done before the next step
    found, wanted = found + run(engine, range(3, 6), COUNT), wanted + run(same, range(3, 6), COUNT)
    assert_same(found, wanted)
    assert {float(norm) > clip for _, norm in wanted} == {
        "always": {True},
        "never": {False},
        "now and then": {True, False},
    }[clips]
    assert_same_state(engine, same)
    weights = dict(same.model.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in engine.restore().named_parameters())


def test_each_step_reads_once_more_what_trails_and_writes_what_it_wrote_before(make):
    engine = make(0.5)
    run(engine, range(1), COUNT)
    engine.drain()
    before = engine.store.read_bytes, engine.store.written_bytes
    run(engine, range(1, 4), COUNT)
    engine.drain()
    moved = engine.store.read_bytes - before[0], engine.store.written_bytes - before[1]
    sizes = {name: sum(p.bytes for p in engine.store.pieces if p.name == name) for name in engine.plan.cpu_updated()}
    again = sum(sizes[name] for name in engine.plan.trailing())
    assert moved == (3 * (sum(sizes.values()) + again), 3 * sum(sizes.values())) and again > 0
    gradients = {name: engine._weights.host.items[f"g:{name}"][0] for name in engine.plan.cpu_updated()}
    weights = {name: engine._weights.host.items[f"w:{name}"][0] for name in engine.plan.cpu_updated()}
    own = {name for name, g in gradients.items() if g.data_ptr() != weights[name].data_ptr()}
    assert own == engine.plan.trailing()
    assert sum(gradients[name].nbytes for name in own) == cpu_parts(engine.plan, engine.chain).gradients_bytes


def test_a_weight_that_no_gradient_reaches_is_left_out_with_its_states(make):
    engine, same = make(1.6, kind="choosing"), plain(1.6, "choosing")
    assert_same(run(engine, range(6), COUNT), run(same, range(6), COUNT))
    left = {name for name, parts in engine.state() if "left_out" in parts}
    assert left & engine.plan.trailing()
    assert_same_state(engine, same)


MOODS = [
    *(Mood.drawn(seed) for seed in range(6)),
    *(Mood(seed=0, eager={q: float(q is not late) for q in Queue}) for late in list(Queue)[1:]),
    *(Mood(seed=0, eager={q: float(q is early) for q in Queue}) for early in list(Queue)[1:]),
]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("number", range(len(MOODS)))
def test_in_any_order_steps_are_plain_pytorchs(number, make, monkeypatch):
    monkeypatch.setattr(
        CpuMachine, "interpreter", lambda _, program, performer: ChaosInterpreter(program, performer, MOODS[number])
    )
    shape = list(SHAPES)[number % 2]
    engine, same = make(0.5, shape=shape), plain(0.5)
    found = run(engine, range(2), COUNT)
    if number % 3 == 0:
        engine.drain()
    found += run(engine, range(2, 3), COUNT)
    assert_same(found, run(same, range(3), COUNT))
    assert_same_state(engine, same)


@pytest.mark.parametrize("late", [Queue.DISK_READ, Queue.CPU])
def test_without_the_wait_of_the_next_gradient_for_the_states_a_late_queue_makes_other_numbers(late, make, monkeypatch):
    """So the tests above can fail."""

    def damaged(plan, chain):
        program = compile_program(plan, chain)
        states = {op.name for op in program.ops if op.kind is OpKind.CPU_STATES}
        sends = [op for op in program.ops if op.kind is OpKind.SEND and states & set(op.waits)]
        assert sends
        fewer = {op.name: replace(op, waits=tuple(w for w in op.waits if w not in states)) for op in sends}
        return replace(program, ops=tuple(fewer.get(op.name, op) for op in program.ops))

    mood = Mood(seed=0, eager={queue: float(queue is not late) for queue in Queue})
    monkeypatch.setattr(
        CpuMachine, "interpreter", lambda _, program, performer: ChaosInterpreter(program, performer, mood)
    )
    monkeypatch.setattr("worker.engine.engine.compile_program", damaged)
    engine, same = make(0.5), plain(0.5)
    run(engine, range(3), COUNT)
    run(same, range(3), COUNT)
    with pytest.raises(AssertionError):
        assert_same_state(engine, same)


def step(engine, number):
    batches, rest = data(number, COUNT)
    return engine.step(batches, learning_rate=learning_rate(number), **rest)


@pytest.mark.parametrize(("method", "block"), [("forward", 0), ("forward", 3), ("backward", 3), ("backward", 1)])
def test_an_error_in_the_model_lets_the_states_follow_and_takes_the_step_back(method, block, make, monkeypatch):
    engine, same = make(0.5), plain(0.5)
    run(engine, range(1), COUNT)
    original = getattr(Call, method)

    def failing(self, *rest):
        if self.block.index == block:
            raise RuntimeError("in the model")
        return original(self, *rest)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="in the model"):
        patch.setattr(Call, method, failing)
        step(engine, 1)
    assert not engine.torn
    run(same, range(1), COUNT)
    assert_same_state(engine, same)
    assert_same(run(engine, range(1, 3), COUNT), run(same, range(1, 3), COUNT))
    assert_same_state(engine, same)


@pytest.mark.parametrize("kind", [OpKind.PEEK, OpKind.READ, OpKind.WRITE])
def test_a_drive_that_fails_tears_the_step_and_the_last_checkpoint_stands(kind, make, monkeypatch):
    """While weights are made, and while their states follow beside the next step."""
    first, same = make(0.5), plain(0.5)
    run(first, range(2), COUNT)
    beside = [(name, {key: t.clone() for key, t in parts.items()}) for name, parts in first.state_to_save()]
    record = first.store.flush()
    first.store.published()
    run(first, range(2, 3), COUNT)
    perform = first._actions._do

    def failing(ops, values):
        op = ops[0]
        if op.kind is kind and op.names[0].removeprefix("s:") in first.plan.trailing() and op.piece:
            raise UserError("The disk is gone.", code="disk-failed")
        perform(ops, values)

    monkeypatch.setattr(first._actions, "_do", failing)
    with pytest.raises(UserError, match="The disk is gone"):
        run(first, range(3, 5), COUNT)
        first.drain()
    assert first.torn
    first.store.close()
    resumed = make(0.5, found=record)
    resumed.load_state(beside, step=2)
    run(same, range(2), COUNT)
    assert_same(run(resumed, range(2, 4), COUNT), run(same, range(2, 4), COUNT))
    assert_same_state(resumed, same)


STEPS, EVERY = 5, 2


class InPlace(StatesOnDisk):
    """A store that would not stand it: it writes the home that the checkpoint names."""

    def _home_to_write(self, k):
        return self._current[k]


def trained(make, drive, folder, saved, kind):
    """Until the power goes, or to the end: the engine."""
    engine = make(0.5, folder=folder, found=drive.record, open_file=drive.open)
    engine.store.__class__ = kind
    if drive.record is not None:
        engine.load_state(saved[drive.step], step=drive.step)
    try:
        for number in range(engine.steps_done, STEPS):
            if number % EVERY == 0:
                beside = [(name, {k: t.clone() for k, t in parts.items()}) for name, parts in engine.state_to_save()]
                saved[number] = beside
                record = engine.store.flush()
                drive.publish(record, number)
                engine.store.published()
            step(engine, number)
        engine.drain()
    except BaseException:
        engine.close()
        raise
    return engine


def campaign(make, kind, runs, seed):
    """How often the power went, and whether each run ended with plain PyTorch's bits."""
    lives, cuts, same = random.Random(seed), 0, plain(0.5)
    run(same, range(STEPS), COUNT)
    for number in range(runs):
        drive, saved = Drive(random.Random(number)), {}
        while True:
            drive.switch_on(lives.randrange(50, 400))
            try:
                engine = trained(make, drive, str(number), saved, kind)
            except PowerCut:
                cuts += 1
                continue
            except UserError:
                return cuts, False
            drive.life = -1
            try:
                assert_same_state(engine, same)
            except AssertionError:
                return cuts, False
            break
    return cuts, True


@pytest.fixture
def _no_sync(monkeypatch):
    monkeypatch.setattr("worker.storage.states.sync", lambda _: None)


@pytest.mark.usefixtures("_no_sync")
def test_power_may_go_between_a_weight_and_its_states(make):
    cuts, whole = campaign(make, StatesOnDisk, 4, 1)
    assert whole and cuts > 4


@pytest.mark.usefixtures("_no_sync")
def test_a_store_that_writes_in_place_does_not_stand_that(make):
    assert not campaign(make, InPlace, 4, 1)[1]
