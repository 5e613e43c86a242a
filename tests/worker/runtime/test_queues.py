from __future__ import annotations

import threading

import pytest
import torch

from planner.schedule.compile import Op, OpKind, Program, Queue, compile_program
from tests.support.chains import chain, mixed_plan
from worker.runtime.cpu import CpuInterpreter
from worker.runtime.interpreter import Cursor, together
from worker.runtime.queues import Tickets, _QueueThread
from worker.runtime.step_values import StepValues

torch.set_num_threads(1)
DEADLINE_S = 20


def values(number):
    count = torch.tensor(float(number))
    return StepValues(number=number, learning_rate=0.1, host_count=count, device_count=count)


class Held:
    """Operations that only write down that they ran; those in `held` wait until they are let go."""

    def __init__(self, *held):
        self.log, self.lock = [], threading.Lock()
        self.held = {name: threading.Event() for name in held}
        self.begun = {name: threading.Event() for name in held}

    def perform(self, ops, values):
        for op in ops:
            if op.name in self.held:
                self.begun[op.name].set()
                assert self.held[op.name].wait(DEADLINE_S)
            with self.lock:
                self.log.append((op.name, values.number))


@pytest.fixture
def program():
    return compile_program(mixed_plan(slices=2), chain())


@pytest.fixture
def start(program):
    """start(actions) -> (cursor, interpreter), closed at the end."""
    opened = []

    def begin(actions):
        interpreter = CpuInterpreter(program, actions.perform)
        opened.append((interpreter, actions))
        return Cursor(program, interpreter), interpreter

    yield begin
    for interpreter, actions in opened:
        for event in actions.held.values():
            event.set()
        interpreter.close()


def walk(cursor, number):
    """A step whose turns do nothing."""
    cursor.begin(values(number))
    while cursor.turn is not None:
        cursor.start_turn()
        cursor.end_turn()
    cursor.end()


def test_three_steps_run_every_operation_after_what_it_waits_for(program, start):
    actions = Held()
    cursor, interpreter = start(actions)
    for number in (1, 2, 3):
        walk(cursor, number)
    cursor.run_carried()
    interpreter.drain()
    at = {key: place for place, key in enumerate(actions.log)}
    assert len(at) == len(actions.log)
    position = {op.name: place for place, op in enumerate(program.ops)}
    for op in program.ops:
        if op.kind is OpKind.RUN:
            continue
        for number in (1, 2, 3):
            # A carried update works for the step before the one it runs in.
            ran = number + 1 if op.carried else number
            for name in op.waits:
                other = program.ops[position[name]]
                when = ran if position[name] < position[op.name] else ran - 1
                key = (name, when - 1 if other.carried else when)
                if other.kind is not OpKind.RUN and key in at:
                    assert at[key] < at[op.name, number], f"{op.name} of step {number} before {key}"


def test_a_queues_thread_waits_for_each_of_several_operations(program):
    log = []

    class Told(Tickets):
        def wait(self, queue, number):
            super().wait(queue, number)
            log.append((queue, number))

    tickets, done = Told(), threading.Event()

    def do(ops, values):
        log.append("done")
        done.set()

    (update, *_), waits = program.queue(Queue.CPU), ((Queue.D2H, 1), (Queue.H2D, 1), (Queue.D2H, 2))
    thread = _QueueThread(Queue.CPU, tickets, setup=lambda queue: None, run=do)
    for queue, _ in waits:
        tickets.advance(queue)
    thread.add(((update,), None, waits))
    thread.flush()
    assert done.wait(DEADLINE_S)
    thread.close()
    assert log == [*waits, "done"]


def test_neighbours_go_together_where_only_the_first_waits_and_only_the_last_is_waited_for(program):
    ops = [
        Op.parse(text)
        for text in (
            "alloc@F0:w:a 1B",
            "alloc@F0:w:b 1B",
            "alloc@F0:w:c 1B",
            "fetch@F0:w:a 1B after alloc@F0:w:c",
            "fetch@F0:w:b 1B",
            "fetch@F0:w:c 1B after cpu_update@F0:c",
            "fetch@F0:a:0.0 1B",
            "fetch@F0:a:0.1 1B",
            "fetch@F0:w:d 1B slot0",
            "fetch@F0:w:e 1B slot1",
            "send@F0:g:a 1B",
            "send@F0:g:b 1B",
            "send@F0:g:c 1B",
            "cpu_update@F0:b 0B after send@F0:g:b",
            "cpu_update@F0:c 0B",
            "run@F0:F0.0 0B after fetch@F0:w:c",
            "free@F0:w:a 1B",
            "free@F0:w:b 1B",
        )
    ]
    found = list(together(Program(ops=tuple(ops), resident=(), options=())))
    assert [len(its) for its in found] == [3, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 2]
    assert [op for its in found for op in its] == ops
    assert [op for its in together(program) for op in its] == list(program.ops)


def test_each_queue_keeps_the_programs_order(program, start):
    actions = Held()
    cursor, interpreter = start(actions)
    walk(cursor, 1)
    interpreter.drain()
    for queue in Queue:
        expected = [op.name for op in program.queue(queue) if op.kind is not OpKind.RUN and not op.carried]
        names = set(expected)
        assert [name for name, _ in actions.log if name in names] == expected


def test_carried_updates_are_left_out_after_a_drain_and_get_the_values_of_their_step(program, start):
    actions = Held()
    cursor, interpreter = start(actions)
    carried = [op.name for op in program.ops if op.carried]
    assert carried
    walk(cursor, 1)
    walk(cursor, 2)
    cursor.run_carried()
    walk(cursor, 3)
    cursor.run_carried()
    cursor.run_carried()  # nothing is left
    interpreter.drain()
    for name in carried:
        assert [number for other, number in actions.log if other == name] == [1, 2, 3]


def test_what_is_ordered_by_a_carried_update_alone_is_in_order_after_a_drain_too():
    send, update, fetch = (
        Op.parse(text)
        for text in (
            "send@F0:g:a 1B",
            "cpu_update@F0:a 0B carried after send@F0:g:a",
            "fetch@F0:w:a 1B after cpu_update@F0:a",
        )
    )
    actions = Held(send.name, fetch.name)
    program = Program(ops=(send, update, fetch), resident=(), options=())
    interpreter = CpuInterpreter(program, actions.perform)
    cursor = Cursor(program, interpreter)
    cursor.begin(values(1))
    assert actions.begun[send.name].wait(DEADLINE_S)
    assert not actions.begun[fetch.name].wait(0.05)
    for event in actions.held.values():
        event.set()
    interpreter.drain()
    interpreter.close()
    assert [name for name, _ in actions.log] == [send.name, fetch.name]


def test_compute_may_not_start_before_its_weights_arrive(program, start):
    fetch = next(op for op in program.ops if op.kind is OpKind.FETCH and op.subject == "w:l0.b")
    actions = Held(fetch.name)
    cursor, interpreter = start(actions)
    cursor.begin(values(1))
    while "w:l0.b" not in "".join(cursor.turn.op.waits):
        cursor.start_turn()
        cursor.end_turn()
    started = threading.Event()
    thread = threading.Thread(target=lambda: (cursor.start_turn(), started.set()))
    thread.start()
    assert actions.begun[fetch.name].wait(DEADLINE_S)
    assert not started.is_set()
    actions.held[fetch.name].set()
    assert started.wait(DEADLINE_S)
    thread.join()
    assert interpreter.waited_s > 0


def test_an_update_waits_for_its_gradient_and_the_next_fetch_for_the_update(program, start):
    send = next(op for op in program.ops if op.kind is OpKind.SEND and op.subject == "g:l0.b")
    actions = Held(send.name)
    cursor, interpreter = start(actions)
    cursor.begin(values(1))
    walker = threading.Thread(target=lambda: (run_out(cursor), cursor.end(), walk(cursor, 2)))
    walker.start()
    assert actions.begun[send.name].wait(DEADLINE_S)
    assert not any(name.startswith("cpu_update") and name.endswith(":l0.b") for name, _ in actions.log)
    actions.held[send.name].set()
    walker.join(DEADLINE_S)
    interpreter.drain()
    log = [key for key in actions.log if key[0].endswith("l0.b")]
    update = next(place for place, (name, number) in enumerate(log) if name.startswith("cpu_update") and number == 1)
    assert log.index((send.name, 1)) < update
    assert update < next(place for place, (name, n) in enumerate(log) if name.startswith("fetch@F0") and n == 2)


def run_out(cursor):
    while cursor.turn is not None:
        cursor.start_turn()
        cursor.end_turn()


def test_closing_does_not_wait_for_what_has_not_begun(program):
    send = next(op for op in program.ops if op.kind is OpKind.SEND)
    actions = Held(send.name)
    interpreter = CpuInterpreter(program, actions.perform)
    for op in program.ops:
        if op.queue is Queue.D2H:
            interpreter.issue((op,), values(1))
    interpreter.flush()
    assert actions.begun[send.name].wait(DEADLINE_S)
    closer = threading.Thread(target=interpreter.close)
    closer.start()
    actions.held[send.name].set()
    closer.join(DEADLINE_S)
    assert not closer.is_alive()
    # Close and the first copy's end race; but never did the second one begin before.
    assert actions.log[0] == (send.name, 1)
