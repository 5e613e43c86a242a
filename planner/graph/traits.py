"""Compares layers: finds the attributes that differ between two layers of one structure, and those that code reads."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from planner.graph.record import digest

Attribute = tuple[type[nn.Module], str]
"""The class of a module and the name of an attribute."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device)
"""Types whose values never change and are equal if they look equal."""

_DISTINCT = frozenset({str, bytes, bool, type(None), torch.dtype, torch.device})
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_TABLES = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))


class Traits:
    """What a layer's code may depend on beside its arguments: the attributes of the layer and of its submodules.

    Modules and weights of the layer count by their place in it, functions by their code and what it holds, other
    objects by identity. `tensors`: the layer's parameters and buffers, each once. `ignored`: attributes with values of
    this type, and the state of these objects, do not count.
    """

    def __init__(self, layer: nn.Module, ignored: tuple[type, ...]) -> None:
        self.modules = list(layer.modules())
        self._ignored = ignored
        self._others: list[object] = []
        self._kept: list[object] = []
        self._places: dict[int, tuple[str, int]] = {id(m): ("module", place) for place, m in enumerate(self.modules)}
        self.tensors: list[Tensor] = []
        for module in self.modules:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and id(tensor) not in self._places:
                    self._places[id(tensor)] = "tensor", len(self.tensors)
                    self.tensors.append(tensor)
        self._values = {
            (place, (type(module), name)): self._value(value)
            for place, module in enumerate(self.modules)
            for name, value in vars(module).items()
            if (name not in _TABLES or value) and not isinstance(value, ignored)
        }

    def differing(self, other: Traits) -> set[Attribute] | None:
        """The attributes that differ from those of `other`. None if the two layers have other attributes, or differ in
        what PyTorch gives every module (submodules, weights, hooks, training mode)."""
        if self._values.keys() != other._values.keys():
            return None
        names = {key[1] for key, value in self._values.items() if value != other._values[key]}
        return None if any(name in _OF_EVERY_MODULE for _, name in names) else names

    def weights(self) -> tuple[tuple[Hashable, ...], ...]:
        """The form of each parameter and buffer, and the data of buffers."""
        return tuple(
            (type(t), t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.requires_grad, digest(t))
            for t in self.tensors
        )

    def state(self) -> list[object]:
        """The state of the objects that the layer holds beside its modules and tensors, and of those that they hold."""
        states: list[object] = []
        for value in self._others:  # which grows meanwhile
            states.append(self._value(vars(value) if hasattr(value, "__dict__") else repr(value)))
        return states

    def _value(self, value: Any) -> object:
        """`value` in a form that can be compared with the same attribute's value of another layer."""
        kind = type(value)
        if kind in _DISTINCT:
            return value
        if isinstance(value, PLAIN):  # with its type, because True equals 1 and 1.0
            return kind, value.hex() if isinstance(value, float) else value
        if id(value) in self._places:
            return self._places[id(value)]
        self._places[id(value)] = "again", len(self._places)  # also ends the recursion in an object that holds itself
        self._kept.append(value)  # so that no other object gets its id
        parts: Iterable[Any]
        if isinstance(value, OrderedDict):  # hooks: their keys are numbers that no two have
            parts = value.values()
        elif isinstance(value, dict):
            parts = itertools.chain.from_iterable(value.items())
        elif isinstance(value, (list, tuple)):
            parts = value
        elif isinstance(value, (set, frozenset)):
            parts = sorted(map(repr, value))
        elif isinstance(value, MethodType):
            parts = value.__func__, value.__self__
        elif isinstance(value, functools.partial):
            parts = value.func, value.args, value.keywords
        elif isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
            parts = value.__code__, value.__defaults__, value.__kwdefaults__, *cells
        else:
            if not isinstance(value, (type, Tensor, ModuleType, BuiltinFunctionType, CodeType, *self._ignored)):
                self._others.append(value)
            return kind, id(value)
        return [kind, *map(self._value, parts)]


def unlike(layers: Sequence[nn.Module]) -> set[Attribute]:
    """The attributes that may differ between those of `layers` that have the same structure: at least all that do."""
    first: dict[Hashable, list[nn.Module]] = {}
    found: set[Attribute] = set()
    for layer in layers:
        modules = list(layer.modules())
        for old, new in zip(first.setdefault(tuple(map(type, modules)), modules), modules, strict=True):
            for name, value in vars(new).items():
                other = vars(old).get(name)
                if (
                    other is not value
                    and name not in _OF_EVERY_MODULE
                    and not (type(value) is type(other) and type(value) in PLAIN and value == other)
                ):
                    found.add((type(new), name))
    return found


class _Watched:
    """An attribute of a class that returns an instance's own value, and notes each read."""

    def __init__(self, attribute: Attribute, read: list[Attribute]) -> None:
        self.attribute, self.read = attribute, read

    def __get__(self, instance: nn.Module | None, owner: type) -> Any:
        self.read.append(self.attribute)
        name = self.attribute[1]
        if instance is None or name not in vars(instance):
            raise AttributeError(f"{owner.__name__} has no attribute {name}")
        return vars(instance)[name]

    def __set__(self, instance: nn.Module, value: Any) -> None:
        vars(instance)[self.attribute[1]] = value

    def __delete__(self, instance: nn.Module) -> None:
        del vars(instance)[self.attribute[1]]


@contextlib.contextmanager
def watched(attributes: Iterable[Attribute], read: list[Attribute]) -> Iterator[set[Attribute]]:
    """A context that appends an attribute to `read` each time that code reads it. Yields those of `attributes` that are
    watched: all but those that the class itself has under this name."""
    free = {(its_class, name) for its_class, name in attributes if not hasattr(its_class, name)}
    for attribute in free:
        setattr(*attribute, _Watched(attribute, read))
    try:
        yield free
    finally:
        for attribute in free:
            delattr(*attribute)
