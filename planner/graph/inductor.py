"""Compiles a block's forward and backward with inductor. Compiled code passes over memory fewer times, but its results
differ in the last bits."""

from __future__ import annotations

import contextlib
import operator
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._triton import has_triton

from planner.cpu.build import cache_folder
from planner.errors import first_line
from planner.graph.block_code import Pair
from planner.graph.interface import Sink
from planner.graph.joint import Joint
from planner.graph.nodes import is_random


class CannotCompileError(Exception):
    """A block's code cannot be compiled. The message says why, in words for the log."""


def why_not_compilable(device: torch.device) -> str | None:
    """Why blocks cannot be compiled for `device`; None if they can."""
    if device.type == "cuda":
        return None if has_triton() else "there is no triton for this GPU"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler"
    return None


class CompiledPair(Pair):
    """A block's generated code (`Pair`) compiled by inductor. Forward hands the same list of tensors to backward as
    the generated code does.

    Its predicted peaks are those of the generated functions. What the compiled functions really need is measured: when
    their backward ends, all of the block's weight gradients exist. A compiled function takes one layout only. Tensors
    with other strides than in the trace go to the generated functions; the gradient of a tensor that several blocks
    share may have such strides.
    """

    def __init__(self, pair: Pair) -> None:
        """Compile `pair`. Raises CannotCompileError."""
        self.__dict__.update(pair.__dict__)
        joint = pair.joint
        if any(is_random(node) for node in (*self.forward_nodes, *self.backward_nodes)):
            # Inductor draws other numbers than eager, and draws new ones where a block is computed again.
            raise CannotCompileError("it draws random numbers")
        self._input_grads = [joint.grads.get(i) for i in range(len(joint.inputs))]
        grads = [*self._input_grads, *(joint.grads[name] for name in self.param_grads)]
        self._owned = [*self.saved, *(self.primals[i] for i in self.backward_primals), *joint.tangents]
        self._compiled = (
            _Function(joint, self.primals, self.forward_nodes, [*joint.outputs, *self.saved]),
            _Function(joint, self._owned, self.backward_nodes, grads),
        )

    def forward(self, values: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        if not _as_traced(values, self.primals):
            return super().forward(values)
        with torch._C.DisableTorchFunction():
            return self._compiled[0](values), []

    def backward(self, values: list[Tensor], states: Sequence[Tensor], sink: Sink) -> list[Tensor | None]:
        if not _as_traced(values, self._owned):
            return super().backward(values, states, sink)
        gradients = self._compiled[1](values)
        storages = Counter(t.untyped_storage().data_ptr() for t in gradients)
        gradients.reverse()
        results = [gradients.pop() if grad is not None else None for grad in self._input_grads]
        for name in self.param_grads:
            gradient = gradients.pop()
            sink(name, _own(gradient, shared=storages[gradient.untyped_storage().data_ptr()] > 1))
        return results


def _as_traced(values: Sequence[Tensor], nodes: Sequence[fx.Node | None]) -> bool:
    """Whether the strides are those for which the code was compiled; strides of dimensions of one element do not
    count."""
    return all(
        node is None
        or all(
            size == 1 or stride == traced
            for size, stride, traced in zip(value.shape, value.stride(), node.meta["val"].stride(), strict=True)
        )
        for value, node in zip(values, nodes, strict=True)
    )


def _own(tensor: Tensor, *, shared: bool) -> Tensor:
    """The tensor in a storage that is its own and exactly as large, copied if needed, because it may become a sum of
    gradients. Inductor returns one buffer for two results that are always equal (`shared`)."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole and not shared else tensor.clone(memory_format=torch.contiguous_format)


class _Function:
    """The operations `nodes` compiled to a function. It takes a list of values, which it empties, and returns a list
    of the `outputs` that are not None."""

    def __init__(
        self,
        joint: Joint,
        inputs: Sequence[fx.Node | None],
        nodes: Sequence[fx.Node],
        outputs: Sequence[fx.Node | None],
    ) -> None:
        self._absent = [i for i, node in enumerate(inputs) if node is None]
        self._constants: list[Tensor] = []
        wanted = [node for node in outputs if node is not None]
        distinct = list(dict.fromkeys(wanted))
        self._places = [distinct.index(node) for node in wanted]
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        examples: list[Tensor] = []
        constants = [node for node in nodes if node.op == "get_attr"]
        for node in constants:
            assert isinstance(node.target, str)
            self._constants.append(operator.attrgetter(node.target)(joint.module))
        for node in (*constants, *(n for n in inputs if n is not None)):
            copies[node] = graph.placeholder(node.name)
            examples.append(node.meta["val"])
        for node in nodes:
            if node.op != "get_attr":
                copies[node] = graph.node_copy(node, lambda a: copies[a])
        graph.output(tuple(copies[node] for node in distinct))
        self._call = _compile(fx.GraphModule(torch.nn.Module(), graph), examples, joint.device)

    def __call__(self, values: list[Tensor]) -> list[Tensor]:
        for i in reversed(self._absent):
            del values[i]
        arguments = [*self._constants, *values]
        values.clear()
        results = self._call(arguments)
        return [results[i] for i in self._places]


def _compile(module: fx.GraphModule, examples: Sequence[Tensor], device: torch.device) -> Any:
    """Inductor's function for `module`: it takes a list of tensors, which it empties, and returns a sequence of them.
    Raises CannotCompileError."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # takes half a second: only when needed

    functions: list[Any] = []

    def inner(graph: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        functions.append(compile_fx_inner(graph, inputs, **settings))
        return functions[-1]

    try:
        # The steps before `inner` must run so that `inner` is called: autograd's cache, which would skip them, is off.
        # Inductor's own cache stays on.
        with (
            functorch_config.patch(enable_autograd_cache=False),
            _disable_current_modes(),
            _inductor_cache(),
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
        ):
            compile_fx(module, list(examples), inner_compile=inner, config_patches={"compile_threads": 1})
    except Exception as error:  # an error of inductor, triton or a C++ compiler: the log names it as the cause
        raise CannotCompileError(f"{type(error).__name__}: {first_line(error)[:200]}") from error
    if len(functions) != 1:
        raise CannotCompileError(f"it became {len(functions)} functions")
    if device.type == "cpu":
        # Inductor makes its buffers below the dispatcher, where no meter counts them: have PyTorch make them.
        call = functions[0].current_callable  # a method, or a function where the graph is not partitioned
        names = getattr(getattr(call, "__func__", call), "__globals__", {})
        if "empty_strided_cpu" not in names:
            raise CannotCompileError("this version of inductor makes its buffers in another way")
        names["empty_strided_cpu"] = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
    return functions[0]


@contextlib.contextmanager
def _inductor_cache() -> Iterator[None]:
    """A context in which inductor keeps compiled code in offmate's cache folder, unless the user has set another."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    if name in os.environ:
        yield
        return
    os.environ[name] = str(cache_folder() / "inductor")
    try:
        yield
    finally:
        del os.environ[name]
