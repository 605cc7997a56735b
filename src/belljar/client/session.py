"""The handle of a session on a connected server.

A cell is never waited for in one long call. It is started, and then its result is asked for until it has ended, so that
no time limit between here and the server can lose the result.
"""

import contextlib
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from mcp.types import CallToolResult, InputRequiredResult

from belljar.client.connection import Fields, ServerCalls, answers_to, fields_of, prompt_of, result_of
from belljar.errors import InvalidArgument, InvalidPath, SessionNotFound
from belljar.handles import (
    Asker,
    Askers,
    ExecutionHandle,
    OnInput,
    OutputStream,
    SessionBase,
    SessionHandle,
    accepted,
    as_list,
)
from belljar.models import ExecutionResult, FileReference, OutputEvent, Rewinding, SessionFork

if TYPE_CHECKING:
    from belljar.environments.installs import InstallOutcome

FIRST_WAIT_S = 2.0
NEXT_WAIT_S = 20.0
LOOK_AGAIN_S = 0.25
# If an answer has more events than this, more are there already, so the next request does not wait.
_BACKLOG = 100


class RemoteExecution:
    """An `ExecutionHandle` of an execution on a server. A later connection finds it by its id, also after a restart."""

    def __init__(self, server: ServerCalls, execution_id: str) -> None:
        self._server = server
        self._id = execution_id

    @property
    def id(self) -> str:
        """See `ExecutionHandle`."""
        return self._id

    async def wait(self, wait_s: float | None = None) -> ExecutionResult:
        """See `ExecutionHandle`."""
        left_s = wait_s
        while True:
            asked_s = NEXT_WAIT_S if left_s is None else min(left_s, NEXT_WAIT_S)
            began = time.monotonic()
            result = result_of(await self._server.call("get_execution", {"execution_id": self._id, "wait_s": asked_s}))
            if left_s is not None:
                left_s -= time.monotonic() - began
            if result.status != "running" or (left_s is not None and left_s <= 0):
                return accepted(result)

    async def events(self, since: int = 0) -> AsyncGenerator[OutputEvent]:
        """See `ExecutionHandle`."""
        wait_s = 0.0
        while True:
            arguments = {"execution_id": self._id, "since": since, "wait_s": wait_s}
            answer = await self._server.send("get_execution", arguments, wants_events=True)
            if isinstance(answer, InputRequiredResult):
                # Nobody follows this cell to answer it.
                answer = await self._server.send("get_execution", arguments, answer, answers_to(answer, None))
            fields = fields_of(cast("CallToolResult", answer))
            events = [OutputEvent.model_validate(event) for event in fields.pop("events", [])]
            for event in events:
                since = event.sequence
                yield event
            if not events and result_of(fields).status != "running":
                return
            wait_s = 0 if len(events) > _BACKLOG else LOOK_AGAIN_S

    async def interrupt(self) -> None:
        """See `ExecutionHandle`."""
        await self._server.call("interrupt_execution", {"execution_id": self._id})


class RemoteSession(SessionBase):
    """A `SessionHandle` of a session on a server."""

    def __init__(
        self, server: ServerCalls, session_id: str, handles: "list[RemoteSession]", forked: SessionFork | None = None
    ) -> None:
        self._server = server
        self._id = session_id
        self._forked = forked
        self._askers = Askers()
        self._handles = handles
        """All handles that end with one block: the session that it opened and the forks of it."""
        handles.append(self)

    @property
    def id(self) -> str:
        """See `SessionHandle`."""
        return self._id

    # Cells

    async def execute(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        on_input: OnInput | None = None,
        filename: str = "",
        idempotency_key: str = "",
    ) -> ExecutionResult:
        """See `SessionHandle`."""
        # The answer to a question repeats the call that raised it. `get_execution` can be repeated safely, so questions
        # should come in answer to that.
        first_wait_s = FIRST_WAIT_S if on_input is None else 0
        with self._askers.of_cell(on_input) as asker:
            cell = self._cell(code, timeout_s, first_wait_s, filename, idempotency_key)
            result = result_of(await self._follow("execute_code", cell, asker))
            while result.status == "running":
                again = {"execution_id": result.execution_id, "wait_s": NEXT_WAIT_S}
                result = result_of(await self._follow("get_execution", again, asker))
        return accepted(result)

    async def submit(
        self, code: str, *, timeout_s: float | None = None, filename: str = "", idempotency_key: str = ""
    ) -> ExecutionHandle:
        """See `SessionHandle`."""
        cell = self._cell(code, timeout_s, 0, filename, idempotency_key)
        with self._askers.of_cell(None) as asker:
            result = accepted(result_of(await self._follow("execute_code", cell, asker)))
        return RemoteExecution(self._server, result.execution_id)

    def stream(self, code: str, *, timeout_s: float | None = None, on_input: OnInput | None = None) -> OutputStream:
        """See `SessionHandle`."""
        return OutputStream(self._events(code, timeout_s, on_input))

    async def _events(
        self, code: str, timeout_s: float | None, on_input: OnInput | None
    ) -> AsyncGenerator[OutputEvent | ExecutionResult]:
        with self._askers.of_cell(on_input) as asker:
            answer = await self._follow("execute_code", self._cell(code, timeout_s, 0), asker, wants_events=True)
            seen = 0
            while True:
                events = [OutputEvent.model_validate(event) for event in answer.pop("events", [])]
                result = accepted(result_of(answer))
                for event in events:
                    seen = event.sequence
                    yield event
                if result.status != "running" and not events:
                    break
                wait_s = 0 if len(events) > _BACKLOG else LOOK_AGAIN_S
                again = {"execution_id": result.execution_id, "since": seen, "wait_s": wait_s}
                answer = await self._follow("get_execution", again, asker, wants_events=True)
            # Ask once more without `since`, because an answer with it leaves out the output before.
            yield result_of(await self._follow("get_execution", {"execution_id": result.execution_id}, asker))

    def _cell(
        self, code: str, timeout_s: float | None, wait_s: float, filename: str = "", key: str = ""
    ) -> dict[str, Any]:
        given = {"timeout_s": timeout_s, "filename": filename or None, "idempotency_key": key or None}
        chosen = {name: value for name, value in given.items() if value is not None}
        return {"code": code, "session_id": self._id, "wait_s": wait_s, **chosen}

    async def _follow(
        self, tool: str, arguments: dict[str, Any], asker: Asker, *, wants_events: bool = False
    ) -> Fields:
        """Call a tool, and answer the questions that come before its answer."""
        send = partial(self._server.send, tool, arguments, wants_events=wants_events)
        answer = await send()
        while isinstance(answer, InputRequiredResult):
            try:
                text = await asker.ask(prompt_of(answer))
            except Exception:
                # Decline, because the cell would wait for an answer that never comes.
                await send(answer, answers_to(answer, None))
                raise
            answer = await send(answer, answers_to(answer, text))
        return fields_of(answer)

    async def interrupt(self) -> list[str]:
        """See `SessionHandle`."""
        answer = await self._server.call("interrupt_execution", {"session_id": self._id})
        self._askers.withdraw()
        return [str(execution_id) for execution_id in answer["interrupted"]]

    # Files

    async def upload(self, name: str, content: bytes | str) -> FileReference:
        """See `SessionHandle`."""
        form = {"text": content} if isinstance(content, str) else {"base64": b64encode(content).decode()}
        answer = await self._server.call("upload_file", {"session_id": self._id, "name": name, **form})
        return FileReference.model_validate(answer)

    async def download(self, name: str) -> bytes:
        """See `SessionHandle`."""
        try:
            return await self._server.read(f"kernel://{self._id}/{quote(name)}")
        except InvalidArgument as error:
            raise InvalidPath(
                f"the path {name[:120]!r} leaves the session folder", hint="Use a relative path"
            ) from error

    async def files(self) -> list[FileReference]:
        """See `SessionHandle`."""
        found: list[FileReference] = []
        after: str | None = ""
        while after is not None:
            answer = await self._server.call("list_session_files", {"session_id": self._id, "after": after})
            found += [FileReference.model_validate(file) for file in answer["files"]]
            after = answer.get("next_after")
        return found

    async def display(self, uri: str) -> bytes:
        """See `SessionHandle`."""
        return await self._server.read(uri)

    # Packages

    async def install(self, packages: Sequence[str]) -> "list[InstallOutcome]":
        """See `SessionHandle`."""
        from belljar.environments.installs import InstallOutcome

        arguments = {"session_id": self._id, "packages": as_list(packages)}
        answer = await self._server.call("install_dependencies", arguments)
        return [InstallOutcome(**outcome) for outcome in answer["packages"]]

    # Other states

    @property
    def forked(self) -> SessionFork | None:
        """See `SessionHandle`."""
        return self._forked

    async def fork(self, *, at: str | int = "", reseed: bool = False) -> SessionHandle:
        """See `SessionHandle`."""
        answer = await self._server.call("fork_session", {"session_id": self._id, "at": at, "reseed": reseed})
        forked = SessionFork.model_validate(answer)
        return RemoteSession(self._server, forked.session_id, self._handles, forked)

    async def rewind(self, to: str | int) -> Rewinding:
        """See `SessionHandle`."""
        return Rewinding.model_validate(await self._server.call("rewind_session", {"session_id": self._id, "to": to}))

    async def rename(self, reason: str) -> None:
        """See `SessionHandle`."""
        await self._server.call("rename_session", {"session_id": self._id, "reason": reason})

    async def aclose(self) -> None:
        """See `SessionHandle`."""
        with contextlib.suppress(SessionNotFound):
            await self._server.call("clear_session", {"session_id": self._id})
        if self in self._handles:
            self._handles.remove(self)
