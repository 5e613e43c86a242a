"""The code that runs inside a step makes nobody wait for the device: every call that could is known, and why."""

from __future__ import annotations

import ast
import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from planner.optimizers import adamw
from tests import ROOT
from tests.support.engine_plans import mixed_plan, resident_plan
from tests.support.engines import build, data
from worker.runtime.cpu import CpuMachine
from worker.runtime.host_values import HostValues

INSIDE = (
    "worker/engine/actions.py",
    "planner/optimizers/base.py",
    "planner/optimizers/adamw.py",
    "planner/optimizers/muon.py",
    "worker/engine/answers.py",
    "worker/engine/block_calls.py",
    "worker/runtime/cuda.py",
    "worker/engine/device_items.py",
    "worker/engine/engine.py",
    "worker/engine/forward_only.py",
    "worker/engine/gradients.py",
    "worker/engine/host_items.py",
    "worker/runtime/interpreter.py",
    "worker/runtime/host_values.py",
    "worker/engine/lockstep.py",
    "worker/runtime/step_values.py",
    "worker/runtime/registered.py",
    "worker/runtime/driver.py",
    "planner/out_of_memory.py",
    "worker/runtime/queues.py",
    "worker/engine/rounds.py",
    "worker/runtime/slabs.py",
    "planner/graph/call.py",
    "planner/graph/chunks.py",
    "planner/graph/deferred_logits.py",
    "planner/graph/loss_by_rows.py",
    "planner/models/preference_loss.py",
    "planner/models/preferences.py",
    "planner/graph/interface.py",
    "planner/graph/codegen.py",
    "planner/graph/inductor.py",
    "planner/graph/eager.py",
    "planner/graph/label.py",
    "planner/graph/block_code.py",
    "planner/graph/result.py",
    "planner/graph/signature.py",
    "planner/graph/tangents.py",
    "worker/runtime/arena.py",
    "planner/graph/pieces.py",
    "worker/runtime/recording.py",
    "worker/engine/shared_rows.py",
    "worker/engine/engine.py",
    "worker/engine/stored_activations.py",
    "worker/engine/stored_weights.py",
    "worker/runtime/small_copies.py",
    "worker/engine/layouts.py",
)
NOT_THERE = {
    "planner/cpu/adamw.py": "updates on the CPU; those on a GPU only call PyTorch's kernel by it",
    "planner/schedule/operations.py": "knows no tensors",
    "planner/schedule/items.py": "knows no tensors",
    "worker/engine/shorter_slices.py": "before a step, of tensors without data",
    "worker/runtime/cpu.py": "the CPU as device",
    "worker/engine/weights.py": "compares names at the end of a step, the rest is done between steps",
}
"""Of what runs in a step, what has nothing to do with a GPU's memory then."""

ALLOWED = {
    # (file, function, call): why nobody waits for the device in a step
    ("worker/engine/actions.py", "Actions._replay", "float"): "the coefficient's host copy, by the CPU's thread",
    ("worker/engine/actions.py", "Actions._update_on_cpu", "copy_"): "from the host to the host, by the CPU's thread",
    ("worker/engine/actions.py", "Actions._update_piece", "copy_"): "from the host to the host, by the CPU's thread",
    ("planner/optimizers/base.py", "check_not_negative", "float"): "of settings, before a step",
    ("planner/optimizers/adamw.py", "AdamWGroup.from_pytorch", "float"): "of settings, before a step",
    ("planner/optimizers/muon.py", "MuonGroup.from_pytorch", "float"): "of settings, before a step",
    ("planner/optimizers/muon.py", "_orthogonal", "copy_"): "from the device to the device",
    ("planner/optimizers/muon.py", "update", "copy_"): "from the device to the device",
    ("planner/optimizers/adamw.py", "update_in_lists", "to"): "from the device to the device",
    ("planner/optimizers/adamw.py", "update_in_lists", "copy_"): "from the device to the device",
    ("worker/runtime/cuda.py", "CudaMachine.place", "copy_"): "weights on their way to the device, when no step runs",
    ("worker/runtime/cuda.py", "CudaMachine._bytes_outside", "int"): "of the driver's counts, between steps",
    ("worker/runtime/cuda.py", "CudaMachine.cap", "int"): "of Python numbers",
    ("worker/runtime/cuda.py", "CudaMachine.synchronize", "synchronize"): "asked for after errors and evaluations",
    ("worker/runtime/cuda.py", "CudaInterpreter.run", "synchronize"): "only the CPU's thread waits, for its gradients",
    ("worker/runtime/cuda.py", "CudaInterpreter.record", "synchronize"): "when no step runs: a recording begins",
    ("worker/runtime/cuda.py", "CudaInterpreter._finish", "synchronize"): "when no step runs: drain and close",
    ("worker/runtime/registered.py", "_Registered.__del__", "synchronize"): "memory ends, or a slab grows",
    ("worker/runtime/small_copies.py", "SmallCopies.stage", "copy_"): "from the host to the host",
    ("worker/runtime/queues.py", "QueueInterpreter.__init__", "bool"): "of a list, when the program is known",
    ("worker/runtime/registered.py", "pinned", "pin_memory"): "torch's pool reuses the memory of a step's batches",
    ("worker/runtime/registered.py", "pinned_like", "pin_memory"): "of host tensors; torch's pool reuses the memory",
    ("worker/runtime/registered.py", "registered", "int"): "an error's number",
    ("worker/runtime/registered.py", "_Registered.__del__", "int"): "likewise",
    ("planner/out_of_memory.py", "is_out_of_memory", "bool"): "of words, after an error",
    ("worker/runtime/registered.py", "registered", "cudaHostRegister"): "before the first step, or where a slab grows",
    ("worker/runtime/registered.py", "_Registered.__del__", "cudaHostUnregister"): "likewise",
    ("worker/engine/engine.py", "Engine._values", "float"): "of a Python number",
    ("worker/engine/shared_rows.py", "SharedRows.tokens", "unique"): "of tokens in host memory",
    ("worker/engine/engine.py", "Engine._tear", "synchronize"): "after an error",
    ("worker/engine/engine.py", "Engine._let_go", "synchronize"): "as the engine ends",
    ("worker/engine/answers.py", "answers", "tolist"): "the answer, when all tokens are there",
    ("worker/engine/answers.py", "_padded", "tensor"): "on the host",
    ("worker/engine/forward_only.py", "Forward._passes", "synchronize"): "after an evaluation",
    ("worker/engine/host_items.py", "Host.hold", "copy_"): "before the first step",
    ("worker/engine/host_items.py", "new_states", "copy_"): "before the first step",
    ("worker/engine/device_items.py", "Device.fetch", "copy_"): "of weights wholly on disk, when no step runs",
    ("worker/engine/stored_weights.py", "StoredWeights.put", "copy_"): "not in a step: as it begins or is loaded",
    ("worker/runtime/host_values.py", "HostValues._follow", "to"): "on the host",
    ("worker/runtime/host_values.py", "_of_host", "to"): "on the host",
    ("worker/engine/gradients.py", "Gradients.add", "copy_"): "from the device to the device",
    ("planner/graph/loss_by_rows.py", "_LogProbabilities.backward", "copy_"): "from the device to the device",
    ("planner/graph/chunks.py", "ChunkedHead._compute_gradients", "copy_"): "from the device to the device",
    ("planner/graph/chunks.py", "ChunkedHead.finish", "to"): "from the device to the device",
    ("planner/graph/codegen.py", "eager_dropouts", "equal"): "when code is made, of numbers in host memory",
    ("planner/graph/eager.py", "EagerPair._holding", "copy_"): "from the device to the device",
    ("worker/runtime/arena.py", "Arena.counts", "int"): "of the C library's numbers",
    ("worker/runtime/arena.py", "Arena.open", "bool"): "of the C library's answer",
    ("planner/graph/codegen.py", "cpu_dropout", "to"): "on the CPU only",
    ("planner/graph/codegen.py", "_cpu_dropout_backward.backward", "to"): "on the CPU only",
}

METHODS = {
    "allclose",
    "argwhere",
    "as_tensor",
    "bincount",
    "cpu",
    "cuda",
    "empty_cache",
    "equal",
    "histc",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "numpy",
    "pin_memory",
    "query",
    "repeat_interleave",
    "synchronize",
    "tensor",
    "tolist",
    "unique",
    "unique_consecutive",
    "cudaHostRegister",
    "cudaHostUnregister",
}
BUILTINS = {"bool", "float", "int"}
COPIES = {"to", "copy_", "_foreach_copy_"}
READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim", "bincount"}
"""Operations whose result the host must know to go on."""


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
            case ast.Attribute() if any(keyword.arg == "pin_memory" for keyword in node.keywords):
                self.found.append((".".join(self._inside), "pin_memory"))
            case ast.Name(id=name) if name in BUILTINS:
                self.found.append((".".join(self._inside), name))
        self.generic_visit(node)


def _asynchronous(call: ast.Call) -> bool:
    return any(
        keyword.arg == "non_blocking" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        for keyword in call.keywords
    )


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
        ("loss.item()", "item"),
        ("float(norm)", "float"),
        ("a.to(device)", "to"),
        ("host.copy_(norm)", "copy_"),
        ("torch.cuda.synchronize()", "synchronize"),
        ("mask.nonzero()", "nonzero"),
        ("torch.equal(a, b)", "equal"),
        ("if bool(total.isnan()): pass", "bool"),
        ("host.copy_(norm, non_blocking=True)", None),
        ("a.norm()", None),
        ("host.copy_(norm, non_blocking=False)", "copy_"),
        ("a.to(device, non_blocking=later)", "to"),
        ("rows.tolist()", "tolist"),
        ("torch.tensor(3, device=device)", "tensor"),
        ("grad.cpu()", "cpu"),
    ],
)
def test_what_counts_as_such_a_call(line, call):
    assert list(waits_in(f"class A:\n def f():\n  {line}")) == ([("A.f", call)] if call else [])


@pytest.fixture
def steps() -> Iterator[Callable[[str, str], None]]:
    """steps(model, plan): a step of several slices, after one in which code is made, and then one that is watched."""
    engines = []

    def run_steps(name: str, option: str) -> None:
        plan_of = mixed_plan if option == "mixed" else functools.partial(resident_plan, option=option)
        engine, _ = build(name, plan_of, slices=2, rounds=2, clip=0.5)
        engines.append(engine)
        for step in range(2):
            batches, rest = data(step, 4)
            watched.on = step > 0
            engine.step(batches, learning_rate=1e-3, **rest)
            watched.on = False

    yield run_steps
    for engine in engines:
        engine.close()


class watched:
    """Whether this is the time to look."""

    on = False


def test_all_files_whose_code_runs_in_a_step_are_looked_through(steps):
    steps("gpt2", "mixed")  # makes the code, which would take long below
    ran = set()

    def see(frame: FrameType, event: str, arg: object) -> None:
        if watched.on:
            ran.add(frame.f_code.co_filename)

    threading.setprofile(see)  # of threads that begin now
    sys.setprofile(see)
    try:
        steps("gpt2", "mixed")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    ours = {str(Path(name).relative_to(ROOT)) for name in ran if Path(name).is_relative_to(ROOT)}
    ours = {name for name in ours if name.startswith(("worker/", "planner/"))}
    assert {"worker/engine/rounds.py", "worker/engine/device_items.py"} < ours
    assert ours <= {*INSIDE, *NOT_THERE}


class Reads(TorchDispatchMode):
    """Notes the operations that read numbers, but where the host gives a model its answer."""

    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        mask = func is torch.ops.aten.index.Tensor and any(t is not None and t.dtype == torch.bool for t in args[1])
        if watched.on and (name in READS or mask) and not _answered(sys._getframe()):
            self.found.add(name)
        return func(*args, **(kwargs or {}))


def _answered(frame: FrameType | None) -> bool:
    while frame is not None and Path(frame.f_code.co_filename).name != "host_values.py":
        frame = frame.f_back
    return frame is not None


@pytest.mark.parametrize(("name", "option"), [("gpt2", "mixed"), ("llama", "recompute")])
def test_no_number_is_read_where_a_step_computes(steps, monkeypatch, name, option):
    found: set[str] = set()
    monkeypatch.setattr(CpuMachine, "computing", lambda self: Reads(found))
    monkeypatch.setattr(adamw, "update", adamw.update_in_lists)  # as a GPU does
    monkeypatch.setattr(CpuMachine, "frame", lambda self, batch: HostValues(self.device))
    steps(name, option)
    assert not found
    monkeypatch.setattr(CpuMachine, "frame", lambda self, batch: contextlib.nullcontext())
    steps(name, option)
    assert found == {"_local_scalar_dense"}  # Transformers asks whether texts are packed
