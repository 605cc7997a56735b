"""The operator's socket of a server, which only its own user can open: attaches to one of its sessions.

The socket's folder is closed to others (0700), and nothing else is checked: whoever can open the socket may run code in
every session, whoever owns it.
"""

import asyncio
import contextlib
import os
import pwd
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from pydantic import BaseModel

from belljar import ipc
from belljar.attachments import messages
from belljar.attachments.local import LocalAttachment, attach
from belljar.attachments.messages import (
    AttachedMessage,
    DoneReply,
    NumberedReply,
    OpenedReply,
    QueuedReply,
    RefusedReply,
)
from belljar.control import MAX_MESSAGE_BYTES, SOCKET_NAME
from belljar.errors import BelljarError, SessionNotFound
from belljar.sessions.registry import Registry


@asynccontextmanager
async def serve_operators(run_folder: Path, registry: Registry) -> AsyncGenerator[None]:
    """Answer on the socket in `run_folder` until the block ends, with one task for each connection."""

    async def answer(stream: ipc.MessageStream) -> None:
        await _AttachedPeer(stream, registry).run(await stream.receive(messages.first.validate_json))

    async with ipc.serve(run_folder / SOCKET_NAME, answer, limit_bytes=MAX_MESSAGE_BYTES):
        yield


class _AttachedPeer:
    """One connection that is attached to one session, until either side hangs up."""

    def __init__(self, stream: ipc.MessageStream, registry: Registry) -> None:
        self._stream = stream
        self._registry = registry
        self._owner = ""
        """The owner of the session, if it was opened over this connection."""
        self._end_request: int | None = None

    async def run(self, wanted: messages.AttachRequest | messages.OpenRequest) -> None:
        try:
            attached = await (self._open(wanted) if isinstance(wanted, messages.OpenRequest) else self._find(wanted))
        except BelljarError as error:
            await self._send(_refused(error))
            return
        await self._send(
            AttachedMessage(
                session_id=attached.session_id,
                environment=attached.environment,
                python_version=attached.python_version,
                count=attached.count,
            )
        )
        await self._converse(attached)
        await self._end(attached)

    async def _find(self, wanted: messages.AttachRequest) -> LocalAttachment:
        session = next((one for one in self._registry.all() if one.id == wanted.session_id), None)
        if session is None:
            raise SessionNotFound(
                f"session {wanted.session_id[:64]!r} is not on this server",
                hint="`belljar sessions` lists those there are",
            )
        return attach(self._registry, session, _peer_name(self._stream))

    async def _open(self, wanted: messages.OpenRequest) -> LocalAttachment:
        self._owner = f"jupyter:{_peer_name(self._stream)}"
        await self._registry.make_room(self._owner)
        session = self._registry.create(self._owner, environment=wanted.environment, reason="a Jupyter kernel")
        with session.in_use():
            await session.start()
            return attach(self._registry, session)

    async def _converse(self, attached: LocalAttachment) -> None:
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._send_events(attached)), loop.create_task(self._listen(attached))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await attached.aclose()

    async def _end(self, attached: LocalAttachment) -> None:
        """Clear the session after an `EndRequest`.

        Done after the conversation, because the end of the session would cancel a task in it.
        """
        if self._end_request is not None:
            if self._owner:
                with contextlib.suppress(SessionNotFound):
                    await self._registry.clear(attached.session_id, self._owner)
            await self._send(NumberedReply(number=self._end_request, reply=DoneReply()))

    async def _send_events(self, attached: LocalAttachment) -> None:
        async with aclosing(attached.events()) as events:
            async for item in events:
                await self._send(item)

    async def _listen(self, attached: LocalAttachment) -> None:
        # Each request has a task of its own, because an interrupt must not wait behind a completion.
        answering: set[asyncio.Task[None]] = set()
        try:
            while True:
                asked = await self._stream.receive(messages.numbered.validate_json)
                if isinstance(asked.request, messages.EndRequest):
                    self._end_request = asked.number
                    return
                task = asyncio.get_running_loop().create_task(self._answer(attached, asked))
                answering.add(task)
                task.add_done_callback(answering.discard)
        finally:
            for task in answering:
                task.cancel()
            await asyncio.gather(*answering, return_exceptions=True)

    async def _answer(self, attached: LocalAttachment, asked: messages.NumberedRequest) -> None:
        try:
            reply = await _reply(attached, asked.request)
        except BelljarError as error:
            reply = _refused(error)
        with contextlib.suppress(OSError):
            await self._send(NumberedReply(number=asked.number, reply=reply))

    async def _send(self, message: BaseModel) -> None:
        await self._stream.send(message.model_dump())


async def _reply(attached: LocalAttachment, request: messages.Request) -> messages.Reply:
    match request:
        case messages.ExecuteRequest(code=code, allow_input=allow_input):
            return QueuedReply(execution_id=await attached.execute(code, allow_input=allow_input))
        case messages.AnswerRequest(execution_id=execution_id, text=text, question=question):
            await attached.answer(execution_id, text, question)
        case messages.CommRequest(request_id=request_id, comm=comm):
            await attached.send_comm(request_id, comm)
        case messages.CommsRequest():
            return OpenedReply(comms=await attached.comms())
        case messages.InterruptRequest():
            await attached.interrupt()
        case messages.EndRequest():
            pass  # `_listen` has handled it
        case messages.CompleteRequest(code=code, cursor=cursor):
            return await attached.complete(code, cursor)
        case messages.InspectRequest(code=code, cursor=cursor, detail=detail):
            return await attached.inspect(code, cursor, detail)
        case messages.CompletenessRequest(code=code):
            return await attached.check(code)
    return DoneReply()


def _refused(error: BelljarError) -> RefusedReply:
    return RefusedReply(told=f"{error.code}: {error.message}", hint=error.hint)


def _peer_name(stream: ipc.MessageStream) -> str:
    """Return the name of the user at the other end."""
    if (peer := stream.peer) is None:
        return "its operator"
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(peer.uid).pw_name
    return f"user {peer.uid}" if peer.uid != os.geteuid() else "its operator"
