"""The keys of a job for `method: lsp`, which trains a small core between two frozen projectors at each linear layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from planner.keys.fields import MOST, Count, NotNegative
from planner.keys.source import SWITCHED_OFF, Mistake, Source

LSP_TOKENS = 2**14
"""The tokens of the rows of which a change of projectors looks at the gradient, where `lsp_samples` does not say."""
LSP_SLICES = 16
"""The most slices (micro-batches) in which these rows go through the model."""
SIZE, NONZEROS, FIT_STEPS = "lsp_size", "lsp_nonzeros", "lsp_fit_steps"


class LspKeys(BaseModel):
    """The keys of a job file for `method: lsp`; a base class of `planner.job.schema.Job`. Under other methods they have
    their defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    lsp_size: Annotated[int, Field(ge=1, le=2**15, description="a whole number from 1 to 32768")] = 512
    lsp_nonzeros: Annotated[
        Count | None, Field(description="a whole number from 1 to 10^9, or null for dense projectors")
    ] = 16
    lsp_check_steps: Count = 1000
    lsp_threshold: NotNegative = 0.5
    lsp_samples: Annotated[
        Count | None, Field(description="a whole number of rows, or null for as many as have 16384 tokens")
    ] = None
    lsp_fit_steps: Annotated[int, Field(ge=0, le=MOST, description="a whole number from 0 to 10^9")] = 0


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
