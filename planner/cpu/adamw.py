"""Does AdamW steps on tensors in host memory, bit for bit as PyTorch's AdamW(fused=True), and computes norms of
gradients.

If there is a C compiler, an update is one pass over memory. `cpu_kernel()` returns the fastest kernel on this machine.
Both kernels split tensors only at multiples of a cache line, and never join tensors: PyTorch computes the last
elements of a tensor in another way, which rounds otherwise.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from planner.cpu import build
from planner.cpu.eight_bits import moment_bytes
from planner.cpu.packed import pack, unpack
from planner.cpu.rounded import Chunk, Numbers, Scratch, both_numbers, table

log = logging.getLogger(__name__)

CHUNK = 1 << 19  # elements: few enough that each pass finds the data of the pass before in the cache
SOURCE = Path(__file__).with_name("adamw.c")


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A tensor to update, with all tensors that the update reads, on one device. The moments `exp_avg` and
    `exp_avg_sq` have the master's dtype (fp32 if the master is packed), or are bytes if they are in 8 bits
    (`planner.cpu.rounded`).

    `master` is the tensor that the optimizer updates, contiguous like the moments. `work` is the working copy, with
    which the model computes: `master` itself if both have one dtype. If states are packed (`planner.cpu.packed`, on
    the CPU only), `master` is int16 and holds only the lower halves of the fp32 master. `before` (on the CPU only):
    master, moments and, if packed, working copy to read from, in place of the tensors here, which are then only
    written.
    """

    name: str
    weight_decay: float
    work: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    gradient: Tensor
    before: tuple[Tensor, ...] | None = None

    @property
    def packed(self) -> bool:
        """Whether states are packed: then `master` holds only the lower halves of the fp32 master."""
        return self.master.dtype == torch.int16

    @property
    def rounded(self) -> bool:
        """Whether the moments are stored in 8 bits."""
        return self.exp_avg.dtype == torch.uint8


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The numbers of one AdamW step that are the same for all tensors. `count`: the step's number, from 1.
    `coefficient`: the factor by which gradients are multiplied for clipping, None without clipping. Both are float32
    tensors without dimensions, on the device of the updated tensors."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    count: Tensor
    coefficient: Tensor | None


class Kernel(Protocol):
    """Does AdamW steps on tensors in host memory, with as many threads as torch uses in the calling thread.

    `description` says in a few words what the kernel is. `shortcoming` says why it is not a better one, "" for the
    best. `packs`: whether the kernel updates packed states as fast as others.
    """

    description: str
    shortcoming: str
    packs: bool

    def update(self, targets: Sequence[Target], step: Step) -> None:
        """Do one AdamW step on every target. Gradients are not changed."""

    def norms(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The 2-norm of each gradient, equal to `torch.linalg.vector_norm` of the gradient converted to fp32; float32
        tensors without dimensions."""


class ChunkedKernel:
    """Does AdamW steps with PyTorch's own kernel, one chunk of a tensor at a time, so that conversion, scaling and
    update find their data in the cache."""

    description = "PyTorch's, in chunks"
    packs = False

    def __init__(self, shortcoming: str = "") -> None:
        self.shortcoming = shortcoming

    def update(self, targets: Sequence[Target], step: Step) -> None:
        """Do one AdamW step on every target. Gradients are not changed."""
        for target in targets:
            if target.rounded:
                update_rounded(target, step, CHUNK // 4, both_numbers())
            else:
                _update_in_chunks(target, step)

    def norms(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The 2-norm of each gradient, computed in fp32; float32 tensors without dimensions."""
        return [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]


def _update_in_chunks(target: Target, step: Step) -> None:
    wide, most = target.exp_avg.dtype, min(CHUNK, target.master.numel())
    converts = target.gradient.dtype != wide or step.coefficient is not None
    scratch = torch.empty(most if converts else 0, dtype=wide)
    whole = torch.empty(most if target.packed else 0, dtype=wide)
    parts = (target.master, target.gradient, target.exp_avg, target.exp_avg_sq, target.work)
    flat = [tensor.reshape(-1) for tensor in parts]
    before = [tensor.reshape(-1) for tensor in target.before or ()]
    for start in range(0, target.master.numel(), CHUNK):
        master, gradient, exp_avg, exp_avg_sq, work = (tensor[start : start + CHUNK] for tensor in flat)
        for old, new in zip(before, (master, exp_avg, exp_avg_sq, work), strict=False):
            new.copy_(old[start : start + CHUNK])
        low = master
        if target.packed:
            master = whole[: low.numel()]
            unpack(work, low, exp_avg_sq, master)
        if converts:
            gradient = scratch[: gradient.numel()].copy_(gradient)
            if step.coefficient is not None:
                gradient.mul_(step.coefficient)
        fused([master], [gradient], [exp_avg], [exp_avg_sq], step, target.weight_decay)
        if target.packed:
            pack(master, work, low, exp_avg_sq)
        elif target.work is not target.master:
            work.copy_(master)


def update_rounded(target: Target, step: Step, chunk: int, known: tuple[Numbers, Numbers]) -> None:
    """Do one AdamW step on a tensor whose moments are in 8 bits, on any device, `chunk` elements at a time. `known`:
    for the first and the second moment, the 256 numbers that a byte stands for, on that device."""
    master, gradient, work = (tensor.reshape(-1) for tensor in (target.master, target.gradient, target.work))
    for old, new in zip(target.before or (), (target.master, target.exp_avg, target.exp_avg_sq), strict=False):
        new.copy_(old)
    scratch = Scratch(min(chunk, master.numel()), master.device)
    for start in range(0, master.numel(), chunk):
        part = Chunk.load((target.exp_avg, target.exp_avg_sq), known, gradient, start, scratch)
        if step.coefficient is not None:
            part.gradient.mul_(step.coefficient)
        whole = master[part.span]
        fused([whole], [part.gradient], [part.exp_avg], [part.exp_avg_sq], step, target.weight_decay)
        part.store()
        if target.work is not target.master:
            work[part.span].copy_(whole)


def fused(
    masters: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    step: Step,
    weight_decay: float,
) -> None:
    """Do one step of PyTorch's fused AdamW on these tensors, in place, called as `torch.optim` calls it, on any
    device."""
    torch._fused_adamw_(
        masters,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        [step.count] * len(masters),
        lr=step.learning_rate,
        beta1=step.betas[0],
        beta2=step.betas[1],
        weight_decay=weight_decay,
        eps=step.eps,
        amsgrad=False,
        maximize=False,
    )


_Pointers = ctypes.c_void_p * 4


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("n", ctypes.c_long),
        ("gradient", ctypes.c_void_p),
        ("from", _Pointers),
        ("master", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("work", ctypes.c_void_p),
        ("decay", ctypes.c_float),
        ("layout", ctypes.c_int),
    )


class _Step(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_float) for name in ("rise", "beta2", "growth", "root", "size", "eps", "factor"))


_LAYOUTS = {
    (torch.float32, torch.float32, torch.float32): 0,
    (torch.float32, torch.bfloat16, torch.bfloat16): 1,
    (torch.bfloat16, torch.bfloat16, torch.bfloat16): 2,
    (torch.int16, torch.bfloat16, torch.bfloat16): 3,
}
"""Dtypes of master, gradient and working copy -> the number of this combination in adamw.c. Moments have the master's
dtype, fp32 if the master is packed (int16)."""
_WIDE = torch.float32
_ROUNDED = 4  # added to a layout's number where moments are in 8 bits; then masters are fp32


class NativeKernel:
    """Does AdamW steps in C (`adamw.c`), in one pass over memory. It moves 28 bytes per parameter, both for bf16 with
    an fp32 master and for all fp32."""

    description = "one pass, built for this processor"
    shortcoming = ""
    packs = True

    def __init__(self) -> None:
        """Build and load adamw.c. Raises CannotBuildError if that is not possible."""
        library = build.load(SOURCE)
        self._update, self._norm = library.offmate_adamw, library.offmate_norm
        self._update.argtypes = (ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p)
        self._update.restype = None
        self._norm.argtypes = (ctypes.c_void_p, ctypes.c_long)
        self._norm.restype = ctypes.c_float
        self._others = ChunkedKernel()

    def update(self, targets: Sequence[Target], step: Step) -> None:
        """Do one AdamW step on every target. Gradients are not changed. Targets with dtypes that adamw.c does not
        handle are updated by PyTorch."""
        known = [(t, layout) for t in targets if (layout := _layout(t)) is not None]
        if len(known) < len(targets):
            self._others.update([t for t in targets if _layout(t) is None], step)
        gradients = [t.gradient.contiguous() for t, _ in known]  # maybe copies: they must live until the call ends
        tensors = (_Tensor * len(known))(
            *(_tensor(t, g, layout, step) for (t, layout), g in zip(known, gradients, strict=True))
        )
        constants = _constants(step)
        self._update(ctypes.byref(tensors), len(known), ctypes.byref(constants), torch.get_num_threads(), _numbers())

    def norms(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The 2-norm of each gradient; float32 tensors without dimensions. A bf16 gradient is summed in C, because
        PyTorch would make an fp32 copy; for an fp32 one PyTorch's own norm is as good."""
        return [
            torch.tensor(self._norm(gradient.data_ptr(), gradient.numel()), dtype=torch.float32)
            if gradient.dtype == torch.bfloat16 and gradient.is_contiguous()
            else self._others.norms([gradient])[0]
            for gradient in gradients
        ]


@functools.cache
def _numbers() -> ctypes.Array[ctypes.c_void_p]:
    """Addresses of the two tables in which adamw.c looks up the numbers that bytes stand for: signed ones for the
    first moment, unsigned ones for the second."""
    return (ctypes.c_void_p * 2)(*(table(signed=signed).data_ptr() for signed in (True, False)))


def _layout(target: Target) -> int | None:
    layout = _LAYOUTS.get((target.master.dtype, target.gradient.dtype, target.work.dtype))
    if layout is None or not target.rounded:
        return layout
    return layout + _ROUNDED if target.master.dtype == torch.float32 else None


def _tensor(target: Target, gradient: Tensor, layout: int, step: Step) -> _Tensor:
    state = (target.master, target.exp_avg, target.exp_avg_sq, target.work)
    before = target.before or state
    elements = gradient.numel()
    moments = moment_bytes(elements) if target.rounded else elements
    for tensors in (state, before) if target.before else (state,):
        for tensor, size in zip(tensors, (elements, moments, moments, elements), strict=False):
            assert tensor.is_contiguous() and tensor.numel() == size, target.name
    assert len(before) == len(state) or not target.packed, target.name
    return _Tensor(
        elements,
        gradient.data_ptr(),
        _Pointers(*[t.data_ptr() for t in before]),
        *[t.data_ptr() for t in state],
        1 - step.learning_rate * target.weight_decay,
        layout,
    )


def _constants(step: Step) -> _Step:
    """The constants of a step, computed in double as PyTorch does. Each is rounded once, when it becomes a field."""
    count, (beta1, beta2) = float(step.count), step.betas
    return _Step(
        rise=1 - beta1,
        beta2=beta2,
        growth=1 - beta2,
        root=math.sqrt(1 - beta2**count),
        size=step.learning_rate / (1 - beta1**count),
        eps=step.eps,
        factor=1.0 if step.coefficient is None else float(step.coefficient),
    )


_choosing = threading.Lock()  # building takes a second, and several threads may be the first


def cpu_kernel() -> Kernel:
    """The fastest kernel on this machine whose results equal PyTorch's bit for bit. The first call in a process
    compares the kernel in C with PyTorch's, and logs which one is used."""
    with _choosing:
        return _chosen()


@functools.cache
def _chosen() -> Kernel:
    kernel: Kernel
    try:
        kernel = NativeKernel()
        check(kernel)
    except (build.CannotBuildError, ArithmeticError) as error:
        kernel = ChunkedKernel(str(error))
        log.warning("updates on the CPU: %s, slower than they could be (%s)", kernel.description, error)
    else:
        log.info("updates on the CPU: %s", kernel.description)
    return kernel


def check(kernel: Kernel) -> None:
    """Raise ArithmeticError if `kernel` gives other bits than PyTorch, on small tensors of every combination of
    dtypes. Another processor, another PyTorch, or ATEN_CPU_CAPABILITY may lead to another order of the same
    arithmetic."""
    plain, draw, same = ChunkedKernel(), torch.Generator().manual_seed(0), True
    layouts = [(False, dtypes) for dtypes in _LAYOUTS] + [(True, dtypes) for dtypes in _LAYOUTS if dtypes[0] == _WIDE]
    for rounded, dtypes in layouts:
        for beta1 in (0.9, 0.3):  # a moment far from the gradient, and one near it
            ours, theirs = (_sample(*dtypes, rounded=rounded) for _ in range(2))
            for count in range(1, 4):
                step = Step(
                    learning_rate=1e-2,
                    betas=(beta1, 0.95),
                    eps=1e-8,
                    count=torch.tensor(float(count), dtype=torch.float32),
                    coefficient=torch.tensor(0.7, dtype=torch.float32),
                )
                for mine, other in zip(ours, theirs, strict=True):
                    other.gradient.copy_(mine.gradient.normal_(generator=draw))
                kernel.update(ours, step)
                plain.update(theirs, step)
                norms = (each.norms([target.gradient for target in ours]) for each in (kernel, plain))
                same = same and all(torch.equal(a, b) for a, b in zip(*norms, strict=True))
            for mine, other in zip(ours, theirs, strict=True):
                pairs = [(mine.master, other.master), (mine.exp_avg, other.exp_avg), (mine.work, other.work)]
                pairs.append((mine.exp_avg_sq, other.exp_avg_sq))
                same = same and all(torch.equal(a, b) for a, b in pairs)
    if not same:
        raise ArithmeticError("its results differ from PyTorch's on this machine")


def _sample(
    master_dtype: torch.dtype, gradient_dtype: torch.dtype, work_dtype: torch.dtype, *, rounded: bool
) -> list[Target]:
    """Targets of several lengths: with and without whole groups of elements, and with different remainders."""
    targets = []
    for size in (3, 77, 1003):
        packed = master_dtype == torch.int16
        dtype = torch.uint8 if rounded else _WIDE if packed else master_dtype
        exp_avg, exp_avg_sq = (torch.zeros(moment_bytes(size) if rounded else size, dtype=dtype) for _ in range(2))
        master = torch.full((size,), 0 if packed else 1, dtype=master_dtype)  # packed: the lower half of 1
        work = master if work_dtype == master_dtype else torch.ones(size, dtype=work_dtype)
        gradient = torch.empty(size, dtype=gradient_dtype)
        targets.append(Target(f"{size}", 0.1, work, master, exp_avg, exp_avg_sq, gradient))
    return targets
