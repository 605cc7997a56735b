"""The toolbox surface: search the tools of other MCP servers, and run Python that calls them.

It costs a client a few hundred tokens for any number of tools, because tools are searched and not listed. Beside the
interpreter surface it adds the search alone.
"""

from typing import Annotated, Any

from mcp.server.mcpserver import MCPServer
from pydantic import Field, JsonValue

from belljar.errors import InvalidArgument
from belljar.http.auth import current_principal
from belljar.mcp.content import model_blocks
from belljar.mcp.interpreter import InterpreterSurface
from belljar.mcp.tools import ENDS, READS, Answer, Ctx, OptionalSession, add_tools, refusals_as_results
from belljar.models import Model
from belljar.products import products
from belljar.runtime import Runtime
from belljar.toolbox.code_generation import Detail

TOOLBOX_INSTRUCTIONS = (
    "Tools of other servers are Python functions in sealed, stateful sessions. Find them with search_tools, call them "
    "in execute_code; results stay in variables, print only what you need."
)
BESIDE_INSTRUCTIONS = "Tools of other servers are Python functions there; search_tools finds them."


class FoundTools(Model):
    """Answer of `search_tools`."""

    tools: list[dict[str, JsonValue]]
    connecting: list[str] = Field(default_factory=list[str])
    unreachable: list[str] = Field(default_factory=list[str])


class ToolboxSurface:
    """The tools of the surface, over one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._toolbox = runtime.toolbox
        self._interpreter = InterpreterSurface(runtime)

    def register(self, server: MCPServer[Any], *, has_interpreter: bool) -> None:
        """Add the tools to a server, except those that it has already."""
        if not has_interpreter:
            add_tools(server, (self.execute_code, ENDS), (self.get_execution, READS))
            for product in products():
                product.add_tools(server, self._runtime)
        add_tools(server, (self.search_tools, READS))

    @refusals_as_results
    async def search_tools(
        self,
        query: Annotated[str, Field(max_length=1_000)],
        detail: Detail = "signatures",
        limit: Annotated[int, Field(ge=1, le=50)] = 5,
    ) -> Answer:
        """Find tools by what they do; import them in execute_code as `from servers.SERVER import TOOL`."""
        if self._toolbox is None:
            raise InvalidArgument("no MCP servers are configured", hint="Start belljar with --mcp-config FILE")
        text, fields = await self._toolbox.search(query, owner=current_principal(), detail=detail, limit=limit)
        return model_blocks(FoundTools.model_validate(fields), text)

    async def execute_code(self, ctx: Ctx, code: str, session_id: OptionalSession = "") -> Answer:
        """Run Python; variables stay for the next call with the same session_id.

        `from servers.SERVER import TOOL`, then `TOOL(...)` or `await TOOL.aio(...)`; `ls servers/` lists what there is.
        """
        return await self._interpreter.execute_code(ctx, code, session_id)

    async def get_execution(self, ctx: Ctx, execution_id: str, wait_s: float = 45, since: int = 0) -> Answer:
        """The rest of an execution that was still running."""
        return await self._interpreter.get_execution(
            ctx, execution_id, since=max(since, 0), wait_s=min(max(wait_s, 0), 300)
        )
