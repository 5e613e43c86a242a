"""What the hub does not give: what is an error of the network, which passes by itself, and what people are told."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from planner import hub
from planner.errors import UserError
from tests import ROOT

httpx2 = pytest.importorskip("httpx2")


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
    LocalEntryNotFoundError("An error happened while trying to locate the file"),
    httpx2.ConnectError("refused"),
)
BUSY = raised(OSError("..."), httpx2.HTTPStatusError("busy", request=answer(503).request, response=answer(503)))
GONE = raised(OSError("owner/model is not a local folder"), RepositoryNotFoundError("404", response=answer(404)))


@pytest.mark.parametrize(
    "error",
    [OUT, BUSY, ConnectionError("Couldn't reach 'owner/set' on the Hub"), TimeoutError(), httpx.ReadTimeout("slow")],
)
def test_errors_of_the_network_are_told_from_others(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.unreachable(error)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert not hub.unreachable(error), "nobody is to ask the hub"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OUT, "hub-not-reached"),
        (GONE, "hub-not-found"),
        (
            raised(OSError("You are trying to access a gated repo."), GatedRepoError("403", response=answer(403))),
            "hub-gated",
        ),
        (
            raised(OSError("v9 is not a valid git identifier"), RevisionNotFoundError("404", response=answer(404))),
            "hub-not-found",
        ),
        (ValueError("no config"), None),
        (FileNotFoundError("no file"), None),
    ],
)
def test_what_the_hub_does_not_give_says_what_to_do(error: Exception, code: str | None) -> None:
    found = hub.not_given("the dataset a/b", error)
    assert (found and found.code) == code
    if found is not None:
        assert "the dataset a/b" in found.what and found.hint and found.numbers == (str(error),)
    if code in ("hub-not-reached", "hub-gated"):
        assert found is not None and "then submit again" in str(found.hint), "there is no job yet"
        hub.speak_for_a_job()
        job = hub.not_given("the dataset a/b", error)
        by_itself = code == "hub-not-reached"
        assert job is not None and ("asked again by itself" if by_itself else "then offmate retry") in str(job.hint)


@pytest.mark.parametrize(
    "error",
    [
        GONE,
        ValueError("no config"),
        FileNotFoundError("no file"),
        OSError("disk"),
        httpx2.UnsupportedProtocol("the address is missing an http:// or https://"),
        httpx.LocalProtocolError("a header"),
    ],
)
def test_what_is_wrong_whatever_the_network_does_does_not_pass_by_itself(error: Exception) -> None:
    assert not hub.unreachable(error)


def test_a_download_of_a_model_is_known_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--owner--model" / "snapshots").mkdir(parents=True)
    assert (hub.is_downloaded("owner/model"), hub.is_downloaded("owner/other")) == (True, False)
    assert not hub.is_downloaded("owner/model", "dataset")


def test_a_hub_that_nobody_answers_for_is_known_at_once_but_not_asked_for_what_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:  # whose port nobody listens on, once it is closed
        monkeypatch.setattr(constants, "ENDPOINT", "http://{}:{}".format(*server.getsockname()))
    with pytest.raises(UserError, match="cannot be reached for the dataset a/b") as told:
        hub.check_reached("the dataset a/b", "a/b", "dataset")
    assert told.value.code == hub.NOT_REACHED
    for there in ("datasets--a--b/snapshots", "prepared/c___d"):
        (tmp_path / there).mkdir(parents=True)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "prepared"))
    hub.check_reached("the dataset a/b", "a/b", "dataset")
    hub.check_reached("the dataset c/d", "c/d", "dataset")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.check_reached("the model a/b", "a/b")


def test_a_hub_that_answers_anything_is_left_to_say_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:  # which answers 501
        threading.Thread(target=server.serve_forever).start()
        try:
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
            hub.check_reached("the model a/b", "a/b")
        finally:
            server.shutdown()


def test_the_tries_of_the_hubs_library_stay_out_of_a_jobs_log_and_the_rest_of_it_comes_once() -> None:
    said = run_here("""
        import logging, sys
        from planner.hub import speak_for_a_job
        speak_for_a_job()
        logging.basicConfig(format="ours %(message)s", stream=sys.stdout)
        from huggingface_hub.utils import http_backoff
        for name in ("_http", "_validators"):
            logging.getLogger(f"huggingface_hub.utils.{name}").warning("a warning of %s", name)
    """)
    assert said == "a warning of _validators\n"


def run_here(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return done.stdout
