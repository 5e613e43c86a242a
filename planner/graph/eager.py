"""Runs a block that cannot be traced by its own code: once in forward, and again in backward, under autograd."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes

from planner.errors import UserError, first_line
from planner.graph.branch_numbers import BranchNumbers, Number, Site, depends_on_data, others
from planner.graph.codegen import rng_of
from planner.graph.fake import FakeMode
from planner.graph.flat import Flat
from planner.graph.interface import BlockCode, Sink
from planner.graph.recipes import EAGER
from planner.graph.sample import random_data
from planner.graph.scratch import ScratchMeter
from planner.graph.signature import flatten_call
from planner.graph.tangents import Layout
from planner.graph.work import Counting
from planner.machine.work import Work


class EagerPair(BlockCode):
    """A block that runs by its own code, because it cannot be traced. From forward to backward it keeps the block's
    arguments, and the random state and the buffers as they were before the forward."""

    recipe = EAGER
    reason = ""
    moves = False  # results are copied to the place that the plan has for them, out of the area of all other tensors
    changes_buffers = False  # whether a measured run has changed a buffer
    gives_outputs_away = False
    _begun: tuple[int, ...] = ()  # arguments whose gradients others have partly computed
    output_bytes = forward_peak = 0
    _work: tuple[Sequence[Work], Sequence[Work]] = (), ()
    _bytes: tuple[int, int, int] = 0, 0, 0  # of the last run: forward's peak, results, backward's peak

    def __init__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, name: str) -> None:
        """The code of `module` for a call with these arguments, which may be fake. Weights are passed with every call,
        so those of `module` may be on any device. `module.forward` must be the module's own, not a replacement."""
        call, tensors = flatten_call(args, kwargs)
        self.name, self._flat, self._fakes = name, Flat(module, call), FakeMode.of(tensors)
        self._device = tensors[0].device
        self._rng = rng_of(self._device)
        self.own_code: Callable[[bool], None] = lambda on: None  # True: the block's code allocates now
        kind = self._device.type
        self._autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._anchor = torch.zeros((), requires_grad=True)
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        self._names = [f"module.{local}" for local in (*parameters, *buffers)]
        self.n_params, self.n_buffers = len(parameters), len(buffers)
        self.saved_bytes = sum(buffer.nbytes for buffer in buffers.values())
        primals = [*parameters.values(), *buffers.values(), *tensors]
        self._trained = [t.requires_grad and torch.is_grad_enabled() for t in primals]
        self.primal_values = [self._fakes.like(t) for t in primals]
        self.input_grad_values = [self._fakes.like(t) if t.requires_grad else None for t in tensors]
        self.param_grads = tuple(local for local, p in parameters.items() if p.requires_grad)
        self.adoptable = dict.fromkeys(self.param_grads, False)
        self._buffers = slice(self.n_params, self.n_params + self.n_buffers)
        self.backward_primals = (*range(self.n_params), *range(self._buffers.stop, len(primals)))
        self.backward_weights = tuple(parameters)
        self.backward_peak = {True: 0, False: 0}
        self.interface = next((i for i, t in enumerate(tensors) if t.requires_grad), None)
        self.reads_interface = self.interface is not None
        self.interface_bytes = 0 if self.interface is None else tensors[self.interface].untyped_storage().nbytes()

    def forward(self, values: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        states = [self._rng.get()]
        buffers = [buffer.clone() for buffer in values[self._buffers]]  # the code may change and read its buffers
        leaves = self._given(values, [])
        values.clear()
        # Gradients are on although the graph is dropped: without them code may take a branch that rounds otherwise.
        self.own_code(True)
        try:
            with torch.enable_grad(), self._holding(leaves, keep=True):
                results = self._run(leaves, keep=True)
        finally:
            self.own_code(False)
        if not hasattr(self, "result"):
            self.result = self._flat.result
            self.output_values = [self._fakes.like(t) for t in results]
            self.tangent_values = [t for t in self.output_values if t.requires_grad]
        elif not self._as_before(results):
            raise depends_on_data(self.name, "it returns tensors of other kinds, shapes or gradients than before")
        return [*(self._settled(t.detach()) for t in results), *buffers], states

    def _settled(self, tensor: Tensor) -> Tensor:
        """`tensor`, copied to new memory if the plan has a fixed place for results (`moves`) and the tensor fills its
        storage."""
        dense = tensor.untyped_storage().nbytes() == tensor.nbytes
        return tensor.clone() if self.moves and dense else tensor

    def lifetimes(self) -> tuple[str, str]:
        """The allocations of forward and backward as two lines of text (see `BlockCode.lifetimes`). The area in them
        also has room for the results and the input gradients: they are made there and then moved."""
        forward, backward = super().lifetimes()
        working = max(0, self.forward_peak - self.saved_bytes), self.backward_peak[False]
        return _with_area(forward, working[0]), _with_area(backward, working[1])

    def _as_before(self, results: Sequence[Tensor]) -> bool:
        """Whether the last result nests as the first one did, and its tensors with a gradient have the same positions,
        shapes and dtypes."""
        now = self._flat.result
        if now.spec != self.result.spec or now.differentiable != self.result.differentiable:
            return False
        pairs = [(a, b) for a, b in zip(results, self.output_values, strict=True) if a.requires_grad]
        return all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)

    def backward(self, values: list[Tensor], states: Sequence[Tensor], sink: Sink) -> list[Tensor | None]:
        count, n_weights = len(self._trained), self.n_params + self.n_buffers
        tangents, buffers = values[count:], values[: self.n_buffers]
        grads: list[Tensor | None] = [None] * (count - n_weights)
        if not any(self._trained):  # nothing here is trained, and nothing before this block
            values.clear()
            return grads
        leaves = self._given([*values[self.n_buffers : n_weights], *buffers, *values[n_weights:count]], grads)
        values.clear()
        missing = {
            local: leaf for local, leaf in zip(self.backward_weights, leaves, strict=False) if leaf.requires_grad
        }

        def arrived(local: str, leaf: Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            assert gradient is not None
            del missing[local]
            self.own_code(False)
            sink(local, gradient)
            self.own_code(True)

        for local, leaf in missing.items():
            leaf.register_post_accumulate_grad_hook(partial(arrived, local))  # type: ignore[no-untyped-call]
        now = self._rng.get()
        self._rng.set(states[0])
        self.own_code(True)
        with self._holding(leaves):  # during backward, too: code that checkpoints parts of itself runs them again there
            try:
                with torch.enable_grad():
                    results = self._run(leaves)
            finally:
                self._rng.set(now)
            ends = [t for t in results if t.requires_grad]
            ends += [leaves[n_weights + index] for index in self._begun]
            assert len(ends) == len(tangents), f"{self.name} returned something else when it ran again"
            torch.autograd.backward(ends, tangents)
        self.own_code(False)
        grads = [None if g is None else self._settled(g) for g in grads]
        for local in list(missing):
            del missing[local]  # the weight's hook refers to `missing`: a cycle that no collector sees
            sink(local, None)  # no gradient reached this weight: an expert that no row chose
        return grads

    def for_tangents(self, layout: Layout) -> EagerPair:
        """This code, which serves gradients of any strides. Only the arguments whose gradients other readers have
        partly computed before are noted: those in `layout.begun`."""
        begun = tuple(index for index, _ in layout.begun)
        if begun == self._begun:
            return self
        other = copy.copy(self)
        other._begun = begun
        return other

    def work(self) -> tuple[Sequence[Work], Sequence[Work]]:
        return self._work

    def _given(self, values: Sequence[Tensor], grads: list[Tensor | None]) -> list[Tensor]:
        """The tensors that the block's code runs on: weights and buffers as autograd leaves, and inputs as non-leaves
        whose gradients go to `grads` with the strides that backward gives them. Autograd may change the strides of a
        leaf's gradient."""
        n_weights = self.n_params + self.n_buffers
        leaves = [v.detach().requires_grad_(t) for v, t in zip(values[:n_weights], self._trained, strict=False)]
        with torch.enable_grad():
            for index, (value, trained) in enumerate(zip(values[n_weights:], self._trained[n_weights:], strict=True)):
                leaves.append(_input(self._anchor, value, grads, index) if trained else value.detach())
        return leaves

    @contextlib.contextmanager
    def _holding(self, leaves: Sequence[Tensor], *, keep: bool = False) -> Iterator[None]:
        """A context in which the module's weights and buffers are `leaves`. `keep`: if the code puts another tensor in
        a buffer's place, its values are copied to the buffer. Backward does not keep them: it reads the old values."""
        weights = dict(zip(self._names, leaves, strict=False))
        with _reparametrize_module(self._flat, weights, tie_weights=True):
            yield
        for part in self._flat.modules():
            if isinstance(part, nn.RNNBase):  # it lists the weights it ran with, which would stay on the device
                part._init_flat_weights()
        if keep:
            for name, leaf in zip(self._names[self._buffers], leaves[self._buffers], strict=True):
                if weights[name] is not leaf:  # the code has put another tensor in the buffer's place
                    leaf.data.copy_(weights[name].detach())

    def _run(self, leaves: Sequence[Tensor], *, keep: bool = False) -> tuple[Tensor, ...]:
        """Run the block's code. `keep`: it is the forward, not the second run in backward."""
        kind, dtype = self._device.type, self._autocast
        # Autocast caches one cast of each weight, so gradients add up before they are cast. In forward no gradients are
        # needed, and the cache would hold the cast weights until the model's forward ends: there it is off.
        with torch.autocast(kind, dtype=dtype, enabled=dtype is not None, cache_enabled=not keep):
            results: tuple[Tensor, ...] = self._flat(*leaves[len(self._names) :])
        return results

    @classmethod
    def measured(
        cls, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, name: str, reason: str
    ) -> EagerPair:
        """The code of `module`, with its bytes and operations measured in runs on random weights and inputs; real
        arguments are used as they are. `reason`: a sentence that says why the block cannot be traced. Raises UserError
        "block-not-usable" if the block's code fails.

        If the code looks at data, its memory may depend on the data. A mixture of experts needs most where all rows
        choose the same experts, so one run has equal rows, and the largest need of any run counts. Where code chooses
        a branch by a number (`if x.sum() > 0`), it is made to take the other branches, too, and what each needs beyond
        the first is added. Raises UserError "block-depends-on-data" if the number of branches has no bound, or they
        give other results.
        """
        pair = cls(module, args, kwargs, name=name)
        pair.reason = reason
        devices = [pair._device] if pair._device.type == "cuda" else []
        tensors = [*module.parameters(), *module.buffers(), *flatten_call(args, kwargs)[1]]
        with (
            _disable_current_modes(),
            torch.random.fork_rng(devices=devices),
            torch.autograd.set_multithreading_enabled(False),
            torch.no_grad(),
        ):
            torch.manual_seed(0)
            try:
                weights = [_real(t, pair._device) for t in tensors[: pair.n_params + pair.n_buffers]]
                for alike in (True, False):
                    inputs = [_real(t, pair._device, alike=alike) for t in tensors[len(weights) :]]
                    taken = pair._measure([*weights, *inputs], {})
                    pair._take(pair._bytes)
                pair._take_other_ways([*weights, *inputs], taken)
            except UserError:
                raise
            except Exception as error:  # the block's own code failed: the message names its error as the cause
                raise UserError(
                    f"Block {name} can neither be traced nor run as it is: {type(error).__name__}: {first_line(error)}",
                    code="block-not-usable",
                    numbers=(reason,),
                    hint="if the model has another implementation of this part, choose it in its config",
                ) from error
        sums = sum(
            t.numel() * t.element_size()
            for t, trained in zip(tensors[: pair.n_params], pair._trained, strict=False)
            if trained
        )
        later = pair.backward_peak[False]
        pair.backward_peak = {False: later, True: later + sums if pair.tangent_values else 0}
        return pair

    def _take(self, needed: tuple[int, int, int]) -> None:
        """Raise the measured byte counts to at least `needed`: forward's peak, outputs, backward's peak."""
        forward, output, backward = needed
        self.forward_peak, self.output_bytes = max(self.forward_peak, forward), max(self.output_bytes, output)
        self.backward_peak = {**self.backward_peak, False: max(self.backward_peak[False], backward)}

    def _take_other_ways(self, values: Sequence[Tensor], taken: BranchNumbers) -> None:
        """For each number by which the code chose a branch, run once more with each alternative number in its place,
        and then the same for numbers that appear only in such a run. Add to the byte counts what each branch needs
        beyond the one that it replaces."""
        todo, known = [(dict[Site, Number](), taken, self._bytes)], set(taken.times)
        while todo:
            forced, before, base = todo.pop()
            for site, number in before.first.items():
                if site in forced or (forced and site not in before.first.keys() - taken.first.keys()):
                    continue
                for other in others(number):
                    way = {**forced, site: other}
                    try:
                        after = self._measure(values, way)
                    except UserError:
                        raise
                    except Exception:  # the code refuses this number, perhaps by a check
                        continue
                    if after.times[site] != before.times[site]:
                        raise depends_on_data(self.name, f"{site[0]}, line {site[1]}, decides how often it is run")
                    more = [before.times[site] * max(0, a - b) for a, b in zip(self._bytes, base, strict=True)]
                    forward, output, backward = more
                    self.forward_peak, self.output_bytes = self.forward_peak + forward, self.output_bytes + output
                    self.backward_peak = {**self.backward_peak, False: self.backward_peak[False] + backward}
                    if new := after.times.keys() - known:
                        known |= new
                        todo.append((way, after, self._bytes))

    def _measure(self, values: Sequence[Tensor], forced: Mapping[Site, Number]) -> BranchNumbers:
        """Run forward and backward, and set `_bytes` to what they need. At each site in `forced` the code gets the
        forced number the first time that it asks."""
        torch.manual_seed(0)  # so that branches differ by the forced numbers only
        meter, numbers = ScratchMeter(self._device.type), BranchNumbers(forced)
        with contextlib.ExitStack() as stack:
            stack.enter_context(meter.watch())
            with meter.host():
                values = list(values)
                values[self._buffers] = [buffer.clone() for buffer in values[self._buffers]]
                for tensor in values:
                    meter.add(tensor)
            meter.mark()
            with Counting() as forward, numbers:
                results, states = self.forward(list(values))
            peak = meter.mark()
            output = meter.now - self.saved_bytes
            buffers = results[self.n_outputs :]
            results.clear()
            self.changes_buffers |= not all(map(torch.equal, buffers, values[self._buffers]))
            self._bytes = peak, output, 0
            if not self.tangent_values:  # frozen up to here, or evaluation
                return numbers
            with meter.host():
                tangents = [random_data(t, self._device) for t in self.tangent_values]
            meter.mark()
            with Counting() as backward, BranchNumbers(forced):
                read = (values[i] for i in self.backward_primals)
                grads = self.backward([*buffers, *read, *tangents], states, _forget)
            self._work = self._work if forced else (forward.work, backward.work)
            self._bytes = peak, output, meter.mark() - self.saved_bytes
            del grads
        return numbers


def _real(tensor: Tensor, device: torch.device, *, alike: bool = False) -> Tensor:
    """A tensor with data: a copy of `tensor`, or random data with its layout if it has none."""
    if not isinstance(tensor, FakeTensor) and not tensor.is_meta:
        return tensor.detach().clone()
    return random_data(tensor, device, alike=alike)


class _Input(torch.autograd.Function):
    """An autograd function that makes a block's input a non-leaf, as results of other code are. It stores the input's
    gradient in `grads` with the strides that autograd gave it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, grads: list[Tensor | None], index: int) -> Tensor:
        ctx.grads, ctx.index = grads, index
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        if ctx.grads:
            ctx.grads[ctx.index] = grad
        return None, None, None, None


_input = cast(Callable[..., Tensor], _Input.apply)


def _with_area(text: str, size: int) -> str:
    """The line of lifetimes `text` with an area of `size` bytes and a quarter more, for gaps between tensors."""
    return re.sub(r"~(\d+):\d+", lambda match: f"~{match[1]}:{size + size // 4}", text)


def _forget(name: str, gradient: Tensor | None) -> None:
    pass
