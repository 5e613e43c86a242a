"""Training that goes on for long, or is taken up again: nothing piles up, and no bit is lost at any step. Some tests
take seconds: they train for hundreds of steps."""

from __future__ import annotations

import functools
import gc
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from planner.graph import Pair
from planner.schedule.chain import Chain
from tests.support.engine_plans import adamw, chain_of, mixed_plan
from tests.support.tiny_models import batch_of, make_model
from worker.engine.engine import Engine
from worker.storage.checkpoint import Checkpoints, Origin, read_checkpoint

torch.set_num_threads(1)
CPU = torch.device("cpu")
STEPS = 6
LEAK_BYTES = 2**20  # 6 KiB a step
PAIRS: dict[object, Pair] = {}


@dataclass(frozen=True)
class Case:
    """A model under a plan with all options and both sides of updates."""

    name: str
    slices: int = 2
    clip: float | None = None
    dtype: torch.dtype = torch.float32


CASES = {
    "carried updates": Case("llama"),
    "clipped, bf16": Case("llama", clip=0.5, dtype=torch.bfloat16),
    "tied, clipped": Case("gpt2", clip=0.5),
    "tied, bf16": Case("gpt2", dtype=torch.bfloat16),
}


@functools.cache
def chain_for(case: Case) -> Chain:
    return chain_of(make_model(case.name, case.dtype))


def make_engine(case: Case, *, metered: bool = False) -> Engine:
    model, chain = make_model(case.name, case.dtype), chain_for(case)
    plan = mixed_plan(chain, slices=case.slices, clip=case.clip is not None)
    engine = Engine(
        model, plan=plan, chain=chain, optimizer=adamw(model), max_grad_norm=case.clip, device=CPU, metered=metered
    )
    engine._rounds.codes = PAIRS
    return engine


def step(engine: Engine, case: Case) -> list[float]:
    """The next step; its losses."""
    number = engine.steps_done
    batches = [batch_of(10 * number + k) for k in range(case.slices)]
    seeds = [10 * number + k for k in range(case.slices)]
    return [float(loss) for loss in engine.step(batches, seeds=seeds, learning_rate=1e-2).losses]


def masters_and_moments(engine: Engine) -> dict[str, torch.Tensor]:
    return {f"{name}/{part}": t.clone() for name, parts in engine.state() for part, t in parts.items()}


@dataclass(frozen=True)
class Whole:
    """A run of STEPS steps: its losses, its state in the end, and a checkpoint from before each step."""

    case: Case
    losses: list[list[float]]
    state: dict[str, torch.Tensor]
    checkpoints: list[Path]


@pytest.fixture(scope="module", params=CASES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A run that nobody disturbed, and one that was saved before each of its steps."""
    case, folder = CASES[request.param], tmp_path_factory.mktemp("whole")
    engine = make_engine(case)
    losses = [step(engine, case) for _ in range(STEPS)]
    expected = masters_and_moments(engine)
    engine.close()
    saving = make_engine(case)
    checkpoints = Checkpoints(folder, keep=None, origin=Origin(job={}, data="", total_steps=STEPS, plan=""))
    paths = []
    for _ in range(STEPS):
        paths.append(checkpoints.save(saving.steps_done, saving.state(), 0))
        step(saving, case)
    saving.close()
    return Whole(case, losses, expected, paths)


@pytest.mark.sweep(36)
@pytest.mark.parametrize("after", range(STEPS))
def test_a_run_taken_up_after_any_step_ends_as_one_that_was_not_stopped(whole: Whole, after: int) -> None:
    saved = read_checkpoint(whole.checkpoints[after])
    engine = make_engine(whole.case)
    engine.load_state(saved.tensors(), step=saved.step)
    assert [step(engine, whole.case) for _ in range(after, STEPS)] == whole.losses[after:]
    found = masters_and_moments(engine)
    engine.close()
    assert found.keys() == whole.state.keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, whole.state[name])] == []


def anonymous_bytes() -> int:
    """The process's memory that is not of files."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def footprint(engine: Engine) -> tuple[int, int, int, int]:
    """Between two steps: threads, device bytes, Python's objects, anonymous memory."""
    engine.drain()
    gc.collect()
    meter = engine._machine.meter
    return threading.active_count(), meter.now if meter else 0, len(gc.get_objects()), anonymous_bytes()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("metered", [True, False], ids=["metered", "not metered"])
def test_two_hundred_steps_leave_nothing_behind(metered: bool) -> None:
    case = Case("llama", slices=1, clip=0.5) if metered else Case("llama", dtype=torch.bfloat16)
    engine = make_engine(case, metered=metered)
    for _ in range(20):
        step(engine, case)
    threads, device_bytes, objects, anonymous = footprint(engine)
    for _ in range(20, 200):
        step(engine, case)
    after = footprint(engine)
    engine.close()
    assert after[:2] == (threads, device_bytes)
    assert after[2] <= objects + 20  # an object per ten steps would show
    assert after[3] <= anonymous + LEAK_BYTES
