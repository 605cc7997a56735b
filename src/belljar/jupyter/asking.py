"""Questions of cells to the front end that ran them, over its stdin channel, without standing in anyone's way.

ipykernel's own way blocks the thread that everything else here runs in.
"""

# pyzmq and jupyter_client are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import asyncio
from typing import Any

from zmq.eventloop.zmqstream import ZMQStream

# What front ends send for Ctrl-D.
_END_OF_INPUT = "\x04"


class Questions:
    """One at a time, like cells."""

    def __init__(self, session: Any, socket: Any) -> None:
        self._session = session
        self._stream = ZMQStream(socket)
        self._stream.on_recv(self._on_reply)
        self._asked_id = ""
        self._answer: asyncio.Future[str] | None = None

    async def ask(self, prompt: str, parent: dict[str, Any], ident: Any, *, is_password: bool) -> str | None:
        """The answer; None for an end of input."""
        self._answer = asyncio.get_running_loop().create_future()
        content = {"prompt": prompt.encode(errors="replace").decode(), "password": is_password}
        sent = self._session.send(self._stream, "input_request", content, parent, ident=ident)
        self._asked_id = str(sent["msg_id"])
        try:
            text = await self._answer
        finally:
            self._answer = None
        return None if text == _END_OF_INPUT else text

    def _on_reply(self, parts: list[bytes]) -> None:
        _, unsigned = self._session.feed_identities(parts)
        try:
            reply = self._session.deserialize(unsigned)
        except (TypeError, ValueError):
            return  # forged, or for somebody else
        # An answer to an earlier question, which its cell did not wait for, is none to this one.
        asked_id = reply.get("parent_header", {}).get("msg_id", self._asked_id)
        value = reply.get("content", {}).get("value")
        if self._answer is not None and not self._answer.done() and asked_id == self._asked_id:
            self._answer.set_result(value if isinstance(value, str) else "")
