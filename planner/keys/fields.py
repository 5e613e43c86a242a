"""The types of a job file's values: their bounds, and the ways in which a value may be written.

The description of each type ends its error: "max_length: it is 0; it must be DESCRIPTION".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from planner.keys.source import SWITCHED_OFF, shown
from planner.units import SMALLEST_BUDGET_BYTES, parse_bytes

VALUES = "chat_template_kwargs"
"""The key of a job, and the column of a record, with variables for the chat template."""


_NOT_VALUES = frozenset(
    {
        "messages",
        "conversation",
        "conversations",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "tokenize",
        "continue_final_message",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "padding",
        "truncation",
        "max_length",
    }
)
"""Variables that the code which renders a chat template sets itself."""


def template_values(value: object) -> dict[str, Any]:
    """Return the variables that the chat template gets besides the messages, without those that are null. Raises
    ValueError where `value` is no mapping, or sets a name that the code which renders a template sets itself
    (`_NOT_VALUES`)."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{VALUES} is a mapping, this is {shown(value, 80)}")
    if taken := sorted(_NOT_VALUES & value.keys()):
        raise ValueError(f"{VALUES} has {taken[0]}, which is not the template's own")
    return {name: setting for name, setting in value.items() if setting is not None}


def _size(value: object) -> object:
    return parse_bytes(value) if isinstance(value, str) else value


def _no_clip(value: object) -> object:
    """Return None for 0, which means no clipping; other values unchanged."""
    return None if value == 0 and not isinstance(value, bool) else value


def _no_limit(value: object) -> object:
    """Return None for -1, which means no limit in `TrainingArguments`; other values unchanged."""
    return None if value == -1 else value


def _prompts(value: object) -> object:
    """Return one prompt, or a list of prompts, as a tuple; a prompt is a text or a list of messages."""
    if value in SWITCHED_OFF:
        return None
    entries = value if isinstance(value, (list, tuple)) else [value]
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in entries)


def nothing(value: object) -> object:
    """Return None for a value by which a job file switches a key off, such as false, 0, "none" or []; other values
    unchanged."""
    return None if value in SWITCHED_OFF else value


def _tokens(value: object) -> object:
    """Return a mapping of special tokens with its list as a tuple. Raises ValueError unless exactly
    `additional_special_tokens` has a list."""
    if not isinstance(value, dict):
        return nothing(value)
    for name, tokens in value.items():
        if isinstance(tokens, list) != (name == "additional_special_tokens"):
            raise ValueError(name)
    return {name: tuple(tokens) if isinstance(tokens, list) else tokens for name, tokens in value.items()}


def _modules(value: object) -> object:
    """Return a list of names as a tuple; LLaMA-Factory's form "a,b" is accepted, too."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    return listed(value)


def listed(value: object) -> object:
    """Return a list as a tuple, for immutable values; None for an empty list and for values that switch a key off;
    others unchanged."""
    return tuple(value) if isinstance(value, list) and value else nothing(value)


def _shares(value: object) -> object:
    """Return a list of numbers as a tuple; LLaMA-Factory's form "0.8,0.2" is accepted, too."""
    if isinstance(value, str) and value:
        try:
            value = [float(part) for part in value.split(",")]
        except ValueError:
            return value
    return listed(value)


def _off(value: object) -> object:
    """Return "off" for false, because YAML reads the bare word off as false; other values unchanged."""
    return "off" if value is False else value


def _trackers(value: object) -> object:
    """Return one, several or no trackers, in any accepted form, as a tuple."""
    if value in (*SWITCHED_OFF, ["none"]):
        return ()
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str) else value


MOST = 10**9
"""The largest count that a key accepts; a larger number is a typing mistake."""
DEFAULT_EPOCHS = 3.0

Switch = Annotated[bool, Field(description="true or false")]
Packing = Annotated[bool | Literal["wrapped"], Field(description="true, false or wrapped")]
# Text goes to terminals, logs and file names: no control characters (Unicode's category Cc).
Text = Annotated[
    str, Field(min_length=1, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$", description="text without control characters")
]
Name = Annotated[Text | None, Field(description="text without control characters, or null")]
Count = Annotated[int, Field(ge=1, le=MOST, description="a whole number from 1 to 10^9")]
NotNegative = Annotated[float, Field(ge=0, description="a number, 0 or more")]
Positive = Annotated[float, Field(gt=0, description="a number above 0")]
Beta = Annotated[float, Field(ge=0, lt=1, description="a number from 0 up to, not including, 1")]
Size = Annotated[
    Annotated[int, Field(ge=SMALLEST_BUDGET_BYTES, lt=2**63)] | None,
    BeforeValidator(_size),
    Field(description="a size like 10GiB or 500MB, or null for the default"),
]

Written = Annotated[
    Annotated[int, Field(ge=1, lt=2**63)] | Literal["accept"] | None,
    BeforeValidator(lambda value: value if value == "accept" else _size(value)),
    Field(description="a size like 1200TB, accept, or null"),
]

Message = Annotated[dict[Literal["role", "content"], str], Field(min_length=2)]
TargetLength = Annotated[
    Annotated[int, Field(ge=1, le=10**7)] | None,
    Field(description="a whole number of tokens from 1 to 10^7, or null for max_length"),
]
StepLimit = Annotated[
    Count | None,
    BeforeValidator(_no_limit),
    Field(description="a whole number from 1 to 10^9, or null to count by epochs"),
]
Clip = Annotated[
    Positive | None,
    BeforeValidator(_no_clip),
    Field(description="a number above 0, or 0 or null for no clipping"),
]
Minutes = Annotated[
    Positive | None, BeforeValidator(nothing), Field(description="a number above 0, or 0 or null for never")
]
Compile = Annotated[Literal["auto", "off"], BeforeValidator(_off), Field(description="auto or off")]
ReportTo = Annotated[
    tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...],
    BeforeValidator(_trackers),
    Field(description="none, or some of tensorboard, wandb, trackio and mlflow"),
]
ValSize = Annotated[
    Annotated[int | float, Field(gt=0, le=MOST)] | None,
    BeforeValidator(nothing),
    Field(description="a share of the rows below 1, a whole number of rows, or 0 for none"),
]
_Token = Annotated[str, Field(min_length=1)]
SpecialTokens = Annotated[
    dict[
        Literal[
            "bos_token",
            "eos_token",
            "unk_token",
            "sep_token",
            "cls_token",
            "mask_token",
            "pad_token",
            "additional_special_tokens",
        ],
        _Token | tuple[_Token, ...],
    ]
    | None,
    BeforeValidator(_tokens),
    Field(description="a mapping of eos_token and its like to a token, additional_special_tokens to a list, or null"),
]
Values = Annotated[
    dict[str, Any] | None,
    BeforeValidator(lambda value: template_values(value) or None if value not in SWITCHED_OFF else None),
    Field(description="a mapping of values that the chat template asks for, such as enable_thinking: false, or null"),
]
Modules = Annotated[
    tuple[Text, ...] | None, BeforeValidator(_modules), Field(description="a list of modules' names, or null")
]
Tokens = Annotated[tuple[_Token, ...] | None, BeforeValidator(_modules), Field(description="a list of tokens, or null")]
Shares = Annotated[
    tuple[Annotated[float, Field(ge=0, le=1)], ...] | None,
    BeforeValidator(_shares),
    Field(description="a list of numbers from 0 to 1, or null"),
]
Noise = Annotated[
    Positive | None, BeforeValidator(nothing), Field(description="a number above 0, or 0 or null for no noise")
]
RouterShare = Annotated[
    NotNegative | Literal["auto"] | None,
    Field(description="a number, 0 or more, auto, or null for what the model's config says"),
]
Patience = Annotated[
    Count | None, BeforeValidator(nothing), Field(description="a whole number of evaluations from 1 to 10^9, or null")
]
EvalStrategy = Annotated[
    Literal["steps", "epoch"] | None, BeforeValidator(nothing), Field(description="no, steps or epoch")
]
EvalSteps = Annotated[
    Annotated[int | float, Field(gt=0, le=MOST)] | None,
    BeforeValidator(nothing),
    Field(description="a whole number of steps, a share of all steps below 1, or null"),
]
Prompts = Annotated[
    tuple[Annotated[str, Field(min_length=1)] | Annotated[tuple[Message, ...], Field(min_length=1)], ...] | None,
    BeforeValidator(_prompts),
    Field(description="a text, or a list of texts or of lists of messages with role and content, none of them empty"),
]
