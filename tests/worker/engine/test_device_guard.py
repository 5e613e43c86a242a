"""Where a PyTorch for CUDA sees no card, tracing leaves a guard of the thread that traced first: it must be one that
stays. On a build without CUDA nothing is left, and the order of the calls is what can be seen."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from planner.codec import to_json
from tests import ROOT
from tests.support.engine_plans import mixed_plan
from tests.support.engines import chain_for

TWO_ENGINES = """
import json, sys, threading
from pathlib import Path

import torch

own, callers = torch._C._ensureCUDADeviceGuardSet, []

def ensure():
    callers.append(threading.current_thread().name)
    own()

torch._C._ensureCUDADeviceGuardSet = ensure

from planner.codec import from_json
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan
from tests.support.engine_plans import adamw
from tests.support.engines import CPU, run
from tests.support.tiny_models import make_model
from worker.engine.engine import Engine

torch.set_num_threads(1)
told = json.loads(Path(sys.argv[1]).read_text("utf-8"))
plan, chain = from_json(Plan, told["plan"]), from_json(Chain, told["chain"])
losses = []
for _ in range(2):
    model = make_model("llama")
    engine = Engine(model, plan=plan, chain=chain, optimizer=adamw(model), max_grad_norm=None, device=CPU)
    losses.append([[float(loss) for loss in step[0]] for step in run(engine, range(2), plan.slices)])
    engine.restore()
print(json.dumps([callers, losses]))
"""


def test_the_main_thread_leaves_its_guard_before_slices_trace(tmp_path: Path) -> None:
    """As a trainer does, the process has a plan and has traced nothing."""
    chain = chain_for("llama")
    plan = replace(mixed_plan(chain, slices=3), gpu_budget_bytes=0)
    (tmp_path / "plan.json").write_text(json.dumps({"plan": to_json(plan), "chain": to_json(chain)}), "utf-8")
    answer = subprocess.run(
        [sys.executable, "-c", TWO_ENGINES, str(tmp_path / "plan.json")],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    callers, (first, second) = json.loads(answer.stdout.splitlines()[-1])
    assert callers[0] == "MainThread" and any(name.startswith("offmate-slice") for name in callers), set(callers)
    assert first == second
