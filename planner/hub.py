"""Patience with a hub that cannot be reached: a job that waits for its turn at night outlives a router's restart."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from planner.errors import Exit, UserError, first_line

log = logging.getLogger(__name__)

T = TypeVar("T")
PATIENCE_S = 3600.0
"""For how long a job asks again, beside the half minute in which the hub's own library does."""
WAITED_FOR = "cannot be had from the hub now"
"""What the log says then of what is waited for."""
_FIRST_S, _LONGEST_S = 5.0, 60.0
_NETWORK = {("httpx", "TransportError"), ("httpx2", "TransportError"), ("requests", "RequestException")}
_BUSY = (408, 425, 429, 500, 502, 503, 504)


class _Patience:
    seconds = 0.0


def be_patient() -> None:
    """From now on `patiently` asks again in this process: a job's, with nobody in front of it."""
    _Patience.seconds = PATIENCE_S


def patiently(load: Callable[[], T], what: str, *, sleep: Callable[[float], None] = time.sleep) -> T:
    """What `load` gives. While it ends in errors of the network, and the process is a patient one, it is called again,
    and the log says that `what` is waited for."""
    waited_s, pause_s = 0.0, _FIRST_S
    while True:
        try:
            return load()
        except Exception as error:
            if waited_s >= _Patience.seconds or not unreachable(error):
                raise
            log.warning("%s %s; trying again in %.0f s", what, WAITED_FOR, pause_s)
        sleep(pause_s)
        waited_s, pause_s = waited_s + pause_s, min(2 * pause_s, _LONGEST_S)


def _again() -> str:
    """What to do then: of a job in its turn, or where somebody asks and no job is there yet."""
    return "offmate retry" if _Patience.seconds else "submit again"


def not_reached(what: str, error: BaseException) -> UserError:
    """The error for people when `unreachable(error)`."""
    return UserError(
        f"The Hugging Face hub cannot be reached for {what}.", code="hub-not-reached", numbers=(first_line(error),),
        hint=f"check the network, then {_again()}; or give the path of a folder on this machine",
    )  # fmt: skip


def not_given(what: str, error: BaseException) -> UserError | None:
    """The error for people where the hub does not give `what` ("the dataset a/b"): it cannot be reached, is not to be
    asked, or refuses. None for errors of other kinds."""
    from huggingface_hub import constants

    if unreachable(error):
        return not_reached(what, error)
    kinds = {kind.__name__ for link in _links(error) for kind in type(link).__mro__}
    if "GatedRepoError" in kinds:
        return UserError(
            f"The Hugging Face hub gives {what} only to people who have agreed to its terms.", code="hub-gated",
            exit_code=Exit.USAGE, numbers=(first_line(error),),
            hint="agree on its page at huggingface.co, type: hf auth login (as the daemon's user), then "
            f"{_again()}",
        )  # fmt: skip
    if kinds & {"RepositoryNotFoundError", "RevisionNotFoundError", "DatasetNotFoundError"}:
        return UserError(
            f"The Hugging Face hub does not have {what}, or not for everybody.", code="hub-not-found",
            exit_code=Exit.USAGE, numbers=(first_line(error),),
            hint="check the name (owner/name) and the revision; of a private one type: hf auth login; a folder is a"
            " path, such as ./name",
        )  # fmt: skip
    if constants.HF_HUB_OFFLINE and kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError"}:
        return UserError(
            f"This machine does not have {what}, and HF_HUB_OFFLINE says not to ask the hub.", code="hub-offline",
            exit_code=Exit.USAGE, numbers=(first_line(error),),
            hint="download it first (hf download owner/name, --repo-type dataset for data), or unset HF_HUB_OFFLINE",
        )  # fmt: skip
    return None


def unreachable(error: BaseException) -> bool:
    """Whether an error, or one that led to it, says that the hub did not answer, or was too busy to. Not where the hub
    is not to be asked (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE and any(_is_network(link) for link in _links(error))


def _is_network(error: BaseException) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status in _BUSY
    names = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
    return isinstance(error, ConnectionError | TimeoutError) or not names.isdisjoint(_NETWORK)


def _links(error: BaseException) -> Iterator[BaseException]:
    known: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in known:
        known.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
