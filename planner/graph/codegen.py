"""Generates a straight-line Python function from a list of traced operations; the function frees every value after its
last use."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from planner.graph.bindings import binding_of
from planner.graph.fewer_views import not_called
from planner.graph.nodes import is_op, parent

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Rng:
    """Reads and sets the state of the random generator that the block's operations draw from."""

    get: Callable[[], torch.Tensor]
    set: Callable[[torch.Tensor], None]


def rng_of(device: torch.device) -> Rng:
    """The default random generator of `device`. For every kind of device its state is a small tensor on the host."""
    if device.type == "cuda":
        return Rng(lambda: torch.cuda.get_rng_state(device), lambda state: torch.cuda.set_rng_state(state, device))
    return Rng(torch.get_rng_state, torch.set_rng_state)


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the generated function: its node, the nodes whose values are freed after it, and the names of the
    weights whose gradient the node's value is."""

    node: fx.Node
    dead: tuple[fx.Node, ...]
    sinks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Generated:
    """A generated function, its source, and its lines as steps. `function(values, states, sink)` returns (results,
    states). It empties `values` as it starts. `states` are states of the random generator: forward returns them,
    backward takes them."""

    function: Callable[..., tuple[list[torch.Tensor], list[torch.Tensor]]]
    source: str
    steps: tuple[Step, ...]


def cpu_dropout(x: torch.Tensor, p: float, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout of `x` with eager PyTorch's arithmetic on the CPU. Returns the result and the mask. Eager multiplies by
    a noise that is rounded to x's dtype; `native_dropout`, which the tracer emits, multiplies by float(1 / (1 - p)).
    The results differ in bf16, and in fp32 for some p (0.15)."""
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return x * mask.to(x.dtype).div_(1 - p), mask


def _cpu_dropout_backward(p: float) -> Callable[..., torch.Tensor]:
    def backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        return grad * mask.to(grad.dtype).div_(1 - p)

    return backward


def eager_dropouts(graph: fx.Graph) -> dict[fx.Node, Callable[..., Any]]:
    """Maps each dropout node (forward or backward) to the function to call for it, where the native operation is not
    bitwise equal to eager PyTorch's. Each such function needs scratch for the noise, as large as its result. On CUDA
    the table is empty: eager itself calls the native operation."""
    table: dict[fx.Node, Callable[..., Any]] = {}
    for node in graph.nodes:
        if not (is_op(node) and node.target is _aten.native_dropout.default):
            continue
        value, p = node.meta["val"][0], node.args[1]
        if value.device.type != "cpu" or not isinstance(p, float):
            continue
        unit = torch.ones((), dtype=value.dtype)
        if value.dtype == torch.float32 and torch.equal(unit.clone().div_(1 - p), unit * (1 / (1 - p))):
            continue
        table[node] = cpu_dropout
        for mask in (user for user in node.users if user.args[1] == 1):
            for user in mask.users:
                if user.target is _aten.native_dropout_backward.default:
                    table[user] = _cpu_dropout_backward(p)
    return table


def on_demand(nodes: Sequence[fx.Node], forward: set[fx.Node]) -> list[fx.Node]:
    """Reorders `nodes`, the operations of a backward. Those that are also in `forward`, and so are computed again, run
    right before their first use."""
    wanted, done, order = set(nodes), set[fx.Node](), list[fx.Node]()
    for root in [*(n for n in nodes if n not in forward), *nodes]:
        stack = [root]
        while stack:
            node = stack[-1]
            missing = [a for a in node.all_input_nodes if a in wanted and a not in done]
            if node in done or not missing:
                stack.pop()
                if node not in done:
                    done.add(node)
                    order.append(node)
            else:
                stack.append(missing[0])
    return order


class _Names:
    """The globals of a generated function: operations and constants under short names."""

    def __init__(self, rng: Rng) -> None:
        self.env: dict[str, Any] = {"get_rng": rng.get, "set_rng": rng.set}
        self.bound: dict[Any, str] = {}

    def bind(self, value: Any) -> str:
        key = f"_c{len(self.env)}"
        self.env[key] = value
        return key

    def function(self, target: Any) -> str:
        if target not in self.bound:
            self.bound[target] = self.bind(target)
        return self.bound[target]

    def text(self, a: Any) -> str:
        match a:
            case fx.Node():
                return a.name
            case list():
                return "[" + ", ".join(map(self.text, a)) + "]"
            case tuple():
                return "(" + "".join(self.text(x) + ", " for x in a) + ")"
            case slice():
                return f"slice({self.text(a.start)}, {self.text(a.stop)}, {self.text(a.step)})"
            case None | bool() | int() | str():
                return repr(a)
        return self.bind(a)  # floats too: inf and nan have no literal

    def call(self, node: fx.Node, target: Any) -> str:
        arguments = [*map(self.text, node.args), *(f"{k}={self.text(v)}" for k, v in node.kwargs.items())]
        called = binding_of(target, node.args, node.kwargs, node.meta.get("val"))
        return f"{self.function(called)}({', '.join(arguments)})"


def generate(
    name: str,
    inputs: Sequence[fx.Node | None],
    nodes: Sequence[fx.Node],
    outputs: Sequence[fx.Node | None],
    *,
    constants: fx.GraphModule,
    rng: Rng,
    swap: Mapping[fx.Node, Callable[..., Any]],
    sinks: Mapping[fx.Node, Sequence[str]] | None = None,
    record: Sequence[fx.Node] = (),
    replay: Sequence[fx.Node] = (),
) -> Generated:
    """Generates the Python function that computes `nodes` from `inputs` and returns `outputs`.

    `swap`      node -> what to call instead of its target
    `sinks`     node -> weights: the function calls `sink(weight, value)` as soon as the node's value exists
    `record`    random nodes before which the generator's state is kept (in forward)
    `replay`    the same nodes where they run again (in backward): each runs under the kept state, then the generator's
                present state is set again
    """
    sinks = sinks or {}
    names = _Names(rng)
    keep = {o for o in outputs if o is not None}
    last = {a: i for i, node in enumerate(nodes) for a in node.all_input_nodes}
    lines = [f"def {name}(_values, _states, _sink):", *_unpack(inputs, keep | set(last), sinks)]
    if record:
        lines.append("    _states = []")
    steps, renamed = [], not_called(nodes, keep, sinks)
    for i, node in enumerate(nodes):
        if node.op == "get_attr":
            assert isinstance(node.target, str)
            lines.append(f"    {node.name} = {names.bind(operator.attrgetter(node.target)(constants))}")
        elif node in renamed:
            lines.append(f"    {node.name} = {parent(node).name}")
        else:
            if node in record:
                lines.append("    _states.append(get_rng())")
            if node in replay:
                lines.append(f"    _now = get_rng(); set_rng(_states[{replay.index(node)}])")
            lines.append(f"    {node.name} = {names.call(node, swap.get(node, node.target))}")
            if node in replay:
                lines.append("    set_rng(_now)")
        lines += [f"    _sink({weight!r}, {node.name})" for weight in sinks.get(node, ())]
        dead = [a for a in dict.fromkeys(node.all_input_nodes) if last[a] == i and a not in keep]
        if node not in last and node not in keep:
            dead.append(node)
        if dead:
            lines.append("    del " + ", ".join(a.name for a in dead))
        steps.append(Step(node, tuple(dead), tuple(sinks.get(node, ()))))
    lines.append(f"    return [{', '.join(o.name if o is not None else 'None' for o in outputs)}], _states")
    source = "\n".join(lines)
    exec(compile(source, f"<{name}>", "exec"), names.env)
    return Generated(names.env[name], source, tuple(steps))


def _unpack(inputs: Sequence[fx.Node | None], used: set[fx.Node], sinks: Mapping[fx.Node, Sequence[str]]) -> list[str]:
    """Lines that name the inputs, empty the caller's list and delete inputs that are not used."""
    if not inputs:
        return []
    names = "".join(f"{n.name if n is not None else f'_{i}'}, " for i, n in enumerate(inputs))
    lines = [f"    {names}= _values", "    _values.clear()"]
    lines += [f"    del _{i}" for i, n in enumerate(inputs) if n is None]
    lines += [f"    _sink({weight!r}, {n.name})" for n in inputs if n is not None for weight in sinks.get(n, ())]
    lines += [f"    del {n.name}" for n in inputs if n is not None and n not in used]
    return lines
