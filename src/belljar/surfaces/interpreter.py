"""The default surface: tools that run Python in sessions, move files, and manage packages."""

import asyncio
import re
from base64 import b64encode
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from functools import wraps
from typing import Annotated, Any, ParamSpec

from mcp.server.mcpserver import Context, MCPServer
from mcp.types import (
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    InputRequiredResult,
    TextContent,
    TextResourceContents,
    ToolAnnotations,
)
from pydantic import Field

from belljar.environments import check_installed, install
from belljar.errors import BelljarError, InvalidArgument
from belljar.files.transfer import decode_upload, save_download
from belljar.files.workspace import is_text, mime_type_of
from belljar.models import ExecutionResult, FileReference, Model, SessionInfo
from belljar.runtime import Runtime
from belljar.sessions.execution import Cell, Execution
from belljar.sessions.session import Session
from belljar.surfaces.auth import current_principal
from belljar.surfaces.content import error_blocks, execution_blocks, model_blocks, wanted_structure
from belljar.surfaces.following import can_ask, follow, resume

MAX_WAIT_S = 300.0
EMBEDDED_LIMIT_BYTES = 32 * 1024 * 1024
_FENCE = re.compile(r"\A\s*(?:```|~~~)[\w.+-]*[ \t]*\n(.*?)\n?(?:```|~~~)\s*\Z", re.DOTALL)

SessionId = Annotated[str, Field(description="Session to use")]
Code = Annotated[str, Field(description="Python; IPython magics, !shell and top-level await work")]
OptionalSession = Annotated[str, Field(description="Session to go on with; empty starts a new one")]
Wait = Annotated[float, Field(ge=0, le=MAX_WAIT_S, description="Most seconds to wait for the result")]

P = ParamSpec("P")
Answer = CallToolResult | InputRequiredResult
Ctx = Context[Any, Any]


class Sessions(Model):
    """Answer of `list_sessions`."""

    sessions: list[SessionInfo]


class SessionFiles(Model):
    """Answer of `list_session_files`."""

    session_id: str
    files: list[FileReference]
    is_complete: bool


class Cleared(Model):
    """Answer of `clear_session`."""

    success: bool
    message: str


class Interrupted(Model):
    """Answer of `interrupt_execution`."""

    interrupted: list[str]
    message: str


class PackageReport(Model):
    """Answer of the package tools."""

    session_id: str | None = None
    packages: list[dict[str, Any]]


class Downloaded(Model):
    """What `download_file` tells beside the file itself."""

    file: FileReference
    saved_to: str | None = None


def _refusals_as_results(
    tool: Callable[P, Coroutine[Any, Any, Answer]],
) -> Callable[P, Coroutine[Any, Any, Answer]]:
    """Our own errors become results a model can read; they are refusals, not crashes."""

    @wraps(tool)
    async def answered(*args: P.args, **kwargs: P.kwargs) -> Answer:
        try:
            return await tool(*args, **kwargs)
        except BelljarError as error:
            return error_blocks(error)

    return answered


class InterpreterSurface:
    """Tools and resources over one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._settings = runtime.settings
        self._sessions = runtime.sessions

    def register(self, server: MCPServer[Any]) -> None:
        """Add every tool to a server."""
        reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)
        changes = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
        ends = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=False)
        fetches = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=True)
        for tool, annotations in (
            (self.execute_code, ends),
            (self.get_execution, reads),
            (self.interrupt_execution, ends),
            (self.new_session, changes),
            (self.list_sessions, reads),
            (self.clear_session, ends),
            (self.list_session_files, reads),
            (self.upload_file, fetches),
            (self.download_file, reads),
            (self.install_dependencies, fetches),
            (self.check_installed_packages, reads),
        ):
            server.add_tool(_refusals_as_results(tool), annotations=annotations, structured_output=False)

    # Running

    async def execute_code(
        self,
        ctx: Ctx,
        code: Code,
        session_id: OptionalSession = "",
        filename: Annotated[str, Field(description="Also keep the code under this name in the session folder")] = "",
        timeout_s: Annotated[float | None, Field(gt=0, description="Interrupt the cell after this long")] = None,
        wait_s: Wait = 45,
    ) -> Answer:
        """Run Python in a session. Variables, imports and files stay for the next call with the same session_id.

        Figures are captured without saving. The working directory is the session folder, also /mnt/data; there is no
        network. A cell that takes longer than wait_s goes on in the background: get_execution returns the rest.
        """
        if ctx.request_state is not None:
            execution = self._sessions.execution(ctx.request_state, current_principal())
            if execution is not None:
                resume(execution, ctx)
                return await self._answer(execution, ctx, wait_s)
        try:
            session = self._session(session_id)
            cell = self._cell(code, timeout_s, ctx)
            if filename:
                await asyncio.to_thread(session.workspace.write, filename, cell.code.encode())
            execution = session.submit(cell)
        except BelljarError as error:
            return self._rejected(session_id, error)
        return await self._answer(execution, ctx, wait_s)

    async def get_execution(
        self,
        ctx: Ctx,
        execution_id: str,
        since: Annotated[int, Field(ge=0, description="Leave out output up to this sequence number")] = 0,
        wait_s: Wait = 0,
    ) -> Answer:
        """The result of an execution, or what there is of it so far: status is `running` until it has ended."""
        execution = self._sessions.execution(execution_id, current_principal())
        if execution is not None:
            if ctx.request_state is not None:
                resume(execution, ctx)
            if (question := await follow(execution, ctx, wait_s)) is not None:
                return question
        return self._shown(self._sessions.result(execution_id, current_principal(), since), ctx)

    async def interrupt_execution(self, execution_id: str = "", session_id: str = "") -> Answer:
        """Stop one execution, or all of a session. Variables survive unless the code ignores the interrupt."""
        if bool(execution_id) == bool(session_id):
            raise InvalidArgument("interrupt_execution takes either execution_id or session_id", hint="Pass one of them")
        if session_id:
            running = self._sessions.get(session_id, current_principal()).running()
        else:
            execution = self._sessions.execution(execution_id, current_principal())
            if execution is None:
                self._sessions.result(execution_id, current_principal())
            running = [execution] if execution is not None and not execution.is_finished else []
        for execution in reversed(running):
            execution.interrupt()
        grace = self._settings.interrupt_grace_s
        await asyncio.gather(*(execution.wait(grace + 5) for execution in running))
        report = Interrupted(interrupted=[execution.id for execution in running], message=_interruption(running))
        return model_blocks(report, report.message)

    # Sessions

    async def new_session(
        self,
        environment: Annotated[
            str, Field(description="'default', a virtual environment's path, or kernel:NAME for a Jupyter kernel")
        ] = "",
        reason: Annotated[str, Field(max_length=200, description="What it is for, shown in lists")] = "",
    ) -> Answer:
        """Start a session. execute_code starts one by itself when called without a session_id."""
        principal = current_principal()
        session = self._sessions.create(principal, environment=environment, reason=reason)
        try:
            async with session.turn:
                await session.ready_kernel()
        except BaseException:
            await self._sessions.clear(session.id, principal)
            raise
        notice = session.notice()
        info = session.info()
        return model_blocks(info, f"session_id: {info.session_id}\n{notice.instructions if notice else ''}")

    async def list_sessions(self) -> Answer:
        """Your sessions with state, age, memory and expiry. None listed: none is open."""
        infos = [await asyncio.to_thread(session.info) for session in self._sessions.of(current_principal())]
        lines = [
            f"{info.session_id} {info.state}, {info.environment}, {info.executions} executions, {info.files} files, "
            f"{info.memory_mb:g} MB, expires {info.expires_at}{', ' + info.reason if info.reason else ''}"
            for info in infos
        ]
        return model_blocks(Sessions(sessions=infos), "\n".join(lines) or "No session is open.")

    async def clear_session(self, session_id: SessionId) -> Answer:
        """End a session and delete its variables, files and history."""
        await self._sessions.clear(session_id, current_principal())
        message = f"Session {session_id} and its files are deleted."
        return model_blocks(Cleared(success=True, message=message), message)

    # Files

    async def list_session_files(
        self, session_id: SessionId, path: Annotated[str, Field(description="Folder to list; empty for all")] = ""
    ) -> Answer:
        """Files in the session folder, sub-folders included. None listed: the folder is empty."""
        session = self._sessions.get(session_id, current_principal())
        listing = await asyncio.to_thread(session.workspace.list, path)
        files = [_reference(session, entry.name, entry.size) for entry in listing.entries]
        lines = [f"{file.name} ({file.mime_type}, {file.size:,} bytes) {file.uri}" for file in files[:500]]
        if len(files) > len(lines) or not listing.is_complete:
            lines.append("There are more; pass a path to list one folder.")
        report = SessionFiles(session_id=session_id, files=files, is_complete=listing.is_complete)
        return model_blocks(report, "\n".join(lines) or "No files.")

    async def upload_file(
        self,
        session_id: SessionId,
        name: Annotated[str, Field(description="Path in the session folder")],
        text: str | None = None,
        base64: str | None = None,
        url: Annotated[str | None, Field(description="data: or https: URL")] = None,
    ) -> Answer:
        """Put a file into the session folder. Give exactly one of text, base64, url."""
        session = self._sessions.get(session_id, current_principal())
        session.workspace.check_name(name)
        content = await decode_upload(text, base64, url, max_bytes=self._settings.max_upload_bytes)
        await asyncio.to_thread(session.workspace.write, name, content)
        shown = "/".join(session.workspace.check_name(name))
        file = _reference(session, shown, len(content))
        return model_blocks(file, f"{file.name} ({file.size:,} bytes) {file.uri}")

    async def download_file(
        self,
        session_id: SessionId,
        name: Annotated[str, Field(description="Path in the session folder")],
        save: Annotated[bool, Field(description="Also save it on the server's side, for the person")] = False,
    ) -> Answer:
        """Get a file from the session folder."""
        session = self._sessions.get(session_id, current_principal())
        content = await asyncio.to_thread(session.workspace.read, name, EMBEDDED_LIMIT_BYTES)
        file = _reference(session, "/".join(session.workspace.check_name(name)), len(content))
        saved = None
        if save:
            folder = self._settings.download_directory
            saved = str(await asyncio.to_thread(save_download, folder, session.id, file.name, content))
        told = f"{file.name} ({file.mime_type}, {file.size:,} bytes)" + (f", saved to {saved}" if saved else "")
        return CallToolResult(
            content=[TextContent(type="text", text=told), _embedded(file, content)],
            structured_content=None,
        )

    # Packages

    async def install_dependencies(
        self,
        packages: Annotated[list[str], Field(min_length=1, max_length=100, description="Such as pandas>=2, humanize")],
        session_id: OptionalSession = "",
    ) -> Answer:
        """Install packages for one session: answers each one's version, or the resolver's own words."""
        session = self._session(session_id)
        environment = await self._runtime.starter.environment(session.environment)
        outcomes = await install(environment, session.folders.layer, packages)
        lines = [
            f"{outcome.name} {outcome.installed_version}" if outcome.error is None else f"{outcome.name}: {outcome.error}"
            for outcome in outcomes
        ]
        report = PackageReport(session_id=session.id, packages=[asdict(outcome) for outcome in outcomes])
        answer = model_blocks(report, "\n".join([*lines, f"[session_id: {session.id}]"]))
        answer.is_error = any(outcome.error is not None for outcome in outcomes)
        return answer

    async def check_installed_packages(
        self, packages: Annotated[list[str], Field(min_length=1, max_length=200)]
    ) -> Answer:
        """Which packages the default environment has, by distribution or import name, with version and location."""
        environment = await self._runtime.starter.environment(self._settings.environment)
        statuses = await asyncio.to_thread(check_installed, environment, None, packages)
        lines = [
            f"{status.name}: {status.version}" if status.installed else f"{status.name}: not installed"
            for status in statuses
        ]
        report = PackageReport(packages=[asdict(status) for status in statuses])
        return model_blocks(report, "\n".join(lines))

    # Steps the tools share

    def _session(self, session_id: str) -> Session:
        """The caller's session; an empty id (or "0", which older clients send) makes a new one."""
        if session_id in ("", "0"):
            return self._sessions.create(current_principal())
        return self._sessions.get(session_id, current_principal())

    def _cell(self, code: str, timeout_s: float | None, ctx: Ctx) -> Cell:
        size = len(code.encode(errors="replace"))
        if size > self._settings.max_code_bytes:
            raise InvalidArgument(
                f"code has {size:,} bytes, the limit is {self._settings.max_code_bytes:,}",
                hint="Upload data with upload_file and read it from the session folder",
            )
        code = stripped(code)
        if not code.strip():
            raise InvalidArgument("code is empty", hint="Pass the Python to run")
        timeout_s = min(timeout_s or self._settings.execution_timeout_s, self._settings.execution_timeout_s)
        return Cell(code, timeout_s=timeout_s, allow_input=can_ask(ctx))

    async def _answer(self, execution: Execution, ctx: Ctx, wait_s: float) -> Answer:
        question = await follow(execution, ctx, wait_s)
        if question is not None:
            return question
        result = execution.result()
        result.session_info = execution.session.notice()
        return self._shown(result, ctx)

    def _rejected(self, session_id: str, error: BelljarError) -> CallToolResult:
        """A call that never became an execution, with every field of one."""
        result = ExecutionResult(
            success=False,
            status="rejected",
            execution_id="",
            session_id=session_id[:64],
            execution_count=0,
            output=[],
            stdout="",
            stderr="",
            error=f"{error.code}: {error}",
        )
        return execution_blocks(result, lambda _: None, image_budget_bytes=0, structured=self._settings.structured)

    def _shown(self, result: ExecutionResult, ctx: Ctx) -> CallToolResult:
        return execution_blocks(
            result,
            self._sessions.display_content,
            image_budget_bytes=self._settings.image_budget_bytes,
            structured=wanted_structure(ctx.request_context.meta, self._settings.structured),
        )


def stripped(code: str) -> str:
    """Code without the Markdown fence that models like to put around it."""
    fenced = _FENCE.match(code)
    return fenced.group(1) if fenced else code


def _interruption(running: list[Execution]) -> str:
    if not running:
        return "Nothing was running."
    lost = [execution.id for execution in running if execution.result().state == "lost"]
    if lost:
        return f"{len(running)} stopped; the code ignored the interrupt and was killed: variables are lost, files kept."
    return f"{len(running)} interrupted; variables are kept."


def _reference(session: Session, name: str, size: int) -> FileReference:
    return FileReference(uri=session.uri_of(name), name=name, mime_type=mime_type_of(name), size=size)


def _embedded(file: FileReference, content: bytes) -> EmbeddedResource:

    if is_text(file.mime_type):
        text = content.decode(errors="replace")
        return EmbeddedResource(
            type="resource", resource=TextResourceContents(uri=file.uri, mime_type=file.mime_type, text=text)
        )
    blob = b64encode(content).decode()
    return EmbeddedResource(
        type="resource", resource=BlobResourceContents(uri=file.uri, mime_type=file.mime_type, blob=blob)
    )
