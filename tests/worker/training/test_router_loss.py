"""The auxiliary loss of a mixture's routers: what transformers' own code gives for the rows without their padding.
Some tests take seconds: a model is traced for its plan, and again for its engine."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from peft import get_peft_model
from torch import Tensor, nn

from planner.commands.plan_job import plan_job
from planner.errors import UserError
from planner.job.schema import Job
from planner.measure.analysis import analyse, estimate_times
from planner.measure.machine_rates import estimate_hardware
from planner.models.hf_model import masked_of
from planner.models.router_loss import weighs_routers
from planner.schedule.compile import compile_program
from planner.schedule.memory_use import gpu_peak_bytes
from planner.search.problem import Problem
from tests.support.lora_jobs import CPU, config_of_peft
from tests.support.plain_engine import PlainEngine
from tests.support.texts import byte_tokenizer, make_job, sentences, tiny_llama_folder, write_jsonl
from worker.data.batches import Batches
from worker.data.seeds import micro_batch_seed
from worker.engine.engine import Engine
from worker.training.learning_rate import optimizer_of
from worker.training.model import load_model

STEPS = 3

pytestmark = pytest.mark.usefixtures("one_thread")

_SIZES = {
    "vocab_size": 260,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "experts_implementation": "batched_mm",
}
CONFIGS = {
    "mixtral": lambda **more: T.MixtralConfig(**{**_SIZES, **more}, intermediate_size=64, num_local_experts=4),
    "qwen3_moe": lambda **more: T.Qwen3MoeConfig(
        **{**_SIZES, **more}, moe_intermediate_size=64, intermediate_size=64, num_experts=4, head_dim=32
    ),
}


def mixture_job(tmp_path: Path, name: str, *, config: dict[str, Any] | None = None, **keys: object) -> Job:
    folder = tiny_llama_folder(tmp_path / "model")
    torch.manual_seed(5)
    T.AutoModelForCausalLM.from_config(CONFIGS[name](**(config or {}))).save_pretrained(folder)
    small = {
        "max_length": 32,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.1,
    }
    return make_job(folder, write_jsonl(tmp_path / "data.jsonl", sentences(9)), **{**small, **keys})


def steps_of(job: Job, engine: Any, most_bytes: int | None = None) -> list[Tensor]:
    """The losses of the job's steps, each micro-batch's; `most_bytes`: what no step may take more than."""
    batches, losses = Batches(job, byte_tokenizer(), masked=masked_of(job)), []
    for number in range(STEPS):
        data = batches.step(number)
        result = engine.step(
            data,
            seeds=[micro_batch_seed(job.seed, number, k) for k in range(len(data))],
            learning_rate=job.learning_rate,
            num_items_in_batch=torch.tensor(batches.num_items(data)),
        )
        losses += result.losses
        assert min(int(batch["attention_mask"].min()) for batch in data) == 0, "no padding, nothing to leave out"
        assert most_bytes is None or result.peak_bytes <= most_bytes
    return losses


def trained_under_a_plan(job: Job, slack: float) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and trained parameters; the plan's budget is the least one, or more by `slack` of what would hold all."""
    analysis = analyse(job, CPU)
    hardware = replace(estimate_hardware(CPU), min_transfer_bytes=0)
    chain = analysis.chain(estimate_times(analysis, hardware))
    setting = {"cpu_budget_bytes": 2**30, "slices": job.gradient_accumulation_steps, "clip": bool(job.max_grad_norm)}
    least = Problem(chain=chain, hardware=hardware, gpu_budget_bytes=0, **setting).least().gpu_bytes
    budget = int(1.02 * least * (1 + slack))
    plan = Problem(chain=chain, hardware=hardware, gpu_budget_bytes=budget, **setting).plan()
    model = load_model(job)
    engine = Engine(
        model,
        plan=plan,
        chain=chain,
        optimizer=optimizer_of(job, model),
        max_grad_norm=job.max_grad_norm,
        device=CPU,
        metered=True,
    )
    losses = steps_of(job, engine, most_bytes=gpu_peak_bytes(compile_program(plan, chain), chain))
    engine.restore()
    engine.close()
    return losses, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


class Counting(nn.Module):
    """A mixture as transformers computes it, whose routers' loss is what its own function makes of the tokens that
    there are: of the logits without the padding's."""

    def __init__(self, model: nn.Module, share: float, balancing: Any, top: int) -> None:
        super().__init__()
        self.model, self._share, self._balancing, self._top = model, share, balancing, top

    def forward(self, attention_mask: Tensor, **batch: Any) -> Any:
        found = self.model(**batch, output_router_logits=True)
        experts = found.router_logits[0].shape[-1]
        auxiliary = self._balancing(found.router_logits, experts, self._top, attention_mask)
        there = attention_mask.flatten() == 1
        alone = self._balancing(tuple(each[there] for each in found.router_logits), experts, self._top)
        torch.testing.assert_close(auxiliary, alone)
        found.loss = found.loss + self._share * auxiliary
        return found


def trained_plainly(job: Job, share: float) -> tuple[list[Tensor], dict[str, Tensor]]:
    model: Any = T.AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16 if job.bf16 else torch.float32)
    balancing, top = import_module(type(model).__module__).load_balancing_loss_func, model.config.num_experts_per_tok
    model.config.use_cache, model.router_aux_loss_coef = False, 0.0
    if job.method == "lora":
        torch.manual_seed(job.seed)
        model = get_peft_model(model, config_of_peft(job))
    model.train()
    settings = optimizer_of(job, model)[0]
    named = replace(settings, decay_names=frozenset(f"model.{name}" for name in settings.decay_names))
    plain = PlainEngine(Counting(model, share, balancing, top), max_grad_norm=job.max_grad_norm, optimizer=named)
    return steps_of(job, plain), {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


LORA = {"method": "lora", "lora_r": 4, "lora_dropout": 0.0}
CASES = [
    *(("full", {}, slack) for slack in (0.0, 0.3, 10.0)),
    ("bf16", {"bf16": True}, 0.0),
    ("lora", LORA, 0.0),
    ("packed", {"packing": True}, 0.3),
    ("a mean", {"router_aux_loss_mean": True}, 10.0),
    ("a mean of lora", {**LORA, "router_aux_loss_mean": True}, 0.0),
]


@pytest.mark.sweep(16)
@pytest.mark.parametrize(("keys", "slack"), [case[1:] for case in CASES], ids=[f"{c[0]}-{c[2]}" for c in CASES])
@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_transformers_own_of_the_tokens_without_padding(
    tmp_path: Path, name: str, keys: dict[str, object], slack: float
) -> None:
    job = mixture_job(tmp_path, name, router_aux_loss_coef=0.5, **keys)
    share = 0.5 / job.gradient_accumulation_steps if job.router_aux_loss_mean else 0.5
    got, expected = trained_under_a_plan(job, slack), trained_plainly(job, share)
    assert all(torch.equal(one, other) for one, other in zip(got[0], expected[0], strict=True))
    assert got[1].keys() == expected[1].keys()
    assert [n for n in expected[1] if not torch.equal(got[1][n], expected[1][n])] == []


def test_it_comes_to_what_transformers_trainer_learns(tmp_path: Path) -> None:
    """Which gives the mask to the whole model, whose attention then rounds otherwise."""
    job = mixture_job(tmp_path, "mixtral", router_aux_loss_coef=0.5)
    losses, trained = trained_under_a_plan(job, 0.3)
    model: Any = T.AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
    batches = Batches(job, byte_tokenizer(), masked=True)
    data = [batch for step in range(STEPS) for batch in batches.step(step)]

    class InOrder(T.Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(data, batch_size=None)

    settings = T.TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        max_steps=STEPS,
        per_device_train_batch_size=job.slice_rows,
        gradient_accumulation_steps=job.gradient_accumulation_steps,
        learning_rate=job.learning_rate,
        weight_decay=job.weight_decay,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        optim="adamw_torch_fused",
        disable_tqdm=True,
    )
    trainer = InOrder(model, settings, train_dataset=data)
    trainer.train()
    steps = [float(one + other) for one, other in zip(losses[::2], losses[1::2], strict=True)]
    assert steps == pytest.approx([line["loss"] for line in trainer.state.log_history if "loss" in line], rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), atol=1e-4, rtol=0)


def loss_of(job: Job) -> tuple[float, float, float]:
    """Of the job's model, of the bare one as transformers' Trainer calls it, with mask and routers, and without
    routers; all of one padded batch."""
    batch = Batches(job, byte_tokenizer(), masked=True).step(0)[1]
    assert int(batch["attention_mask"].min()) == 0
    bare: Any = T.AutoModelForCausalLM.from_pretrained(job.model).eval()
    with torch.no_grad():
        masked = {} if not masked_of(job) else {"attention_mask": batch["attention_mask"]}
        own = load_model(job).eval()(**{**batch, "attention_mask": None, **masked}).loss
        asked, quiet = (bare(**batch, output_router_logits=wanted).loss for wanted in (True, False))
    return float(own), float(asked), float(quiet)


@pytest.mark.parametrize(
    ("config", "keys", "asked"),
    [
        ({"router_aux_loss_coef": 0.5}, {"router_aux_loss_coef": "auto"}, True),
        ({"router_aux_loss_coef": 0.5}, {}, False),
        ({"router_aux_loss_coef": 0.5, "output_router_logits": True}, {}, True),
        ({"router_aux_loss_coef": 0.5, "output_router_logits": True}, {"router_aux_loss_coef": 0}, False),
    ],
    ids=["as the config weighs it", "not asked for", "the config asks", "taken out"],
)
def test_the_config_says_what_the_job_leaves_to_it(
    tmp_path: Path, config: dict[str, Any], keys: dict[str, object], asked: bool
) -> None:
    own, with_routers, without = loss_of(mixture_job(tmp_path, "mixtral", config=config, **keys))
    assert with_routers > without + 0.5
    assert own == pytest.approx(with_routers if asked else without, rel=1e-6)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_mean_is_of_a_steps_micro_batches_and_an_evaluation_has_the_whole_share(tmp_path: Path, method: str) -> None:
    """TRL gives an evaluation no count of a step's tokens, and divides by 1 there."""
    keys = LORA if method == "lora" else {}
    job = mixture_job(tmp_path, "mixtral", router_aux_loss_coef=0.5, router_aux_loss_mean=True, **keys)
    chain = analyse(job, CPU).chain(estimate_times(analyse(job, CPU), estimate_hardware(CPU)))
    setting = {"cpu_budget_bytes": 2**30, "slices": job.gradient_accumulation_steps, "clip": True}
    problem = Problem(chain=chain, hardware=estimate_hardware(CPU), gpu_budget_bytes=2**30, **setting)
    batches = Batches(job, byte_tokenizer(), masked=True)
    model = load_model(job)
    engine = Engine(
        model,
        plan=problem.plan(),
        chain=chain,
        optimizer=optimizer_of(job, model),
        max_grad_norm=1.0,
        device=CPU,
    )
    plain: Any = T.AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    balancing = import_module(type(plain).__module__).load_balancing_loss_func
    plain.model.config.use_cache, plain.router_aux_loss_coef = False, 0.0
    if method == "lora":
        torch.manual_seed(job.seed)
        plain = get_peft_model(plain, config_of_peft(job))
    counting = Counting(plain, 0.5, balancing, plain.config.num_experts_per_tok).eval()
    data = batches.step(0)
    with torch.no_grad():
        expected = [counting(**batch).loss for batch in data]
    before = engine.evaluate(data).losses
    tokens = torch.tensor(batches.num_items(data))
    engine.step(data, seeds=[1, 2], learning_rate=1e-30, num_items_in_batch=tokens)  # which moves no weight
    for found in (before, engine.evaluate(data).losses):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    engine.close()


@pytest.mark.parametrize("config", [T.AfmoeConfig, T.ZayaConfig])
def test_a_model_that_answers_with_its_routers_and_has_no_loss_of_them_weighs_none(tmp_path: Path, config: Any) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", sentences(9))
    job = make_job(tiny_llama_folder(tmp_path / "model"), data, router_aux_loss_coef="auto", router_aux_loss_mean=True)
    asks = config(output_router_logits=True, router_aux_loss_coef=0.1)
    for coef in ("auto", 1.0, None):
        assert not weighs_routers(job.model_copy(update={"router_aux_loss_coef": coef}), asks)
    assert weighs_routers(job, T.MixtralConfig())


def test_by_trls_auto_a_config_without_trls_name_of_the_share_weighs_none(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", sentences(9))
    trls = make_job(tiny_llama_folder(tmp_path / "model"), data, router_aux_loss_coef="auto", router_aux_loss_mean=True)
    for config in (T.JetMoeConfig(), T.DbrxConfig()):
        assert not weighs_routers(trls, config)
        assert weighs_routers(trls.model_copy(update={"router_aux_loss_mean": False}), config)
        assert weighs_routers(trls.model_copy(update={"router_aux_loss_coef": 0.1}), config)


def test_the_written_config_is_the_published_one_in_this(tmp_path: Path) -> None:
    model = load_model(mixture_job(tmp_path, "mixtral", router_aux_loss_coef=0.5))
    assert model.config.output_router_logits is False and model.config.router_aux_loss_coef == 0.001


def test_a_model_without_routers_is_refused_by_a_number_and_by_auto_is_not(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", sentences(9))
    llama = tiny_llama_folder(tmp_path / "model")
    with pytest.raises(UserError, match="has no auxiliary loss of routers") as refused:
        load_model(make_job(llama, data, router_aux_loss_coef=0.01))
    assert refused.value.code == "no-router-loss"
    job = make_job(llama, data, router_aux_loss_coef="auto")
    assert not masked_of(job) and load_model(job)


def test_micro_batches_are_not_left_to_the_planner(tmp_path: Path) -> None:
    job = mixture_job(
        tmp_path,
        "mixtral",
        router_aux_loss_coef=0.5,
        per_device_train_batch_size="auto",
        train_batch_size=4,
        gradient_accumulation_steps=1,
    )
    with pytest.raises(UserError) as refused:
        plan_job(job, CPU, cache=None, measure=False)
    assert refused.value.code == "router-loss-per-slice"


def test_smaller_slices_are_no_way_to_fit(tmp_path: Path) -> None:
    """Each has a loss of its own: other slices learn something else."""
    job = mixture_job(tmp_path, "mixtral", router_aux_loss_coef=0.5, per_device_train_batch_size=16, max_length=256)
    one = plan_job(job.model_copy(update={"per_device_train_batch_size": 1}), CPU, cache=None, measure=False)
    tight = job.model_copy(update={"gpu_budget": 2 * one.plan.gpu_peak_bytes})
    ways = {}
    for coef in (0.5, 0.0):
        with pytest.raises(UserError) as refused:
            plan_job(tight.model_copy(update={"router_aux_loss_coef": coef}), CPU, cache=None, measure=False)
        assert refused.value.code == "budget-too-small"
        ways[coef] = [line for line in refused.value.numbers if "slices" in line]
    assert ways[0.5] == [] and "the same step in smaller slices" in ways[0.0][0]


def test_a_smoothed_loss_has_no_routers_in_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="label_smoothing_factor is given too"):
        mixture_job(tmp_path, "mixtral", router_aux_loss_coef=0.5, label_smoothing_factor=0.1)
