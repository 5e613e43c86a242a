"""Reads axolotl's keys for learning from preferences and for reward models, which it trains by TRL's trainers (as of
its version 0.19)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.importers.axolotl_pairs import rewards_of
from planner.importers.base import File, Reader, Reading
from planner.importers.preferences import (
    as_listed,
    dpo_loss,
    of_cpo,
    of_loss,
    of_rewards,
    of_trl,
    only_of,
    read_smoothing,
    read_weights,
    refuse_loss,
    refused_with_loss,
    sft_share,
    with_loss,
    without_loss,
)
from planner.keys.preference import REWARD
from planner.keys.source import SWITCHED_OFF, shown

NAME = "axolotl"
_NOT_USED = "axolotl does not use it with rl or reward_model"
_LOSSES = ("ipo", "orpo", "kto", "simpo")
_NUMBERS = """
    rl_beta dpo_beta orpo_alpha simpo_gamma kto_desirable_weight kto_undesirable_weight desirable_weight
    undesirable_weight
"""
_IGNORED = "train_on_inputs min_sample_len label_smoothing_factor"
"""Keys that axolotl uses for supervised fine-tuning alone."""
_IGNORED_WITH_RL = "group_by_length neftune_noise_alpha noisy_embedding_alpha early_stopping_patience"
"""Keys that it uses for reward models, too."""


def loss_of(file: File) -> str | None:
    """The value of `preference` that `rl` and `dpo_loss_type`, or `reward_model`, mean; None where there is none, or
    another."""
    rl = file.get("rl")
    if rewards_of(file):
        return REWARD
    return dpo_loss(file.get("dpo_loss_type")) if rl == "dpo" else str(rl) if rl in _LOSSES else None


def defaults_of(loss: str, values: Mapping[str, Any], file: File) -> dict[str, Any]:
    """The defaults for a loss, by offmate's names, which are TRL's, and what the lists of losses say of `sft`."""
    if loss == REWARD:
        return {"long_rows": "refuse"}  # axolotl cuts them, and then scores another token than the end
    share = sft_share(file.get("dpo_loss_type"), file.get("dpo_loss_weights")) if file.get("rl") == "dpo" else None
    if share is not None:
        return {**of_trl(loss, values), "sft_weight": share}
    return of_trl(loss, values)


def _rl(reading: Reading, key: str, value: object) -> None:
    if value in SWITCHED_OFF:
        return
    if value != "dpo" and value not in _LOSSES:
        refuse_loss(reading, key, value)
        return
    reading.take(key, "preference")
    file = reading.file
    goes_on = file.get("lora_model_dir") not in SWITCHED_OFF and file.get("adapter") not in SWITCHED_OFF
    if goes_on and value in ("dpo", "ipo", "kto"):
        text = f"with rl: {value} axolotl begins new adapters and does not read these; leave this key out"
        reading.mistakes.append(reading.source.mistake("lora_model_dir", "not-there", text))


def _reward_model(reading: Reading, key: str, value: object) -> None:
    file, text, code = reading.file, None, "bad-value"
    if reading.tool.name != NAME:  # LLaMA-Factory's is the model that stage: ppo learns from
        read = Reading.read_as_table
        (read if key in reading.tool.keys else only_of(NAME, read))(reading, key, value)
        return
    if value in SWITCHED_OFF:
        return
    if value is not True:
        text, code = f"it is {shown(value)}; it must be true or false", "wrong-type"
    elif not rewards_of(file):
        text, code = "rl is given too, and both say what is learned; keep one", "two-names"
    elif file.get("num_labels") not in (None, 1):
        text = f"num_labels is {shown(file['num_labels'])}; a reward model has 1"
    if text is not None:
        reading.mistakes.append(reading.source.mistake(key, code, text))
    else:
        reading.take(key, "preference")


def _loss_type(reading: Reading, key: str, value: object) -> None:
    if value in SWITCHED_OFF:
        return
    if reading.file.get("rl") in SWITCHED_OFF:
        without_loss(reading, key)
    elif reading.file.get("rl") != "dpo":
        text = f"it is {shown(value)}; it is for rl: dpo, as in axolotl; leave it out"
        reading.mistakes.append(reading.source.mistake(key, "bad-value", text))
    elif dpo_loss(value) is None:
        refuse_loss(reading, key, value)
    elif reading.file.get("dpo_loss_weights") in SWITCHED_OFF:
        read_weights(reading, key, value, [1.0] * len(as_listed(value)))


def _loss_weights(reading: Reading, key: str, value: object) -> None:
    if value in SWITCHED_OFF:
        return
    if loss_of(reading.file) in (None, REWARD):
        without_loss(reading, key)
    else:
        read_weights(reading, key, reading.file.get("dpo_loss_type"), value)


def _trl(reading: Reading, key: str, value: object) -> None:
    """`trl`: a mapping, of which losses of preferences use `beta` alone."""
    if value in SWITCHED_OFF:
        return
    if loss_of(reading.file) in (None, REWARD):
        without_loss(reading, key)
    elif not isinstance(value, dict):
        reading.mistakes.append(
            reading.source.mistake(key, "wrong-type", f"it is {shown(value)}; it must be a mapping")
        )
    else:
        if value.get("beta") is not None:
            reading.take(key, "preference_beta")
        if others := [name for name in value if name != "beta"]:
            reading.leave(f"{', '.join(others)} in {key}", "it has no effect with preferences")


def _smoothing(reading: Reading, key: str, value: object) -> None:
    if reading.tool.name == NAME and reading.tool.loss(reading.file) in ("cpo", "simpo"):
        reading.leave(key, "axolotl uses it with rl: dpo alone")
    elif reading.tool.name == NAME:
        read_smoothing(reading, key, value)
    else:
        of_loss(reading, key, value)


def _ignored_with_rl(reading: Reading, key: str, value: object) -> None:
    rewards = reading.tool.loss(reading.file) == REWARD
    (Reading.read_as_table if rewards else with_loss(_NOT_USED, NAME))(reading, key, value)


READERS: dict[str, Reader] = {
    "rl": only_of(NAME, _rl),
    "reward_model": _reward_model,
    "center_rewards_coefficient": of_rewards,
    "trl": only_of(NAME, _trl),
    "dpo_loss_type": only_of(NAME, _loss_type),
    "dpo_loss_weights": only_of(NAME, _loss_weights),
    "dpo_label_smoothing": _smoothing,
    "cpo_alpha": of_cpo,
    "dpo_use_weighting": refused_with_loss(),
    **dict.fromkeys(_NUMBERS.split(), of_loss),
    **dict.fromkeys(_IGNORED.split(), with_loss(_NOT_USED, NAME)),
    **dict.fromkeys(_IGNORED_WITH_RL.split(), _ignored_with_rl),
}
