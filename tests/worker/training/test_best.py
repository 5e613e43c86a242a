"""Which evaluation a run's model is of, and when it ends for want of a better one."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.trainer_callback import EarlyStoppingCallback, TrainerControl, TrainerState

from planner.errors import UserError
from planner.job.schema import Job
from tests.planner.conftest import folder, parse  # noqa: F401, a fixture
from tests.support.runs import make_run
from tests.support.short_runs import Run, equal, tiny_job
from worker.engine.engine import Engine
from worker.storage.checkpoint import Checkpoint
from worker.training.best import standing
from worker.training.run import run_job
from worker.training.stop import StopRequest

pytestmark = pytest.mark.usefixtures("one_thread")
CHOICE = {"val_size": 2, "eval_steps": 1, "save_steps": 2, "load_best_model_at_end": True}


def by_transformers(losses: list[float], patience: int, threshold: float, tmp_path: Path) -> tuple[int, int]:
    """The evaluation (from 1) after which transformers' callback stops, and the best one till then."""
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        eval_strategy="steps",
        save_strategy="steps",
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        report_to="none",
        use_cpu=True,
    )
    state, control = TrainerState(), TrainerControl()
    callback = EarlyStoppingCallback(patience, threshold)
    best = 0
    for number, loss in enumerate(losses, start=1):
        callback.on_evaluate(arguments, state, control, {"eval_loss": loss})
        if state.best_metric is None:  # as Trainer does, after its callbacks
            state.best_metric = float("inf")
        if loss < state.best_metric:
            state.best_metric, best = loss, number
        if control.should_training_stop:
            return number, best
    return len(losses) + 1, best


def test_the_rules_are_those_of_transformers(tmp_path: Path) -> None:
    for seed in range(60):
        draw = random.Random(seed)
        losses = [draw.choice([0.5, 0.6, 0.65, 0.7, 0.9, float("nan")]) for _ in range(8)]
        losses[0] = draw.choice([0.8, float("nan")])
        patience, threshold = draw.randint(1, 4), draw.choice([0.0, 0.08, 0.2])
        for number in range(1, 9):
            found = standing([(0, 0.1), *enumerate(losses[:number], start=1)], threshold)
            assert found is not None
            if found.without >= patience:
                break
        else:
            number += 1
        assert (number, found.step) == by_transformers(losses, patience, threshold, tmp_path), losses


class Rehearsed(Run):
    """A run whose evaluations have these losses, whatever the model says; `steps`: those after which it was trained."""

    def pretend(self, losses: list[float]) -> None:
        evaluate = self.engine.evaluate

        def evaluated(batches: list) -> object:  # type: ignore[type-arg]
            found = evaluate(batches)
            loss = losses[self.engine.steps_done - 1]
            return replace(found, losses=tuple(each * 0 + loss for each in found.losses))

        self.engine.evaluate = evaluated


def weights(found: Checkpoint) -> dict:  # type: ignore[type-arg]
    return {name: parts["weight"].clone() for name, parts in found.tensors()}


LOSSES = [3.0, 2.0, 2.5, 2.6, 2.7, 2.8]


def test_the_weights_of_the_best_evaluation_are_kept_and_the_run_ends_without_a_better_one(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, **CHOICE, early_stopping_patience=3)
    run = Rehearsed(job, tmp_path / "run")
    run.pretend(LOSSES)
    assert run.training.run()
    assert run.engine.steps_done == 5 and [event["step"] for event in run.evaluations()] == [1, 2, 3, 4, 5]
    best = run.training.best
    assert best is not None
    found = best.chosen(run.training.evaluations.losses)
    assert found is not None and found.step == 2
    two = Run(tiny_job(tmp_path, **{**CHOICE, "load_best_model_at_end": False}), tmp_path / "two")
    two.before_each_step(lambda done: setattr(two.stop, "asked", done == 1))
    two.training.run()
    assert equal(weights(found), two.masters())


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_run_that_was_stopped_chooses_as_one_that_was_not(tmp_path: Path, stop: int) -> None:
    job = tiny_job(tmp_path, **CHOICE, early_stopping_patience=3)
    first = Rehearsed(job, tmp_path / "run")
    first.pretend(LOSSES)
    first.before_each_step(lambda done: setattr(first.stop, "asked", done == stop))
    assert not first.training.run()
    second = Rehearsed(job, tmp_path / "run")
    second.pretend(LOSSES)
    assert second.training.run()
    assert second.engine.steps_done == 5 and second.training.best is not None
    found = second.training.best.chosen(second.training.evaluations.losses)
    assert found is not None and found.step == 2


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_what_is_the_best_is_known_by_the_checkpoint_where_lines_of_the_metrics_are_lost(
    tmp_path: Path, stop: int
) -> None:
    job = tiny_job(tmp_path, **CHOICE, early_stopping_patience=3)
    first = Rehearsed(job, tmp_path / "run")
    first.pretend(LOSSES)
    first.before_each_step(lambda done: setattr(first.stop, "asked", done == stop))
    assert not first.training.run()
    lines = first.metrics_path.read_bytes().splitlines(keepends=True)
    first.metrics_path.write_bytes(b"".join(line for line in lines if b'"eval"' not in line))
    second = Rehearsed(job, tmp_path / "run")
    second.pretend(LOSSES)
    assert second.training.run()
    assert [(at, round(loss, 4)) for at, loss in second.training.evaluations.losses] == [*enumerate(LOSSES[:5], 1)]
    assert second.engine.steps_done == 5 and second.training.best is not None
    found = second.training.best.chosen(second.training.evaluations.losses)
    assert found is not None and found.step == 2


def test_weights_that_a_crash_left_unwritten_are_written_when_the_run_goes_on(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, **CHOICE)
    first = Rehearsed(job, tmp_path / "run")
    first.pretend(LOSSES)
    assert first.training.best is not None
    best = first.training.best

    def dies(where: object) -> Checkpoint:
        if first.engine.steps_done == 2:  # its evaluation is written down, and so is the checkpoint
            raise KeyboardInterrupt
        return first._write(best.kept)

    object.__setattr__(best, "write", dies)
    with pytest.raises(KeyboardInterrupt):
        first.training.run()
    second = Rehearsed(job, tmp_path / "run")
    second.pretend(LOSSES)
    assert second.engine.steps_done == 2 and second.kept.step() == 1
    assert second.training.run()
    assert second.kept.step() == 2


def test_damaged_weights_of_the_best_are_said_and_the_last_ones_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Rehearsed(tiny_job(tmp_path, **CHOICE), tmp_path / "run")
    run.pretend(LOSSES)
    run.training.run()
    next((tmp_path / "run" / "best").glob("step-2/weights-*")).write_bytes(b"")
    assert run.training.best is not None and run.training.best.chosen(run.training.evaluations.losses) is None
    assert "the model is that of the last step" in caplog.text


def test_weights_that_a_crash_left_beside_the_newer_ones_are_not_taken_for_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Rehearsed(tiny_job(tmp_path, **CHOICE), tmp_path / "run")
    run.pretend(LOSSES)
    monkeypatch.setattr(shutil, "rmtree", lambda *_of, **_how: None)  # as where the process dies before it
    run.training.run()
    assert sorted(path.name for path in (tmp_path / "run" / "best").iterdir()) == ["step-1", "step-2"]
    assert run.training.best is not None
    found = run.training.best.chosen(run.training.evaluations.losses)
    assert found is not None and found.step == 2


def test_where_no_evaluation_has_a_loss_the_model_is_that_of_the_last_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Rehearsed(tiny_job(tmp_path, **CHOICE), tmp_path / "run")
    run.pretend([float("nan")] * len(LOSSES))
    run.training.run()
    assert run.training.best is not None and run.training.best.chosen(run.training.evaluations.losses) is None
    assert "no evaluation had a loss" in caplog.text and run.kept.step() is None


@pytest.mark.parametrize(
    ("lines", "chosen"),
    [
        ("eval_steps: 10\nsave_steps: 20\n", True),
        ("eval_steps: 10\nsave_steps: 25\n", False),
        ("eval_steps: 0.1\nsave_steps: 0.2\n", True),
        ("evals_per_epoch: 4\nsaves_per_epoch: 1\n", True),
        ("evals_per_epoch: 1\nsaves_per_epoch: 4\n", False),
        ("eval_steps: 10\nsave_steps: 20\neval_strategy: no\n", False),
        ("evals_per_epoch: 4\nsaves_per_epoch: 1\nload_best_model_at_end: false\n", False),
    ],
)
def test_axolotl_chooses_the_best_where_each_save_is_at_an_evaluation(
    lines: str,
    chosen: bool,
    folder: Path,  # noqa: F811
) -> None:
    file = f"base_model: tiny\ndatasets:\n  - path: {folder / 'text.jsonl'}\n    type: completion\n"
    common = f"{file}output_dir: out\nlearning_rate: 1e-4\nval_set_size: 0.5\n"
    job, _ = Job.parse_with_notes(common + lines, folder)
    assert job.load_best_model_at_end is chosen


def test_axolotls_choice_by_another_number_is_refused_where_the_key_itself_is_not_in_the_file(
    folder: Path,  # noqa: F811
) -> None:
    file = f"base_model: tiny\ndatasets:\n  - path: {folder / 'text.jsonl'}\n    type: completion\n"
    lines = "val_set_size: 0.5\nevals_per_epoch: 4\nsaves_per_epoch: 1\nmetric_for_best_model: accuracy\n"
    with pytest.raises(UserError, match="the smallest loss"):
        Job.parse_with_notes(f"{file}output_dir: out\nlearning_rate: 1e-4\n{lines}", folder)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("load_best_model_at_end: true\n", "give val_size or eval_dataset"),
        ("early_stopping_patience: 2\nval_size: 1\neval_strategy: no\n", "eval_strategy is no"),
        ("early_stopping_patience: 2\nval_size: 1\ngreater_is_better: true\n", "the smallest loss"),
    ],
)
def test_a_choice_without_evaluations_is_refused(lines: str, words: str, folder: Path) -> None:  # noqa: F811
    with pytest.raises(UserError, match=words):
        parse(lines, folder)


def test_a_job_ends_with_the_model_of_its_best_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"val_size": 2, "eval_steps": 1, "max_steps": 4, "load_best_model_at_end": True}
    evaluate = Engine.evaluate
    masters: dict[int, dict[str, torch.Tensor]] = {}

    def evaluated(self: Engine, batches: list) -> object:  # type: ignore[type-arg]
        found = evaluate(self, batches)
        masters[self.steps_done] = {name: parts["master"].clone() for name, parts in self.state()}
        return replace(found, losses=tuple(each * 0 + LOSSES[self.steps_done - 1] for each in found.losses))

    monkeypatch.setattr(Engine, "evaluate", evaluated)
    _, run = make_run(tmp_path, "llama", **keys)
    assert run_job(run, StopRequest())
    model = AutoModelForCausalLM.from_pretrained(run.output)
    assert equal({name: p.detach() for name, p in model.named_parameters()}, masters[2])
    card = (run.output / "README.md").read_text()
    _, head, text = card.split("---\n", 2)
    assert yaml.safe_load(head)["library_name"] == "transformers"
    assert "Made from model, trained on data.jsonl in 2 steps of 2 rows" in text
    assert "- loss of the evaluation: 2.0000" in text
    assert str(tmp_path) not in card, "a card goes to others"
    assert not list(run.best.glob("*")) and not run.trained.exists()
    monkeypatch.setattr(Engine, "step", lambda *_: pytest.fail("trained again"))
    assert run_job(run, StopRequest())
