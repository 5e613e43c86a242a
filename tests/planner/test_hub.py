"""Patience with the hub: what is an error of the network, and how long it is waited for."""

from __future__ import annotations

import httpx
import httpx2
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from planner import hub


def raised(error: Exception, *causes: Exception) -> Exception:
    """`error`, led to by the others, each by the one after it."""
    link: BaseException = error
    for cause in causes:
        link.__cause__ = cause
        link = cause
    return error


def answer(status: int) -> httpx2.Response:
    return httpx2.Response(status, request=httpx2.Request("HEAD", "https://huggingface.co/owner/model"))


OUT = raised(  # what transformers raises without a network, as met with transformers 5.23 and huggingface_hub 2.4
    OSError("We couldn't connect to 'https://huggingface.co' to load the files"),
    LocalEntryNotFoundError("An error happened while trying to locate the file"), httpx2.ConnectError("refused"),
)  # fmt: skip
BUSY = raised(OSError("..."), httpx2.HTTPStatusError("busy", request=answer(503).request, response=answer(503)))
GONE = raised(OSError("owner/model is not a local folder"), RepositoryNotFoundError("404", response=answer(404)))


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub._Patience, "seconds", 0.0)


@pytest.mark.parametrize("error", [OUT, BUSY, ConnectionError("Couldn't reach 'owner/set' on the Hub"),
                                   TimeoutError(), httpx.ReadTimeout("slow")])  # fmt: skip
def test_errors_of_the_network_are_told_from_others(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.unreachable(error)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not hub.unreachable(error), "nobody is to ask the hub"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OUT, "hub-not-reached"), (GONE, "hub-not-found"),
        (raised(OSError("You are trying to access a gated repo."), GatedRepoError("403", response=answer(403))),
         "hub-gated"),
        (raised(OSError("v9 is not a valid git identifier"), RevisionNotFoundError("404", response=answer(404))),
         "hub-not-found"),
        (ValueError("no config"), None), (FileNotFoundError("no file"), None),
    ],
)  # fmt: skip
def test_what_the_hub_does_not_give_says_what_to_do(error: Exception, code: str | None) -> None:
    found = hub.not_given("the dataset a/b", error)
    assert (found and found.code) == code
    if found is not None:
        assert "the dataset a/b" in found.what and found.hint and found.numbers == (str(error),)
    if code in ("hub-not-reached", "hub-gated"):
        assert found is not None and "then submit again" in str(found.hint), "there is no job yet"
        hub.be_patient()
        job = hub.not_given("the dataset a/b", error)
        assert job is not None and "then offmate retry" in str(job.hint)


@pytest.mark.parametrize("error", [GONE, ValueError("no config"), FileNotFoundError("no file"), OSError("disk")])
def test_what_is_wrong_whatever_the_network_does_is_not_waited_for(error: Exception) -> None:
    hub.be_patient()
    assert not hub.unreachable(error)

    def load() -> None:
        calls.append(1)
        raise error

    calls: list[int] = []
    with pytest.raises(type(error)):
        hub.patiently(load, "it", sleep=lambda _: None)
    assert calls == [1]


def test_a_job_asks_again_for_an_hour_and_then_says_what_it_was(caplog: pytest.LogCaptureFixture) -> None:
    pauses: list[float] = []

    def load() -> None:
        raise OUT

    with pytest.raises(OSError, match="We couldn't connect"):
        hub.patiently(load, "the config of owner/model", sleep=pauses.append)
    assert pauses == [], "somebody is in front of it"
    hub.be_patient()
    with pytest.raises(OSError, match="We couldn't connect"):
        hub.patiently(load, "the config of owner/model", sleep=pauses.append)
    assert pauses[:5] == [5, 10, 20, 40, 60] and hub.PATIENCE_S <= sum(pauses) <= hub.PATIENCE_S + 60
    assert caplog.messages[0] == "the config of owner/model cannot be had from the hub now; trying again in 5 s"


def test_what_comes_back_is_taken() -> None:
    hub.be_patient()
    answers = [OUT, BUSY]

    def load() -> str:
        if answers:
            raise answers.pop()
        return "the config"

    assert hub.patiently(load, "it", sleep=lambda _: None) == "the config"
