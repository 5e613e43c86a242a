"""Makes the first lines of a plan's page: headline figures, and a summary in words."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from planner.picture.basis import Basis
from planner.picture.drawing import Drawing
from planner.schedule.compile import OpKind
from planner.units import counted, format_bytes, format_bytes_down, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One headline figure of the page. `share`, from 0 to 1, fills a bar; None: no bar."""

    name: str
    value: str
    note: str
    share: float | None = None


def figures(drawing: Drawing) -> tuple[Figure, ...]:
    """The headline figures: step time, throughput, peak memory on the GPU and the host, and the resource that limits
    the step."""
    plan = drawing.plan
    shown = [Figure(name="step time", value=format_seconds(drawing.step_s), note=_against_bound(drawing))]
    if drawing.tokens_per_s is not None:
        tokens = plan.rounds * plan.slices * drawing.chain.slice_tokens
        rate = drawing.tokens_per_s
        note = f"{tokens:,} tokens a step" + _pieces(drawing)
        shown.append(
            Figure(
                name="throughput", value=f"{rate:,.0f} tokens/s" if rate >= 10 else f"{rate:.2g} tokens/s", note=note
            )
        )
    shown.append(_memory("GPU memory, peak", plan.gpu_peak_bytes, plan.gpu_budget_bytes))
    shown.append(_memory("host memory, peak", plan.cpu_peak_bytes, plan.cpu_budget_bytes))
    for load in drawing.loads[:1]:
        note = f"at work {_percent(load.share)} of the step"
        shown.append(
            Figure(name="limited by", value=load.resource[0].upper() + load.resource[1:], note=note, share=load.share)
        )
    return tuple(shown)


def summary(drawing: Drawing) -> str:
    """What the plan does, as text: how blocks treat their activations, which side updates parameters, and how much is
    copied."""
    plan, chain = drawing.plan, drawing.chain
    elements = {t.name: t.elements for t in chain.tensors() if t.trainable}
    on_cpu = sum(elements.get(name, 0) for name in plan.cpu_updated())
    share = on_cpu / sum(elements.values()) if elements else 0.0
    up = sum(op.bytes for op in drawing.program.ops if op.kind is OpKind.FETCH)
    down = sum(op.bytes for op in drawing.program.ops if op.kind is OpKind.SEND)
    updates = (
        f"The CPU updates {_percent(share)} of the trained parameters"
        if on_cpu
        else "The GPU updates all trained parameters"
    )
    wait = ", once the norm of all gradients is known" if plan.clip else ""
    return (
        f"{_treated(drawing)} {updates}{wait}. In every step "
        f"{format_bytes(up)} travel to the GPU and {format_bytes(down)} back."
    )


_TREATMENTS = {  # for options whose names are not verbs
    "offload-input": "recompute their activations from inputs on the host",
    "offload-all": "offload their activations and inputs",
}
_PARTS = {
    "keep": "keep a part of their activations",
    "offload": "offload a part of their activations",
    "offload-input": "keep a part of their activations and offload their inputs",
    "offload-all": "offload a part of their activations and their inputs",
}


def _words(option: str) -> str:
    word, _, number = option.rpartition("-")
    return _PARTS[word] if number.isdigit() else _TREATMENTS.get(option, f"{option} their activations")


def _of_one(words: str) -> str:
    """Turns a phrase of `_TREATMENTS` or `_PARTS`, which is about several blocks, into one about a single block."""
    return re.sub(r"\b(keep|recompute|offload)\b", r"\1s", words).replace("their", "its")


def _treated(drawing: Drawing) -> str:
    """A sentence on how blocks with several options treat their activations."""
    pairs = zip(drawing.chain.blocks, drawing.plan.options, strict=True)
    counts = Counter(_words(name) for block, name in pairs if len(block.options) > 1)
    if not counts:
        return "No block has a choice of what to do with its activations."
    if len(counts) == 1:
        ((words, count),) = counts.items()
        if count == 1:
            return f"The one block that has a choice {_of_one(words)}."
        return f"All {counted(count, 'block')} that have a choice {words}."
    parts = [f"{count} {words if count > 1 else _of_one(words)}" for words, count in counts.most_common()]
    return f"Of {counted(counts.total(), 'block')} that have a choice {', '.join(parts[:-1])} and {parts[-1]}."


def _against_bound(drawing: Drawing) -> str:
    origin = "predicted from measurements" if drawing.basis is Basis.MEASURED else "predicted"
    bound = drawing.plan.bound_s
    if bound <= 0:
        return origin
    over = max(0.0, drawing.step_s / bound - 1)
    return f"{origin}; {format_seconds(bound)} is a bound for any schedule: at most {100 * over:.1f}% above the best"


def _pieces(drawing: Drawing) -> str:
    plan = drawing.plan
    text = f" in {plan.slices} slices" if plan.slices > 1 else ""
    return text + (f" × {plan.rounds} rounds" if plan.rounds > 1 else "")


def _memory(name: str, peak: int, budget: int) -> Figure:
    if not budget:
        return Figure(name=name, value=format_bytes(peak), note="no budget given")
    side = "below" if peak <= budget else "above"
    note = f"{format_bytes(abs(budget - peak))} {side} the budget of {format_bytes_down(budget)}"
    return Figure(name=name, value=format_bytes(peak), note=note, share=peak / budget)


def _percent(share: float) -> str:
    if 0 < share < 0.001:
        return "< 0.1%"
    return f"{100 * share:.0f}%" if share >= 0.1 or share == 0 else f"{100 * share:.1f}%"
