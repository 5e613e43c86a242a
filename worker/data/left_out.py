"""Leaves documents out of a job's data: those that are too short, and duplicates of earlier ones."""

from __future__ import annotations

import hashlib
import logging

import numpy as np
from numpy.typing import NDArray

from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.units import counted

log = logging.getLogger(__name__)


class LeftOut:
    """Decides which documents the job leaves out: those shorter than `min_sample_len` tokens, and, with
    `dataset_exact_deduplication`, those whose tokens and learned tokens are the same as an earlier document's. As in
    axolotl, what is cut off at `max_length` is not compared."""

    def __init__(self, job: Job, *, pairs: bool = False) -> None:
        """`pairs`: for an encoder-decoder, where prompt and completion are cut separately."""
        self._least = job.min_sample_len or 0
        # Of preferences, `worker.data.preference_rows` compares whole records.
        self._once = job.dataset_exact_deduplication and job.preference is None
        self._seen_of = None if pairs or job.long_rows != "cut" or job.packing == "wrapped" else job.max_length
        self._seen: set[bytes] = set()
        self._all = self._short = self._again = self._longest = 0

    def leaves_out(self, ids: NDArray[np.int32], learned: NDArray[np.bool_]) -> bool:
        """Whether to leave out the document with the token ids `ids`, of which those flagged in `learned` are learned.
        Call it once for each document, in order, as it remembers documents to find duplicates."""
        self._all += 1
        self._longest = max(self._longest, len(ids))
        if len(ids) < self._least:
            self._short += 1
            return True
        if self._once:
            digest = hashlib.blake2b(ids[: self._seen_of].tobytes(), digest_size=16)
            digest.update(learned[: self._seen_of].tobytes())
            if digest.digest() in self._seen:
                self._again += 1
                return True
            self._seen.add(digest.digest())
        return False

    def check(self) -> None:
        """Raise UserError "nothing-to-train" if every document so far was too short. (Duplicates cannot all be left
        out.)"""
        if self._all and self._short == self._all:
            raise UserError(
                "Every document has fewer tokens than min_sample_len.",
                code="nothing-to-train",
                exit_code=Exit.USAGE,
                numbers=(f"{counted(self._all, 'document')}, the longest of {counted(self._longest, 'token')}",),
                hint=f"min_sample_len: {self._longest} or less takes some of them",
            )

    def say(self) -> None:
        """Log how many documents were left out, and why."""
        if self._least:
            log.info(
                "data: %d of %d documents have fewer than %s and are left out (min_sample_len)",
                self._short,
                self._all,
                counted(self._least, "token"),
            )
        if self._once:
            log.info(
                "data: %d of %d documents came before and are left out (dataset_exact_deduplication)",
                self._again,
                self._all,
            )
