"""The default surface: tools that run code and manage sessions, with those for states, files and packages added."""

from collections.abc import Sequence
from itertools import islice
from typing import Annotated, Any, cast

from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult
from pydantic import Field, StrictInt

from belljar.egress.rules import PACKAGES
from belljar.engine.contract import MAX_WAIT_S, Engine
from belljar.errors import BelljarError, ExecutionNotFound, InvalidArgument, SessionNotFound
from belljar.executions.execution import Execution
from belljar.executions.outcome import came_back
from belljar.http.auth import current_principal
from belljar.mcp.content import (
    asked_structure,
    client_name,
    error_blocks,
    error_field,
    execution_blocks,
    model_blocks,
    next_call,
    takes_links,
    wants,
)
from belljar.mcp.execution_wait import (
    asked_execution,
    can_ask,
    follow,
    leave_as_task,
    offered_wait_s,
    resume,
    stopping_when_cancelled,
)
from belljar.mcp.file_tools import FileTools
from belljar.mcp.package_tools import PackageTools
from belljar.mcp.resources import InterpreterResources
from belljar.mcp.tools import (
    CHANGES,
    ENDS,
    NO_SESSION,
    READS,
    Answer,
    Ctx,
    OptionalSession,
    SessionId,
    add_tools,
    current_client,
    idempotent,
    last_step,
    note_refusal,
    refusals_as_results,
    stage_reporter,
)
from belljar.models import MAX_GPUS, MAX_REASON_CHARS, ExecutionResult, Model, Rewinding, SessionFork, SessionInfo
from belljar.products import products
from belljar.runtime import Runtime
from belljar.sandboxes.base import WORKSPACE
from belljar.sessions.registry import NEW_SESSION_HINT

START_WAIT_S = 45.0
MAX_EVENTS = 500
Code = Annotated[str, Field(description="Python; magics, !shell and await work")]
Wait = Annotated[float, Field(ge=0, le=MAX_WAIT_S, allow_inf_nan=False, description="Seconds to wait for the result")]
Timeout = Annotated[float | None, Field(gt=0, allow_inf_nan=False, description="Interrupt it then")]
SHOWN_NAMES = 100
To = Annotated[
    StrictInt | Annotated[str, Field(max_length=64)],
    Field(description="How many of the last to undo, or execution_id of the first"),
]
At = Annotated[
    StrictInt | Annotated[str, Field(max_length=64)],
    Field(description="Its state so many executions ago, or before this execution_id; else now"),
]


class Sessions(Model):
    """Answer of `list_sessions`."""

    sessions: Sequence[SessionInfo]


class Renamed(Model):
    """Answer of `rename_session`."""

    session_id: str
    reason: str


class Cleared(Model):
    """Answer of `clear_session`."""

    success: bool
    message: str


class Interrupted(Model):
    """Answer of `interrupt_execution`."""

    interrupted: list[str]
    message: str


class OutputPage(Model):
    """Answer of `get_execution` with an offset: a part of all that was printed."""

    execution_id: str
    offset: int
    text: str
    is_last: bool
    next_offset: int | None = None


class InterpreterSurface:
    """The tools and resources of the surface, over one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._settings = runtime.settings
        self._engine = runtime.late_engine.get()
        self._sessions = runtime.sessions
        self._shows_workspace = runtime.shows_workspace

    def register(self, server: MCPServer[Any]) -> None:
        """Add the tools and resources to a server."""
        add_tools(
            server,
            (self.execute_code, ENDS),
            (self.get_execution, READS),
            (self.interrupt_execution, ENDS),
            (self.new_session_with_gpus if self._runtime.starter.gpus.is_on else self.new_session, CHANGES),
            (self.list_sessions, READS),
            (self.rename_session, idempotent(CHANGES)),
            (self.clear_session, idempotent(ENDS)),
        )
        StateTools(self._engine).register(server)
        if self._settings.try_code:
            from belljar.mcp.try_tool import TryTool

            TryTool(self._engine).register(server)
        FileTools(self._sessions, self._settings, self._runtime.starter.host_folders).register(server)
        PackageTools(self._engine, self._sessions).register(server)
        InterpreterResources(self._sessions).register(server)
        for product in products():
            product.add_tools(server, self._runtime)

    # Running

    @refusals_as_results
    async def execute_code(
        self,
        ctx: Ctx,
        code: Code,
        session_id: OptionalSession = "",
        filename: Annotated[str, Field(description="Also keep the code as this file")] = "",
        timeout_s: Timeout = None,
        wait_s: Wait = 45,
        idempotency_key: Annotated[str, Field(description="Calls with the same key run once")] = "",
    ) -> Answer:
        """Run Python in a session; variables, imports and files stay for later calls with its session_id.

        Figures are captured. Files are in the working directory, /mnt/data. A cell that outlasts wait_s goes on:
        get_execution has the rest.
        """
        names_session, client = session_id in NO_SESSION, current_client()
        if ctx.request_state is not None:
            execution = self._sessions.executions.find(asked_execution(ctx), client.principal)
            if execution is None:
                gone = ExecutionNotFound("the execution that asked is gone with its session", hint=NEW_SESSION_HINT)
                return self._rejected(session_id, gone, ctx, names_session=names_session)
            execution.span.link()
            resume(execution, ctx)
            return await self._answer(execution, ctx, wait_s, names_session=names_session)
        try:
            submitted = await self._engine.submit(
                client,
                "" if names_session else session_id,
                code,
                timeout_s=timeout_s,
                filename=filename,
                key=idempotency_key,
                asks="client" if can_ask(ctx) else "inbox",
                client=client_name(ctx),
                keeps_files=True,
            )
        except BelljarError as error:
            return self._rejected(session_id, error, ctx, names_session=names_session)
        # In memory, because what this call waits for with its client is more than an execution's state.
        session = self._sessions.find_open(submitted.session_id)
        execution = session.queue.find(submitted.execution_id) if session is not None else None
        if execution is None:
            return self.shown(await self._engine.result(client, submitted.execution_id), ctx)
        return await self._answer(execution, ctx, wait_s, names_session=names_session)

    @refusals_as_results
    async def get_execution(
        self,
        ctx: Ctx,
        execution_id: str,
        since: Annotated[int, Field(ge=0, description="Skip output up to this sequence number")] = 0,
        wait_s: Wait = 0,
        offset: Annotated[int | None, Field(ge=0, description="Instead: all its output from this character on")] = None,
    ) -> Answer:
        """The result of an execution, or what there is while it runs."""
        if offset is not None:
            return await self._whole_output(execution_id, offset)
        execution = self._sessions.executions.find(execution_id, current_principal())
        if execution is not None:
            execution.span.link()
            if ctx.request_state is not None:
                resume(execution, ctx)
            if wants(ctx, "belljar/events", True) and self._sessions.executions.has_events(execution_id, since):
                wait_s = 0  # there are new events already, and a client that streams wants them now
            elif question := await follow(execution, ctx, wait_s, is_streaming=wants(ctx, "belljar/events", True)):
                return question
        return self.shown(await self._engine.result(current_client(), execution_id, since), ctx, since)

    @refusals_as_results
    async def interrupt_execution(self, execution_id: str = "", session_id: str = "") -> Answer:
        """Stop one execution, or all of a session. Variables survive unless code ignores the interrupt."""
        if bool(execution_id) == bool(session_id):
            raise InvalidArgument(
                "interrupt_execution takes either execution_id or session_id", hint="Pass one of them"
            )
        client = current_client()
        stopped = await self._engine.interrupt(client, session_id, execution_id=execution_id)
        results = [await self._engine.result(client, one) for one in stopped]
        report = Interrupted(interrupted=stopped, message=_interruption(results))
        return model_blocks(report, report.message)

    # Sessions

    @refusals_as_results
    async def new_session(
        self,
        ctx: Ctx,
        environment: Annotated[
            str,
            Field(description="Other than the usual; or kernel:NAME of Jupyter"),
        ] = "",
        reason: Annotated[str, Field(max_length=MAX_REASON_CHARS, description="Shown in lists")] = "",
    ) -> Answer:
        """Start a session, as execute_code does by itself without a session_id."""
        return await self._new_session(ctx, environment, reason, None)

    @refusals_as_results
    async def new_session_with_gpus(
        self,
        ctx: Ctx,
        environment: Annotated[
            str,
            Field(description="Other than the usual; or kernel:NAME of Jupyter"),
        ] = "",
        reason: Annotated[str, Field(max_length=MAX_REASON_CHARS, description="Shown in lists")] = "",
        gpus: Annotated[
            int | None, Field(ge=0, le=MAX_GPUS, description="How many GPUs; leave out for the usual number")
        ] = None,
    ) -> Answer:
        """Start a session, as execute_code does by itself without a session_id."""
        return await self._new_session(ctx, environment, reason, gpus)

    async def _new_session(self, ctx: Ctx, environment: str, reason: str, gpus: int | None) -> Answer:
        opening = self._engine.open_session(current_client(), environment, reason, gpus, START_WAIT_S)
        done = await last_step(opening, stage_reporter(ctx))
        waits_for = done.text and (
            f"Its environment is being made, once: {done.text}\nIts first cell runs as soon as that is there."
        )
        info, notice = cast("SessionInfo", done.session), done.notice
        lines = [f"session_id: {info.session_id}", waits_for, notice.instructions if notice else ""]
        return model_blocks(info, "\n".join(filter(None, lines)))

    @refusals_as_results
    async def list_sessions(self) -> Answer:
        """Your sessions with state, memory and expiry."""
        infos: list[SessionInfo] = [*await self._engine.live_sessions(current_client(), asleep=True)]
        if self._sessions.list_others is not None:
            # One that sleeps may lie at several servers, and be awake at one of them.
            found = {info.session_id: info for info in await self._sessions.list_others()}
            infos = [
                found.pop(info.session_id) if info.session_id in found and info.state == "asleep" else info
                for info in infos
            ]
            infos += [info for info in found.values() if info.session_id not in {each.session_id for each in infos}]
        lines = [
            f"{info.session_id} {info.state}, {info.environment}, {info.executions} executions, "
            f"{'' if info.files is None else f'{info.files} files, '}"
            f"{info.memory_mb:g} MB, {_gpu_part(info)}expires {info.expires_at}"
            f"{', ' + info.reason if info.reason else ''}"
            for info in infos
        ]
        return model_blocks(Sessions(sessions=infos), "\n".join(lines) or "No session is open.")

    @refusals_as_results
    async def rename_session(
        self, session_id: SessionId, reason: Annotated[str, Field(max_length=MAX_REASON_CHARS)]
    ) -> Answer:
        """Change its reason."""
        kept = (await self._engine.rename(current_client(), session_id, reason)).reason
        text = f"Lists show session {session_id} as: {kept}" if kept else f"Session {session_id} has no reason now."
        return model_blocks(Renamed(session_id=session_id, reason=kept), text)

    @refusals_as_results
    async def clear_session(self, session_id: SessionId) -> Answer:
        """End a session and delete its variables, files and history."""
        try:
            await self._engine.end(current_client(), session_id)
        except SessionNotFound as error:
            note_refusal(error)
            return error_blocks(error, {"success": False, "message": error_field(error)})
        message = f"Session {session_id} and its files are deleted."
        return model_blocks(Cleared(success=True, message=message), message)

    # Steps the tools share

    async def _whole_output(self, execution_id: str, offset: int) -> Answer:
        """Return a page of all that an execution printed, and where the next one begins."""
        page = self._settings.output_budget_chars
        executions, principal = self._sessions.executions, current_principal()
        read = await executions.output_page(execution_id, principal, offset, page)
        report = OutputPage(execution_id=execution_id, offset=offset, text=read.text, is_last=read.is_last)
        if not read.is_last:
            report.next_offset = offset + page
        rest = f'get_execution(execution_id="{execution_id}", offset={report.next_offset})'
        end = "[the end]" if read.is_last else f"[not the end: {rest} goes on]"
        return model_blocks(report, f"{report.text.rstrip()}\n\n{end}".lstrip())

    async def _answer(self, execution: Execution, ctx: Ctx, wait_s: float, *, names_session: bool = True) -> Answer:
        async with stopping_when_cancelled(ctx, self._settings.interrupt_on, execution.interrupt):
            question = await follow(execution, ctx, offered_wait_s(wait_s))
        if question is not None:
            return question
        self._sessions.journal.commit()
        if not execution.is_finished:
            leave_as_task(execution.id)
        result = execution.result()
        result.session_info = self._sessions.notice(execution)
        return self.shown(result, ctx, names_session=names_session, ran=execution)

    def _rejected(self, session_id: str, error: BelljarError, ctx: Ctx, *, names_session: bool) -> CallToolResult:
        """Return the answer to a call that never became an execution, with every field of a result."""
        note_refusal(error)
        result = ExecutionResult(
            success=False,
            status="rejected",
            execution_id="",
            session_id=session_id[:64],
            execution_count=0,
            output=[],
            stdout="",
            stderr="",
            error=error_field(error),
        )
        return self.shown(result, ctx, names_session=names_session)

    def shown(
        self,
        result: ExecutionResult,
        ctx: Ctx,
        since: int = 0,
        *,
        names_session: bool = True,
        ran: Execution | None = None,
    ) -> CallToolResult:
        """Return a result as this request wants it; `ran` is its execution, where that is at hand."""
        principal, executions = current_principal(), self._sessions.executions
        answer = execution_blocks(
            result,
            lambda uri: executions.display_reader(result.session_id)(uri),
            image_budget_bytes=self._settings.image_budget_bytes,
            structured=asked_structure(ctx, self._settings.structured),
            is_whole=wants(ctx, "belljar/structured", "always"),
            has_links=takes_links(ctx),
            failures_are_errors=self._settings.failures_are_errors,
            has_checkpoint=result.state == "lost" and executions.has_checkpoint(result.execution_id, principal),
            names_session=names_session,
            advice=self._advice(result, principal, ran),
        )
        if wants(ctx, "belljar/events", True) and answer.structured_content is not None:
            events = list(islice(self._sessions.journal.events(result.execution_id, since), MAX_EVENTS))
            answer.structured_content["events"] = [event.model_dump(mode="json") for event in events]
            answer.structured_content["sequence"] = events[-1].sequence if events else since
        return answer

    def _advice(self, result: ExecutionResult, principal: str, ran: Execution | None) -> str:
        if result.status not in ("ok", "error"):
            return ""
        seen = self._runtime.starter.host_folders
        folders = seen.of(principal) if self._settings.folders else ()
        execution = ran or self._sessions.executions.find(result.execution_id, principal)
        return next_call(
            result,
            hosts=[rule for rule in self._settings.egress if rule != PACKAGES],
            isolates=self._runtime.provider.isolates,
            folders=[seen.place(folder) for folder in folders],
            workspace=self._workspace(result.session_id),
            code=execution.cell.code if execution is not None else "",
        )

    def _workspace(self, session_id: str) -> str:
        """Return what code of a session calls its folder."""
        if self._shows_workspace:
            return WORKSPACE
        session = self._sessions.find_open(session_id)
        return "the working directory" if session is None else str(session.folders.workspace)


def _gpu_part(info: SessionInfo) -> str:
    if not info.gpus:
        return ""
    return f"{len(info.gpus)} GPU{'s' if len(info.gpus) > 1 else ''} with {info.gpu_memory_mb:g} MB of it, "


def _interruption(stopped: list[ExecutionResult]) -> str:
    if not stopped:
        return "Nothing was running."
    if any(result.state == "lost" for result in stopped):
        return f"{len(stopped)} stopped; the code ignored the interrupt and was killed: variables are lost, files kept."
    return f"{len(stopped)} interrupted; variables are kept."


class StateTools:
    """The state tools, over one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def register(self, server: MCPServer[Any]) -> None:
        """Add the tools to a server."""
        add_tools(server, (self.fork_session, CHANGES), (self.rewind_session, ENDS))

    @refusals_as_results
    async def fork_session(
        self,
        session_id: SessionId,
        at: At = "",
        reseed: Annotated[bool, Field(description="Other random numbers")] = False,
        count: int = 1,
    ) -> Answer:
        """Copy a session in milliseconds, to try several ways from one state.

        Threads, processes and sockets do not come along.
        """
        fork = await self._engine.fork(current_client(), session_id, at, reseed=reseed, count=count)
        return model_blocks(fork, _fork_text(fork, at))

    @refusals_as_results
    async def rewind_session(self, session_id: SessionId, to: To) -> Answer:
        """Undo executions: variables and files become what they were before. The latest few states are kept."""
        rewinding = await self._engine.rewind(current_client(), session_id, to)
        return model_blocks(rewinding, _rewind_text(rewinding))


def _fork_text(fork: SessionFork, at: str | int) -> str:
    is_count = isinstance(at, int) or at.isdecimal()
    ago = "1 execution ago" if str(at) == "1" else f"{at} executions ago"
    when = f" as it was {ago}" if is_count else f" as it was before execution {at}" if at else ""
    ids = ", ".join(fork.session_ids)
    lines = [
        f"session_ids: {ids}" if ids else f"session_id: {fork.session_id}",
        f"Forked from session {fork.origin}{when}; files are copied. Variables: {_listed(fork.variables)}.",
    ]
    if fork.unmade:
        lines.append(f"{fork.unmade}.")
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
