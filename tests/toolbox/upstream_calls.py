"""Calling upstream servers in tests: somebody who answers questions, and one who must not be asked."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from belljar.questions.models import Ask, Question, QuestionReply
from belljar.toolbox.base import ToolAnswer
from belljar.toolbox.connection import UpstreamLimits
from belljar.toolbox.server_config import ServerConfig
from belljar.toolbox.upstreams import UpstreamConnections, open_upstreams
from waiting import until


class Person:
    """Answers every question in the same way, and remembers them."""

    def __init__(self, action: Any = "accept", **values: Any) -> None:
        self.asked: list[Question] = []
        self._reply = QuestionReply(action, values)

    async def ask(self, question: Question) -> QuestionReply:
        self.asked.append(question)
        return self._reply


async def nobody(question: Question) -> QuestionReply:
    raise AssertionError(f"nobody was to be asked: {question}")


@asynccontextmanager
async def connected(*servers: ServerConfig, **limits: Any) -> AsyncGenerator[UpstreamConnections]:
    async with open_upstreams({server.name: server for server in servers}, UpstreamLimits(**limits)) as upstreams:
        yield upstreams


async def call(
    upstreams: UpstreamConnections,
    tool: str,
    arguments: dict[str, Any] | None = None,
    *,
    server: str = "awkward",
    ask: Ask = nobody,
    progress: list[tuple[float, float | None, str]] | None = None,
) -> ToolAnswer:
    seen = progress if progress is not None else []
    return await upstreams.call(server, tool, arguments or {}, on_progress=lambda *said: seen.append(said), ask=ask)


async def said(
    upstreams: UpstreamConnections, tool: str, arguments: dict[str, Any] | None = None, **chosen: Any
) -> str:
    """The text of an answer that is no error."""
    answer = await call(upstreams, tool, arguments, **chosen)
    assert not answer.is_error, answer
    return "".join(block.text for block in answer.blocks)


async def told(
    upstreams: UpstreamConnections, tool: str, arguments: dict[str, Any] | None = None, **chosen: Any
) -> Any:
    """The JSON in the text of an answer."""
    return json.loads(await said(upstreams, tool, arguments, **chosen))


class Held:
    """The arguments of a `slow` call, which says where it is by files."""

    def __init__(self, folder: Path) -> None:
        self._started, self._until, self._cancelled = (folder / name for name in ("started", "until", "cancelled"))

    @property
    def arguments(self) -> dict[str, str]:
        return {"started": str(self._started), "until": str(self._until), "cancelled": str(self._cancelled)}

    async def started(self) -> None:
        await until(self._started.exists)

    async def cancelled(self) -> None:
        await until(self._cancelled.exists)

    def let_go(self) -> None:
        self._until.touch()
