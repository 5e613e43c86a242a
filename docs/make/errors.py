"""Makes the page of the error codes, each with its cause and its cure."""

from __future__ import annotations

from planner.error_codes import THEMES

_HEAD = """\
# Errors

Each error has a stable code. It is printed in brackets after the hint:

```
job.yaml has 2 mistakes.
  line 3: learnign_rate: unknown key; did you mean learning_rate?
  line 7: max_length: it is 0; it must be a whole number of tokens from 2 to 10^7
  hint: correct the file and try again   [bad-job]
```

Commands print errors as text on stderr and exit with one of the [exit codes](commands.md#exit-codes). In answers of the
[API](api.md#answers) an error is a JSON object. For each code this page says what went wrong and what you can do. In
commands, `ID` is the number of the job.
"""


def page() -> str:
    """The Markdown of reference/errors.md. A code's anchor is the code itself."""
    parts = [_HEAD]
    for theme, codes in THEMES.items():
        parts.append(f"## {theme}\n")
        for code, (cause, cure) in codes.items():
            parts.append(f"#### `{code}` {{ #{code} }}\n\n{cause}\n\n**What to do:** {cure}\n")
    return "\n".join(parts)
