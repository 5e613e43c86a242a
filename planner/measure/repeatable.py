"""Makes PyTorch use deterministic kernels, which give the same bits in each run, instead of faster ones.

On CUDA only the strict mode does this: under `warn_only` the backward of fused attention still sums in any order.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.backends import cuda
from torch.utils import deterministic

from planner.errors import Exit, UserError

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_FUSED: tuple[Callable[[], bool], ...] = (
    cuda.flash_sdp_enabled,
    cuda.mem_efficient_sdp_enabled,
    cuda.cudnn_sdp_enabled,
)
_REFUSED = re.compile(r"(\S+) does not have a deterministic implementation")
_WORKSPACES = (":4096:8", ":16:8")  # with these cuBLAS gives the same bits each time
_TOLD = " has no deterministic kernel in PyTorch"


class NotRepeatableError(UserError):
    """Raised if PyTorch has no deterministic kernel for `operation` although deterministic kernels are asked for."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        other = "attn_implementation: eager computes attention otherwise" if _is_attention(operation) else ""
        super().__init__(
            "This job has an operation that does not give the same bits each time.",
            code="not-deterministic",
            numbers=(f"{operation}{_TOLD}",),
            exit_code=Exit.USAGE,
            hint=other or "leave deterministic: true out; the bits of two runs may then differ",
        )

    @classmethod
    def of(cls, error: UserError) -> NotRepeatableError | None:
        """This error made again from `error`, as another process reported it; None if that is a different error."""
        return cls(error.numbers[0].removesuffix(_TOLD)) if error.code == "not-deterministic" else None


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which kernels compute when deterministic ones are wanted. `refused`: the operations that raised an error because
    they have no deterministic kernel, in order.

    If attention is among them, it is computed by matrix products (`SDPBackend.MATH`), which are deterministic. If
    another operation is, PyTorch only warns from then on. Then attention is computed by matrix products, too: its
    fused kernels sum in any order when PyTorch only warns.
    """

    refused: tuple[str, ...] = ()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """A context in which this process computes with these kernels. CUDA must not have multiplied matrices before:
        at its first product cuBLAS reads the size of its workspaces, CUBLAS_WORKSPACE_CONFIG.

        Raises NotRepeatableError if one more operation has no deterministic kernel, and UserError if that variable has
        a value with which PyTorch refuses every product.
        """
        was_set = "CUBLAS_WORKSPACE_CONFIG" in os.environ
        size = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _WORKSPACES[0])
        if size not in _WORKSPACES and torch.cuda.is_available():
            raise UserError(
                "An environment variable lets the results of cuBLAS differ from run to run.",
                code="cublas-workspace",
                numbers=(f'CUBLAS_WORKSPACE_CONFIG is "{size}"',),
                exit_code=Exit.USAGE,
                hint=f"unset CUBLAS_WORKSPACE_CONFIG, or set it to {' or '.join(_WORKSPACES)}; start offmate again",
            )
        try:
            with _repeatable(refuses=all(map(_is_attention, self.refused)), fused=not self.refused):
                yield
        except Exception as error:
            operation = _refusing(error)
            if operation is None or isinstance(error, UserError):
                raise
            raise NotRepeatableError(operation) from error
        finally:
            if not was_set:
                os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)

    def __str__(self) -> str:
        """These kernels in words, on one line."""
        if not self.refused:
            return "deterministic ones only"
        products = "attention is computed by matrix products (SDPBackend.MATH)"
        others = [name for name in self.refused if not _is_attention(name)]
        if not others:
            return f"deterministic ones only; {self.refused[0]} has none, so {products}"
        has = "has none and may differ" if len(others) == 1 else "have none and may differ"
        return f"deterministic ones but for {' and '.join(others)}, which {has} from run to run; {products}"


def with_fallback(act: Callable[[Kernels], _T], *, required: bool) -> _T:
    """The result of `act(kernels)`, called while deterministic kernels compute. If an operation has none, `act` runs
    again with the fallback that `Kernels` describes.

    Raises NotRepeatableError if an operation still fails under its fallback. If the job itself requires deterministic
    kernels (`required`), raises it at once, because the job would fail as well.
    """
    kernels = Kernels()
    while True:
        try:
            with kernels.taken():
                return act(kernels)
        except NotRepeatableError as error:
            if required or error.operation in kernels.refused:
                raise
            kernels = Kernels((*kernels.refused, error.operation))
        gc.collect()  # the error's frames held what `act` had made
        log.warning("%s%s: all is done once more. Kernels: %s", kernels.refused[-1], _TOLD, kernels)


@contextlib.contextmanager
def repeatable_on_cpu() -> Iterator[None]:
    """A context in which this process computes with PyTorch's deterministic kernels. PyTorch warns about an operation
    that has none.

    It is for training on a CPU, where these kernels cost little. Without them several threads add up the gradient of
    an indexed tensor, such as the biases of GPT-OSS's experts, in any order.
    """
    with _repeatable(refuses=False, fused=True):
        yield


def kernels_in_force(device: torch.device) -> str:
    """A short name of the kernels that this process uses on `device` now; measurements are stored under it. "": the
    default ones for training there; on a CPU these are deterministic."""
    enabled = torch.are_deterministic_algorithms_enabled()
    fused = _FUSED[0]()
    if not enabled or (device.type != "cuda" and fused):
        return ""
    refuses = not torch.is_deterministic_algorithms_warn_only_enabled()
    return ("strict" if refuses else "warning") + ("" if fused else ", MATH")


@contextlib.contextmanager
def _repeatable(*, refuses: bool, fused: bool) -> Iterator[None]:
    """A context in which operations without a deterministic kernel raise RuntimeError if `refuses`, else they warn.
    `fused`: attention may use fused kernels."""
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    fusing = [enabled() for enabled in _FUSED]
    torch.use_deterministic_algorithms(True, warn_only=not refuses)
    # Otherwise PyTorch fills all new memory, for the sake of code that reads what was never written.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if not fused:
        _fuse(False, False, False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        _fuse(*fusing)


def _fuse(flash: bool, efficient: bool, cudnn: bool) -> None:
    cuda.enable_flash_sdp(flash)
    cuda.enable_mem_efficient_sdp(efficient)
    cuda.enable_cudnn_sdp(cudnn)


def _refusing(error: BaseException) -> str | None:
    """The name of the operation without a deterministic kernel in the text of `error` or of an error that led to it;
    None if there is none."""
    known: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in known:
        if (match := _REFUSED.search(str(link))) is not None:
            return match[1]
        known.add(id(link))
        link = link.__cause__ or link.__context__
    return None


def _is_attention(operation: str) -> bool:
    return "attention" in operation
