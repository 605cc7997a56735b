"""Fixtures for the scenarios of tasks: each is a real cell, or a real run of a workflow, so that the tasks are ours."""

import json
from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.server import require_client_extension
from mcp.types import CallToolResult, InputRequiredResult, TextContent

from belljar.executions.cell import make_cell
from belljar.mcp.execution_wait import leave_as_task
from belljar.mcp.interpreter import InterpreterSurface
from belljar.mcp.tasks_extension import IDENTIFIER
from belljar.runtime import Runtime
from belljar.workflows.tools import WorkflowTools

Ctx = Context[Any, Any]
Answer = CallToolResult | InputRequiredResult
FIELDS = {"name": {"type": "string"}, "confirm": {"type": "boolean"}}
BOTH = {"type": "object", "properties": FIELDS, "required": [*FIELDS]}
NAME, CONFIRM = ({"type": "object", "properties": {name: FIELDS[name]}, "required": [name]} for name in FIELDS)
BRANCHES = [[{"name": name, "type": "form", "config": {"message": name, "fields": BOTH}}] for name in ("one", "two")]
TWO_FORMS = {"name": "two", "steps": [{"name": "both", "type": "parallel", "config": {"branches": BRANCHES}}]}


def add_tasks(server: MCPServer[Any], runtime: Runtime) -> None:
    for tool in TaskFixtures(runtime).tools():
        server.add_tool(tool, structured_output=False)


class TaskFixtures:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._interpreter = InterpreterSurface(runtime)
        self._workflows = WorkflowTools(runtime)

    def tools(self) -> list[Any]:
        return [
            self.greet,
            self.slow_compute,
            self.failing_job,
            self.protocol_error_job,
            self.confirm_delete,
            self.multi_input,
            self.test_tool_with_task,
        ]

    async def greet(self, name: str) -> CallToolResult:
        """Says hello at once."""
        return CallToolResult(content=[TextContent(type="text", text=f"Hello, {name}!")])

    async def slow_compute(self, ctx: Ctx, seconds: float = 0, label: str = "") -> Answer:
        """Sleeps in a cell."""
        return await self._cell(ctx, f"import time; time.sleep({seconds!r}); {label!r}")

    async def failing_job(self, ctx: Ctx) -> Answer:
        """Raises in a cell; only for clients that follow tasks."""
        require_client_extension(ctx.request_context, IDENTIFIER)
        return await self._cell(ctx, "import time; time.sleep(1); 1 / 0")

    async def protocol_error_job(self) -> CallToolResult:
        """Fails by a fault of belljar itself, which is made here."""
        session = self._runtime.sessions.create("local")

        async def fail() -> Any:
            raise RuntimeError("made by the fixture")

        session.session_kernel.ensure_started = fail
        execution = session.submit(make_cell(self._runtime.settings, "1"))
        self._runtime.sessions.journal.commit()
        leave_as_task(execution.id)
        return CallToolResult(content=[])

    async def confirm_delete(self, ctx: Ctx, filename: str = "") -> Answer:
        """Asks in a cell."""
        return await self._cell(ctx, f"import forms; forms.ask({CONFIRM!r}, message={f'Delete {filename}?'!r})")

    async def multi_input(self, ctx: Ctx) -> Answer:
        """Asks two things at once, in a workflow."""
        return await self._workflows.run_workflow(ctx, definition=json.dumps(TWO_FORMS), wait_s=0)

    async def test_tool_with_task(self, ctx: Ctx) -> Answer:
        """Asks at once and then takes long."""
        code = f"import forms, time\nname = forms.ask({NAME!r}, message='Who?')['name']\ntime.sleep(3)\nname"
        return await self._interpreter.execute_code(ctx, code, wait_s=60)

    async def _cell(self, ctx: Ctx, code: str) -> Answer:
        capabilities = ctx.client_capabilities
        follows = capabilities is not None and IDENTIFIER in (capabilities.extensions or {})
        return await self._interpreter.execute_code(ctx, code, wait_s=0 if follows else 60)
