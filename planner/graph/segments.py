"""Finds the blocks of a model that is not a chain of equal layers between embedding and head, such as a U-Net or an
image classifier.

Its blocks, called segments, are modules that run one after the other. Tensors that bypass some of them, as skips do,
are carried by the model's own code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from planner.graph.record import ModuleCall, Operation, Record

_SMALL = 16
"""A module that does at most this part (a 16th) of the work is not divided further."""
_COMBINES = ("aten.add", "aten.sub", "aten.mul")


def segments(root: ModuleCall, record: Record) -> list[ModuleCall]:
    """The module calls that become the blocks. They do not overlap, and together they have all weights of the modules
    below the root.

    From the root downwards, equal modules that together do half of the work of the module around them are segments.
    Other segments are modules that do little of the whole work, modules whose submodules have none themselves, and
    modules whose own code combines the results of their submodules, as a transformer layer's does.
    """

    def cost(*calls: ModuleCall) -> int:
        return sum(operation.cost for call in calls for operation in record.operations[call.start : call.end])

    def is_whole(call: ModuleCall) -> bool:
        parts = _with_weights(call)
        flat = not any(map(_with_weights, parts)) and not isinstance(call.module, nn.Sequential)
        return flat or any(_combines(operation, record) for operation in _own(call, record))

    def below(call: ModuleCall) -> list[ModuleCall]:
        kids = _with_weights(call)
        looks = Counter(_looks(kid) for kid in kids if _with_weights(kid))
        equal = {id(kid) for kid in kids if looks[_looks(kid)] > 1}
        if 2 * cost(*(kid for kid in kids if id(kid) in equal)) < cost(call):
            equal.clear()
        calls: list[ModuleCall] = []
        for kid in kids:
            small = len(kids) > 1 and _SMALL * cost(kid) <= cost(root)
            calls += [kid] if id(kid) in equal or small or is_whole(kid) else below(kid)
        return calls

    return below(root)


def _with_weights(call: ModuleCall) -> list[ModuleCall]:
    """The calls that `call` made itself, of modules that have weights."""
    return [kid for kid in call.kids if any(True for _ in kid.module.parameters())]


def _looks(call: ModuleCall) -> tuple[type[nn.Module], tuple[tuple[int, ...], ...]]:
    """The properties by which two modules count as equal here: their class and the shapes of their parameters."""
    return type(call.module), tuple(tuple(p.shape) for p in call.module.parameters())


def _own(call: ModuleCall, record: Record) -> Iterator[Operation]:
    """The operations of the module's own code, without those of the modules that it calls."""
    at = call.start
    for kid in call.kids:
        yield from record.operations[at : kid.start]
        at = kid.end
    yield from record.operations[at : call.end]


def _combines(operation: Operation, record: Record) -> bool:
    """Whether it adds, subtracts or multiplies two tensors that are no weights."""
    inputs = set(operation.inputs) - record.parameters.keys()
    return len(inputs) > 1 and operation.text[2:].startswith(_COMBINES)
