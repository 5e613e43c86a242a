"""Jobs that train adapters of a tiny model: under a plan, and in plain peft."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from planner.codec import to_json
from planner.job.schema import Job
from planner.measure.analysis import analyse, estimate_times
from planner.measure.machine_rates import estimate_hardware
from planner.run.folder import RunFolder
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan
from planner.search.problem import Problem
from tests.support.texts import byte_tokenizer, make_job, sentences, tiny_llama_folder, write_jsonl
from tests.support.tiny_models import config_of
from worker.data.batches import Batches
from worker.data.seeds import micro_batch_seed
from worker.engine.engine import Engine
from worker.training.learning_rate import decay_names, optimizer_of
from worker.training.model import load_model
from worker.training.run import run_job
from worker.training.stop import StopRequest

CPU = torch.device("cpu")


def model_folder(folder: Path, name: str) -> Path:
    """A model with weights and a tokenizer of bytes; wide enough that its weights travel."""
    tiny_llama_folder(folder)
    config = config_of(name, width=128, layers=3, vocabulary=260)
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def lora_job(tmp_path: Path, name: str = "llama", **keys: object) -> Job:
    small = {
        "max_length": 16,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.1,
        "method": "lora",
        "lora_r": 4,
        "lora_dropout": 0.1,
    }
    data = write_jsonl(tmp_path / "data.jsonl", sentences(9))
    return make_job(model_folder(tmp_path / "model", name), data, **{**small, **keys})


_PLANS: dict[str, tuple[Plan, Chain]] = {}


def plan_of(job: Job) -> tuple[Plan, Chain]:
    """A plan near the least budget, where whatever may travel does. Jobs share it that differ in no more than where
    their files are, how many steps they have, and when they save or change projectors: a trace takes long."""
    others = {"model": "", "tokenizer": "", "dataset": (), "output_dir": None}
    others |= dict.fromkeys(("max_steps", "save_steps", "save_total_limit", "lsp_check_steps", "lsp_threshold"))
    files = Path(job.model) / "config.json", *(Path(entry.path) for entry in job.data)
    key = "\n".join([job.model_copy(update=others).resolved_yaml(), *(file.read_text("utf-8") for file in files)])
    if key not in _PLANS:
        _PLANS[key] = _new_plan_of(job)
    return _PLANS[key]


def _new_plan_of(job: Job) -> tuple[Plan, Chain]:
    analysis = analyse(job, CPU)
    hardware = replace(estimate_hardware(CPU), min_transfer_bytes=0)
    chain = analysis.chain(estimate_times(analysis, hardware))
    setting = {"cpu_budget_bytes": 2**30, "slices": job.gradient_accumulation_steps, "clip": bool(job.max_grad_norm)}
    budget = int(1.05 * Problem(chain=chain, hardware=hardware, gpu_budget_bytes=0, **setting).least().gpu_bytes)
    return Problem(chain=chain, hardware=hardware, gpu_budget_bytes=budget, **setting).plan(), chain


def finished_run(job: Job, path: Path) -> RunFolder:
    """A run of the job in a new folder, to its end."""
    plan, chain = plan_of(job)
    folder = RunFolder(path)
    folder.path.mkdir()
    folder.resolved.write_text(job.resolved_yaml())
    document = {"plan": plan, "chain": chain, "hardware": estimate_hardware(CPU)}
    folder.write_plan({key: to_json(value) for key, value in document.items()})
    assert run_job(folder, StopRequest())
    return folder


def engine_of(job: Job, plan: Plan, chain: Chain) -> tuple[Engine, nn.Module]:
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
    return engine, model


def steps_of(job: Job, count: int) -> Iterator[tuple[list[dict[str, Tensor]], list[int], Tensor]]:
    batches = Batches(job, byte_tokenizer())
    for number in range(count):
        step = batches.step(number)
        seeds = [micro_batch_seed(job.seed, number, k) for k in range(len(step))]
        yield step, seeds, torch.tensor(batches.num_items(step))


def config_of_peft(job: Job) -> LoraConfig:
    """The job's adapters as one would ask peft for them."""

    def plain(value: object) -> object:
        return list(value) if isinstance(value, tuple) else value

    def targets(value: object) -> object:
        if isinstance(value, tuple) and "all-linear" in value:  # as axolotl adds to those named, of a Llama
            linear = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
            return [*linear, *(name for name in value if name != "all-linear")]
        return None if value == "peft-default" else plain(value)

    return LoraConfig(
        r=job.lora_r,
        lora_alpha=job.lora_alpha,
        lora_dropout=job.lora_dropout,
        task_type="CAUSAL_LM",
        target_modules=targets(job.lora_target_modules),
        target_parameters=plain(job.lora_target_parameters),
        exclude_modules=plain(job.exclude_modules),
        layers_to_transform=plain(job.layers_to_transform),
        layers_pattern=plain(job.layers_pattern),
        rank_pattern=job.rank_pattern or {},
        alpha_pattern=job.alpha_pattern or {},
        init_lora_weights=job.init_lora_weights,
        use_rslora=job.use_rslora,
        use_dora=job.use_dora,
        modules_to_save=plain(job.lora_modules_to_save),
    )


def plain_peft(job: Job, count: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What one would write with peft: losses and the trained parameters."""
    base = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16 if job.bf16 else torch.float32)
    torch.manual_seed(job.seed)
    model = get_peft_model(base, config_of_peft(job)).train()
    named = {name for name, p in model.named_parameters() if p.requires_grad}
    assert job.loraplus_lr_ratio or decay_names(model) == named
    return plain_steps(model, job, count)


def plain_steps(model: nn.Module, job: Job, count: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Steps of the job as one would write them: losses and the trained parameters."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    settings = {"lr": job.learning_rate, "weight_decay": job.weight_decay}
    if job.loraplus_lr_ratio:
        del settings["weight_decay"]
        settings |= {"loraplus_lr_ratio": job.loraplus_lr_ratio, "loraplus_lr_embedding": job.loraplus_lr_embedding}
        plus = create_loraplus_optimizer(
            model, torch.optim.AdamW, **settings, loraplus_weight_decay=job.weight_decay, fused=True
        )
        return steps_with([plus], model, job, count)
    matrices = [name for name in trained if job.optim == "muon" and "embed" not in name and "lm_head" not in name]
    others = [p for name, p in trained.items() if name not in matrices]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, **settings, fused=True)] if others else []
    if matrices:
        own = [trained[name] for name in matrices]
        optimizers.append(torch.optim.Muon(own, **settings, adjust_lr_fn=job.muon_adjust_lr_fn))
    return steps_with(optimizers, model, job, count)


def steps_with(
    optimizers: list[torch.optim.Optimizer], model: nn.Module, job: Job, count: int
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Likewise under these optimizers."""
    losses = []
    for batches, seeds, items in steps_of(job, count):
        for batch, seed in zip(batches, seeds, strict=True):
            torch.manual_seed(seed)
            loss = model(**batch, num_items_in_batch=items).loss
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
