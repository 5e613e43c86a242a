"""The keys of the files of axolotl, LLaMA-Factory and TRL, and what becomes of each: read by `planner.job.reading`, and
written out in docs/keys.md by `python -m planner.keys`."""

from __future__ import annotations

from collections.abc import Mapping

from planner.keys.axolotl import AXOLOTL
from planner.keys.llama_factory import LLAMA_FACTORY
from planner.keys.llama_factory_v1 import LLAMA_FACTORY_V1
from planner.keys.meaning import Table
from planner.keys.trl import PREFERENCES, TRL

TABLES: Mapping[str, Table] = {"axolotl": AXOLOTL, "LLaMA-Factory": LLAMA_FACTORY, "TRL": TRL}
"""Tool -> its keys."""
V1 = "LLaMA-Factory's v1"
ALL_TABLES: Mapping[str, Table] = {**TABLES, V1: LLAMA_FACTORY_V1}
"""That of v1, too, whose files are in offmate's own keys before these are read (`planner.job.llama_factory_v1`)."""

_TELLING = "beta num_generations reward_funcs reward_model_path max_prompt_length max_completion_length"
_OF_TRL_ALONE = PREFERENCES.keys() - {*_TELLING.split()}
ANY: Table = {
    **{key: meaning for key, meaning in TRL.items() if key not in _OF_TRL_ALONE}, **LLAMA_FACTORY, **AXOLOTL,
}  # fmt: skip
"""All of them, for files that no tool's keys tell apart. Where tools differ, it is what axolotl has."""


def other_names() -> dict[str, tuple[str, ...]]:
    """offmate's key -> the names that it has elsewhere."""
    found: dict[str, dict[str, None]] = {}
    for table in TABLES.values():
        for name, meaning in table.items():
            if meaning.kind == "honoured" and meaning.text != name:
                found.setdefault(meaning.text, {})[name] = None
    return {key: tuple(names) for key, names in found.items()}
