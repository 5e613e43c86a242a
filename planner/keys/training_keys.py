"""The keys of a job for the steps of training: batch size, learning rate, length and optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from planner.keys.base import Keys
from planner.keys.batch import DEFAULT_ROWS
from planner.keys.fields import (
    DEFAULT_EPOCHS,
    MOST,
    Beta,
    Clip,
    Count,
    NotNegative,
    Positive,
    StepLimit,
    Switch,
)
from planner.keys.schedules import SCHEDULES, Schedule
from planner.optimizers.muon import MATCH_RMS, ORIGINAL, Adjust
from planner.optimizers.table import CHOICES, Optim


class StepKeys(Keys):
    """These keys set the batch size, the learning rate and the length of training."""

    per_device_train_batch_size: Annotated[
        Annotated[int, Field(ge=1, le=MOST)] | Literal["auto"],
        Field(description="a whole number from 1 to 10^9, or auto"),
    ] = DEFAULT_ROWS
    """The number of rows in one micro-batch; with `preference` the number of pairs, with `kto` of answers. With `auto`
    the planner splits the rows of a step (`train_batch_size`, by default 8) into micro-batches for the shortest step
    within the budgets; learning then changes only by rounding and by dropout's random numbers. At submission it
    compares divisors of `train_batch_size` by estimates; when the job's turn comes, it measures the best three, and
    `resolved.yaml` in the run folder gets the numbers, which the job keeps when it continues. `offmate plan` shows the
    comparison."""
    gradient_accumulation_steps: Count = 1
    """The number of micro-batches in one optimizer step. The loss of a step is the mean over all their learned tokens.
    A model whose own loss cannot be such a mean is refused for more than 1 (`loss-per-slice`)."""
    train_batch_size: Annotated[Count | None, Field(description="a whole number from 1 to 10^9, or null")] = None
    """The number of rows in one optimizer step, which is `per_device_train_batch_size` times
    `gradient_accumulation_steps`. Beside one of these two keys it sets the other. Alone it means
    `per_device_train_batch_size: auto`; then prefer a number with many divisors (64, 48) to a prime."""
    learning_rate: Positive = 5e-5
    """The highest learning rate of the schedule."""
    lr_scheduler_type: Annotated[Schedule, Field(description=f"one of {', '.join(SCHEDULES)}")] = "linear"
    """The schedule of the learning rate, by transformers' own functions."""
    lr_scheduler_kwargs: Annotated[
        dict[str, int | float | str] | None, Field(description="a mapping of the schedule's own keys, or null")
    ] = None
    """The schedule's own keys, as in transformers: `num_cycles`, `min_lr_rate`, `power` and others. axolotl's
    `cosine_min_lr_ratio` is `cosine_with_min_lr` with that `min_lr_rate`."""
    warmup_steps: Annotated[
        int | float, Field(ge=0, le=MOST, description="a whole number of steps, or a share of all steps below 1")
    ] = 0
    """The number of steps in which the learning rate rises from 0. If the run has no more steps than that, previews and
    the log say so, and submission if it knows the number of steps."""
    num_train_epochs: Annotated[float, Field(gt=0, le=10**6, description="a number above 0, at most 10^6")] = (
        DEFAULT_EPOCHS
    )
    """The number of passes over the data."""
    max_steps: StepLimit = None
    """The number of optimizer steps, which overrides `num_train_epochs`. -1 means null."""


class OptimizerKeys(Keys):
    """These keys say how an optimizer step changes the weights."""

    weight_decay: NotNegative = 0.0
    """The weight decay, which does not apply to biases and norms."""
    decay_all: Switch = False
    """True: biases and norms decay, too, as in `torch.optim.AdamW` by default. It cannot be used with
    `loraplus_lr_ratio`, `embedding_lr` and `embedding_lr_scale`, which decide which weights decay."""
    adam_beta1: Beta = 0.9
    """β₁ of AdamW, which averages gradients."""
    adam_beta2: Beta = 0.999
    """β₂ of AdamW, which averages squared gradients."""
    adam_epsilon: Positive = 1e-8
    """ε of AdamW, which is added to the root of the averaged squared gradients."""
    optim: Annotated[
        Optim,
        Field(description=f"{CHOICES}; their states need no GPU memory"),
    ] = "adamw_torch_fused"
    """The optimizer: `adamw_torch_fused` and `adamw_torch` are AdamW with fused kernels. `adamw_8bit` (also
    `adamw_bnb_8bit`, `paged_adamw_8bit`, `adamw_torch_8bit`) keeps AdamW's moments in 8 bits, so the numbers differ;
    the host needs 8 bytes for each parameter instead of 14 (10 if a step has several
    [rounds](../explanation/a-step.md#rounds-and-slices)), and a CPU needs several times as long for an update. `muon`
    updates each trained matrix of a layer as `torch.optim.Muon` does (momentum 0.95, Nesterov, five Newton-Schulz steps
    in bf16; 10 bytes for each parameter) and everything else, such as experts in one three-dimensional tensor, as AdamW
    does; `learning_rate` and `weight_decay` apply to both. `adamw_8bit` and `muon` cannot be used with `disk_paths`."""
    muon_adjust_lr_fn: Annotated[Adjust, Field(description=f"{MATCH_RMS} or {ORIGINAL}")] = MATCH_RMS
    """Muon's factor for the learning rate, as in `torch.optim.Muon`. `match_rms_adamw` is 0.2 √(longer side), for
    AdamW's rates. `original` is √(rows / columns) if that is above 1, for rates about 0.02; a file of axolotl gets it.
    Without `optim: muon` the key is not used, and a note says so."""
    max_grad_norm: Clip = 1.0
    """The norm of all gradients together is clipped to this number. Without clipping, updates need not wait for the
    last gradient, so steps can be shorter. With clipping, `optim: muon` computes updates on the CPU for what does not
    fit on the GPU, hundreds of times as slowly; give 0 if not all fits."""
