"""Calls of 2025's protocol for a session of another server than the one that has the client's MCP session.

Such a call goes on as one of 2026-07-28, and what comes back is the stream of events that a client of 2025 expects:
progress as it is, a question as a request on the same stream, whose answer makes the call go on. The stream cannot be
resumed, because its events have no ids.
"""

import asyncio
import json
import secrets
from collections.abc import Mapping
from typing import Any, Final, cast

from mcp.shared.inbound import MCP_METHOD_HEADER, MCP_NAME_HEADER, encode_header_value
from mcp_types import CLIENT_CAPABILITIES_META_KEY, CLIENT_INFO_META_KEY, PROTOCOL_VERSION_META_KEY
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from belljar.fleet.messages import answer_to, data_of, event_of
from belljar.fleet.peer import Peer
from belljar.fleet.relay import Headers, PeerAway, SessionLost, leaving, session_lost, target_of
from belljar.http.auth import current_principal
from belljar.http.early_cancellations import EarlyCancellations
from belljar.http.jsonrpc import REQUEST_CANCELLED
from belljar.request_headers import CALL_HEADER
from belljar.toolbox.base import MODERN

_PREFIX: Final = "carried-"
_ANSWER_S: Final = 3_600.0
"""How long a question waits for its answer here; a session may have given up before."""
_MOST_ROUNDS: Final = 1_000
_EVENT_BYTES: Final = 400 * 1024 * 1024
_DROPPED: Final = (b"mcp-session-id", b"mcp-protocol-version", b"last-event-id", b"content-length", b"accept")
_NEEDS_INPUT: Final = b'"input_required"'
_HEAD_BYTES: Final = 64
"""Within which a message that has a method says so."""
_NAMES: Final = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri", "resources/subscribe": "uri"}


_Key = tuple[str, str, str]
"""A caller, its MCP session and the id of a message of it."""


class LegacyCalls:
    """The calls under way that were passed on for clients of 2025's protocol."""

    def __init__(self, interrupt_on: str) -> None:
        self._ends_with_connection = interrupt_on == "disconnect"
        self._questions: dict[_Key, asyncio.Future[dict[str, Any]]] = {}
        """What waits for a client's answer, by the question's id."""
        self._under_way: dict[_Key, _Carried] = {}
        self._early = EarlyCancellations()
        """Of calls that are not known yet."""

    async def take(self, session: str, message: Mapping[str, Any]) -> bool:
        """Take a client's answer, or its cancellation, if it is for a call that was passed on."""
        if message.get("method") == "notifications/cancelled":
            params = cast("Mapping[str, Any]", message.get("params") or {})
            key = (current_principal(), session, str(params.get("requestId")))
            if (call := self._under_way.get(key)) is not None:
                await call.cancel()
            else:
                self._early.add(key)
            return call is not None
        asking = (
            None if "method" in message else self._questions.get((current_principal(), session, str(message.get("id"))))
        )
        if asking is not None and not asking.done():
            asking.set_result(dict(message))
        return asking is not None

    async def carry(
        self,
        peer: Peer,
        client: Mapping[str, Any],
        message: Mapping[str, Any],
        headers: Headers,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Answer a call by what the other server answers to it.

        A client of 2025 cancels with a message: one that only loses its connection finds what its call gave later,
        unless settings say that this cancels too.
        """
        session = next(value.decode("latin-1") for name, value in scope["headers"] if name == b"mcp-session-id")
        key = (current_principal(), session, str(message.get("id")))
        if self._early.take(key):
            await Response(_cancelled(message), media_type="text/event-stream")(scope, receive, send)
            return
        call = self._under_way[key] = _Carried(self._questions, peer, session, client, message, headers, scope)
        try:
            if self._ends_with_connection:
                is_sent = asyncio.Event()
                is_sent.set()
                async with leaving(receive, is_sent):
                    await call.run(send)
            else:
                await call.run(send)
        finally:
            del self._under_way[key]


class _Carried:
    """One call that is passed on."""

    def __init__(
        self,
        questions: dict[_Key, asyncio.Future[dict[str, Any]]],
        peer: Peer,
        session: str,
        client: Mapping[str, Any],
        message: Mapping[str, Any],
        headers: Headers,
        scope: Scope,
    ) -> None:
        self._questions = questions
        self._peer = peer
        self._session = session
        self._message = message
        self._target = target_of(scope)
        self._params: dict[str, Any] = dict(message.get("params") or {})
        capabilities = cast("dict[str, Any]", client.get("capabilities") or {})
        self._params["_meta"] = {
            **(self._params.get("_meta") or {}),
            PROTOCOL_VERSION_META_KEY: MODERN,
            CLIENT_INFO_META_KEY: client.get("clientInfo") or {"name": "unknown", "version": ""},
            # Sampling and roots are asked for on streams that this call does not have.
            CLIENT_CAPABILITIES_META_KEY: {
                name: capabilities[name] for name in ("elicitation", "extensions") if name in capabilities
            },
        }
        method = str(message["method"])
        self._headers = [(name, value) for name, value in headers if name not in _DROPPED]
        self._headers += [
            (b"accept", b"application/json, text/event-stream"),
            (b"mcp-protocol-version", MODERN.encode()),
            (MCP_METHOD_HEADER.encode(), method.encode()),
        ]
        if name := self._params.get(_NAMES.get(method, "")):
            self._headers.append((MCP_NAME_HEADER.encode(), encode_header_value(str(name)).encode()))
        self._name = secrets.token_hex(16)
        self._headers.append((CALL_HEADER.lower().encode(), self._name.encode()))
        self._has_begun = False
        self._is_cancelled = False
        self._asked: list[asyncio.Future[dict[str, Any]]] = []
        """What waits for the client's answer now."""

    async def cancel(self) -> None:
        """Have the other server stop what runs for it, and put no more questions to the client."""
        self._is_cancelled = True
        for answer in self._asked:
            if not answer.done():
                answer.set_result({})
        await self._peer.ask(f"/fleet/cancel/{self._name}")

    async def run(self, send: Send) -> None:
        """Ask, as often as there are questions in between, and send the stream of events."""
        for _ in range(_MOST_ROUNDS):
            try:
                last = await self._ask(send)
            except (PeerAway, SessionLost) as error:
                if not self._has_begun:
                    raise
                last = data_of(answer_to(self._message, error))
            requests = self._requests_in(last)
            if self._is_cancelled and not requests:
                await self.send(send, _cancelled(self._message), is_last=True)
                return
            if not requests:
                # Alone it is no event, for whose size clients have a limit.
                await self.send(send, event_of(last) if self._has_begun else last, is_last=True)
                return
            self._params["inputResponses"] = await self._put(requests, send)

    def _requests_in(self, answer: bytes) -> dict[str, Any]:
        """Return the requests that an answer asks the client for, after which the call goes on; none in most."""
        result = cast("dict[str, Any]", json.loads(answer).get("result") or {}) if _NEEDS_INPUT in answer else {}
        requests = result.get("inputRequests")
        if result.get("resultType") != "input_required" or not isinstance(requests, dict):
            return {}
        self._params["requestState"] = result.get("requestState")
        return cast("dict[str, Any]", requests)

    async def _ask(self, send: Send) -> bytes:
        """Send the request, pass on what comes before its answer, and return the answer."""
        body = json.dumps({**self._message, "params": self._params}).encode()
        async with self._peer.connections.ask("POST", self._target, self._headers, body) as answer:
            if not answer.header(b"content-type").startswith(b"text/event-stream"):
                return _checked(await answer.read(_EVENT_BYTES))
            rest = b""
            async for part in answer.parts():
                *events, rest = (rest + part).split(b"\r\n\r\n")
                if len(rest) > _EVENT_BYTES:
                    raise session_lost()
                for event in events:
                    data = event.partition(b"data: ")[2]
                    if b'"id"' in data and b'"method"' not in data[:_HEAD_BYTES]:
                        return _checked(data)
                    await self.send(send, event + b"\r\n\r\n")
        raise session_lost()

    async def _put(self, requests: dict[str, Any], send: Send) -> dict[str, Any]:
        """Put the questions to the client, and return what it answers."""
        asked: dict[str, _Key] = {}
        loop = asyncio.get_running_loop()
        try:
            for name, request in requests.items():
                key = (current_principal(), self._session, f"{_PREFIX}{secrets.token_hex(8)}")
                asked[name] = key
                self._questions[key] = loop.create_future()
                self._asked.append(self._questions[key])
                asking = {"jsonrpc": "2.0", "id": key[2], **request, "params": _legacy_params(request.get("params"))}
                await self.send(send, event_of(data_of(asking)))
            await asyncio.wait([self._questions[key] for key in asked.values()], timeout=_ANSWER_S)
            answers = {name: self._questions[key] for name, key in asked.items()}
        finally:
            self._asked.clear()
            for key in asked.values():
                del self._questions[key]
        given = {name: answer.result() if answer.done() else {} for name, answer in answers.items()}
        return {name: answer.get("result") or {"action": "cancel"} for name, answer in given.items()}

    async def send(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        """Send events to the client, or an answer that is all it gets."""
        if not self._has_begun:
            self._has_begun = True
            headers = [
                (b"content-type", b"application/json" if data.startswith(b"{") else b"text/event-stream"),
                (b"cache-control", b"no-cache, no-transform"),
                (b"mcp-session-id", self._session.encode("latin-1")),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data, "more_body": not is_last})


def _cancelled(message: Mapping[str, Any]) -> bytes:
    """Return what ends the stream of a call that was cancelled, as the SDK ends it."""
    told = {"code": REQUEST_CANCELLED, "message": "Request cancelled"}
    return event_of(data_of({"jsonrpc": "2.0", "id": message.get("id"), "error": told}))


def _legacy_params(params: object) -> dict[str, Any]:
    """Return the parameters of a question as the protocol of 2025 has them, where an address has an id."""
    known = dict(cast("Mapping[str, Any]", params)) if isinstance(params, Mapping) else {}
    return {"elicitationId": secrets.token_hex(16), **known} if known.get("mode") == "url" else known


def _checked(answer: bytes) -> bytes:
    """Return what another server answered, if that is a message."""
    if not answer.startswith(b'{"jsonrpc"') or b"\n" in answer:
        raise session_lost()
    return answer
