"""The comparison of LSP with LoRA and full fine-tuning: its parts in small."""

from __future__ import annotations

import pytest
import torch

from benchmarks import lsp_learning, lsp_plans, paper002
from planner.commands.kept_traces import Traces
from tests.support.texts import sentences, write_jsonl


@pytest.fixture
def quick(monkeypatch):
    """Two steps on few bytes."""
    text = torch.randint(0, 256, (220_000,), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(lsp_learning, "prose", lambda: text)
    monkeypatch.setattr(lsp_learning, "code", lambda: text)
    monkeypatch.setattr(lsp_learning, "BASE_STEPS", 2)


def test_each_method_trains_its_own_numbers_beside_bytes_for_each_row(quick, tmp_path):
    lsp_learning.base_model(tmp_path / "base")
    data = write_jsonl(tmp_path / "data.jsonl", sentences(9))
    found = {}
    for method in lsp_learning.METHODS:
        run = lsp_learning.run(lsp_learning.job_of(tmp_path / "base", data, method, 0), method.rates[0], steps=2)
        assert 0 < run.loss < 7
        found[method.name] = (run.trained, run.row_bytes - run.rotation_bytes, len(run.changes))
    matrices, core = 3 * (4 * 128 * 128 + 3 * 128 * 320), 3 * 7 * 64 * 64
    assert found == {
        lsp_learning.FULL: (matrices, 0, 0),
        "full, all weights": (matrices + 2 * 260 * 128 + 7 * 128, 0, 0),
        "LoRA 8": (3 * 8 * (4 * 256 + 3 * 448), 16, 0),
        "LoRA 12": (3 * 12 * (4 * 256 + 3 * 448), 24, 0),
        lsp_learning.SPARSE: (core, 16, 1),
        lsp_learning.DENSE: (core, 128, 1),
    }


def test_the_share_is_of_what_full_fine_tuning_gains_on_the_same_seed():
    assert lsp_learning.shares(3.0, [2.0, 1.0], [2.5, 1.5]) == [0.5, 0.75]


def test_the_questions_say_each_thing_once():
    asked = list(lsp_plans.questions())
    assert len(asked) == len(set(asked))


def test_equation_1_waits_for_gradients_and_for_updates(tmp_path):
    paper002.write_models(tmp_path)
    case = paper002.CASES[0]
    hardware = paper002.machine(case)
    job = lsp_plans.job_of(lsp_plans.Asked(model=tmp_path / case.model, keys={}, length=64, clip=False))
    chain = Traces().of(job, hardware).chain_on(hardware)
    weights = 36 * (12 * 1280**2 + 13 * 1280) + 50257 * 1280 + 2 * 1280
    update_s = weights / hardware.cpu_update_parameters_per_s
    forward_s, backward_s = paper002.passes_s(chain)
    out_s = 2 * weights / hardware.d2h_bytes_per_s
    expected = forward_s + max(forward_s + backward_s, out_s) + update_s
    assert paper002.zero_s(chain, hardware) == pytest.approx(expected, rel=1e-3)
