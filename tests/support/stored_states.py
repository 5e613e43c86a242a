"""A training whose optimizer states are on disk and nothing else of it is: gradients come of the weights, so a state
that is old or torn shows in all that follows. And disks whose power is cut."""

from __future__ import annotations

import hashlib
import mmap
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import Queue

import torch
from torch import Tensor

from planner.cpu.adamw import Step, Target, cpu_kernel
from planner.cpu.direct_file import Sum, sum_of
from planner.schedule.state_pieces import Piece, StoredTensor
from worker.storage.states import StatesOnDisk
from worker.storage.states_record import StatesRecord

PIECE = 4096
_SHAPES = {"a": (17, 601), "b": (2, 4096), "c": (77,)}  # with remainders, in whole pieces, in one that is not whole
_DECAY = {"a": 0.1, "b": 0.0, "c": 0.1}
_SECTOR = 512


def stored(dtype: torch.dtype = torch.bfloat16) -> tuple[StoredTensor, ...]:
    """What is on disk."""
    widths = (4, 4, 4) if dtype == torch.bfloat16 else (4, 4)
    return tuple(StoredTensor(name=name, shape=shape, widths=widths) for name, shape in _SHAPES.items())


def slot(size: int) -> Tensor:
    """Memory from a whole page on."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


def starting_weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Before the first step."""
    draw = torch.Generator().manual_seed(7)
    return {name: (torch.randn(shape, generator=draw) * 0.1).to(dtype) for name, shape in _SHAPES.items()}


def gradients(work: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    """Of the weights of step `step`."""
    draw = torch.Generator().manual_seed(1000 + step)
    noise = {name: torch.randn(weight.shape, generator=draw) * 0.01 for name, weight in work.items()}
    return {name: (weight.float() * 0.5 + noise[name]).to(weight.dtype) for name, weight in work.items()}


def in_memory(steps: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, dict[str, Tensor]]:
    """Masters and moments after so many steps of `torch.optim.AdamW`, fp32."""
    plain = {name: torch.nn.Parameter(weight.float()) for name, weight in starting_weights(dtype).items()}
    groups = [{"params": [p], "weight_decay": _DECAY[name]} for name, p in plain.items()]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step in range(1, steps + 1):
        work = {name: p.detach().to(dtype) for name, p in plain.items()}
        for name, gradient in gradients(work, step).items():
            plain[name].grad = gradient.float()
        optimizer.step()
    moments = ("exp_avg", "exp_avg_sq")
    return {
        name: {**{part: optimizer.state[p].get(part, torch.zeros_like(p)) for part in moments}, "master": p.detach()}
        for name, p in plain.items()
    }


class Training:
    """Weights in memory, their states in a store, taken over where it has `resumed` at `step`."""

    def __init__(self, states: StatesOnDisk, step: int, *, dtype: torch.dtype = torch.bfloat16) -> None:
        self.states, self.step, self.work = states, step, starting_weights(dtype)
        self._ring = [slot(max(piece.bytes for piece in states.pieces)) for _ in range(3)]
        if states.resumed:
            for piece, parts in states.check(self._ring[0]):
                if len(parts) == 3:
                    self._of(self.work, piece).copy_(parts[2])
        else:
            self.write(lambda piece: [0.0, 0.0, self._of(self.work, piece)])

    def write(self, what: Callable[[Piece], list[Tensor | float]]) -> None:
        """Every piece anew."""
        for piece in self.states.pieces:
            for part, value in zip(self._parts(piece, 0), what(piece), strict=False):
                part.copy_(torch.as_tensor(value))
            self.states.write(piece.name, piece.number, self._ring[0])

    def run_step(self, *, threads: bool = False) -> None:
        """Read, update, write: piece after piece, or each in a thread of its own through the ring."""
        self.step += 1
        gradient = gradients(self.work, self.step)
        order = list(self.states.pieces)[:: -1 if self.step % 2 else 1]
        if not threads:
            for piece in order:
                self._read(piece, 0), self._update(piece, 0, gradient), self._write(piece, 0)
            return
        free, fresh, dirty = Queue[int](), Queue[int](), Queue[int]()
        for number in range(len(self._ring)):
            free.put(number)
        failed: list[BaseException] = []

        def runs(source: Queue[int], target: Queue[int], act: Callable[[Piece, int], None]) -> threading.Thread:
            def body() -> None:
                for piece in order:
                    number = source.get()
                    try:
                        if not failed:
                            act(piece, number)
                    except BaseException as error:
                        failed.append(error)
                    target.put(number)

            return threading.Thread(target=body)

        update = lambda piece, number: self._update(piece, number, gradient)  # noqa: E731
        workers = [runs(free, fresh, self._read), runs(fresh, dirty, update), runs(dirty, free, self._write)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failed:
            raise failed[0]

    def _read(self, piece: Piece, number: int) -> None:
        self.states.read(piece.name, piece.number, self._ring[number])

    def _write(self, piece: Piece, number: int) -> None:
        self.states.write(piece.name, piece.number, self._ring[number])

    def _update(self, piece: Piece, number: int, gradient: Mapping[str, Tensor]) -> None:
        work = self._of(self.work, piece)
        exp_avg, exp_avg_sq, *master = self._parts(piece, number)
        target = Target(
            piece.name,
            _DECAY[piece.name],
            work,
            master[0] if master else work,
            exp_avg,
            exp_avg_sq,
            self._of(gradient, piece),
        )
        count = torch.tensor(float(self.step))
        step = Step(learning_rate=1e-2, betas=(0.9, 0.95), eps=1e-8, count=count, coefficient=None)
        cpu_kernel().update([target], step)

    def _of(self, tensors: Mapping[str, Tensor], piece: Piece) -> Tensor:
        return tensors[piece.name].view(-1)[piece.first : piece.first + piece.elements]

    def _parts(self, piece: Piece, number: int) -> list[Tensor]:
        return self.states.parts(piece.name, piece.number, self._ring[number])

    def all_states(self) -> dict[str, dict[str, Tensor]]:
        """As `in_memory` gives them."""
        found = {name: {part: torch.empty(shape) for part in stored()[0].parts} for name, shape in _SHAPES.items()}
        for piece in self.states.pieces:
            self._read(piece, 0)
            parts = self._parts(piece, 0)
            for name, part in zip(found[piece.name], [*parts, self._of(self.work, piece)], strict=False):
                self._of({piece.name: found[piece.name][name]}, piece).copy_(part)
        return found


def digest(states: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Of every bit."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(states):
        for part in sorted(states[name]):
            found.update(f"{name}/{part}".encode() + states[name][part].contiguous().numpy().tobytes())
    return found.hexdigest()


class PowerCut(Exception):
    """Nothing works any more."""


class Drive:
    """A drive with a memory of its own, which forgets when the power goes: some of what it had not been told to flush
    is there then, some is not, some in part; or several drives, whose power goes together, and whose parts of a piece
    are moved by a thread each. `record` is what was published last."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.life, self.step = draw, 0, 0
        self._lock = threading.RLock()
        self._kept: dict[Path, bytearray] = {}
        self._seen: dict[Path, bytearray] = {}
        self._unflushed: dict[Path, list[tuple[int, bytes]]] = {}
        self.record: StatesRecord | None = None

    def switch_on(self, life: int) -> None:
        """For so many operations."""
        self.life = life
        self._unflushed = {}
        self._seen = {path: bytearray(content) for path, content in self._kept.items()}

    def open(self, path: Path) -> DriveFile:
        """A file on it."""
        path.touch()
        return DriveFile(self, path)

    def tick(self) -> None:
        """One operation more. Raises PowerCut."""
        with self._lock:
            if self.life == 0:
                raise PowerCut
            self.life -= 1
            if self.life == 0:
                for path, writes in self._unflushed.items():
                    for offset, content in writes:
                        self._lose(path, offset, content, self.draw.random())
                raise PowerCut

    def _lose(self, path: Path, offset: int, content: bytes, fate: float) -> None:
        for at in range(0, len(content), _SECTOR):
            if fate > 0.6 or (fate > 0.3 and self.draw.random() < 0.5):
                self._kept[path][offset + at : offset + at + _SECTOR] = content[at : at + _SECTOR]

    def publish(self, record: StatesRecord, step: int) -> None:
        """As the rename of a folder: whole or not at all."""
        if before := self.draw.random() < 0.5:
            self.tick()
        self.record, self.step = record, step
        if not before:
            self.tick()

    def reserve(self, path: Path, size: int) -> None:
        with path.open("r+b") as file:
            file.truncate(size)
        self._kept[path], self._seen[path] = bytearray(size), bytearray(size)

    def read(self, path: Path, offset: int, size: int) -> bytes:
        self.tick()
        return bytes(self._seen[path][offset : offset + size])

    def write(self, path: Path, offset: int, content: bytes) -> None:
        with self._lock:
            self._unflushed.setdefault(path, []).append((offset, content))
            self.tick()
        self._seen[path][offset : offset + len(content)] = content

    def flush(self, path: Path) -> None:
        self.tick()
        for offset, content in self._unflushed.pop(path, []):
            self._kept[path][offset : offset + len(content)] = content


class DriveFile:
    """As planner.cpu.direct_file.DirectFile."""

    def __init__(self, drive: Drive, path: Path) -> None:
        self._drive, self._path = drive, path

    def reserve(self, size: int) -> None:
        self._drive.reserve(self._path, size)

    def read(self, offset: int, memory: Tensor, *, floats: int | None = None) -> Sum | None:
        content = self._drive.read(self._path, offset, memory.nbytes)
        memory.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        return None if floats is None else sum_of(memory.numpy(), floats)

    def write(self, offset: int, memory: Tensor, *, floats: int | None = None) -> Sum | None:
        self._drive.write(self._path, offset, memory.numpy().tobytes())
        return None if floats is None else sum_of(memory.numpy(), floats)

    def flush(self) -> None:
        self._drive.flush(self._path)

    def close(self) -> None:
        pass


def steps_of(training: Training, every: int, steps: int, *, threads: bool = False) -> Iterator[int]:
    """Train to step `steps`; yields where a checkpoint is due, the first before the first step."""
    if not training.states.resumed:
        yield training.step
    while training.step < steps:
        training.run_step(threads=threads)
        if training.step % every == 0:
            yield training.step
