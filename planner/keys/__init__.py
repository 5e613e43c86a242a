"""The keys of axolotl's, LLaMA-Factory's and TRL's files, and what becomes of each. `planner.job.reading` reads them,
and `python -m planner.keys` writes them to docs/keys.md."""

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
"""All tables, with v1's. Files of v1 are rewritten in offmate's keys before `TABLES` are used
(`planner.job.llama_factory_v1`)."""

_TELLING = "beta num_generations reward_funcs reward_model_path max_prompt_length max_completion_length"
_OF_TRL_ALONE = PREFERENCES.keys() - {*_TELLING.split()}
ANY: Table = {
    **{key: meaning for key, meaning in TRL.items() if key not in _OF_TRL_ALONE},
    **LLAMA_FACTORY,
    **AXOLOTL,
}
"""The keys of all tools, for files whose keys show no tool. Where tools differ, axolotl's meaning counts."""


def other_names() -> dict[str, tuple[str, ...]]:
    """offmate's key -> its names in other tools."""
    found: dict[str, dict[str, None]] = {}
    for table in TABLES.values():
        for name, meaning in table.items():
            if meaning.kind == "honoured" and meaning.text != name:
                found.setdefault(meaning.text, {})[name] = None
    return {key: tuple(names) for key, names in found.items()}
