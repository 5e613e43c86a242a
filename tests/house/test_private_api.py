"""torch's private API has one home, `planner/graph/`; each use elsewhere is named here with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: file -> private names of torch it may use
ELSEWHERE = {
    # AdamW as PyTorch computes it: the same kernels, on slices of tensors that no optimizer object knows
    "planner/cpu/adamw.py": {"torch._fused_adamw_"},
    # what goes in and comes out of an operation: modes that look at operations have no public helper for either
    "planner/cpu/meter.py": {"torch.utils._python_dispatch", "torch.utils._pytree"},
    # who holds a gradient, and whether a backward runs: what autograd itself looks at
    "planner/cpu/in_place_sums.py": {"torch._C", "torch.utils._python_dispatch"},
    "worker/runtime/host_values.py": {"torch.utils._pytree"},
    # a kernel that only takes time, behind which more can be issued than the device has done
    "planner/measure/stopwatch.py": {"torch._C"},
    # modes that look at the frame's operations are to look at no block
    "worker/engine/block_calls.py": {"torch._C"},
    "worker/engine/rounds.py": {"torch._C"},
    # several copies in one call
    "worker/engine/layouts.py": {"torch._foreach_copy_"},
    # the norm and its coefficient as clip_grad_norm_ computes them
    "planner/optimizers/adamw.py": {"torch._foreach_mul_"},
    "worker/engine/gradients.py": {"torch._foreach_norm"},
}


def private_names(source: str) -> Iterator[str]:
    """Dotted names below torch, as far as their first part that begins with one underscore."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            names = [dotted(node)]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            private = [n for n, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")]
            if parts[0] == "torch" and private:
                yield ".".join(parts[: private[0] + 1])


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_private_names_are_seen() -> None:
    source = "import torch._x.y\nfrom torch.a import _b\nfrom torch import c\ntorch._d.e()\nself._f\ntorch.__version__"
    assert set(private_names(source)) == {"torch._x", "torch.a._b", "torch._d"}


def test_torchs_private_api_is_used_in_one_folder_and_in_named_places() -> None:
    found: dict[str, set[str]] = {}
    for package in ("planner", "worker", "offmated"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if names := set(private_names(path.read_text("utf-8"))):
                found[name] = names
    assert any(name.startswith("planner/graph/") for name in found)
    assert {name: names for name, names in found.items() if not name.startswith("planner/graph/")} == ELSEWHERE
