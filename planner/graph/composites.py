"""Makes a trace decompose composite operations as eager PyTorch does.

Torch has Python versions of some composites (recurrent layers, interpolation, matmul), which only a trace calls. They
compute the same by other operations, which round otherwise: traced code would not have eager's bits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch._decomp.decompositions  # registers the Python versions
from torch._C import DispatchKey

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
# Dropout must stay one operation, whose mask takes a byte per element (`codegen.eager_dropouts` gives it eager's
# arithmetic). The Python versions of batch norms call the same kernels, but say that they change their statistics.
_KEPT = ("aten::dropout", "aten::native_batch_norm", "aten::cudnn_batch_norm")


@functools.cache
def _in_python() -> tuple[Any, ...]:
    """The operations that have a Python version, without `_KEPT`."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space == "aten" and name not in _KEPT:
            operation = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            kernels = getattr(operation, "py_kernels", {})
            if DispatchKey.Autograd in kernels or (packet == "matmul" and kernels):
                found.append(operation)
    return tuple(found)


@contextlib.contextmanager
def eager_composites() -> Iterator[None]:
    """Inside, a trace calls the C++ versions of these operations, as eager does."""
    taken = []
    for operation in _in_python():
        taken.append((operation, {key: operation.py_kernels.pop(key) for key in _KEYS if key in operation.py_kernels}))
        operation._dispatch_cache.clear()
    try:
        yield
    finally:
        for operation, kernels in taken:
            operation.py_kernels.update(kernels)
            operation._dispatch_cache.clear()
