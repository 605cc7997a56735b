"""The socket on which code inside a session asks for packages: `pip install` in a cell ends up here.

One JSON line comes in, one JSON object goes out, over a UNIX socket in the session's scratch folder. Whoever asks may
be hostile, so size, time and number are bounded, and requirements are checked as those of any caller are.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from belljar import ipc
from belljar.egress.session_sockets import SessionSocket
from belljar.environments.base import Environment
from belljar.environments.install_room import InstallRoom
from belljar.environments.packages import InstallOutcome, PackageChange, install, modules_of
from belljar.environments.presence import NAME_LIMIT_CHARS
from belljar.environments.uv import OpenUv
from belljar.errors import BelljarError
from belljar.provisioning.request_server import RequestStream, serving_requests

_MAX_WAITING = 4

log = logging.getLogger(__name__)


class PackageRequest(BaseModel):
    """The requirements that a session asks for."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    requirements: list[Annotated[str, Field(max_length=NAME_LIMIT_CHARS)]] = Field(min_length=1, max_length=100)


@dataclass(frozen=True, slots=True)
class PackageReply:
    """What the command shows on its two streams, and the modules it should try to import."""

    lines: list[str] = field(default_factory=list[str])
    errors: list[str] = field(default_factory=list[str])
    modules: list[str] = field(default_factory=list[str])


Fulfil = Callable[[Sequence[str]], Awaitable[PackageReply]]


async def install_for(
    environment: Environment, layer: Path, open_uv: OpenUv, room: InstallRoom, requirements: Sequence[str]
) -> PackageReply:
    """Install what a session's code asks for into the session's layer."""
    changes: list[PackageChange] = []
    outcomes = await install(environment, layer, requirements, on_change=changes.append, open_uv=open_uv, room=room)
    there = [outcome.name for outcome in outcomes if outcome.error is None]
    found = await asyncio.to_thread(modules_of, environment, layer, there)
    return PackageReply(
        lines=[*map(_success_line, (each for each in outcomes if each.error is None)), *restart_lines(changes)],
        errors=[f"{outcome.name}: {outcome.error}" for outcome in outcomes if outcome.error is not None],
        modules=[module for modules in found.values() for module in modules],
    )


def _success_line(outcome: InstallOutcome) -> str:
    note = f" ({outcome.note})" if outcome.note else ""
    return f"{outcome.name} {outcome.installed_version} is installed{note}"


def restart_lines(changes: Sequence[PackageChange]) -> list[str]:
    """Return a line for each package that had another version before, because code may have imported that one."""
    return [
        f"{change.name} changed from {change.before} to {change.after}: restart needed if it was imported before"
        for change in changes
        if change.before is not None and change.before != change.after
    ]


@asynccontextmanager
async def open_package_server(
    folder: Path, name: str, *, session_id: str, fulfil: Fulfil, socket: SessionSocket | None = None
) -> AsyncGenerator[None]:
    """Serve a session on a socket of that name in a folder it can reach, one installation at a time."""
    turn = asyncio.Lock()

    async def answer(stream: RequestStream) -> PackageReply:
        if stream.is_one_too_many:
            return PackageReply(errors=[f"{_MAX_WAITING} requests for packages are waiting already"])
        try:
            request = await stream.receive(PackageRequest.model_validate_json)
        except ipc.Malformed:
            return PackageReply(errors=["the request cannot be read: name at most 100 packages"])
        count, ids = len(request.requirements), {"session_id": session_id}
        log.info("session %s asks for %d packages", session_id, count, extra=ids)
        try:
            async with turn:
                return await fulfil(request.requirements)
        except BelljarError as error:
            return PackageReply(errors=[str(error)])

    async with serving_requests(folder, name, answer, most=_MAX_WAITING, socket=socket):
        yield
