"""The numbers of plain PyTorch, whatever the plan."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM

from planner.errors import UserError
from planner.graph import RECIPES, Pair
from planner.schedule.compile import compile_program
from planner.schedule.memory_use import gpu_peak_bytes
from planner.schedule.plan import Direction
from tests.support.engine_plans import adamw, chain_of, mixed_plan, resident_plan
from tests.support.engines import CPU, assert_same, assert_same_state, data, run
from tests.support.model_folders import write_model
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import batch_of, make_model
from worker.engine.engine import Engine
from worker.engine.gradients import Gradients
from worker.runtime.arena import NoPlaces
from worker.runtime.cpu import CpuMachine
from worker.runtime.step_values import StepValues
from worker.storage.model_folder import Output

torch.set_num_threads(1)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("clip", [None, 0.5], ids=["free", "clipped"])
@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_ten_steps_of_a_mixed_plan_equal_plain_pytorch_bitwise(make, name, slices, clip):
    engine, plain = make(name, slices=slices, clip=clip)
    assert_same(run(engine, range(10), slices), run(plain, range(10), slices))
    assert_same_state(engine, plain)
    trained = engine.restore()
    for (name, got), (_, expected) in zip(trained.named_parameters(), plain.model.named_parameters(), strict=True):
        assert torch.equal(got, expected), name


@pytest.mark.parametrize("plan_of", [mixed_plan, resident_plan], ids=["mixed", "resident"])
@pytest.mark.parametrize(("slices", "clip"), [(1, None), (4, 0.5)])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bf16_weights_with_fp32_masters_equal_plain_pytorch_bitwise(make, name, slices, clip, plan_of):
    engine, plain = make(name, plan_of, slices=slices, clip=clip, dtype=torch.bfloat16)
    assert_same(run(engine, range(4), slices), run(plain, range(4), slices))
    assert_same_state(engine, plain)
    trained = engine.restore()
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), plain.model.parameters(), strict=True))


@pytest.mark.parametrize("option", RECIPES)
@pytest.mark.parametrize("name", ["qwen2", "bloom"])
def test_each_option_alone_equals_plain_pytorch_bitwise(make, name, option):
    engine, plain = make(name, resident_plan, slices=2, option=option)
    assert_same(run(engine, range(3), 2), run(plain, range(3), 2))
    assert_same_state(engine, plain)


@pytest.mark.parametrize(("copy_turns", "slices", "rounds"), [(2, 1, 1), (2, 2, 2), (3, 3, 1), (9, 1, 1)])
def test_activations_that_are_copied_for_several_turns_change_no_bit(make, copy_turns, slices, rounds):
    shape = {"slices": slices, "rounds": rounds, "option": "offload-all", "copy_turns": copy_turns, "metered": True}
    engine, plain = make("llama", resident_plan, dtype=torch.bfloat16, **shape)
    assert_same(run(engine, range(3), slices * rounds), run(plain, range(3), slices * rounds))
    assert_same_state(engine, plain)
    batches, rest = data(3, slices * rounds)
    predicted = gpu_peak_bytes(compile_program(engine.plan, engine.chain), engine.chain)
    assert 0.98 * predicted <= engine.step(batches, learning_rate=1e-3, **rest).peak_bytes <= predicted


@pytest.mark.parametrize("plan_of", [mixed_plan, resident_plan], ids=["mixed", "resident"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_saving_and_loading_in_the_middle_changes_no_bit(make, dtype, plan_of):
    first, plain = make("gpt2", plan_of, slices=2, dtype=dtype)
    second, _ = make("gpt2", plan_of, slices=2, dtype=dtype)
    expected = run(plain, range(6), 2)
    assert_same(run(first, range(3), 2), expected[:3])
    saved = [(name, {k: t.clone() for k, t in parts.items()}) for name, parts in first.state()]
    assert_same(run(first, range(3, 4), 2), expected[3:4])  # goes on after the drain
    second.load_state(saved, step=3)
    first.load_state(iter(saved), step=3)  # and back
    for engine in (first, second):
        assert engine.steps_done == 3
        assert_same(run(engine, range(3, 6), 2), expected[3:])
        assert_same_state(engine, plain)


def test_slices_and_steps_of_different_lengths_are_traced_on_demand(make):
    engine, plain = make("llama", slices=2)
    for step, lengths in enumerate([(8, 16), (16, 8), (24, 24)]):
        batches = [batch_of(7 * step + k, length=n) for k, n in enumerate(lengths)]
        rest = {"seeds": [step, step + 1], "learning_rate": 1e-3, "num_items_in_batch": 40}
        got, expected = engine.step(batches, **rest), plain.step(batches, **rest)
        assert all(torch.equal(a, b) for a, b in zip(got.losses, expected.losses, strict=True))
    assert_same_state(engine, plain)


def test_code_that_reads_a_blocks_weight_unseen_by_planning_gets_nan(make):
    engine, _ = make("llama")
    weight = engine._model.lm_head.weight
    assert weight.shape == (128, 32) and weight.isnan().all()
    engine._model.model.norm.register_forward_hook(lambda module, args, out: out * weight.detach().mean())
    ((losses, _),) = run(engine, range(1), 1)
    assert losses[0].isnan()


FROZEN = {
    "mlp": ("mlp",),
    "embedding": ("embed_tokens",),
    "embedding and first layer": ("embed_tokens", "layers.0."),
    "head": ("lm_head", "model.norm"),
    "all but the head": ("embed_tokens", "layers.", "model.norm"),
}


def freeze(model, which):
    for name, p in model.named_parameters():
        p.requires_grad_(not any(part in name for part in FROZEN[which]))
    return model


@pytest.mark.parametrize("which", FROZEN)
def test_frozen_weights_stay_as_they_are(which):
    plain, model = freeze(make_model("llama"), which), freeze(make_model("llama"), which)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    chain = chain_of(model)
    settings = {"optimizer": adamw(model), "max_grad_norm": 0.5}
    plan = resident_plan(chain, clip=True)
    engine = Engine(model, plan=plan, chain=chain, device=CPU, **settings)
    reference = PlainEngine(plain, **settings)
    assert_same(run(engine, range(3), 1), run(reference, range(3), 1))
    assert_same_state(engine, reference)
    for name, p in engine.restore().named_parameters():
        assert torch.equal(p, before[name]) != p.requires_grad, name


def test_the_model_folder_has_the_frozen_weights(tmp_path):
    model = freeze(make_model("llama"), "mlp")
    chain = chain_of(model)
    output = Output(model, torch.float32)
    settings = {"optimizer": adamw(model), "max_grad_norm": None}
    engine = Engine(model, plan=resident_plan(chain), chain=chain, device=CPU, **settings)
    run(engine, range(1), 1)
    weights, tokenizer = [*engine.state(), *engine.frozen()], SimpleNamespace(save_pretrained=lambda folder: None)
    folder = write_model(tmp_path / "out", output, model, tokenizer, weights, dtype=torch.float32)
    with pytest.raises(AssertionError, match=r"nobody gave the weights of model\.layers\.0\.mlp"):
        write_model(tmp_path / "other", output, model, tokenizer, engine.state(), dtype=torch.float32)
    written, trained = LlamaForCausalLM.from_pretrained(folder).state_dict(), engine.restore().state_dict()
    assert all(torch.equal(written[name], trained[name]) for name in trained)
    assert torch.equal(
        trained["model.layers.0.mlp.up_proj.weight"],
        dict(make_model("llama").named_parameters())["model.layers.0.mlp.up_proj.weight"],
    )


def test_a_block_whose_result_nobody_reads_is_refused_by_name():
    model = make_model("llama")
    model.model.layers[1].register_forward_hook(lambda module, args, result: result.detach())
    with pytest.raises(UserError, match=r"the loss does not depend on what the block model\.layers\.1 computes"):
        chain_of(model)


def test_the_caller_keeps_its_random_state(make):
    engine, _ = make("gpt2", slices=2)
    before = torch.get_rng_state()
    run(engine, range(1), 2)
    assert torch.equal(before, torch.get_rng_state())


def test_blocks_of_one_kind_that_save_alike_share_their_code(make):
    def sends_an_input(chain, **shape):
        plan = resident_plan(chain, option="recompute", **shape)
        return dataclasses.replace(plan, options=(*plan.options[:2], "offload-input", *plan.options[3:]))

    engine, plain = make("llama", sends_an_input, slices=2)
    engine._rounds.codes = {}
    assert_same(run(engine, range(1), 2), run(plain, range(1), 2))
    assert len(engine._rounds.codes) == 3  # embedding, layer, head


def test_a_mixed_plan_mixes_what_it_says():
    plan = mixed_plan(chain_of(make_model("llama")))
    assert set(plan.options) == {"keep", "recompute", "offload"}
    assert plan.cpu_updated() and any(s.gpu_update for s in plan.stages)
    program = compile_program(plan, chain_of(make_model("llama")))
    assert any(op.carried for op in program.ops)
    assert any(s.direction is Direction.HEAD and s.prefetch for s in plan.stages)
    assert dataclasses.is_dataclass(plan)


def with_auxiliary_loss(model):
    """Each layer has a second result, as mixtures of experts have, which the loss reads beside the logits."""
    gates = []
    for layer in model.model.layers:
        own = layer.forward

        def forward(hidden, own=own, **rest):
            result = own(hidden, **rest)
            return result, result.tanh().mean(-1)

        def keep(module, args, results):
            gates.append(results[1])
            return results[0]

        layer.forward = forward
        layer.register_forward_hook(keep)

    def add(module, args, output):
        output.loss = output.loss + sum(g.square().mean() for g in gates)
        gates.clear()
        return output

    model.register_forward_hook(add)
    return model


@pytest.mark.parametrize("option", RECIPES)
def test_gradients_that_reach_a_block_from_the_loss_and_from_the_next_block_are_both_there(option):
    model, plain = (with_auxiliary_loss(make_model("llama")) for _ in range(2))
    chain = chain_of(model)
    plan = resident_plan(chain, option=option)
    settings = {"optimizer": adamw(model), "max_grad_norm": None}
    engine = Engine(model, plan=plan, chain=chain, device=CPU, metered=True, **settings)
    reference = PlainEngine(plain, **settings)
    predicted = gpu_peak_bytes(compile_program(plan, chain), chain)
    for step in range(3):
        batches, rest = data(step, 1)
        got = engine.step(batches, learning_rate=1e-2, **rest)
        expected = reference.step(batches, learning_rate=1e-2, **rest)
        assert torch.equal(got.losses[0], expected.losses[0])
        assert 0.95 * predicted <= got.peak_bytes <= predicted
    assert_same_state(engine, reference)
    engine.close()


def test_a_block_that_is_given_one_tensor_twice_is_refused_by_name():
    model = make_model("llama")
    for layer in model.model.layers:
        own = layer.forward
        layer.forward = lambda hidden, first=None, own=own, **rest: own(hidden + first, **rest)
        layer.register_forward_pre_hook(lambda m, args, kw: (args, kw | {"first": args[0]}), with_kwargs=True)
    with pytest.raises(UserError, match=r"the block model\.layers\.0 is given one tensor twice"):
        chain_of(model)


def test_saved_tensors_of_another_device_stay_with_the_call_and_keep_their_places(make):
    engine, plain = make("gpt2", resident_plan, option="offload")
    meta, seen = torch.empty((), device="meta"), []

    class Mixed(Pair):
        """Its forward saves a tensor between the others that no queue can copy, as attention on CUDA does."""

        def forward(self, values):
            results, states = super().forward(values)
            results.insert(self.n_outputs + 1, meta)
            return results, states

        def backward(self, values, states, sink):
            seen.append(values.pop(1))
            return super().backward(values, states, sink)

    engine._rounds.codes = {}
    trace = engine._rounds.make_code

    def mixed(block, args, kwargs):
        pair = trace(block, args, kwargs)
        return Mixed(pair.joint, pair.recipe) if block.recipe.offloads else pair

    engine._rounds.make_code = mixed
    assert_same(run(engine, range(2), 1), run(plain, range(2), 1))
    assert_same_state(engine, plain)
    assert len(seen) == 6 and all(t is meta for t in seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_norms_of_large_and_small_tensors_are_those_of_clip_grad_norm_bitwise(dtype):
    random = torch.Generator().manual_seed(0)
    shapes = {"a": (7,), "b": (257, 255), "c": (65536,), "d": (65537,), "e": (1000, 301), "f": (1 << 20,)}
    items = {f"g:{name}": [torch.randn(shape, generator=random).to(dtype)] for name, shape in shapes.items()}
    gradients = Gradients(
        SimpleNamespace(items=items),
        CpuMachine(metered=False),
        NoPlaces(),
        {},
        order=tuple(shapes),
        by_rows=(),
        max_norm=0.5,
    )
    values = StepValues(number=1, learning_rate=1.0, host_count=torch.ones(()), device_count=torch.ones(()))
    values.reached.update(shapes)
    gradients.begin_step(values)
    gradients.begin_round([])
    gradients.norm(["f", "b", "a"])
    gradients.norm(["c", "e", "d"])
    gradients.clip(values)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes.values()]
    for p, (gradient,) in zip(parameters, items.values(), strict=True):
        p.grad = gradient.to(torch.float32, copy=True)
    assert torch.equal(values.grad_norm, torch.nn.utils.clip_grad_norm_(parameters, 0.5))
    assert all(
        torch.equal(p.grad, g.float() * values.coefficient) for p, (g,) in zip(parameters, items.values(), strict=True)
    )


def test_a_buffer_that_two_modules_share_moves_under_both_names():
    model = make_model("llama")
    shared = torch.ones(3)
    for layer in model.model.layers[:2]:
        layer.register_buffer("shared", shared)
    chain, moved = chain_of(model), []
    engine = Engine(
        model, plan=resident_plan(chain), chain=chain, optimizer=adamw(model), max_grad_norm=None, device=CPU
    )
    engine._weights._move_buffers(lambda buffer: moved.append(buffer) or buffer.clone())
    first, second = (layer.shared for layer in model.model.layers[:2])
    assert first is second is not shared and sum(buffer is shared for buffer in moved) == 1
    engine.close()
