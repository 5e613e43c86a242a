"""The keys of a job for the model, the tokenizer, and how numbers are computed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from planner.keys.base import Keys
from planner.keys.fields import Compile, Switch, Text

_Revision = Annotated[Text | None, Field(description="a branch, tag or commit, or null for main")]


class ModelKeys(Keys):
    """These keys say which model is trained, and which tokenizer it has."""

    model: Annotated[Text, Field(description="a path or Hugging Face id")]
    """The folder of the model, or its id on the Hugging Face hub. If a folder has a config but no weights, training
    starts from random weights under `seed`; a folder whose weights are neither safetensors nor `.bin` files is refused.
    A model that was published in mxfp4 or fp8 is unpacked while it is read, and one in bitsandbytes' 4 or 8 bits is
    trained by `method: lora` ([more](../how-to/lora-on-4-bits.md#lora-first-then-fewer-bits)). Other quantized forms,
    such as GPTQ and AWQ, are refused (`base-quantized`)."""
    model_revision: _Revision = None
    """The revision of a hub model, and of the tokenizer in its repository. The job stores the commit that this revision
    is at planning time. The model card and an adapter's config name it."""
    tokenizer: Annotated[Text, Field(description="a path or Hugging Face id")]
    """Where the tokenizer is, if it is not in the model's folder."""
    tokenizer_revision: _Revision = None
    """The revision of a hub tokenizer. With null it is `model_revision` if the tokenizer is in the model's repository.
    The job stores the commit of this revision, too."""


class NumberKeys(Keys):
    """These keys say in which precision and by which kernels numbers are computed, and from which seed."""

    seed: Annotated[int, Field(ge=0, lt=2**63, description="a whole number, 0 or more, below 2^63")] = 42
    """The seed for the order of the data, for random weights and for dropout."""
    bf16: Annotated[bool, Field(description="true, false or auto")] = False  # auto is settled when keys are read
    """True: the working weights are in bf16; the master weights and the optimizer states are in fp32. False: all
    numbers are in fp32. If the key is left out, it is true on cards that compute in bf16 (RTX 30 and later), and false
    on older cards, without a card, or if the driver does not answer; the job stores the value, and a file of another
    tool has that tool's default. `auto` is true unless the card is older than the RTX 30; `fp16` is refused, because
    its loss scaling skips steps whose gradients overflow."""
    attn_implementation: Annotated[Literal["sdpa", "eager"], Field(description="sdpa or eager")] = "sdpa"
    """How attention is computed, as in transformers."""
    exact: Switch = True
    """True: losses and gradients are those of plain PyTorch. False: the head and the loss are computed in chunks of
    rows, so the logits never exist as a whole. Losses and gradients then differ in the last bits ([how
    much](../explanation/exactness.md#with-exact-false)). A model that uses its logits for more than the loss is then
    refused (`loss-not-in-chunks`)."""
    compile: Compile = "auto"
    """With `auto` and `exact: false`, PyTorch's inductor compiles those layers for which compiled code was measured to
    be faster ([how](../explanation/a-step.md#compiled-layers)). The log says where, and why not elsewhere. With `exact:
    true` nothing is compiled."""
    deterministic: Switch = False
    """True: a run has the same bits each time on the same machine, with the same versions and the same plan. This
    includes CUDA, where fused attention otherwise adds up gradients in any order. The deterministic kernels take more
    time and memory, and nothing is compiled. A job with an operation that has no such kernel ends with
    `not-deterministic`, at planning or at its first step."""
