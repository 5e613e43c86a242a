"""The keys of a job for `method: lsp`, which trains a small core between two frozen projectors at each linear layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from planner.keys.base import Keys
from planner.keys.fields import MOST, Count, NotNegative
from planner.keys.source import SWITCHED_OFF, Mistake, Source

LSP_TOKENS = 2**14
"""The tokens of the rows of which a change of projectors looks at the gradient, where `lsp_samples` does not say."""
LSP_SLICES = 16
"""The most slices (micro-batches) in which these rows go through the model."""
SIZE, NONZEROS, FIT_STEPS = "lsp_size", "lsp_nonzeros", "lsp_fit_steps"


class LspKeys(Keys):
    """These keys are for `method: lsp`, which trains a small matrix, the core, between two frozen projectors at each
    linear layer ([how, and who should choose it](../how-to/lsp.md))."""

    lsp_size: Annotated[int, Field(ge=1, le=2**15, description="a whole number from 1 to 32768")] = 512
    """The rows and columns of each core, s in the paper. If half of a weight's shorter side is less than this, the core
    of that weight has that half as its side, and the log says so. The number must be a multiple of `lsp_nonzeros`."""
    lsp_nonzeros: Annotated[
        Count | None, Field(description="a whole number from 1 to 10^9, or null for dense projectors")
    ] = 16
    """How many numbers in each row of a projector are not zero. null: the projectors are dense and learn more. For a
    model of 8 billion parameters dense projectors take 2.5 GiB, sparse ones 0.4 GiB."""
    lsp_check_steps: Count = 1000
    """The number of steps from one check of the projectors to the next. The first check is before the first step."""
    lsp_threshold: NotNegative = 0.5
    """A check makes new projectors for a layer if their bias, the share of the gradient that they miss, is at least
    this number. Sparse projectors were seen to have a bias of 0.7 to 0.9 after 50 steps, so they change at nearly every
    check; dense ones had 0.4."""
    lsp_samples: Annotated[
        Count | None, Field(description="a whole number of rows, or null for as many as have 16384 tokens")
    ] = None
    """The number of rows whose gradient a check computes; these are the next rows in the order of training. null: as
    many rows as have 16,384 tokens at `max_length`."""
    lsp_fit_steps: Annotated[int, Field(ge=0, le=MOST, description="a whole number from 0 to 10^9")] = 0
    """The number of steps in which projectors are learned, as in the paper, which takes 100. 0: they are made of the
    first singular vectors of the gradient, with orthonormal columns. With `lsp_nonzeros: null` it must be 0."""


def check_lsp(values: dict[str, Any], names: Mapping[str, str], source: Source) -> list[Mistake]:
    """Return the mistakes in the keys of LSP and in those that exclude it. `values`: canonical key -> value; `names`:
    canonical key -> the name that the file uses. Without `method: lsp` its keys are removed from `values`; the defaults
    are no mistake there, as `resolved.yaml` has them for every job."""
    if (method := values.get("method")) == "lsp":
        return list(_apart(values, names, source))
    fields = LspKeys.model_fields
    given = [key for key in fields if key in values and values[key] not in (*SWITCHED_OFF, fields[key].default)]
    for key in fields:
        values.pop(key, None)
    if method not in (None, "full", "lora"):  # reported elsewhere
        return []
    text = "leave it out, or give that in place of lora" if method == "lora" else "give that too"
    return [source.mistake(names[key], "bad-value", f"it is for method: lsp; {text}") for key in given[:1]]


def _apart(values: Mapping[str, Any], names: Mapping[str, str], source: Source) -> Iterator[Mistake]:
    """Yield the mistakes of keys that exclude one another under `method: lsp`."""
    if values.get("optim") == "muon":
        text = "muon under method: lsp is not supported; leave optim out: AdamW trains cores"
        yield source.mistake(names["optim"], "not-there", text)
    size, nonzeros = (values.get(key, LspKeys.model_fields[key].default) for key in (SIZE, NONZEROS))
    if nonzeros is None and values.get(FIT_STEPS) not in SWITCHED_OFF:
        text = f"only projectors with zeros are learned, and {NONZEROS} is null; leave one of them out"
        yield source.mistake(names[FIT_STEPS], "bad-value", text)
    whole = all(type(value) is int and value > 0 for value in (size, nonzeros))  # else reported elsewhere
    if whole and size % nonzeros:
        if SIZE in values:
            text = f"it is {size}; it must be a multiple of {NONZEROS}, which is {nonzeros}"
            yield source.mistake(names[SIZE], "bad-value", text)
        else:
            text = f"it is {nonzeros}; {SIZE} must be a multiple of it, and is {size}"
            yield source.mistake(names[NONZEROS], "bad-value", text)
