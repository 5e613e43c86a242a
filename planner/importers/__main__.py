"""Writes docs/keys.md from the tables: `python -m planner.importers > docs/keys.md`."""

from __future__ import annotations

from planner.importers.base import Meaning
from planner.importers.llama_factory_v1 import LLAMA_FACTORY_V1, V1
from planner.importers.tools import TOOLS

_HEAD = """\
# Keys of other tools

Every key that axolotl, LLaMA-Factory (v1, too) and TRL document, and what becomes of it in a job file. It is written
from the tables that the reader itself goes by (`planner/importers/`; `python -m planner.importers > docs/keys.md`).

- *is* a key of offmate: it means that key, which [jobs.md](jobs.md) describes;
- *no effect*: it changes nothing of what is learned; why is said at submission, unless it is switched off;
- *the planner's*: the planner decides where tensors are and what is recomputed; said likewise;
- *not there*: it asks for something that offmate does not do, and the job is refused in one line. Switched off (null,
  false, 0, "", "no", "none", an empty list) it may stay, as it may with a value in brackets;
- *beside* a key: it belongs to that one, and says nothing without it.
"""


def page() -> str:
    """The page's text."""
    parts = [_HEAD]
    for tool, table in ({tool.name: tool.keys for tool in TOOLS} | {V1: LLAMA_FACTORY_V1}).items():
        parts.append(f"\n## {tool}\n\n| key | what becomes of it |\n|---|---|\n")
        parts += [f"| `{key}` | {_words(key, meaning)} |\n" for key, meaning in sorted(table.items())]
    return "".join(parts)


def _words(key: str, meaning: Meaning) -> str:
    fine = f" ({', '.join(f'`{value}`' for value in meaning.fine)})" if meaning.fine else ""
    return {
        "honoured": "as it is here" if meaning.text == key else f"is `{meaning.text}`",
        "unused": f"no effect: {meaning.text}",
        "planner": "the planner's",
        "not there": f"not there: {meaning.text}{fine}",
        "part": f"beside `{meaning.text}`",
    }[meaning.kind]


if __name__ == "__main__":
    print(page(), end="")
