"""Attaching to live sessions over the socket of a server: an attachment, a stream of events, and messages beside it.

An attachment ends with its stream, or when nobody has opened one for a while; then nobody is left who could answer the
questions of its cells. Another caller's attachment answers as one that does not exist.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from belljar.engine import attachment_messages as messages
from belljar.engine.attachment_messages import AttachedSession, CommsRequest, DoneReply, OpenedReply, QueuedReply
from belljar.engine.contract import Access, Engine
from belljar.engine.operations import JSON, PREFIX
from belljar.errors import BelljarError, Busy, InvalidArgument, SessionNotFound
from belljar.http.api_operations import problem, read_body, request_body
from belljar.http.event_streams import StreamShares, event_stream
from belljar.json_values import MAX_VALUES, has_too_many_values

UNREAD_S: Final = 5.0
"""How long an attachment may be without a reader of its events."""
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
_PATH: Final = f"{PREFIX}/attachments"
_Act = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True)
class _Held:
    """An attachment, whose it is, and whether its session was opened for it."""

    attached: AttachedSession
    principal: str
    is_owner: bool
    expiry: asyncio.TimerHandle | None = None
    is_read: bool = False


class AttachmentApi:
    """The attachments to sessions of one engine."""

    def __init__(self, engine: Engine, streams: StreamShares) -> None:
        self._engine = engine
        self._streams = streams
        self._held: dict[str, _Held] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def routes(self) -> list[Route]:
        """Return the routes."""
        one = f"{_PATH}/{{attachment_id}}"
        return [
            Route(_PATH, _answered(self._create), methods=["POST"]),
            Route(one, _answered(self._end), methods=["DELETE"]),
            Route(f"{one}/events", _answered(self._events), methods=["GET"]),
            Route(f"{one}/messages", _answered(self._message), methods=["POST"]),
        ]

    async def aclose(self) -> None:
        """Detach from every session."""
        for attachment_id in [*self._held]:
            await self._detach(attachment_id)
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _create(self, request: Request) -> Response:
        access: Access = request.state.access
        wanted = read_body(messages.NewAttachment.model_validate_json, await _body(request))
        attached = await self._engine.attach(access, wanted.session_id, wanted.environment)
        held = _Held(attached, access.principal, is_owner=not wanted.session_id)
        attachment_id = secrets.token_hex(16)
        self._held[attachment_id] = held
        held.expiry = asyncio.get_running_loop().call_later(UNREAD_S, self._expire, attachment_id)
        answer = messages.Attached(
            attachment_id=attachment_id,
            session_id=held.attached.session_id,
            environment=held.attached.environment,
            python_version=held.attached.python_version,
            count=held.attached.count,
        )
        return Response(answer.model_dump_json(), status_code=201, media_type=JSON)

    async def _events(self, request: Request) -> Response:
        attachment_id, held = self._of(request)
        if held.is_read:
            raise Busy("the events of this attachment are read already", hint="Make an attachment of your own")
        held.is_read = True

        async def events() -> AsyncGenerator[dict[str, str]]:
            # Not before: a reader who is gone already never comes here.
            if held.expiry is not None:
                held.expiry.cancel()
            try:
                async with aclosing(held.attached.events()) as happened:
                    async for item in happened:
                        yield {"data": item.model_dump_json()}
            finally:
                self._expire(attachment_id)

        # Who reads slowly loses nothing: the events of cells are in the journal until they are read.
        return event_stream(request, events(), self._streams, held.principal, send_timeout_s=None)

    async def _message(self, request: Request) -> Response:
        _, held = self._of(request)
        wanted = read_body(messages.request_form.validate_json, await _body(request))
        reply = await _reply(held.attached, wanted)
        return Response(reply.model_dump_json(), media_type=JSON)

    async def _end(self, request: Request) -> Response:
        """Detach, and end the session if it was opened for this attachment."""
        attachment_id, held = self._of(request)
        await self._detach(attachment_id)
        if held.is_owner:
            with suppress(SessionNotFound):
                await self._engine.end(request.state.access, held.attached.session_id)
        return Response(status_code=204)

    def _of(self, request: Request) -> tuple[str, _Held]:
        attachment_id = str(request.path_params["attachment_id"])
        held = self._held.get(attachment_id)
        if held is None or held.principal != request.state.access.principal:
            raise SessionNotFound(
                f"attachment {attachment_id[:64]!r} does not exist", hint="It ends with its stream of events"
            )
        return attachment_id, held

    def _expire(self, attachment_id: str) -> None:
        task = asyncio.get_running_loop().create_task(self._detach(attachment_id))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _detach(self, attachment_id: str) -> None:
        held = self._held.pop(attachment_id, None)
        if held is not None:
            if held.expiry is not None:
                held.expiry.cancel()
            await held.attached.aclose()


async def _body(request: Request) -> bytes:
    content = await request_body(request, MAX_MESSAGE_BYTES)
    if has_too_many_values(content):
        raise InvalidArgument(f"the body has more than {MAX_VALUES:,} values")
    return content


def _answered(act: _Act) -> _Act:
    async def answer(request: Request) -> Response:
        try:
            return await act(request)
        except BelljarError as error:
            return problem(error)

    return answer


async def _reply(attached: AttachedSession, request: messages.Request) -> messages.Reply:
    match request:
        case messages.ExecuteRequest(code=code, allow_input=allow_input):
            return QueuedReply(execution_id=await attached.execute(code, allow_input=allow_input))
        case messages.AnswerRequest(execution_id=execution_id, text=text, question=question):
            await attached.answer(execution_id, text, question)
        case messages.CommRequest(request_id=request_id, comm=comm):
            await attached.send_comm(request_id, comm)
        case CommsRequest():
            return OpenedReply(comms=await attached.comms())
        case messages.InterruptMessage():
            await attached.interrupt()
        case messages.CompleteRequest(code=code, cursor=cursor):
            return await attached.complete(code, cursor)
        case messages.InspectRequest(code=code, cursor=cursor, detail=detail):
            return await attached.inspect(code, cursor, detail)
        case messages.CompletenessRequest(code=code):
            return await attached.check(code)
    return DoneReply()
