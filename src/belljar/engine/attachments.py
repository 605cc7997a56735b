"""Attaching to a session of this process.

Output of cells is read from the journal when the front end is ready for it. Messages of widgets are not in the journal:
`CommViews` keeps them until their place in that output, within a limit. Does not know how a front end is connected.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from belljar.engine.attachment_messages import (
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
from belljar.executions.cell import make_cell
from belljar.executions.execution import Execution
from belljar.kernels.base import Kernel
from belljar.kernels.ipython import IPythonKernel
from belljar.models import OutputEvent
from belljar.outputs.events import CommMessage, Event, Notice
from belljar.outputs.forms import ReadDisplay
from belljar.outputs.jupyter_messages import OutputKind, ending, output_at_once, output_of
from belljar.outputs.spoofed_notices import StreamDisarmer
from belljar.questions.models import QuestionReply
from belljar.questions.schema import typed_prompt, values_of
from belljar.sessions.kernel_questions import ask_between_cells
from belljar.sessions.session import Session

_T = TypeVar("_T")
_BATCH = 100
_LONG_S = 3600.0


class LocalAttachment:
    """An `AttachedSession` whose session is in this process. With an author, cells are marked as theirs."""

    def __init__(self, session: Session, read_display: ReadDisplay, author: str) -> None:
        self._session = session
        self.session_id = session.id
        self.environment = session.environment
        kernel = session.session_kernel.kernel
        self.python_version = kernel.environment.version if isinstance(kernel, IPythonKernel) else ""
        self._read_display = read_display
        self._author = author
        self._own: set[str] = set()
        self._announced: set[str] = set()
        self._queue: asyncio.Queue[Execution | CommUpdate | CommHeard | None] = asyncio.Queue()
        self._views = CommViews()
        last = session.queue.latest()
        self.count = last.result().execution_count if last else 0
        session.watchers.add(self._on_execution)
        session.comms.add_watcher(self._on_comm)
        for execution in session.queue.running():
            if execution.has_started:
                self._on_execution(execution)

    def _on_execution(self, execution: Execution | None) -> None:
        if execution is None:
            self._queue.put_nowait(None)
        elif execution.id not in self._announced and (execution.has_started or execution.id in self._own):
            self._announced.add(execution.id)
            self._queue.put_nowait(execution)
        elif execution.is_finished:
            self._announced.discard(execution.id)

    def _on_comm(self, source_id: str, sequence: int, event: Event | None) -> None:
        if event is None:
            self._queue.put_nowait(CommHeard(request_id=source_id))
        elif (update := self._views.take(source_id, event)) is None:
            return
        elif source_id in self._announced:
            self._views.hold_back(update, sequence)
        else:
            self._queue.put_nowait(update)

    # What happens in the session

    async def events(self) -> AsyncGenerator[SessionEvent]:
        """See `AttachedSession`. Read from the journal, so a slow reader loses nothing."""
        while (next_one := await self._queue.get()) is not None:
            if isinstance(next_one, Execution):
                async for item in self._events_of(next_one):
                    yield item
                continue
            yield self._views.release(next_one) if isinstance(next_one, CommUpdate) else next_one
        yield SessionEnded()

    async def _events_of(self, execution: Execution) -> AsyncGenerator[SessionEvent]:
        is_own = execution.id in self._own
        count = self.count + 1
        yield ExecutionStarted(execution_id=execution.id, code=execution.cell.code, count=count, is_own=is_own)
        has_error = False
        async for item in self._outputs_of(execution, count, is_own=is_own):
            has_error = has_error or (isinstance(item, ExecutionOutput) and item.output == "error")
            yield item
        result = execution.result()
        for output, content in ending(result, has_error=has_error):
            yield ExecutionOutput(execution_id=execution.id, output=output, content=content)
        self._own.discard(execution.id)
        self.count = result.execution_count
        yield ExecutionEnded(execution_id=execution.id, status=result.status, count=result.execution_count)

    async def _outputs_of(self, execution: Execution, count: int, *, is_own: bool) -> AsyncGenerator[SessionEvent]:
        seen = asked = 0
        disarmer = StreamDisarmer()
        while True:
            # Read this first: what is written between this line and the next is then found in the next round.
            is_finished = execution.is_finished
            events = list(islice(self._session.journal.events(execution.id, seen), _BATCH))
            for event in events:
                for update in self._views.due(execution.id, event.sequence):
                    yield update
                seen = event.sequence
                # The front end that ran the cell need not be told its author.
                if (output := await self._read_output(execution, event, count, disarmer)) and not (
                    is_own and "author" in event.data
                ):
                    yield output
            question = execution.question
            updates = [*self._views.due(execution.id, seen + 1)]
            for update in updates:
                yield update
            if events or updates:
                continue
            if is_finished:
                return
            if is_own and question is not None and execution.question_number > asked:
                asked = execution.question_number
                yield QuestionAsked(
                    execution_id=execution.id,
                    prompt=typed_prompt(question.message, question.schema),
                    is_password=question.is_password,
                    question=asked,
                )
                continue
            await execution.wait_for_change(_LONG_S)

    async def _read_output(
        self, execution: Execution, event: OutputEvent, count: int, disarmer: StreamDisarmer
    ) -> ExecutionOutput | None:
        """Return an event as a front end shows it; streams are marked where they look like a notice of belljar's."""
        if event.kind == "notice":
            disarmer.notice()
        elif event.kind in ("stdout", "stderr"):
            event = event.model_copy(update={"text": disarmer.feed(event.text)})
        if event.kind in ("display", "result"):
            output = await asyncio.to_thread(output_of, event, self._read_display, count)
        else:
            output = output_of(event, self._read_display, count)
        return ExecutionOutput(execution_id=execution.id, output=output[0], content=output[1]) if output else None

    # Cells

    async def execute(self, code: str, *, allow_input: bool) -> str:
        """See `AttachedSession`."""
        session = self._session
        session.lease.touch()
        execution = session.submit(
            make_cell(session.settings, code, allow_input=allow_input, author=self._author),
        )
        self._own.add(execution.id)
        return execution.id

    async def answer(self, execution_id: str, text: str | None, question: int) -> None:
        """See `AttachedSession`."""
        execution = self._session.queue.find(execution_id)
        if execution is None or execution_id not in self._own or (asked := execution.question) is None:
            return
        values = values_of(asked.schema, text)
        reply = QuestionReply("decline") if values is None else QuestionReply("accept", values)
        execution.reply(reply, question, by=self._author, where="terminal")

    async def interrupt(self) -> None:
        """See `AttachedSession`."""
        self._session.comms.interrupt()
        for execution in reversed(self._session.queue.running()):
            execution.interrupt()

    # Widgets

    async def send_comm(self, request_id: str, message: CommMessage) -> None:
        """See `AttachedSession`."""
        # In a task of the session, so that it goes on when the front end has gone, and ends with the session.
        session = self._session
        session.queue.run_aside(session.comms.deliver(request_id, message, self._author))

    async def comms(self) -> dict[str, str]:
        """See `AttachedSession`."""
        return await self._between_cells(lambda _: self._session.comms.list_open()) or {}

    # Help for a person who types

    async def complete(self, code: str, cursor: int) -> CompletionReply:
        """See `AttachedSession`."""
        found = await self._between_cells(lambda kernel: kernel.complete(code, cursor))
        if found is None:
            return CompletionReply(matches=[], start=cursor, end=cursor)
        return CompletionReply(matches=found.matches, start=found.start, end=found.end)

    async def inspect(self, code: str, cursor: int, detail: int = 0) -> InspectionReply:
        """See `AttachedSession`."""
        found = await self._between_cells(lambda kernel: kernel.inspect(code, cursor, detail=detail))
        return InspectionReply(data=found or {})

    async def check(self, code: str) -> CompletenessReply:
        """See `AttachedSession`."""
        found = await self._between_cells(lambda kernel: kernel.check_complete(code))
        return (
            CompletenessReply(status=found.status, indent=found.indent)
            if found
            else CompletenessReply(status="unknown", indent="")
        )

    async def _between_cells(self, ask: Callable[[Kernel], Awaitable[_T]]) -> _T | None:
        self._session.lease.touch()
        return await ask_between_cells(self._session, ask)

    async def aclose(self) -> None:
        """See `AttachedSession`."""
        if self._on_execution in self._session.watchers:
            self._session.watchers.discard(self._on_execution)
            self._session.comms.remove_watcher(self._on_comm)
            self._session.lease.touch()
            for execution in self._session.queue.running():
                if execution.id in self._own:
                    execution.reply(QuestionReply("decline"))  # nobody is left to ask
            self._queue.put_nowait(None)


# Messages of widgets that wait for one front end. Those that it is too slow for are dropped.

MAX_WAITING_BYTES = 64 * 1024 * 1024
# What the shortest message takes in memory while it waits.
MIN_MESSAGE_BYTES = 1_000
_LOST = "the front end is too slow for its widgets: some of what they said is lost"


@dataclass(frozen=True, slots=True)
class CommUpdate:
    """A message of a widget that waits, kept as JSON text because nested data takes many times as much memory."""

    source_id: str
    output: OutputKind
    content: str
    metadata: str = "{}"
    buffers: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Return about what it takes in memory."""
        return MIN_MESSAGE_BYTES + len(self.content) + len(self.metadata) + sum(map(len, self.buffers))


class CommViews:
    """The messages of widgets that wait for one front end, with a limit on their size."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[tuple[int, CommUpdate]]] = {}
        self._waiting_bytes = 0
        self._is_behind = False

    def take(self, source_id: str, event: Event) -> CommUpdate | None:
        """Return what to pass on to the front end for an event; None if nothing, or if too much waits already."""
        if self._waiting_bytes > MAX_WAITING_BYTES:
            if self._is_behind:
                return None
            self._is_behind, event = True, Notice(_LOST)
        else:
            self._is_behind = False
        if (output := output_at_once(event)) is None:
            return None
        update = CommUpdate(source_id, output[0], json.dumps(output[1]))
        if isinstance(event, CommMessage):
            update = CommUpdate(source_id, output[0], update.content, json.dumps(event.metadata), event.buffers)
        self._waiting_bytes += update.size_bytes
        return update

    def hold_back(self, update: CommUpdate, sequence: int) -> None:
        """Keep a message until that many events of its execution were passed on."""
        self._waiting.setdefault(update.source_id, deque()).append((sequence, update))

    def due(self, execution_id: str, sequence: int) -> Iterator[ExecutionOutput]:
        """Yield the messages that came before the execution's event of that number."""
        waiting = self._waiting.get(execution_id)
        while waiting and waiting[0][0] < sequence:
            yield self.release(waiting.popleft()[1])
        if waiting is not None and not waiting:
            self._waiting.pop(execution_id, None)

    def release(self, update: CommUpdate) -> ExecutionOutput:
        """Return the message for the front end, and count it as waiting no longer."""
        self._waiting_bytes -= update.size_bytes
        return ExecutionOutput(
            execution_id=update.source_id,
            output=update.output,
            content=json.loads(update.content),
            metadata=json.loads(update.metadata),
            buffers=[*update.buffers],
        )
