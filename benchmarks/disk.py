"""Optimizer states on disk: transfers beside fio's, what they cost the processor, a pass of updates, a commit.

    python benchmarks/disk.py FOLDER [--gb 2] [--rounds 5] [--json FILE]

FOLDER is on the drive to be measured, with room for three times as much. In each round everybody has a turn on the same
bytes of the same file, with blocks of 4 MiB and four under way; shares are medians of each round's own ratio. Processor
seconds are this process's, threads included; those of transfers are given without sums and with them. Needs fio.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from planner.cpu.adamw import Step, Target, cpu_kernel
from planner.cpu.direct import BLOCK, DEPTH
from planner.cpu.direct_file import DirectFile
from planner.schedule.state_pieces import Piece, StoredTensor
from worker.runtime.slabs import map_memory
from worker.storage.checkpoint import Checkpoints, Origin
from worker.storage.states import StatesOnDisk

PIECE = 1 << 22
RING = 6
EACH = 48 << 20


@dataclass(frozen=True, slots=True)
class Cost:
    """What moving so many bytes took."""

    bytes: int
    wall_s: float
    cpu_s: float

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.bytes / 1e9 / self.wall_s

    @property
    def cpu_s_per_gb(self) -> float:
        """Processor seconds a GB."""
        return self.cpu_s / (self.bytes / 1e9)


def timed(size: int, act: Callable[[], object]) -> Cost:
    """`act`, which moves `size` bytes."""
    wall, cpu = time.perf_counter(), time.process_time()
    act()
    return Cost(size, time.perf_counter() - wall, time.process_time() - cpu)


def memory(size: int) -> torch.Tensor:
    """As the engine's, there already."""
    return torch.frombuffer(map_memory(size, mmap.mmap), dtype=torch.uint8).fill_(1)


def ours(path: Path, size: int, write: bool, floats: int | None) -> Cost:
    """One after another, as a queue of a program does them."""
    file, buffer = DirectFile(path), memory(EACH)

    def act() -> None:
        for start in range(0, size // EACH * EACH, EACH):
            (file.write if write else file.read)(start, buffer, floats=floats)
        if write:
            file.flush()

    cost = timed(size // EACH * EACH, act)
    file.close()
    return cost


def fio(path: Path, size: int, write: bool) -> Cost:
    """The same file, block and depth; its processor seconds are those of its threads."""
    command = [
        "fio", "--name=it", f"--filename={path}", f"--size={size // EACH * EACH}", f"--bs={BLOCK}", "--direct=1",
        "--ioengine=libaio", f"--iodepth={DEPTH}", f"--rw={'write' if write else 'read'}", "--overwrite=1",
        "--end_fsync=1", "--output-format=json", "--thread",
    ]  # fmt: skip
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["jobs"][0]
    side = told["write" if write else "read"]
    wall = told["job_runtime"] / 1e3
    return Cost(side["io_bytes"], wall, (told["usr_cpu"] + told["sys_cpu"]) / 100 * wall)


class Pass:
    """All states read, updated and written, through a ring, by a thread each."""

    def __init__(self, folder: Path, elements: int) -> None:
        tensors = [StoredTensor(name="w", shape=(elements,), widths=(4, 4, 4))]
        self.states = StatesOnDisk([folder / "states"], tensors, piece_elements=PIECE, homes=2)
        self.work = torch.zeros(elements, dtype=torch.bfloat16)
        self.ring = [memory(self.states.pieces[0].bytes) for _ in range(RING)]
        self.size = sum(piece.bytes for piece in self.states.pieces)
        self.count = 0
        for piece in self.states.pieces:
            self.ring[0].zero_()
            self.states.write(piece.name, piece.number, self.ring[0])

    def read(self, piece: Piece, number: int) -> None:
        self.states.read(piece.name, piece.number, self.ring[number])

    def update(self, piece: Piece, number: int) -> None:
        exp_avg, exp_avg_sq, master = self.states.parts(piece.name, piece.number, self.ring[number])
        work = self.work[piece.first : piece.first + piece.elements]
        step = Step(
            learning_rate=1e-4, betas=(0.9, 0.95), eps=1e-8, count=torch.tensor(float(self.count)), coefficient=None
        )
        cpu_kernel().update([Target("w", 0.1, work, master, exp_avg, exp_avg_sq, work)], step)

    def write(self, piece: Piece, number: int) -> None:
        self.states.write(piece.name, piece.number, self.ring[number])

    def alone(self, act: Callable[[Piece, int], None]) -> float:
        """Seconds that one of the three takes by itself."""
        return timed(self.size, lambda: [act(p, k % RING) for k, p in enumerate(self.states.pieces)]).wall_s

    def run(self) -> float:
        """Seconds that all three take together."""
        self.count += 1
        queues = [Queue[int]() for _ in range(3)]
        for number in range(RING):
            queues[0].put(number)

        def body(source: Queue[int], target: Queue[int], act: Callable[[Piece, int], None]) -> None:
            for piece in self.states.pieces:
                number = source.get()
                act(piece, number)
                target.put(number)

        acts = (self.read, self.update, self.write)
        threads = [
            threading.Thread(target=body, args=(queues[k], queues[(k + 1) % 3], act)) for k, act in enumerate(acts)
        ]

        def together() -> None:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return timed(self.size, together).wall_s


def cached_bytes() -> int:
    """The page cache."""
    lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Cached:"))


def transfers(folder: Path, size: int, rounds: int) -> dict[str, object]:
    """Rates beside fio's."""
    path = folder / "transfers"
    file = DirectFile(path)
    file.reserve(size)
    file.close()
    ours(path, size, True, None)
    found: dict[str, object] = {}
    for write in (False, True):
        kinds = {
            "ours": lambda write=write: ours(path, size, write, None),
            "ours, summed": lambda write=write: ours(path, size, write, EACH),
            "fio": lambda write=write: fio(path, size, write),
        }
        costs: dict[str, list[Cost]] = {name: [] for name in kinds}
        for number in range(rounds):
            order = list(kinds)
            for name in order[number % 3 :] + order[: number % 3]:
                costs[name].append(kinds[name]())
        word = "write" if write else "read"
        for name, each in costs.items():
            shares = [cost.rate / other.rate for cost, other in zip(each, costs["fio"], strict=True)]
            found[f"{word}, {name}"] = {
                "GB/s": statistics.median(cost.rate for cost in each),
                "of fio's": statistics.median(shares),
                "processor s/GB": statistics.median(cost.cpu_s_per_gb for cost in each),
            }
    path.unlink()
    return found


def passes(folder: Path, size: int, rounds: int) -> dict[str, object]:
    """A pass against its parts, and commits."""
    of = Pass(folder, max(PIECE, size // 12 // PIECE * PIECE))
    checkpoints = Checkpoints(
        folder / "checkpoints", keep=1, origin=Origin(job={}, data="", total_steps=0, plan="")
    )  # fmt: skip
    checkpoints.save(0, [], 0, states=of.states)
    ratios, commits, grown = [], [], []
    for number in range(1, rounds + 1):
        before = cached_bytes()
        whole = of.run()
        grown.append(cached_bytes() - before)
        commits.append(
            timed(of.size, lambda number=number: checkpoints.save(number, [], 0, states=of.states)).wall_s
        )
        read, write = of.alone(of.read), of.alone(of.write)
        update = of.alone(of.update)
        ratios.append((whole, read, update, write, whole / max(read, update, write), whole / max(read + write, update)))
    of.states.delete()
    names = ("pass s", "read s", "update s", "write s", "of the longest", "of max(read + write, update)")
    return {
        "states": f"{of.size / 1e9:.2f} GB",
        **{name: statistics.median(row[k] for row in ratios) for k, name in enumerate(names)},
        "commit s/GB": statistics.median(commits) / (of.size / 1e9),
        "page cache grown MB": statistics.median(grown) / 1e6,
    }


def main() -> None:
    """Measure, and print a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        folder, size = Path(made), int(given.gb * 1e9)
        found = {**transfers(folder, size, given.rounds), "pass": passes(folder, size, given.rounds)}
    for name, row in found.items():
        assert isinstance(row, dict)
        words = (f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
        print(f"{name:20}", ", ".join(words))
    if given.json:
        given.json.write_text(json.dumps({"load": os.getloadavg(), **found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
