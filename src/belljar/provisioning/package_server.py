"""Where code inside a session asks for packages: `pip install` in a cell ends up here.

One JSON line comes in, one JSON object goes out, over a UNIX socket in the session's scratch folder. Whoever asks may
be hostile: size, time and number are bounded, and requirements are checked as those of any caller are.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from belljar import ipc
from belljar.egress.session_sockets import SessionSocket, serving
from belljar.environments.base import Environment
from belljar.environments.install_room import InstallRoom
from belljar.environments.packages import InstallOutcome, PackageChange, install, modules_of
from belljar.environments.presence import NAME_LIMIT_CHARS
from belljar.environments.uv import OpenUv
from belljar.errors import BelljarError

_LINE_BYTES = 65_536
_LINE_S = 10
_MAX_WAITING = 4
_TOLD = 16
"""Askers beyond those that are told so; more are hung up on."""

log = logging.getLogger(__name__)


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    requirements: list[Annotated[str, Field(max_length=NAME_LIMIT_CHARS)]] = Field(min_length=1, max_length=100)


@dataclass(frozen=True, slots=True)
class PackageReply:
    """What the asker shows on its two streams, and the modules it should try to import."""

    lines: list[str] = field(default_factory=list[str])
    errors: list[str] = field(default_factory=list[str])
    modules: list[str] = field(default_factory=list[str])


Fulfil = Callable[[Sequence[str]], Awaitable[PackageReply]]


async def install_for(
    environment: Environment, layer: Path, open_uv: OpenUv, room: InstallRoom, requirements: Sequence[str]
) -> PackageReply:
    """Install what a session asks for into its layer."""
    changes: list[PackageChange] = []
    outcomes = await install(environment, layer, requirements, on_change=changes.append, open_uv=open_uv, room=room)
    there = [outcome.name for outcome in outcomes if outcome.error is None]
    found = await asyncio.to_thread(modules_of, environment, layer, there)
    return PackageReply(
        lines=[*map(_said_to_session, (each for each in outcomes if each.error is None)), *restart_lines(changes)],
        errors=[f"{outcome.name}: {outcome.error}" for outcome in outcomes if outcome.error is not None],
        modules=[module for modules in found.values() for module in modules],
    )


def _said_to_session(outcome: InstallOutcome) -> str:
    note = f" ({outcome.note})" if outcome.note else ""
    return f"{outcome.name} {outcome.installed_version} is installed{note}"


def restart_lines(changes: Sequence[PackageChange]) -> list[str]:
    """Packages of which there was another version before: code that imported that one still has it."""
    return [
        f"{change.name} changed from {change.before} to {change.after}: restart needed if it was imported before"
        for change in changes
        if change.before is not None and change.before != change.after
    ]


class PackageServer:
    """One session's; made by `open_desk`."""

    def __init__(self, session_id: str, fulfil: Fulfil) -> None:
        self._session_id = session_id
        self._fulfil = fulfil
        self._conversations = ipc.Conversations(_MAX_WAITING + _TOLD)
        self._turn = asyncio.Lock()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one asker."""
        if self._conversations.is_full:
            writer.transport.abort()
            return
        self._conversations.start(self._serve(ipc.MessageStream(reader, writer)))

    async def aclose(self) -> None:
        """Stop, whoever waits."""
        await self._conversations.aclose()

    async def _serve(self, stream: ipc.MessageStream) -> None:
        try:
            reply = await self._answer(stream)
            async with asyncio.timeout(_LINE_S):
                await stream.send(asdict(reply))
        except (OSError, TimeoutError):
            pass
        finally:
            stream.close()

    async def _answer(self, stream: ipc.MessageStream) -> PackageReply:
        if len(self._conversations) > _MAX_WAITING:
            return PackageReply(errors=[f"{_MAX_WAITING} requests for packages are waiting already"])
        try:
            async with asyncio.timeout(_LINE_S):
                request = await stream.receive(_Request.model_validate_json)
        except ipc.Malformed:
            return PackageReply(errors=["the request cannot be read: name at most 100 packages"])
        count, ids = len(request.requirements), {"session_id": self._session_id}
        log.info("session %s asks for %d packages", self._session_id, count, extra=ids)
        try:
            async with self._turn:
                return await self._fulfil(request.requirements)
        except BelljarError as error:
            return PackageReply(errors=[str(error)])


@asynccontextmanager
async def open_package_server(
    folder: Path, name: str, *, session_id: str, fulfil: Fulfil, door: SessionSocket | None = None
) -> AsyncGenerator[PackageServer]:
    """Serve a session on a socket of that name in a folder it can reach, until the block ends."""
    desk = PackageServer(session_id, fulfil)
    try:
        async with serving(folder, name, desk.accept, limit=_LINE_BYTES, door=door):
            yield desk
    finally:
        with contextlib.suppress(OSError):
            await desk.aclose()
