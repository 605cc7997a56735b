"""The HTTP API, `/api/v1`: answers each operation of the engine's table (`engine/operations.py`), and describes it.

Knows `Engine` and nothing below it. Who calls is in the request: `console/middleware.py` or `server_socket.py` put it
there, and refused everybody else.
"""

import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import fields
from functools import partial
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from belljar.distribution import own_version
from belljar.engine.contract import Engine, MapOptions, SessionFilter
from belljar.engine.models import FilePart, Followed, ProgressStep
from belljar.engine.operations import (
    BYTES,
    IN_PATH,
    OPERATIONS,
    PREFIX,
    ApiProblem,
    EventPage,
    Operation,
    ProblemDetail,
)
from belljar.errors import BelljarError, FileMissing, InvalidArgument
from belljar.http.api_operations import ApiCall, attachment, attachment_headers, endpoint, request_body
from belljar.http.event_streams import StreamShares, event_stream
from belljar.kernels.variables import MAX_COLUMNS
from belljar.models import MappedResult, Model
from belljar.outputs.export_formats import EXPORT_FORMATS, format_named

_WINDOW: Final = re.compile(r"([0-9]{1,9}):([0-9]{1,9})")
PART_BYTES: Final = 1024 * 1024
ReadPart = Callable[[int, int], Awaitable[FilePart]]
"""Reads a part of a file, from an offset on and of this length at most."""
# What parts of paths may be, where they are no ids and no names.
_FORMS: dict[str, dict[str, Any]] = {"form": {"enum": [*EXPORT_FORMATS]}}
_REFUSALS = {
    "400": "An argument is wrong",
    "401": "No credentials, or none that are accepted",
    "403": "A page of another origin made the request, or only an operator may answer the question",
    "404": "There is no such thing, or it belongs to somebody else",
    "409": "Not possible now: busy, already answered, or the kernel has died",
    "413": "Too large",
    "429": "Too many requests or streams",
}


class RestApi:
    """The operations over one engine."""

    def __init__(self, engine: Engine, *, max_upload_bytes: int, streams: StreamShares | None = None) -> None:
        self._engine = engine
        self._max_upload_bytes = max_upload_bytes
        self._streams = streams or StreamShares()

    def routes(self) -> list[Route]:
        """Return the routes, with the description of all of them."""
        routes = [
            Route(
                f"{PREFIX}{one.path}",
                endpoint(one, self._handler(one)),
                methods=[one.method],
                name=f"{one.method} {one.path}",
            )
            for one in OPERATIONS
        ]
        return [*routes, Route(f"{PREFIX}/openapi.json", self._describe, methods=["GET"])]

    async def _describe(self, _: Request) -> Response:
        return JSONResponse(description(OPERATIONS, PREFIX, ApiProblem))

    def _handler(self, operation: Operation) -> Callable[[ApiCall], Awaitable[Model | Response]]:
        """Return what answers an operation; most only call the engine."""
        more: dict[str, Callable[[ApiCall], Awaitable[Model | Response]]] = {
            "sessions": self._sessions,
            "submit": self._submit,
            "output": self._output,
            "rows": self._rows,
            "display": self._display,
            "notebook": self._notebook,
            "read_part": self._read_part,
            "write_file": self._write_file,
            "follow": self._follow,
            "server_events": self._server_events,
            "open_session": partial(self._steps, operation),
            "install": partial(self._steps, operation),
            "map": partial(self._map, operation),
        }
        return more.get(operation.verb) or partial(self._call, operation)

    async def _call(self, operation: Operation, call: ApiCall) -> Model:
        """Call the engine's verb with what the request says, under the verb's own names."""
        found = await getattr(self._engine, operation.verb)(call.access, **_arguments(operation, call))
        if operation.answer is None:
            return Model()
        return operation.answer.model_construct(**{operation.returned: found}) if operation.returned else found

    # What is more than a call

    async def _sessions(self, call: ApiCall) -> Model:
        query = call.query
        wanted = SessionFilter(state=query["state"], owner=query["owner"], text=query["q"])
        return await self._engine.sessions(call.access, wanted, query["cursor"], query["limit"])

    async def _submit(self, call: ApiCall) -> Model:
        key, session_id = (
            call.request.headers.get("idempotency-key", ""),
            call.request.path_params.get("session_id", ""),
        )
        return await self._engine.submit(call.access, session_id, key=key, **dict(call.body))

    async def _output(self, call: ApiCall) -> Model:
        since, limit = call.query["since"], call.query["limit"]
        events, has_more = await self._engine.output(call.access, call.path("execution_id"), since, limit)
        return EventPage(items=events, next=events[-1].sequence if has_more else None)

    async def _rows(self, call: ApiCall) -> Model:
        query = dict(call.query)
        first, count = _column_window(query.pop("columns"))
        session_id, name = call.path("session_id"), call.path("name")
        return await self._engine.rows(call.access, session_id, name, first_column=first, columns=count, **query)

    async def _display(self, call: ApiCall) -> Response:
        name = call.path("name")
        return attachment(await self._engine.display(call.access, call.path("execution_id"), name), name)

    async def _notebook(self, call: ApiCall) -> Response:
        session_id, name = call.path("session_id"), call.path("form")
        form = format_named(name)
        if form is None:
            raise InvalidArgument(f"form {name[:64]!r} is none of {', '.join(EXPORT_FORMATS)}")
        content = await self._engine.notebook(call.access, session_id, form)
        return attachment(content, f"session-{session_id[:8]}.{form}", EXPORT_FORMATS[form].media_type)

    async def _read_part(self, call: ApiCall) -> Response:
        name = call.path("name")
        read = partial(self._engine.read_part, call.access, call.path("session_id"), name)
        return await file_download(call.request, name.rpartition("/")[2], read)

    async def _write_file(self, call: ApiCall) -> Model:
        content = await request_body(call.request, self._max_upload_bytes)
        await self._engine.write_file(call.access, call.path("session_id"), call.path("name"), content)
        return Model()

    # Streams

    async def _server_events(self, call: ApiCall) -> Response:
        after = call.request.headers.get("last-event-id") or call.query["after"]

        async def events() -> AsyncGenerator[dict[str, str]]:
            async with aclosing(self._engine.server_events(call.access, after)) as happened:
                async for item in happened:
                    yield {"event": item.kind, "id": item.id, "data": item.model_dump_json()}

        return event_stream(call.request, events(), self._streams, call.access.principal)

    async def _follow(self, call: ApiCall) -> Response:
        session_id = call.path("session_id")
        # A session that is not there is a plain 404, not a stream that ends.
        await self._engine.session(call.access, session_id)
        after = call.request.headers.get("last-event-id") or call.query["after"]

        async def events() -> AsyncGenerator[dict[str, str]]:
            async with aclosing(self._engine.follow(call.access, session_id, after)) as happened:
                async for item in happened:
                    yield _followed(item)

        return event_stream(call.request, events(), self._streams, call.access.principal)

    async def _steps(self, operation: Operation, call: ApiCall) -> Response:
        def event(step: ProgressStep) -> dict[str, str]:
            return {"event": step.kind, "data": step.model_dump_json(exclude={"kind"}, exclude_defaults=True)}

        return await self._stream(operation, call, event)

    async def _map(self, operation: Operation, call: ApiCall) -> Response:
        def event(result: MappedResult) -> dict[str, str]:
            return {"event": "result", "data": result.model_dump_json(exclude_defaults=True)}

        return await self._stream(operation, call, event)

    async def _stream(self, operation: Operation, call: ApiCall, event: Callable[[Any], dict[str, str]]) -> Response:
        """Return what a verb tells as a stream of events; if it is refused, the last one is the error."""
        if "session_id" in operation.names_in_path:
            await self._engine.session(call.access, call.path("session_id"))  # a plain 404, as in `_follow`

        async def events() -> AsyncGenerator[dict[str, str]]:
            work = getattr(self._engine, operation.verb)(call.access, **_arguments(operation, call))
            try:
                async with aclosing(work) as told:
                    async for item in told:
                        yield event(item)
            except BelljarError as error:
                problem = ProblemDetail(code=error.code, message=error.message, hint=error.hint)
                yield {"event": "error", "data": problem.model_dump_json()}

        return event_stream(call.request, events(), self._streams, call.access.principal)


def _arguments(operation: Operation, call: ApiCall) -> dict[str, Any]:
    """Return what a request says, by the names of the verb's arguments."""
    query = {known.argument or name: call.query[name] for name, known in operation.query.items()}
    path = {name: call.request.path_params[name] for name in operation.names_in_path}
    given = {**path, **query, **(dict(call.body) if call.body is not None else {})}
    if operation.verb == "map":
        given["options"] = MapOptions(**{one.name: given.pop(one.name) for one in fields(MapOptions)})
    return given


def _followed(item: Followed) -> dict[str, str]:
    data = item.model_dump(mode="json", exclude_defaults=True, exclude={"kind", "id"})
    return {"event": item.kind, "data": json.dumps(data)} | ({"id": item.id} if item.id else {})


def _column_window(text: str) -> tuple[int, int]:
    """Return the first column of a window `FIRST:LAST` and how many it has; the last one is not in it."""
    window = _WINDOW.fullmatch(text)
    if window is None or not 0 < int(window[2]) - int(window[1]) <= MAX_COLUMNS:
        raise InvalidArgument(
            f"columns is {text[:64]!r}", hint=f"Pass FIRST:LAST, like 0:30; at most {MAX_COLUMNS} columns"
        )
    return int(window[1]), int(window[2]) - int(window[1])


# The OpenAPI 3.1 document, made from the table of operations and their models


def description(operations: Sequence[Operation], prefix: str, problem: type[BaseModel]) -> dict[str, Any]:
    """Return the document."""
    models = {model for one in operations for model in (one.answer, one.body) if model is not None} | {problem}
    ordered = sorted(models, key=lambda model: model.__name__)
    # Answers as they are written, bodies as they are read.
    bodies = {one.body for one in operations}
    wanted = [(model, "validation" if model in bodies else "serialization") for model in ordered]
    references, definitions = models_json_schema(
        wanted,  # pyright: ignore[reportArgumentType]
        ref_template="#/components/schemas/{model}",
    )
    named: dict[type[Any], Any] = {model: schema for (model, _), schema in references.items()}
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        path = prefix + IN_PATH.sub(r"{\1}", one.path)
        paths.setdefault(path, {})[one.method.lower()] = _operation(one, named, named[problem])
    return {
        "openapi": "3.1.0",
        "info": {"title": "belljar", "version": own_version(), "summary": "Sessions, cells and their output"},
        "security": [{"bearer": []}, {"cookie": []}],
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "cookie": {"type": "apiKey", "in": "cookie", "name": "belljar-PORT"},
            },
        },
    }


def _operation(one: Operation, named: dict[type[Any], Any], problem: Any) -> dict[str, Any]:
    inner = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", **_FORMS.get(name, {})}}
        for name in one.names_in_path
    ]
    query = [
        {"name": name, "in": "query", "description": known.meaning, "schema": known.schema}
        for name, known in one.query.items()
    ]
    content: dict[str, Any] = {}
    if one.answer is not None:
        content = {"content": {one.media: {"schema": named[one.answer]}}}
    elif one.status != 204:
        content = {"content": {media: {} for media in one.media.split(", ")}}
    refusals = {
        status: {"description": description, "content": {"application/json": {"schema": problem}}}
        for status, description in _REFUSALS.items()
    }
    described: dict[str, Any] = {
        "summary": one.summary,
        "operationId": re.sub(r"\W+", "_", f"{one.method.lower()}{one.path}").strip("_"),
        "parameters": [*inner, *query],
        "responses": {str(one.status): {"description": one.summary, **content}, **refusals},
    }
    if one.body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": named[one.body]}}}
    elif one.method == "PUT":
        described["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
    return described


# Files as downloads, whole or by range, read a part at a time whatever their size


async def file_download(request: Request, name: str, read: ReadPart) -> Response:
    """Return a file, or the range of it that the request asks for. A browser never shows it in our origin."""
    start = await read(0, 0)
    tag = f'"{start.size:x}-{start.version}"'
    headers = {**attachment_headers(name), "Accept-Ranges": "bytes", "ETag": tag}
    wanted = request.headers.get("range", "")
    if request.headers.get("if-range", tag) != tag:
        wanted = ""  # the file has changed since the reader got its first part
    match _byte_range(wanted, start.size):
        case None:
            first, last, status = 0, start.size - 1, 200
        case (first, last) if first > last:
            return Response(status_code=416, headers={"Content-Range": f"bytes */{start.size}", "ETag": tag})
        case (first, last):
            status = 206
            headers["Content-Range"] = f"bytes {first}-{last}/{start.size}"
    headers["Content-Length"] = str(last - first + 1)
    if request.method == "HEAD":
        return Response(status_code=status, media_type=BYTES, headers=headers)
    parts = _parts(read, first, last + 1, start.version)
    return StreamingResponse(parts, status_code=status, media_type=BYTES, headers=headers)


async def _parts(read: ReadPart, offset: int, end: int, version: str) -> AsyncGenerator[bytes]:
    while offset < end:
        part = await read(offset, min(PART_BYTES, end - offset))
        if part.version != version or not part.content:
            # The reader sees that the download is short, rather than half of one file and half of another.
            raise FileMissing("the file changed while it was downloaded")
        offset += len(part.content)
        yield part.content


def _byte_range(wanted: str, size: int) -> tuple[int, int] | None:
    """Return the first and the last byte of a range; None without one, or for several, which may be ignored."""
    found = re.fullmatch(r"bytes=(\d{0,15})-(\d{0,15})", wanted)
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:
        return (max(0, size - int(found[2])), size - 1) if int(found[2]) else (size, size - 1)
    return int(found[1]), min(int(found[2]) if found[2] else size - 1, size - 1)
