"""What a user's loop does beside the engine's step: it counts as in plain PyTorch, or it is refused in a line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as T
from torch import Tensor, nn

from planner.errors import UserError
from tests.support.own_loop import engine_of, equal, model_of, optimizer_of, plain_loop, schedule_of
from tests.support.tiny_models import batch_of
from worker.api import LoopEngine
from worker.engine.host_items import Host
from worker.lent_model import ModelGuard

STEPS = [[batch_of(n)] for n in range(3)]


class Scaled(nn.Module):
    """A layer whose result a buffer scales, which is to change between steps, one way or another."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("factor", torch.tensor(1.0))

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        return self.layer(*args, **kwargs) * self.factor


def with_buffers(model: nn.Module) -> None:
    model.model.layers = nn.ModuleList(map(Scaled, model.model.layers))
    model.model.register_buffer("shift", torch.zeros(()))
    model.model.norm.register_forward_hook(lambda module, args, result: result + model.model.shift)


def with_hooks(model: nn.Module) -> None:
    """Inside a layer, on a layer, on the frame; before and after."""
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, result: 2 * result)
    model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: (args[0] + 0.5,))
    model.model.layers[2].register_forward_hook(lambda module, args, result: 0.5 * result)
    model.model.norm.register_forward_hook(lambda module, args, result: result.tanh())


def with_modes(model: nn.Module) -> None:
    """No dropout in the first layer."""
    model.model.layers[0].eval()


def change_buffers(model: nn.Module) -> None:
    model.model.layers[1].factor.mul_(0.5)
    model.model.layers[2].factor = torch.tensor(3.0)
    model.model.shift = model.model.shift + 0.25


@pytest.mark.parametrize(
    ("prepared", "between"),
    [
        (with_buffers, change_buffers),
        (with_hooks, lambda model: None),
        (with_modes, lambda model: None),
        (lambda model: None, lambda model: (model.eval(), model.train())),
        (lambda model: None, lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-9)),
        (lambda model: None, lambda model: model.zero_grad(set_to_none=False)),
        (lambda model: None, lambda model: torch.manual_seed(3)),
    ],
    ids=["buffers", "forward hooks", "modes", "eval and train", "clipping nothing", "zero_grad", "seeds"],
)
def test_what_the_engine_sees_counts_as_in_plain_pytorch(prepared, between) -> None:
    models = []
    for run in ("plain", "engine"):
        model = model_of()
        prepared(model)
        optimizer = optimizer_of(model)
        losses = []
        schedule = schedule_of(optimizer)
        if run == "plain":
            for step in range(3):  # one step at a time: what is done in between belongs to the loop
                losses += plain_loop(
                    model,
                    STEPS[step : step + 1],
                    make_optimizer=lambda m, o=optimizer: o,
                    make_schedule=lambda o, s=schedule: s,
                    first=step,
                )
                between(model)
        else:
            engine = engine_of(model, optimizer, STEPS[0], seed=7)
            for batches in STEPS:
                losses.append(engine.step(batches).clone())
                schedule.step()
                between(model)
                optimizer.zero_grad(set_to_none=False)
            engine.restore()
        models.append((model, losses))
    (plain, expected), (model, got) = models
    assert torch.equal(torch.stack(got), torch.stack(expected))
    assert equal(model, plain)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))


def weight(model: nn.Module) -> nn.Parameter:
    return model.model.layers[0].mlp.up_proj.weight


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        model.model.norm.weight.clamp_(-0.5, 0.5)


def gradient(parameter: nn.Parameter) -> None:
    parameter.grad = torch.ones(parameter.shape)


CHANGES = {
    "mode": (lambda m: m.eval(), "the model: training is False, was True"),
    "mode of a part": (lambda m: m.model.layers[1].eval(), r"model\.layers\.1: training is False, was True"),
    "frozen": (lambda m: weight(m).requires_grad_(False), "up_proj.weight: requires_grad is False, was True"),
    "dropout": (
        lambda m: setattr(m.model.layers[0].self_attn, "attention_dropout", 0.5),
        r"model\.layers\.0\.self_attn: attention_dropout is 0\.5, was 0\.1",
    ),
    "config": (lambda m: m.set_attn_implementation("eager"), "attn_implementation.* is eager, was sdpa"),
    "cache": (lambda m: setattr(m.config, "use_cache", True), "use_cache is True, was False"),
    "hook in a layer": (
        lambda m: m.model.layers[0].mlp.register_forward_hook(lambda *a: None),
        r"layers\.0\.mlp has another hooks",
    ),
    "hook of the frame": (
        lambda m: m.model.norm.register_forward_pre_hook(lambda *a: None),
        r"model\.norm has another hooks",
    ),
    "backward hook": (
        lambda m: m.model.layers[0].register_full_backward_hook(lambda *a: None),
        r"layers\.0 has another hooks",
    ),
    "gradient hook": (lambda m: weight(m).register_hook(lambda g: g), "up_proj.weight has another hook on its"),
    "accumulation hook": (
        lambda m: weight(m).register_post_accumulate_grad_hook(lambda p: None),
        "another hook on its gradient",
    ),
    "gradient": (lambda m: gradient(weight(m)), "up_proj.weight has a gradient"),
    "gradient of the frame": (lambda m: gradient(m.model.norm.weight), "norm.weight has a gradient"),
    "value": (clamp, "norm.weight has another value"),
    "data": (lambda m: setattr(weight(m), "data", torch.zeros(weight(m).shape)), "up_proj.weight has another value"),
    "dtype": (lambda m: m.to(torch.bfloat16), "dtype is torch.bfloat16, was torch.float32"),
    "tied": (lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight), "lm_head has another parameters"),
    "module": (lambda m: setattr(m.model.layers[0], "mlp", nn.Identity()), r"layers\.0 has another parts"),
    "forward": (lambda m: setattr(m.model.layers[0].mlp, "forward", lambda x: x), "mlp has another forward"),
    "size": (lambda m: m.resize_token_embeddings(140), "."),
    "buffer": (lambda m: m.model.rotary_emb.register_buffer("more", torch.ones(1)), "rotary_emb has another buffers"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_engine_would_not_see_is_refused(change: str) -> None:
    act, text = CHANGES[change]
    model = model_of()
    guard = ModelGuard(model, model.model.layers)
    guard.check(steps=True)
    act(model)
    with pytest.raises(UserError, match=text) as caught:
        guard.check(steps=True)
    assert caught.value.code == "model-changed"


def test_what_was_changed_and_put_back_harms_nothing_and_evaluation_is_of_any_mode() -> None:
    plain, model = model_of(), model_of()
    expected = plain_loop(plain, STEPS)
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)
    engine = engine_of(model, optimizer, batch_of(), seed=7)
    for batches, loss in zip(STEPS, expected, strict=True):
        model.eval()
        assert engine.evaluate(batch_of()).isfinite()
        with pytest.raises(UserError, match="training is False"):
            engine.step(batches)
        model.train()
        gradient(weight(model))
        with pytest.raises(UserError, match="has a gradient"):
            engine.evaluate(batch_of())
        optimizer.zero_grad()
        assert torch.equal(engine.step(batches), loss)
        schedule.step()
    assert equal(engine.restore(), plain)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda m: gradient(weight(m)), "up_proj.weight has a gradient"),
        (lambda m: weight(m).register_hook(lambda g: g), "up_proj.weight has a hook on its gradient"),
        (lambda m: weight(m).register_post_accumulate_grad_hook(lambda p: None), "has a hook on its gradient"),
        (lambda m: m.model.layers[0].mlp.register_full_backward_hook(lambda *a: None), "mlp has a backward hook"),
        (lambda m: m.register_full_backward_pre_hook(lambda *a: None), "the model has a backward hook"),
    ],
    ids=["gradient", "hook", "accumulation hook", "backward hook", "backward pre-hook"],
)
def test_what_plain_pytorch_would_call_at_a_step_is_refused_from_the_start(act, text: str) -> None:
    model = model_of()
    act(model)
    with pytest.raises(UserError, match=text) as caught:
        engine_of(model, optimizer_of(model), batch_of())
    assert caught.value.code == "model-not-usable"


def own_use(engine: LoopEngine, model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, object]:
    return {
        "forward": lambda: model(**batch_of()),
        "closure": lambda: optimizer.step(lambda: model(**batch_of()).loss),
        "generate": lambda: model.generate(torch.tensor([[5, 6]]), max_new_tokens=2),
        "state_dict": model.state_dict,
        "state_dict of a part": model.model.layers[0].state_dict,
        "save_pretrained": lambda: model.save_pretrained("never"),
        "load_state_dict": lambda: model.load_state_dict({}),
        "assign": lambda: model.load_state_dict(model_of().state_dict(), assign=True),
    }


@pytest.mark.parametrize("use", list(own_use(None, model_of(), None)))
def test_a_model_whose_weights_the_engine_has_is_not_used_nor_saved_nor_written(
    use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # save_pretrained makes its folder before it asks for weights
    plain, model = model_of(), model_of()
    expected = plain_loop(plain, STEPS[:2])
    optimizer = optimizer_of(model)
    engine = engine_of(model, optimizer, batch_of(), seed=7)
    schedule = schedule_of(optimizer)
    assert torch.equal(engine.step(STEPS[0]), expected[0])
    schedule.step()
    with pytest.raises(UserError) as caught:
        own_use(engine, model, optimizer)[use]()
    assert caught.value.code == "weights-in-engine"
    assert torch.equal(engine.step(STEPS[1]), expected[1])
    restored = engine.restore()
    assert equal(restored, plain)
    restored.load_state_dict(plain.state_dict())


def test_scalers_and_backward_of_the_loss_are_errors_and_autocast_is_refused() -> None:
    plain, model = model_of(), model_of()
    expected = plain_loop(plain, STEPS[:2])
    optimizer = optimizer_of(model)
    engine = engine_of(model, optimizer, T.BatchEncoding(batch_of()), seed=7)
    schedule = schedule_of(optimizer)
    loss = engine.step(T.BatchEncoding(STEPS[0][0]))
    assert torch.equal(loss, expected[0])
    schedule.step()
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()
    with pytest.raises(RuntimeError, match="does not require grad"):
        scaler.scale(loss).backward()
    scaler.step(optimizer)  # which has no gradients
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UserError, match="autocast-outside"):
        engine.step(STEPS[1])
    with torch.no_grad():
        assert torch.equal(engine.step(STEPS[1]), expected[1])
    assert equal(engine.restore(), plain)


def test_a_hook_before_the_optimizers_step_is_refused() -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    engine = engine_of(model, optimizer, batch_of())
    engine.step(batch_of())
    assert seen == [1]
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UserError, match="a hook before its step"):
        engine.step(batch_of())
    engine.close()


def test_a_model_that_finds_no_room_on_the_host_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    held: list[str] = []
    hold = Host.hold

    def fail(self: Host, name: str, *args: object, **kwargs: object) -> None:
        held.append(name)
        if len(held) == 5:
            raise MemoryError
        hold(self, name, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Host, "hold", fail)
        with pytest.raises(MemoryError):
            engine_of(model, optimizer_of(model), batch_of())
    assert equal(model, model_of())
    engine_of(model, optimizer_of(model), batch_of()).close()
