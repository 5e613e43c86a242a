"""Tests regular expressions from a job file, with a limit on the processor time that each may take.

Python's `re` backtracks over all ways to match. Their number may double with each letter, and only ending the process
stops it. So patterns that libraries will match later are first matched in a separate process. This file imports only
the standard library and nothing of this project, because it is also run as that process.
"""

from __future__ import annotations

import functools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterable

LIMIT_S, NAME_S = 1.0, 1e-4
"""Seconds of processor time for one pattern, and in addition for each name: a hundred times what the slowest useful
patterns take."""
TYPICAL = (
    "lm_head",
    "model.embed_tokens",
    "model.layers.31.self_attn.q_proj",
    "transformer.h.11.attn.c_attn.weight",
    "base_model.model.model.layers.31.mlp.experts.127.down_proj.lora_A.default.weight",
)
"""Typical names of modules and parameters, for when the model is not loaded yet."""
SIMPLER = "leave out repeats inside of repeats, such as (.*)*, and use as few .* as possible"
_REPEATS = re.compile(r"[*+?{]")


def too_slow(patterns: Iterable[str], names: Iterable[str] = TYPICAL) -> str | None:
    """Return the first of `patterns` that takes too long to match with all of `names`: more processor time than
    `LIMIT_S` seconds plus `NAME_S` seconds per name. None where no pattern does. The patterns must be valid regular
    expressions; they are matched from the beginning of each name. On Windows, which has no such limit,
    it returns None."""
    repeats = tuple(pattern for pattern in patterns if _REPEATS.search(pattern))
    return _too_slow(repeats, tuple(names)) if repeats and hasattr(signal, "setitimer") else None


@functools.lru_cache(maxsize=64)
def _too_slow(patterns: tuple[str, ...], names: tuple[str, ...]) -> str | None:
    request = json.dumps([patterns, names, LIMIT_S + NAME_S * len(names)])
    done = subprocess.run(
        [sys.executable, "-I", "-S", __file__],
        input=request.encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    begun = done.stdout.count(b"\n")
    return patterns[begun - 1] if done.returncode == -signal.SIGVTALRM and begun else None


def _match() -> None:
    signal.signal(signal.SIGVTALRM, signal.SIG_DFL)  # the default action ends the process even inside of `re`
    patterns, names, limit_s = json.load(sys.stdin)
    for pattern in patterns:
        print(flush=True)
        signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
        compiled = re.compile(pattern)
        for name in names:
            compiled.match(name)
            compiled.fullmatch(name)


if __name__ == "__main__":
    _match()
