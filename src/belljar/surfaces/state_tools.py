"""Tools over a session's states: forking a session, and rewinding it to an earlier state."""

from typing import Annotated, Any

from mcp.server.mcpserver import MCPServer
from pydantic import Field, StrictInt

from belljar.executions.outcome import came_back
from belljar.models import Rewinding, SessionFork
from belljar.sessions.registry import Registry
from belljar.surfaces.auth import current_principal
from belljar.surfaces.content import model_blocks
from belljar.surfaces.tools import CHANGES, ENDS, Answer, SessionId, add_tools, refusals_as_results

SHOWN_NAMES = 100
To = Annotated[
    StrictInt | Annotated[str, Field(max_length=64)],
    Field(description="How many of the last to undo, or execution_id of the first"),
]
At = Annotated[
    StrictInt | Annotated[str, Field(max_length=64)],
    Field(description="Its state so many executions ago, or before this execution_id; else now"),
]


class StateTools:
    """The state tools, over the sessions of one runtime."""

    def __init__(self, sessions: Registry) -> None:
        self._sessions = sessions

    def register(self, server: MCPServer[Any]) -> None:
        """Add the tools to a server."""
        add_tools(server, (self.fork_session, CHANGES), (self.rewind_session, ENDS))

    @refusals_as_results
    async def fork_session(
        self,
        session_id: SessionId,
        at: At = "",
        reseed: Annotated[bool, Field(description="Other random numbers than the original's")] = False,
    ) -> Answer:
        """Copy a session in milliseconds, variables, imports and files, to try two ways from one state.

        Threads, processes and sockets do not come along.
        """
        session, fork = await self._sessions.fork(session_id, current_principal(), at=at, reseed=reseed)
        fork.session_info = session.lease.notice()
        return model_blocks(fork, _fork_text(fork, at))

    @refusals_as_results
    async def rewind_session(self, session_id: SessionId, to: To) -> Answer:
        """Undo executions: variables and files become what they were before. The latest few states are kept."""
        session = await self._sessions.reach(session_id, current_principal())
        rewinding = await session.rewind(to)
        return model_blocks(rewinding, _rewind_text(rewinding))


def _fork_text(fork: SessionFork, at: str | int) -> str:
    is_count = isinstance(at, int) or at.isdecimal()
    ago = "1 execution ago" if str(at) == "1" else f"{at} executions ago"
    when = f" as it was {ago}" if is_count else f" as it was before execution {at}" if at else ""
    lines = [
        f"session_id: {fork.session_id}",
        f"Forked from session {fork.origin}{when}; files are copied. Variables: {_listed(fork.variables)}.",
    ]
    if fork.lost:
        lines.append(f"Did not come along: {_listed(fork.lost)}.")
    if fork.session_info is not None:
        lines.append(fork.session_info.instructions)
    return "\n".join(lines)


def _rewind_text(rewinding: Rewinding) -> str:
    count = len(rewinding.undone)
    lines = [
        f"Session {rewinding.session_id} is as it was before execution {rewinding.to}: "
        f"{came_back(rewinding.lost).removesuffix(',')}.",
        f"{count} execution{'s' if count > 1 else ''} undone: {', '.join(rewinding.undone)}.",
    ]
    if rewinding.lost:
        lines.append(f"Did not come back: {_listed(rewinding.lost)}.")
    return "\n".join(lines)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"{', '.join(names[:SHOWN_NAMES]) or 'none'}{more}"
