"""The kernel that front ends talk to: Jupyter's requests to a session, the session's news to Jupyter's messages.

Runs no code itself, and knows sessions by the contract of attachments only. Comms, and so widgets, are not carried: the
session's side of them is sealed off, and front ends are told that there are none.
"""

# ipykernel and traitlets are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false

import asyncio
import contextlib
from collections.abc import Coroutine
from contextlib import aclosing
from importlib.metadata import version
from typing import Any, TypeVar

from ipykernel._version import kernel_protocol_version
from ipykernel.kernelbase import Kernel

from belljar.attachments import Attached
from belljar.attachments.messages import Asks, Begun, Ended, Gone, News, Said
from belljar.errors import BelljarError, EngineError
from belljar.jupyter.asking import Questions
from belljar.jupyter.history import History
from belljar.jupyter.sessions import Keeper

_T = TypeVar("_T")
# A front end gives a kernel a minute to answer, and making an environment may take longer: then it is answered before
# the session is there.
FIRST_WAIT_S = 20.0
_PYTHON = {
    "name": "python",
    "mimetype": "text/x-python",
    "file_extension": ".py",
    "pygments_lexer": "ipython3",
    "codemirror_mode": {"name": "ipython", "version": 3},
    "nbconvert_exporter": "python",
}


class Cell:
    """A cell of this front end, from its request to its end."""

    def __init__(self, parent: dict[str, Any], ident: Any, *, is_silent: bool) -> None:
        self.parent = parent
        self.ident = ident
        self.is_silent = is_silent
        self.error: dict[str, Any] | None = None
        self.question: asyncio.Task[None] | None = None
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()


class BelljarKernel(Kernel):
    """One front end's kernel; its application gives it a `keeper` before it starts."""

    implementation = "belljar"
    implementation_version = version("belljar")
    banner = "belljar: a sealed session"
    keeper: Keeper

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.language_info = {**_PYTHON, "version": "3"}
        self._cells: dict[str, Cell] = {}
        self._current: Cell | None = None
        self._history = History()
        self._following: asyncio.Task[None] | None = None
        self._others: dict[str, dict[str, Any]] = {}
        """Requests that would have led to the cells of others, by execution."""

    def start(self) -> None:
        """Begin to answer; the session is opened meanwhile."""
        super().start()
        self._loop: asyncio.AbstractEventLoop = self.io_loop.asyncio_loop  # pyright: ignore[reportAttributeAccessIssue]
        self._signed: Any = self.session
        self._questions = Questions(self._signed, self.stdin_socket)
        self.io_loop.add_callback(self._open_ahead)

    async def _open_ahead(self) -> None:
        with contextlib.suppress(BelljarError):  # told to the first cell, which tries again
            await self._attached()

    async def _attached(self) -> Attached:
        attached = await self.keeper.attached()
        if self._following is None or self._following.done():
            self.execution_count = attached.count
            self._following = asyncio.get_running_loop().create_task(self._follow(attached))
            self._describe(attached)
        return attached

    def _describe(self, attached: Attached) -> None:
        self.banner = f"belljar: session {attached.session_id}, environment {attached.environment}"
        if attached.environment.startswith("kernel:"):
            name = attached.environment.removeprefix("kernel:")
            self.language_info = {"name": name, "mimetype": "text/plain", "file_extension": ".txt", "version": ""}
        elif attached.python_version:
            self.language_info = {**_PYTHON, "version": attached.python_version}

    # What the session says

    async def _follow(self, attached: Attached) -> None:
        try:
            async with aclosing(attached.news()) as news:
                async for item in news:
                    self._publish_news(attached, item)
        finally:
            for cell in {*self._cells.values(), *([self._current] if self._current else [])}:
                if not cell.ended.done():
                    cell.ended.set_exception(EngineError("the session has ended"))
            self._cells.clear()
        await self.keeper.aclose()

    def _publish_news(self, attached: Attached, item: News) -> None:
        match item:
            case Begun():
                self._begin(item)
            case Said():
                self._say(item)
            case Asks():
                cell = self._cells.get(item.execution_id)
                if cell is not None:
                    cell.question = asyncio.get_running_loop().create_task(self._ask(attached, cell, item))
            case Ended():
                self._end(item)
            case Gone():
                pass

    def _begin(self, begun: Begun) -> None:
        self._history.add(begun.count, begun.code)
        if begun.is_own and self._current is not None:
            self._cells[begun.execution_id] = self._current
            return
        header = self._signed.msg_header("execute_request")
        other = {"header": {**header, "msg_id": begun.execution_id, "session": "belljar", "username": "belljar"}}
        self._others[begun.execution_id] = other
        self._publish_status("busy", "shell", parent=other)
        self._publish_execute_input(begun.code, other, begun.count)

    def _say(self, said: Said) -> None:
        cell = self._cells.get(said.execution_id)
        if cell is not None and said.output == "error":
            cell.error = said.content
        if cell is not None and cell.is_silent:
            return
        parent = cell.parent if cell is not None else self._others.get(said.execution_id, {})
        self._signed.send(self.iopub_socket, said.output, said.content, parent=parent, ident=self._topic(said.output))

    def _end(self, ended: Ended) -> None:
        self.execution_count = ended.count
        if (cell := self._cells.pop(ended.execution_id, None)) is not None:
            if cell.question is not None:
                cell.question.cancel()
            if not cell.ended.done():
                cell.ended.set_result(ended)
        if (other := self._others.pop(ended.execution_id, None)) is not None:
            self._publish_status("idle", "shell", parent=other)

    async def _ask(self, attached: Attached, cell: Cell, asks: Asks) -> None:
        text = await self._questions.ask(asks.prompt, cell.parent, cell.ident, is_password=asks.is_password)
        with contextlib.suppress(BelljarError):
            await attached.answer(asks.execution_id, text, asks.question)

    # What the front end asks

    async def kernel_info_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Answer when the session is there, or when it takes too long to wait for."""
        with contextlib.suppress(BelljarError, TimeoutError):
            await self._on_main(asyncio.wait_for(self._attached(), FIRST_WAIT_S))
        await super().kernel_info_request(stream, ident, parent)

    @property
    def kernel_info(self) -> dict[str, Any]:
        """What front ends are told. Debugging is not among it: there is nothing of the user's here to debug."""
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
        """Run a cell in the session, in its turn, and wait for its end."""
        if not code.strip():
            return self._succeeded(self.execution_count)
        cell = self._current = Cell(self.get_parent("shell"), self._parent_ident["shell"], is_silent=silent)
        try:
            attached = await self._attached()
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
        told = {"ename": error.code, "evalue": error.message, "traceback": lines}
        if not is_silent:
            self.send_response(self.iopub_socket, "error", told, ident=self._topic("error"))
        return {"status": "error", "execution_count": self.execution_count, **told}

    async def do_complete(self, code: str, cursor_pos: int) -> dict[str, Any]:
        """Names that fit; none while a cell runs."""
        try:
            found = await (await self._attached()).complete(code, cursor_pos)
        except BelljarError:
            return await super().do_complete(code, cursor_pos)
        span = {"cursor_start": found.start, "cursor_end": found.end}
        return {"status": "ok", "matches": found.matches, **span, "metadata": {}}

    async def do_inspect(
        self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()
    ) -> dict[str, Any]:
        """What a name is; nothing while a cell runs."""
        try:
            data = (await (await self._attached()).inspect(code, cursor_pos, detail_level)).data
        except BelljarError:
            data = {}
        return {"status": "ok", "found": bool(data), "data": data, "metadata": {}}

    async def do_is_complete(self, code: str) -> dict[str, Any]:
        """Whether code is a whole cell."""
        try:
            checked = await (await self._attached()).check(code)
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
        """Cells of the session since this kernel holds it, whoever ran them."""
        wanted = {"start": start, "stop": stop, "n": n, "pattern": pattern, "unique": unique}
        return {"status": "ok", "history": self._history.reply(hist_access_type, output=bool(output), **wanted)}

    async def interrupt_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Stop what runs in the session."""
        content: dict[str, Any] = {"status": "ok"}
        try:
            await self._on_main(self._interrupt())
        except BelljarError as error:
            content = {"status": "error", "ename": error.code, "evalue": error.message, "traceback": []}
        self._signed.send(stream, "interrupt_reply", content, parent, ident=ident)

    async def _interrupt(self) -> None:
        await (await self._attached()).interrupt()

    async def do_shutdown(self, restart: bool) -> dict[str, Any]:
        """End the session, or let go of the agent's."""
        await self._on_main(self.aclose())
        return {"status": "ok", "restart": restart}

    async def aclose(self) -> None:
        """Let go of the session; may be called twice."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self.keeper.aclose()

    async def _on_main(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Control messages come in a thread of their own; sessions live in the main one's loop."""
        if asyncio.get_running_loop() is self._loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    # SIGINT means nothing here: front ends interrupt by message, and no code of the user's runs in this process.

    def pre_handler_hook(self) -> None:
        """Nothing to prepare."""

    def post_handler_hook(self) -> None:
        """Nothing to undo."""
