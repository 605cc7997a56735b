"""Tools that list, upload and download the files of a session."""

import asyncio
from base64 import b64encode
from pathlib import Path
from typing import Annotated, Any

from mcp.server.mcpserver import MCPServer
from mcp.types import BlobResourceContents, CallToolResult, EmbeddedResource, TextContent, TextResourceContents
from pydantic import Field

from belljar.errors import SessionNotFound
from belljar.files.file_types import decoded, file_reference
from belljar.files.transfer import decode_upload, save_download
from belljar.files.workspace import Workspace
from belljar.http.auth import current_principal
from belljar.mcp.content import error_blocks, model_blocks
from belljar.mcp.tools import (
    CHANGES,
    READS,
    REPLACES,
    Answer,
    FileName,
    SessionId,
    add_tools,
    idempotent,
    note_refusal,
    refusals_as_results,
)
from belljar.models import FileReference, Model
from belljar.outputs.spoofed_notices import disarmed
from belljar.provisioning.host_folders import HostFolders
from belljar.sandboxes.data_path import container_note
from belljar.sessions.registry import Registry
from belljar.settings import Settings

EMBEDDED_LIMIT_BYTES = 32 * 1024 * 1024
SHOWN_FILES = 500
LISTED_FILES = 2_000
LISTED_BYTES = 300_000


class SessionFiles(Model):
    """Answer of `list_session_files`."""

    session_id: str
    files: list[FileReference]
    is_complete: bool
    """Whether these are the last."""
    next_after: str | None = None
    """What to pass as `after` for those that follow."""


class FileTools:
    """The file tools, over the caller's sessions."""

    def __init__(self, sessions: Registry, settings: Settings, host_folders: HostFolders) -> None:
        self._sessions = sessions
        self._host_folders = host_folders
        self._settings = settings

    def register(self, server: MCPServer[Any]) -> None:
        """Add the tools to a server."""
        add_tools(
            server,
            (self.list_session_files, READS),
            (self.upload_file, idempotent(REPLACES)),
            (self.download_file, CHANGES),
        )

    @refusals_as_results
    async def list_session_files(
        self,
        session_id: SessionId,
        path: Annotated[str, Field(description="Folder to list")] = "",
        after: Annotated[str, Field(description="Name to go on after")] = "",
    ) -> Answer:
        """Files in the session folder, sub-folders included."""
        try:
            folders, _ = self._sessions.folders_and_environment(session_id, current_principal())
        except SessionNotFound as error:
            note_refusal(error)
            return error_blocks(error, {"session_id": session_id[:64], "files": []})
        listing = await asyncio.to_thread(Workspace(folders.workspace).list_page, path, after, LISTED_FILES)
        files = _listed([file_reference(session_id, entry.name, entry.size) for entry in listing.entries])
        total = len(listing.entries) + listing.rest
        report = SessionFiles(
            session_id=session_id,
            files=files,
            is_complete=listing.is_complete and len(files) == total,
            next_after=files[-1].name if len(files) < total else None,
        )
        lines = [
            f"{_shown(file.name)} ({file.mime_type}, {file.size:,} bytes) {file.uri}" for file in files[:SHOWN_FILES]
        ]
        if len(lines) < total:
            more = f"{total - len(lines):,} more" if listing.is_complete else f"At least {total - len(lines):,} more"
            lines.append(f"{more}: pass after={files[len(lines) - 1].name!r}, or a path to list one folder.")
        elif not listing.is_complete:
            lines.append("There may be more: pass a path to list one folder.")
        return model_blocks(report, "\n".join(lines) or "No files.")

    @refusals_as_results
    async def upload_file(
        self,
        session_id: SessionId,
        name: FileName,
        text: str | None = None,
        base64: str | None = None,
        url: Annotated[str | None, Field(description="data: or https: URL")] = None,
        path: Annotated[str | None, Field(description="In a folder of the user, such as /mnt/NAME/file")] = None,
    ) -> Answer:
        """Put a file into the session folder, from exactly one of text, base64, url and path."""
        principal = current_principal()
        session = await self._sessions.reach(session_id, principal)
        session.workspace.check_name(name)
        limit = self._settings.max_upload_bytes
        with session.in_use():
            if path is not None and text is base64 is url is None:
                content = await asyncio.to_thread(self._host_folders.read, principal, path, limit)
            else:
                given = {"text": text, "base64": base64, "url": url, "path": path}
                content = await decode_upload(text, base64, url, max_bytes=limit, given=given)
            await session.write_file(name, content)
        shown = "/".join(session.workspace.check_name(name))
        file = file_reference(session.id, shown, len(content))
        return model_blocks(file, f"{_shown(file.name)} ({file.size:,} bytes) {file.uri}")

    @refusals_as_results
    async def download_file(
        self,
        session_id: SessionId,
        name: FileName,
        save: Annotated[bool, Field(description="Also save it for the person")] = False,
    ) -> Answer:
        """Get a file from the session folder."""
        workspace = self._sessions.workspace(session_id, current_principal())
        content = await asyncio.to_thread(workspace.read, name, EMBEDDED_LIMIT_BYTES)
        file = file_reference(session_id, "/".join(workspace.check_name(name)), len(content))
        saved = None
        if save:
            folder = self._settings.download_directory
            saved = str(await asyncio.to_thread(save_download, folder, session_id, file.name, content))
        summary = f"{_shown(file.name)} ({file.mime_type}, {file.size:,} bytes)" + (
            f", saved to {saved}{container_note(Path(saved))}" if saved else ""
        )
        return CallToolResult(
            content=[TextContent(type="text", text=summary), embedded(file, content)],
            structured_content=None,
        )


def _shown(name: str) -> str:
    """Return a file's name on one line, with what imitates belljar's own words marked; code chooses names."""
    return disarmed(name if name.isprintable() else repr(name))


def _listed(files: list[FileReference]) -> list[FileReference]:
    """Return as many as fit into one message beside their text, and at least one."""
    left = LISTED_BYTES
    for count, file in enumerate(files):
        left -= len(file.uri) + len(file.name.encode()) + 100
        if left < 0 < count:
            return files[:count]
    return files


def embedded(file: FileReference, content: bytes) -> EmbeddedResource:
    """Return the content of a file as a block: text for types of text, else base64."""
    text = decoded(content, file.mime_type)
    if isinstance(text, str):
        return EmbeddedResource(
            type="resource", resource=TextResourceContents(uri=file.uri, mime_type=file.mime_type, text=text)
        )
    blob = b64encode(content).decode()
    return EmbeddedResource(
        type="resource", resource=BlobResourceContents(uri=file.uri, mime_type=file.mime_type, blob=blob)
    )
