"""A plan drawn: its two steps, its memory, the trace, and what the page carries. No browser."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from planner.errors import UserError
from planner.picture.basis import Basis
from planner.picture.document import document
from planner.picture.drawing import AROUND, STEPS, Drawing, Sort, draw, sort_of
from planner.picture.files import Pictures
from planner.picture.headline import figures, summary
from planner.picture.page import page
from planner.picture.plan_decisions import Absence, decisions
from planner.picture.trace import ns, trace
from planner.schedule.chain import Chain
from planner.schedule.compile import Queue, compile_program
from planner.schedule.memory_use import Parts, gpu_peak_bytes
from planner.schedule.plan import Plan
from planner.schedule.simulate import simulate
from planner.schedule.verify import verify
from planner.search.problem import Problem
from tests.support import chains as small
from tests.support.llama import RTX_3060, llama


def streamed() -> Plan:
    """Layer 1's first tensor is updated by the CPU and fetched for each pass; layer 0 offloads its activations."""
    return small.plan(
        """
        F1 offload=w:l0.a evict=w:l0.a
        F2 prefetch=w:l1.a
        H3 gpu=h evict=g:h
        B2 prefetch=w:l0.a offload=g:l1.a evict=w:l1.a,g:l1.a,g:l1.b gpu=l1.b
        B1 cpu=l1.a gpu=l0.a,l0.b evict=g:l0.a,g:l0.b
        B0 gpu=e evict=g:e
        """,
        options="keep offload keep keep",
        resident="w:e s:e w:l0.a s:l0.a w:l0.b s:l0.b w:l1.b s:l1.b w:h s:h",
        slices=2,
    )


@pytest.fixture
def drawing() -> Drawing:
    chain = small.chain()
    plan = streamed()
    verify(compile_program(plan, chain), chain)
    return draw(plan, chain, small.HARDWARE, title="layers <&> co", basis=Basis.MEASURED)


def large() -> Drawing:
    """A solved plan with everything in it."""
    chain = llama(4)
    plan = Problem(
        chain=chain,
        hardware=RTX_3060,
        gpu_budget_bytes=6 * 10**9,
        cpu_budget_bytes=60 * 10**9,
        slices=2,
        clip=True,
    ).plan()
    return draw(plan, chain, RTX_3060, title="four layers", basis=Basis.ESTIMATED)


def slices_of(found: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """The slices of each track, in order of time."""
    tracks: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in found["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["tid"]].append(event)
    return {track: sorted(events, key=lambda e: (e["ts"], e["dur"])) for track, events in tracks.items()}


def steps_of(data: dict[str, Any]) -> Iterator[list[tuple[str, int, int]]]:
    """Name, start and end of every operation, as the page's script reads them."""
    ops = data["operations"]
    stages = [text.split(" ")[0] for text in data["stages"]]
    names = [
        f"{ops['kinds'][kind]}@{stages[stage]}:{subject}"
        for kind, stage, subject in zip(ops["kind"], ops["stage"], ops["subject"], strict=True)
    ]
    for starts, ends in zip(ops["start_ns"], ops["end_ns"], strict=True):
        yield list(zip(names, starts, ends, strict=True))


def page_data(text: str) -> dict[str, Any]:
    """The JSON inside the page."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    data: dict[str, Any] = json.loads(found)
    return data


def test_steps_follow_each_other_as_the_simulator_says(drawing: Drawing) -> None:
    timeline = simulate(drawing.program, drawing.chain, drawing.hardware)
    assert len(drawing.steps) == STEPS + 2 * AROUND
    for number, step in enumerate(drawing.steps):
        shift = (number - AROUND) * timeline.step_s
        for span, alone in zip(step, timeline.spans, strict=True):
            assert span.op == alone.op
            assert (span.start_s - shift, span.end_s - shift) == pytest.approx((alone.start_s, alone.end_s), abs=1e-9)
    assert drawing.end_s == pytest.approx(STEPS * timeline.step_s)


def test_what_other_steps_do_meanwhile_is_shown_too(drawing: Drawing) -> None:
    steps = [step for step, _ in drawing.occasions()]
    assert steps.count(1) == steps.count(2) == len(drawing.program.ops)
    # The next step's first copy does not wait for that step's computing.
    assert [(step, span.op.name) for step, span in drawing.occasions() if step in (0, 3)] == [(3, "send@F1:w:l0.a")]


def test_queues_of_a_trace_never_do_two_things_at_once() -> None:
    found = trace(large())
    tracks = slices_of(found)
    assert len(tracks) == len(Queue) - 1  # with that of the stages, without those of the disk, which is not used
    for events in tracks.values():
        for before, after in pairwise(events):
            assert after["ts"] >= before["ts"] + before["dur"] - 1e-9, (before["name"], after["name"])


def test_a_trace_has_every_operation_of_both_steps_on_its_queue(drawing: Drawing) -> None:
    found = trace(drawing)
    names = {e["tid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    assert names == {
        2: "stages",
        3: "GPU computes",
        4: "copies to the GPU",
        5: "copies to the host",
        6: "CPU updates",
        7: "reads from disk",
        8: "writes to disk",
        9: "in no time",
    }
    tracks = slices_of(found)
    ahead_ns = -min(ns(span.start_s) for _, span in drawing.occasions())
    assert ahead_ns > 0, "one copy begins before the step it belongs to"
    for queue, track in zip(Queue, (3, 4, 5, 6, 7, 8), strict=True):
        expected = sorted(
            (ns(s.start_s) + ahead_ns, ns(s.end_s) + ahead_ns, s.op.name)
            for _, s in drawing.occasions()
            if s.op.queue is queue and ns(s.end_s) > ns(s.start_s)
        )
        slices = tracks.get(track, [])  # nothing is read from disk here
        found_there = ((round(1e3 * e["ts"]), round(1e3 * (e["ts"] + e["dur"])), e["name"]) for e in slices)
        assert sorted(found_there) == expected
    gathered = [
        (round(1e3 * e["ts"]), kind, subject)
        for e in found["traceEvents"]
        if e["ph"] == "i"
        for kind, subjects in e["args"].items()
        for subject in subjects.split()
    ]
    assert sorted(gathered) == sorted(
        (ns(s.start_s) + ahead_ns, s.op.kind.value, s.op.subject)
        for _, s in drawing.occasions()
        if ns(s.end_s) == ns(s.start_s)
    )
    assert len(gathered) > len({at for at, _, _ in gathered}) > 2
    assert [e["name"] for e in tracks[2]] == [str(stage) for stage in drawing.plan.stages] * 2


def test_every_event_of_a_trace_has_the_fields_of_its_kind(drawing: Drawing) -> None:
    needed = {
        "X": {"ts", "dur", "pid", "tid", "name", "cat"},
        "C": {"ts", "pid", "name", "args"},
        "M": {"pid", "name", "args"},
        "i": {"ts", "pid", "tid", "s", "name", "args"},
        "s": {"ts", "pid", "tid", "id", "name", "cat"},
        "f": {"ts", "pid", "tid", "id", "name", "cat", "bp"},
    }
    found = json.loads(json.dumps(trace(drawing), allow_nan=False))
    for event in found["traceEvents"]:
        assert needed[event["ph"]] <= set(event), event
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0


def test_arrows_lead_from_slice_to_slice_and_forward_in_time(drawing: Drawing) -> None:
    found = trace(drawing)
    tracks = slices_of(found)
    ends: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in found["traceEvents"]:
        if event["ph"] in "sf":
            ends[event["id"]][event["ph"]] = event

    def slice_around(event: dict[str, Any]) -> dict[str, Any]:
        (only,) = [e for e in tracks[event["tid"]] if e["ts"] < event["ts"] < e["ts"] + e["dur"]]
        return only

    drawn = set()
    for pair in ends.values():
        source, target = slice_around(pair["s"]), slice_around(pair["f"])
        assert source["ts"] + source["dur"] <= target["ts"] + 1e-6
        drawn.add((source["name"], target["name"]))
    # A layer's forward waits for the weight's fetch; a fetch for the last work before its memory was set aside.
    assert {("fetch@F2:w:l1.a", "run@F2:F2.0"), ("update@H3:h", "fetch@B2:w:l0.a")} <= drawn
    assert ("send@B2:g:l1.a", "cpu_update@B1:l1.a") in drawn


def test_counters_of_a_trace_reach_the_peak_and_never_pass_it(drawing: Drawing) -> None:
    counters = [e for e in trace(drawing)["traceEvents"] if e["ph"] == "C"]
    sums = [sum(e["args"].values()) for e in counters if e["name"] == "GPU bytes"]
    totals = [e["args"]["bytes"] for e in counters if e["name"] == "GPU in use"]
    assert sums == totals and max(sums) == gpu_peak_bytes(drawing.program, drawing.chain)
    kinds = {name for e in counters if e["name"] == "GPU bytes" for name in e["args"]}
    assert kinds == {name.removesuffix("_bytes") for name in Parts.__slots__}


def test_samples_of_memory_follow_each_other_without_gaps_through_both_steps() -> None:
    drawn = large()
    samples = list(drawn.samples())
    assert samples[0].start_s == 0
    assert all(a.end_s == b.start_s for a, b in pairwise(samples))
    assert max(s.parts.total_bytes for s in samples) == drawn.plan.gpu_peak_bytes


def test_the_page_carries_the_timeline_to_the_nanosecond(drawing: Drawing) -> None:
    data = page_data(page(drawing))
    assert data == json.loads(json.dumps(document(drawing)))
    assert list(steps_of(data)) == [
        [(span.op.name, ns(span.start_s), ns(span.end_s)) for span in step] for step in drawing.steps
    ]
    ops = data["operations"]
    waits = [{drawing.program.ops[number].name for number in numbers} for numbers in ops["waits"]]
    assert waits == [set(op.waits) for op in drawing.program.ops]
    assert [ops["sorts"][s] for s in ops["sort"]] == [sort_of(op).value for op in drawing.program.ops]
    assert [ops["queues"][q] for q in ops["queue"]] == [op.queue.value for op in drawing.program.ops]


def test_the_page_asks_for_nothing_outside_itself(drawing: Drawing) -> None:
    text = page(drawing)
    assert not re.search(r"https?://|//[a-z]+\.|url\(|@import|<link|<img|<iframe|\bsrc=|\bfetch\(|XMLHttp", text)
    assert "default-src 'none'" in text


def test_names_from_a_model_cannot_become_markup() -> None:
    hostile = small.chain(layers=0)
    plan = small.resident_plan(hostile)
    title = '</script><script>alert("{{data}}")</script>'
    text = page(draw(plan, hostile, small.HARDWARE, title=title, basis=Basis.ESTIMATED))
    assert "<script>alert" not in text
    assert page_data(text)["title"] == title


def test_every_place_of_the_template_is_filled(drawing: Drawing) -> None:
    assert "{{" not in page(drawing).replace(json.dumps(document(drawing)), "")


def test_headline_figures_are_those_of_the_plan() -> None:
    drawn = large()
    found = {figure.name: figure for figure in figures(drawn)}
    plan = drawn.plan
    assert drawn.step_s == pytest.approx(plan.step_s)
    assert found["step time"].value.endswith(" s") and "at most" in found["step time"].note
    over = 100 * (drawn.step_s / plan.bound_s - 1)
    assert f"at most {over:.1f}% above the best" in found["step time"].note
    assert found["GPU memory, peak"].share == pytest.approx(plan.gpu_peak_bytes / plan.gpu_budget_bytes)
    assert "throughput" not in found  # this chain does not say how many tokens a slice has
    assert found["limited by"].share == drawn.loads[0].share == max(load.share for load in drawn.loads)
    assert "once the norm of all gradients is known" in summary(drawn)


def test_throughput_counts_the_tokens_of_all_slices() -> None:
    chain = small.chain()
    tokens = Chain(**{name: getattr(chain, name) for name in chain.__slots__} | {"slice_tokens": 32})
    drawn = draw(streamed(), tokens, small.HARDWARE, title="", basis=Basis.ESTIMATED)
    assert drawn.tokens_per_s == pytest.approx(64 / drawn.step_s)


def test_a_step_that_the_hosts_memory_limits_is_as_long_as_that(drawing: Drawing) -> None:
    names = drawing.hardware.__slots__
    slow = type(drawing.hardware)(**{n: getattr(drawing.hardware, n) for n in names} | {"cpu_memory_bytes_per_s": 1.0})
    drawn = draw(drawing.plan, drawing.chain, slow, title="", basis=Basis.ESTIMATED)
    assert drawn.loads[0].resource == "host memory bandwidth" and drawn.loads[0].share == 1.0
    assert drawn.step_s == drawn.loads[0].busy_s > drawn.queues_step_s
    assert document(drawn)["host_limited"] is True and document(drawing)["host_limited"] is False


def test_decisions_tell_where_each_tensor_is_and_who_updates_it(drawing: Drawing) -> None:
    embedding, first, second, head = decisions(drawing.plan, drawing.chain)
    assert (first.option, first.offloaded_bytes) == ("offload", 2 * 500)
    assert (first.resident_bytes, first.away_once_bytes, first.away_twice_bytes) == (800, 400, 0)
    assert first.tensors[0].weight_absences == (Absence(leaves="F1", returns="B2", next_step=False),)
    by_name = {tensor.name: tensor for tensor in second.tensors}
    assert by_name["l1.a"].weight_absences == (Absence(leaves="B2", returns="F2", next_step=True),)
    assert (by_name["l1.a"].updated, by_name["l1.a"].update_stage, by_name["l1.a"].sent) == ("cpu", "B1", "B2")
    assert (by_name["l1.b"].updated, by_name["l1.b"].sent, by_name["l1.b"].weight_absences) == ("gpu", "", ())
    assert (second.cpu_parameters, second.gpu_parameters, second.parameters) == (100, 200, 300)
    assert head.saved_bytes == 0 and embedding.up_bytes == 0


def test_bytes_in_the_table_are_those_of_the_queues() -> None:
    drawn = large()
    table = decisions(drawn.plan, drawn.chain)
    for queue, found in ((Queue.H2D, sum(b.up_bytes for b in table)), (Queue.D2H, sum(b.down_bytes for b in table))):
        assert found == sum(op.bytes for op in drawn.program.queue(queue)) > 0


def test_each_operation_has_a_sort(drawing: Drawing) -> None:
    assert {sort_of(op) for op in drawing.program.ops} == set(Sort) - {Sort.STATES, Sort.NORM}


def test_pictures_are_written_where_asked(drawing: Drawing, tmp_path: Path) -> None:
    about = (drawing.plan, drawing.chain, drawing.hardware)
    Pictures().write(*about, title="nothing", basis=Basis.GIVEN)
    assert list(tmp_path.iterdir()) == []
    Pictures(trace=tmp_path / "t.json", html=tmp_path / "p.html").write(
        *about, title="layers <&> co", basis=Basis.MEASURED
    )
    assert json.loads((tmp_path / "t.json").read_text()) == json.loads(json.dumps(trace(drawing)))
    assert (tmp_path / "p.html").read_text() == page(drawing)
    with pytest.raises(UserError) as told:
        Pictures(html=tmp_path / "none" / "p.html").write(*about, title="", basis=Basis.GIVEN)
    assert told.value.code == "cannot-write" and told.value.exit_code == 2
