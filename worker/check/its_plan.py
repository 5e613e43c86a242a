"""Finds the plan that a job trains under, or would get when its turn comes, together with its data, for `offmate
certify` and `offmate verify-resume`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from planner.cache.store import Cache
from planner.commands.plan_job import plan_job
from planner.job.base import check_base
from planner.job.schema import Job
from planner.machine.hardware import Hardware
from planner.measure.repeatable import kernels_in_force
from planner.models.hf_model import masked_of, pairs_of
from planner.models.rope import rope_border
from planner.models.tokenizer import load_tokenizer
from planner.run.folder import RunFolder
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan
from worker.data.batches import Batches
from worker.training.run import read_plan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ItsPlan:
    """A job whose micro-batches are decided, its plan, the chain (model) and hardware that the plan is for, and its
    data. `decided`: the job already had this plan; else the plan was made now. `other_kernels`: the job has a plan of
    its own, but for kernels that need other memory than those of this process. `document`: the content of plan.json."""

    job: Job
    plan: Plan
    chain: Chain
    hardware: Hardware
    batches: Batches
    decided: bool
    other_kernels: bool = False
    document: dict[str, Any]


def its_plan(
    job: Job, run: RunFolder | None, device: torch.device, folder: Path, database: str | None, *, anew: bool = False
) -> ItsPlan:
    """Find or make the plan of a job. `run`: its run folder where it is submitted. A final plan there is taken as it
    is, because a new one would be for the memory that is free now. A plan is made where there is none, with `anew`, or
    where the job's plan is for other GPU kernels than this process uses. It is made as at the job's turn: with
    measurements, under the kernels of this process, and after the data were counted. `folder`: for the data.
    `database`: the URL of kept plans. Raises UserError, among them `base-changed` as a start of the job does."""
    cache = Cache(database) if database else None  # first: a mistake in its address is told before data are read
    if run is not None:
        hint = "give the job's file to ask about the model that is there now"
        check_base(job, run.read_base(), run.path.parent, hint=hint)
    tokenizer, frozen = load_tokenizer(job), run.read_frozen() if run else None

    def data_of(split: Job) -> Batches:
        return Batches(
            split, tokenizer, folder, frozen, pairs=pairs_of(split), masked=masked_of(split), border=rope_border(split)
        )

    document = run.read_plan() if run and not anew else None
    final = document if document is not None and document["measured"] else None
    kernels = kernels_in_force(device)
    other_kernels = final is not None and device.type == "cuda" and final.get("kernels", "") != kernels
    if other_kernels:
        log.info("the job's plan is for other kernels, which need other memory: one is made for %s ones", kernels)
    if run is not None and final is not None and not other_kernels:
        plan, chain, hardware = read_plan(run)
        return ItsPlan(
            job=job, plan=plan, chain=chain, hardware=hardware, batches=data_of(job), decided=True, document=final
        )
    whole = job if job.is_split or job.train_batch_size is None else job.with_slices(job.train_batch_size)
    batches = data_of(whole)
    log.info("planning with measurements of the blocks")
    answer = plan_job(job, device, cache=cache, measure=True, counted=batches.counted())
    job = job if job.is_split else job.with_slices(answer.rows)
    if job != whole:
        batches = data_of(job)
    return ItsPlan(
        job=job,
        plan=answer.plan,
        chain=answer.chain,
        hardware=answer.hardware,
        batches=batches,
        decided=False,
        other_kernels=other_kernels,
        document=answer.to_json(),
    )
