"""The keys of a job that learns from preferences: pairs of a chosen and a rejected answer, or answers marked as good or
bad."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from planner.keys.base import Keys
from planner.keys.batch import AUTO
from planner.keys.fields import Name, NotNegative, Positive
from planner.keys.source import SWITCHED_OFF, Mistake, Source

Preference = Literal["dpo", "hinge", "ipo", "robust", "orpo", "cpo", "simpo", "kto", "reward"]
PREFERENCES: tuple[Preference, ...] = ("dpo", "hinge", "ipo", "robust", "orpo", "cpo", "simpo", "kto", "reward")
REWARD = "reward"
"""The value of `preference` that trains a reward model, which gives a text a number instead of writing one."""
REFERRING = frozenset({"dpo", "hinge", "ipo", "robust", "kto"})
"""The losses that compare the model with a reference, the model as it is before training."""
SMOOTHED = frozenset({"dpo", "robust", "cpo", "simpo"})
"""The losses in which some labels may be assumed to be wrong."""
SFT_WEIGHTS = {"orpo": 1.0, "cpo": 1.0}
"""The weight of the loss on chosen answers where `sft_weight` is null; 0 for other losses."""
REFERENCE, DESIRABLE = "reference", "desirable"
"""The names of what a micro-batch of preferences has beside tokens and labels (`planner.models.preference_loss`)."""
_PREFERENCE, _SIZE, _WEIGHTS = "preference", "per_device_train_batch_size", ("desirable_weight", "undesirable_weight")


class PreferenceKeys(Keys):
    """With these keys a job learns which of two answers is better, or which answers are good ([losses and
    data](../how-to/preferences.md))."""

    preference: Annotated[Preference | None, Field(description=f"one of {', '.join(PREFERENCES)}, or null")] = None
    """The loss of preferences; null: the job learns texts and answers. `dpo`, `hinge`, `ipo`, `robust` and `kto`
    compare the model with a reference; `orpo`, `cpo` and `simpo` do not; `reward` trains a reward model, which gives a
    text a number. `kto` learns from answers that are marked as good or bad, or from pairs, the others from pairs. The
    key cannot be used with `packing`, `method: lsp`, `group_by_length`, `min_sample_len` and encoder-decoders."""
    preference_beta: Positive = 0.1
    """β of the loss: how much a difference of log-probabilities counts. With losses that have a reference, a greater β
    keeps the model nearer to the reference. With `orpo` it is the weight of the odds ratio, with `ipo` its τ."""
    preference_smoothing: Annotated[
        float, Field(ge=0, lt=0.5, description="a number from 0 up to, not including, 0.5")
    ] = 0.0
    """The share of pairs whose two answers are assumed to be exchanged. It is for `dpo`, `robust`, `cpo` and `simpo`;
    `robust` needs it."""
    simpo_gamma: NotNegative = 0.5
    """γ of `simpo`, its margin. In a file of axolotl it is required."""
    sft_weight: Annotated[NotNegative | None, Field(description="a number, 0 or more, or null for the loss's own")] = (
        None
    )
    """The weight of the loss on chosen answers, as in supervised fine-tuning, which is added to the loss of
    preferences. With null it is 1 for `orpo` and `cpo`, else 0. This loss is a mean over the tokens of a micro-batch,
    as in TRL. With `loss_weighting: documents` it is a mean over its answers, as in LLaMA-Factory."""
    sft_on_prompt: Annotated[bool, Field(description="true or false")] = False
    """True: the loss on chosen answers includes the tokens of the prompt, as in TRL's ORPOTrainer."""
    desirable_weight: NotNegative = 1.0
    """With `kto`, the weight of good answers."""
    undesirable_weight: NotNegative = 1.0
    """With `kto`, the weight of bad answers."""
    ref_model: Annotated[Name, Field(description="a path, the id in model, or null")] = None
    """The folder of the model that is the reference. With null the reference is the job's model as it is before
    training. It must have the same shape. If the job continues an adapter, the id or path in `model` means the model
    without it."""
    center_rewards_coefficient: Annotated[
        NotNegative | None, Field(description="a number, 0 or more, or null for none")
    ] = None
    """With `reward`, the weight of the squared sum of a pair's rewards. This term keeps the mean of the rewards near
    0."""

    @property
    def refers(self) -> bool:
        """Whether the loss compares the model with a reference."""
        return self.preference in REFERRING

    @property
    def unit(self) -> str:
        """What a row of the data is, in a word: a "pair" of answers, an "answer" for KTO, or just a "row"."""
        return "row" if self.preference is None else "answer" if self.preference == "kto" else "pair"

    @property
    def rewards(self) -> bool:
        """Whether a reward model is trained: a sequence classifier with one label."""
        return self.preference == REWARD

    @property
    def sft_share(self) -> float:
        """The factor of the loss on chosen answers, as in supervised fine-tuning, in the job's loss."""
        return SFT_WEIGHTS.get(str(self.preference), 0.0) if self.sft_weight is None else self.sft_weight


_EXCLUDED: dict[str, tuple[tuple[object, ...], str]] = {
    "packing": ((False,), "the two answers of a pair must stay rows of their own"),
    "train_on": (("completions",), "the answers alone are scored, never the prompt"),
    "label_smoothing_factor": ((0, 0.0), "preference_smoothing is there for that purpose"),
    "max_target_length": ((None,), "encoder-decoders cannot learn from preferences"),
    "min_sample_len": ((None,), "it would leave out one answer of a pair"),
    "long_rows": (("cut", "drop", "refuse"), "its two answers would be cut in different places"),
    "group_by_length": ((False,), "pairs have two lengths"),
    "method": (("full", "lora"), "LSP for preferences is not there yet"),
}
"""Key -> its values that go together with `preference`, and why others do not."""

_WITHOUT_TEXT: dict[str, tuple[tuple[object, ...], str]] = {
    "exact": ((True,), "a reward model has no logits that could be computed in chunks"),
    "sample_prompts": ((None,), "a reward model writes no text"),
    "loss_weighting": (("tokens",), "whole answers get a reward, not their tokens"),
    "router_aux_loss_coef": ((None, "auto", 0, 0.0), "transformers' sequence classifiers have no loss of routers"),
    "router_aux_loss_mean": ((False,), "transformers' sequence classifiers have no loss of routers"),
    "long_rows": (("drop", "refuse"), "the reward is that of an answer's end, which a cut would leave out"),
}
"""The same for `preference: reward`, besides those in `_EXCLUDED`."""

_MOVED = (False, "orthogonal")
"""Initializations of adapters that change what the model computes."""

USERS: dict[str, frozenset[str]] = {
    "preference_beta": frozenset(PREFERENCES) - {REWARD},
    "center_rewards_coefficient": frozenset({REWARD}),
    "preference_smoothing": SMOOTHED,
    "simpo_gamma": frozenset({"simpo"}),
    "ref_model": REFERRING,
    "sft_weight": frozenset(PREFERENCES) - {"kto", REWARD},
    "sft_on_prompt": frozenset(PREFERENCES) - {"kto", REWARD},
    **dict.fromkeys(_WEIGHTS, frozenset({"kto"})),
}
"""Key -> the losses that use it."""


def averages_slices(loss: str | None, *, supervised: bool, weighting: object) -> bool:
    """Return whether the loss `loss` of preferences includes a mean over each micro-batch. `supervised`: with the loss
    on chosen answers; `weighting`: the job's `loss_weighting`."""
    return loss == "kto" or (loss is not None and supervised and weighting == "tokens")


def settle_preference(values: dict[str, Any]) -> tuple[str, ...]:
    """Fill in the keys that depend on `preference`, and return notes for the user. `values`: canonical key -> value,
    those of a file that people wrote. As in TRL, too long pairs are left out with `preference: reward`, and adapters
    have no dropout."""
    if values.get(_PREFERENCE) is None:
        return ()
    if values[_PREFERENCE] == REWARD:
        values.setdefault("long_rows", "drop")
    if values.get("method") != "lora" or values.get("adapter_name_or_path") is not None:
        return ()
    given, values["lora_dropout"] = values.get("lora_dropout"), 0.0
    return (
        () if given in SWITCHED_OFF else (f"lora_dropout is 0, not {given}: preferences are learned without dropout",)
    )


def check_preference(values: dict[str, Any], names: Mapping[str, str], source: Source) -> list[Mistake]:
    """Return the mistakes in the keys of preferences and in those that exclude them. `values`: canonical key -> value;
    `names`: canonical key -> the name that the file uses. Defaults are no mistake, as `resolved.yaml` has them for
    every job."""
    return list(_mistakes(values, names, source))


def _mistakes(values: Mapping[str, Any], names: Mapping[str, str], source: Source) -> Iterator[Mistake]:
    fields, loss = PreferenceKeys.model_fields, values.get(_PREFERENCE)
    given = {
        key
        for key in fields
        if key in values and values[key] is not None and values[key] != fields[key].default and key != _PREFERENCE
    }
    if loss is None:
        for key in fields:
            if key in given:
                text = f"it is for {_PREFERENCE}; give that too, or leave it out"
                yield source.mistake(names[key], "bad-value", text)
        return
    if loss not in PREFERENCES:  # reported elsewhere
        return
    for key, users in USERS.items():
        if key in given and loss not in users:
            its = ", ".join(sorted(users))
            yield source.mistake(names[key], "bad-value", f"{_PREFERENCE}: {loss} does not use it, only {its}")
    if loss == "robust" and not values.get("preference_smoothing"):
        name = names.get("preference_smoothing", names[_PREFERENCE])
        text = "robust needs preference_smoothing above 0, the share of pairs whose labels are wrong"
        yield source.mistake(name, "bad-value", text)
    if loss in REFERRING and values.get("ref_model") is None and values.get("init_lora_weights") in _MOVED:
        text = f"it changes the model before training, and {_PREFERENCE}: {loss} would compare with the changed model"
        yield source.mistake(names["init_lora_weights"], "not-there", f"{text}; leave it out, or give ref_model")
    weight = values.get("sft_weight")
    supervised = (SFT_WEIGHTS.get(loss) if weight is None else weight) not in SWITCHED_OFF
    if values.get("sft_on_prompt") is True and not supervised:
        yield source.mistake(names["sft_on_prompt"], "bad-value", "it has no effect without sft_weight; give that too")
    weighting = values.get("loss_weighting", "tokens")
    if weighting == "documents" and not supervised and loss != REWARD:
        yield source.mistake(names["loss_weighting"], "bad-value", "it has no effect without sft_weight; give that too")
    if values.get(_SIZE) == AUTO and averages_slices(loss, supervised=supervised, weighting=weighting):
        text = f"{_PREFERENCE}: {loss} has means over a micro-batch, so its size changes what is learned"
        name = next(names[key] for key in (_SIZE, "train_batch_size") if key in names)
        yield source.mistake(name, "not-there", f"{text}; give {_SIZE} as a number")
    other = values.get("ref_model")
    if isinstance(other, str) and not Path(other).is_absolute() and other != values.get("model"):
        text = f"it is {other}, which is no folder here; download it first (hf download), and give its folder"
        yield source.mistake(names["ref_model"], "not-there", text)
    for key, (fine, why) in _EXCLUDED.items():
        if key in values and values[key] not in fine and values[key] not in (*SWITCHED_OFF,):
            text = f"it cannot be used with {_PREFERENCE}: {why}; leave one of them out"
            yield source.mistake(names[key], "not-there", text)
    for key, (fine, why) in _WITHOUT_TEXT.items() if loss == REWARD else ():
        if key in values and values[key] not in fine:
            text = f"it cannot be used with {_PREFERENCE}: {loss}: {why}; leave one of them out"
            yield source.mistake(names[key], "not-there", text)
