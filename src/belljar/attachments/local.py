"""A hold on a session of this process."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from belljar.answers import values_of
from belljar.attachments.messages import (
    CommHeard,
    CompletenessReply,
    CompletionReply,
    ExecutionEnded,
    ExecutionOutput,
    ExecutionStarted,
    InspectionReply,
    QuestionAsked,
    SessionEnded,
    SessionEvent,
)
from belljar.errors import KernelDied
from belljar.executions.cell import make_cell
from belljar.executions.execution import Execution
from belljar.kernels.base import Kernel
from belljar.kernels.ipython import IPythonKernel
from belljar.models import OutputEvent
from belljar.outputs.events import CommMessage, Event, Stream
from belljar.outputs.jupyter_messages import OutputKind, ending, output_at_once, output_of
from belljar.outputs.mime_bundles import ReadDisplay
from belljar.sessions.registry import Registry
from belljar.sessions.session import Session
from belljar.toolbox.base import QuestionReply

_T = TypeVar("_T")
_BATCH = 100
_LONG_S = 3600.0
# A name that is completed a second late is completed too late: who types has gone on.
TURN_PATIENCE_S = 1.0


def attach(registry: Registry, session: Session, author: str = "") -> "LocalAttachment":
    """Hold a session; with an author, cells are marked as theirs rather than the owner's."""
    return LocalAttachment(session, registry.executions.display_reader(session.id), author)


class LocalAttachment:
    """See `Attached`."""

    def __init__(self, session: Session, read_display: ReadDisplay, author: str) -> None:
        self._session = session
        self._read_display = read_display
        self._author = author
        self._own: set[str] = set()
        self._told: set[str] = set()
        self._queue: asyncio.Queue[Execution | CommUpdate | CommHeard | None] = asyncio.Queue()
        self._views = CommViews()
        last = session.queue.latest()
        self._count = last.result().execution_count if last else 0
        session.watchers.add(self._on_execution)
        session.comms.watch(self._on_comm)
        for execution in session.queue.running():
            if execution.has_started:
                self._on_execution(execution)

    @property
    def session_id(self) -> str:
        """See `Attached`."""
        return self._session.id

    @property
    def environment(self) -> str:
        """See `Attached`."""
        return self._session.environment

    @property
    def python_version(self) -> str:
        """See `Attached`."""
        kernel = self._session.session_kernel.kernel
        return kernel.environment.version if isinstance(kernel, IPythonKernel) else ""

    @property
    def count(self) -> int:
        """See `Attached`."""
        return self._count

    def _on_execution(self, execution: Execution | None) -> None:
        if execution is None:
            self._queue.put_nowait(None)
        elif execution.id not in self._told and (execution.has_started or execution.id in self._own):
            self._told.add(execution.id)
            self._queue.put_nowait(execution)
        elif execution.is_finished:
            self._told.discard(execution.id)

    def _on_comm(self, source_id: str, sequence: int, event: Event | None) -> None:
        if event is None:
            self._queue.put_nowait(CommHeard(request_id=source_id))
        elif (word := self._views.taken(source_id, event)) is None:
            return
        elif source_id in self._told:
            self._views.hold_back(word, sequence)
        else:
            self._queue.put_nowait(word)

    # News

    async def news(self) -> AsyncGenerator[SessionEvent]:
        """See `Attached`. Read from the journal, so a slow reader loses nothing."""
        while (next_one := await self._queue.get()) is not None:
            if isinstance(next_one, Execution):
                async for item in self._news_of(next_one):
                    yield item
                continue
            yield self._views.told(next_one) if isinstance(next_one, CommUpdate) else next_one
        yield SessionEnded()

    async def _news_of(self, execution: Execution) -> AsyncGenerator[SessionEvent]:
        is_own = execution.id in self._own
        count = self._count + 1
        yield ExecutionStarted(execution_id=execution.id, code=execution.cell.code, count=count, is_own=is_own)
        has_error = False
        async for item in self._said_by(execution, count, is_own=is_own):
            has_error = has_error or (isinstance(item, ExecutionOutput) and item.output == "error")
            yield item
        result = execution.result()
        for output, content in ending(result, has_error=has_error):
            yield ExecutionOutput(execution_id=execution.id, output=output, content=content)
        self._own.discard(execution.id)
        self._count = result.execution_count
        yield ExecutionEnded(execution_id=execution.id, status=result.status, count=result.execution_count)

    async def _said_by(self, execution: Execution, count: int, *, is_own: bool) -> AsyncGenerator[SessionEvent]:
        seen = asked = 0
        while True:
            # Asked first: what is said between the two questions is then found by the next look.
            is_finished = execution.is_finished
            events = list(islice(self._session.journal.events(execution.id, seen), _BATCH))
            for event in events:
                for word in self._views.due(execution.id, event.sequence):
                    yield word
                seen = event.sequence
                # Who ran it knows who did.
                if (said := await self._said(execution, event, count)) and not (is_own and "author" in event.data):
                    yield said
            question = execution.question
            words = [*self._views.due(execution.id, seen + 1)]
            for word in words:
                yield word
            if events or words:
                continue
            if is_finished:
                return
            if is_own and question is not None and execution.questions > asked:
                asked = execution.questions
                yield QuestionAsked(
                    execution_id=execution.id,
                    prompt=question.message,
                    is_password=question.is_password,
                    question=asked,
                )
                continue
            await execution.wait_for_change(_LONG_S)

    async def _said(self, execution: Execution, event: OutputEvent, count: int) -> ExecutionOutput | None:
        if event.kind in ("display", "result"):
            output = await asyncio.to_thread(output_of, event, self._read_display, count)
        else:
            output = output_of(event, self._read_display, count)
        return ExecutionOutput(execution_id=execution.id, output=output[0], content=output[1]) if output else None

    # Cells

    async def execute(self, code: str, *, allow_input: bool) -> str:
        """See `Attached`."""
        session = self._session
        session.lease.touch()
        execution = session.submit(
            make_cell(session.settings, code, allow_input=allow_input, author=self._author),
        )
        self._own.add(execution.id)
        return execution.id

    async def answer(self, execution_id: str, text: str | None, question: int) -> None:
        """See `Attached`."""
        execution = self._session.queue.find(execution_id)
        if execution is None or execution_id not in self._own or (asked := execution.question) is None:
            return
        values = values_of(asked.schema, text)
        execution.reply(QuestionReply("decline") if values is None else QuestionReply("accept", values), question)

    async def interrupt(self) -> None:
        """See `Attached`."""
        self._session.comms.interrupt()
        for execution in reversed(self._session.queue.running()):
            execution.interrupt()

    # Widgets

    async def send_comm(self, request_id: str, message: CommMessage) -> None:
        """See `Attached`."""
        # Aside: it goes on when who sent it has gone, and ends with the session.
        session = self._session
        session.queue.run_aside(session.comms.deliver(request_id, message, self._author))

    async def comms(self) -> dict[str, str]:
        """See `Attached`."""
        return await self._between_cells(lambda _: self._session.comms.opened()) or {}

    # What a person who types wants to know

    async def complete(self, code: str, cursor: int) -> CompletionReply:
        """See `Attached`."""
        found = await self._between_cells(lambda kernel: kernel.complete(code, cursor))
        if found is None:
            return CompletionReply(matches=[], start=cursor, end=cursor)
        return CompletionReply(matches=found.matches, start=found.start, end=found.end)

    async def inspect(self, code: str, cursor: int, detail: int = 0) -> InspectionReply:
        """See `Attached`."""
        found = await self._between_cells(lambda kernel: kernel.inspect(code, cursor, detail=detail))
        return InspectionReply(data=found or {})

    async def check(self, code: str) -> CompletenessReply:
        """See `Attached`."""
        found = await self._between_cells(lambda kernel: kernel.check_complete(code))
        return (
            CompletenessReply(status=found.status, indent=found.indent)
            if found
            else CompletenessReply(status="unknown", indent="")
        )

    async def _between_cells(self, ask: Callable[[Kernel], Awaitable[_T]]) -> _T | None:
        """The kernel's answer, in the session's turn; None when others have it."""
        session = self._session
        if session.is_busy:
            return None
        try:
            async with asyncio.timeout(TURN_PATIENCE_S):
                await session.turn.acquire()
        except TimeoutError:
            return None
        try:
            kernel = session.session_kernel.kernel
            session.lease.touch()
            return await ask(kernel) if kernel is not None and kernel.is_alive() else None
        except KernelDied:
            return None
        finally:
            session.turn.release()

    async def aclose(self) -> None:
        """See `Attached`."""
        if self._on_execution in self._session.watchers:
            self._session.watchers.discard(self._on_execution)
            self._session.comms.unsubscribe(self._on_comm)
            self._session.lease.touch()
            for execution in self._session.queue.running():
                if execution.id in self._own:
                    execution.answer(None)  # nobody is left to ask
            self._queue.put_nowait(None)


# What widgets say, on its way to one front end: in its place between the outputs of cells, and not without bound.
# Outputs are read from the journal when the front end is ready for them. Words of widgets are not kept there, so they
# wait here, and those that a front end is too slow for are lost to it.

MOST_WAITING_BYTES = 64 * 1024 * 1024
# What the shortest word takes in memory while it waits.
WORD_BYTES = 1_000
_LOST = "[belljar: the front end is too slow for its widgets: some of what they said is lost]\n"


@dataclass(frozen=True, slots=True)
class CommUpdate:
    """Something said that waits: as text, of which nested data takes many times as much."""

    source_id: str
    output: OutputKind
    content: str
    metadata: str = "{}"
    buffers: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """About what it takes in memory."""
        return WORD_BYTES + len(self.content) + len(self.metadata) + sum(map(len, self.buffers))


class CommViews:
    """One front end's."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[tuple[int, CommUpdate]]] = {}
        self._waiting_bytes = 0
        self._is_behind = False

    def taken(self, source_id: str, event: Event) -> CommUpdate | None:
        """An event that is to be told; None for what is not, or one too many."""
        if self._waiting_bytes > MOST_WAITING_BYTES:
            if self._is_behind:
                return None
            self._is_behind, event = True, Stream("stderr", _LOST)
        else:
            self._is_behind = False
        if (output := output_at_once(event)) is None:
            return None
        word = CommUpdate(source_id, output[0], json.dumps(output[1]))
        if isinstance(event, CommMessage):
            word = CommUpdate(source_id, output[0], word.content, json.dumps(event.metadata), event.buffers)
        self._waiting_bytes += word.size_bytes
        return word

    def hold_back(self, word: CommUpdate, sequence: int) -> None:
        """It comes after so many events of its execution."""
        self._waiting.setdefault(word.source_id, deque()).append((sequence, word))

    def due(self, execution_id: str, sequence: int) -> Iterator[ExecutionOutput]:
        """What was said before the execution's event of that number."""
        waiting = self._waiting.get(execution_id)
        while waiting and waiting[0][0] < sequence:
            yield self.told(waiting.popleft()[1])
        if waiting is not None and not waiting:
            self._waiting.pop(execution_id, None)

    def told(self, word: CommUpdate) -> ExecutionOutput:
        """The news of it, which waits no longer."""
        self._waiting_bytes -= word.size_bytes
        return ExecutionOutput(
            execution_id=word.source_id,
            output=word.output,
            content=json.loads(word.content),
            metadata=json.loads(word.metadata),
            buffers=[*word.buffers],
        )
