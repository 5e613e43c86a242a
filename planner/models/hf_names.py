"""Finds Python code that a model's or tokenizer's own files bring along (`auto_map`). offmate never runs such code."""

from __future__ import annotations

from transformers import __version__ as version

from planner.errors import Exit, UserError


def own_code(auto_map: object) -> dict[str, str]:
    """The code that a config's `auto_map` names: class of transformers -> the file and class that replace it."""
    entries = auto_map if isinstance(auto_map, dict) else {"AutoTokenizer": auto_map} if auto_map else {}
    return {str(name): ", ".join(map(str, c)) if isinstance(c, list) else str(c) for name, c in entries.items()}


def own_code_refused(kind: str, name: str, code: dict[str, str]) -> UserError:
    """Makes the error for a model or tokenizer that only its own code could load. `kind`: "model" or "tokenizer";
    `name`: its name; `code`: as `own_code` gives it."""
    return UserError(
        f"{name} is a {kind} with code of its own, which offmate never runs.",
        code=f"{kind}-has-own-code",
        exit_code=Exit.USAGE,
        numbers=tuple(f"auto_map: {key}: {place}" for key, place in code.items()),
        hint=f"use a {kind} that transformers {version} knows without such code",
    )
