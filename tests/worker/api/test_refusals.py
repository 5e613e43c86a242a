"""What cannot be trained, or not by the plan that there is, is refused in a line that says what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.errors import UserError
from tests.support.own_loop import engine_of, equal, model_of, optimizer_of, plain_loop
from tests.support.tiny_models import batch_of, make_model
from worker.api import prepare


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: torch.optim.SGD(m.parameters()), "it is SGD"),
        (lambda m: torch.optim.AdamW(m.parameters()), r"it is not fused(?s:.*)AdamW\(\.\.\., fused=True\)"),
        (lambda m: torch.optim.AdamW(m.parameters(), foreach=True), "it is not fused"),
        (lambda m: torch.optim.AdamW(m.parameters(), fused=True, amsgrad=True), "it has amsgrad=True"),
        (lambda m: torch.optim.AdamW(m.parameters(), fused=True, maximize=True), "it has maximize=True"),
        (lambda m: torch.optim.AdamW(m.lm_head.parameters()), "it does not have model.embed_tokens.weight"),
        (
            lambda m: torch.optim.AdamW([*m.parameters(), nn.Parameter(torch.ones(3))]),
            r"a parameter of shape \[3\] that is not the model's",
        ),
    ],
    ids=["sgd", "not fused", "foreach", "amsgrad", "maximize", "missing", "foreign"],
)
def test_an_optimizer_that_cannot_be_kept_to_is_refused(change, text: str) -> None:
    model = model_of()
    with pytest.raises(UserError, match=text) as caught:
        engine_of(model, change(model), batch_of())
    assert caught.value.code == "optimizer-not-usable"


def test_a_stepped_optimizer_is_refused() -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    model(**batch_of()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(UserError, match="moments of steps already"):
        engine_of(model, optimizer, batch_of())


def test_batches_that_the_plan_is_not_for_are_refused_and_harm_nothing() -> None:
    plain, model = model_of(), model_of()
    engine = engine_of(model, optimizer_of(model), batch_of(), seed=7)
    long, other = batch_of(length=17), {**batch_of(), "position_ids": torch.arange(16)[None]}
    for batch, text in [
        (long, r"input_ids has shape \[2, 17\], the plan is for \[2, 16\] at most"),
        (other, "it has input_ids, labels, position_ids; the plan is for input_ids, labels"),
        ([batch_of(), batch_of()], "2 micro-batches, the plan is for 1"),
    ]:
        with pytest.raises(UserError, match=text) as caught:
            engine.step(batch)
        assert caught.value.code == "batch-not-usable"
    assert torch.equal(engine.step(batch_of(length=8)), plain_loop(plain, [[batch_of(length=8)]])[0])
    engine.close()


def test_samples_models_and_budgets_that_cannot_serve_are_refused() -> None:
    model = model_of().eval()
    model.config.use_cache = True
    optimizer = optimizer_of(model)
    unlabelled = {"input_ids": batch_of()["input_ids"]}
    for sample, text in [(unlabelled, "it has no labels"), ([], "there is none")]:
        with pytest.raises(UserError, match=text):
            prepare(model, sample, optimizer=optimizer, device="cpu")
    with pytest.raises(UserError, match="least possible"):
        engine_of(model, optimizer, batch_of(), gpu_budget="1KB")
    with pytest.raises(UserError, match="gpu_budget is more than the device has"):
        engine_of(model, optimizer, batch_of(), gpu_budget="1000TiB")
    assert equal(model, model_of()) and model.config.use_cache
    assert not any(module.training for module in model.modules())
    model.model.gradient_checkpointing = True
    with pytest.raises(UserError, match=r"model\.gradient_checkpointing_disable"):
        engine_of(model, optimizer, batch_of())
    half = make_model("llama", torch.float16)
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight is float16"):
        engine_of(half, optimizer_of(half), batch_of())
    hollow = model_of().to("meta")
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight is on meta"):
        engine_of(hollow, optimizer_of(hollow), batch_of())
