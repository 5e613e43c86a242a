"""Learning from preferences gives TRL's losses, gradients, weights and metrics on the same batches.

TRL's own trainers get the batches that a job has, in the job's order, with the job's reference. Two things keep the
last bits from being TRL's. One is its head: its trainers compute a token's log-probability as its logit minus
`logsumexp`, over the positions that are scored and in chunks, or row by row; here it is `log_softmax`. With that in
TRL's trainers all bits are equal, except where, secondly, TRL adds in another order: the loss on chosen answers over
all tokens at once (here over each answer first), and KTO's loss over good answers first. There, and with TRL's own
head, all is equal within rounding.

Last bits are small here, 1e-7 of the numbers, but a logarithm of a probability that is -60 has them at 4e-6, and Adam's
first steps divide gradients by themselves. So tests within rounding use a larger `adam_epsilon`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from planner.job.schema import Job
from tests.support.trl_preferences import (
    Trained,
    family_job,
    scored,
    trained_by_trl,
    trained_here,
    trained_under_a_plan,
    trl_batches,
    trl_trainer,
)
from worker.training.model import load_model

pytestmark = pytest.mark.usefixtures("one_thread")


STEADY = {"adam_epsilon": 1e-3}
LORA: dict[str, Any] = {"method": "lora", "lora_r": 4, "lora_dropout": 0.0}
METHODS: dict[str, dict[str, Any]] = {"full": {}, "lora": LORA}
EXACT: dict[str, dict[str, Any]] = {
    "dpo": {"preference": "dpo"},
    "hinge": {"preference": "hinge"},
    "ipo": {"preference": "ipo"},
    "robust": {"preference": "robust", "preference_smoothing": 0.2},
    "cpo-alone": {"preference": "cpo", "sft_weight": 0.0},
    "cpo-smoothed": {"preference": "cpo", "sft_weight": 0.0, "preference_smoothing": 0.1},
    "simpo": {"preference": "simpo", "simpo_gamma": 0.7},
}
"""Losses of which all bits are TRL's."""
SUMMED: dict[str, dict[str, Any]] = {
    "dpo-and-sft": {"preference": "dpo", "sft_weight": 0.3},
    "cpo": {"preference": "cpo"},
    "simpo-and-cpo": {"preference": "simpo", "sft_weight": 0.5},
    "orpo": {"preference": "orpo", "sft_on_prompt": True},  # TRL's supervised part covers the prompt
    "kto": {"preference": "kto"},
    "kto-weighted": {"preference": "kto", "desirable_weight": 1.5, "undesirable_weight": 0.7},
}
"""Losses of which TRL adds parts in another order."""
SHAPES = (
    # (family, seed of the data, rows of a micro-batch, micro-batches of a step)
    ("llama", 0, 2, 1),
    ("qwen2", 1, 3, 1),
    ("gpt_neox", 2, 1, 3),
    ("gemma3", 3, 3, 3),
    ("phi3", 4, 1, 1),
    ("mistral", 5, 2, 3),
    ("qwen3", 6, 3, 1),
)
of_all_shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))


def job_of(tmp_path: Path, shape: tuple[str, int, int, int], keys: dict[str, Any]) -> Job:
    family, seed, rows, slices = shape
    if keys["preference"] == "kto":
        rows = max(rows, 2)  # TRL's KTO refuses micro-batches of one answer
    sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": slices}
    return family_job(tmp_path, family, seed=seed, **{**sizes, **keys})


def assert_same_bits(ours: Trained, theirs: Trained) -> None:
    assert len(set(theirs.losses)) > 1, "it learned"
    assert ours.losses == theirs.losses
    assert ours.rates == pytest.approx(theirs.rates, rel=1e-12)
    for one, other in ((ours.gradients, theirs.gradients), (ours.weights, theirs.weights)):
        assert one.keys() == other.keys()
        assert [name for name in other if not torch.equal(one[name], other[name])] == []


def assert_same_within_rounding(ours: Trained, theirs: Trained) -> None:
    assert len(set(theirs.losses)) > 1, "it learned"
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6, abs=3e-6)
    assert ours.rates == pytest.approx(theirs.rates, rel=1e-12)
    assert_close(ours.gradients, theirs.gradients, 2e-6)
    assert_close(ours.weights, theirs.weights, 1e-5)


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    """As vectors, the difference is at most `tolerance` of the length."""
    assert ours.keys() == theirs.keys()
    one, other = (torch.cat([tensors[name].flatten() for name in theirs]).double() for tensors in (ours, theirs))
    assert float((one - other).norm()) <= tolerance * float(other.norm())


@pytest.mark.sweep(4)
@of_all_shapes
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", EXACT)
def test_losses_gradients_and_weights_are_trls_bits_where_it_takes_log_softmax(
    tmp_path: Path, loss: str, method: str, shape: tuple[str, int, int, int]
) -> None:
    job = job_of(tmp_path, shape, {**EXACT[loss], **METHODS[method]})
    batches = scored(job)
    theirs = trained_by_trl(tmp_path, job, batches, own_head=False)
    assert_same_bits(ours := trained_here(job, batches), theirs)
    assert_same_figures(job, ours, theirs)


@pytest.mark.sweep(4)
@of_all_shapes
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", [*EXACT, *SUMMED])
def test_losses_gradients_and_weights_are_those_of_trls_own_head_within_rounding(
    tmp_path: Path, loss: str, method: str, shape: tuple[str, int, int, int]
) -> None:
    job = job_of(tmp_path, shape, {**(EXACT | SUMMED)[loss], **METHODS[method], **STEADY})
    batches = scored(job)
    theirs = trained_by_trl(tmp_path, job, batches, own_head=True)
    assert_same_within_rounding(trained_here(job, batches), theirs)


@pytest.mark.sweep(4)
@of_all_shapes
@pytest.mark.parametrize("loss", SUMMED)
def test_what_trl_adds_in_another_order_is_the_same_within_rounding_and_so_are_its_metrics(
    tmp_path: Path, loss: str, shape: tuple[str, int, int, int]
) -> None:
    """With `log_softmax` in TRL's trainer, so that the order of sums is all that differs."""
    job = job_of(tmp_path, shape, {**SUMMED[loss], **STEADY})
    batches = scored(job)
    theirs = trained_by_trl(tmp_path, job, batches, own_head=False)
    assert_same_within_rounding(ours := trained_here(job, batches), theirs)
    assert_same_figures(job, ours, theirs)


def assert_same_figures(job: Job, ours: Trained, theirs: Trained) -> None:
    """With one exception. Of KTO's micro-batches TRL logs means of means, whatever the number of good and bad answers
    in each, and margins only of those with both; here all answers of a step count alike."""
    several = job.preference == "kto" and job.gradient_accumulation_steps > 1
    for own, other in zip(ours.figures, theirs.figures, strict=True):
        assert own.keys() >= other.keys() if several else own.keys() == other.keys()
        for name, value in other.items():
            if not several or name == "kl":
                assert own[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


PLANNED = ("llama", 0, 3, 2)


@pytest.mark.parametrize("keys", [{**EXACT["dpo"], **LORA}, EXACT["cpo-alone"]], ids=["dpo-lora", "cpo-alone-full"])
def test_an_engine_learns_the_bits_that_trl_learns(tmp_path: Path, keys: dict[str, Any]) -> None:
    job = job_of(tmp_path, PLANNED, keys)
    ours, batches = trained_under_a_plan(job, tmp_path)
    theirs = trained_by_trl(tmp_path, job, batches, own_head=False)
    theirs.gradients = {}  # an engine does not keep them
    assert_same_bits(ours, theirs)
    assert_same_figures(job, ours, theirs)


@pytest.mark.parametrize(
    ("loss", "method", "planned"),
    [("dpo", "full", True), ("kto", "full", True), ("dpo", "lora", False), ("kto", "lora", False)],
)
def test_trl_computes_the_jobs_reference_and_learns_the_same_with_it(
    tmp_path: Path, loss: str, method: str, planned: bool
) -> None:
    """Within rounding: with TRL's own head. `planned`: by the engine, which takes seconds; else in plain PyTorch."""
    job = job_of(tmp_path, PLANNED, {"preference": loss, **METHODS[method], **STEADY})
    if planned:
        ours, batches = trained_under_a_plan(job, tmp_path)
    else:
        ours = trained_here(job, batches := scored(job))
    trainer = trl_trainer(tmp_path, job, batches, own_head=True)
    names = ("ref_logps", "ref_KL_logps") if loss == "kto" else ("ref_chosen_logps", "ref_rejected_logps")
    for batch in trl_batches(job, batches):
        for name, logps in zip(names, trainer.compute_ref_log_probs(trainer.model, batch), strict=True):
            assert float(batch[name].abs().min()) > 1
            torch.testing.assert_close(batch[name], logps, rtol=1e-6, atol=0)
    theirs = trained_by_trl(tmp_path, job, batches, own_head=True, own_reference=True)
    if planned:
        ours.gradients = theirs.gradients  # an engine does not keep them
    assert_same_within_rounding(ours, theirs)


# ---- what TRL does not have, by its equations, in fp64 and one token after another


def written_loss(job: Job, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """DPO, CPO, ORPO or SimPO with smoothed labels, and a supervised part that is a mean over answers: those over the
    answers' tokens, or over all tokens of their rows with `sft_on_prompt`."""
    pairs = len(batch["labels"]) // 2
    answers: list[Tensor] = []  # the log-probabilities of the answers' tokens, [tokens], row by row
    learned: list[Tensor] = []  # likewise of those that the supervised part is of
    for row, (ids, labels) in enumerate(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)):
        last = max(place for place, label in enumerate(labels) if label != -100)
        each = torch.stack([logits[row, place - 1].log_softmax(0)[ids[place]] for place in range(1, last + 1)])
        is_answer = torch.tensor([label != -100 for label in labels[1 : last + 1]])
        answers.append(each[is_answer])
        learned.append(each if job.sft_on_prompt else each[is_answer])
    total = torch.zeros((), dtype=torch.float64)
    beta, wrong = job.preference_beta, job.preference_smoothing
    for pair in range(pairs):
        chosen, rejected = answers[pair], answers[pair + pairs]
        if job.preference == "dpo":
            reference = batch["reference"].double()
            margin = (chosen.sum() - reference[pair]) - (rejected.sum() - reference[pair + pairs])
        elif job.preference == "cpo":
            margin = chosen.sum() - rejected.sum()
        elif job.preference == "simpo":
            margin = chosen.mean() - rejected.mean() - job.simpo_gamma / beta
        else:
            odds = [side.mean().exp() / (1 - side.mean().exp()) for side in (chosen, rejected)]
            margin = (odds[0] / odds[1]).log() / beta
        if job.preference == "orpo":
            total = total - beta * torch.sigmoid(beta * margin).log()
        else:
            right = torch.sigmoid(beta * margin)
            total = total - (1 - wrong) * right.log() - wrong * (1 - right).log()
        total = total - job.sft_share * learned[pair].mean()
    return total / pairs


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "keys",
    [
        {"preference": "dpo", "preference_smoothing": 0.1},  # conservative DPO, which TRL no longer has
        {"preference": "dpo", "sft_weight": 0.3, "loss_weighting": "documents"},  # LLaMA-Factory's pref_ftx
        {"preference": "cpo", "loss_weighting": "documents"},
        {"preference": "simpo", "sft_weight": 0.5, "preference_smoothing": 0.2, "loss_weighting": "documents"},
        {"preference": "orpo", "loss_weighting": "documents"},  # LLaMA-Factory's
        {"preference": "orpo", "loss_weighting": "documents", "sft_on_prompt": True},
    ],
    ids=lambda keys: "-".join(map(str, keys.values())),
)
def test_what_trl_does_not_have_is_as_its_equations_say(tmp_path: Path, keys: dict[str, Any], method: str) -> None:
    job = job_of(tmp_path, ("llama", 8, 3, 2), {**keys, **METHODS[method]})
    batches, model = scored(job), load_model(job)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape))  # otherwise it would be the reference
    exact = load_model(job).double()
    exact.load_state_dict(model.state_dict())
    causal: Any = exact.get_base_model() if method == "lora" else exact
    assert isinstance(causal, type(AutoModelForCausalLM.from_pretrained(job.model)))
    for batch in batches.step(0):
        loss = model(**batch).loss
        written = written_loss(job, causal(input_ids=batch["input_ids"]).logits, batch)
        assert loss.item() == pytest.approx(written.item(), rel=2e-6)
        assert written.item() != pytest.approx(math.log(2), rel=1e-3)
        loss.backward()
        written.backward()
    assert_close(*({n: p.grad for n, p in m.named_parameters() if p.requires_grad} for m in (model, exact)), 2e-6)
