"""Optimizer states on disk: transfers beside fio's, what they cost the processor, a pass of updates, a commit.

    python benchmarks/disk.py FOLDER [--gb 2] [--rounds 5] [--json FILE]

FOLDER is on the drive to be measured, with room for three times as much. In each round everybody has a turn on the same
bytes of the same file, with blocks of 4 MiB and four under way; shares are medians of each round's own ratio. Processor
seconds are this process's, threads included; those of transfers are given without sums and with them. At last a job is
trained with all its states there, once with next to no weights (`host_memory.py`): what it takes of the host and has
written by the kernel's count, beside the plan's. All figures with a bar are in a table at the end. Needs fio.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.host_memory import measure
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
        "fio",
        "--name=it",
        f"--filename={path}",
        f"--size={size // EACH * EACH}",
        f"--bs={BLOCK}",
        "--direct=1",
        "--ioengine=libaio",
        f"--iodepth={DEPTH}",
        f"--rw={'write' if write else 'read'}",
        "--overwrite=1",
        "--end_fsync=1",
        "--output-format=json",
        "--thread",
    ]
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


def cached_bytes(files: Sequence[Path]) -> int:
    """What the page cache has of files."""
    told = subprocess.run(
        ["fincore", "--bytes", "--noheadings", "--output", "RES", *map(str, files)],
        stdin=subprocess.DEVNULL,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return sum(map(int, told.split()))


def transfers(folder: Path, size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Rates beside fio's."""
    path = folder / "transfers"
    file = DirectFile(path)
    file.reserve(size)
    file.close()
    ours(path, size, True, None)
    found: dict[str, dict[str, float]] = {}
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


def passes(folder: Path, size: int, rounds: int) -> dict[str, float]:
    """A pass against its parts, and commits."""
    of = Pass(folder, max(PIECE, size // 12 // PIECE * PIECE))
    checkpoints = Checkpoints(folder / "checkpoints", keep=1, origin=Origin(job={}, data="", total_steps=0, plan=""))
    checkpoints.save(0, [], 0, states=of.states)
    ratios, commits, cached = [], [], []
    for number in range(1, rounds + 1):
        whole = of.run()
        cached.append(cached_bytes(of.states.files()))
        commits.append(timed(of.size, lambda number=number: checkpoints.save(number, [], 0, states=of.states)).wall_s)
        read, write = of.alone(of.read), of.alone(of.write)
        update = of.alone(of.update)
        ratios.append((whole, read, update, write, whole / max(read, update, write), whole / max(read + write, update)))
    of.states.delete()
    names = ("pass s", "read s", "update s", "write s", "of the longest", "of max(read + write, update)")
    return {
        "states GB": of.size / 1e9,
        **{name: statistics.median(row[k] for row in ratios) for k, name in enumerate(names)},
        "commit s/GB": statistics.median(commits) / (of.size / 1e9),
        "page cache MB": max(cached) / 1e6,
    }


def whole_runs(folder: Path, width: int) -> dict[str, float]:
    """A job with all states on disk, what it takes above one with next to no weights; on the CPU its device's bytes are
    in the same memory."""
    tiny, big = (measure(folder / str(each), width=each, layers=8, drive=folder) for each in (64, width))
    taken = big.peak_bytes - tiny.peak_bytes - big.device_bytes + tiny.device_bytes
    return {
        "parameters": big.parameters,
        "host, of the plan's": taken / (big.planned_host_bytes - tiny.planned_host_bytes),
        "written, of the plan's": big.written_bytes / big.planned_written_bytes,
    }


def bars(found: dict[str, dict[str, float]]) -> Iterator[tuple[str, float, float, bool]]:
    """What is asked, what was measured, the bar, and whether more is better."""
    for word in ("read", "write"):
        yield f"{word}, of fio's rate", found[f"{word}, ours, summed"]["of fio's"], 0.95, True
        yield f"{word}, processor s/GB, without sums", found[f"{word}, ours"]["processor s/GB"], 0.02, False
    of = found["pass"]
    yield "a pass, of max(read + write, update)", of["of max(read + write, update)"], 1.1, False
    yield "commit of 10 GB, s", 10 * of["commit s/GB"], 1.0, False
    yield "page cache of the states, MB", of["page cache MB"], 100.0, False
    yield "host's peak, of the plan's", found["run"]["host, of the plan's"], 1.02, False
    yield "written, of the plan's", found["run"]["written, of the plan's"], 1.02, False


def main() -> None:
    """Measure, and print a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=1280, help="of the model that is trained")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        folder, size = Path(made), int(given.gb * 1e9)
        found = {**transfers(folder, size, given.rounds), "pass": passes(folder, size, given.rounds)}
        found["run"] = whole_runs(folder, given.width)
    for name, row in found.items():
        print(f"{name:20}", ", ".join(f"{key} {value:.3f}" for key, value in row.items()))
    print("\n| | measured | bar | |\n|---|---|---|---|")
    for what, value, bar, more in bars(found):
        met = "met" if (value >= bar if more else value <= bar) else "**not met**"
        print(f"| {what} | {value:.3f} | at {'least' if more else 'most'} {bar:g} | {met} |")
    if given.json:
        given.json.write_text(json.dumps({"load": os.getloadavg(), **found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
