"""Traces the forward and backward of one block (a part of the model that runs as one unit) as one joint graph, without
allocating memory for its weights."""

from __future__ import annotations

import contextlib
import functools
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch._decomp.decompositions  # registers the Python versions
from torch import fx, nn
from torch._C import DispatchKey
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import descriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from planner.errors import UserError, first_line
from planner.graph.fake import FakeMode, fake_weights
from planner.graph.flat import Flat
from planner.graph.nodes import is_view
from planner.graph.result import Result
from planner.graph.signature import flatten_call
from planner.graph.tangents import Layout, arriving, beginning, begun_gradients, is_arrival

_aten = torch.ops.aten
_UNKNOWN = {
    _aten.mkldnn_rnn_layer.default: "only {} itself knows what it saves for backward",  # laid out as oneDNN likes
    _aten.rrelu_with_noise_functional.default: "{} lays its result out otherwise than the operation it stands for",
}
"""Operations that a trace cannot reproduce -> the reason, in which {} stands for the operation's name."""


@dataclass(slots=True)
class Joint:
    """The joint forward and backward graph of one block, with its nodes sorted by role. It holds no data. Names are
    those that parameters and buffers have within the block.

    params, buffers   name -> placeholder, only for those that the graph reads
    inputs            placeholder per tensor argument, None where the block does not read it
    input_bytes       bytes of the storage under each tensor argument
    tangents          placeholder per differentiable output, for its gradient; then one per argument in `begun`
    outputs           node per output tensor
    grads             parameter's name or input's index -> node of its gradient, None where there is none
    for_tangents      traces the block again, for gradients of its outputs that arrive with the given strides
    begun             indices of the arguments whose gradient other readers have partly computed before this backward
    """

    name: str
    module: fx.GraphModule
    device: torch.device
    param_names: tuple[str, ...]
    buffer_names: tuple[str, ...]
    params: dict[str, fx.Node]
    buffers: dict[str, fx.Node]
    inputs: list[fx.Node | None]
    input_bytes: tuple[int, ...]
    tangents: list[fx.Node]
    outputs: list[fx.Node]
    grads: dict[str | int, fx.Node | None]
    result: Result
    for_tangents: Callable[[Layout], Joint]
    begun: tuple[int, ...] = ()

    @property
    def output_values(self) -> list[torch.Tensor]:
        """The block's outputs as fake tensors (without data)."""
        return [node.meta["val"] for node in self.outputs]


def trace_block(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, name: str = "block") -> Joint:
    """Traces forward and backward of `module` for a call with these arguments, which may be fake. Weights may be on
    any device, also meta. `name`: the block's name in errors.

    Raises UserError "block-not-traceable", which names the block and the cause.
    """
    call, tensors = flatten_call(args, kwargs)
    if not tensors:
        raise untraceable(name, "it is called without a tensor")
    mode, kind = FakeMode.of(tensors), tensors[0].device.type
    inputs = [mode.like(t) for t in tensors]
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    input_bytes = tuple(t.untyped_storage().nbytes() for t in tensors)
    return _trace(name, _Traced(module, call), inputs, input_bytes, autocast, None)


class _Traced(Flat):
    """The block as a trace runs it. `layout`: the strides with which the gradients of the results arrive, and the
    arguments whose gradients other readers have partly computed before; these partial gradients are passed after the
    arguments. None: gradients are laid out as the results, and no argument has such a gradient."""

    layout: Layout | None = None

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = len(self.call.where)
        with SameLayouts():  # type: ignore[no-untyped-call]
            results = super().forward(*tensors[:count])
        if self.layout is None:
            return results
        return (*arriving(results, self.layout), *beginning(tensors, self.layout, tensors[count:]))


def _trace(
    name: str,
    flat: _Traced,
    inputs: Sequence[torch.Tensor],
    input_bytes: tuple[int, ...],
    autocast: torch.dtype | None,
    layout: Layout | None,
) -> Joint:
    """The joint graph of `flat`, traced under autocast to dtype `autocast` (None: without), for gradients with `layout`
    (None: laid out as the results)."""
    device = inputs[0].device
    flat.layout = layout
    try:
        # A meter or any other mode of the calling thread would see (and count) the fake tensors of the trace. By
        # default the joint trace runs its backward under the forward's autocast; plain code leaves it before backward.
        with (
            functorch_config.patch(backward_pass_autocast="off"),
            _disable_current_modes(),
            eager_composites(),
            fake_weights(flat.module, FakeMode.of(inputs), device),
            contextlib.ExitStack() as stack,
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            torch.autocast(device.type, dtype=autocast, enabled=autocast is not None),
            warnings.catch_warnings(),
        ):
            # The tracer lets autograd warn where an error comes from, also when Ctrl-C comes in the middle of backward.
            warnings.filterwarnings("ignore", "Error detected in .*", UserWarning)
            arguments = (*inputs, *begun_gradients(inputs, layout))
            exported = aot_export_joint_with_descriptors(stack, flat, arguments)
    except Exception as error:  # an error of the model's own code or of the tracer: the message names it as the cause
        raise untraceable(name, error) from error
    if flat.replaced:
        raise untraceable(name, f"it puts another tensor in the place of its buffer {flat.replaced[0]}")
    graph = exported.graph_module.graph
    if unknown := next((node for node in graph.nodes if node.target in _UNKNOWN), None):
        raise untraceable(name, _UNKNOWN[unknown.target].format(unknown.target))
    if autocast is not None and (twice := _cast_twice(graph, flat.module)):
        raise untraceable(name, f"under autocast it uses {twice} twice, and gradients add up before they are cast")
    again = cache(partial(_trace, name, flat, inputs, input_bytes, autocast))
    return _by_role(name, exported.graph_module, flat, input_bytes, device, again)


def _cast_twice(graph: fx.Graph, module: nn.Module) -> str | None:
    """The name of a trained weight that is cast more than once, None if there is none. Plain autocast casts a weight
    once and caches the cast; a trace cannot do that."""
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    for node in graph.find_nodes(op="placeholder"):
        role = node.meta["desc"]
        if isinstance(role, descriptors.ParamAOTInput):
            casts = [user for user in node.users if user.target is _aten._to_copy.default and "dtype" in user.kwargs]
            if len(casts) > 1 and (name := role.target.removeprefix("module.")) in trained:
                return name
    return None


def untraceable(name: str, cause: Exception | str) -> UserError:
    """Makes the error for a block that cannot be traced, "block-not-traceable". `cause`: the exception, or its reason
    in words."""
    if isinstance(cause, Exception):
        cause = f"{type(cause).__name__}: {first_line(cause)}"
    return UserError(
        f"Block {name} cannot be traced: {cause[:300]}",
        code="block-not-traceable",
        hint="if the model has another implementation of this part, choose it (attn_implementation: sdpa or eager)",
    )


def _by_role(
    name: str,
    graph_module: fx.GraphModule,
    flat: _Traced,
    input_bytes: tuple[int, ...],
    device: torch.device,
    for_tangents: Callable[[Layout], Joint],
) -> Joint:
    params: dict[str, fx.Node] = {}
    buffers: dict[str, fx.Node] = {}
    inputs: dict[int, fx.Node] = {}
    tangents: dict[int, fx.Node] = {}
    graph = graph_module.graph
    names = {id(b): n for n, b in reversed(list(flat.module.named_buffers(remove_duplicate=False)))}
    first = {n: names[id(b)] for n, b in flat.module.named_buffers(remove_duplicate=False)}
    for node in graph.find_nodes(op="placeholder"):
        match node.meta["desc"]:
            case descriptors.ParamAOTInput() as role:
                params[role.target.removeprefix("module.")] = node
            case descriptors.BufferAOTInput() as role:
                local = first[role.target.removeprefix("module.")]
                if buffers.setdefault(local, node) is not node:  # several modules of the block share it
                    node.replace_all_uses_with(buffers[local])
                    graph.erase_node(node)
            case descriptors.PlainAOTInput() as role:
                inputs[role.idx] = node
            case descriptors.TangentAOTInput(output=descriptors.PlainAOTOutput() as role):
                tangents[role.idx] = node
            case role:
                raise untraceable(name, f"its graph has an input of a kind that is not supported ({role})")
    outputs: dict[int, fx.Node] = {}
    grads: dict[str | int, fx.Node | None] = {}
    last = graph.output_node()
    for node, role in zip(last.args[0], last.meta["desc"], strict=True):  # type: ignore[arg-type]
        match role:
            case None:
                pass
            case descriptors.PlainAOTOutput():
                assert isinstance(node, fx.Node)
                outputs[role.idx] = node
            case descriptors.GradAOTOutput(grad_of=descriptors.ParamAOTInput() as of):
                grads[of.target.removeprefix("module.")] = node
            case descriptors.GradAOTOutput(grad_of=descriptors.PlainAOTInput() as of):
                grads[of.idx] = node
            case _:
                raise untraceable(name, f"it changes a buffer or an argument in place ({role})")
    joint = Joint(
        name=name,
        module=graph_module,
        device=device,
        param_names=tuple(n for n, _ in flat.module.named_parameters()),
        buffer_names=tuple(n for n, _ in flat.module.named_buffers()),
        params=params,
        buffers=buffers,
        inputs=[inputs.get(i) for i in range(len(input_bytes))],
        input_bytes=input_bytes,
        # Placeholders after those of the arguments are gradients of arguments that other readers have partly computed.
        tangents=[
            *(tangents[i] for i in sorted(tangents) if i < len(flat.result.differentiable)),
            *(inputs[i] for i in sorted(inputs) if i >= len(input_bytes)),
        ],
        outputs=[outputs[i] for i in range(len(flat.result.differentiable))],
        grads=grads,
        result=flat.result,
        for_tangents=for_tangents,
        begun=tuple(i for i, _ in flat.layout.begun) if flat.layout is not None else (),
    )
    _clean(joint)
    return joint


def _clean(joint: Joint) -> None:
    """Remove detach, alias and arrival nodes and merge equal views: otherwise a recipe might save a storage twice."""
    seen: dict[object, fx.Node] = {}
    new: dict[fx.Node, fx.Node] = {}
    graph = joint.module.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        same = None
        if node.target in (_aten.detach.default, _aten.alias.default):
            same = node.args[0]
        elif is_arrival(node):  # the gradient with the strides it will have, which the placeholder takes over
            same = node.args[0]
            same.meta["val"] = node.meta["val"]
        elif is_view(node) or node.target is operator.getitem:
            same = seen.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if isinstance(same, fx.Node) and same is not node:
            new[node] = same
            node.replace_all_uses_with(same)
            graph.erase_node(node)

    def final(node: fx.Node) -> fx.Node:
        while node in new:
            node = new[node]
        return node

    joint.outputs = [final(node) for node in joint.outputs]
    joint.grads = {k: final(n) if isinstance(n, fx.Node) else None for k, n in joint.grads.items()}


# ---- checks in a trace that tensors keep their strides if eager PyTorch changes them in place


class OtherLayoutError(Exception):
    """Raised in a trace when it would go on with a tensor whose strides differ from those in eager PyTorch."""


class SameLayouts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode for traces. Raises OtherLayoutError after an operation that leaves a tensor with other strides than in
    eager PyTorch."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, FunctionalTensor) and not _as_said(tensor):
                raise OtherLayoutError(f"what {func} changes in place is not laid out as in the trace")
        return result


def _as_said(tensor: FunctionalTensor) -> bool:
    torch._sync(tensor)  # type: ignore[no-untyped-call, attr-defined]
    actual = torch._from_functional_tensor(tensor.elem)
    return all(
        size <= 1 or claimed == stride
        for size, claimed, stride in zip(tensor.shape, tensor.stride(), actual.stride(), strict=True)
    )


# ---- makes a trace decompose composite operations as eager PyTorch does


_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
# Dropout must stay one operation, whose mask takes a byte per element (`codegen.eager_dropouts` gives it eager's
# arithmetic). The Python versions of batch norms call the same kernels, but say that they change their statistics.
_KEPT = ("aten::dropout", "aten::native_batch_norm", "aten::cudnn_batch_norm")


@functools.cache
def _in_python() -> tuple[Any, ...]:
    """The operations that have a Python version in PyTorch, without those in `_KEPT`."""
    operations = []
    for name in torch._C._dispatch_get_all_op_names():
        space, _, qualified = name.partition("::")
        packet, _, overload = qualified.partition(".")
        if space == "aten" and name not in _KEPT:
            operation = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            kernels = getattr(operation, "py_kernels", {})
            if DispatchKey.Autograd in kernels or (packet == "matmul" and kernels):
                operations.append(operation)
    return tuple(operations)


@contextlib.contextmanager
def eager_composites() -> Iterator[None]:
    """A context in which a trace calls the C++ versions of composite operations, as eager PyTorch does, instead of the
    Python ones."""
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
