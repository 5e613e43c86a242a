"""Records, once in a run, when the operations of two steps run; the plan's page draws this beside the plan.

The two steps follow each other directly where the job has such steps. Where it saves or evaluates after each step, the
time between the two is left out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import Tensor

from planner.errors import first_line
from planner.schedule.measured import Measured
from worker.data.padding import width
from worker.runtime.recording import Recording

log = logging.getLogger(__name__)

_TRIES = 50  # how many steps to wait for one that has only slices of full length, as the plan has
_PAUSES = 2  # how many recordings to give up because something came between their steps


class Records(Protocol):
    """The methods of an engine that a timeline calls: see worker.engine.engine.Engine."""

    @property
    def recording(self) -> Recording | None:
        """The recording, under way, of when operations run; None without one."""

    def record(self) -> None:
        """Start recording when operations run, with the next step."""

    def forget_recording(self) -> None:
        """Drop the recording that is under way."""

    def recorded(self) -> Measured | None:
        """The times at which the operations of two steps ran; None while the recording is not complete."""


@dataclass(slots=True, kw_only=True)
class Timeline:
    """Decides when an engine records the times of a step's operations. `write`: takes the finished recording. `wanted`:
    the run has no recording yet."""

    engine: Records
    width: int
    write: Callable[[dict[str, Any]], None]
    wanted: bool = True
    tries: int = 0
    pauses: int = 0

    def before_step(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        """Start or finish a recording, before the step on `batches`. Called once device bytes are no longer counted, as
        counting takes time."""
        if not self.wanted:
            return
        try:
            if (recorded := self.engine.recorded()) is not None:
                self.wanted = False
                self.write(asdict(recorded))
                return
        except (OSError, ValueError) as error:  # a missing picture must not end the run
            self.wanted = False
            log.warning("the plan's page will not show the run: %s", first_line(error))
            return
        full = all(width(batch) == self.width for batch in batches)
        self.tries += not full
        if not full and self.tries < _TRIES:
            self.engine.forget_recording()
            return
        under_way = self.engine.recording
        if under_way is not None and under_way.is_paused and self.pauses < _PAUSES:  # later steps may have no pause
            self.pauses += 1
        elif under_way is not None:
            return
        self.engine.record()
