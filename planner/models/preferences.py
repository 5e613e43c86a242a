"""The losses that learn from preferences, as functions of the log-probabilities of whole answers.

Each is a few operations on tensors with one number for each pair. Their order is TRL's, so that the last bits are, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from planner.keys.preference import PreferenceKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One answer of each pair. All are [pairs], in fp32: `logps`, the sum of the log-probabilities of the answer's
    tokens; `reference`, the same by the reference model (None where the loss has none); `counts`, the number of these
    tokens."""

    logps: Tensor
    counts: Tensor
    reference: Tensor | None = None

    @property
    def ratios(self) -> Tensor:
        """The logarithm of the answer's probability divided by that under the reference, [pairs]."""
        assert self.reference is not None
        return self.logps - self.reference

    @property
    def means(self) -> Tensor:
        """The mean log-probability of the answer's tokens, [pairs]."""
        return self.logps / self.counts.clamp(min=1)


PairLoss = Callable[[Side, Side, PreferenceKeys], Tensor]
"""A function of the chosen and the rejected answers and the job's keys that returns the loss of each pair, [pairs]."""


def dpo(chosen: Side, rejected: Side, job: PreferenceKeys) -> Tensor:
    """DPO (Rafailov et al. 2023, arXiv 2305.18290, equation 7). With `preference_smoothing` ε it is conservative DPO
    (Mitchell 2023): a share ε of the pairs is assumed to have its answers exchanged."""
    return _logistic(chosen.ratios - rejected.ratios, job)


def hinge(chosen: Side, rejected: Side, job: PreferenceKeys) -> Tensor:
    """The hinge loss of SLiC (Zhao et al. 2023, arXiv 2305.10425) on DPO's margin, with margin 1."""
    return torch.relu(1 - job.preference_beta * (chosen.ratios - rejected.ratios))


def ipo(chosen: Side, rejected: Side, job: PreferenceKeys) -> Tensor:
    """IPO (Azar et al. 2023, arXiv 2310.12036, equation 17); `preference_beta` is its τ. As in TRL, and as its authors
    do, log-ratios are means over an answer's tokens."""
    margin = chosen.ratios / chosen.counts.clamp(min=1) - rejected.ratios / rejected.counts.clamp(min=1)
    return (margin - 1 / (2 * job.preference_beta)) ** 2


def robust(chosen: Side, rejected: Side, job: PreferenceKeys) -> Tensor:
    """Robust DPO (Chowdhury et al. 2024, arXiv 2403.00409): DPO's loss without the bias that a share
    `preference_smoothing` of exchanged answers gives it."""
    margin, beta, wrong = chosen.ratios - rejected.ratios, job.preference_beta, job.preference_smoothing
    clean, exchanged = -(1 - wrong) * F.logsigmoid(beta * margin), -wrong * F.logsigmoid(-beta * margin)
    return (clean - exchanged) / (1 - 2 * wrong)


def orpo(chosen: Side, rejected: Side, job: PreferenceKeys) -> Tensor:
    """The odds-ratio part of ORPO (Hong et al. 2024, arXiv 2403.07691, equations 4 and 7), times `preference_beta`,
    which is the paper's λ. The loss on chosen answers is added by `sft_weight`."""
    good, bad = chosen.means, rejected.means
    log_odds = (good - bad) - (_log1mexp(good) - _log1mexp(bad))
    return -(job.preference_beta * F.logsigmoid(log_odds))


def cpo(chosen: Side, rejected: Side, job: PreferenceKeys) -> Tensor:
    """The preference part of CPO (Xu et al. 2024, arXiv 2401.08417, equation 3), which is DPO with a uniform reference.
    The loss on chosen answers is added by `sft_weight`."""
    return _logistic(chosen.logps - rejected.logps, job)


def simpo(chosen: Side, rejected: Side, job: PreferenceKeys) -> Tensor:
    """SimPO (Meng et al. 2024, arXiv 2405.14734, equation 6): mean log-probabilities, and a margin `simpo_gamma`."""
    return _logistic(chosen.means - rejected.means - job.simpo_gamma / job.preference_beta, job)


def reward(chosen: Tensor, rejected: Tensor, job: PreferenceKeys) -> Tensor:
    """The loss of a reward model (Ouyang et al. 2022, arXiv 2203.02155, equation 1): minus the log-likelihood, by the
    model of Bradley and Terry (1952), that the answer with the greater reward is preferred. `chosen`, `rejected`: the
    rewards of a micro-batch's answers, [pairs]. `center_rewards_coefficient` draws the sums of the two rewards to 0
    (Eisenstein et al. 2023, arXiv 2312.09244, equation 2). Returns the mean over the pairs."""
    loss = -F.logsigmoid(chosen - rejected).mean()
    if (weight := job.center_rewards_coefficient) is None:
        return loss
    return loss + weight * torch.mean((chosen + rejected) ** 2)


def kto(answer: Side, other: Side, desirable: Tensor, job: PreferenceKeys) -> Tensor:
    """KTO (Ethayarajh et al. 2024, arXiv 2402.01306): the loss of each of the unpaired `answer`s.
    `desirable` [answers]: whether it is a good one. `other`: for each prompt the answer to another one; the mean of
    their log-ratios over the micro-batch, at least 0 and without a gradient, is the estimate of the divergence z."""
    beta, ratios = job.preference_beta, answer.ratios
    divergence = other.ratios.mean().detach().clamp(min=0)
    good = job.desirable_weight * (1 - torch.sigmoid(beta * (ratios - divergence)))
    bad = job.undesirable_weight * (1 - torch.sigmoid(beta * (divergence - ratios)))
    return torch.where(desirable, good, bad)


PAIR_LOSSES: Mapping[str, PairLoss] = {
    "dpo": dpo,
    "hinge": hinge,
    "ipo": ipo,
    "robust": robust,
    "orpo": orpo,
    "cpo": cpo,
    "simpo": simpo,
}
"""Value of the key `preference` -> the loss of a pair."""
_OF_MEANS = frozenset({"orpo", "simpo"})


def rewards(answers: Side, job: PreferenceKeys) -> Tensor:
    """The implicit reward of each answer, [answers]: `preference_beta` times what the loss compares."""
    return job.preference_beta * (answers.ratios if job.refers else compared(answers, job))


def compared(answers: Side, job: PreferenceKeys) -> Tensor:
    """The log-probabilities of answers that the loss compares, without a reference; [answers]."""
    return answers.means if job.preference in _OF_MEANS else answers.logps


def _logistic(margin: Tensor, job: PreferenceKeys) -> Tensor:
    """Minus the log-likelihood of Bradley and Terry's model for these differences of log-probabilities, with
    `preference_smoothing`; [pairs]."""
    beta, wrong = job.preference_beta, job.preference_smoothing
    if not wrong:
        return -F.logsigmoid(beta * margin)
    return -F.logsigmoid(beta * margin) * (1 - wrong) - F.logsigmoid(-beta * margin) * wrong


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x <= 0, without cancellation (Mächler 2012). At 0, where that is minus infinity, it is as at
    the greatest number below 0, without a gradient."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    far = x < -math.log(2)
    # Each formula gets a harmless number in place of what is the other's: its gradient there would be 0 times infinity.
    return torch.where(
        far, torch.log1p(-torch.exp(torch.where(far, x, -1.0))), torch.log(-torch.expm1(torch.where(far, -0.5, x)))
    )
