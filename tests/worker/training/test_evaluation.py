"""Evaluations and samples during a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.errors import UserError
from tests.support.short_runs import Run, equal, tiny_job
from tests.support.texts import CHATML, byte_tokenizer
from tests.support.tiny_models import config_of
from worker.training.metrics import read_metrics
from worker.training.model import load_model
from worker.training.samples import Samples

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({}, []),
        ({"val_size": 2, "eval_steps": 4}, [4, 6]),
        ({"val_size": 2, "eval_steps": 0.5, "eval_on_start": True}, [0, 3, 6]),
        ({"val_size": 3}, [2, 3, 5, 6]),  # 6 rows are left, 4 a step
    ],
    ids=str,
)
def test_evaluations_come_when_they_are_due_and_change_nothing(
    tmp_path: Path, keys: dict[str, object], steps: list[int]
) -> None:
    run = Run(tiny_job(tmp_path, **keys), tmp_path / "run")
    assert run.training.run()
    assert [event["step"] for event in run.evaluations()] == steps
    never = Run(run.training.job, tmp_path / "never")
    object.__setattr__(never.training.evaluations, "done", [("eval", step) for step in range(7)])
    never.training.run()
    assert never.evaluations() == []
    assert equal(run.masters(), never.masters())


def test_the_eval_loss_is_the_mean_over_all_tokens_to_be_predicted(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, val_size=5, max_steps=1, bf16=False)
    run = Run(job, tmp_path / "run")
    run.training.run()
    model, held_out = run.engine.model.eval(), run.batches.evaluation
    total = count = 0
    for k in range(len(held_out)):
        batch = held_out.batch(k)
        labels = batch["labels"][:, 1:].flatten()
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1).double()
        total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        count += int((labels != -100).sum())
    (event,) = run.evaluations()
    assert event["tokens"] == count
    assert event["eval_loss"] == pytest.approx(total / count, rel=1e-6)


def test_a_stop_comes_before_an_evaluation_which_is_made_up_for(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, val_size=2, eval_steps=2)
    whole = Run(job, tmp_path / "whole")
    whole.training.run()
    first = Run(job, tmp_path / "parts")

    def ask(done: int) -> None:
        first.stop.asked = done == 3  # during the fourth step

    first.before_each_step(ask)
    assert not first.training.run()
    assert [event["step"] for event in first.evaluations()] == [2]
    second = Run(job, tmp_path / "parts")
    assert second.training.run()
    assert [(e["step"], e["eval_loss"]) for e in second.evaluations()] == [
        (e["step"], e["eval_loss"]) for e in whole.evaluations()
    ]
    assert [event["step"] for event in second.evaluations()] == [2, 4, 6]


@pytest.mark.parametrize("during", [2, 6], ids=["between steps", "after the last step"])
def test_a_stop_during_an_evaluation_comes_before_the_next_step_and_the_evaluation_is_made_up_for(
    tmp_path: Path, during: int
) -> None:
    job = tiny_job(tmp_path, val_size=2, eval_steps=2, sample_prompts="a", sample_tokens=2)
    whole = Run(job, tmp_path / "whole")
    whole.training.run()
    first = Run(job, tmp_path / "parts")
    evaluate = first.engine.evaluate

    def asked(batches: list[dict[str, torch.Tensor]]) -> object:
        first.stop.asked = first.engine.steps_done == during
        return evaluate(batches)

    first.engine.evaluate = asked
    assert not first.training.run()
    assert first.engine.steps_done == during
    second = Run(job, tmp_path / "parts")
    assert second.engine.steps_done == during
    assert second.training.run()

    def written(run: Run) -> list[tuple[object, ...]]:
        events = read_metrics(run.metrics_path)
        return [(e["step"], e.get("eval_loss"), e.get("text")) for e in events if e["event"] in ("eval", "sample")]

    assert written(second) == written(whole)


def test_samples_are_written_when_an_evaluation_is_due(tmp_path: Path) -> None:
    prompts = ["the quick", [{"role": "user", "content": "who jumps?"}]]
    run = Run(tiny_job(tmp_path, sample_prompts=prompts, sample_tokens=5, eval_steps=4), tmp_path / "run")
    run.training.run()
    found = [event for event in read_metrics(run.metrics_path) if event["event"] == "sample"]
    assert [(event["step"], event["prompt"]) for event in found] == [
        (4, "the quick"),
        (4, "who jumps?"),
        (6, "the quick"),
        (6, "who jumps?"),
    ]
    tokenizer = byte_tokenizer(chat_template=CHATML)
    tokens = [
        tokenizer("the quick")["input_ids"],
        tokenizer("<|im_start|>user\nwho jumps?<|im_end|>\n<|im_start|>assistant\n")["input_ids"],
    ]
    answers = run.engine.generate(tokens, new_tokens=5, pad=257)
    assert [event["text"] for event in found[2:]] == [tokenizer.decode(a, skip_special_tokens=True) for a in answers]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"sample_prompts": "abc", "sample_tokens": 254},
            "257, positions 256.*sample-too-long",
        ),
        ({"sample_prompts": [[{"role": "user", "content": "a"}]]}, "no chat template.*no-chat-template"),
    ],
)
def test_a_sample_that_cannot_be_is_refused(tmp_path: Path, keys: dict[str, object], words: str) -> None:
    job = tiny_job(tmp_path, **keys)
    with pytest.raises(UserError, match="(?s)" + words):
        Samples.of(job, byte_tokenizer(), load_model(job))


def test_a_samples_template_is_told_the_jobs_values(tmp_path: Path) -> None:
    prompts = [[{"role": "user", "content": "a"}]]
    job = tiny_job(tmp_path, sample_prompts=prompts, chat_template_kwargs={"enable_thinking": False})
    template = "{{ messages[0].content }}{% if enable_thinking is false %}</think>{% endif %}"
    tokenizer = byte_tokenizer(chat_template=template)
    found = Samples.of(job, tokenizer, load_model(job))
    assert found is not None and tokenizer.decode(found.tokens[0]) == "a</think>"


def test_a_sample_without_a_token_is_named(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, sample_prompts=["a", [{"role": "user", "content": "b"}]])
    with pytest.raises(UserError, match=r'(?s)entry 2 of sample_prompts: .*"role": "user".*empty-prompt'):
        Samples.of(job, byte_tokenizer(chat_template="{% if false %}{% endif %}"), load_model(job))


def test_a_sample_with_a_token_that_the_model_has_not_is_refused(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, sample_prompts="abc")
    config_of("llama", vocabulary=65).save_pretrained(tmp_path / "model")  # a is 64
    with pytest.raises(UserError, match="token 66 is in sample_prompts, the model has 65"):
        Samples.of(job, byte_tokenizer(), load_model(job))
