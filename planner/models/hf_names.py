"""What own code a model or a tokenizer has, which never runs."""

from __future__ import annotations

from transformers import __version__ as version

from planner.errors import Exit, UserError


def own_code(found: object) -> dict[str, str]:
    """What the value `auto_map` of a config names: which file's class stands for which of transformers'."""
    entries = found if isinstance(found, dict) else {"AutoTokenizer": found} if found else {}
    return {str(name): ", ".join(map(str, c)) if isinstance(c, list) else str(c) for name, c in entries.items()}


def own_code_refused(what: str, name: str, code: dict[str, str]) -> UserError:
    """The error for a `what`, a model or a tokenizer, that only code of its own could read."""
    return UserError(
        f"{name} is a {what} with code of its own, which offmate never runs.", code=f"{what}-has-own-code",
        exit_code=Exit.USAGE, numbers=tuple(f"auto_map: {key}: {place}" for key, place in code.items()),
        hint=f"use a {what} that transformers {version} knows without such code",
    )  # fmt: skip
