"""From Python: the engine in a loop of one's own, against the same loop in plain PyTorch. Some tests take seconds: a
model is traced for its plan, and again for its engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.errors import UserError
from tests import ROOT
from tests.support.families import t5
from tests.support.own_loop import engine_of, equal, model_of, optimizer_of, plain_loop, schedule_of
from tests.support.tiny_models import batch_of
from worker.api import LoopEngine, prepare


@pytest.mark.sweep(2)
@pytest.mark.parametrize("slices", [1, 3])
def test_a_loop_gives_the_numbers_of_the_same_loop_in_plain_pytorch(slices: int) -> None:
    steps = [[batch_of(10 * n + k, padded=k == 1) for k in range(slices)] for n in range(4)]
    plain, model = model_of(), model_of()
    expected = plain_loop(plain, steps)
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)
    parameters = list(model.parameters())
    engine = engine_of(model, optimizer, steps[0], seed=7)
    assert any(stage.prefetch for stage in engine.plan.stages), "everything fits: the test shows nothing"
    assert engine.plan.gpu_peak_bytes <= 5_000_000
    for batches, loss in zip(steps, expected, strict=True):
        assert torch.equal(engine.step(batches if slices > 1 else batches[0]), loss)
        schedule.step()
    restored = engine.restore()
    assert restored is model and all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert equal(model, plain)


def test_the_peak_is_counted_in_the_first_two_steps_kept_afterwards_and_what_the_plan_says() -> None:
    model = model_of()
    engine = engine_of(model, optimizer_of(model), batch_of())
    assert engine.peak_bytes is None
    peaks = []
    for n in range(4):
        engine.step(batch_of(n))
        peaks.append(engine.peak_bytes)
    assert peaks[1] == peaks[2] == peaks[3]
    assert peaks[1] is not None and 0.99 * engine.plan.gpu_peak_bytes <= peaks[1] <= engine.plan.gpu_peak_bytes
    engine.close()


def test_evaluation_and_texts_are_those_of_the_plain_model_with_the_weights_of_now() -> None:
    model = model_of()
    engine = engine_of(model, optimizer_of(model), batch_of())
    engine.step(batch_of())
    data = [batch_of(k, padded=k == 1) for k in range(3)]
    one, mean = engine.evaluate(data[1]), engine.evaluate(data)
    text = engine.generate([[5, 6, 7]], new_tokens=6)
    plain = engine.restore().eval()
    with torch.no_grad():
        losses = torch.stack([plain(**batch).loss for batch in data])
    assert torch.equal(one, losses[1])
    assert float(mean) == pytest.approx(float((30 * losses[0] + 24 * losses[1] + 30 * losses[2]) / 84), rel=1e-6)
    ids = torch.tensor([[5, 6, 7]])
    answer = plain.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert text == answer[:, 3:].tolist()


def test_an_empty_prompt_is_refused_by_its_number() -> None:
    model = model_of()
    engine = engine_of(model, optimizer_of(model), batch_of())
    with pytest.raises(UserError, match=r"(?s)There is no text to continue.*prompt 1 of 2 has no token.*empty-prompt"):
        engine.generate([[5, 6], []], new_tokens=2)
    with pytest.raises(UserError, match="There is no text to continue"):
        engine.generate([], new_tokens=2)
    engine.close()


def test_what_an_evaluation_cannot_use_is_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    engine = engine_of(model, optimizer_of(model), batch_of())
    data, silent = batch_of(), batch_of(1)
    silent["labels"] = torch.full_like(silent["labels"], -100)
    assert torch.equal(engine.evaluate([silent, data]), engine.evaluate(data))
    forward = type(model).forward
    with monkeypatch.context() as named_by_batches:  # a forward that does not name what it takes
        named_by_batches.setattr(type(model), "forward", lambda self, **batch: forward(self, **batch))
        assert torch.equal(engine.evaluate([silent, data]), engine.evaluate(data))
    for given, text in [
        ([], "there is none"),
        ([silent, silent], "none has a label to predict"),
        ({"input_ids": data["input_ids"]}, "it has no labels"),
    ]:
        with pytest.raises(UserError, match=text):
            engine.evaluate(given)
    engine.close()


def test_an_encoder_decoder_is_evaluated_over_all_its_labels_and_writes_what_it_writes_alone() -> None:
    model, plain = t5(), t5().eval()
    engine = prepare(
        model, batch_of(), optimizer=torch.optim.AdamW(model.parameters(), fused=True), device="cpu", measure=False
    )
    data = [batch_of(0), batch_of(1)]
    data[1]["labels"][:, 4:] = -100
    with torch.no_grad():
        first, second = (float(plain(**batch).loss) for batch in data)
    assert float(engine.evaluate(data)) == pytest.approx((32 * first + 8 * second) / 40, rel=1e-6)
    said = plain.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)[:, 1:].tolist()
    assert engine.generate([[5, 6, 7]], new_tokens=4) == said
    engine.close()


def test_a_restored_model_is_plain_again() -> None:
    model = model_of().eval()
    model.config.use_cache = True
    engine = engine_of(model, optimizer_of(model), batch_of())
    engine.step(batch_of())
    assert model.config.use_cache is False and model.training
    engine.restore()
    assert model.config.use_cache is True and not any(module.training for module in model.modules())
    loss = model(**batch_of()).loss
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_frozen_parameters_stay_and_cost_no_gradients_and_no_states() -> None:
    def half_frozen() -> nn.Module:
        model = model_of()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.2" in name or "layers.1.mlp" in name)
        return model

    steps = [[batch_of(n)] for n in range(3)]
    plain, model = half_frozen(), half_frozen()
    expected = plain_loop(plain, steps)
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)
    engine = engine_of(model, optimizer, batch_of(), seed=7, gpu_budget="3MB")
    moved = {item for stage in engine.plan.stages for item in (*stage.prefetch, *stage.offload)}
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert {item.kind for item in moved if item.name in frozen} == {"w"}
    assert not {item for stage in engine.plan.stages for item in stage.offload if item.name in frozen}
    for (batch,), loss in zip(steps, expected, strict=True):
        assert torch.equal(engine.step(batch), loss)
        schedule.step()
    assert equal(engine.restore(), plain)


class _Twice(nn.Module):
    """Calls another module two times."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x) + self.module(0.5 * x)


def test_modules_called_twice_within_a_layer_and_between_layers_equal_plain_pytorch() -> None:
    def with_calls() -> nn.Module:
        model = model_of()
        for layer in model.model.layers:
            layer.mlp = _Twice(layer.mlp)
        model.model.norm = _Twice(model.model.norm)
        return model

    steps = [[batch_of(10 * n), batch_of(10 * n + 1)] for n in range(3)]
    plain, model = with_calls(), with_calls()
    expected = plain_loop(plain, steps)
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)
    engine = engine_of(model, optimizer, steps[0], seed=7, gpu_budget="6MB")
    for batches, loss in zip(steps, expected, strict=True):
        assert torch.equal(engine.step(batches), loss)
        schedule.step()
    assert equal(engine.restore(), plain)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("slices", [1, 2])
def test_layers_that_run_twice_equal_plain_pytorch_with_one_micro_batch_and_nearly_with_several(slices: int) -> None:
    def with_calls() -> nn.Module:
        model = model_of()
        model.model.layers = nn.ModuleList([*model.model.layers[:2], *model.model.layers[:2]])
        return model

    steps = [[batch_of(10 * n + k) for k in range(slices)] for n in range(3)]
    plain, model = with_calls(), with_calls()
    layers = list(model.model.layers)
    expected = plain_loop(plain, steps)
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)
    engine = engine_of(model, optimizer, steps[0], seed=7, gpu_budget="5.5MB")
    assert any(stage.prefetch for stage in engine.plan.stages), "everything fits: the test shows nothing"
    for batches, loss in zip(steps, expected, strict=True):
        torch.testing.assert_close(engine.step(batches), loss, rtol=1e-5 * (slices > 1), atol=0)
        schedule.step()
    restored = engine.restore()
    assert all(a is b for a, b in zip(restored.model.layers, layers, strict=True))
    assert equal(restored, plain) or slices > 1
    for batch in steps[0]:
        torch.testing.assert_close(restored.eval()(**batch).loss, plain.eval()(**batch).loss, rtol=1e-5, atol=0)


def test_a_loop_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    steps = [[batch_of(n)] for n in range(4)]
    plain, model = model_of(), model_of()
    expected = plain_loop(plain, steps)

    def loop(engine: LoopEngine, optimizer: torch.optim.AdamW, numbers: range) -> list[Tensor]:
        schedule = schedule_of(optimizer)
        losses = []
        for number in range(numbers.stop):
            if number in numbers:
                losses.append(engine.step(steps[number]))
            else:
                optimizer.step()  # a scheduler is brought back by walking it, or from its own state
            schedule.step()
        return losses

    optimizer = optimizer_of(model)
    engine = engine_of(model, optimizer, batch_of(), seed=7)
    first = loop(engine, optimizer, range(2))
    assert engine.save(tmp_path / "mine") == tmp_path / "mine/step-2"
    engine.close()
    again = model_of()
    optimizer = optimizer_of(again)
    engine = engine_of(again, optimizer, batch_of(), seed=7)
    engine.load(tmp_path / "mine")
    assert engine.steps_done == 2
    second = loop(engine, optimizer, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip([*first, *second], expected, strict=True))
    engine.save(tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["step-4"]
    assert equal(engine.restore(), plain)
    with pytest.raises(UserError, match="There is no checkpoint in") as caught:
        engine.load(tmp_path / "other")
    assert caught.value.code == "no-checkpoint"


def test_the_example_trains_within_its_budget_and_writes() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples/own_loop.py", "3"], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "The device holds" in lines[0] and lines[1].startswith("step 1: loss ")
    assert any(line.startswith("def wrap(") for line in lines)
