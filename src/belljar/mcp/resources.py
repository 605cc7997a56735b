"""Resource templates of the interpreter surface: files, displays, whole outputs, the notebook of a session.

Resources are reached by template only and never listed, because some clients read every listed resource at every turn.
"""

import asyncio
from typing import Any
from urllib.parse import unquote

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError

from belljar.errors import BelljarError, UsageError
from belljar.files.file_types import decoded, mime_type_of
from belljar.http.auth import current_principal
from belljar.sessions.registry import Registry

READ_LIMIT_BYTES = 64 * 1024 * 1024
NOTEBOOK = "application/x-ipynb+json"
OF_ANY_TYPE = ("file", "display", "skill")
"""Templates whose resources each have their own media type."""


class InterpreterResources:
    """The resources of the caller's sessions and executions."""

    def __init__(self, sessions: Registry) -> None:
        self._sessions = sessions

    def register(self, server: MCPServer[Any]) -> None:
        """Add every template to a server."""
        server.resource("kernel://{session_id}/{+path}", name="file", description="A file of a session")(self.file)
        self.register_displays(server)
        server.resource(
            "execution://{execution_id}/output{?offset,limit}",
            name="output",
            description="The whole text output of an execution; offset and limit are in characters",
            mime_type="text/plain",
        )(self.output)
        server.resource(
            "session://{session_id}/notebook",
            name="notebook",
            description="Everything a session ran, as an .ipynb",
            mime_type=NOTEBOOK,
        )(self.notebook)

    def register_displays(self, server: MCPServer[Any]) -> None:
        """Add the template of figures and pages to a server."""
        server.resource(
            "execution://{execution_id}/displays/{name}", name="display", description="A figure or page a cell showed"
        )(self.display)

    async def file(self, session_id: str, path: str) -> str | bytes:
        """Return a file's content: text for text, JSON and XML, else bytes."""
        try:
            workspace = self._sessions.workspace(session_id, current_principal())
            content = await asyncio.to_thread(workspace.read, path, READ_LIMIT_BYTES)
        except BelljarError as error:
            raise as_resource_error(error) from error
        return decoded(content, mime_type_of(path))

    async def display(self, execution_id: str, name: str) -> str | bytes:
        """Return one of an execution's displays."""
        try:
            content = self._sessions.executions.display(execution_id, name, current_principal())
        except BelljarError as error:
            raise as_resource_error(error) from error
        return decoded(content, mime_type_of(name))

    async def output(self, execution_id: str, offset: int = 0, limit: int = 0) -> str:
        """Return all stream text, in order; if it is too long for one answer, its last line says where it goes on."""
        try:
            executions = self._sessions.executions
            return await executions.whole_output(execution_id, current_principal(), max(offset, 0), max(limit, 0))
        except BelljarError as error:
            raise as_resource_error(error) from error

    async def notebook(self, session_id: str) -> str:
        """Return the session as a notebook."""
        try:
            self._sessions.workspace(session_id, current_principal())
            return await self._sessions.executions.notebook(session_id)
        except BelljarError as error:
            raise as_resource_error(error) from error


def resource_mime_type(uri: str, registered: str) -> str:
    """Return the media type of a URI's resource: a template has one type for all, but files have their own."""
    if uri.startswith(("kernel://", "skill://")) or "/displays/" in uri:
        return mime_type_of(unquote(uri.rsplit("/", 1)[-1]))
    return registered


def as_resource_error(error: BelljarError) -> ResourceError:
    """Return an error of ours as the SDK's, which tells what is unknown from what failed."""
    kind = ResourceNotFoundError if isinstance(error, UsageError) else ResourceError
    return kind(f"{error.code}: {error}")
