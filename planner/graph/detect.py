"""Finds the blocks of a model (the parts that run as one unit: embedding, layers, head), by recording one forward with
fake weights."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from planner.errors import Exit, UserError
from planner.garbage import seldom_collected
from planner.graph.eager import EagerPair
from planner.graph.opaque import record_with_opaque_layers
from planner.graph.record import ModuleCall, Record, not_found, storage_of
from planner.graph.segments import segments


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNames:
    """The names of the modules that are a model's blocks, in the order in which they run. `kinds` has one hash per
    block. Blocks of one kind do the same operations on the same shapes, strides, dtypes and constants: they share
    generated code.

    `eager`: kind -> the layer's own code, for layers that look at their data and so cannot be traced.
    """

    embedding: str
    layers: tuple[str, ...]
    head: str
    kinds: tuple[str, ...]
    eager: Mapping[str, EagerPair] = field(default_factory=dict, repr=False, compare=False)

    @property
    def all(self) -> tuple[str, ...]:
        """The names of all blocks: embedding, layers, head."""
        return (self.embedding, *self.layers, self.head)


@seldom_collected()
def find_blocks(
    model: nn.Module, batch: Mapping[str, torch.Tensor], *, device: torch.device | None = None
) -> BlockNames:
    """The blocks of `model` for a call with `batch`. The model's weights may be on any device, also meta.

    Embedding and head are what `get_input_embeddings` and `get_output_embeddings` return; the head of a classifier of
    texts is its `score`. The layers are the largest non-leaf sibling modules of one class that together do at least
    half of the work. In an encoder-decoder the decoder's embedding and layers follow the encoder's. If there is no
    embedding or no head, the blocks are the model's segments (`planner.graph.segments`); the first and the last of them
    take the places of embedding and head. Raises UserError "blocks-not-found", "layers-dropped" or
    "weight-read-outside".
    """
    _refuse_dropped_layers(model)
    device = device or next(iter(batch.values())).device
    root, record, codes = record_with_opaque_layers(model, batch, device)
    names = record.names
    blocks = _blocks(model, root, record)
    calls = {id(call.module): call for call in root.walk()}
    times = Counter(id(call.module) for call in root.walk())
    for module in blocks:
        if times[id(module)] != 1:
            raise not_found(f"{names.get(id(module), type(module).__name__)} runs {times[id(module)]} times a forward")
    order = sorted(blocks, key=lambda module: calls[id(module)].start)
    if order[0] is not blocks[0] or order[-1] is not blocks[-1]:
        raise not_found("embedding, layers and head do not run in this order")
    blocks = order
    _check_reads(model, [calls[id(m)] for m in blocks], record)
    kinds = tuple(_kind(calls[id(m)], record) for m in blocks)
    return BlockNames(
        embedding=names[id(blocks[0])],
        layers=tuple(names[id(m)] for m in blocks[1:-1]),
        head=names[id(blocks[-1])],
        kinds=kinds,
        eager={kind: codes[id(m)] for kind, m in zip(kinds, blocks, strict=True) if id(m) in codes},
    )


def _head(model: nn.Module) -> nn.Module | None:
    """The head of a language model, or of transformers' classifier of texts; None if there is none."""
    if (head := _own_module(model, "get_output_embeddings")) is not None:
        return head
    score = getattr(model, "score", None)
    return score if isinstance(score, nn.Module) else None


def _blocks(model: nn.Module, root: ModuleCall, record: Record) -> list[nn.Module]:
    """The modules that become the blocks: embedding, layers and head, or the model's segments. Raises UserError
    "blocks-not-found"."""
    head = _head(model)
    if head is None or _own_module(model, "get_input_embeddings") is None:
        blocks = [call.module for call in segments(root, record)]
        if len(blocks) < 3:
            raise not_found(f"it has {len(blocks)} modules with weights that run one after the other")
        return blocks
    embeddings = _embeddings(root, model, head)
    layers = _layers(root, record, {id(module) for module in (*embeddings, head)})
    if not layers:
        raise not_found("no repeated layers were found")
    return [*embeddings, *(call.module for call in layers), head]


def _refuse_dropped_layers(model: nn.Module) -> None:
    """Raise UserError "layers-dropped" for LayerDrop (1909.11556) as in transformers, where each forward leaves out
    layers at random."""
    for name, module in model.named_modules():
        rate = getattr(module, "layerdrop", 0)
        if isinstance(rate, float) and rate > 0:
            raise UserError(
                f"{type(model).__name__} leaves out layers at random, and a plan is for all of them.",
                code="layers-dropped",
                exit_code=Exit.USAGE,
                numbers=(f"{name + '.' if name else ''}layerdrop is {rate}",),
                hint='set layerdrop to 0 in its config.json ("encoder_layerdrop", "decoder_layerdrop")',
            )


def repeated_layers(model: nn.Module, batch: Mapping[str, torch.Tensor], device: torch.device) -> list[nn.Module]:
    """The layers of `model` in the order in which they run for `batch`; a layer that runs several times is listed once
    for each run. Raises UserError "layers-dropped"."""
    _refuse_dropped_layers(model)
    root, record, _ = record_with_opaque_layers(model, batch, device)
    head = _head(model)
    if head is None or _own_module(model, "get_input_embeddings") is None:
        return [call.module for call in segments(root, record)]
    taken = {id(module) for module in (*_embeddings(root, model, head), head)}
    return [call.module for call in _layers(root, record, taken)]


def _check_reads(model: nn.Module, blocks: Sequence[ModuleCall], record: Record) -> None:
    """Raise UserError "weight-read-outside" if anything but a block reads the block's weights: they may be off the
    device when the block does not run."""
    first = {id(p): name for name, p in model.named_parameters()}
    weights = [{first[id(p)] for p in block.module.parameters()} for block in blocks]
    in_blocks = set().union(*weights)
    for number, operation in enumerate(record.operations):
        read = in_blocks & {record.parameters.get(s, "") for s in operation.inputs} if operation.reads else set()
        for block, names in zip(blocks, weights, strict=True) if read else ():
            if block.start <= number < block.end:
                read -= names
        if read:
            raise UserError(
                f"The model cannot be cut into blocks: {min(read)} is read outside of its block.",
                code="weight-read-outside",
                hint="a block's weights may be off the device when it does not run: only the block may read them",
            )


def _own_module(model: nn.Module, getter: str) -> nn.Module | None:
    """The embedding or head that the model's method `getter` returns, as transformers' models have it; None if there is
    none."""
    try:
        module = getattr(model, getter, lambda: None)()
    except NotImplementedError:  # transformers' way to say that there is none
        return None
    return module if isinstance(module, nn.Module) else None


def _embeddings(root: ModuleCall, model: nn.Module, head: nn.Module) -> list[nn.Module]:
    """The input embedding in a list. If it never runs itself, the modules that run with its weight, in the order in
    which they run."""
    embedding = _own_module(model, "get_input_embeddings")
    assert embedding is not None
    ran = list({id(call.module): call.module for call in root.walk()}.values())
    if any(module is embedding for module in ran):
        return [embedding]
    weights = {id(p) for p in embedding.parameters()}
    users = [m for m in ran if m is not head and any(id(p) in weights for p in m.parameters(recurse=False))]
    return users or [embedding]


def _layers(root: ModuleCall, record: Record, taken: set[int]) -> list[ModuleCall]:
    """The calls of the model's layers. From the root downwards, these are repeated calls that do at least half of the
    work of the module around them, head and embeddings aside. Where the descent splits, as into encoder and decoder,
    each part may have layers. A group of layers with less than a tenth of all layers' work is dropped."""

    def cost(*calls: ModuleCall) -> int:
        return sum(operation.cost for call in calls for operation in record.operations[call.start : call.end])

    def descend(call: ModuleCall) -> list[ModuleCall]:
        kids = [k for k in call.kids if _may_be_layer(k.module) and id(k.module) not in taken]
        whole = [kid for kid in kids if taken.isdisjoint(id(below.module) for below in kid.walk())]
        classes = Counter(type(kid.module) for kid in whole)
        repeated = [kid for kid in whole if classes[type(kid.module)] > 1]
        heads = cost(*(kid for kid in call.kids if id(kid.module) in taken))
        if repeated and 2 * cost(*repeated) >= cost(call) - heads:
            return repeated
        layers_of_kids = [descend(kid) for kid in kids]
        least = cost(*(layer for layers in layers_of_kids for layer in layers)) / 10
        return [layer for layers in layers_of_kids if cost(*layers) >= least for layer in layers]

    return descend(root)


def _may_be_layer(module: nn.Module) -> bool:
    """Whether `module` has submodules and weights."""
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _kind(call: ModuleCall, record: Record) -> str:
    """A hash of the call: its class, arguments, parameters and buffers, its operations and how they feed each other,
    and the values that it returns or puts into dictionaries among its arguments."""
    index: dict[int, int] = {}
    parameters, buffers = list(call.module.named_parameters()), list(call.module.named_buffers())
    roles = {storage_of(t): name for name, t in (*parameters, *buffers)}
    lines = [
        f"{type(call.module).__module__}.{type(call.module).__qualname__}",
        call.key,
        repr([(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in parameters]),
        repr([(n, tuple(b.shape), str(b.dtype)) for n, b in buffers]),
    ]
    for operation in record.operations[call.start : call.end]:
        ids = [
            [roles.get(s, index.setdefault(s, len(index))) for s in side]
            for side in (operation.inputs, operation.outputs)
        ]
        lines.append(f"{operation.text} {ids}")
    nested, leaves = call.made
    ends = [leaf if isinstance(leaf, str) else roles.get(leaf, index.setdefault(leaf, len(index))) for leaf in leaves]
    lines.append(f"{nested} {ends}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
