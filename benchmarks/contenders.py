"""Ways to train one Llama, each in a process of its own, which takes steps when gpu.py says so.

They are plain, offmate (under the plan of a folder's plan.json), zero-offload and zero-3-offload. A number asks for so
many steps in a row; the answer is a `Visit`. The first answer, about two steps that warm up, comes unasked. Own
processes, because memory is then each contender's own, and so is what the budget allows it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import os
import socket
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import torch
import transformers
from torch import Tensor, nn

from benchmarks.forked import check_cuda
from planner.codec import Json, from_json, to_json
from planner.cpu.meter import Meter
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan
from tests.support.engine_plans import adamw
from tests.support.plain_engine import PlainEngine
from worker.engine.engine import Engine
from worker.runtime.arena import arena, take_over

WARM_STEPS = 2
RATE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A Llama and a step of it: `slices` micro-batches of [batch, length] random tokens. `dtype` is "bf16", with fp32
    masters and moments, or "fp32"."""

    layers: int
    width: int
    vocabulary: int
    length: int
    batch: int
    slices: int
    dtype: str
    device: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """What blocks compute in."""
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32

    @property
    def items(self) -> int:
        """Tokens that have a loss, in a step."""
        return self.slices * self.batch * (self.length - 1)

    def prepare(self) -> None:
        """Make the weights now: processes that are forked after it have them, and take no seconds to make them."""
        _weights(replace(self, batch=0, slices=0, device="cpu"))

    def model(self) -> nn.Module:
        """The model in host memory, the same in every process; buffers on the device, as the analysis wants them."""
        model = copy.deepcopy(_weights(replace(self, batch=0, slices=0, device="cpu")))
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self.device)
        return model

    def batches(self) -> list[dict[str, Tensor]]:
        """One per slice, in host memory."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.slices, self.batch, self.length)
        ids = torch.randint(self.vocabulary, shape, generator=generator)
        return [{"input_ids": i, "labels": i.clone()} for i in ids]


@functools.cache
def _weights(work: Work) -> nn.Module:
    torch.manual_seed(0)
    heads = max(1, work.width // 64)
    config = transformers.LlamaConfig(
        vocab_size=work.vocabulary,
        hidden_size=work.width,
        intermediate_size=8 * work.width // 3 // 64 * 64,
        num_hidden_layers=work.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        use_cache=False,
        max_position_embeddings=work.length,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: nn.Module = transformers.LlamaForCausalLM._from_config(config, dtype=work.torch_dtype).train()
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """Steps in a row, until all of their updates are done: seconds a step, of these those until all was issued, and
    those that issuing computation waited for copies and updates (None where nobody counts). Peaks are of the blocks in
    use of the allocator (on the CPU: of the meter, while warming up) and of what it had from the driver; None when they
    are not counted. `loss` is the first step's."""

    step_s: float
    issuing_s: float
    waited_s: float | None
    peak_bytes: int | None
    reserved_bytes: int | None
    loss: float


class Contender(Protocol):
    """Something that trains."""

    @property
    def waited_s(self) -> float | None:
        """Seconds that issuing computation has waited for copies and updates; None where nobody counts."""

    def step(self) -> tuple[Tensor, int | None]:
        """One optimizer step: its loss, and its peak where the contender counts for itself."""

    def drain(self) -> None:
        """Finish every update."""

    def stop_metering(self) -> None:
        """Count bytes no more, if counting takes time."""


class Offmate:
    """The engine under a plan."""

    def __init__(self, work: Work, plan: Plan, chain: Chain) -> None:
        model, device = work.model(), torch.device(work.device)
        self._work, self._batches = work, work.batches()
        self._engine = Engine(
            model,
            plan=plan,
            chain=chain,
            optimizer=adamw(model),
            max_grad_norm=None,
            device=device,
            metered=device.type == "cpu",
        )
        self.drain, self.stop_metering = self._engine.drain, self._engine.stop_metering

    @property
    def waited_s(self) -> float | None:
        """Of all steps so far."""
        return self._engine.waited_s

    def step(self) -> tuple[Tensor, int | None]:
        """One of the engine's."""
        seeds = range(self._work.slices)
        result = self._engine.step(self._batches, seeds=seeds, learning_rate=RATE, num_items_in_batch=self._work.items)
        return torch.stack(result.losses).sum(), result.peak_bytes


class Plain:
    """PyTorch with everything on the device."""

    waited_s: float | None = None

    def __init__(self, work: Work) -> None:
        self._work, self._batches = work, work.batches()
        model = work.model().to(work.device)
        self._meter, self._metering = Meter(), contextlib.ExitStack()
        if work.device == "cpu":
            self._metering.enter_context(self._meter.watch())
        for tensor in (*model.parameters(), *model.buffers()):
            self._meter.add(tensor)
        self._engine = PlainEngine(model, optimizer=adamw(model), max_grad_norm=None, device=work.device)

    def step(self) -> tuple[Tensor, int | None]:
        """One of PyTorch's."""
        seeds = range(self._work.slices)
        result = self._engine.step(self._batches, seeds=seeds, learning_rate=RATE, num_items_in_batch=self._work.items)
        return torch.stack(result.losses).sum(), self._meter.peak or None

    def drain(self) -> None:
        """Nothing is ever pending."""

    def stop_metering(self) -> None:
        """From now on there is no peak."""
        self._metering.close()
        self._meter = Meter()


class Zero:
    """DeepSpeed, its optimizer's states in host memory and updated there; stage 3: the weights too."""

    waited_s: float | None = None

    def __init__(self, work: Work, stage: int) -> None:
        import deepspeed  # here: it need not be installed, and takes seconds

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(port)
        self._device = work.device
        model, host = work.model(), {"device": "cpu", "pin_memory": work.device != "cpu"}
        settings = adamw(model)
        groups = [
            {"params": [p for n, p in model.named_parameters() if settings.decay_of(n) == decay], "weight_decay": decay}
            for decay in (settings.weight_decay, 0.0)
        ]
        zero = {"stage": stage, "offload_optimizer": host, "overlap_comm": True, "contiguous_gradients": True}
        config = {
            "train_micro_batch_size_per_gpu": work.batch,
            "gradient_accumulation_steps": work.slices,
            "zero_optimization": zero | ({"offload_param": host} if stage == 3 else {}),
            "bf16": {"enabled": work.dtype == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": RATE, "betas": settings.betas, "eps": settings.eps}},
        }
        self._engine = deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]
        self._batches = work.batches()

    def step(self) -> tuple[Tensor, int | None]:
        """All slices have as many tokens, so the mean of their means is the step's."""
        losses = []
        for batch in self._batches:
            loss = self._engine(**{name: t.to(self._device) for name, t in batch.items()}).loss
            self._engine.backward(loss)
            self._engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean(), None

    def drain(self) -> None:
        """A step ends with its updates."""

    def stop_metering(self) -> None:
        """Nothing is metered."""


def make(name: str, work: Work, folder: Path) -> Contender:
    """The contender of that name."""
    match name:
        case "plain":
            return Plain(work)
        case "offmate":
            if work.device == "cuda":
                take_over()  # as the trainer does; nothing has used the device yet
            made = json.loads((folder / "plan.json").read_text("utf-8"))
            return Offmate(work, from_json(Plan, made["plan"]), from_json(Chain, made["chain"]))
        case "zero-offload":
            return Zero(work, 2)
        case "zero-3-offload":
            return Zero(work, 3)
    raise ValueError(f"no contender {name!r}")


def visit(contender: Contender, steps: int, device: torch.device) -> Visit:
    """Take `steps` steps and wait for the last update."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
        _reset_peaks(device)
    losses: list[Tensor] = []
    peaks: list[int] = []
    before, start = contender.waited_s, time.perf_counter()
    for _ in range(steps):
        loss, peak = contender.step()
        losses.append(loss)
        peaks += [] if peak is None else [peak]
    issuing_s = (time.perf_counter() - start) / steps
    contender.drain()
    if cuda:
        torch.cuda.synchronize(device)
    step_s = (time.perf_counter() - start) / steps
    if cuda:
        peaks.append(_most_bytes(device)[0])
    loss_value = float(losses[0])
    if not math.isfinite(loss_value):
        raise FloatingPointError(f"the loss is {loss_value}")
    after = contender.waited_s
    waited_s = None if before is None or after is None else (after - before) / steps
    return Visit(
        step_s=step_s,
        issuing_s=issuing_s,
        waited_s=waited_s,
        peak_bytes=max(peaks, default=None),
        reserved_bytes=_most_bytes(device)[1] if cuda else None,
        loss=loss_value,
    )


def _reset_peaks(device: torch.device) -> None:
    """Whichever allocator counts."""
    if (found := arena()) is not None:
        found.reset_peaks()
    else:
        torch.cuda.reset_peak_memory_stats(device)


def _most_bytes(device: torch.device) -> tuple[int, int]:
    """Allocated and reserved, since peaks were reset."""
    if (found := arena()) is not None:
        counts = found.counts()
        return counts.most_allocated, counts.most_reserved
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def serve(name: str, work: Work, folder: Path, pipe: Connection) -> None:
    """Warm up, then take as many steps as the pipe says, until it says that there is nothing more to do. What fails is
    the last answer: `{"error": …}`."""
    device = torch.device(work.device)
    try:
        check_cuda()
        contender = make(name, work, folder)
        _send(pipe, to_json(visit(contender, WARM_STEPS, device)))
        contender.stop_metering()
        while (steps := json.loads(pipe.recv_bytes())) is not None:
            _send(pipe, to_json(visit(contender, steps, device)))
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        _send(pipe, {"error": f"{type(error).__name__}: {first}"})
        raise


def _send(pipe: Connection, answer: Json) -> None:
    pipe.send_bytes(json.dumps(answer).encode())
