"""Layers compiled by inductor: their numbers, their bytes, and when they stay as they are. Some tests take seconds:
PyTorch compiles layers."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
import transformers
from torch import fx, nn
from torch._inductor import config as inductor_config

from planner.codec import from_json, to_json
from planner.graph import RECIPES, CannotCompileError, CompiledPair, Pair, trace_block, why_not_compilable
from planner.graph.inductor import _Function
from planner.graph.tangents import layout_of
from planner.measure import choose_compiled as compiled
from planner.measure.analysis import Analysis, analyse_model, estimate_times
from planner.measure.choose_compiled import _is_unused_seed, tried, why_off, with_compiled
from planner.measure.machine_rates import estimate_hardware
from planner.measure.times import CompiledBytes, OptionTimes
from planner.schedule.chain import Chain
from planner.schedule.compile import compile_program
from planner.schedule.memory_use import gpu_peak_bytes
from tests.support.engine_plans import adamw, mixed_plan
from tests.support.plain_engine import PlainEngine
from worker.engine.engine import Engine

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(why_not_compilable(CPU) is not None, reason=str(why_not_compilable(CPU)))


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        # Which vectors the compiler knows is found by compiling, for 5 seconds: without them.
        patch.setattr(inductor_config.cpp, "vec_isa_ok", False)
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)


def make_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
        attention_dropout=dropout,
    )
    return transformers.LlamaForCausalLM(config).train()


def batches_of(length: int, slices: int = 2) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 64, (slices, 2, length), generator=torch.Generator().manual_seed(length))
    return [{"input_ids": i, "labels": i.clone()} for i in ids]


@functools.cache
def analysis_of(dtype: torch.dtype = torch.float32) -> Analysis:
    return analyse_model(make_model().to(dtype), batches_of(12)[0], device=CPU)


def pair_of(option: str, dtype: torch.dtype = torch.float32) -> Pair:
    analysis = analysis_of(dtype)
    pair = analysis.pairs[analysis.names.kinds[1]][option]
    assert isinstance(pair, Pair)
    return pair


@functools.cache
def linear() -> Pair:
    """A layer without code in C++: both functions are matrix products."""
    return Pair(trace_block(nn.Linear(3, 5, bias=False), (torch.ones(4, 3, requires_grad=True),), {}), RECIPES["keep"])


@functools.cache
def code_of(option: str, dtype: torch.dtype = torch.float32) -> CompiledPair:
    """Compiled once for all tests: most of their time is the C++ compiler's."""
    return CompiledPair(pair_of(option, dtype))


def chain_of(options: Sequence[str], dtype: torch.dtype) -> Chain:
    """As if compiled code had been faster for these options."""
    analysis = analysis_of(dtype)
    estimate, kind = estimate_times(analysis, estimate_hardware(CPU)), analysis.names.kinds[1]
    peaks = {option: tried(pair_of(option, dtype), code_of(option, dtype), CPU) for option in options}
    return analysis.chain(
        replace(
            estimate,
            options=tuple(replace(t, compiled=peaks.get(t.option)) if t.kind == kind else t for t in estimate.options),
        )
    )


@pytest.mark.sweep(2)
@needs_compiler
@pytest.mark.parametrize(
    ("options", "dtype", "near"),
    [(("offload",), torch.float32, 1e-5), (("keep",), torch.bfloat16, 2e-2)],
    ids=["fp32", "bf16"],
)
def test_compiled_layers_train_within_the_bound_and_the_plans_bytes(options, dtype, near, monkeypatch):
    ran = []
    forward, call = CompiledPair.forward, _Function.__call__
    monkeypatch.setattr(
        CompiledPair, "forward", lambda self, values: ran.append(self.recipe.name) or forward(self, values)
    )
    calls = []
    monkeypatch.setattr(_Function, "__call__", lambda self, values: calls.append(self) or call(self, values))
    chain = chain_of(options, dtype)
    plan = mixed_plan(chain, slices=2)
    model, plain_model = make_model().to(dtype), make_model().to(dtype)
    engine = Engine(model, plan=plan, chain=chain, optimizer=adamw(model), max_grad_norm=None, device=CPU, metered=True)
    plain = PlainEngine(plain_model, optimizer=adamw(plain_model), max_grad_norm=None)
    for length in (12, 12, 6):  # the last step's slices are too short for the compiled code
        ran.clear()
        calls.clear()
        batches = batches_of(length)
        its, wanted = (
            e.step(batches, seeds=range(2), learning_rate=1e-3, num_items_in_batch=4 * (length - 1))
            for e in (engine, plain)
        )
        assert its.peak_bytes <= gpu_peak_bytes(compile_program(plan, chain), chain)
        for new, old in zip(its.losses, wanted.losses, strict=True):
            assert torch.allclose(new, old, rtol=near)
        expected = [option for option in options for _ in range(2)] if length == 12 else []  # a layer each, two slices
        assert sorted(ran) == sorted(expected)
        assert len(calls) == 2 * len(expected)  # forward and backward
    weights = dict(engine.restore().named_parameters())
    for name, parameter in plain_model.named_parameters():
        assert torch.allclose(weights[name], parameter, rtol=100 * near, atol=near), name


@needs_compiler
def test_what_is_slower_compiled_runs_as_generated(monkeypatch, caplog):
    analysis = analysis_of(torch.bfloat16)
    kind = analysis.names.kinds[1]
    one = {kind: {"keep": pair_of("keep", torch.bfloat16)}}
    monkeypatch.setattr(compiled, "CompiledPair", lambda pair: code_of("keep", torch.bfloat16))
    estimate = estimate_times(analysis, estimate_hardware(CPU))
    caplog.set_level(logging.INFO)
    for ratio in (0.5, 1.5):
        monkeypatch.setattr(
            compiled,
            "measure_kind",
            lambda pairs, device, adds, r=ratio: {"generated": [(1, 1, 0, 0)] * 3, "compiled": [(r, r, 0, 0)] * 3},
        )
        times = with_compiled(one, [kind], estimate, CPU, adds=False)
        assert (times.of(kind, "keep").compiled is not None) == (ratio < 1)
        assert f"{ratio:.2f} of the time" in caplog.text


@needs_compiler
def test_gradients_as_traced_go_to_the_compiled_backward():
    code = code_of("keep", torch.bfloat16)
    assert code.for_tangents(layout_of(code.tangent_values)) is code
    turned = layout_of([t.transpose(0, 1).contiguous().transpose(0, 1) for t in code.tangent_values])
    assert not isinstance(code.for_tangents(turned), CompiledPair)


def test_a_layer_with_dropout_is_not_compiled(caplog):
    caplog.set_level(logging.INFO)
    analysis = analyse_model(make_model(dropout=0.1), batches_of(12)[0], device=CPU)
    kind = analysis.names.kinds[1]
    estimate = estimate_times(analysis, estimate_hardware(CPU))
    assert with_compiled(analysis.pairs, [kind], estimate, CPU, adds=True) == estimate
    assert "run as generated: it draws random numbers" in caplog.text


@needs_compiler
@pytest.mark.parametrize(("dtype", "wrong"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)], ids=["fp32", "bf16"])
def test_results_beyond_the_bound_are_refused(dtype, wrong, monkeypatch):
    exact = dtype == torch.float32  # a layer of Llama takes the C++ compiler a quarter of a minute, in every dtype
    pair = linear() if exact else pair_of("keep", dtype)
    code = CompiledPair(pair) if exact else code_of("keep", dtype)
    tried(pair, code, CPU)
    forward = code.forward
    monkeypatch.setattr(code, "forward", lambda values: ([t * (1 + wrong) for t in forward(values)[0]], []))
    with pytest.raises(CannotCompileError, match="off by"):
        tried(pair, code, CPU)


def test_the_seed_of_an_attention_that_draws_nothing_is_not_compared():
    query = torch.zeros(1, 2, 16, 8)
    graph = fx.Graph()
    attention = graph.call_function(torch.ops.aten._scaled_dot_product_flash_attention.default)
    found = []
    for number, value in enumerate((query, query[..., 0], torch.zeros(2, dtype=torch.int64))):
        node = graph.call_function(operator.getitem, (attention, number))
        node.meta["val"] = value
        found.append(_is_unused_seed(node))
    assert found == [False, False, True]
    top = graph.call_function(operator.getitem, (graph.call_function(torch.ops.aten.topk.default), 1))
    top.meta["val"] = torch.zeros(2, dtype=torch.int64)
    assert not _is_unused_seed(top)


def test_tensors_have_no_places_where_a_layer_runs_compiled():
    analysis = analyse_model(make_model(), batches_of(12)[0], device=CPU, arranged=True)
    estimate, kind = estimate_times(analysis, estimate_hardware(CPU)), analysis.names.kinds[1]
    assert analysis.chain(estimate).lifetimes and analysis.chain(estimate).frame_lifetimes
    peaks = CompiledBytes(forward=1, backward=1, backward_first=1)
    options = tuple(replace(t, compiled=peaks) if t.kind == kind else t for t in estimate.options)
    chain = analysis.chain(replace(estimate, options=options))
    assert (chain.lifetimes, chain.frame_lifetimes) == ((), ())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("option", "dtype"), [("keep", torch.float32), ("recompute", torch.bfloat16), ("offload", torch.bfloat16)]
)  # each takes the compiler seconds
def test_layers_compiled_for_a_gpu_agree_with_the_generated_code(option, dtype):
    device = torch.device("cuda", torch.cuda.current_device())
    analysis = analyse_model(make_model().to(device, dtype), batches_of(12)[0], device=device)
    pair = analysis.pairs[analysis.names.kinds[1]][option]
    with torch.no_grad():
        assert tried(pair, CompiledPair(pair), device).forward > 0


@needs_compiler
def test_tensors_laid_out_otherwise_than_when_traced_are_taken():
    pair = linear()
    code = CompiledPair(pair)
    weight, x, tangent = torch.randn(5, 3), torch.randn(4, 3), torch.randn(4, 5)

    def other(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.t().contiguous().t()

    for inputs in ([weight, x], [weight, other(x)], [other(weight), x]):
        (made,), (wanted,) = code.forward(list(inputs))[0], pair.forward(list(inputs))[0]
        assert torch.allclose(made, wanted)
        for gradient in (tangent, other(tangent)):
            found: list[dict[str, torch.Tensor]] = [{}, {}]
            results = [
                one.backward([*(inputs[i] for i in pair.backward_primals), gradient], [], sums.__setitem__)
                for one, sums in zip((code, pair), found, strict=True)
            ]
            assert torch.allclose(results[0][0], results[1][0])
            assert torch.allclose(found[0]["weight"], found[1]["weight"])


@needs_compiler
def test_a_graph_that_is_not_partitioned_is_compiled_as_well(monkeypatch):
    monkeypatch.setattr(inductor_config, "graph_partition", False)
    pair = linear()
    inputs = [torch.randn(5, 3), torch.randn(4, 3)]
    (made,), _ = CompiledPair(pair).forward(list(inputs))
    assert torch.allclose(made, pair.forward(inputs)[0][0])


def test_exact_jobs_and_machines_without_a_compiler_do_not_compile(monkeypatch):
    assert why_off("off", CPU, exact=False)
    assert "exact: true" in (why_off("auto", CPU, exact=True) or "")
    assert "deterministic: true" in (why_off("auto", CPU, exact=False, deterministic=True) or "")
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setattr(inductor_config.cpp, "cxx", ("/nowhere/g++",))
    assert "no C++ compiler" in (why_off("auto", CPU, exact=False) or "")


def test_kept_measurements_say_what_is_compiled():
    peaks = CompiledBytes(forward=1, backward=2, backward_first=3)
    times = OptionTimes(kind="k", option="keep", forward_s=1.0, backward_s=2.0, compiled=peaks)
    assert from_json(OptionTimes, to_json(times)) == times
