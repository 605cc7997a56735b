"""Errors as Azure's data plane sends them: one envelope, the header `x-ms-error-code`, and a trace id.

Also turns the refusals of the guards in front of the surface into that envelope, because clients parse every answer.
"""

import json
import logging
import secrets
from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from belljar.errors import (
    BelljarError,
    Busy,
    CodeRejected,
    EngineError,
    ExecutionNotFound,
    FileMissing,
    OutOfDescriptors,
    SessionNotFound,
    TooLarge,
)

CODE_HEADER: Final = "x-ms-error-code"
RETRY_S: Final = 10
_STATUSES: Final = {
    401: ("Unauthorized", "Credentials are missing, have expired, or are not accepted"),
    403: ("Forbidden", "The credentials do not allow this"),
    404: ("NotFound", "There is no such address"),
    421: ("InvalidHost", "The server does not answer to this host name"),
    429: ("TooManyRequests", "Too many requests are under way"),
}
"""What is said of refusals that come without an envelope: those of the guards in front of the surface."""

log = logging.getLogger(__name__)


class Problem(Exception):
    """A request that is answered with an error."""

    def __init__(
        self, status: int, code: str, message: str, *, target: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.target = target
        self.headers = dict(headers or {})

    def response(self) -> Response:
        """Return the answer."""
        return json_response(
            envelope(self.code, self.message, self.target), self.status, {CODE_HEADER: self.code, **self.headers}
        )


def invalid(message: str, target: str) -> Problem:
    """Return the problem of a request that its caller has to change; `target` names the field."""
    return Problem(400, "InvalidRequest", message, target=target)


def problem_of(error: BelljarError, target: str = "") -> Problem:
    """Return the problem that stands for one of our errors."""
    message = str(error)
    retry = {"Retry-After": str(RETRY_S)}
    match error:
        case Busy() | OutOfDescriptors():
            # Azure's document says 404 for a full pool, which clients take for an address that is wrong.
            return Problem(429, "SessionPoolExhausted", message, headers=retry)
        case TooLarge():
            return Problem(413, "FileTooLarge", message, target=target)
        case FileMissing():
            return Problem(404, "SessionFileNotFound", message, target=target)
        case ExecutionNotFound():
            return Problem(404, "ExecutionNotFound", message)
        case SessionNotFound():
            return Problem(404, "SessionNotFound", message)
        case CodeRejected():
            return Problem(403, "CodeRejected", message)
        case EngineError():
            return Problem(503, "SessionUnavailable", message, headers=retry)
        case _:
            return Problem(400, "InvalidRequest", message, target=target)


def internal_problem() -> Problem:
    """Return the problem of a request that failed inside belljar; the log has the rest."""
    return Problem(500, "InternalError", "The server failed at this request; its log says why")


def envelope(code: str, message: str, target: str = "") -> dict[str, Any]:
    """Return the body of an error."""
    fields: dict[str, Any] = {"code": code, "message": message}
    if target:
        fields["target"] = target
    return {"error": {**fields, "details": [], "traceId": secrets.token_hex(16)}}


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer in JSON. Output of cells may have lone surrogates, so everything but ASCII is escaped."""
    return Response(
        json.dumps(body, ensure_ascii=True, allow_nan=False, separators=(",", ":")),
        status,
        headers,
        media_type="application/json",
    )


class EnvelopedRefusals:
    """Middleware that gives refusals of the guards behind it the envelope, and leaves their headers as they are."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and replace the body of a refusal that has no envelope."""
        replaced = False

        async def send_enveloped(message: Message) -> None:
            nonlocal replaced
            if message["type"] == "http.response.start" and _is_bare(message):
                replaced = True
                await _send_envelope(message, send)
            elif not replaced:
                await send(message)

        await self._app(scope, receive, send_enveloped)


def _is_bare(message: Message) -> bool:
    names = {name.lower() for name, _ in message["headers"]}
    return message["status"] in _STATUSES and CODE_HEADER.encode() not in names


async def _send_envelope(start: Message, send: Send) -> None:
    code, message = _STATUSES[start["status"]]
    body = json.dumps(envelope(code, message)).encode()
    dropped = (b"content-length", b"content-type")
    headers = [(name, value) for name, value in start["headers"] if name.lower() not in dropped]
    headers += [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (CODE_HEADER.encode(), code.encode()),
    ]
    await send({**start, "headers": headers})
    await send({"type": "http.response.body", "body": body})
