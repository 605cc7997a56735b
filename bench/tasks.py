"""A cell of 10 s, seen by a client that follows tasks and by one that polls: tool results that reach the model."""

import asyncio
import time
from typing import Any, ClassVar, Literal

from mcp import Client
from mcp.client import ClientExtension
from mcp.client.extension import ClaimContext, ResultClaim
from mcp.types import CallToolResult, Request, Result

from bench.figures import Figure
from bench.servers import belljar_command, new_session, open_http
from bench.stage import Stage

CELL_S = 10
WAIT_S = 2
"""How long each call of the polling client waits: as long as a call waits before it becomes a task."""
MODERN = "2026-07-28"


class _TaskRequest(Request[dict[str, Any], str]):
    name_param: ClassVar[str | None] = "taskId"


class _CreatedTask(Result):
    result_type: Literal["task"] = "task"
    task_id: str
    poll_interval_ms: int


class _Task(Result):
    status: str
    poll_interval_ms: int
    result: dict[str, Any] | None = None


class _Follower(ClientExtension):
    """Follows tasks at the pace that the server suggests."""

    identifier = "io.modelcontextprotocol/tasks"

    def claims(self) -> list[ResultClaim[Any]]:
        return [ResultClaim(result_type="task", model=_CreatedTask, resolve=self._resolve)]

    async def _resolve(self, created: _CreatedTask, context: ClaimContext) -> CallToolResult:
        request, pause_ms = _TaskRequest(method="tasks/get", params={"taskId": created.task_id}), 0
        while True:
            await asyncio.sleep((pause_ms or created.poll_interval_ms) / 1000)
            task = await context.session.send_request(request, _Task)
            if task.status == "completed":
                return CallToolResult.model_validate(task.result)
            pause_ms = task.poll_interval_ms


async def measure(stage: Stage) -> list[Figure]:
    """Both clients against one server, a session each."""
    async with open_http(stage, belljar_command()) as url:
        async with Client(url, mode=MODERN) as polling:
            polls, polled_chars, polled_s = await _seen(polling)
        async with Client(url, mode=MODERN, extensions=[_Follower()]) as following:
            results, chars, took_s = await _seen(following)
    note = f"a cell of {CELL_S} s; peer: get_execution with wait_s={WAIT_S}"
    return [
        Figure("tasks", "tool results that reach the model", "results", results, polls, 1, bound="value", note=note),
        Figure("tasks", "characters of text in them", "chars", chars, polled_chars),
        Figure("tasks", "until the client has the result", "s", took_s, polled_s),
    ]


async def _seen(client: Client) -> tuple[int, int, float]:
    """Return how many results a model would read until the cell has ended, their text, and how long that took."""
    session_id = await new_session(client)
    began = time.perf_counter()
    code = f"import time\nfor i in range({CELL_S}):\n    print('part', i); time.sleep(1)"
    answer = await client.call_tool("execute_code", {"code": code, "session_id": session_id, "wait_s": WAIT_S})
    results, chars = 1, _chars(answer)
    fields: dict[str, Any] = answer.structured_content or {}
    while fields["status"] == "running":
        arguments = {"execution_id": fields["execution_id"], "since": fields["sequence"], "wait_s": WAIT_S}
        answer = await client.call_tool("get_execution", arguments)
        results, chars = results + 1, chars + _chars(answer)
        fields = answer.structured_content or {}
    return results, chars, time.perf_counter() - began


def _chars(answer: CallToolResult) -> int:
    return sum(len(block.text) for block in answer.content if block.type == "text")
