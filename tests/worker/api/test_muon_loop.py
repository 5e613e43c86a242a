"""A loop of one's own with Muon for matrices beside AdamW: the numbers of plain PyTorch; what is refused."""

from __future__ import annotations

import pytest
import torch

from planner.errors import UserError
from planner.optimizers.muon import Muon
from tests.support.own_loop import engine_of, equal, model_of
from tests.support.tiny_models import batch_of
from worker.data.seeds import micro_batch_seed


def optimizers_of(model, **settings):
    matrices = frozenset(Muon.chosen(model))
    parts = [[p for n, p in model.named_parameters() if (n in matrices) == wanted] for wanted in (True, False)]
    return [torch.optim.Muon(parts[0], **{"lr": 2e-2, **settings}), torch.optim.AdamW(parts[1], lr=1e-2, fused=True)]


def schedules_of(optimizers):
    return [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10) for optimizer in optimizers]


def plain_losses(model, batches):
    optimizers, losses = optimizers_of(model), []
    schedules = schedules_of(optimizers)
    for number, batch in enumerate(batches):
        torch.manual_seed(micro_batch_seed(7, number, 0))
        losses.append(model(**batch).loss)
        losses[-1].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for each in (*optimizers, *schedules):
            each.step()
        model.zero_grad()
    return [loss.detach() for loss in losses]


def test_a_loop_with_both_gives_the_numbers_of_plain_pytorch():
    batches = [batch_of(10 * n) for n in range(4)]
    plain, model = model_of(), model_of()
    expected, optimizers = plain_losses(plain, batches), optimizers_of(model)
    schedules = schedules_of(optimizers)
    engine = engine_of(model, optimizers, batches[0], seed=7)
    assert any(stage.prefetch for stage in engine.plan.stages), "everything fits: the test shows nothing"
    for batch, loss in zip(batches, expected, strict=True):
        assert torch.equal(engine.step(batch), loss)
        for schedule in schedules:
            schedule.step()
    assert equal(engine.restore(), plain)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: optimizers_of(m, ns_steps=6), r"its ns_steps is 6(?s:.*)leave ns_steps out: it is 5"),
        (lambda m: optimizers_of(m, nesterov=False), "its nesterov is False"),
        (lambda m: optimizers_of(m)[0], "it does not have lm_head.weight"),
        (
            lambda m: [*optimizers_of(m), torch.optim.AdamW(m.lm_head.parameters(), fused=True)],
            r"two of them have lm_head.weight(?s:.*)give each parameter to one optimizer",
        ),
        (lambda m: [*optimizers_of(m), torch.optim.SGD(m.parameters())], r"it is SGD(?s:.*)beside it torch.optim.Muon"),
    ],
    ids=["steps", "no nesterov", "alone", "twice", "another"],
)
def test_optimizers_that_cannot_be_kept_to_are_refused(change, text):
    model = model_of()
    with pytest.raises(UserError, match=text) as caught:
        engine_of(model, change(model), batch_of())
    assert caught.value.code == "optimizer-not-usable"
