"""Defines the result of comparing a job's first steps with plain PyTorch's, as values to be shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The comparison of all numbers of one sort (`what`), such as losses. `greatest`: the greatest absolute difference,
    found at `at`. `size`: the greatest absolute value of plain PyTorch at `at`, or of all numbers if there is no
    difference. `equal` of `count` numbers or tensors agree in every bit. Numbers that are not finite count as the
    largest float."""

    what: str
    greatest: float
    at: str
    size: float
    equal: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The greatest absolute difference between offmate's and plain PyTorch's values of one parameter."""

    parameter: str
    greatest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A comparison of a job's first `steps` steps, done by offmate and by plain PyTorch.

    `layers` of the model's `all_layers` were compared: fewer than all if plain PyTorch has no room for the whole model.
    It would take `plain_bytes` on the device, which has `there_bytes`. `moved_bytes`: bytes copied between host and
    device in each step of the plan. `cpu_updated`: number of tensors that the CPU updates.

    `reasons`: why results may differ within rounding; without a reason every bit must be equal. With one, the losses
    and the gradient norm of the first step may differ by the fraction `allowed` of their size; `first` is the fraction
    by which they differ. Later steps are not judged: they start from other weights, and AdamW makes whole steps of
    gradients that are nearly zero. Without clipping the norm is that of the first moments, which are then the gradients
    times a constant.

    `rounded`: AdamW's moments are in 8 bits, and plain PyTorch rounded its moments in the same way after each update.
    `decided`: the plan was kept before, and the submitted job trains under it; otherwise it was made for the
    certificate, as a job's plan is made when the job starts. `other_kernels`: the job itself uses faster kernels, which
    need other memory, so its own plan differs. `kernels`: the PyTorch kernels that both used, in one line. `refused`:
    operations that have no deterministic kernels.
    """

    model: str
    device: str
    steps: int
    slices: int
    layers: int
    all_layers: int
    plain_bytes: int
    there_bytes: int
    gpu_budget_bytes: int
    gpu_peak_bytes: int
    moved_bytes: int
    cpu_updated: int
    options: tuple[str, ...]
    findings: tuple[Finding, ...]
    parameters: tuple[Difference, ...]
    reasons: tuple[str, ...]
    first: float
    allowed: float
    rounded: bool = False
    decided: bool = False
    other_kernels: bool = False
    kernels: str = ""
    refused: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether no difference is greater than allowed."""
        return self.bitwise or (bool(self.reasons) and self.first <= self.allowed)

    @property
    def bitwise(self) -> bool:
        """Whether all compared numbers are equal in every bit."""
        return all(finding.equal == finding.count for finding in self.findings)
