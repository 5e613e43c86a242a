"""The steps of a run: what is trained, saved, written down, and how it stops; with plain PyTorch as the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from planner.errors import UserError
from planner.job.schema import Job
from tests.support.model_folders import write_model
from tests.support.plain_engine import PlainEngine
from tests.support.texts import CHATML, byte_tokenizer, make_job, sentences, tiny_llama_folder, write_jsonl
from tests.support.tiny_models import config_of
from worker.data.batches import Batches
from worker.data.seeds import epoch_seed, micro_batch_seed
from worker.runtime.step_values import AdamW
from worker.storage.checkpoint import Checkpoints, Origin
from worker.storage.model_folder import Output
from worker.training.evaluation import Evaluations
from worker.training.learning_rate import decay_names, learning_rate
from worker.training.loop import Training
from worker.training.metrics import Event, Metrics, read_metrics
from worker.training.model import check_reach, load_model, load_tokenizer
from worker.training.samples import Samples
from worker.training.stop import StopRequest


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def tiny_job(tmp_path: Path, **keys: object) -> Job:
    small = {"max_length": 32, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 6,
             "learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 2}  # fmt: skip
    data = write_jsonl(tmp_path / "data.jsonl", sentences(9))
    return make_job(tiny_llama_folder(tmp_path / "model"), data, **{**small, **keys})


class Run:
    """One process's share of a run, in this process."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.batches = Batches(job, byte_tokenizer(), folder / "data")
        model = load_model(job)
        optimizer = AdamW(betas=(0.9, 0.99), eps=1e-8, weight_decay=job.weight_decay, decay_names=decay_names(model))
        self.engine = PlainEngine(model, optimizer=optimizer, max_grad_norm=job.max_grad_norm)
        origin = Origin(job={}, data=self.batches.fingerprint, total_steps=self.batches.total_steps, plan="")
        checkpoints = Checkpoints(folder / "checkpoints", keep=2, origin=origin)
        if last := checkpoints.latest():
            self.engine.load_state(last.tensors(), step=last.step)
        self.stop = StopRequest()
        self.metrics_path = folder / "metrics.jsonl"
        self.metrics = Metrics(self.metrics_path)
        self.metrics.write("start", step=self.engine.steps_done, resumed_from=last.step if last else None)
        evaluations = Evaluations(
            job=job, engine=self.engine, batches=self.batches, metrics=self.metrics, stop=self.stop,
            samples=Samples.of(job, byte_tokenizer(chat_template=CHATML), model),
            done=[(event["event"], event["step"]) for event in read_metrics(self.metrics_path)],
        )  # fmt: skip
        self.training = Training(
            job=job, engine=self.engine, batches=self.batches, checkpoints=checkpoints, metrics=self.metrics,
            stop=self.stop, state_bytes=1000, evaluations=evaluations,
            predicted_s=lambda batches: float(sum(batch["input_ids"].shape[1] for batch in batches)),
        )  # fmt: skip

    def before_each_step(self, act: Callable[[int], None]) -> None:
        step = self.engine.step

        def stepping(*args: object, **kwargs: object) -> object:
            act(self.engine.steps_done)
            return step(*args, **kwargs)

        self.engine.step = stepping

    def masters(self) -> dict[str, torch.Tensor]:
        return {name: parts["master"].clone() for name, parts in self.engine.state()}

    def evaluations(self) -> list[Event]:
        return [event for event in read_metrics(self.metrics_path) if event["event"] == "eval"]

    def losses(self) -> list[object]:
        return [event["loss"] for event in read_metrics(self.metrics_path) if event["event"] == "step"]


def checkpoint_names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("keys", [{}, {"bf16": True}, {"max_grad_norm": None}, {"packing": True}], ids=str)
def test_a_run_stopped_and_resumed_ends_as_one_that_was_not(tmp_path: Path, keys: dict[str, object]) -> None:
    job = tiny_job(tmp_path, **keys)
    whole = Run(job, tmp_path / "whole")
    assert whole.training.run()
    first = Run(job, tmp_path / "parts")

    def ask(done: int) -> None:
        first.stop.asked = done == 3  # during the fourth step

    first.before_each_step(ask)
    assert not first.training.run()
    assert checkpoint_names(tmp_path / "parts") == ["step-4"]
    second = Run(job, tmp_path / "parts")
    assert second.engine.steps_done == 4
    assert second.training.run()
    assert equal(whole.masters(), second.masters())
    assert whole.losses() == second.losses()


def test_a_run_that_died_in_a_step_ends_as_one_that_did_not(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, save_steps=2)
    whole = Run(job, tmp_path / "whole")
    whole.training.run()
    first = Run(job, tmp_path / "parts")

    def die(done: int) -> None:
        if done == 5:
            raise InterruptedError

    first.before_each_step(die)
    with pytest.raises(InterruptedError):
        first.training.run()
    second = Run(job, tmp_path / "parts")
    assert second.engine.steps_done == 4
    second.training.run()
    assert equal(whole.masters(), second.masters())
    assert whole.losses() == second.losses()


def test_each_step_is_plain_pytorch_on_the_mean_over_all_its_tokens(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, max_steps=2, max_grad_norm=None)
    run = Run(job, tmp_path / "run")
    model = load_model(job)
    optimizer = torch.optim.AdamW(
        [{"params": [p for n, p in model.named_parameters() if n in decay_names(model)], "weight_decay": 0.1},
         {"params": [p for n, p in model.named_parameters() if n not in decay_names(model)], "weight_decay": 0.0}],
        betas=(0.9, 0.99), fused=True,
    )  # fmt: skip
    for step in range(2):
        batches = run.batches.step(step)
        items = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
        for k, batch in enumerate(batches):
            torch.manual_seed(micro_batch_seed(42, step, k))
            logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
            losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
            )
            (losses / items).backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(job, step, 2)
        optimizer.step()
        optimizer.zero_grad()
    run.training.run()
    for name, master in run.masters().items():
        torch.testing.assert_close(master, model.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)


def test_checkpoints_come_every_save_steps_and_the_last_step_needs_none(tmp_path: Path) -> None:
    run = Run(tiny_job(tmp_path, save_steps=2), tmp_path / "run")
    run.training.run()
    events = [(e["event"], e["step"]) for e in read_metrics(run.metrics_path) if e["event"] == "checkpoint"]
    assert events == [("checkpoint", 2), ("checkpoint", 4)]
    assert checkpoint_names(tmp_path / "run") == ["step-2", "step-4"]


def test_checkpoints_come_every_save_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    run = Run(tiny_job(tmp_path, save_minutes=1.5), tmp_path / "run")
    monkeypatch.setattr("worker.training.loop.time.monotonic", lambda: clock[0])
    run.before_each_step(lambda done: clock.__setitem__(0, clock[0] + 40.0))
    run.training.run()
    assert checkpoint_names(tmp_path / "run") == ["step-3"]  # after 120 s; the next would come with the last step


def test_checkpoints_by_the_clock_take_a_twentieth_of_the_time_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    run = Run(tiny_job(tmp_path, save_minutes=0.1, max_steps=9), tmp_path / "run")
    monkeypatch.setattr("worker.training.loop.time.monotonic", lambda: clock[0])
    run.before_each_step(lambda done: clock.__setitem__(0, clock[0] + 10.0))
    save = run.training.checkpoints.save

    def slow_save(*args: Any) -> Path:
        clock[0] += 2.0  # 20 times that are 4 steps
        return save(*args)

    monkeypatch.setattr(Checkpoints, "save", lambda _self, *args: slow_save(*args))
    run.training.run()
    events = read_metrics(run.metrics_path)
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [1, 5]


def test_a_stop_without_a_new_step_writes_no_checkpoint(tmp_path: Path) -> None:
    run = Run(tiny_job(tmp_path), tmp_path / "run")
    run.stop.asked = True
    assert not run.training.run()
    assert checkpoint_names(tmp_path / "run") == []


def test_every_step_is_written_down(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, max_steps=3)
    run = Run(job, tmp_path / "run")
    run.training.run()
    steps = [event for event in read_metrics(run.metrics_path) if event["event"] == "step"]
    assert [event["step"] for event in steps] == [1, 2, 3]
    assert [event["learning_rate"] for event in steps] == [learning_rate(job, n, 3) for n in range(3)]
    assert [event["tokens"] for event in steps] == [run.batches.num_tokens(n) for n in range(3)]
    assert all(event["step_s"] > 0 and event["grad_norm"] > 0 and event["gpu_peak_bytes"] is None for event in steps)
    lengths = [[batch["input_ids"].shape[1] for batch in run.batches.step(n)] for n in range(3)]
    assert [event["predicted_step_s"] for event in steps] == [float(sum(of_step)) for of_step in lengths]
    assert set(steps[0]) == {
        "event", "time", "step", "loss", "learning_rate", "grad_norm", "step_s", "tokens", "gpu_peak_bytes",
        "waited_s", "metered", "predicted_step_s",
    }  # fmt: skip


def test_a_loss_that_is_not_finite_ends_the_run_at_its_last_checkpoint(tmp_path: Path) -> None:
    run = Run(tiny_job(tmp_path, save_steps=2), tmp_path / "run")

    def poison(done: int) -> None:
        if done == 4:
            run.engine.masters["model.norm.weight"].data.fill_(torch.nan)

    run.before_each_step(poison)
    with pytest.raises(UserError) as caught:
        run.training.run()
    assert str(caught.value) == (
        "The training has diverged: the loss is not finite at step 5.\n"
        f"  last checkpoint: {tmp_path}/run/checkpoints/step-4\n"
        "  hint: use a lower learning_rate, more warmup_steps, or max_grad_norm: 1.0   [non-finite]"
    )
    assert run.losses()[-1] is None


def test_a_last_step_that_is_not_finite_ends_the_run_too(tmp_path: Path) -> None:
    run = Run(tiny_job(tmp_path, save_steps=4, max_grad_norm=None), tmp_path / "run")
    step = run.engine.step

    def poisoned(*args: object, **kwargs: object) -> object:
        result = step(*args, **kwargs)
        if run.engine.steps_done == 6:  # the loss was fine, the update is not
            run.engine.masters["model.norm.weight"].data[3] = torch.inf
        return result

    run.engine.step = poisoned
    with pytest.raises(UserError) as caught:
        run.training.run()
    assert str(caught.value) == (
        "The training has diverged: master of model.norm.weight is not finite at step 6.\n"
        f"  last checkpoint: {tmp_path}/run/checkpoints/step-4\n"
        "  hint: use a lower learning_rate, more warmup_steps, or max_grad_norm: 1.0   [non-finite]"
    )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_model_folder_loads_with_the_trained_weights(tmp_path: Path, name: str, bf16: bool) -> None:
    folder = tiny_llama_folder(tmp_path / "model")
    if name == "gpt2":  # tied embeddings
        config_of("gpt2", vocabulary=260).save_pretrained(folder)
    job = make_job(folder, write_jsonl(tmp_path / "d.jsonl", sentences(4)), max_length=32, bf16=bf16, max_steps=2)
    model = load_model(job)
    output = Output(model)
    trained = {n: torch.randn_like(p, dtype=torch.float32) for n, p in model.named_parameters()}
    for parameter in model.parameters():  # an engine leaves only shapes behind
        parameter.data = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    dtype = torch.bfloat16 if bf16 else torch.float32
    state = ((n, {"master": t}) for n, t in trained.items())
    write_model(tmp_path / "out", output, model, load_tokenizer(job), state, dtype=dtype)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.dtype == dtype
    assert loaded.config.use_cache
    parameters = dict(loaded.named_parameters())
    assert parameters.keys() == trained.keys()
    assert all(torch.equal(parameters[n], t.to(dtype)) for n, t in trained.items())
    assert load_tokenizer(make_job(tmp_path / "out", tmp_path / "d.jsonl")).eos_token_id == 256
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_a_folder_without_weights_starts_as_plain_pytorch_would(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    job = tiny_job(tmp_path)
    model = load_model(job)
    torch.manual_seed(42)
    plain = AutoModelForCausalLM.from_config(model.config)
    assert equal(dict(model.named_parameters()), dict(plain.named_parameters()))
    assert "has no weights; starting from random ones under seed 42" in caplog.text


def test_a_folder_with_weights_starts_from_them(tmp_path: Path) -> None:
    job = tiny_job(tmp_path)
    saved = load_model(job)
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.normal_()
    saved.save_pretrained(tmp_path / "model")
    model = load_model(job)
    assert equal(dict(model.named_parameters()), dict(saved.named_parameters()))
    assert (model.training, model.config.use_cache) == (True, False)


def test_torn_weights_are_an_error(tmp_path: Path) -> None:
    job = tiny_job(tmp_path)
    load_model(job).save_pretrained(tmp_path / "model")
    weights = tmp_path / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"The weights of .* cannot be loaded"):
        load_model(job)


def test_a_tokenizer_of_another_model_is_an_error(tmp_path: Path) -> None:
    job = tiny_job(tmp_path)
    with pytest.raises(UserError, match="token 260 is in the data, the model has 260"):
        check_reach(job, load_model(job), 260)
    check_reach(job, load_model(job), Batches(job, byte_tokenizer()).largest_token)


def test_more_tokens_than_learned_positions_are_an_error(tmp_path: Path) -> None:
    folder = tiny_llama_folder(tmp_path / "m")
    config_of("gpt2", vocabulary=260).save_pretrained(folder)
    job = make_job(folder, write_jsonl(tmp_path / "d.jsonl", sentences(3)), max_length=129)
    with pytest.raises(UserError, match="max_length 129, positions 128"):
        check_reach(job, load_model(job), 256)


def test_seeds_are_stable_and_differ() -> None:
    assert micro_batch_seed(42, 7, 3) == 8731196651434596181
    seeds = {micro_batch_seed(s, n, k) for s in range(3) for n in range(10) for k in range(4)}
    assert len(seeds | {epoch_seed(s, n) for s in range(3) for n in range(10)}) == 150
    assert all(0 <= seed < 2**63 for seed in seeds)


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
        (4, "the quick"), (4, "who jumps?"), (6, "the quick"), (6, "who jumps?"),
    ]  # fmt: skip
    tokenizer = byte_tokenizer(chat_template=CHATML)
    tokens = [tokenizer("the quick")["input_ids"], tokenizer(
        "<|im_start|>user\nwho jumps?<|im_end|>\n<|im_start|>assistant\n")["input_ids"]]  # fmt: skip
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


def test_a_sample_without_a_token_is_named(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, sample_prompts=["a", [{"role": "user", "content": "b"}]])
    with pytest.raises(UserError, match=r'(?s)entry 2 of sample_prompts: .*"role": "user".*empty-prompt'):
        Samples.of(job, byte_tokenizer(chat_template="{% if false %}{% endif %}"), load_model(job))


def test_a_sample_with_a_token_that_the_model_has_not_is_refused(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, sample_prompts="abc")
    config_of("llama", vocabulary=65).save_pretrained(tmp_path / "model")  # a is 64
    with pytest.raises(UserError, match="token 66 is in sample_prompts, the model has 65"):
        Samples.of(job, byte_tokenizer(), load_model(job))
