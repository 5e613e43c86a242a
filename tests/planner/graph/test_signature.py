"""How a block's call is taken apart."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten

from planner.graph import flatten_call

Pair = namedtuple("Pair", "one other")
X, Y, Z = torch.zeros(2), torch.ones(3), torch.zeros(2, 2)
CALLS: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
    ((X,), {}),
    ((X, Y), {}),
    (((X, Y),), {}),
    (([X, Y],), {}),
    ((X,), {"mask": None, "rotary": (Y, Z), "cache": False}),
    ((X,), {"rotary": (Y, Z), "mask": None, "cache": False}),
    ((X, None), {"rotary": [Y, {"b": Z, "a": (Y,)}]}),
    ((Pair(X, Y),), {"table": OrderedDict(b=X, a=Y)}),
    ((X, Pair(X, {"a": 1})), {}),
    ((torch.Size([2, 3]), object()), {"x": X}),
    (((), {}), {"x": ()}),
)


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_a_call_is_taken_apart_as_pytorch_does_it_and_put_together_again(number: int) -> None:
    args, kwargs = CALLS[number]
    for _ in range(2):
        shape, tensors = flatten_call(args, kwargs)
        flat, spec = tree_flatten((args, kwargs))
        assert shape.spec == spec
        assert [id(t) for t in tensors] == [id(leaf) for leaf in flat if torch.is_tensor(leaf)]
        assert list(map(id, tree_flatten(shape.nest(tensors))[0])) == list(map(id, flat))
        assert [shape.key == flatten_call(*call)[0].key for call in CALLS] == [n == number for n in range(len(CALLS))]
