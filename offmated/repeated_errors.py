"""Logs an error that occurs again and again only when it changes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from planner.errors import is_out_of_memory

log = logging.getLogger(__name__)


class RepeatedErrors:
    """Logs an error of repeated work only when it differs from the last one, so that work that is tried twice a second
    does not fill the log."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    @contextmanager
    def of(self, work: str, *kinds: type[Exception]) -> Iterator[None]:
        """A context that catches errors of these `kinds` and logs each that differs from the last. `work` names, for
        the log, the work inside, which is tried again later."""
        try:
            yield
        except kinds as error:
            text = f"{type(error).__name__}: {error}"
            if self._known.get(work) != text:
                self._known[work] = text
                if is_out_of_memory(error):  # the traceback would say nothing more
                    log.error("%s did not work, and is tried again: no memory (%s)", work, text)
                else:
                    log.exception("%s did not work, and is tried again", work)
        else:
            if self._known.pop(work, None) is not None:
                log.info("%s works again", work)
