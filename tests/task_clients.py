"""A client that follows tasks by the letter of the extension `io.modelcontextprotocol/tasks`."""

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Literal

import anyio
from mcp import Client
from mcp.client import ClientExtension
from mcp.client.extension import ClaimContext, ResultClaim
from mcp.client.session import ClientSession
from mcp.types import CallToolResult, Request, Result
from pydantic import TypeAdapter

TASKS = "io.modelcontextprotocol/tasks"
ANY = TypeAdapter(dict[str, Any])
TERMINAL = ("completed", "cancelled", "failed")
Answerer = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


class TaskRequest(Request[dict[str, Any], str]):
    """A request of the extension; over HTTP its header `Mcp-Name` is the task's id."""

    name_param: ClassVar[str | None] = "taskId"


class CreatedTask(Result):
    """The answer to a call that goes on as a task."""

    result_type: Literal["task"] = "task"
    task_id: str
    status: str
    status_message: str | None = None
    created_at: str
    last_updated_at: str
    ttl_ms: int | None
    poll_interval_ms: int | None = None


async def ask(session: ClientSession, method: str, task_id: str, **params: Any) -> dict[str, Any]:
    """Send a request of the extension; return its result as it came."""
    return await session.send_request(TaskRequest(method=method, params={"taskId": task_id, **params}), ANY)


async def create(client: Client, tool: str, **arguments: Any) -> CreatedTask:
    """Make a call that must become a task."""
    answer = await client.session.call_tool(tool, arguments, allow_claimed=True)
    assert isinstance(answer, CreatedTask), answer
    return answer


async def settled(
    session: ClientSession, task_id: str, answer: Answerer | None = None, pause_s: float = 0.02
) -> dict[str, Any]:
    """Look until the task has ended, more often than the server suggests; questions are answered once each."""
    seen: set[str] = set()
    while (task := await ask(session, "tasks/get", task_id))["status"] not in TERMINAL:
        for key, request in task.get("inputRequests", {}).items():
            if answer is not None and key not in seen:
                seen.add(key)
                await ask(session, "tasks/update", task_id, inputResponses={key: await answer(key, request)})
        await anyio.sleep(min(pause_s, task["pollIntervalMs"] / 1000))
    return task


class TaskFollower(ClientExtension):
    """Makes a `Client` follow tasks by itself, so that its caller sees only results."""

    identifier = TASKS

    def __init__(self, answer: Answerer | None = None, pause_s: float = 0.02) -> None:
        self.created: list[CreatedTask] = []
        self._pause_s = pause_s
        self._answer = answer

    def claims(self) -> list[ResultClaim[Any]]:
        return [ResultClaim(result_type="task", model=CreatedTask, resolve=self._resolve)]

    async def _resolve(self, task: CreatedTask, context: ClaimContext) -> CallToolResult:
        self.created.append(task)
        ended = await settled(context.session, task.task_id, self._answer, self._pause_s)
        assert ended["status"] == "completed", ended
        return CallToolResult.model_validate(ended["result"])
