"""Traces a job's model for questions about any machine: no weights are loaded and nothing is measured."""

from __future__ import annotations

import torch

from planner.job.schema import Job
from planner.machine.hardware import Hardware
from planner.measure.analysis import Analysis, analyse, estimate_times
from planner.measure.times import works_of
from planner.models.files_of_weights import why_not_in_files
from planner.models.hf_model import beyond_positions, masked_of, model_config
from planner.models.written import said_of_dtype
from planner.schedule.timeless import without_times
from planner.search.problem import Problem
from planner.whatif.traced import Traced

DEVICE = torch.device("cpu")
"""Where models are traced for questions about other machines."""


def traced(job: Job, hardware: Hardware, device: torch.device = DEVICE, *, runs: bool = False) -> Traced:
    """What a trace of the job's model on `device` finds. The job must give the split of its step into micro-batches.
    The result holds for all machines that are GPUs, as `hardware` is or is not. `runs`: the job is to run, and is not
    only asked about. Raises UserError for a model that cannot be used."""
    return as_traced(analyse(job, device, for_gpu=device.type == "cpu" and hardware.is_gpu), job, hardware, runs=runs)


def as_traced(analysis: Analysis, job: Job, hardware: Hardware, *, runs: bool) -> Traced:
    """What an analysis of the job's model has found. `hardware` and `runs`: as in `traced`."""
    notes = (beyond_positions(job), said_of_dtype(job))
    return Traced(
        chain=without_times(analysis.chain(estimate_times(analysis, hardware))),
        work=works_of(analysis.pairs, analysis.names.kinds[-1]),
        not_in_files=why_not_in_files(job, analysis.model, runs=runs),
        by_slice=masked_of(job) or job.averages_slices,
        has_experts=_has_experts(job),
        notes=tuple(note for note in notes if note is not None),
    )


def _has_experts(job: Job) -> bool:
    """Whether the job's model is a mixture of experts by its config."""
    config = model_config(job).get_text_config()
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def problem_of(job: Job, hardware: Hardware, device: torch.device = DEVICE, *, runs: bool = False) -> Problem:
    """The problem of planning a job, whose split into micro-batches is given, on `hardware`; what is on disk is
    decided. The model's blocks are traced on `device`. `runs`: the job is to run, and is not only asked about. Raises
    UserError."""
    return traced(job, hardware, device, runs=runs).decided(job, hardware)
