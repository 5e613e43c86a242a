"""Generates the forward and backward code of one block for one recipe (which values are saved), and predicts the bytes
that they allocate."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import fx
from torch.fx.node import map_arg

from planner.graph.codegen import Rng, eager_dropouts, generate, on_demand, rng_of
from planner.graph.interface import BlockCode, Sink
from planner.graph.joint import Joint
from planner.graph.lifetimes import Tape
from planner.graph.liveness import peak_bytes
from planner.graph.nodes import Storages, is_dense, is_op, is_random, nbytes
from planner.graph.recipes import Recipe
from planner.graph.saved import cut, forward_nodes, savable
from planner.graph.scratch import Scratch, are_on, estimate, scratch_of, trials
from planner.graph.tangents import Layout, layout_of
from planner.graph.work import work_of
from planner.machine.work import Work


class Pair(BlockCode):
    """Generated code of one block for one recipe, which says what forward saves. It has no state, so all blocks of a
    kind share one. `saved`: the nodes whose values forward hands to backward, in order."""

    def __init__(self, joint: Joint, recipe: Recipe, rng: Rng | None = None, *, for_gpu: bool = False) -> None:
        """`rng`: the generator of the random operations; None: the default one of the joint graph's device. `for_gpu`:
        the graph was traced on the CPU in place of a GPU, so the memory that operations allocate for themselves is
        estimated."""
        self.joint, self.recipe, self._for_gpu, self._tried = joint, recipe, for_gpu, are_on()
        self.name, self.result = joint.name, joint.result
        self.n_params, self.n_buffers = len(joint.param_names), len(joint.buffer_names)
        self.primals: list[fx.Node | None] = [
            *(joint.params.get(name) for name in joint.param_names),
            *(joint.buffers.get(name) for name in joint.buffer_names),
            *joint.inputs,
        ]
        graph = joint.module.graph
        body = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
        storages = Storages(graph)
        rng = self._rng = rng or rng_of(joint.device)
        swap = eager_dropouts(graph)
        grads = [g for g in joint.grads.values() if g is not None]

        ahead = forward_nodes(joint)
        forward_set = set(ahead)
        saved, needed = cut(grads, {n for n in savable(ahead) if recipe.may_save(n)})
        self.saved = [n for n in ahead if n in saved]
        replayed = [n for n in ahead if n in needed and is_random(n)]
        forward = generate(
            "forward",
            self.primals,
            ahead,
            [*joint.outputs, *self.saved],
            constants=joint.module,
            rng=rng,
            swap=swap,
            record=replayed,
        )
        backward_nodes = on_demand([n for n in body if n in needed], forward_set)
        used = {a for n in backward_nodes for a in n.all_input_nodes} | set(grads)
        where = {n: i for i, n in enumerate(self.primals) if n is not None}
        self.backward_primals = tuple(where[n] for n in self.primals if n is not None and n in used)
        self.param_grads = tuple(n for n in joint.param_names if joint.grads.get(n) is not None)
        backward_inputs = [*self.saved, *(self.primals[i] for i in self.backward_primals), *joint.tangents]
        input_grads = [joint.grads.get(i) for i in range(len(joint.inputs))]
        sinks: dict[fx.Node, list[str]] = {}
        for name in self.param_grads:
            node = joint.grads[name]
            assert node is not None
            sinks.setdefault(node, []).append(name)
        backward = generate(
            "backward",
            backward_inputs,
            backward_nodes,
            input_grads,
            constants=joint.module,
            rng=rng,
            swap=swap,
            sinks=sinks,
            replay=replayed,
        )
        self.forward_nodes, self.backward_nodes = ahead, backward_nodes
        self._forward, self._backward = forward.function, backward.function
        self.forward_source, self.backward_source = forward.source, backward.source

        storages_of_grads = [s for g in grads for s in storages.of[g]]
        self.adoptable = {
            name: storages.own(node) and storages_of_grads.count(storages.of[node][0]) == 1
            for node, names in sinks.items()
            for name in names
        }
        noise = {node: _result_bytes(node) for node in swap}
        operation_scratch = {
            node: scratch_of_node
            for node in body
            if node not in swap and (scratch_of_node := _scratch(node, for_gpu)) is not None
        }
        scratch = noise | operation_scratch
        borrowed = [n for n in self.primals if n is not None]
        self.forward_peak = peak_bytes(forward.steps, storages, borrowed=borrowed, scratch=scratch)
        self.backward_peak = {
            first: peak_bytes(
                backward.steps, storages, owned=self.saved, adoptable=self.adoptable if first else None, scratch=scratch
            )
            for first in (True, False)
        }
        self.interface = next((i for i, g in enumerate(input_grads) if g is not None), None)
        first_input = self.n_params + self.n_buffers
        memory_names = {n: f"a{i - first_input}" if i >= first_input else None for n, i in where.items()}
        tape = Tape(storages, memory_names | {n: f"t{i}" for i, n in enumerate(joint.tangents)}, operation_scratch)
        on_device = [n for n in self.saved if n.meta["val"].device.type == joint.device.type]
        numbers = {name: number for number, name in enumerate(joint.param_names)}
        self._lifetimes = (
            tape.forward(forward.steps, joint.outputs, on_device),
            tape.backward(backward.steps, on_device, joint.tangents, input_grads, numbers, self.adoptable),
        )
        self.reads_interface = self.interface is not None and first_input + self.interface in self.backward_primals
        sent = None if self.interface is None else joint.inputs[self.interface]
        self.interface_has_gaps = sent is not None and not is_dense(sent.meta["val"])
        self.interface_bytes = joint.input_bytes[self.interface] if self.interface is not None else 0
        self.saved_bytes = storages.saved_bytes(on_device)
        self.output_bytes = storages.saved_bytes(joint.outputs)
        kept = {s for n in self.saved for s in storages.of[n]}
        self.gives_outputs_away = all(storages.own(n) and kept.isdisjoint(storages.of[n]) for n in joint.outputs)
        self.backward_weights = tuple(joint.param_names[i] for i in self.backward_primals if i < self.n_params)

        self.primal_values = [n.meta["val"] if n is not None else None for n in self.primals]
        self.output_values = joint.output_values
        self.tangent_values = [n.meta["val"] for n in joint.tangents]
        count = sum(joint.result.differentiable)
        begun = dict(zip(joint.begun, self.tangent_values[count:], strict=True))
        self._layout, self._others = layout_of(self.tangent_values[:count], begun), dict[Layout, Pair]()
        self.input_grad_values = [n.meta["val"] if n is not None else None for n in input_grads]

    def for_tangents(self, layout: Layout) -> Pair:
        if layout == self._layout:
            return self
        if layout not in self._others:
            with trials(self._tried):
                other = Pair(self.joint.for_tangents(layout), self.recipe, self._rng, for_gpu=self._for_gpu)
            assert other._handed_over() == self._handed_over(), f"{self.name}: backward wants other tensors"
            self._others[layout] = other
        return self._others[layout]

    def _handed_over(self) -> object:
        """The layouts of the saved tensors, and the indices of the primals that backward reads. They must be equal
        whatever strides the incoming gradients have, because forward is the same."""
        saved = [n.meta["val"] for n in self.saved]
        return [(t.shape, t.stride(), t.dtype) for t in saved], self.backward_primals

    def lifetimes(self) -> tuple[str, str]:
        return self._lifetimes

    def work(self) -> tuple[Sequence[Work], Sequence[Work]]:
        return work_of(self.forward_nodes), work_of(self.backward_nodes)

    def forward(self, values: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        with torch._C.DisableTorchFunction():  # modes that watch the frame's operations would slow these down
            results, states = self._forward(values, [], None)
        return results, states

    def backward(
        self, values: list[torch.Tensor], states: Sequence[torch.Tensor], sink: Sink
    ) -> list[torch.Tensor | None]:
        results, _ = self._backward(values, states, sink)
        return list(results)


def make_pairs(joint: Joint, recipes: Iterable[Recipe], *, for_gpu: bool = False) -> dict[str, Pair]:
    """Generates the block's code for each recipe. Returns recipe's name -> `Pair`; recipes that save the same values
    share their code.

    A recipe that would offload the block's input is left out if backward does not read the input, or if the input has
    gaps in memory: it would come back at another alignment, where a product of matrices with gaps has other last bits.
    `for_gpu`: the graph was traced on the CPU in place of a GPU.
    """
    codes: dict[str, Pair] = {}
    pairs: dict[str, Pair] = {}
    for recipe in recipes:
        code = codes.get(recipe.saves) or codes.setdefault(recipe.saves, Pair(joint, recipe, for_gpu=for_gpu))
        if not recipe.offloads_input or (code.reads_interface and not code.interface_has_gaps):
            pairs[recipe.name] = pair = copy.copy(code)
            pair.recipe, pair._others = recipe, {}
    return pairs


def _result_bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return nbytes(value[0] if isinstance(value, (tuple, list)) else value)


def _scratch(node: fx.Node, for_gpu: bool) -> Scratch | None:
    """The memory that the node's operation allocates for itself and frees, with the arguments that were traced; None
    if it allocates none or that is unknown."""
    if not is_op(node) or not all("val" in n.meta for n in node.all_input_nodes):
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return estimate(node.target, args) if for_gpu else scratch_of(node.target, args, kwargs)
