"""Cuts documents that are too long as LLaMA-Factory does (`long_rows: share`): message by message, prompt and answer
share the room that is left, so that an answer is kept even after a long prompt."""

from __future__ import annotations

import logging
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.importers.llama_factory_templates import slot_template
from planner.job.schema import Job
from planner.units import counted

log = logging.getLogger(__name__)


class Sharing:
    """Cuts documents longer than `max_length` for a job whose `long_rows` is `share`: in each turn, prompt and answer
    are both shortened, in proportion. Documents of other jobs stay as they are."""

    def __init__(self, job: Job, *, pairs: bool = False) -> None:
        """`pairs`: for an encoder-decoder, where prompt and completion are cut elsewhere, each by itself."""
        self._shares = job.long_rows == "share" and job.packing != "wrapped" and not pairs
        self._most = job.max_length
        slots = slot_template(job.chat_template)
        self._ends = int(slots is not None and slots.ends_once)  # tokens at the end (0 or 1) that are always kept
        self._all = self._cut = self._lost = 0

    def cut(self, ids: NDArray[np.int32], learned: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Cut a document to the job's length. Returns the token ids that are kept and their learned flags, the
        beginnings of its prompts and answers. A prompt is a run of tokens that are not learned; its answer is the
        learned tokens after it."""
        self._all += 1
        if not self._shares or len(ids) <= self._most:
            return ids, learned
        past, room = len(ids) - self._ends, self._most - self._ends
        is_kept = np.arange(len(ids)) >= past
        borders = np.flatnonzero(learned[: past - 1] & ~learned[1:past]) + 1
        for start, end in pairwise([0, *borders.tolist(), past]):
            answer = int(learned[start:end].sum())
            middle = end - answer
            prompt, answer = shares(middle - start, answer, room)
            is_kept[start : start + prompt] = is_kept[middle : middle + answer] = True
            room -= prompt + answer
        self._cut += 1
        self._lost += len(ids) - int(is_kept.sum())
        return ids[is_kept], learned[is_kept]

    def say(self) -> None:
        """Log how many documents were cut."""
        if self._cut:
            log.warning(
                "data: %d of %d documents are longer than max_length %d and cut, prompts and answers (long_rows: "
                "share); %s not seen",
                self._cut,
                self._all,
                self._most,
                counted(self._lost, "token"),
            )


def shares(prompt: int, answer: int, room: int) -> tuple[int, int]:
    """(number of tokens kept of a prompt, number kept of its answer), which together are at most `room`. The arguments
    are numbers of tokens. A side that takes less than half of the room stays whole; else the two share it in
    proportion. This is LLaMA-Factory's `infer_seqlen`."""
    if 2 * answer < room:
        most = room
    elif 2 * prompt < room:
        most = room - prompt
    else:
        most = int(room * (answer / (prompt + answer))) if prompt + answer else 0
    answer = min(most, answer)
    return min(max(room - answer, 0), prompt), answer
