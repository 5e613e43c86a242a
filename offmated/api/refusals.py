"""Turns errors into HTTP answers: the fields of a `UserError`, and a status code that says whether to try again."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as NoConnection
from starlette.exceptions import HTTPException

from planner.errors import Exit, UserError, first_line, is_disk_full, is_out_of_memory, out_of_memory

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
SHORT_FOR_NOW = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR}
_BUSY = ("locked", "busy", "timeout", "could not serialize", "deadlock", "too many")


def refused(status: int, error: UserError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The HTTP answer with the status code `status` and the fields of `error` as JSON."""
    return JSONResponse(error.to_json(), status_code=status, headers=dict(headers or {}))


def later(error: UserError) -> JSONResponse:
    """The HTTP answer (503) to a request that could not be handled just now. Nothing of it was done, and it may be sent
    again."""
    return refused(503, error, {"Retry-After": str(RETRY_AFTER_S)})


def add_handlers(app: FastAPI) -> None:
    """Set error handlers on `app` that answer every error with its fields as JSON."""
    for kind, handler in (
        (UserError, _user_error),
        (RequestValidationError, _invalid),
        (HTTPException, _http),
        (DBAPIError, _database),
        (NoConnection, _database),
        (OSError, _system),
        (MemoryError, _runtime),
        (RuntimeError, _runtime),
        (Exception, _own_mistake),
    ):
        app.add_exception_handler(kind, handler)


def _user_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, UserError)
    status = 507 if error.code == "disk-full" else 404 if error.exit_code is Exit.NO_SUCH_JOB else 422
    return refused(status, error)


def _invalid(_request: Request, error: Exception) -> JSONResponse:
    """The answer does not repeat what was sent, as that may hold what JSON cannot (NaN, half characters)."""
    assert isinstance(error, RequestValidationError)
    return refused(422, _unknown(*(f"{'.'.join(map(str, at['loc']))}: {at['msg']}" for at in error.errors())))


def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    number = f"{request.method} {request.url.path}: {error.detail}"
    return refused(error.status_code, _unknown(number), error.headers)


def _unknown(*numbers: str) -> UserError:
    return UserError(
        "The daemon does not know this request.",
        numbers=numbers,
        code="bad-request",
        exit_code=Exit.USAGE,
        hint="is the daemon of the same version? offmate down, then offmate up",
    )


def busy(cause: str) -> JSONResponse:
    """The HTTP answer to a request that waited too long for its turn to write, or for the database itself. `cause` says
    for which."""
    log.warning("the database was busy for too long: %s", cause)
    return later(
        UserError("The database is busy.", numbers=(cause,), code="database-busy", hint="try again in a moment")
    )


def _database(_request: Request, error: Exception) -> JSONResponse:
    cause = str(error.orig) if isinstance(error, DBAPIError) else str(error)
    if is_disk_full(error):
        return _disk_full(error)
    if isinstance(error, NoConnection) or any(word in cause.lower() for word in _BUSY):
        return busy(cause)
    log.exception("the database cannot be used", exc_info=error)
    return refused(
        503,
        UserError(
            "The database cannot be used.",
            numbers=(cause,),
            code="database-unreachable",
            hint="daemon.log says more",
        ),
    )


def _system(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, OSError)
    if is_disk_full(error):
        return _disk_full(error)
    if isinstance(error, TimeoutError):  # raised by the store while it waited to write
        return busy(str(error))
    refusal = UserError(
        "The system refused what the daemon wanted to do.",
        numbers=(first_line(error),),
        code="system-error",
        hint="daemon.log says more",
    )
    if error.errno in SHORT_FOR_NOW:
        log.warning("the system is short of something: %s", error)
        return later(refusal)
    log.exception("a request ended in an error of the system", exc_info=error)
    return refused(503, refusal)


def _disk_full(error: Exception) -> JSONResponse:
    return refused(
        507,
        UserError(
            "The disk has no room for what the daemon writes.",
            numbers=(first_line(error),),
            code="disk-full",
            hint="free some space and try again; nothing was kept",
        ),
    )


def _runtime(request: Request, error: Exception) -> JSONResponse:
    """The answer where memory or threads ran out; for any other RuntimeError that of `_own_mistake`."""
    if is_out_of_memory(error):
        log.warning("there is no memory for an answer: %s", first_line(error))
        return later(out_of_memory("what the daemon was asked for"))
    log.exception("a request ended in an error", exc_info=error)
    return _own_mistake(request, error)


def _own_mistake(request: Request, error: Exception) -> JSONResponse:
    """The answer for an error of ours; the server logs it with its traceback."""
    number = f"{request.method} {request.url.path}: {type(error).__name__}"
    return refused(
        500,
        UserError(
            "The daemon made a mistake.",
            numbers=(number,),
            code="daemon-error",
            hint="daemon.log in the state folder says more",
        ),
    )
