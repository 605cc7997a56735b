"""The tool `try_code`: alternatives side by side from one state, and the session goes on as the one that is kept.

Off unless the setting `try_code` is on, because a tool costs every client tokens. It is a map whose forks
are kept until one is chosen.
"""

from contextlib import aclosing
from typing import Annotated, Any, Final, Literal

from mcp.server.mcpserver import MCPServer
from pydantic import Field, StrictInt

from belljar.engine.contract import Engine, MapOptions
from belljar.engine.models import Piece
from belljar.errors import InvalidArgument, SessionNotFound
from belljar.mcp.content import model_blocks
from belljar.mcp.tools import CHANGES, Answer, SessionId, add_tools, current_client, refusals_as_results
from belljar.models import MappedResult, Model
from belljar.toolbox.server_text import shortened

MAX_ALTERNATIVES: Final = 16
_SHOWN_CHARS: Final = 200


class Alternative(Model):
    """What one alternative did; `number` counts from 1."""

    number: int
    status: str
    value: str
    wall_s: float
    peak_memory_mb: float
    execution_id: str


class Tried(Model):
    """Answer of `try_code`."""

    alternatives: list[Alternative]
    kept: int | None
    """The number of the alternative that is kept."""
    session_id: str
    """The session to go on with."""


class TryTool:
    """The tool, over one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def register(self, server: MCPServer[Any]) -> None:
        """Add the tool to a server."""
        add_tools(server, (self.try_code, CHANGES))

    @refusals_as_results
    async def try_code(
        self,
        session_id: SessionId,
        alternatives: list[str],
        keep: Annotated[
            Literal["first_ok", "none"] | StrictInt, Field(description="Or the number of one, from 1 on")
        ] = "first_ok",
        timeout_s: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None,
    ) -> Answer:
        """Run alternatives side by side, each in a copy of a session as it is now; go on in the copy that is kept."""
        count, client = len(alternatives), current_client()
        if not 1 <= count <= MAX_ALTERNATIVES:
            raise InvalidArgument(f"there are {count:,} alternatives", hint=f"Pass 1 to {MAX_ALTERNATIVES}")
        if isinstance(keep, int) and not 1 <= keep <= count:
            raise InvalidArgument(f"keep is {keep}", hint=f"Pass a number from 1 to {count}, first_ok or none")
        pieces = [Piece(code=code) for code in alternatives]
        told: dict[int, MappedResult] = {}
        kept: MappedResult | None = None
        try:
            mapped = self._engine.map(
                client, pieces, session_id, MapOptions(at_once=count, timeout_s=timeout_s, keeps=True)
            )
            async with aclosing(mapped) as results:
                async for result in results:
                    told[result.index] = result
            kept = next((told[index] for index in range(count) if _is_kept(told[index], keep)), None)
        finally:
            for result in told.values():
                if result.session_id and result is not kept:
                    await self._end(result.session_id)
        tried = Tried(
            alternatives=[_alternative(told[index]) for index in range(count)],
            kept=kept.index + 1 if kept is not None else None,
            session_id=kept.session_id if kept is not None else session_id,
        )
        return model_blocks(tried, _text(tried, session_id))

    async def _end(self, session_id: str) -> None:
        try:
            await self._engine.end(current_client(), session_id)
        except SessionNotFound:
            return  # it was ended meanwhile


def _is_kept(result: MappedResult, keep: str | int) -> bool:
    if not result.session_id:
        return False
    return result.success if keep == "first_ok" else result.index + 1 == keep


def _alternative(result: MappedResult) -> Alternative:
    printed = (result.stdout.strip() or result.stderr.strip()).rpartition("\n")[2]
    value = result.error or result.result or printed
    return Alternative(
        number=result.index + 1,
        status=result.status,
        value=shortened(" ".join(value.split()), _SHOWN_CHARS),
        wall_s=round(result.usage.wall_s, 2),
        peak_memory_mb=round(result.usage.peak_memory_mb),
        execution_id=result.execution_id if result.session_id else "",
    )


def _text(tried: Tried, origin: str) -> str:
    lines = [
        f"{one.number}. {one.status}, {one.wall_s:g} s, {one.peak_memory_mb:g} MB"
        + (f": {one.value}" if one.value else "")
        for one in tried.alternatives
    ]
    if tried.kept is None:
        return "\n".join([*lines, f"None is kept; session {origin} is as it was."])
    whole = tried.alternatives[tried.kept - 1].execution_id
    return "\n".join(
        [
            f"session_id: {tried.session_id}",
            *lines,
            f"It is {origin} after alternative {tried.kept}; {origin} itself is as it was. All output: {whole}.",
        ]
    )
