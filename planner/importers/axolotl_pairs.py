"""axolotl's types of data of preferences (its version 0.19): which columns each reads, and the text around them."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Any

from planner.importers.axolotl_data import DATA
from planner.keys.source import SWITCHED_OFF, Mistake, Source, shown

_LOSSES = ("dpo", "ipo", "orpo", "simpo", "kto")
"""Values of axolotl's `rl` whose data are preferences."""
_REWARDS = "reward_model"
"""Its key for reward models, whose data are preferences, too."""

_STYLES = {
    "chatml": ("<|im_start|>{role}\n{content}<|im_end|>\n", "<|im_start|>assistant\n", "<|im_end|>"),
    "llama3": (
        "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
}
"""First part of a type -> the text of a message, the text before an answer, and the text behind it."""

_PAIRS: dict[str, dict[str, Any]] = {
    "default": {
        "prompt": ("prompt", "input", "question", "instruction"),
        "chosen": ("chosen", "chosen_response"),
        "rejected": ("rejected", "rejected_response"),
    },
    "argilla_chat": {
        "system": "",
        "prompt": ("chosen.0.content",),
        "chosen": ("chosen.1.content",),
        "rejected": ("rejected.1.content",),
    },
    "icr": {"prompt": ("input",)},
    "intel": {"prompt": ("question",)},
    "prompt_pairs": {},
    "ultra": {"chosen": ("chosen.1.content",), "rejected": ("rejected.1.content",)},
}
"""Last part of a type of pairs -> where its records have what; all else is as in `PairFormat`."""
_ANSWERS: dict[str, dict[str, Any]] = {
    "argilla": {"prompt": ("instruction",)},
    "argilla_chat": {"prompt": ("completion",), "completion": ("completion.-1.content",)},
    "intel": {"prompt": ("question",)},
    "prompt_pairs": {},
    "ultra": {},
}
"""The same for `rl: kto`. Of argilla_chat the prompt is all messages but the last."""
_TEMPLATES: dict[str, dict[str, Any]] = {
    "chat_template.default": {"written": "apart", "prompt": ("messages",)},
    "chat_template.argilla_chat": {"written": "apart", "prompt": ()},
    "chat_template.argilla": {"written": "together"},
}
_OF_REWARDS: dict[str, dict[str, Any]] = {"bradley_terry.chat_template": {"written": "whole", "prompt": ("input",)}}
_OF_MESSAGES = (
    *("field_messages", "field_chosen", "field_rejected", "field_system", "field_tools", "field_thinking"),
    *("message_field_role", "message_field_content", "message_field_training", "message_property_mappings"),
    *("message_keys", "roles", "roles_to_train", "train_on_eos", "train_on_eot", "split_thinking"),
)
"""Keys of an entry that say how messages are read, of which the data of reward models have none."""
_REFUSED = {
    "zephyr.nectar": "it takes the answer of the last rank for the chosen one, and in that data it is the worst"
}
_FIELDS = {"field_chosen": "chosen", "field_rejected": "rejected", "field_messages": "prompt"}
"""axolotl's keys of an entry of a `chat_template` type -> the places they name."""
_OWN = {
    "field_prompt": "prompt",
    "field_system": "system",
    "field_chosen": "chosen",
    "field_rejected": "rejected",
    "field_completion": "completion",
    "field_label": "label",
    "prompt_format": "prompt_text",
    "chosen_format": "chosen_text",
    "rejected_format": "rejected_text",
    "completion_format": "completion_text",
}
"""Key of a `type` that is a mapping (`user_defined`) -> field of `PairFormat`."""
_OF_PAIRS, _OF_ANSWERS = ("chosen", "rejected"), ("completion", "label")


def settle_pairs(values: dict[str, Any], names: Mapping[str, str], source: Source) -> list[Mistake]:
    """Put into the entries of an axolotl file with `rl` or `reward_model` how their records become a prompt and
    answers. Returns mistakes. `names`: offmate's key -> its name in the file."""
    loss = _REWARDS if rewards_of(source.values) else source.values.get("rl")
    if loss not in (*_LOSSES, _REWARDS):
        return []
    mistakes = []
    for key in DATA:
        if not isinstance(entries := values.get(key), list):
            continue
        values[key] = []
        for entry in entries:
            try:
                values[key].append(_entry(entry, str(loss)) if isinstance(entry, dict) else entry)
            except ValueError as error:
                mistakes.append(source.mistake(names[key], "bad-value", str(error)))
                values[key].append(entry.get("path"))  # with its type it would be refused again, as other data
    return mistakes


def _entry(entry: Mapping[str, Any], loss: str) -> dict[str, Any]:
    """The entry with offmate's keys in place of axolotl's `type`. Raises ValueError for a type that is not known."""
    kind, given = "unpaired" if loss == "kto" else "preference", entry.get("type")
    rest = {key: value for key, value in entry.items() if key != "type"}
    if given in SWITCHED_OFF:
        return rest
    if loss == _REWARDS:
        return {"pair_format": _of_rewards(rest, given), **rest, "type": kind}
    if isinstance(given, dict):
        return {**rest, "type": kind, "pair_format": own_format(given, kind)}
    name = str(given) if "." in str(given) else f"{given}.default"
    if name == "passthrough.default" and kind == "preference":
        return {**rest, "type": kind}
    known = formats(kind)
    if name not in known:
        if name in _REFUSED and kind == "preference":
            raise ValueError(
                f"type is {name}, which is not supported: {_REFUSED[name]}; give type: user_defined's keys"
            )
        raise ValueError(f"type is {shown(given)}, which with rl: {loss} is unknown; known are {', '.join(known)}")
    fields = known[name]
    if fields.get("written") == "apart":
        wanted = [key for key in _FIELDS if key != "field_messages" or fields["prompt"]]
        fields = {**fields, **{_FIELDS[key]: (str(rest[key]),) for key in wanted if rest.get(key)}}
        rest = {key: value for key, value in rest.items() if key not in wanted}
    return {**rest, "type": kind, "pair_format": fields}


def rewards_of(file: Mapping[str, object]) -> bool:
    """Whether a file of axolotl's asks for a reward model."""
    return file.get(_REWARDS) is True and file.get("rl") in SWITCHED_OFF


def _of_rewards(rest: dict[str, Any], given: object) -> dict[str, Any]:
    """The fields of `PairFormat` of an entry of a reward model. Takes the keys out of `rest` that they honour. Raises
    ValueError."""
    if (fields := _OF_REWARDS.get(str(given))) is None:
        known = ", ".join(_OF_REWARDS)
        raise ValueError(f"type is {shown(given)}, which with {_REWARDS} is unknown; known is {known}")
    if wrong := [key for key in _OF_MESSAGES if rest.get(key) not in SWITCHED_OFF]:
        raise ValueError(f"{wrong[0]} does not go together with type: {given}; leave it out")
    dropped = [rest.pop(key) for key in ("drop_system_message", "drop_system") if key in rest]
    return {**fields, "system": ""} if any(dropped) else fields


def formats(kind: str) -> dict[str, dict[str, Any]]:
    """Return axolotl's types of pairs ("preference") or of single answers with a label ("unpaired"): a type's name ->
    its fields of `PairFormat`."""
    written: dict[str, dict[str, Any]] = {}
    for style, (turn, asks, end) in _STYLES.items():
        system, user = (turn.replace("{role}", role) for role in ("system", "user"))
        texts = {"system_text": system.replace("{content}", "{system}")}
        texts |= {"prompt_text": user.replace("{content}", "{prompt}") + asks}
        sides = _OF_PAIRS if kind == "preference" else ("completion",)
        texts |= {f"{side}_text": f"{{{side}}}{end}" for side in sides}
        for name, places in (_PAIRS if kind == "preference" else _ANSWERS).items():
            of_turns = {"turn_text": turn, "prompt_text": asks} if places.get("prompt") == ("completion",) else {}
            written[f"{style}.{name}"] = {**texts, **places, **of_turns}
    return {**written, **(_TEMPLATES if kind == "preference" else {})}


def own_format(given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the fields of `PairFormat` that a `type` of the user's own stands for. Raises ValueError."""
    options = {key: value for key, value in given.items() if value not in (None, "")}
    sides = _OF_PAIRS if kind == "preference" else _OF_ANSWERS
    known = {key: field for key, field in _OWN.items() if field.removesuffix("_text") in ("prompt", "system", *sides)}
    if unknown := sorted(options.keys() - known.keys()):
        raise ValueError(f"a type has no key {unknown[0]}; it has {', '.join(known)}")
    fields: dict[str, Any] = {}
    for key, value in options.items():
        if not isinstance(value, str):
            raise ValueError(f"{key} is {shown(value)}; it must be text")
        field = known[key]
        fields[field] = (value,) if field in ("prompt", "chosen", "rejected", "completion") else value
        if field.endswith("_text"):
            side = field.removesuffix("_text")
            _check_format(key, value, ("prompt", "system") if side == "prompt" else (side,))
    has_system = "{system}" in fields.get("prompt_text", "")
    return {**fields, **({} if has_system else {"system": ""}), "needs_system": has_system and kind == "unpaired"}


def _check_format(key: str, text: str, places: tuple[str, ...]) -> None:
    """Raise ValueError where a format has other places than these, or none."""
    try:
        found = [
            (name, spec or conversion) for _, name, spec, conversion in Formatter().parse(text) if name is not None
        ]
    except ValueError as error:
        raise ValueError(f"{key} is {shown(text)}: {error}") from error
    wrong = [name for name, more in found if name not in places or more]
    if wrong or places[0] not in [name for name, _ in found]:
        known = " and ".join(f"{{{place}}}" for place in places)
        raise ValueError(f"{key} is {shown(text)}; its places are {known}, and {{{places[0]}}} must be there")
