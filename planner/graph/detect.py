"""Finds the blocks of a model: one forward on fake weights, recorded as operations and module calls."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.errors import UserError
from planner.graph.fake import FakeMode, fake_weights
from planner.graph.joint import untraceable
from planner.graph.signature import flatten_call

_aten = torch.ops.aten
_MATMULS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.convolution.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNames:
    """Names of the modules that are the blocks, in the order they run; `kinds` has one hash per block.

    Blocks of one kind do the same operations on the same shapes, strides, dtypes and constants: they share code.
    """

    embedding: str
    layers: tuple[str, ...]
    head: str
    kinds: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        """Embedding, layers, head."""
        return (self.embedding, *self.layers, self.head)


@dataclass(slots=True)
class _ModuleCall:
    """One call of a module: operations `start` to `end` of the record."""

    name: str
    module: nn.Module
    start: int
    key: str
    end: int = 0
    kids: list[_ModuleCall] = field(default_factory=list)


@dataclass(slots=True)
class _Operation:
    """One dispatched operation: what makes it equal to another, whether it reads its inputs' values, and its cost in
    bytes made (matmuls weigh more)."""

    text: str
    inputs: list[int]
    outputs: list[int]
    cost: int
    reads: bool


class _Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations. Storages are kept alive so that their addresses stay their names; `parameters` maps those of
    the parameters to their first names."""

    def __init__(self, parameters: Sequence[tuple[str, torch.Tensor]], others: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self.parameters = {_storage(t): name for name, t in parameters}
        self.kept: list[torch.Tensor] = [*(t for _, t in parameters), *others]
        self.known = {_storage(t) for t in self.kept}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = tree_leaves((args, kwargs))
        tensors = [t for t in given if torch.is_tensor(t)]
        outs = [t for t in tree_leaves(result) if torch.is_tensor(t)]
        constants = [x for x in given if isinstance(x, (bool, int, float, str, torch.dtype))]
        # A tensor out of nowhere is a constant of the model's code: its value is part of the operation.
        data = [_digest(t) for t in tensors if _storage(t) not in self.known]
        self.kept += outs
        self.known.update(map(_storage, outs))
        cost = sum(t.numel() * t.element_size() for t in outs) * (50 if func in _MATMULS else 1)
        text = repr((str(func), constants, data, [_meta(t) for t in tensors], [_meta(t) for t in outs]))
        inputs, outputs = (list(map(_storage, side)) for side in (tensors, outs))
        self.operations.append(_Operation(text, inputs, outputs, cost, _reads_values(func)))
        return result


def _reads_values(func: Any) -> bool:
    """Whether an operation looks at its inputs' values, not only at their shapes, dtypes and devices."""
    space, _, name = func._schema.name.partition("::")
    return not (func.is_view or space == "prim" or name.endswith("_like") or name.startswith(("new_", "sym_")))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _meta(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), str(tensor.dtype), str(tensor.device)


def _digest(tensor: torch.Tensor) -> str:
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return "fake"
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def find_blocks(
    model: nn.Module, batch: Mapping[str, torch.Tensor], *, device: torch.device | None = None
) -> BlockNames:
    """The blocks of `model` (weights anywhere, on meta too) when it is called with `batch`.

    Embedding and head are what `get_input_embeddings` and `get_output_embeddings` give. The layers are the largest
    non-leaf modules of one class beside each other that do at least half of the work. Raises UserError
    "blocks-not-found".
    """
    device = device or next(iter(batch.values())).device
    root, record = _trace(model, batch, device)
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = (_own_module(model, get) for get in ("get_input_embeddings", "get_output_embeddings"))
    layers = _layers(root, record, {id(embedding), id(head)})
    calls = {id(call.module): call for call in _walk(root)}
    times = Counter(id(call.module) for call in _walk(root))
    blocks = [embedding, *(call.module for call in layers), head]
    for module in blocks:
        if times[id(module)] != 1:
            raise _not_found(f"{names.get(id(module), type(module).__name__)} runs {times[id(module)]} times a forward")
    if not layers:
        raise _not_found("no repeated layers were found")
    if [calls[id(m)].start for m in blocks] != sorted(calls[id(m)].start for m in blocks):
        raise _not_found("embedding, layers and head do not run in this order")
    _check_reads(model, [calls[id(m)] for m in blocks], record)
    return BlockNames(
        embedding=names[id(embedding)],
        layers=tuple(call.name for call in layers),
        head=names[id(head)],
        kinds=tuple(_kind(calls[id(m)], record) for m in blocks),
    )


def _check_reads(model: nn.Module, blocks: Sequence[_ModuleCall], record: _Record) -> None:
    """Nothing but a block may read its weights: they are elsewhere when it does not run. Raises UserError."""
    first = {id(p): name for name, p in model.named_parameters()}
    own = [{first[id(p)] for p in block.module.parameters()} for block in blocks]
    in_blocks = set().union(*own)
    for number, operation in enumerate(record.operations):
        read = in_blocks & {record.parameters.get(s, "") for s in operation.inputs} if operation.reads else set()
        for block, names in zip(blocks, own, strict=True):
            if block.start <= number < block.end:
                read -= names
        if read:
            raise UserError(
                f"The model cannot be cut into blocks: {min(read)} is read outside of its block.",
                code="weight-read-outside",
                hint="a block's weights may be off the device when it does not run: only the block may read them",
            )


def _own_module(model: nn.Module, getter: str) -> nn.Module:
    module = getattr(model, getter, lambda: None)()
    if not isinstance(module, nn.Module):
        raise _not_found(f"{type(model).__name__}.{getter}() gives no module")
    return module


def _not_found(cause: str) -> UserError:
    return UserError(
        f"The model cannot be cut into blocks: {cause}.",
        code="blocks-not-found",
        hint="offmate trains causal language models of the transformers library that are a chain of equal layers",
    )


def _trace(model: nn.Module, batch: Mapping[str, torch.Tensor], device: torch.device) -> tuple[_ModuleCall, _Record]:
    """One forward with fake parameters but real buffers and a real batch: only what depends on weights is fake, so code
    that looks at positions or masks takes the same way as when it trains."""
    mode = FakeMode()
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    root = _ModuleCall("", model, 0, "")
    stack, hooks = [root], []
    own = [*model.named_parameters()]  # code may have a reference to one
    with fake_weights(model, mode, device, buffers=False):
        record = _Record([*own, *model.named_parameters()], [*model.buffers(), *batch.values()])
        for name, module in model.named_modules():
            if not name:
                continue

            def before(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                call = _ModuleCall(name, module, len(record.operations), repr(flatten_call(args, kwargs)[0].key))
                stack[-1].kids.append(call)
                stack.append(call)

            def after(module: nn.Module, args: Any, result: Any) -> None:
                stack.pop().end = len(record.operations)

            hooks += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after, prepend=True),  # the module's own hooks are its caller's work
            ]
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad(), record:
                model(**batch)
        except Exception as error:  # the model's own code failed; that is the cause to name
            if stack[-1].name:
                raise untraceable(stack[-1].name, error) from error
            raise _not_found(f"its forward fails on fake weights ({type(error).__name__}: {error})") from error
        finally:
            for hook in hooks:
                hook.remove()
    root.end = len(record.operations)
    return root, record


def _walk(call: _ModuleCall) -> Iterator[_ModuleCall]:
    yield call
    for kid in call.kids:
        yield from _walk(kid)


def _layers(root: _ModuleCall, record: _Record, taken: set[int]) -> list[_ModuleCall]:
    """Descend to the repeated calls that make up at least half of what is below."""

    def cost(call: _ModuleCall) -> int:
        return sum(operation.cost for operation in record.operations[call.start : call.end])

    def descend(call: _ModuleCall) -> list[_ModuleCall]:
        kids = [
            k for k in call.kids if k.kids and id(k.module) not in taken and any(True for _ in k.module.parameters())
        ]
        by_class: dict[type, list[_ModuleCall]] = defaultdict(list)
        for kid in kids:
            by_class[type(kid.module)].append(kid)
        repeated = [kid for kid in kids if len(by_class[type(kid.module)]) > 1]
        heads = sum(cost(k) for k in call.kids if id(k.module) in taken)
        if repeated and 2 * sum(map(cost, repeated)) >= cost(call) - heads:
            return repeated
        found = [descend(kid) for kid in kids]
        return max(found, key=lambda calls: sum(map(cost, calls)), default=[])

    return descend(root)


def _kind(call: _ModuleCall, record: _Record) -> str:
    """A hash of the class, the arguments, the parameters and every operation with how they feed each other."""
    index: dict[int, int] = {}
    roles = {_storage(t): name for name, t in (*call.module.named_parameters(), *call.module.named_buffers())}
    lines = [
        f"{type(call.module).__module__}.{type(call.module).__qualname__}",
        call.key,
        repr([(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in call.module.named_parameters()]),
        repr([(n, tuple(b.shape), str(b.dtype)) for n, b in call.module.named_buffers()]),
    ]
    for operation in record.operations[call.start : call.end]:
        ids = [
            [roles.get(s, index.setdefault(s, len(index))) for s in side]
            for side in (operation.inputs, operation.outputs)
        ]
        lines.append(f"{operation.text} {ids}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
