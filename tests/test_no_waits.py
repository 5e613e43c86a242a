"""The code that runs inside a step makes nobody wait for the device: every call that could is known, and why."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

INSIDE = (
    "worker/actions.py", "worker/adamw.py", "worker/calls.py", "worker/cuda.py", "worker/device.py",
    "worker/engine.py", "worker/forward.py", "worker/gradients.py", "worker/interpreter.py", "worker/lockstep.py",
    "worker/queues.py", "worker/rounds.py", "planner/graph/call.py", "planner/graph/chunks.py",
    "planner/graph/codegen.py", "planner/graph/eager.py", "planner/graph/pair.py",
)  # fmt: skip

ALLOWED = {
    # (file, function, call): why nobody waits for the device in a step
    ("worker/actions.py", "Actions._replay", "float"): "the coefficient's copy in host memory, by the CPU's thread",
    ("worker/adamw.py", "update_in_lists", "to"): "from the device to the device",
    ("worker/adamw.py", "update_in_lists", "copy_"): "from the device to the device",
    ("worker/cuda.py", "CudaMachine.place", "copy_"): "weights on their way to the device, when no step runs",
    ("worker/cuda.py", "CudaMachine._bytes_outside", "int"): "of the driver's counts, between steps",
    ("worker/cuda.py", "CudaMachine.cap", "int"): "of Python numbers",
    ("worker/cuda.py", "CudaMachine.synchronize", "synchronize"): "asked for after errors and evaluations",
    ("worker/cuda.py", "CudaInterpreter.run", "synchronize"): "the CPU's thread waits for its gradients, no other does",
    ("worker/cuda.py", "CudaInterpreter._finish", "synchronize"): "when no step runs: drain and close",
    ("worker/cuda.py", "_Registered.__del__", "synchronize"): "memory ends: with the engine, or where a slab grows",
    ("worker/cuda.py", "_registered", "int"): "an error's number",
    ("worker/engine.py", "Engine._values", "float"): "of a Python number",
    ("worker/engine.py", "Engine._tokens", "unique"): "of tokens in host memory",
    ("worker/engine.py", "Engine._tear", "synchronize"): "after an error",
    ("worker/forward.py", "Forward.generate", "tolist"): "the answer, when all tokens are there",
    ("worker/forward.py", "Forward._passes", "synchronize"): "after an evaluation",
    ("worker/gradients.py", "Gradients.add", "copy_"): "from the device to the device",
    ("planner/graph/chunks.py", "ChunkedHead.compute", "copy_"): "from the device to the device",
    ("planner/graph/chunks.py", "ChunkedHead.finish", "to"): "from the device to the device",
    ("planner/graph/codegen.py", "eager_dropouts", "equal"): "when code is made, of numbers in host memory",
    ("planner/graph/eager.py", "EagerPair._run", "copy_"): "from the device to the device",
    ("planner/graph/codegen.py", "cpu_dropout", "to"): "on the CPU only",
    ("planner/graph/codegen.py", "_cpu_dropout_backward.backward", "to"): "on the CPU only",
}  # fmt: skip

METHODS = {
    "item", "cpu", "tolist", "numpy", "nonzero", "is_nonzero", "synchronize", "masked_select", "unique",
    "unique_consecutive", "equal", "allclose", "query",
}  # fmt: skip
BUILTINS = {"bool", "float", "int"}
COPIES = {"to", "copy_"}


class Waits(ast.NodeVisitor):
    """Calls that may wait for the device, each as (function, call). Copies that do not ask to be asynchronous count."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []
        self._inside: list[str] = []

    def _enter(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self._inside.append(node.name)
        self.generic_visit(node)
        self._inside.pop()

    visit_ClassDef = visit_FunctionDef = _enter

    def visit_Call(self, node: ast.Call) -> None:
        match node.func:
            case ast.Attribute(attr=name) if name in METHODS or (name in COPIES and not _asynchronous(node)):
                self.found.append((".".join(self._inside), name))
            case ast.Name(id=name) if name in BUILTINS:
                self.found.append((".".join(self._inside), name))
        self.generic_visit(node)


def _asynchronous(call: ast.Call) -> bool:
    return any(keyword.arg == "non_blocking" for keyword in call.keywords)


def waits_in(source: str) -> Iterator[tuple[str, str]]:
    visitor = Waits()
    visitor.visit(ast.parse(source))
    yield from dict.fromkeys(visitor.found)


@pytest.mark.parametrize("path", INSIDE)
def test_every_call_that_may_wait_for_the_device_is_known(path):
    found = {(path, *one) for one in waits_in((ROOT / path).read_text("utf-8"))}
    assert found == {one for one in ALLOWED if one[0] == path}


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("loss.item()", "item"), ("float(norm)", "float"), ("a.to(device)", "to"), ("host.copy_(norm)", "copy_"),
        ("torch.cuda.synchronize()", "synchronize"), ("mask.nonzero()", "nonzero"), ("torch.equal(a, b)", "equal"),
        ("if bool(total.isnan()): pass", "bool"), ("host.copy_(norm, non_blocking=True)", None), ("a.norm()", None),
    ],
)  # fmt: skip
def test_what_counts_as_such_a_call(line, call):
    assert list(waits_in(f"class A:\n def f():\n  {line}")) == ([("A.f", call)] if call else [])
