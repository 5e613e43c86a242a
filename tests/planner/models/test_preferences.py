"""The losses that learn from preferences, against their equations in plain numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from planner.keys.preference import PREFERENCES, REWARD, PreferenceKeys
from planner.models.preferences import PAIR_LOSSES, Side, kto, rewards

CHOSEN, REJECTED = (-3.0, -8.5, -1.25), (-4.0, -6.0, -7.5)
CHOSEN_COUNTS, REJECTED_COUNTS = (3, 5, 1), (2, 6, 4)
CHOSEN_REFERENCE, REJECTED_REFERENCE = (-3.5, -7.0, -2.0), (-3.0, -6.5, -7.0)
DESIRABLE = (True, False, True)


def keys_of(preference: str, **keys: Any) -> PreferenceKeys:
    return PreferenceKeys(preference=preference, preference_beta=0.4, **keys)


def side_of(logps: Sequence[float] | Tensor, counts: Sequence[int], reference: Sequence[float]) -> Side:
    given = logps if isinstance(logps, Tensor) else torch.tensor(logps, dtype=torch.float64)
    return Side(logps=given, counts=torch.tensor(counts), reference=torch.tensor(reference, dtype=given.dtype))


def chosen_side(logps: Sequence[float] | Tensor = CHOSEN) -> Side:
    return side_of(logps, CHOSEN_COUNTS, CHOSEN_REFERENCE)


def rejected_side(logps: Sequence[float] | Tensor = REJECTED) -> Side:
    return side_of(logps, REJECTED_COUNTS, REJECTED_REFERENCE)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def odds(probability: float) -> float:
    return probability / (1 - probability)


Equation = Callable[[float, float, int, int, float, float], float]
"""The loss of a pair from the log-probabilities of the chosen and the rejected answer (w, v), their numbers of tokens
(n, m), and their log-probabilities under the reference (r, s); beta is 0.4."""
BETA = 0.4
EQUATIONS: dict[str, tuple[str, dict[str, Any], Equation]] = {
    "dpo": ("dpo", {}, lambda w, v, n, m, r, s: -math.log(sigmoid(BETA * ((w - r) - (v - s))))),
    "conservative dpo": (
        "dpo",
        {"preference_smoothing": 0.1},
        lambda w, v, n, m, r, s: (
            -0.9 * math.log(sigmoid(BETA * ((w - r) - (v - s)))) - 0.1 * math.log(sigmoid(-BETA * ((w - r) - (v - s))))
        ),
    ),
    "hinge": ("hinge", {}, lambda w, v, n, m, r, s: max(0.0, 1 - BETA * ((w - r) - (v - s)))),
    "ipo": ("ipo", {}, lambda w, v, n, m, r, s: ((w - r) / n - (v - s) / m - 1 / (2 * BETA)) ** 2),
    "robust": (
        "robust",
        {"preference_smoothing": 0.2},
        lambda w, v, n, m, r, s: (
            (
                -0.8 * math.log(sigmoid(BETA * ((w - r) - (v - s))))
                + 0.2 * math.log(sigmoid(-BETA * ((w - r) - (v - s))))
            )
            / 0.6
        ),
    ),
    "orpo": (
        "orpo",
        {},
        lambda w, v, n, m, r, s: -BETA * math.log(sigmoid(math.log(odds(math.exp(w / n)) / odds(math.exp(v / m))))),
    ),
    "cpo": ("cpo", {}, lambda w, v, n, m, r, s: -math.log(sigmoid(BETA * (w - v)))),
    "smoothed cpo": (
        "cpo",
        {"preference_smoothing": 0.3},
        lambda w, v, n, m, r, s: -0.7 * math.log(sigmoid(BETA * (w - v))) - 0.3 * math.log(sigmoid(-BETA * (w - v))),
    ),
    "simpo": (
        "simpo",
        {"simpo_gamma": 0.7},
        lambda w, v, n, m, r, s: -math.log(sigmoid(BETA * w / n - BETA * v / m - 0.7)),
    ),
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_the_loss_of_each_pair_is_its_equation(name: str) -> None:
    preference, keys, equation = EQUATIONS[name]
    found = PAIR_LOSSES[preference](chosen_side(), rejected_side(), keys_of(preference, **keys))
    each = zip(
        CHOSEN,
        REJECTED,
        CHOSEN_COUNTS,
        REJECTED_COUNTS,
        CHOSEN_REFERENCE,
        REJECTED_REFERENCE,
        strict=True,
    )
    assert found.tolist() == pytest.approx([equation(*pair) for pair in each], rel=1e-12)


def test_every_loss_of_pairs_has_an_equation_here() -> None:
    assert (
        {preference for preference, _, _ in EQUATIONS.values()}
        == PAIR_LOSSES.keys()
        == {*PREFERENCES} - {"kto", REWARD}
    )


@pytest.mark.parametrize("name", EQUATIONS)
def test_the_gradient_of_each_loss_is_that_of_finite_differences(name: str) -> None:
    preference, keys, _ = EQUATIONS[name]

    def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        return PAIR_LOSSES[preference](chosen_side(chosen), rejected_side(rejected), keys_of(preference, **keys))

    given = [torch.tensor(logps, dtype=torch.float64, requires_grad=True) for logps in (CHOSEN, REJECTED)]
    assert torch.autograd.gradcheck(loss, given)


def kto_of(desirable: Sequence[bool], **keys: Any) -> Tensor:
    return kto(chosen_side(), rejected_side(), torch.tensor(desirable), keys_of("kto", **keys))


@pytest.mark.parametrize("desirable", [DESIRABLE, (True,) * 3, (False,) * 3], ids=["both", "no bad", "no good"])
def test_ktos_loss_of_each_answer_is_its_equation(desirable: tuple[bool, ...]) -> None:
    kl = max(0.0, fmean(v - s for v, s in zip(REJECTED, REJECTED_REFERENCE, strict=True)))
    expected = [
        1.5 * (1 - sigmoid(BETA * ((w - r) - kl))) if good else 0.5 * (1 - sigmoid(BETA * (kl - (w - r))))
        for w, r, good in zip(CHOSEN, CHOSEN_REFERENCE, desirable, strict=True)
    ]
    found = kto_of(desirable, desirable_weight=1.5, undesirable_weight=0.5)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_the_divergence_of_kto_is_never_negative_and_has_no_gradient() -> None:
    answers, keys = chosen_side(), keys_of("kto")
    for shift, divergence in ((-9.0, 0.0), (2.0, 2.0)):
        others = (torch.tensor(REJECTED_REFERENCE, dtype=torch.float64) + shift).requires_grad_()
        logps = torch.tensor(CHOSEN, dtype=torch.float64, requires_grad=True)
        losses = kto(chosen_side(logps), rejected_side(others), torch.tensor(DESIRABLE), keys)
        good = 1 - torch.sigmoid(BETA * (answers.ratios - divergence))
        assert losses[0].item() == pytest.approx(good[0].item(), rel=1e-12)
        losses.sum().backward()
        assert others.grad is None
        assert logps.grad is not None


def test_the_gradient_of_ktos_loss_is_that_of_finite_differences() -> None:
    def loss(logps: Tensor) -> Tensor:
        return kto(chosen_side(logps), rejected_side(), torch.tensor(DESIRABLE), keys_of("kto"))

    assert torch.autograd.gradcheck(loss, torch.tensor(CHOSEN, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("preference", [loss for loss in PREFERENCES if loss != REWARD])
def test_rewards_are_beta_times_what_the_loss_compares(preference: str) -> None:
    found = rewards(chosen_side(), keys_of(preference)).tolist()
    compared = {
        **{key: [w / n for w, n in zip(CHOSEN, CHOSEN_COUNTS, strict=True)] for key in ("orpo", "simpo")},
        "cpo": list(CHOSEN),
    }
    ratios = [w - r for w, r in zip(CHOSEN, CHOSEN_REFERENCE, strict=True)]
    assert found == pytest.approx([BETA * value for value in compared.get(preference, ratios)], rel=1e-12)


# ---- numbers at the borders of fp32


def loss_and_gradients(preference: str, chosen: Sequence[float], rejected: Sequence[float], **keys: Any) -> list[float]:
    """The losses in fp32 of pairs of answers of one token, and the gradients by their log-probabilities."""
    given = [torch.tensor(logps, requires_grad=True) for logps in (chosen, rejected)]
    ones, zeros = [1] * len(chosen), [0.0] * len(chosen)
    sides = [side_of(logps, ones, zeros) for logps in given]
    if preference == "kto":
        losses = kto(*sides, torch.tensor(DESIRABLE[: len(chosen)]), keys_of(preference, **keys))
    else:
        losses = PAIR_LOSSES[preference](*sides, keys_of(preference, **keys))
    losses.sum().backward()
    return [*losses.tolist(), *(g for logps in given if logps.grad is not None for g in logps.grad.tolist())]


@pytest.mark.parametrize("preference", [loss for loss in PREFERENCES if loss != REWARD])
def test_large_margins_do_not_give_what_is_no_number(preference: str) -> None:
    keys = {"preference_smoothing": 0.1} if preference in ("dpo", "robust", "cpo", "simpo") else {}
    values = loss_and_gradients(preference, [-1e-4, -3e4, -3e4], [-3e4, -1e-4, -3e4], **keys)
    assert all(map(math.isfinite, values)), values


@pytest.mark.parametrize("chosen", [-0.0, -1e-38, -3e-9, -1e-7, -0.693, -80.0, -1e4])
@pytest.mark.parametrize("rejected", [-0.0, -1e-38, -3e-9, -1e-7, -0.693, -80.0, -1e4])
def test_orpos_loss_and_gradient_are_finite_for_certain_and_for_impossible_answers(
    chosen: float, rejected: float
) -> None:
    values = loss_and_gradients("orpo", [chosen], [rejected])
    assert all(map(math.isfinite, values)), values


@pytest.mark.parametrize("mean", [-3e-9, -1e-7, -1e-3, -0.69, -0.70, -5.0, -80.0])
def test_the_odds_of_orpo_have_no_cancellation(mean: float) -> None:
    """In fp32 1 - exp(-3e-9) is 0; the odds are against an even answer, whose log-odds are 0."""
    loss, by_chosen, _ = loss_and_gradients("orpo", [mean], [-math.log(2)])
    log_odds = mean - math.log(-math.expm1(mean))
    assert loss == pytest.approx(BETA * math.log1p(math.exp(-log_odds)), rel=1e-4)
    assert by_chosen == pytest.approx(-BETA / (1 + math.exp(log_odds)) / -math.expm1(mean), rel=1e-4)
