"""Computes what people look at while a model learns from preferences, with the names of TRL's metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from planner.job.schema import Job
from planner.keys.preference import DESIRABLE, REFERENCE
from planner.models.preference_loss import counts_of, sides
from planner.models.preferences import Side, compared, rewards
from planner.run.events import pair_words


def pair_figures(job: Job, batches: Sequence[Mapping[str, Tensor]], figures: Sequence[Tensor]) -> dict[str, float]:
    """Means over all pairs of `batches`, host tensors: `rewards_chosen`, `rewards_rejected` and their difference
    `rewards_margins`, `rewards_accuracies` (the share of pairs whose chosen answer has the greater reward),
    `logps_chosen` and `logps_rejected` (of ORPO and SimPO means over tokens, as in TRL). Empty for a job without
    preferences.

    `figures`: the log-probabilities that the engine gave for each batch's lines; of a reward model the rewards, and
    then there are no `logps`. With KTO the means are over good and over bad answers, without those of which there is
    none; there is no accuracy, but `kl`, the estimate of the divergence from the reference."""
    if job.preference is None:
        return {}
    if job.rewards:
        halves = [scores.cpu().chunk(2) for scores in figures]
        return _of_rewards(torch.cat([good for good, _ in halves]), torch.cat([bad for _, bad in halves]))
    scored = [_scored(batch, sums.cpu()) for batch, sums in zip(batches, figures, strict=True)]
    first, second = (_all([pair[side] for pair in scored]) for side in (0, 1))
    if job.preference == "kto":
        return _of_answers(job, first, [pair[1] for pair in scored], torch.cat([b[DESIRABLE] for b in batches]).bool())
    return {
        **_of_rewards(rewards(first, job), rewards(second, job)),
        "logps_chosen": _mean(compared(first, job)),
        "logps_rejected": _mean(compared(second, job)),
    }


def said_of(figures: Mapping[str, float]) -> str:
    """What the log says of a step's or an evaluation's figures, after its loss; "" where there are none."""
    return "".join(f"  {words}" for words in pair_words(figures))


def _of_rewards(good: Tensor, bad: Tensor) -> dict[str, float]:
    return {
        "rewards_chosen": _mean(good),
        "rewards_rejected": _mean(bad),
        "rewards_margins": _mean(good - bad),
        "rewards_accuracies": _mean((good > bad).float()),
    }


def _of_answers(job: Job, answers: Side, others: Sequence[Side], desirable: Tensor) -> dict[str, float]:
    found = {}
    for name, which in (("chosen", desirable), ("rejected", ~desirable)):
        if which.any():
            found[f"rewards_{name}"] = _mean(rewards(answers, job)[which])
            found[f"logps_{name}"] = _mean(answers.logps[which])
    if {"rewards_chosen", "rewards_rejected"} <= found.keys():
        found["rewards_margins"] = found["rewards_chosen"] - found["rewards_rejected"]
    return {**found, "kl": _mean(torch.stack([other.ratios.mean().clamp(min=0) for other in others]))}


def _scored(batch: Mapping[str, Tensor], sums: Tensor) -> tuple[Side, Side]:
    more = {name: batch[name] for name in (REFERENCE, DESIRABLE) if name in batch}
    return sides(sums, counts_of(batch["labels"]), more)


def _all(parts: Sequence[Side]) -> Side:
    references = [part.reference for part in parts if part.reference is not None]
    return Side(
        logps=torch.cat([part.logps for part in parts]),
        counts=torch.cat([part.counts for part in parts]),
        reference=torch.cat(references) if references else None,
    )


def _mean(values: Tensor) -> float:
    return float(values.double().mean())
