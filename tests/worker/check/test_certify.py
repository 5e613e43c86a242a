"""The certificate: a job's steps under its plan and in plain PyTorch. Some tests take seconds: a model is traced for
its plan, and again for its engine."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from offmated.cli.certify import _view
from planner.codec import from_json, to_json
from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.measure.repeatable import Kernels, kernels_in_force
from planner.models.hf_model import sample_batch, skeleton_model
from planner.optimizers import adamw
from planner.optimizers.muon import Muon
from planner.optimizers.table import NONE
from planner.reports.certificate import Certificate, Finding
from planner.schedule.chain import Chain
from tests import ROOT
from tests.support.engine_plans import chain_of, mixed_plan, resident_plan
from tests.support.not_repeatable import patch_mlp
from tests.support.texts import byte_tokenizer, make_job, sentences, tiny_llama_folder, write_jsonl
from tests.support.tiny_models import config_of
from tests.worker.engine.test_states_on_disk import on_disk
from worker.check.__main__ import main
from worker.check.certificate import Room, plain_bytes
from worker.check.comparison import Comparison
from worker.data.batches import Batches
from worker.engine.gradients import Gradients
from worker.training.model import load_model

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def tiny_job(folder: Path, **keys: object) -> Job:
    small = {
        "max_length": 32,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
    }
    data = write_jsonl(folder / "data.jsonl", sentences(9))
    return make_job(tiny_llama_folder(folder / "model"), data, **{**small, **keys})


def chain_for(job: Job) -> Chain:
    model = skeleton_model(job)
    return chain_of(model, sample_batch(job), optimizers=Muon.chosen(model) if job.optim == "muon" else NONE)


def compare(
    job: Job, folder: Path, layers: int = 3, chain: Chain | None = None
) -> tuple[dict[str, Finding], dict[str, float]]:
    chain = chain or chain_for(job)
    plan = mixed_plan(chain, slices=job.gradient_accumulation_steps, clip=job.max_grad_norm is not None)
    comparison = Comparison(
        job=job, batches=Batches(job, byte_tokenizer()), steps=3, layers=layers, device=CPU, folder=folder
    )
    findings, differences, first = comparison.run(plan, chain)
    assert first == 0.0
    return {f.what: f for f in findings}, {d.parameter: d.greatest for d in differences}


@pytest.mark.parametrize(
    "keys", [{}, {"bf16": True, "max_grad_norm": None}, {"optim": "muon"}, {"embedding_lr": 1e-3}], ids=str
)
def test_a_job_under_a_plan_that_mixes_everything_equals_plain_pytorch_in_every_bit(tmp_path: Path, keys) -> None:
    findings, differences = compare(tiny_job(tmp_path, **keys), tmp_path)
    counts = {what: (f.equal, f.count) for what, f in findings.items()}
    norms = {"first moments' norm": (1, 1)} if "max_grad_norm" in keys else {"gradient norms": (3, 3)}
    moments = 39 if "optim" in keys else 60  # of 21 matrices there is a momentum alone
    assert counts == {"losses": (6, 6), **norms, "parameters": (30, 30), "moments": (moments, moments)}
    assert set(differences.values()) == {0.0} and len(differences) == 30
    assert all(f.greatest == 0.0 and f.size > 0 for f in findings.values())


def test_a_job_whose_states_are_on_a_drive_is_certified_and_leaves_nothing_there(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    job = tiny_job(tmp_path, bf16=True, disk_paths=(str(tmp_path / "drive"),))
    chain = on_disk(chain_for(job))
    assert any(t.states_on_disk for t in chain.tensors())
    findings, _ = compare(job, tmp_path, chain=chain)
    assert all(f.equal == f.count > 0 for what, f in findings.items() if what != "first moments' norm")
    assert list((tmp_path / "drive").iterdir()) == []


def test_a_wrong_update_is_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = adamw.update

    def wrong(targets, *rest, **settings) -> None:
        update(targets, *rest, **settings)
        for target in targets:
            if target.name == "model.layers.1.mlp.up_proj.weight":
                target.master.view(-1)[5].add_(2.0**-10)

    monkeypatch.setattr("planner.optimizers.adamw.update", wrong)
    findings, differences = compare(tiny_job(tmp_path), tmp_path)
    assert findings["parameters"].at == "model.layers.1.mlp.up_proj.weight"
    assert max(differences.values()) == findings["parameters"].greatest > 2.0**-10
    assert findings["losses"].at.startswith("step ") and findings["losses"].greatest > 0
    assert findings["losses"].equal < findings["losses"].count


def test_wrong_gradients_of_the_first_step_are_seen_without_clipping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Gradients.add

    def wrong(self, name: str, k: int, gradient: torch.Tensor, **settings: bool) -> None:
        add(self, name, k, 1.01 * gradient, **settings)

    job = tiny_job(tmp_path, max_grad_norm=None)
    chain = chain_for(job)
    comparison = Comparison(
        job=job, batches=Batches(job, byte_tokenizer()), steps=1, layers=3, device=CPU, folder=tmp_path
    )
    monkeypatch.setattr(Gradients, "add", wrong)
    found = comparison.run(resident_plan(chain, slices=2), chain)
    assert found.first == pytest.approx(0.01, rel=0.2)
    assert {f.what: f.equal for f in found.findings}["losses"] == 2, "only gradients are wrong"


def test_a_weight_that_no_gradient_reaches_is_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_spare(model: nn.Module) -> nn.Module:
        model.model.layers[1].register_parameter("spare", nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16)))
        return model

    monkeypatch.setattr(
        "worker.check.comparison.load_model", lambda job, layers: with_spare(load_model(job, layers=layers))
    )
    job = tiny_job(tmp_path, bf16=True)
    chain = chain_of(with_spare(skeleton_model(job)), sample_batch(job))
    comparison = Comparison(
        job=job, batches=Batches(job, byte_tokenizer()), steps=1, layers=3, device=CPU, folder=tmp_path
    )
    found = comparison.run(resident_plan(chain, slices=2, clip=True), chain)
    counts = {f.what: (f.equal, f.count) for f in found.findings}
    assert (counts["parameters"], counts["moments"]) == ((31, 31), (60, 60))
    assert found.parameters[-1].parameter == "model.layers.1.spare"


def test_a_job_that_diverges_in_plain_pytorch_too_has_no_certificate(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="one of the losses of plain PyTorch") as caught:
        compare(tiny_job(tmp_path, learning_rate=1e30, max_grad_norm=None), tmp_path)
    assert caught.value.code == "non-finite"


def test_the_first_layers_of_a_model_are_those_of_the_whole(tmp_path: Path) -> None:
    job = tiny_job(tmp_path)
    config_of("qwen2", vocabulary=260).save_pretrained(tmp_path / "model")  # its config has a list with all layers
    whole = load_model(job)
    whole.save_pretrained(tmp_path / "model")
    short = load_model(job, layers=2)
    assert len(short.model.layers) == short.config.num_hidden_layers == len(short.config.layer_types) == 2
    assert all(torch.equal(p, whole.get_parameter(name)) for name, p in short.named_parameters())


def test_as_many_layers_serve_as_plain_pytorch_has_room_for(tmp_path: Path) -> None:
    chain = chain_for(tiny_job(tmp_path))
    room = Room(chain=chain, there_bytes=plain_bytes(chain))
    assert (room.all_layers, room.layers()) == (3, 3)
    two = plain_bytes(room.shorter(2))
    assert replace(room, there_bytes=room.there_bytes - 1).layers() == 2
    assert replace(room, there_bytes=two).layers() == 2
    assert two > 16 * sum(p.numel() for p in load_model(tiny_job(tmp_path), layers=2).parameters())
    *others, frame = chain.frame_tensors
    frozen = replace(frame, trainable=False, gradient_bytes=0)
    less = plain_bytes(chain) - plain_bytes(replace(chain, frame_tensors=(*others, frozen)))
    assert less == pytest.approx(1.15 * frame.gradient_bytes, abs=1) and less > 100
    with pytest.raises(UserError) as caught:
        replace(room, there_bytes=1000).layers()
    assert (caught.value.code, caught.value.exit_code) == ("no-room", Exit.DOES_NOT_FIT)


def certificate(**changes: object) -> Certificate:
    same = Finding(what="losses", greatest=0.0, at="", size=5.25, equal=4, count=4)
    values = {
        "model": "m",
        "device": "cpu",
        "steps": 2,
        "slices": 2,
        "layers": 3,
        "all_layers": 3,
        "plain_bytes": 2**30,
        "there_bytes": 2**31,
        "gpu_budget_bytes": 2**20,
        "gpu_peak_bytes": 2**19,
        "moved_bytes": 2**18,
        "cpu_updated": 1,
        "options": ("keep", "recompute", "keep"),
        "findings": (same,),
        "parameters": (),
        "reasons": (),
        "first": 0.0,
        "allowed": 2e-6,
    }
    return Certificate(**{**values, **changes})


def shown(found: Certificate, what: str = "a/job.yaml") -> str:
    stream = io.StringIO()
    Console(file=stream, width=200).print(_view(what, found))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def test_a_certificate_in_words() -> None:
    assert shown(certificate()) == (
        "job.yaml: 2 steps of 2 slices, cpu, the whole model (3 layers)\n"
        "memory  512.0 KiB at most under a budget of 1.0 MiB\n"
        "plain   about 1.0 GiB; there are 2.0 GiB\n"
        "plan    0 keep · 1 recompute · 2 keep\n"
        "made    now, as a job of this file gets it; offmate certify ID has the plan of one that is submitted\n"
        "moved   256.0 KiB a step; the CPU updates 1 tensor\n"
        "\n"
        "        greatest difference  in  of at most  equal in every bit\n"
        "losses  0                        5.25        4 of 4\n"
        "\n"
        "offmate computes what plain PyTorch computes, bit for bit."
    )


def test_a_certificate_says_whose_plan_it_is_of() -> None:
    text = shown(certificate(decided=True), "3")
    assert text.startswith("job 3: 2 steps of 2 slices")
    assert "made    earlier: it is the plan under which job 3 trains\n" in text
    text = shown(certificate(), "3")
    assert "made    now, as job 3 gets it when it has its turn and the same memory is free\n" in text
    text = shown(certificate(layers=2, decided=True), "3")
    assert "made    for these layers, with memory as tight as in the job's own plan\n" in text


def test_a_certificate_that_does_not_hold_says_so() -> None:
    wrong = Finding(what="parameters", greatest=1.25e-7, at="model.norm.weight", size=1.5, equal=29, count=30)
    text = shown(certificate(layers=2, findings=(wrong,)))
    assert "the first 2 of 3 layers" in text
    assert "parameters  1.25e-07             model.norm.weight  1.5         29 of 30" in text
    assert text.endswith(
        "offmate does not compute what plain PyTorch computes: no difference is allowed. Please report this."
    )
    assert from_json(Certificate, to_json(certificate(findings=(wrong,)))) == certificate(findings=(wrong,))


def test_where_rounding_may_differ_the_first_step_decides() -> None:
    wrong = Finding(what="parameters", greatest=1e-3, at="model.norm.weight", size=1.5, equal=29, count=30)
    near = certificate(findings=(wrong,), reasons=("it has chunks",), first=1e-6)
    assert near.holds and not near.bitwise
    assert shown(near).endswith(
        "offmate computes within rounding what plain PyTorch computes: it has chunks. In the first step losses and "
        "norm differ by 1e-06 of their size, 2e-06 is allowed."
    )
    far = replace(near, first=3e-6)
    assert not far.holds
    assert "offmate does not compute what plain PyTorch computes: it has chunks. In the first" in shown(far)
    assert certificate(reasons=("it has chunks",)).bitwise


def test_the_command_certifies_a_job(tmp_path: Path) -> None:
    tiny_job(tmp_path)
    (tmp_path / "job.yaml").write_text("model: model\ndataset: data.jsonl\nmax_length: 32\nmax_steps: 2\n")
    words = ["certify", "job.yaml", "--layers=2", "--gpu-budget=4MiB", "--device=cpu", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", "from offmated.cli import main; main()", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OFFMATE_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == Exit.DONE, done.stderr
    found = from_json(Certificate, json.loads(done.stdout))
    assert (found.steps, found.layers, found.all_layers, found.bitwise, found.holds) == (2, 2, 3, True, True)
    assert found.gpu_peak_bytes <= found.gpu_budget_bytes < 4 * 2**20
    assert len(found.parameters) == 21
    assert "offmate: step 2 of 2" in done.stderr


def test_a_certificate_says_which_kernels_both_took_where_others_could_differ() -> None:
    only = "kernels  deterministic ones only"
    assert only not in shown(certificate(kernels="deterministic ones only"))
    card = certificate(device="NVIDIA H100", kernels="deterministic ones only", decided=True)
    assert f"{only}\n" in shown(card, "3")
    assert f"{only}; the plan was measured in them\n" in shown(replace(card, decided=False), "3")
    assert (
        "made     now, for strict kernels: job 3 trains under a plan for faster ones, which need less scratch memory\n"
    ) in shown(replace(card, decided=False, other_kernels=True), "3")
    refused = Kernels(("put_",))
    text = shown(certificate(kernels=str(refused), refused=refused.refused, decided=True), "3")
    assert "kernels  deterministic ones but for put_, which has none and may differ from run to run; attention" in text
    assert from_json(Certificate, to_json(card)) == card


def certified(folder: Path, text: str, *words: str) -> tuple[int, Certificate | None, str]:
    """Exit code and answer of the process about a job of these keys, and what stands in its log."""
    tiny_job(folder)
    (folder / "written.yaml").write_text(f"model: model\ndataset: data.jsonl\nmax_length: 32\nmax_steps: 2\n{text}")
    job = Job.load(folder / "written.yaml")
    (folder / "job.yaml").write_text(job.resolved_yaml())
    answers, log = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(answers), contextlib.redirect_stderr(log):
        code = main(["certify", str(folder / "job.yaml"), f"--folder={folder / 'own'}", "--device=cpu", *words])
    told = answers.getvalue()
    return code, from_json(Certificate, json.loads(told)) if told else None, log.getvalue()


def test_both_are_compared_under_the_strict_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir()
    modes: list[str] = []

    def steps(self: Comparison, *rest: object) -> object:
        modes.append(kernels_in_force(torch.device("cuda")))
        return own(self, *rest)

    own = Comparison._steps
    monkeypatch.setattr(Comparison, "_steps", steps)
    code, found, _ = certified(tmp_path, "gpu_budget: 4MiB\n", "--layers=1")
    assert (code, modes) == (Exit.DONE, ["strict", "strict"])
    assert found is not None and found.bitwise and (found.kernels, found.refused) == ("deterministic ones only", ())
    assert kernels_in_force(torch.device("cuda")) == ""


def test_where_an_operation_refuses_the_comparison_begins_once_more_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own").mkdir()
    patch_mlp(monkeypatch)
    code, found, _ = certified(tmp_path, "gpu_budget: 4MiB\n", "--layers=1")
    assert code == Exit.DONE and found is not None and found.bitwise
    assert found.refused == ("put_",) and "deterministic ones but for put_" in found.kernels
    assert "put_ has no deterministic kernel in PyTorch: all is done once more." in caplog.text
    code, found, log = certified(tmp_path, "gpu_budget: 4MiB\ndeterministic: true\n", "--layers=1")
    assert (code, found) == (Exit.USAGE, None), "as the job would end"
    assert "put_ has no deterministic kernel in PyTorch" in log
