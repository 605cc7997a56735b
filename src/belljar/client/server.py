"""A connected server: sessions opened on it, which end with their block."""

import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio

from belljar.client.calls import Calls
from belljar.client.session import RemoteSession
from belljar.errors import BelljarError
from belljar.handles import SessionHandle

CLEAR_TIMEOUT_S = 5.0


class RemoteServer(Calls):
    """A connection to a server; made by `connect`."""

    @asynccontextmanager
    async def open_session(self, environment: str = "") -> AsyncGenerator[SessionHandle]:
        """A session on the server, cleared when the block ends."""
        fields = await self.call("new_session", {"environment": environment})
        family: list[RemoteSession] = []
        handle = RemoteSession(self, str(fields["session_id"]), family)
        try:
            yield handle
        finally:
            # A server that is out of reach ends the sessions by itself when nothing has used them for a while.
            with anyio.move_on_after(CLEAR_TIMEOUT_S, shield=True):
                for member in [*family]:
                    with contextlib.suppress(BelljarError):
                        await member.aclose()
