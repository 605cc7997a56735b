"""The HTTP API of the console, `/api/v1`: its operations in one table, and the OpenAPI document that is made of it.

Knows `Engine` and nothing below it. Who calls is in the request (`console/guard.py` put it there), and the guard has
refused everybody else.
"""

import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import BaseModel, Field, JsonValue
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from belljar.distribution import own_version
from belljar.engine.contract import MAX_COMPLETED_CHARS, Engine, SessionFilter
from belljar.engine.models import (
    CallEntry,
    EntryPage,
    ExecutionEntry,
    FileListing,
    FilePart,
    Followed,
    Health,
    NameCompletion,
    OutputLines,
    Server,
    SessionDetail,
    SessionEntry,
    SessionPage,
    UsageHistory,
)
from belljar.errors import FileMissing, InvalidArgument
from belljar.executions.inbox import InboxQuestion
from belljar.models import ExecutionResult, Model, OutputEvent, Rewinding, SessionFork
from belljar.outputs.export_formats import EXPORT_FORMATS, format_named
from belljar.surfaces.api_operations import (
    BYTES,
    CURSOR,
    LIMIT,
    PREFIX,
    STREAM,
    ApiCall,
    ApiProblem,
    Operation,
    Parameter,
    attachment,
    attachment_headers,
    endpoint,
    request_body,
)
from belljar.surfaces.api_variables import package_operations, variable_operations
from belljar.surfaces.event_streams import StreamShares, event_stream

if TYPE_CHECKING:
    from belljar.surfaces.api_operations import Operation

_PART = re.compile(r"\{(\w+)(?::\w+)?\}")
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
PART_BYTES: Final = 1024 * 1024
ReadPart = Callable[[int, int], Awaitable[FilePart]]
"""Reads a part of a file, from an offset on and of this length at most."""


class NewSession(Model):
    """A session to open."""

    environment: str = ""
    reason: str = Field("", max_length=200)


class NewCell(Model):
    """A cell to run."""

    code: str
    timeout_s: float | None = Field(None, gt=0)


class CompletionRequest(Model):
    """Code that somebody types, and where in it they are, in characters."""

    code: str = Field(max_length=MAX_COMPLETED_CHARS)
    cursor: int = Field(ge=0)


class ForkRequest(Model):
    """Where to fork a session: before the execution `at`, or where it is now."""

    at: str = ""


class RewindRequest(Model):
    """The execution before which the session goes on."""

    to: str


class QuestionAnswer(Model):
    """The answer to a question."""

    action: Literal["accept", "decline"]
    values: dict[str, JsonValue] = {}


class Queued(Model):
    """A cell that was accepted."""

    execution_id: str


class InterruptedList(Model):
    """The executions that were stopped."""

    interrupted: list[str]


class EventPage(Model):
    """Output events in order."""

    items: list[OutputEvent]
    next: int | None = None
    """What to pass as `since` for those that follow; null when there are no more yet."""


class Servers(Model):
    """The servers of the data directory."""

    items: list[Server]


class Calls(Model):
    """Tool calls in order."""

    items: list[CallEntry]


class Decisions(Model):
    """Decisions of the policy, newest first."""

    items: list[dict[str, JsonValue]]


class Questions(Model):
    """Questions to a person."""

    items: list[InboxQuestion]


_NOTEBOOKS = "application/x-ipynb+json, text/html, text/x-python, text/markdown"


class RestApi:
    """The operations over one engine."""

    def __init__(self, engine: Engine, *, max_upload_bytes: int) -> None:
        self._engine = engine
        self._max_upload_bytes = max_upload_bytes
        self._streams = StreamShares()
        session, execution = "/sessions/{session_id}", "/executions/{execution_id}"
        state = Parameter("running, idle, fresh, asleep or gone")
        after = Parameter("The id of the last event that the reader has")
        self.operations: list[Operation] = [
            Operation("GET", "/servers", "The servers of the data directory", self._servers, Servers),
            Operation("GET", "/health", "Checks and gauges", self._health, Health),
            Operation("GET", "/usage", "What sessions used in the last 15 minutes", self._usage, UsageHistory),
            Operation(
                "GET",
                "/sessions",
                "Sessions, newest first",
                self._list,
                SessionPage,
                {
                    "state": state,
                    "owner": Parameter("Of this owner only; for operators"),
                    "q": Parameter("Text in id, reason, environment or owner"),
                    "cursor": CURSOR,
                    "limit": LIMIT,
                },
            ),
            Operation("POST", "/sessions", "Open a session", self._create, SessionEntry, body=NewSession, status=201),
            Operation("GET", session, "One session", self._session, SessionDetail),
            Operation("DELETE", session, "End a session and delete all of it", self._end, status=204),
            Operation(
                "GET",
                f"{session}/executions",
                "Executions, newest first, without output",
                self._executions,
                EntryPage[ExecutionEntry],
                {"cursor": CURSOR, "limit": LIMIT},
            ),
            Operation(
                "POST",
                f"{session}/executions",
                "Run a cell; with the header Idempotency-Key, once",
                self._run,
                Queued,
                body=NewCell,
                status=202,
            ),
            Operation(
                "POST",
                f"{session}/complete",
                "Names that fit at a place in code; none while the session is busy or asleep",
                self._complete,
                NameCompletion,
                body=CompletionRequest,
            ),
            Operation("POST", f"{session}/interrupt", "Stop what runs and waits", self._interrupt, InterruptedList),
            Operation("POST", f"{session}/fork", "Fork it", self._fork, SessionFork, body=ForkRequest, status=201),
            Operation("POST", f"{session}/rewind", "Rewind it", self._rewind, Rewinding, body=RewindRequest),
            Operation(
                "GET",
                f"{session}/files",
                "Files and folders in a folder, by name",
                self._files,
                FileListing,
                {"path": Parameter("A folder"), "after": Parameter("A name")},
            ),
            Operation("GET", f"{session}/files/{{name:path}}", "A file", self._read_file, media=BYTES),
            Operation("PUT", f"{session}/files/{{name:path}}", "Write a file", self._write_file, status=204),
            Operation("DELETE", f"{session}/files/{{name:path}}", "Delete a file", self._delete_file, status=204),
            *variable_operations(engine),
            *package_operations(engine),
            Operation(
                "GET", f"{session}/notebook.{{form}}", "As ipynb, html, py or md", self._notebook, media=_NOTEBOOKS
            ),
            Operation(
                "GET",
                f"{session}/events",
                "Cells and output as they come",
                self._follow,
                None,
                {"after": after},
                media=STREAM,
            ),
            Operation("GET", execution, "One execution, without output", self._execution, ExecutionEntry),
            Operation("GET", f"{execution}/result", "What its client was told", self._result, ExecutionResult),
            Operation(
                "GET",
                f"{execution}/events",
                "Output events",
                self._output,
                EventPage,
                {"since": Parameter("After this number", 0), "limit": Parameter("How many", 500, 1, 500)},
            ),
            Operation(
                "GET",
                f"{execution}/lines",
                "Lines of its printed output",
                self._lines,
                OutputLines,
                {
                    "first": Parameter("The first line", 1, 1),
                    "count": Parameter("How many", 200, 1, 1_000),
                    "q": Parameter("Text to look for"),
                },
            ),
            Operation("GET", f"{execution}/calls", "Its tool calls", self._calls, Calls),
            Operation("GET", f"{execution}/decisions", "The policy's decisions", self._own_decisions, Decisions),
            Operation("GET", f"{execution}/displays/{{name}}", "The file of a display", self._display, media=BYTES),
            Operation(
                "GET",
                "/decisions",
                "The policy's decisions, newest first",
                self._decisions,
                Decisions,
                {"limit": LIMIT},
            ),
            Operation(
                "GET",
                "/questions",
                "Questions to a person",
                self._questions,
                Questions,
                {"state": Parameter("waiting or ended", "waiting")},
            ),
            Operation(
                "POST",
                "/questions/{question_id}",
                "Answer a question",
                self._answer,
                InboxQuestion,
                body=QuestionAnswer,
            ),
            Operation(
                "GET", "/events", "What happens to sessions", self._server_events, None, {"after": after}, media=STREAM
            ),
        ]

    def routes(self) -> list[Route]:
        """Return the routes, with the description of all of them."""
        routes = [
            Route(f"{PREFIX}{one.path}", endpoint(one), methods=[one.method], name=f"{one.method} {one.path}")
            for one in self.operations
        ]
        return [*routes, Route(f"{PREFIX}/openapi.json", self._describe, methods=["GET"])]

    async def _describe(self, _: Request) -> Response:
        from belljar.surfaces.rest import description

        return JSONResponse(description(self.operations, PREFIX, ApiProblem))

    # Looking

    async def _servers(self, call: ApiCall) -> Model:
        return Servers(items=(await self._engine.health(call.access)).servers)

    async def _health(self, call: ApiCall) -> Model:
        return await self._engine.health(call.access)

    async def _usage(self, call: ApiCall) -> Model:
        return await self._engine.usage(call.access)

    async def _list(self, call: ApiCall) -> Model:
        query = call.query
        wanted = SessionFilter(state=query["state"], owner=query["owner"], text=query["q"])
        return await self._engine.sessions(call.access, wanted, query["cursor"], query["limit"])

    async def _session(self, call: ApiCall) -> Model:
        return await self._engine.session(call.access, call.path("session_id"))

    async def _executions(self, call: ApiCall) -> Model:
        cursor, limit = call.query["cursor"], call.query["limit"]
        return await self._engine.executions(call.access, call.path("session_id"), cursor, limit)

    async def _execution(self, call: ApiCall) -> Model:
        return await self._engine.execution(call.access, call.path("execution_id"))

    async def _result(self, call: ApiCall) -> Model:
        return await self._engine.result(call.access, call.path("execution_id"))

    async def _output(self, call: ApiCall) -> Model:
        since, limit = call.query["since"], call.query["limit"]
        events, has_more = await self._engine.output(call.access, call.path("execution_id"), since, limit)
        return EventPage(items=events, next=events[-1].sequence if has_more else None)

    async def _lines(self, call: ApiCall) -> Model:
        query = call.query
        return await self._engine.lines(
            call.access, call.path("execution_id"), query["first"], query["count"], query["q"][:200]
        )

    async def _calls(self, call: ApiCall) -> Model:
        return Calls(items=await self._engine.calls(call.access, call.path("execution_id")))

    async def _own_decisions(self, call: ApiCall) -> Model:
        return Decisions(items=await self._engine.decisions(call.access, execution_id=call.path("execution_id")))

    async def _decisions(self, call: ApiCall) -> Model:
        return Decisions(items=await self._engine.decisions(call.access, limit=call.query["limit"]))

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

    async def _files(self, call: ApiCall) -> Model:
        path, after = call.query["path"], call.query["after"]
        return await self._engine.files(call.access, call.path("session_id"), path, after)

    async def _read_file(self, call: ApiCall) -> Response:
        name = call.path("name")
        read = partial(self._engine.read_part, call.access, call.path("session_id"), name)
        return await file_download(call.request, name.rpartition("/")[2], read)

    async def _complete(self, call: ApiCall) -> Model:
        body: CompletionRequest = call.body
        return await self._engine.complete(call.access, call.path("session_id"), body.code, body.cursor)

    async def _questions(self, call: ApiCall) -> Model:
        return Questions(items=await self._engine.questions(call.access, call.query["state"]))

    # Acting

    async def _create(self, call: ApiCall) -> Model:
        return await self._engine.create(call.access, call.body.environment, call.body.reason)

    async def _end(self, call: ApiCall) -> Model:
        await self._engine.end(call.access, call.path("session_id"))
        return Model()

    async def _run(self, call: ApiCall) -> Model:
        key = call.request.headers.get("idempotency-key", "")
        execution_id = await self._engine.run_cell(
            call.access, call.path("session_id"), call.body.code, call.body.timeout_s, key
        )
        return Queued(execution_id=execution_id)

    async def _interrupt(self, call: ApiCall) -> Model:
        return InterruptedList(interrupted=await self._engine.interrupt(call.access, call.path("session_id")))

    async def _fork(self, call: ApiCall) -> Model:
        return await self._engine.fork(call.access, call.path("session_id"), call.body.at)

    async def _rewind(self, call: ApiCall) -> Model:
        return await self._engine.rewind(call.access, call.path("session_id"), call.body.to)

    async def _write_file(self, call: ApiCall) -> Model:
        content = await request_body(call.request, self._max_upload_bytes)
        await self._engine.write_file(call.access, call.path("session_id"), call.path("name"), content)
        return Model()

    async def _delete_file(self, call: ApiCall) -> Model:
        await self._engine.delete_file(call.access, call.path("session_id"), call.path("name"))
        return Model()

    async def _answer(self, call: ApiCall) -> Model:
        body: QuestionAnswer = call.body
        return await self._engine.answer(call.access, call.path("question_id"), body.action, body.values)

    # What happens

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


def _followed(item: Followed) -> dict[str, str]:
    data = item.model_dump(mode="json", exclude_defaults=True, exclude={"kind", "id"})
    return {"event": item.kind, "data": json.dumps(data)} | ({"id": item.id} if item.id else {})


def description(operations: Sequence["Operation"], prefix: str, problem: type[BaseModel]) -> dict[str, Any]:
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
        path = prefix + _PART.sub(r"{\1}", one.path)
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


def _operation(one: "Operation", named: dict[type[Any], Any], problem: Any) -> dict[str, Any]:
    inner = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", **_FORMS.get(name, {})}}
        for name in _PART.findall(one.path)
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
            return Response(status_code=416, headers={"Content-Range": f"bytes */{start.size}"})
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
