"""Attaching to a session of a running server of the same user, over the server's socket.

Finds the server and the session, and is the client of `http/attachment_api.py`.
"""

import asyncio
import getpass
import json
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import httpx2
from pydantic import ValidationError

from belljar.control import ask_sessions
from belljar.engine import attachment_messages as messages
from belljar.engine.attachment_messages import (
    AnswerRequest,
    Attached,
    AttachedSession,
    CommRequest,
    CommsRequest,
    CompletenessReply,
    CompletenessRequest,
    CompleteRequest,
    CompletionReply,
    DoneReply,
    ExecuteRequest,
    InspectionReply,
    InspectRequest,
    InterruptMessage,
    NewAttachment,
    OpenedReply,
    QueuedReply,
    Request,
    SessionEnded,
    SessionEvent,
)
from belljar.engine.contract import Access
from belljar.engine.many import servers_of
from belljar.engine.remote import ServerGone, ServerSilent, lines_of
from belljar.errors import BelljarError, EngineError, InvalidArgument, SessionNotFound, named_error
from belljar.outputs.events import CommMessage
from belljar.settings.keys import LOCAL_PRINCIPAL

_Reply = TypeVar("_Reply", DoneReply, QueuedReply, OpenedReply, CompletionReply, InspectionReply, CompletenessReply)
_PATH = "/api/v1/attachments"
_DATA = "data: "
_MAX_QUEUED_EVENTS = 1_000
_MAX_NAMED = 5


@asynccontextmanager
async def open_attachment(data_directory: Path, prefix: str = "") -> AsyncGenerator[AttachedSession]:
    """Attach to the one live session whose id begins with `prefix`, on any server of the data directory."""
    session_id = await _find(data_directory, prefix)
    attached = await servers_of(data_directory).attach(_person(), session_id)
    try:
        yield attached
    finally:
        await attached.aclose()


@asynccontextmanager
async def open_served(data_directory: Path, environment: str = "") -> AsyncGenerator[AttachedSession]:
    """Open a session on a running server of the data directory and attach to it; it ends with the block."""
    engine = servers_of(data_directory)
    attached = await engine.attach(_person(), environment=environment)
    try:
        yield attached
    finally:
        await attached.aclose()
        with suppress(BelljarError):  # the session or the server may have ended before
            await engine.end(_person(), attached.session_id)


def _person() -> Access:
    return Access(LOCAL_PRINCIPAL, is_operator=True, name=getpass.getuser(), via="terminal")


async def _find(data_directory: Path, prefix: str) -> str:
    live, _ = await ask_sessions(data_directory)
    found = [info.session_id for _, _, info in live if info.session_id.startswith(prefix)]
    if len(found) == 1:
        return found[0]
    known = found or [info.session_id for _, _, info in live]
    names = ", ".join(known[:_MAX_NAMED])
    if found:
        which = f"{prefix} begins the ids of {len(found)}" if prefix else f"there are {len(found)}"
        raise InvalidArgument(f"{which} live sessions", hint=f"Name one of {names}")
    if not live:
        raise SessionNotFound(
            f"no running server that uses {data_directory} has a session",
            hint="Name the server's data directory with --data-directory",
        )
    raise SessionNotFound(f"no live session has an id that begins with {prefix[:64]}", hint=f"There are {names}")


class RemoteAttachment:
    """An `AttachedSession` whose session is in another process; made by `RemoteEngine.attach`."""

    def __init__(
        self,
        client: AbstractAsyncContextManager[httpx2.AsyncClient],
        headers: dict[str, str],
        extensions: dict[str, str],
    ) -> None:
        self._connection = AsyncExitStack()
        self._opened = client
        self._headers = headers
        self._extensions = extensions
        self._events: asyncio.Queue[SessionEvent] = asyncio.Queue(_MAX_QUEUED_EVENTS)
        self._reading: asyncio.Task[None] | None = None
        self._id = self.session_id = self.environment = self.python_version = ""
        self.count = 0
        # Cells, answers and messages to widgets arrive in the order of their calls.
        self._in_order = asyncio.Lock()

    async def open(self, session_id: str, environment: str) -> None:
        """Say which session is wanted, and start to read. Called first, and once."""
        async with AsyncExitStack() as opening:
            opening.push_async_callback(self.aclose)
            self._client = await self._connection.enter_async_context(self._opened)
            self._client.headers.update(self._headers)
            wanted = NewAttachment(session_id=session_id, environment=environment)
            try:
                response = await self._client.post(_PATH, content=wanted.model_dump_json(), extensions=self._extensions)
            except httpx2.TransportError as error:
                raise ServerGone("a server has hung up, or does not answer") from error
            _check(response)
            attached = Attached.model_validate_json(response.content, extra="ignore")
            self._id, self.session_id, self.count = attached.attachment_id, attached.session_id, attached.count
            self.environment, self.python_version = attached.environment, attached.python_version
            is_read = asyncio.get_running_loop().create_future()
            self._reading = asyncio.get_running_loop().create_task(self._read(is_read))
            await is_read
            opening.pop_all()

    async def events(self) -> AsyncGenerator[SessionEvent]:
        """See `AttachedSession`."""
        while True:
            item = await self._events.get()
            if isinstance(item, messages.ExecutionEnded):
                self.count = item.count
            yield item
            if isinstance(item, SessionEnded):
                return

    async def execute(self, code: str, *, allow_input: bool) -> str:
        """See `AttachedSession`."""
        async with self._in_order:
            return (await self._ask(ExecuteRequest(code=code, allow_input=allow_input), QueuedReply)).execution_id

    async def answer(self, execution_id: str, text: str | None, question: int) -> None:
        """See `AttachedSession`."""
        async with self._in_order:
            await self._ask(AnswerRequest(execution_id=execution_id, text=text, question=question), DoneReply)

    async def send_comm(self, request_id: str, message: CommMessage) -> None:
        """See `AttachedSession`."""
        async with self._in_order:
            await self._ask(CommRequest(request_id=request_id, comm=message), DoneReply)

    async def comms(self) -> dict[str, str]:
        """See `AttachedSession`."""
        return (await self._ask(CommsRequest(), OpenedReply)).comms

    async def interrupt(self) -> None:
        """See `AttachedSession`."""
        await self._ask(InterruptMessage(), DoneReply)

    async def complete(self, code: str, cursor: int) -> CompletionReply:
        """See `AttachedSession`."""
        return await self._ask(CompleteRequest(code=code, cursor=cursor), CompletionReply)

    async def inspect(self, code: str, cursor: int, detail: int = 0) -> InspectionReply:
        """See `AttachedSession`."""
        return await self._ask(InspectRequest(code=code, cursor=cursor, detail=detail), InspectionReply)

    async def check(self, code: str) -> CompletenessReply:
        """See `AttachedSession`."""
        return await self._ask(CompletenessRequest(code=code), CompletenessReply)

    async def aclose(self) -> None:
        """See `AttachedSession`."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await self._connection.aclose()

    # The connection

    def _path(self) -> str:
        return f"{_PATH}/{self._id}"

    async def _ask(self, request: Request, kind: type[_Reply]) -> _Reply:
        if self._reading is None or self._reading.done():
            raise _gone()
        asking = asyncio.ensure_future(
            self._client.post(
                f"{self._path()}/messages", content=json.dumps(request.model_dump()), extensions=self._extensions
            )
        )
        try:
            # With the stream the attachment is gone, and whoever waits for an answer is told.
            await asyncio.wait({asking, self._reading}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise _gone()
            response = asking.result()
        except httpx2.TransportError:
            raise _gone() from None
        finally:
            asking.cancel()
        _check(response)
        reply = messages.reply_form.validate_json(response.content, extra="ignore")
        if not isinstance(reply, kind):
            raise EngineError(f"the server answered a question with {reply.kind!r}")
        return reply

    async def _read(self, is_read: "asyncio.Future[None]") -> None:
        """Put the events of the stream into the queue, until the session ends or the server hangs up."""
        try:
            async with self._client.stream("GET", f"{self._path()}/events", extensions=self._extensions) as response:
                is_read.set_result(None)
                async for line in lines_of(response, "events"):
                    # What this version does not know of a newer server is passed over.
                    with suppress(ValidationError):
                        if line.startswith(_DATA):
                            event = messages.event_form.validate_json(line[len(_DATA) :], extra="ignore")
                            await self._events.put(event)
        except (httpx2.TransportError, ServerSilent):
            pass
        finally:
            if not is_read.done():
                is_read.set_result(None)
        await self._events.put(SessionEnded())


def _check(response: httpx2.Response) -> None:
    """Raise what the server refuses."""
    if response.status_code < 300:
        return
    try:
        detail = response.json()["error"]
        raise named_error(f"{detail['code']}: {detail['message']}", detail["hint"])
    except (ValueError, KeyError, TypeError):
        raise EngineError(f"the server answered with {response.status_code}") from None


def _gone() -> EngineError:
    return EngineError("the session's server has hung up", hint="`belljar sessions` lists the sessions there are")
