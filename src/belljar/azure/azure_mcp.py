"""The `azure-mcp` surface: the four tools of the Azure code interpreter's MCP server, over belljar's own sessions.

A client need not name a session: its current one is used, which `new_session` changes. Each connection has a current
session of its own; where the protocol has no connections, each principal. Answers name the session's id, so that a
client can pass it back. A client may also choose a name of its own, as with Azure: its first use makes the session.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Any, Final

from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult, ContentBlock, TextContent
from pydantic import Field

from belljar.errors import BelljarError, SessionNotFound
from belljar.executions.cell import make_cell
from belljar.files.file_types import file_reference
from belljar.files.transfer import save_download
from belljar.files.workspace import Workspace
from belljar.http.auth import current_principal
from belljar.journal.journal import has_id_form
from belljar.mcp.content import media_blocks
from belljar.mcp.execution_wait import can_ask, follow, stopping_when_cancelled
from belljar.mcp.file_tools import EMBEDDED_LIMIT_BYTES, embedded
from belljar.mcp.tools import CHANGES, ENDS, READS, Answer, Ctx, add_tools, connection_of, refusals_as_results
from belljar.models import ExecutionResult
from belljar.outputs.spoofed_notices import disarmed
from belljar.runtime import Runtime
from belljar.sandboxes.data_path import container_note
from belljar.sessions.session import Session
from belljar.settings import Settings
from belljar.settings.azure import AZURE, check_pool_names, pool_endpoint

LISTED: Final = 2_000
MAX_CONNECTIONS: Final = 10_000

OptionalSession = Annotated[
    str, Field(description="Session to use, or a name for a new one; empty for the current one")
]


def pool_environment(settings: Settings) -> str:
    """Return the environment of new sessions: Azure's pool where the settings name one, else the setting's own."""
    check_pool_names(settings)
    return AZURE if pool_endpoint(settings) else ""


class AzureSurface:
    """The tools over one runtime. The constructor checks the variables that name a pool."""

    def __init__(self, runtime: Runtime) -> None:
        self._settings = runtime.settings
        self._sessions = runtime.sessions
        self._identified = runtime.identified
        self._environment = pool_environment(runtime.settings)
        if self._environment:
            runtime.starter.environments.check(self._environment)
        self._current: OrderedDict[tuple[str, str], str] = OrderedDict()
        """The current session of each connection, the one that was chosen last at the end."""

    def register(self, server: MCPServer[Any]) -> None:
        """Add the tools to a server."""
        add_tools(
            server,
            (self.new_session, CHANGES),
            (self.exec, ENDS),
            (self.list_files, READS),
            (self.download_file, CHANGES),
        )

    @refusals_as_results
    async def new_session(
        self, ctx: Ctx, reason: Annotated[str, Field(max_length=200, description="What it is for")] = ""
    ) -> Answer:
        """Start a new session, which becomes the current one: for a task that needs none of the old variables."""
        session = await self._create(ctx, reason)
        return _text(f"New session: {session.id}")

    @refusals_as_results
    async def exec(
        self,
        ctx: Ctx,
        code: Annotated[str, Field(description="Python; save files to /mnt/data")],
        session_id: OptionalSession = "",
    ) -> Answer:
        """Run Python. Variables, imports and files stay for the next call; `No output` means that it ran silently."""
        cell = make_cell(self._settings, code, allow_input=can_ask(ctx), keeps_uris=True)
        session = await self._session(ctx, session_id)
        name = session_id or session.id
        with _naming(name):
            execution = session.submit(cell)
        async with stopping_when_cancelled(ctx, self._settings.interrupt_on, execution.interrupt):
            while not execution.is_finished:
                if (question := await follow(execution, ctx, 3_600)) is not None:
                    return question
        result = execution.result()
        reader = self._sessions.executions.display_reader(session.id)
        pictures = dict(media_blocks(result, reader, self._settings.image_budget_bytes))
        content: list[ContentBlock] = [TextContent(type="text", text=_result_text(result, execution.notices(), name))]
        return CallToolResult(
            content=[*content, *pictures.values()],
            is_error=not result.success and (self._settings.failures_are_errors or result.status == "rejected"),
        )

    @refusals_as_results
    async def list_files(self, ctx: Ctx, session_id: OptionalSession = "") -> Answer:
        """The files in /mnt/data, one path a line."""
        session = await self._session(ctx, session_id)
        name = session_id or session.id
        with _naming(name):
            page = await asyncio.to_thread(Workspace(session.folders.workspace).list_page, "", "", LISTED)
        lines = [entry.name for entry in page.entries]
        if page.rest or not page.is_complete:
            lines.append(f"[{page.rest or 'perhaps'} more: list them with code, like os.listdir('/mnt/data')]")
        return _text("\n".join([*(lines or ["No files"]), _named(name)]))

    @refusals_as_results
    async def download_file(
        self,
        ctx: Ctx,
        file_name: Annotated[str, Field(description="Path in /mnt/data")],
        session_id: OptionalSession = "",
    ) -> Answer:
        """Save a file of the session on the user's machine."""
        session = await self._session(ctx, session_id)
        name = session_id or session.id
        with _naming(name):
            content = await asyncio.to_thread(session.workspace.read, file_name, self._settings.max_upload_bytes)
            file = file_reference(session.id, "/".join(session.workspace.check_name(file_name)), len(content))
            folder = self._settings.download_directory
            saved = await asyncio.to_thread(save_download, folder, session.id, file.name, content)
        place = f"{saved}{container_note(saved)}"
        text = f"{file.name} ({file.mime_type}, {file.size:,} bytes), saved to {place}\n{_named(name)}"
        blocks = [embedded(file, content)] if len(content) <= EMBEDDED_LIMIT_BYTES else []
        return CallToolResult(content=[TextContent(type="text", text=text), *blocks])

    # The current session

    async def _session(self, ctx: Ctx, session_id: str) -> Session:
        """Return the session that a call means; the first call of a connection makes one."""
        connection = connection_of(ctx)
        current = session_id or self._current.get(connection, "")
        if not current:
            return await self._create(ctx, "")
        if not has_id_form(current):
            return await self._identified.reach(current, current_principal(), environment=self._environment)
        try:
            session = await self._sessions.reach(current, current_principal())
        except SessionNotFound as error:
            if not session_id:
                # Told once; the next call without an id starts afresh.
                self._current.pop(connection, None)
            hint = "Call new_session, then make its variables and files again"
            raise SessionNotFound(error.message, hint=hint) from None
        return session

    async def _create(self, ctx: Ctx, reason: str) -> Session:
        principal = current_principal()
        await self._sessions.make_room(principal)
        session = self._sessions.create(principal, environment=self._environment, reason=reason)
        connection = connection_of(ctx)
        self._current.pop(connection, None)
        self._current[connection] = session.id
        while len(self._current) > MAX_CONNECTIONS:
            self._current.popitem(last=False)
        return session


def _result_text(result: ExecutionResult, notices: str, session: str) -> str:
    """Return a result as one text: stdout first, the rest under names."""
    traceback = "\n".join(result.traceback)
    error = traceback if result.error is None or result.error in traceback else f"{traceback}\n{result.error}"
    parts = {"stderr": result.stderr, "result": result.result or "", "error": error}
    named = [f"{name}:\n{text.strip(chr(10))}" for name, text in parts.items() if text.strip()]
    said = disarmed("\n".join([*filter(None, [result.stdout.rstrip("\n")]), *named]))
    note = f"note:\n{notices.strip(chr(10))}" if notices.strip() else ""
    body = "\n".join(filter(None, [said, note]))
    return f"{body or 'No output'}\n{_named(session)}"


@contextmanager
def _naming(session: str) -> Generator[None]:
    """Name the session in what is refused, because a client learns its current session from answers alone."""
    try:
        yield
    except BelljarError as error:
        error.hint = "\n".join(filter(None, [error.hint, _named(session)]))
        raise


def _named(session: str) -> str:
    return f"[session_id: {session}]"


def _text(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)])
