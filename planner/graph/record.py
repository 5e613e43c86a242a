"""Records one forward pass of a model with fake weights, as a list of operations and a tree of module calls."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from planner.errors import Exit, UserError
from planner.graph.fake import FakeMode, fake_model, same_buffers
from planner.graph.joint import untraceable
from planner.graph.repeated_layers import Turns
from planner.graph.signature import flatten_call, left_in, mappings_of

_aten = torch.ops.aten
_MATMULS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.convolution.default)


@dataclass(slots=True)
class ModuleCall:
    """One call of a module in a recorded forward. It covers operations `start` to `end` of the record.

    key     its arguments' form as text (`CallShape.text`), equal for calls that may share generated code
    given   the dictionaries among its arguments, each with a copy of its entries before the call
    made    how the call's result and its new entries in these dictionaries nest, and their storages (or types)
    kids    the calls of modules that it made itself
    """

    name: str
    module: nn.Module
    start: int
    key: str
    end: int = 0
    given: list[tuple[MutableMapping[Any, Any], dict[Any, Any]]] = field(default_factory=list)
    made: tuple[str, tuple[int | str, ...]] = "", ()
    kids: list[ModuleCall] = field(default_factory=list)

    def walk(self) -> Iterator[ModuleCall]:
        """Yields this call and all calls below it, in the order in which they began."""
        yield self
        for kid in self.kids:
            yield from kid.walk()


@dataclass(slots=True)
class Operation:
    """One operation of a recorded forward. `text` is equal for equal operations. `inputs`, `outputs`: ids of storages.
    `cost`: an estimate of its time, the bytes of its results, times 50 for a matrix product. `reads`: whether it reads
    the values of its inputs, not only their shapes."""

    text: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cost: int
    reads: bool


class Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records each operation that runs under it. Storages are identified by address, so all tensors are
    kept alive.

    parameters  storage of a parameter -> the parameter's first name
    known       storage -> the number of the operation that made it; -1 for parameters, buffers and the batch
    used        storages that operations have been given
    changed     for each change of a storage, what `known` has for it; -1 for a storage that is known only since then
    names       id of a module -> its name in the model
    running     the calls of modules that have not returned yet, outermost first
    """

    def __init__(
        self, root: ModuleCall, parameters: Sequence[tuple[str, torch.Tensor]], others: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = {id(module): name for name, module in root.module.named_modules()}
        self.running = [root]
        self.operations: list[Operation] = []
        self.parameters = {storage_of(t): name for name, t in parameters}
        self.kept: list[torch.Tensor] = [*(t for _, t in parameters), *others]
        self.known = {storage_of(t): -1 for t in self.kept}
        self.used: set[int] = set()
        self.changed: list[int] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.embedding.default:
            self._check_rows(args[0], args[1])
        leaves = tree_leaves((args, kwargs))
        tensors = [t for t in leaves if torch.is_tensor(t)]
        outs = [t for t in tree_leaves(result) if torch.is_tensor(t)]
        constants = [x for x in leaves if isinstance(x, (bool, int, float, str, torch.dtype))]
        # A tensor that nothing recorded has made is a constant of the model's code: its value is part of the operation.
        data = [digest(t) for t in tensors if storage_of(t) not in self.known]
        inputs, outputs = (tuple(map(storage_of, side)) for side in (tensors, outs))
        if func._schema.is_mutable:
            self.changed += [self.known.get(s, -1) for s in _written(func, args, kwargs or {})]
        if data and func is not _aten.lift_fresh.default:  # lift_fresh: the code has made the constant just now
            self.changed += [-1 for s in inputs if s in outputs and s not in self.known]
        self.kept += outs
        cost = sum(t.numel() * t.element_size() for t in outs) * (50 if func in _MATMULS else 1)
        text = repr((str(func), constants, data, [_meta(t) for t in tensors], [_meta(t) for t in outs]))
        self.add(Operation(text, inputs, outputs, cost, _reads_values(func)))
        return result

    def begin_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note that a module begins to run: the last of its hooks before its forward."""
        call = ModuleCall(self.names[id(module)], module, len(self.operations), flatten_call(args, kwargs)[0].text)
        call.given = [(mapping, dict(mapping)) for mapping in mappings_of(args, kwargs)]
        self.running[-1].kids.append(call)
        self.running.append(call)

    def end_call(self, module: nn.Module, args: Any, result: Any) -> None:
        """Note that a module has run: the first of its hooks after its forward."""
        call = self.running.pop()
        call.end, call.made = len(self.operations), _made(result, call.given)

    def add(self, operation: Operation) -> None:
        """Record an operation whose results are in `kept`."""
        self.used.update(operation.inputs)
        for storage in operation.outputs:
            self.known.setdefault(storage, len(self.operations))
        self.operations.append(operation)

    def _check_rows(self, table: torch.Tensor, indices: torch.Tensor) -> None:
        """Raise UserError "max-length-too-long" if `indices` go beyond the rows of `table`, as positions do in a text
        longer than the model allows: plain PyTorch fails there, fake weights do not."""
        if (
            digest(indices[..., :0]) == "fake"
            or not indices.numel()
            or (beyond := int(indices.max()) + 1 - len(table)) <= 0
        ):
            return
        length = indices.shape[-1]
        name = self.parameters.get(storage_of(table), "the table")
        raise UserError(
            "The model has fewer positions than max_length.",
            code="max-length-too-long",
            exit_code=Exit.USAGE,
            numbers=(f"max_length {length}; {name} has rows for {length - beyond} positions",),
            hint=f"give max_length: {length - beyond}, or less",
        )

    def add_layer(self, module: nn.Module, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Record a whole layer as one operation. Its cost is that of a matrix product whose result is as large as the
        layer's weights."""
        weights = [*module.parameters()]
        self.kept += outputs
        text = repr(([_meta(t) for t in inputs], [_meta(t) for t in outputs], str(module)))
        ids, output_ids = (tuple(map(storage_of, side)) for side in ((*inputs, *weights), outputs))
        self.add(Operation(text, ids, output_ids, 50 * sum(p.nbytes for p in weights), reads=True))


def _reads_values(func: Any) -> bool:
    """Whether an operation reads the values of its inputs, not only their shapes, dtypes and devices."""
    space, _, name = func._schema.name.partition("::")
    return not (func.is_view or space == "prim" or name.endswith("_like") or name.startswith(("new_", "sym_")))


def storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _meta(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), str(tensor.dtype), str(tensor.device)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    """The storages that an operation writes to, by its schema."""
    schema = func._schema.arguments
    values = [*zip(schema, args, strict=False), *((a, kwargs[a.name]) for a in schema if a.name in kwargs)]
    given = [value for argument, value in values if argument.alias_info is not None and argument.alias_info.is_write]
    return [storage_of(t) for t in tree_leaves(given) if torch.is_tensor(t)]


def digest(tensor: torch.Tensor) -> str:
    """A hash of the tensor's data; "fake" if it has none."""
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return "fake"
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def record_forward(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    device: torch.device,
    running: list[str],
    around: Callable[[Record, FakeMode], contextlib.AbstractContextManager[None]],
) -> tuple[ModuleCall, Record]:
    """Record one forward of `model` on `batch`, inside the context that `around` makes. Returns the root of the tree
    of module calls, and the record. Parameters are fake, buffers and the batch are real: only values that depend on
    weights, and very large ones, are fake (`fake_model`), so code that looks at positions or masks takes the same
    branch as in training.

    Raises UserError; afterwards `running` names the modules that were running, outermost first.
    """
    mode = FakeMode()
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    root, hooks = ModuleCall("", model, 0, ""), []
    parameters = [*model.named_parameters()]  # the model's code may hold a reference to a real parameter
    with same_buffers(model), fake_model(model, mode, device):
        record = Record(root, [*parameters, *model.named_parameters()], [*model.buffers(), *batch.values()])
        begin, end = record.begin_call, record.end_call
        for module in model.modules():
            if module is not model and not isinstance(module, Turns):
                hooks += [
                    module.register_forward_pre_hook(begin, with_kwargs=True),
                    module.register_forward_hook(end, prepend=True),  # the module's own hooks count for its caller
                ]
        try:
            with around(record, mode), _quiet(), torch.random.fork_rng(devices=[]), torch.enable_grad(), record:
                model(**batch)
        except UserError:
            raise
        except Exception as error:  # the model's own code failed: the message names its error as the cause
            running[:] = [call.name for call in record.running[1:]]
            if running:
                raise untraceable(running[-1], error) from error
            raise not_found(f"its forward fails on fake weights ({type(error).__name__}: {error})") from error
        finally:
            for hook in hooks:
                hook.remove()
    root.end = len(record.operations)
    return root, record


def _made(
    result: Any, mappings: Sequence[tuple[MutableMapping[Any, Any], dict[Any, Any]]]
) -> tuple[str, tuple[int | str, ...]]:
    flat, spec = tree_flatten((result, left_in(*map(list, zip(*mappings, strict=True))) if mappings else []))
    return repr(spec), tuple(storage_of(leaf) if torch.is_tensor(leaf) else type(leaf).__name__ for leaf in flat)


def not_found(cause: str) -> UserError:
    """Makes the error for a model that cannot be cut into blocks, "blocks-not-found". `cause`: the reason, as a
    clause."""
    return UserError(
        f"The model cannot be cut into blocks: {cause}.",
        code="blocks-not-found",
        hint="offmate trains models whose forward runs modules with weights one after the other, each of them once",
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A context in which torch does not log what its fake tensors cannot do, because the error that follows says it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
