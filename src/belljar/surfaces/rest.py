"""The HTTP API of the console, `/api/v1`: its operations in one table, which also makes the OpenAPI document.

Knows `Engine` and nothing below it. Who calls is in the request (`console/guard.py` put it there), and the guard has
refused everybody else.
"""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Literal

from pydantic import Field, JsonValue
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from belljar.engine.contract import MAX_COMPLETED_CHARS, Engine, SessionFilter
from belljar.engine.models import (
    CallEntry,
    EntryPage,
    ExecutionEntry,
    FileListing,
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
from belljar.errors import InvalidArgument
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
    endpoint,
    request_body,
)
from belljar.surfaces.api_variables import package_operations, variable_operations
from belljar.surfaces.event_streams import StreamShares, event_stream
from belljar.surfaces.file_ranges import file_download


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
        from belljar.surfaces.openapi import description

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
