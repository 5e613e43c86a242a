"""Once a run, two steps are recorded: the page of the plan draws them beside it.

They are steps that follow each other, where the job has such; where it saves or evaluates after each, what comes
between them is left out.
"""

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

_TRIES = 50  # steps that are let go by while none has slices of full length alone, as the plan has
_PAUSES = 2  # recordings that are let go because something came between their steps


class Records(Protocol):
    """What is needed of an engine: see worker.engine.engine.Engine."""

    @property
    def recording(self) -> Recording | None:
        """Where it does."""

    def record(self) -> None:
        """From the next step on."""

    def forget_recording(self) -> None:
        """Record no more."""

    def recorded(self) -> Measured | None:
        """When it is enough."""


@dataclass(slots=True, kw_only=True)
class Timeline:
    """`write` takes what was recorded; `wanted`: it has not been yet."""

    engine: Records
    width: int
    write: Callable[[dict[str, Any]], None]
    wanted: bool = True
    tries: int = 0
    pauses: int = 0

    def before_step(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        """Called before each step, with its batches, once metering, which takes time, is over."""
        if not self.wanted:
            return
        try:
            if (found := self.engine.recorded()) is not None:
                self.wanted = False
                self.write(asdict(found))
                return
        except (OSError, ValueError) as error:  # no picture is worth a run
            self.wanted = False
            log.warning("the plan's page will not show the run: %s", first_line(error))
            return
        full = all(width(batch) == self.width for batch in batches)
        self.tries += not full
        if not full and self.tries < _TRIES:
            self.engine.forget_recording()
            return
        under_way = self.engine.recording
        if under_way is not None and under_way.is_paused and self.pauses < _PAUSES:  # two may come that nothing parts
            self.pauses += 1
        elif under_way is not None:
            return
        self.engine.record()
