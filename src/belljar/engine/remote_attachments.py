"""Attaching to a session of a running server of the same user, over the server's socket.

Finds the server and the session, and is the client of `http/attachment_api.py`.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import httpx2
from pydantic import ValidationError

from belljar import ipc
from belljar.control import TIMEOUT_S, ask_sessions
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
from belljar.engine.remote import ServerSilent, lines_of
from belljar.errors import BelljarError, EngineError, InvalidArgument, SessionNotFound, named_error
from belljar.outputs.events import CommMessage
from belljar.servers import http_sockets

_Reply = TypeVar("_Reply", DoneReply, QueuedReply, OpenedReply, CompletionReply, InspectionReply, CompletenessReply)
_PATH = "/api/v1/attachments"
_DATA = "data: "
_MAX_QUEUED_EVENTS = 1_000
_MAX_NAMED = 5


@asynccontextmanager
async def open_attachment(data_directory: Path, prefix: str = "") -> AsyncGenerator[AttachedSession]:
    """Attach to the one live session whose id begins with `prefix`, on any server of the data directory."""
    session_id, server_pid = await _find(data_directory, prefix)
    async with _open(data_directory, f"{server_pid}-*", NewAttachment(session_id=session_id)) as attached:
        yield attached


@asynccontextmanager
async def open_served(data_directory: Path, environment: str = "") -> AsyncGenerator[AttachedSession]:
    """Open a session on a running server of the data directory and attach to it; it ends with the block."""
    async with _open(data_directory, "*", NewAttachment(environment=environment)) as attached:
        yield attached
        with suppress(BelljarError):  # the session or the server may have ended before
            await attached.end()


async def _find(data_directory: Path, prefix: str) -> tuple[str, int]:
    live, _ = await ask_sessions(data_directory)
    found = [(info.session_id, pid) for pid, _, info in live if info.session_id.startswith(prefix)]
    if len(found) == 1:
        return found[0]
    known = [session_id for session_id, _ in found] or [info.session_id for _, _, info in live]
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


@asynccontextmanager
async def _open(data_directory: Path, run: str, wanted: NewAttachment) -> AsyncGenerator["RemoteAttachment"]:
    """Attach on the first server that answers."""
    paths = await asyncio.to_thread(lambda: http_sockets(data_directory, run))
    for path in paths:
        async with AsyncExitStack() as stack:
            attached = RemoteAttachment(await stack.enter_async_context(_client(path)))
            stack.push_async_callback(attached.aclose)
            try:
                await attached.greet(wanted)
            except ConnectionRefusedError:
                continue
            yield attached
            return
    raise EngineError(
        f"no running server that uses {data_directory} can be attached to", hint="Start one with: belljar serve"
    )


@asynccontextmanager
async def _client(path: Path) -> AsyncGenerator[httpx2.AsyncClient]:
    # No TLS is spoken, but without a context httpx reads all certificates of the host, which takes 46 ms.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with ipc.reachable(path) as address:
        transport = httpx2.AsyncHTTPTransport(uds=address, verify=context)
        timeout = httpx2.Timeout(None, connect=TIMEOUT_S)
        async with httpx2.AsyncClient(transport=transport, timeout=timeout, base_url="http://belljar") as client:
            yield client


class RemoteAttachment:
    """An `AttachedSession` whose session is in another process; made by `open_attachment` and `open_served`."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client
        self._events: asyncio.Queue[SessionEvent] = asyncio.Queue(_MAX_QUEUED_EVENTS)
        self._reading: asyncio.Task[None] | None = None
        self._id = self.session_id = self.environment = self.python_version = ""
        self.count = 0
        # Cells, answers and messages to widgets arrive in the order of their calls.
        self._in_order = asyncio.Lock()

    async def greet(self, wanted: NewAttachment) -> None:
        """Say which session is wanted, and start to read. Called first; ConnectionRefusedError where nobody listens."""
        try:
            response = await self._client.post(_PATH, content=wanted.model_dump_json())
        except httpx2.ConnectError as error:
            raise ConnectionRefusedError from error
        except httpx2.TransportError:
            raise _gone() from None
        _check(response)
        attached = Attached.model_validate_json(response.content, extra="ignore")
        self._id, self.session_id, self.count = attached.attachment_id, attached.session_id, attached.count
        self.environment, self.python_version = attached.environment, attached.python_version
        is_read = asyncio.get_running_loop().create_future()
        self._reading = asyncio.get_running_loop().create_task(self._read(is_read))
        await is_read

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

    async def end(self) -> None:
        """End the session, if it was opened for this attachment."""
        try:
            _check(await self._client.delete(self._path()))
        except httpx2.TransportError:
            raise _gone() from None

    async def aclose(self) -> None:
        """See `AttachedSession`."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    # The connection

    def _path(self) -> str:
        return f"{_PATH}/{self._id}"

    async def _ask(self, request: Request, kind: type[_Reply]) -> _Reply:
        if self._reading is None or self._reading.done():
            raise _gone()
        asking = asyncio.ensure_future(
            self._client.post(f"{self._path()}/messages", content=json.dumps(request.model_dump()))
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
            async with self._client.stream("GET", f"{self._path()}/events") as response:
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
