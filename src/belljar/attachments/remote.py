"""Attaching to a session of a running server of the same user, over the server's socket.

Finds the server and the session, and is the client of `server.py`.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

from belljar import ipc
from belljar.attachments import messages
from belljar.attachments.base import AttachedSession
from belljar.attachments.messages import (
    AnswerRequest,
    AttachedMessage,
    AttachRequest,
    CommRequest,
    CommsRequest,
    CompletenessReply,
    CompletenessRequest,
    CompleteRequest,
    CompletionReply,
    DoneReply,
    EndRequest,
    ExecuteRequest,
    InspectionReply,
    InspectRequest,
    InterruptRequest,
    NumberedReply,
    NumberedRequest,
    OpenedReply,
    OpenRequest,
    QueuedReply,
    RefusedReply,
    Request,
    SessionEnded,
    SessionEvent,
)
from belljar.control import MAX_MESSAGE_BYTES, ask_sessions, server_sockets
from belljar.errors import BelljarError, EngineError, InvalidArgument, SessionNotFound, named_error
from belljar.outputs.events import CommMessage

_Reply = TypeVar("_Reply", DoneReply, QueuedReply, OpenedReply, CompletionReply, InspectionReply, CompletenessReply)
_MAX_QUEUED_EVENTS = 1_000
_MAX_NAMED = 5


@asynccontextmanager
async def open_attachment(data_directory: Path, prefix: str = "") -> AsyncGenerator[AttachedSession]:
    """Attach to the one live session whose id begins with `prefix`, on any server of the data directory."""
    session_id, server_pid = await _find(data_directory, prefix)
    attached = RemoteAttachment(await _connect(data_directory, f"{server_pid}-*"))
    try:
        await attached.greet(AttachRequest(session_id=session_id))
        yield attached
    finally:
        await attached.aclose()


@asynccontextmanager
async def open_served(data_directory: Path, environment: str = "") -> AsyncGenerator[AttachedSession]:
    """Open a session on a running server of the data directory and attach to it; it ends with the block."""
    attached = RemoteAttachment(await _connect(data_directory))
    try:
        await attached.greet(OpenRequest(environment=environment))
        yield attached
        with suppress(BelljarError):  # the session or the server may have ended before
            await attached.end()
    finally:
        await attached.aclose()


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


async def _connect(data_directory: Path, run: str = "*") -> ipc.MessageStream:
    for path in await asyncio.to_thread(server_sockets, data_directory, run):
        with suppress(OSError):
            return await ipc.open_stream(path, limit_bytes=MAX_MESSAGE_BYTES)
    raise EngineError(
        f"no running server that uses {data_directory} can be attached to", hint="Start one with: belljar serve"
    )


class RemoteAttachment:
    """An `AttachedSession` whose session is in another process; made by `open_attachment` and `open_served`."""

    def __init__(self, stream: ipc.MessageStream) -> None:
        self._stream = stream
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[messages.Reply]] = {}
        self._events: asyncio.Queue[SessionEvent] = asyncio.Queue(_MAX_QUEUED_EVENTS)
        self._reading: asyncio.Task[None] | None = None
        self._welcome: AttachedMessage | None = None
        self._count = 0

    async def greet(self, wanted: AttachRequest | OpenRequest) -> None:
        """Say which session is wanted, and start to read. Called first."""
        await self._stream.send(wanted.model_dump())
        answer = await self._receive()
        if isinstance(answer, RefusedReply):
            raise named_error(answer.told, answer.hint)
        if not isinstance(answer, AttachedMessage):
            raise EngineError("the server did not greet as one that can be attached to")
        self._welcome, self._count = answer, answer.count
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @property
    def session_id(self) -> str:
        """See `AttachedSession`."""
        return self._welcome.session_id if self._welcome else ""

    @property
    def environment(self) -> str:
        """See `AttachedSession`."""
        return self._welcome.environment if self._welcome else ""

    @property
    def python_version(self) -> str:
        """See `AttachedSession`."""
        return self._welcome.python_version if self._welcome else ""

    @property
    def count(self) -> int:
        """See `AttachedSession`."""
        return self._count

    async def events(self) -> AsyncGenerator[SessionEvent]:
        """See `AttachedSession`."""
        while True:
            item = await self._events.get()
            if isinstance(item, messages.ExecutionEnded):
                self._count = item.count
            yield item
            if isinstance(item, SessionEnded):
                return

    async def execute(self, code: str, *, allow_input: bool) -> str:
        """See `AttachedSession`."""
        return (await self._ask(ExecuteRequest(code=code, allow_input=allow_input), QueuedReply)).execution_id

    async def answer(self, execution_id: str, text: str | None, question: int) -> None:
        """See `AttachedSession`."""
        await self._ask(AnswerRequest(execution_id=execution_id, text=text, question=question), DoneReply)

    async def send_comm(self, request_id: str, message: CommMessage) -> None:
        """See `AttachedSession`."""
        await self._ask(CommRequest(request_id=request_id, comm=message), DoneReply)

    async def comms(self) -> dict[str, str]:
        """See `AttachedSession`."""
        return (await self._ask(CommsRequest(), OpenedReply)).comms

    async def interrupt(self) -> None:
        """See `AttachedSession`."""
        await self._ask(InterruptRequest(), DoneReply)

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
        """End the session, if it was opened over this connection."""
        await self._ask(EndRequest(), DoneReply)

    async def aclose(self) -> None:
        """See `AttachedSession`."""
        self._stream.close()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._end()

    # The connection

    async def _ask(self, request: Request, kind: type[_Reply]) -> _Reply:
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            if self._reading is None or self._reading.done():
                raise _gone()
            await self._stream.send(NumberedRequest(number=number, request=request).model_dump())
            reply = await waiting
        except OSError:
            raise _gone() from None
        finally:
            del self._waiting[number]
        if isinstance(reply, RefusedReply):
            raise named_error(reply.told, reply.hint)
        if not isinstance(reply, kind):
            raise EngineError(f"the server answered a question with {reply.kind!r}")
        return reply

    async def _receive(self) -> messages.ToClient:
        try:
            return await self._stream.receive(messages.to_client.validate_json)
        except (OSError, ipc.Malformed):
            raise _gone() from None

    async def _read(self) -> None:
        try:
            while True:
                message = await self._receive()
                match message:
                    case NumberedReply(number=number, reply=reply):
                        if (waiting := self._waiting.get(number)) is not None and not waiting.done():
                            waiting.set_result(reply)
                    case AttachedMessage() | RefusedReply():
                        pass
                    case _:
                        await self._events.put(message)
        except EngineError:
            await self._events.put(SessionEnded())
        finally:
            self._end()

    def _end(self) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(_gone())


def _gone() -> EngineError:
    return EngineError("the session's server has hung up", hint="`belljar sessions` lists the sessions there are")
