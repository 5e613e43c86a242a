"""Reads the keys of other tools' files for learning from preferences. Which loss such a file asks for is said by
`Tool.loss`; a key that this loss does not use has no effect, as in the tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.importers.base import REWARDS, Reader, Reading
from planner.keys.preference import PREFERENCES, REFERRING, REWARD, USERS
from planner.keys.source import SWITCHED_OFF, shown

SFT = "sft"
DPO_LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "robust": "robust"}
"""Values of TRL's `loss_type` for its DPOTrainer -> values of the key `preference`."""
UNCLEAR = (
    "several trainers of TRL have this key, and no other key says which one is meant; add preference: "
    f"{', '.join(PREFERENCES[:-1])} or {PREFERENCES[-1]}"
)
RPO = (
    "a loss on chosen answers by TRL's key of earlier versions; give sft_weight, which is there for that purpose, or "
    "leave this key out"
)
FROM_DATA = "the reference's log-probabilities are always computed before the first step"


def as_listed(value: object) -> list[object]:
    """Losses or their weights, of which a file gives one or a list."""
    return value if isinstance(value, list) else [] if value is None else [value]


def dpo_loss(losses: object) -> str | None:
    """The value of `preference` for TRL's `loss_type`: one loss of DPO, perhaps with `sft` beside it. None for another
    choice."""
    first, *others = as_listed(losses) or ["sigmoid"]
    return DPO_LOSSES.get(str(first)) if others in ([], [SFT]) else None


def sft_share(losses: object, weights: object) -> Any:
    """The value of `sft_weight` for TRL's lists of losses and of their weights; None where `sft` is not among them."""
    if SFT not in as_listed(losses):
        return None
    given = as_listed(weights)
    return given[1] if len(given) > 1 else 1.0


def of_trl(loss: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of TRL's trainers for a loss where they differ from offmate's, by offmate's names. `values`: the
    file's, with these names."""
    if loss == REWARD:
        return {}
    defaults: dict[str, Any] = {"router_aux_loss_mean": True}
    defaults |= {"router_aux_loss_coef": "auto"} if loss in REFERRING else {}
    defaults |= {"sft_on_prompt": True} if loss == "orpo" and values.get("sft_weight") != 0 else {}
    return defaults | ({"sft_weight": 1.0} if loss == "simpo" else {})


def of_loss(reading: Reading, key: str, value: object) -> None:
    """Read a key that has no effect with some losses, or without one."""
    meaning, tool = reading.meaning(key), reading.tool
    assert meaning is not None
    loss = tool.loss(reading.file)
    if not tool.name:  # offmate's own file, whose mistakes are found when all keys are read
        reading.read_as_table(key, value)
    elif loss is None and value not in SWITCHED_OFF:
        without_loss(reading, key)
    elif loss is not None and value is not None and loss not in USERS.get(meaning.text, PREFERENCES):
        reading.leave(key, f"it has no effect with preference: {loss}")
    elif loss is not None:
        reading.read_as_table(key, value)


def of_rewards(reading: Reading, key: str, value: object) -> None:
    """Read a key that only reward models use."""
    if reading.tool.name and reading.tool.loss(reading.file) is None:
        if value not in SWITCHED_OFF:
            reading.leave(key, f"it has no effect without preference: {REWARD}")
    else:
        of_loss(reading, key, value)


def of_cpo(reading: Reading, key: str, value: object) -> None:
    """Read the weight of the loss on chosen answers that TRL's CPOTrainer alone has."""
    loss = reading.tool.loss(reading.file)
    if reading.tool.name and loss not in (None, "cpo", "simpo"):
        if value is not None:
            reading.leave(key, f"it has no effect with preference: {loss}")
    else:
        of_loss(reading, key, value)


def without_loss(reading: Reading, key: str) -> None:
    """Read a key for learning from preferences in a file that does not say that it does so: it has no effect, or where
    a tool's files do not name the loss, is a mistake, which is told once."""
    if reading.tool.chooses_loss:
        reading.leave(key, f"it has no effect without {reading.tool.chooses_loss}")
    elif not any(mistake.text == UNCLEAR for mistake in reading.mistakes):
        reading.mistakes.append(reading.source.mistake(key, "bad-value", UNCLEAR))


def with_loss(why: str, tool: str) -> Reader:
    """A reader of a key that `tool`, a tool's name, does not use where it learns from preferences. `why`: in words for
    the user."""

    def read(reading: Reading, key: str, value: object) -> None:
        if reading.tool.name == tool and reading.tool.loss(reading.file) is not None:
            if value not in SWITCHED_OFF:
                reading.leave(key, why)
        else:
            reading.read_as_table(key, value)

    return read


def only_of(tool: str, read: Reader) -> Reader:
    """A reader of a key that no file but those of `tool`, a tool's name, may have: it says in a form of its own what a
    key of offmate says."""

    def read_here(reading: Reading, key: str, value: object) -> None:
        if reading.tool.name == tool:
            read(reading, key, value)
        elif value not in SWITCHED_OFF:
            meaning = reading.meaning(key)
            reading.mistakes.append(reading.source.unknown(key, (), meaning.text if meaning else None))

    return read_here


def refused_with_loss(fine: tuple[object, ...] = SWITCHED_OFF) -> Reader:
    """A reader of a key of DPO that is not there. `fine`: values with which the loss is the one that is there."""

    def read(reading: Reading, key: str, value: object) -> None:
        loss = reading.tool.loss(reading.file)
        if value is None or value in fine:
            return
        if loss is None and reading.tool.name:
            without_loss(reading, key)
        elif loss == "kto" and reading.tool.name:
            reading.leave(key, "it has no effect with preference: kto")
        elif loss is not None or value not in SWITCHED_OFF:
            meaning = reading.meaning(key)
            assert meaning is not None
            reading.refuse(key, f"{meaning.text} is not supported yet; leave this key out")

    return read


def refuse_loss(reading: Reading, key: str, value: object) -> None:
    """Refuse a file for a loss, or for rewards, that is not there."""
    text = f"it is {shown(value)}; {REWARDS} is not supported yet; a file for it cannot be run here"
    reading.refuse(key, text, alone=True)


def read_weights(reading: Reading, key: str, losses: object, weights: object) -> None:
    """Check the weights of TRL's list of losses, the file's `key`, beside the list `losses`."""
    names, given = as_listed(losses) or ["sigmoid"], as_listed(weights)
    numbers = all(isinstance(weight, (int, float)) and not isinstance(weight, bool) for weight in given)
    text = None
    if not numbers or len(given) != len(names):
        text = f"it is {shown(weights)}; it must have one number for each loss in {shown(names)}"
    elif given and given[0] != 1:
        text = f"it is {shown(weights)}; only the weight of sft may be another than 1"
    elif given and reading.file.get("sft_weight") is not None and SFT in names:
        text = "sft_weight is given too, and both mean the weight of sft; keep one"
    if text is not None:
        reading.mistakes.append(reading.source.mistake(key, "bad-value", text))


def read_smoothing(reading: Reading, key: str, value: object) -> None:
    """Read the share of wrong labels in a file whose losses are TRL's."""
    if reading.tool.loss(reading.file) == "dpo" and value not in SWITCHED_OFF:
        text = (
            f"it is {shown(value)}; TRL ignores it with the loss sigmoid since its version 0.29, and smoothed labels "
            "before; give preference_smoothing for that, or leave this key out"
        )
        reading.mistakes.append(reading.source.mistake(key, "not-there", text))
    else:
        of_loss(reading, key, value)
