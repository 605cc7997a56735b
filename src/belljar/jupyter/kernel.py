"""The kernel that front ends talk to: passes Jupyter's requests to a session, and its events on as Jupyter's messages.

Also has what front ends ask of a kernel itself: the language, the history, `input()` and comms. Runs no code of the
user, and knows a session only as an `AttachedSession`.
"""

import asyncio
import base64
import contextlib
from collections import deque
from collections.abc import Coroutine, Iterable
from contextlib import aclosing
from fnmatch import fnmatchcase
from functools import partial
from itertools import islice
from typing import Any, TypeVar, cast

from ipykernel._version import kernel_protocol_version
from ipykernel.kernelbase import Kernel
from zmq.eventloop.zmqstream import ZMQStream

from belljar.distribution import own_version
from belljar.engine.attachment_messages import (
    AttachedSession,
    CommHeard,
    ExecutionEnded,
    ExecutionOutput,
    ExecutionStarted,
    QuestionAsked,
    SessionEnded,
    SessionEvent,
)
from belljar.errors import BelljarError, EngineError
from belljar.jupyter.sessions import SessionKeeper
from belljar.outputs.events import CommKind, CommMessage
from belljar.settings.environments import KERNEL_PREFIX


class FrontEndCell:
    """A request of this front end that the session works on: a cell, or a message to a widget."""

    def __init__(self, parent: dict[str, Any], ident: Any, *, is_silent: bool) -> None:
        self.parent = parent
        self.ident = ident
        self.is_silent = is_silent
        self.error: dict[str, Any] | None = None
        self.question: asyncio.Task[None] | None = None
        self.ended: asyncio.Future[ExecutionEnded] = asyncio.get_running_loop().create_future()


# ipykernel and traitlets are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false


_T = TypeVar("_T")
# A front end waits a minute for a kernel's first answer, and making an environment may take longer. So the kernel
# answers after this time even if it has no session yet.
FIRST_WAIT_S = 20.0


class BelljarKernel(Kernel):
    """The kernel of one front end; the application sets its `keeper` before it starts."""

    implementation = "belljar"
    implementation_version = own_version()
    banner = "belljar: a session of its own"
    keeper: SessionKeeper

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.language_info = PYTHON
        self._cells: dict[str, FrontEndCell] = {}
        self._current: FrontEndCell | None = None
        self._history = History()
        self._following: asyncio.Task[None] | None = None
        self._others: dict[str, dict[str, Any]] = {}
        """Made-up requests for the cells that others run, by execution id, because Jupyter's outputs need a parent."""
        self.shell_handlers.update({kind: partial(self._on_comm, kind) for kind in KINDS})

    def start(self) -> None:
        """Start to answer requests, and open the session meanwhile."""
        super().start()
        self._loop: asyncio.AbstractEventLoop = self.io_loop.asyncio_loop  # pyright: ignore[reportAttributeAccessIssue]
        self._signed: Any = self.session
        self._questions = FrontEndQuestions(self._signed, self.stdin_socket)
        self.io_loop.add_callback(self._open_ahead)

    async def _open_ahead(self) -> None:
        with contextlib.suppress(BelljarError):  # the first cell tries again and reports the error
            await self._attach()

    async def _attach(self) -> AttachedSession:
        attached = await self.keeper.attach()
        if self._following is None or self._following.done():
            self.execution_count = attached.count
            self._following = asyncio.get_running_loop().create_task(self._follow(attached))
            self._describe(attached)
        return attached

    def _describe(self, attached: AttachedSession) -> None:
        self.banner = f"belljar: session {attached.session_id}, environment {attached.environment}"
        self.language_info = language_of(attached)

    # Events of the session

    async def _follow(self, attached: AttachedSession) -> None:
        try:
            async with aclosing(attached.events()) as events:
                async for item in events:
                    self._publish_event(attached, item)
        finally:
            for cell in {*self._cells.values(), *([self._current] if self._current else [])}:
                if not cell.ended.done():
                    cell.ended.set_exception(EngineError("the session has ended"))
            self._cells.clear()
        await self.keeper.aclose()

    def _publish_event(self, attached: AttachedSession, item: SessionEvent) -> None:
        match item:
            case ExecutionStarted():
                self._on_started(item)
            case ExecutionOutput():
                self._on_output(item)
            case QuestionAsked():
                cell = self._cells.get(item.execution_id)
                if cell is not None:
                    cell.question = asyncio.get_running_loop().create_task(self._ask(attached, cell, item))
            case CommHeard():
                if (cell := self._cells.pop(item.request_id, None)) is not None and not cell.ended.done():
                    cell.ended.set_result(
                        ExecutionEnded(execution_id=item.request_id, status="ok", count=self.execution_count)
                    )
            case ExecutionEnded():
                self._on_ended(item)
            case SessionEnded():
                pass

    def _on_started(self, started: ExecutionStarted) -> None:
        self._history.add(started.count, started.code)
        if started.is_own and self._current is not None:
            self._cells[started.execution_id] = self._current
            return
        header = self._signed.msg_header("execute_request")
        other = {"header": {**header, "msg_id": started.execution_id, "session": "belljar", "username": "belljar"}}
        self._others[started.execution_id] = other
        self._publish_status("busy", "shell", parent=other)
        self._publish_execute_input(started.code, other, started.count)

    def _on_output(self, event: ExecutionOutput) -> None:
        cell = self._cells.get(event.execution_id)
        if cell is not None and event.output == "error":
            cell.error = event.content
        if cell is not None and cell.is_silent and event.output not in KINDS:
            return
        parent = cell.parent if cell is not None else self._others.get(event.execution_id) or self._parent_for(event)
        content, topic = content_for(event, parent), self._topic(event.output)
        more = {"metadata": event.metadata, "buffers": buffers_of(event)}
        self._signed.send(self.iopub_socket, event.output, content, parent=parent, ident=topic, **more)

    def _parent_for(self, event: ExecutionOutput) -> dict[str, Any]:
        """Return a made-up request as parent for what another front end's message to a widget led to."""
        return {"header": {**self._signed.msg_header("comm_msg"), "msg_id": event.execution_id}}

    def _on_ended(self, ended: ExecutionEnded) -> None:
        self.execution_count = ended.count
        if (cell := self._cells.pop(ended.execution_id, None)) is not None:
            if cell.question is not None:
                cell.question.cancel()
            if not cell.ended.done():
                cell.ended.set_result(ended)
        if (other := self._others.pop(ended.execution_id, None)) is not None:
            self._publish_status("idle", "shell", parent=other)

    async def _ask(self, attached: AttachedSession, cell: FrontEndCell, asked: QuestionAsked) -> None:
        text = await self._questions.ask(asked.prompt, cell.parent, cell.ident, is_password=asked.is_password)
        with contextlib.suppress(BelljarError):
            await attached.answer(asked.execution_id, text, asked.question)

    # Requests of the front end

    async def kernel_info_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Answer when the session is open, or after `FIRST_WAIT_S`."""
        with contextlib.suppress(BelljarError, TimeoutError):
            await self._on_main(asyncio.wait_for(self._attach(), FIRST_WAIT_S))
        await super().kernel_info_request(stream, ident, parent)

    @property
    def kernel_info(self) -> dict[str, Any]:
        """Return what front ends are told about the kernel. It offers no debugger: no code of the user runs here."""
        return {
            "protocol_version": kernel_protocol_version,
            "implementation": self.implementation,
            "implementation_version": self.implementation_version,
            "language_info": self.language_info,
            "banner": self.banner,
            "help_links": [],
            "supported_features": [],
        }

    async def do_execute(
        self,
        code: str,
        silent: bool,
        store_history: bool = True,
        user_expressions: Any = None,
        allow_stdin: bool = False,
        *,
        cell_meta: Any = None,
        cell_id: Any = None,
    ) -> dict[str, Any]:
        """Run a cell in the session when its turn comes, and wait for its end."""
        if not code.strip():
            return self._succeeded(self.execution_count)
        cell = self._current = FrontEndCell(self.get_parent("shell"), self._parent_ident["shell"], is_silent=silent)
        try:
            attached = await self._attach()
            await attached.execute(code, allow_input=allow_stdin)
            ended = await cell.ended
        except BelljarError as error:
            return self._refused(error, is_silent=silent)
        finally:
            self._current = None
        if ended.status == "ok":
            return self._succeeded(ended.count)
        failure = cell.error or {"ename": ended.status, "evalue": "", "traceback": []}
        return {"status": "error", "execution_count": ended.count, **failure}

    def _succeeded(self, count: int) -> dict[str, Any]:
        return {"status": "ok", "execution_count": count, "payload": [], "user_expressions": {}}

    def _refused(self, error: BelljarError, *, is_silent: bool) -> dict[str, Any]:
        lines = [f"{error.code}: {error.message}", *([f"hint: {error.hint}"] if error.hint else [])]
        content = {"ename": error.code, "evalue": error.message, "traceback": lines}
        if not is_silent:
            self.send_response(self.iopub_socket, "error", content, ident=self._topic("error"))
        return {"status": "error", "execution_count": self.execution_count, **content}

    async def shell_main(self, subshell_id: str | None, msg: Any) -> None:
        """Handle one request after the other.

        ipykernel's own method takes comms while a cell runs and does not report when it is done with them. Widgets wait
        for that report before they send more.
        """
        async with self._main_asyncio_lock:
            await self.dispatch_shell(msg, subshell_id=subshell_id)

    async def _on_comm(self, kind: CommKind, stream: Any, ident: Any, parent: Any) -> None:
        """Deliver a front end's message to a widget, under the session's turn."""
        request_id = str(parent["header"]["msg_id"])
        with contextlib.suppress(BelljarError):
            attached = await self._attach()
            cell = self._cells[request_id] = FrontEndCell(parent, ident, is_silent=False)
            try:
                await attached.send_comm(request_id, received(kind, parent))
                await cell.ended
            finally:
                self._cells.pop(request_id, None)

    async def comm_info_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Answer which comms are open in the session."""
        found: dict[str, str] = {}
        with contextlib.suppress(BelljarError):
            found = await (await self._attach()).comms()
        wanted = parent["content"].get("target_name")
        comms = {name: {"target_name": target} for name, target in found.items() if wanted in (None, target)}
        self._signed.send(stream, "comm_info_reply", {"status": "ok", "comms": comms}, parent, ident)

    async def do_complete(self, code: str, cursor_pos: int) -> dict[str, Any]:
        """Return the names that fit; none while a cell runs."""
        try:
            found = await (await self._attach()).complete(code, cursor_pos)
        except BelljarError:
            return await super().do_complete(code, cursor_pos)
        span = {"cursor_start": found.start, "cursor_end": found.end}
        return {"status": "ok", "matches": found.matches, **span, "metadata": {}}

    async def do_inspect(
        self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()
    ) -> dict[str, Any]:
        """Describe a name; return nothing while a cell runs."""
        try:
            data = (await (await self._attach()).inspect(code, cursor_pos, detail_level)).data
        except BelljarError:
            data = {}
        return {"status": "ok", "found": bool(data), "data": data, "metadata": {}}

    async def do_is_complete(self, code: str) -> dict[str, Any]:
        """Return whether code is a whole cell."""
        try:
            checked = await (await self._attach()).check(code)
        except BelljarError:
            return {"status": "unknown"}
        indent = {"indent": checked.indent} if checked.status == "incomplete" else {}
        return {"status": checked.status, **indent}

    async def do_history(
        self,
        hist_access_type: str,
        output: bool,
        raw: bool,
        session: Any = None,
        start: Any = None,
        stop: Any = None,
        n: Any = None,
        pattern: Any = None,
        unique: bool = False,
    ) -> dict[str, Any]:
        """Return the session's cells since this kernel attached to it, whoever ran them."""
        wanted = {"start": start, "stop": stop, "n": n, "pattern": pattern, "unique": unique}
        return {"status": "ok", "history": self._history.reply(hist_access_type, output=bool(output), **wanted)}

    async def interrupt_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Interrupt what runs in the session."""
        content: dict[str, Any] = {"status": "ok"}
        try:
            await self._on_main(self._interrupt())
        except BelljarError as error:
            content = {"status": "error", "ename": error.code, "evalue": error.message, "traceback": []}
        self._signed.send(stream, "interrupt_reply", content, parent, ident=ident)

    async def _interrupt(self) -> None:
        await (await self._attach()).interrupt()

    async def do_shutdown(self, restart: bool) -> dict[str, Any]:
        """End the session, or detach from an agent's."""
        await self._on_main(self.aclose())
        return {"status": "ok", "restart": restart}

    async def aclose(self) -> None:
        """Close the attachment to the session; may be called twice."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self.keeper.aclose()

    async def _on_main(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run in the main thread's event loop, where the session is; control messages come in another thread."""
        if asyncio.get_running_loop() is self._loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    # ipykernel's hooks change the handler of SIGINT. It is ignored here, because front ends interrupt by message and
    # no code of the user runs in this process.

    def pre_handler_hook(self) -> None:
        """Do nothing."""

    def post_handler_hook(self) -> None:
        """Do nothing."""


# What front ends are told about the language of a session

PYTHON: dict[str, Any] = {
    "name": "python",
    "mimetype": "text/x-python",
    "file_extension": ".py",
    "pygments_lexer": "ipython3",
    "codemirror_mode": {"name": "ipython", "version": 3},
    "nbconvert_exporter": "python",
    "version": "3",
}


def language_of(attached: AttachedSession) -> dict[str, Any]:
    """Describe Python, in the session's version; of other kernels only the name is known."""
    if attached.environment.startswith(KERNEL_PREFIX):
        name = attached.environment.removeprefix(KERNEL_PREFIX)
        return {"name": name, "mimetype": "text/plain", "file_extension": ".txt", "version": ""}
    return {**PYTHON, "version": attached.python_version or PYTHON["version"]}


# History

MAX_CELLS = 1_000


class History:
    """The last cells that the kernel has seen. It is the history of one session, whose number is 0."""

    def __init__(self) -> None:
        self._cells: deque[tuple[int, str]] = deque(maxlen=MAX_CELLS)

    def add(self, count: int, code: str) -> None:
        """Add a cell that has begun."""
        self._cells.append((count, code))

    def reply(self, kind: str, *, output: bool, **wanted: Any) -> list[list[Any]]:
        """Return the cells that a `history_request` asks for: the last ones, a range, or those that match a pattern.

        Their outputs are not kept here.
        """
        found = list(self._found(kind, wanted))
        return [[0, count, (code, None) if output else code] for count, code in found]

    def _found(self, kind: str, wanted: dict[str, Any]) -> Iterable[tuple[int, str]]:
        if kind == "range":
            start, stop = wanted.get("start") or 0, wanted.get("stop")
            return [cell for cell in self._cells if cell[0] >= start and (stop is None or cell[0] < stop)]
        cells: Iterable[tuple[int, str]] = reversed(self._cells)
        if kind == "search":
            pattern = str(wanted.get("pattern") or "*")
            cells = [cell for cell in cells if fnmatchcase(cell[1], pattern)]
            if wanted.get("unique"):
                cells = {code: (count, code) for count, code in reversed(cells)}.values()
        return reversed(list(islice(cells, wanted.get("n") or MAX_CELLS)))


# Questions of cells to the front end that ran them, over its stdin channel

# pyzmq and jupyter_client are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false


# What front ends send for Ctrl-D.
_END_OF_INPUT = "\x04"


class FrontEndQuestions:
    """Asks the front end for input, one question at a time.

    ipykernel's own method is not used, because it blocks the thread that everything else here runs in.
    """

    def __init__(self, session: Any, socket: Any) -> None:
        self._session = session
        self._stream = ZMQStream(socket)
        self._stream.on_recv(self._on_reply)
        self._asked_id = ""
        self._answer: asyncio.Future[str] | None = None

    async def ask(self, prompt: str, parent: dict[str, Any], ident: Any, *, is_password: bool) -> str | None:
        """Ask and return the answer; None for the end of input."""
        self._answer = asyncio.get_running_loop().create_future()
        content = {"prompt": prompt.encode(errors="replace").decode(), "password": is_password}
        sent = self._session.send(self._stream, "input_request", content, parent, ident=ident)
        self._asked_id = str(sent["msg_id"])
        try:
            text = await self._answer
        finally:
            self._answer = None
        return None if text == _END_OF_INPUT else text

    def _on_reply(self, parts: list[bytes]) -> None:
        _, unsigned = self._session.feed_identities(parts)
        try:
            reply = self._session.deserialize(unsigned)
        except (TypeError, ValueError):
            return  # forged, or meant for another kernel
        # Ignore a late answer to an earlier question, which its cell no longer waited for.
        asked_id = reply.get("parent_header", {}).get("msg_id", self._asked_id)
        value = reply.get("content", {}).get("value")
        if self._answer is not None and not self._answer.done() and asked_id == self._asked_id:
            self._answer.set_result(value if isinstance(value, str) else "")


# Comm messages between a front end and the widgets of a session: from Jupyter's form to ours, and back

KINDS: tuple[CommKind, ...] = ("comm_open", "comm_msg", "comm_close")
# What the runner sends in place of the id of a front end's request, which it cannot know and which differs for each
# front end.
_THIS_REQUEST = "belljar:this-request"


def received(kind: CommKind, request: dict[str, Any]) -> CommMessage:
    """Return a front end's message to a widget in our form."""
    content = cast("dict[str, Any]", request["content"])
    buffers = tuple(base64.b64encode(bytes(buffer)).decode() for buffer in request.get("buffers") or ())
    return CommMessage(
        kind,
        str(content.get("comm_id", "")),
        content.get("data") or {},
        str(content.get("target_name", "")),
        request.get("metadata") or {},
        buffers,
    )


def content_for(event: ExecutionOutput, request: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a widget's message as it goes to a front end.

    An `Output` widget names the request whose output it shows, so the request's id is filled in here.
    """
    data = event.content.get("data")
    state = cast("dict[str, Any]", data).get("state") if isinstance(data, dict) else None
    if not isinstance(state, dict) or cast("dict[str, Any]", state).get("msg_id") != _THIS_REQUEST:
        return event.content
    claimed = {**cast("dict[str, Any]", state), "msg_id": request.get("header", {}).get("msg_id", "")}
    return {**event.content, "data": {**cast("dict[str, Any]", data), "state": claimed}}


def buffers_of(event: ExecutionOutput) -> list[bytes]:
    """Return the binary parts of a comm message."""
    return [base64.b64decode(buffer) for buffer in event.buffers]
