"""Records the equal layers of a model as repetitions of one that has run: running all of them takes most of the time of
a record."""

from __future__ import annotations

import contextlib
import itertools
import operator
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from planner.graph.fake import FakeMode
from planner.graph.record import ModuleCall, Operation, Record, storage_of
from planner.graph.repeated_layers import Turns
from planner.graph.result import Mark, Records, Result, recorded_names, recorded_values
from planner.graph.signature import flatten_call, mappings_of
from planner.graph.traits import PLAIN, Attribute, Traits, unlike, watched


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a layer. `key` and `used` are equal for calls that do the same if their layers have equal traits.
    `storages`: those of the tensor arguments and of the layer's weights. `used`: which of the weights earlier
    operations have been given: the first one that is given a weight makes autograd's node for it, which the record sees
    as an operation. `state`: that of the objects that the layer holds."""

    key: Hashable
    used: tuple[bool, ...]
    tensors: Sequence[Tensor]
    traits: Traits
    storages: Sequence[int]
    state: list[object]


@dataclass(frozen=True, slots=True)
class _Run:
    """A call that others may repeat: its operations in the record, which begin with number `start`, the calls of its
    submodules, its result, and the attributes that it has read."""

    call: _Call
    start: int
    operations: list[Operation]
    kids: list[ModuleCall]
    result: Result
    outputs: Sequence[Tensor]
    read: list[Attribute]


class Repeats:
    """Of equal layers in one list (ModuleList, Sequential) lets the first run in a forward that is recorded. For the
    others, the record gets the first one's operations, on their own arguments and weights.

    Layers are equal if they get equal arguments and have equal attributes, those aside that the first one's run has not
    read (such as the layer's number). A layer is not repeated if its run is seen to have an effect beside its result,
    or to depend on anything else. What is not seen: values that code reads from modules of Python or from `vars(self)`,
    and random numbers that numpy draws. No layer may depend on these, because all blocks of a kind run the code of one
    trace.
    """

    def __init__(self, model: nn.Module, record: Record, mode: FakeMode) -> None:
        self.record, self.mode = record, mode
        self.lists = [
            [layer for layer in module if _may_repeat(layer)]
            for module in model.modules()
            if isinstance(module, (nn.ModuleList, nn.Sequential))
        ]
        self.runs: dict[Hashable, list[_Run]] = {}
        self.read: list[Attribute] = []
        self.watched: set[Attribute] = set()
        self.new_storages = itertools.count(-1, -1)  # storages of tensors that are not made; real ones are positive
        self.nodes: list[GradientEdge] = []  # alive, so that autograd finds them again
        self.anchor = torch.zeros((), requires_grad=True)

    @contextlib.contextmanager
    def stand_in(self) -> Iterator[None]:
        """A context in which equal layers run once."""
        layers = [(number, layer) for number, group in enumerate(self.lists) if len(group) > 1 for layer in group]
        with contextlib.ExitStack() as stack:
            self.watched = stack.enter_context(watched(set().union(*map(unlike, self.lists)), self.read))
            for number, layer in layers:
                if "forward" not in vars(layer):  # it may be in several lists
                    vars(layer)["forward"] = StandIn(self, number, layer, layer.forward)
                    stack.callback(vars(layer).pop, "forward")
            yield

    def _traits(self, layer: nn.Module) -> Traits:
        return Traits(layer, (StandIn, Repeats, Record))

    def call(
        self, number: int, layer: nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run a layer of list `number`, or record its call as a repetition. Returns the layer's result."""
        call = None
        if _get_current_dispatch_mode() is self.record:
            with _disable_current_modes():  # because the record must not have the operations that compare calls
                call = self._call(number, layer, args, kwargs)
        if call is None:
            return forward(*args, **kwargs)
        runs = self.runs.setdefault((call.key, call.used), [])
        for run in runs:
            differing = call.traits.differing(run.call.traits)
            same_state = call.state == run.call.state
            if same_state and differing is not None and differing <= self.watched.difference(run.read):
                return self._repeat(run, call)
        if any(call.used):  # perhaps by a repetition, which has not made the nodes
            self.nodes += _nodes(itertools.compress((*call.tensors, *call.traits.tensors), call.used))
        before = call.state, _random_state()
        recorded = recorded_values()
        kids_so_far = self.record.running[-1].kids
        tables: tuple[list[Any], ...] = self.record.operations, self.record.changed, kids_so_far, self.read
        lengths = [len(table) for table in tables]
        value = forward(*args, **kwargs)
        with _disable_current_modes():
            after = self._call(number, layer, args, kwargs)
        operations, changed, kids, read = (table[length:] for table, length in zip(tables, lengths, strict=True))
        new = {name: values[len(recorded.get(name, ())) :] for name, values in recorded_values().items()}
        result, outputs = Result.of(value, new, (), call.tensors)
        run = _Run(call, lengths[0], operations, kids, result, outputs, read)
        if (
            min(changed, default=run.start) >= run.start
            and after is not None
            and after.key == call.key
            and all(map(operator.is_, after.tensors, call.tensors))
            and after.traits.differing(call.traits) == set()
            and (after.state, _random_state()) == before
            and self._depends_on_arguments(run)
            and self._is_computed(run, new)
        ):
            runs.append(run)
        return value

    def _call(self, number: int, layer: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Call | None:
        """The call of a layer of list `number`; None if it may depend on more than a key can have."""
        shape, tensors = flatten_call(args, kwargs)
        if (
            mappings_of(args, kwargs)  # the layer may put values into them
            or not all(isinstance(constant, PLAIN) for constant in shape.rest)  # other objects may have a state
        ):
            return None
        traits = self._traits(layer)
        every = *tensors, *traits.tensors
        if any(map(torch.is_autocast_enabled, {t.device.type for t in every})):  # which has a cache of casts
            return None
        storages = list(map(storage_of, every))
        places = {storage: place for place, storage in reversed([*enumerate(storages)])}
        key = (
            number,
            shape.text,
            torch.is_grad_enabled(),
            traits.weights(),
            tuple(places[storage] for storage in storages),
            tuple((type(t), t.storage_offset(), storage_of(t) in self.record.known) for t in tensors),
            tuple((storage_of(t), t._version) for t in tensors if not isinstance(t, FakeTensor)),
        )
        used = tuple(t.requires_grad and t.is_leaf and storage_of(t) in self.record.used for t in every)
        return _Call(key, used, tensors, traits, storages, traits.state())

    def _depends_on_arguments(self, run: _Run) -> bool:
        """Whether all that a run has read are arguments, weights and constants of its code."""
        read = {s for operation in run.operations for s in operation.inputs}.difference(run.call.storages)
        return all(self.record.known.get(storage, run.start) >= run.start for storage in read)

    def _is_computed(self, run: _Run, records: Records) -> bool:
        """Whether a run's result and `records`, what its hooks recorded, are its arguments and fake tensors that it
        computed, nested in a way that is known."""
        leaves = [leaf for leaf in run.result.leaves if not isinstance(leaf, Mark)]
        return (
            all(isinstance(leaf, PLAIN) for leaf in leaves)
            and {name for name, values in records.items() if values} <= set(recorded_names())
            and all(isinstance(t, FakeTensor) for t in run.outputs)
            and all(self.record.known.get(storage_of(t), -1) >= run.start for t in run.outputs)
        )

    def _repeat(self, run: _Run, call: _Call) -> Any:
        """Record `call` as a repetition of `run`. Returns its result."""
        record, shift = self.record, len(self.record.operations) - run.start
        with _disable_current_modes():
            outputs = self.mode.fresh(run.outputs)
            trained = [t for t, trained in zip(outputs, run.result.differentiable, strict=True) if trained]
            computed = iter(_computed(self.anchor, *trained) if trained else ())
            outputs = [next(computed) if d else t for t, d in zip(outputs, run.result.differentiable, strict=True)]
        record.kept += outputs
        others = dict(zip(run.call.storages, call.storages, strict=True))
        others.update(zip(map(storage_of, run.outputs), map(storage_of, outputs), strict=True))
        modules = {id(old): new for old, new in zip(run.call.traits.modules, call.traits.modules, strict=True)}

        def other(storage: int) -> int:
            if storage not in others:
                own = record.known.get(storage, -1) >= run.start
                others[storage] = next(self.new_storages) if own else storage
            return others[storage]

        def repeated(call: ModuleCall) -> ModuleCall:
            module = modules.get(id(call.module), call.module)
            nested, leaves = call.made
            return ModuleCall(
                record.names[id(module)],
                module,
                call.start + shift,
                call.key,
                call.end + shift,
                made=(nested, tuple(leaf if isinstance(leaf, str) else other(leaf) for leaf in leaves)),
                kids=[repeated(kid) for kid in call.kids],
            )

        for old in run.operations:
            inputs, made = tuple(map(other, old.inputs)), tuple(map(other, old.outputs))
            record.add(Operation(old.text, inputs, made, old.cost, old.reads))
        record.running[-1].kids += map(repeated, run.kids)
        self.read += run.read
        return run.result.deliver(outputs, call.tensors, ())


class StandIn:
    """The forward of a layer that may be recorded as a repetition."""

    def __init__(self, repeats: Repeats, number: int, layer: nn.Module, forward: Callable[..., Any]) -> None:
        self.repeats, self.number, self.layer, self.forward = repeats, number, layer, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.repeats.call(self.number, self.layer, self.forward, args, kwargs)


class _Computed(torch.autograd.Function):
    """An autograd function that makes tensors look like results of operations, which may be changed in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.detach() for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        raise NotImplementedError("a record has no backward")


_computed = cast(Callable[..., tuple[Tensor, ...]], _Computed.apply)


def _may_repeat(layer: nn.Module) -> bool:
    """Whether the time of a run may be worth more than the comparison with others: the layer has submodules and
    weights."""
    return (
        not isinstance(layer, Turns)
        and "forward" not in vars(layer)
        and any(True for _ in layer.children())
        and any(True for _ in layer.parameters())
    )


def _nodes(weights: Iterable[Tensor]) -> list[GradientEdge]:
    """Autograd's nodes for weights. They are made if there are none."""
    with _disable_current_modes():
        return list(map(get_gradient_edge, weights))


def _random_state() -> tuple[bytes, object]:
    with _disable_current_modes():
        return torch.get_rng_state().numpy().tobytes(), random.getstate()
