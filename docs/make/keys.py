"""Makes docs/reference/keys.md: each key of a job file with its type, default, other names and text."""

from __future__ import annotations

from planner.job.described import Key, entry_section, sections

_HEAD = """\
# Keys of a job

A job file is YAML. It needs two keys; all others have defaults:

```yaml
model: Qwen/Qwen3-0.6B
dataset: my_texts.jsonl
```

Most keys have the names that they have in transformers' `TrainingArguments` and in TRL. The names after *also accepted*
are those of other tools; give each key under one name only ([files of other tools](../how-to/other-tools.md)). An
unknown key is refused, and the error names the most similar key if there is one. `offmate submit --set KEY=VALUE`
overrides a key of the file; so do `run`, `plan`, `preview` and `certify`. In a shell, `offmate keys` lists all keys and
`offmate keys KEY` describes one.

**Paths.** Relative paths start at the folder of the job file. A value is a path if it starts with `/`, `.` or `~`, or
ends in a data file's suffix (`.jsonl`, `.csv`, …). It is also a path if it, or its first folder, exists beside the job
file. Otherwise `name` and `owner/name` are ids on the Hugging Face hub.

**Numbers and sizes.** A size is a whole number of bytes, or a number with a unit: `KiB`, `MiB`, `GiB`, `TiB` (powers of
1024) or `KB`, `MB`, `GB`, `TB` (powers of 1000). Whole numbers go up to 10^9, `max_length` up to 10^7,
`num_train_epochs` up to 10^6; `seed` and sizes are below 2^63. Names and paths have no control characters.
"""


def page() -> str:
    """Return the page as Markdown. A key's anchor is its name; that of a key of an entry of `dataset` begins with
    `dataset-`."""
    parts = [_HEAD]
    for section in sections():
        parts.append(f"\n## {section.title}\n\n{section.text}\n")
        parts += [_key(key, key.name) for key in section.keys]
    entries = entry_section()
    parts.append(f"\n## {entries.title}\n\n{entries.text}\n")
    parts += [_key(key, f"dataset-{key.name}") for key in entries.keys]
    return "".join(parts)


def _key(key: Key, anchor: str) -> str:
    in_words = key.default is not None and " " in key.default
    default = f"- Default: {key.default if in_words else f'`{key.default}`'}"
    lines = [f"- Type: {key.type}", default if key.default is not None else "- Required"]
    lines += [f"- Also accepted: {', '.join(f'`{alias}`' for alias in key.aliases)}"] if key.aliases else []
    listed = "\n".join(lines)
    return f"\n### {key.name} {{#{anchor}}}\n\n{listed}\n\n{key.text}\n"
