"""One operation of the HTTP API: how its requests are checked, and how answers and errors are sent.

Knows nothing of what the operations do; `engine/operations.py` has the table of them.
"""

import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import quote

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from belljar.engine.contract import Access
from belljar.engine.operations import BYTES, PREFIX, ApiProblem, Operation, ProblemDetail
from belljar.errors import (
    BelljarError,
    Busy,
    CodeRejected,
    CopyRefused,
    EngineError,
    ExecutionNotFound,
    FileMissing,
    InvalidArgument,
    IssuerUnreachable,
    KernelDied,
    NoCheckpoint,
    OperatorNeeded,
    OutOfDescriptors,
    QuestionClosed,
    QuestionNotFound,
    SessionNotFound,
    TooLarge,
    Unauthorized,
    VariableMissing,
    out_of_descriptors,
)
from belljar.http.event_streams import TooManyStreams
from belljar.json_values import MAX_VALUES, has_too_many_values
from belljar.models import Model

_STATUSES: Final[dict[type[BelljarError], int]] = {
    SessionNotFound: 404,
    ExecutionNotFound: 404,
    FileMissing: 404,
    VariableMissing: 404,
    Unauthorized: 401,
    OperatorNeeded: 403,
    QuestionNotFound: 404,
    QuestionClosed: 409,
    NoCheckpoint: 409,
    CodeRejected: 409,
    Busy: 409,
    TooManyStreams: 429,
    KernelDied: 409,
    CopyRefused: 409,
    TooLarge: 413,
    OutOfDescriptors: 503,
    IssuerUnreachable: 502,
    EngineError: 500,
}
_RETRY_AFTER_S: Final = "10"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request, checked as far as its operation says."""

    request: Request
    access: Access
    query: dict[str, Any]
    body: Any = None

    def path(self, name: str) -> str:
        """Return a part of the path."""
        return str(self.request.path_params[name])


_Read = TypeVar("_Read")
Handler = Callable[[ApiCall], Awaitable[Model | Response]]


def endpoint(operation: Operation, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of an operation: it checks a request, and turns errors into answers."""

    async def answer(request: Request) -> Response:
        try:
            call = await _check_request(operation, request)
            found = await handler(call)
        except BelljarError as error:
            return problem(error)
        except Exception as error:
            if (named := out_of_descriptors(error)) is not None:
                return problem(named)
            log.exception("%s %s failed", operation.method, operation.path)
            return _response(500, "internal-error", "The server failed; its log has the reason")
        if isinstance(found, Response):
            return found
        if operation.status == 204:
            return Response(status_code=204)
        return JSONResponse(found.model_dump(mode="json", by_alias=True), status_code=operation.status)

    return answer


# Requests


async def _check_request(operation: Operation, request: Request) -> ApiCall:
    query = {name: known.read(name, request.query_params.get(name)) for name, known in operation.query.items()}
    body = None
    if operation.body is not None:
        content = await request_body(request, operation.most_bytes)
        if has_too_many_values(content):
            raise TooLarge(f"the body has more than {MAX_VALUES:,} values")
        body = read_body(operation.body.model_validate_json, content or b"{}")
    return ApiCall(request, request.state.access, query, body)


def read_body(read: Callable[[bytes], _Read], content: bytes) -> _Read:
    """Return what a body says, or refuse one of another form."""
    try:
        return read(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise InvalidArgument(
            f"{place[:100]}: {first['msg']}", hint=f"GET {PREFIX}/openapi.json says what it takes"
        ) from None


async def request_body(request: Request, most: int) -> bytes:
    """Return the body of a request, or refuse one that is larger than `most`."""
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > most:
            raise TooLarge(f"the body has more than {most:,} bytes")
    return bytes(parts)


# Answers


def problem(error: BelljarError) -> Response:
    """Return the answer about an error."""
    status = next((_STATUSES[kind] for kind in type(error).__mro__ if kind in _STATUSES), 400)
    response = _response(status, error.code, error.message, error.hint)
    if status == 429:
        response.headers["Retry-After"] = _RETRY_AFTER_S
    return response


def _response(status: int, code: str, message: str, hint: str = "") -> Response:
    detail = ProblemDetail(code=code, message=message, hint=hint)
    return JSONResponse(ApiProblem(error=detail).model_dump(), status_code=status)


def refused(status: int, code: str, message: str, hint: str = "", **headers: str) -> Response:
    """Return the answer of a guard."""
    response = _response(status, code, message, hint)
    for name, value in headers.items():
        response.headers[name.replace("_", "-")] = value
    return response


_UNSAFE_NAME: Final = re.compile(r"[^\w.() -]+", re.ASCII)


def attachment(content: bytes, name: str, media_type: str = BYTES) -> Response:
    """Return bytes of a session as a download: a browser never shows them in our origin."""
    return Response(content, media_type=media_type, headers=attachment_headers(name))


def attachment_headers(name: str) -> dict[str, str]:
    """Return the header that makes an answer a download of this name."""
    plain = _UNSAFE_NAME.sub("_", name).strip(". ")[-100:] or "download"
    encoded = quote(name[-200:].encode(errors="replace"), safe="")
    return {"Content-Disposition": f"attachment; filename=\"{plain}\"; filename*=UTF-8''{encoded}"}
