"""Makes the data of the HTML page that shows a plan: operations, memory over time, figures and decisions, as one JSON
object."""

from __future__ import annotations

from dataclasses import replace

from planner.codec import Json, to_json
from planner.machine.hardware import Hardware
from planner.picture.drawing import AROUND, STEPS, Drawing, Sort, sort_of
from planner.picture.headline import figures, summary
from planner.picture.plan_decisions import decisions
from planner.picture.trace import ns
from planner.schedule.compile import OpKind, Queue
from planner.schedule.memory_use import Parts
from planner.units import printable

FORMAT = 1


def document(drawing: Drawing) -> dict[str, Json]:
    """The JSON object that the page's script reads. Times are whole nanoseconds from the start of the first training
    step shown."""
    plan = drawing.plan
    return {
        "format": FORMAT,
        "title": printable(drawing.title),
        "summary": summary(drawing),
        "figures": to_json(figures(drawing)),
        "plan": {
            "step_s": drawing.step_s,
            "bound_s": plan.bound_s,
            "lp_step_s": plan.lp_step_s,
            "solver_gap": plan.solver_gap,
            "source": plan.source,
            "slices": plan.slices,
            "clip": plan.clip,
            "gpu_peak_bytes": plan.gpu_peak_bytes,
            "gpu_budget_bytes": plan.gpu_budget_bytes,
            "basis": drawing.basis,
        },
        "hardware": to_json(_as_used(drawing)),
        "loads": to_json(drawing.loads),
        "host_limited": drawing.step_s > drawing.queues_step_s * (1 + 1e-9),
        "step_ns": ns(drawing.queues_step_s),
        "planned_end_ns": ns(drawing.end_s),
        "end_ns": max(ns(drawing.end_s), _computed_ns(drawing)),
        "measured": _measured(drawing),
        "first_step": AROUND,
        "shown_steps": STEPS,
        "stages": [str(stage) for stage in plan.stages],
        "operations": _operations(drawing),
        "memory": _memory(drawing),
        "blocks": to_json(decisions(plan, drawing.chain)),
    }


def _as_used(drawing: Drawing) -> Hardware:
    """The machine with the update rates that the plan assumes."""
    updates = drawing.chain.update_rates(drawing.hardware)
    return replace(drawing.hardware, gpu_update_parameters_per_s=updates.gpu, cpu_update_parameters_per_s=updates.cpu)


def _operations(drawing: Drawing) -> dict[str, Json]:
    """Columns with one entry per operation, in program order. `start_ns` and `end_ns` have one such column per step.

    A wait is the number of an operation. A number that is not smaller than the waiting operation's own means that
    operation in the step before.
    """
    ops = drawing.program.ops
    kinds, sorts, queues = list(OpKind), list(Sort), list(Queue)
    stages = {stage.name: number for number, stage in enumerate(drawing.plan.stages)}
    position = {op.name: number for number, op in enumerate(ops)}
    return {
        "kinds": [kind.value for kind in kinds],
        "sorts": [sort.value for sort in sorts],
        "queues": [queue.value for queue in queues],
        "kind": [kinds.index(op.kind) for op in ops],
        "sort": [sorts.index(sort_of(op)) for op in ops],
        "queue": [queues.index(op.queue) for op in ops],
        "stage": [stages[op.stage] for op in ops],
        "round": [op.round for op in ops],
        "subject": [op.subject for op in ops],
        "bytes": [op.bytes for op in ops],
        "waits": [[position[name] for name in op.waits] for op in ops],
        "start_ns": [[ns(span.start_s) for span in step] for step in drawing.steps],
        "end_ns": [[ns(span.end_s) for span in step] for step in drawing.steps],
    }


def _measured(drawing: Drawing) -> Json:
    """The number of the first measured step, the length of a step, and columns as in `_operations`; null if nothing
    was measured."""
    measured = drawing.measured
    if measured is None:
        return None
    return {
        "first_step": measured.first_step,
        "step_ns": measured.step_ns(drawing.program),
        "start_ns": to_json(measured.start_ns),
        "end_ns": to_json(measured.end_ns),
        "paused": measured.paused,
    }


def _computed_ns(drawing: Drawing) -> int:
    """When computing ends in the last measured step, in nanoseconds; 0 if nothing was measured."""
    if drawing.measured is None:
        return 0
    ends_ns = zip(drawing.program.ops, drawing.measured.end_ns[-1], strict=True)
    return max(end for op, end in ends_ns if op.queue is Queue.COMPUTE)


def _memory(drawing: Drawing) -> dict[str, Json]:
    """The names of the parts, and samples in rows of start, end and the bytes of each part."""
    samples: list[Json] = [
        [ns(s.start_s), ns(s.end_s), *(getattr(s.parts, name) for name in Parts.__slots__)] for s in drawing.samples()
    ]
    return {"parts": [name.removesuffix("_bytes") for name in Parts.__slots__], "samples": samples}
