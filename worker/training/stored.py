"""Decides which parts of a run are on disk (optimizer states, activations, weights), and opens the stores that keep
them."""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import nn

from planner.job.schema import Job
from planner.measure.drive import expected_shares
from planner.run.folder import RunFolder
from planner.run.processes import Process
from planner.schedule.activation_turns import stored_activations
from planner.schedule.chain import Chain
from planner.schedule.items import GRADIENT, WEIGHT, Item
from planner.schedule.memory_use import activation_slot_bytes
from planner.schedule.plan import Plan
from planner.schedule.state_pieces import StoredTensor, stored_bytes, whole_pages
from worker.storage.activations import ActivationsOnDisk
from worker.storage.checkpoint import Checkpoint
from worker.storage.states import StatesOnDisk
from worker.storage.states_record import all_pieces

log = logging.getLogger(__name__)

_OURS = "offmate-"  # as `RunFolder.states_on` has it
_PASSING = "passing-"


def stored_tensors(plan: Plan, chain: Chain, model: nn.Module) -> tuple[StoredTensor, ...]:
    """The tensors whose optimizer states the plan keeps on disk: those for which this is possible and which the CPU
    updates."""
    names = {t.name for t in chain.tensors() if t.states_on_disk} & plan.cpu_updated()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return tuple(
        StoredTensor(name=t.name, shape=shapes[t.name], widths=chain.state_pieces(t)[0].widths)
        for t in chain.tensors()
        if t.name in names
    )


def open_store(
    job: Job, plan: Plan, chain: Chain, model: nn.Module, *, run: RunFolder, last: Checkpoint | None
) -> StatesOnDisk | None:
    """Open the store on disk of the optimizer states of `run`, with the states that its newest checkpoint `last` names;
    None where the plan keeps no states on disk. Raises UserError."""
    tensors = stored_tensors(plan, chain, model)
    if not tensors:
        return None
    clear_passing(job)
    need = stored_bytes(all_pieces(tensors, chain.piece_elements), job.state_homes)
    return StatesOnDisk(
        [run.states_on(disk) for disk in job.disk_paths or ()],
        tensors,
        piece_elements=chain.piece_elements,
        homes=job.state_homes,
        record=None if last is None else last.states,
        shares=lambda: _by_rate(job, need),
    )


def parts_of_drives(job: Job, plan: Plan, chain: Chain, model: nn.Module, last: Checkpoint | None) -> Sequence[float]:
    """For each drive that the job names, its relative share of the optimizer states on disk, now or once they are
    written."""
    folders = [Path(disk) for disk in job.disk_paths or ()]
    if last is not None and last.states is not None and len(last.states.files) == len(folders):
        known = last.states.shares
        return known if len(known) == len(folders) else [1] * len(folders)
    tensors = stored_tensors(plan, chain, model)
    return expected_shares(folders, stored_bytes(all_pieces(tensors, chain.piece_elements), job.state_homes))


def _by_rate(job: Job, need_bytes: int) -> list[int]:
    """The relative share that each of the job's drives gets, by its rate; equal ones where rates cannot be measured."""
    folders = [Path(disk) for disk in job.disk_paths or ()]
    shares = expected_shares(folders, need_bytes)
    if len(shares) > 1:
        parts = ", ".join(f"{size / sum(shares):.0%} {folder}" for size, folder in zip(shares, folders, strict=True))
        log.info("disk: optimizer states by the drives' rates: %s", parts)
    return shares


def passing_sizes(plan: Plan, chain: Chain) -> dict[Item, int]:
    """Item -> the most bytes that it takes on disk during a step. Items are the activations that the plan writes to
    disk, and the working copies and gradients of tensors that are wholly on disk."""
    options = [block.option(name) for block, name in zip(chain.blocks, plan.options, strict=True)]
    sizes = {item: activation_slot_bytes(options[item.turn[0]]) for item in stored_activations(plan, chain)}
    tensors = [t for t in chain.tensors() if t.wholly_on_disk and t.name in plan.cpu_updated()]
    return sizes | {Item.of(kind, t.name): whole_pages(t.bytes) for t in tensors for kind in (WEIGHT, GRADIENT)}


@contextlib.contextmanager
def open_scratch(
    job: Job, plan: Plan, chain: Chain, run: RunFolder | None = None
) -> Iterator[ActivationsOnDisk | None]:
    """A context with the store on disk of a run's activations and of its weights that are wholly on disk; None where
    the plan has neither. Without `run` its folders are temporary ones of this process. Raises UserError."""
    sizes = passing_sizes(plan, chain)
    if not sizes:
        yield None
        return
    clear_passing(job)
    name = f"{_OURS}{passing_token()}"
    folders = [Path(disk) / name if run is None else run.states_on(disk) for disk in job.disk_paths or ()]
    scratch = ActivationsOnDisk(folders, sizes, shares=lambda: _by_rate(job, sum(sizes.values())))
    try:
        yield scratch
    finally:
        scratch.close()


@contextlib.contextmanager
def passing_store(job: Job, plan: Plan, chain: Chain, model: nn.Module) -> Iterator[StatesOnDisk | None]:
    """A context with a temporary store of optimizer states, in folders of its own under the job's `disk_paths`; None
    where the plan keeps no states on disk. Raises UserError."""
    tensors = stored_tensors(plan, chain, model)
    if not tensors:
        yield None
        return
    clear_passing(job)
    name = passing_token()
    folders = [Path(disk) / f"{_OURS}{name}" for disk in job.disk_paths or ()]
    need = stored_bytes(all_pieces(tensors, chain.piece_elements), 1)
    states = StatesOnDisk(
        folders, tensors, piece_elements=chain.piece_elements, homes=1, shares=lambda: _by_rate(job, need)
    )
    try:
        yield states
    finally:
        states.delete()


def passing_token() -> str:
    """A name for temporary folders of this process. It contains the process's identity, so that `clear_passing` can
    find the folders of a process that was killed."""
    return f"{_PASSING}{str(Process.current()).replace(':', '_')}-{secrets.token_hex(8)}"


def clear_passing(job: Job) -> None:
    """Remove from the job's `disk_paths` the temporary folders of processes that were killed before they could do
    so."""
    for disk in job.disk_paths or ():
        for folder in Path(disk).glob(f"{_OURS}{_PASSING}*"):
            try:
                owner = Process.parse(
                    folder.name.removeprefix(f"{_OURS}{_PASSING}").rpartition("-")[0].replace("_", ":")
                )
            except ValueError:  # not named by us
                continue
            if not owner.alive():
                shutil.rmtree(folder, ignore_errors=True)


def forget_stores(job: Job, run: RunFolder) -> None:
    """Remove from the job's `disk_paths` the folders of `run`, which is over."""
    for disk in job.disk_paths or ():
        shutil.rmtree(run.states_on(disk), ignore_errors=True)
