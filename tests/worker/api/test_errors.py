"""Errors in the middle of a user's loop: nothing is lost that need not be, and what is torn is said."""

from __future__ import annotations

import logging

import pytest
import torch

from planner.errors import UserError
from tests.support.own_loop import engine_of, equal, model_of, optimizer_of, plain_loop, schedule_of
from tests.support.tiny_models import VOCABULARY, batch_of
from worker.engine.gradients import Gradients


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("slices", [1, 2])
def test_a_loop_goes_on_after_a_batch_that_the_model_fails_on(slices: int, dtype: torch.dtype) -> None:
    steps = [[batch_of(10 * n + k) for k in range(slices)] for n in range(4)]
    plain, model = model_of(dtype), model_of(dtype)
    expected = plain_loop(plain, steps)
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)
    engine = engine_of(model, optimizer, steps[0], seed=7, gpu_budget="5MB" if dtype == torch.float32 else "3MB")
    wrong = [batch_of(k) for k in range(slices)]
    wrong[-1]["input_ids"][0, 3] = VOCABULARY + 5
    for batches, loss in zip(steps, expected, strict=True):
        with pytest.raises(IndexError):
            engine.step(wrong)
        assert torch.equal(engine.step(batches), loss)
        schedule.step()
    assert equal(engine.restore(), plain)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_model_restored_after_an_error_in_its_forward_has_the_weights_of_the_last_step(
    error: type[BaseException],
) -> None:
    plain, model = model_of(), model_of()
    plain_loop(plain, [[batch_of(0)], [batch_of(1)]], make_schedule=lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1))
    failing = False

    def fail(*_: object) -> None:
        if failing:
            raise error("mine")

    model.model.norm.register_forward_hook(fail)
    engine = engine_of(model, optimizer_of(model), batch_of(), seed=7)
    engine.step(batch_of(0))
    engine.step(batch_of(1))
    failing = True
    with pytest.raises(error, match="mine"):
        engine.step(batch_of(2))
    failing = False
    assert equal(engine.restore(), plain)
    assert model(**batch_of()).loss.isfinite()


def test_weights_torn_in_the_middle_of_updates_are_told_and_come_back_finite(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of()
    engine = engine_of(model, optimizer_of(model), batch_of(), max_grad_norm=None)
    engine.step(batch_of(0))
    add = Gradients.add

    def fail(self: Gradients, name: str, *args: object, **kwargs: object) -> None:
        if "layers.0" in name:
            raise RuntimeError("mine")
        add(self, name, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Gradients, "add", fail)
        with pytest.raises(RuntimeError, match="mine"):
            engine.step(batch_of(1))
    for use in (lambda: engine.step(batch_of(1)), lambda: engine.evaluate(batch_of(1)), lambda: engine.save("never")):
        with pytest.raises(UserError, match="in the middle of its updates") as caught:
            use()
        assert caught.value.code == "weights-torn"
    with caplog.at_level(logging.WARNING, logger="worker.api"):
        restored = engine.restore()
    assert "an error ended step 2 in the middle of its updates" in caplog.text
    assert all(p.isfinite().all() for p in restored.parameters())
    with pytest.raises(UserError, match="The engine has ended"):
        engine.restore()
