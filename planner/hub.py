"""Finds out why the Hugging Face hub does not give something: it cannot be reached, which passes by itself, or it
refuses."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from planner.errors import Exit, UserError, first_line

NOT_REACHED = "hub-not-reached"
"""Error code: the Hugging Face hub cannot be reached. A job that ends with this code tries again later."""
OFFLINE = "hub-offline"
"""Error code: something is not on this machine, and the Hugging Face hub is not to be asked (HF_HUB_OFFLINE)."""
ANSWER_S = 10.0
"""Seconds that the Hugging Face hub has to answer a short request."""
Kind = Literal["model", "dataset"]
_NETWORK = {("httpx", "TransportError"), ("httpx2", "TransportError"), ("requests", "RequestException")}
_NEVER = {(module, name) for module in ("httpx", "httpx2") for name in ("UnsupportedProtocol", "LocalProtocolError")}
"""Transport errors that another try does not mend: an address without http://, an invalid header."""
_BUSY = (408, 425, 429, 500, 502, 503, 504)


class _Speaker:
    is_a_job = False


def speak_for_a_job() -> None:
    """Let this process's errors have hints for a job that nobody is watching, from now on. huggingface_hub retries for
    half a minute: what it logs about that stays out of the job's log, and its other log records appear once."""
    _Speaker.is_a_job = True
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own


def is_downloaded(name: str, kind: Kind = "model") -> bool:
    """Whether this machine has files of a Hugging Face hub repository, of any revision, or `datasets` has
    prepared it."""
    from huggingface_hub import constants

    if Path(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}", "snapshots").is_dir():
        return True
    prepared = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets")
    return kind == "dataset" and Path(prepared, name.replace("/", "___")).is_dir()


def check_reached(source: str, name: str, kind: Kind = "model") -> None:
    """Raise the UserError `hub-not-reached` if this machine has nothing of a hub repository and the hub does not answer
    at all. This is quick, while huggingface_hub would retry for half a minute. `source`: the repository in words."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or is_downloaded(name, kind):
        return
    try:
        _ask(constants.ENDPOINT)
    except Exception as error:  # an HTTP client may raise anything; loading meets other errors again
        if unreachable(error):
            raise not_reached(source, error) from error


def why_not_reached() -> UserError | None:
    """The UserError if the Hugging Face hub does not answer; None if it does, or is not to be asked. Asks only once per
    process."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        _ask(constants.ENDPOINT)
    except Exception as error:  # as above
        if unreachable(error):
            return not_reached("what the job names", error)
    return None


def ask_no_more() -> None:
    """Let this process use only files of the Hugging Face hub that are on this machine, from now on, without waiting.
    Used when the hub does not answer, because huggingface_hub would retry for half a minute for each file. Call this
    before transformers and datasets are imported."""
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True


@cache  # one answer is enough for this process: if the network fails later, the next request shows it
def _ask(endpoint: str) -> None:
    from huggingface_hub import get_session

    get_session().head(endpoint, timeout=ANSWER_S)


def not_reached(source: str, error: BaseException) -> UserError:
    """The UserError that the Hugging Face hub cannot be reached for `source`, if `unreachable(error)`."""
    advice = "it is asked again by itself" if _Speaker.is_a_job else "check the network, then submit again"
    return UserError(
        f"The Hugging Face hub cannot be reached for {source}.",
        code=NOT_REACHED,
        numbers=(first_line(error),),
        hint=f"{advice}; for a folder on this machine, give its path, such as ./name",
    )


def not_given(source: str, error: BaseException) -> UserError | None:
    """The UserError if `error` says that the Hugging Face hub does not give `source` ("the dataset a/b"): the hub
    cannot be reached, is not to be asked, or refuses. None for other errors."""
    from huggingface_hub import constants

    if unreachable(error):
        return not_reached(source, error)
    kinds = {kind.__name__ for link in _links(error) for kind in type(link).__mro__}
    if "GatedRepoError" in kinds:
        return UserError(
            f"The Hugging Face hub gives {source} only to people who have agreed to its terms.",
            code="hub-gated",
            exit_code=Exit.USAGE,
            numbers=(first_line(error),),
            hint="agree on its page at huggingface.co, type: hf auth login (as the daemon's user), then "
            f"{'offmate retry' if _Speaker.is_a_job else 'submit again'}",
        )
    if kinds & {"RepositoryNotFoundError", "RevisionNotFoundError", "DatasetNotFoundError"}:
        return UserError(
            f"The Hugging Face hub does not have {source}, or it is private.",
            code="hub-not-found",
            exit_code=Exit.USAGE,
            numbers=(first_line(error),),
            hint="check the name (owner/name) and the revision; if it is private, type: hf auth login; for a folder on"
            " this machine, give its path, such as ./name",
        )
    if constants.HF_HUB_OFFLINE and kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError"}:
        return UserError(
            f"This machine does not have {source}, and HF_HUB_OFFLINE says not to ask the hub.",
            code=OFFLINE,
            exit_code=Exit.USAGE,
            numbers=(first_line(error),),
            hint="download it first (hf download owner/name, --repo-type dataset for data), or unset HF_HUB_OFFLINE",
        )
    return None


def unreachable(error: BaseException) -> bool:
    """Whether `error`, or an error that caused it, says that the Hugging Face hub did not answer or was too busy.
    Always False if the hub is not to be asked (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE and any(_is_network(link) for link in _links(error))


def _is_network(error: BaseException) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status in _BUSY
    names = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
    return isinstance(error, ConnectionError | TimeoutError) or (
        names.isdisjoint(_NEVER) and not names.isdisjoint(_NETWORK)
    )


def _links(error: BaseException) -> Iterator[BaseException]:
    known: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in known:
        known.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
