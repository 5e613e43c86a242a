"""Finds code that comes with a model or a tokenizer. offmate never runs such code."""

from __future__ import annotations

from transformers import __version__ as version

from planner.errors import Exit, UserError


def own_code(auto_map: object) -> dict[str, str]:
    """The entries of a config's `auto_map`: class of transformers -> file and class that replace it."""
    entries = auto_map if isinstance(auto_map, dict) else {"AutoTokenizer": auto_map} if auto_map else {}
    return {str(name): ", ".join(map(str, c)) if isinstance(c, list) else str(c) for name, c in entries.items()}


def own_code_refused(kind: str, name: str, code: dict[str, str]) -> UserError:
    """The error for `kind` ("model" or "tokenizer") called `name` that only its own `code` could read."""
    return UserError(
        f"{name} is a {kind} with code of its own, which offmate never runs.",
        code=f"{kind}-has-own-code",
        exit_code=Exit.USAGE,
        numbers=tuple(f"auto_map: {key}: {place}" for key, place in code.items()),
        hint=f"use a {kind} that transformers {version} knows without such code",
    )
