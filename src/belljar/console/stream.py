"""The changes of an open page, as parts of HTML over server-sent events.

One stream a tab. Each event says what to do with which element: append, replace, add text, empty, remove. A page that
comes back names the place up to which it has everything, and goes on there.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from belljar.console.cell_views import CellView
from belljar.console.cells import RenderedOutput, RenderStep, code_markup, highlight
from belljar.console.pages import LIVE, Pages
from belljar.engine.contract import Access, Engine
from belljar.engine.models import UNFINISHED, ExecutionEntry, Followed
from belljar.errors import BelljarError, InvalidArgument, SessionNotFound
from belljar.http.event_streams import StreamShares, event_stream

_GATHER_S: Final = 0.5
_PRESENCE_S: Final = 10.0
_LOOK_S: Final = 5.0
_PART_S: Final = 1.0
_PART_SHARE: Final = 20
_INBOX: Final = "inbox"

Part = Callable[[Access, str], Awaitable[str]]
"""Makes a part of a page for somebody, of what the page says after the part's name."""


class PageStreams:
    """The streams of all pages that are open."""

    def __init__(self, engine: Engine, pages: Pages, parts: Mapping[str, Part]) -> None:
        self._engine = engine
        self._pages = pages
        self._parts: dict[str, Part] = {"health": pages.health_part, **parts}
        self._shares = StreamShares()

    async def serve(self, request: Request) -> Response:
        """Answer `/console/stream?page=…&after=…`."""
        access: Access = request.state.access
        page = request.query_params.get("page", "")
        after = request.headers.get("last-event-id") or request.query_params.get("after", "")
        kind, _, session_id = page.partition(":")
        if kind == "sessions":
            events = self._sessions(access, after)
        elif kind == "waiting":
            events = self._waiting(access)
        elif kind == "inbox":
            events = self._inbox(access)
        elif kind in self._parts:
            make = partial(self._parts[kind], access, session_id)
            events = self._part(access, kind, await make(), make)
        elif kind == "session":
            detail = await self._engine.session(access, session_id)  # a plain 404 where there is none
            stream = SessionPageStream(self._engine, self._pages, access, session_id)
            events = stream.events(after, detail.rewindable)
        else:
            raise InvalidArgument(f"there is no page {page[:64]!r}")
        return event_stream(request, self._present(access, events), self._shares, access.principal)

    async def _present(self, access: Access, events: AsyncGenerator[dict[str, str]]) -> AsyncGenerator[dict[str, str]]:
        """Yield the events while the engine is told that somebody is there who may answer questions."""

        async def stay() -> None:
            while True:
                with suppress(BelljarError):
                    await self._engine.note_presence(access)
                await asyncio.sleep(_PRESENCE_S)

        staying = asyncio.get_running_loop().create_task(stay())
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
        finally:
            staying.cancel()
            await asyncio.gather(staying, return_exceptions=True)

    @asynccontextmanager
    async def _hearing(self, access: Access) -> AsyncGenerator[Callable[..., Awaitable[None]]]:
        """Yield a function that waits, for `_LOOK_S` or as long as said, until a question is put or answered.

        Workflows' questions and earlier ones are not reported here, so callers look again after each wait.
        """
        wake = asyncio.Event()

        async def listen() -> None:
            async with aclosing(self._engine.server_events(access)) as happened:
                async for item in happened:
                    if item.kind in ("question", "reset"):
                        wake.set()

        async def wait(most_s: float = _LOOK_S) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(most_s):
                    await _first(wake.wait(), listening)
            wake.clear()

        listening = asyncio.get_running_loop().create_task(listen())
        try:
            yield wait
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _inbox(self, access: Access) -> AsyncGenerator[dict[str, str]]:
        """Yield which questions wait, and those of them that were not sent yet."""
        sent: set[str] = set()
        sent_ids: list[str] | None = None
        async with self._hearing(access) as wait:
            while True:
                waiting = await self._engine.questions(access)
                for entry in waiting:
                    if entry.id not in sent:
                        made = await asyncio.to_thread(self._pages.question, entry, access)
                        yield change("question", f"question-{entry.id}", made)
                sent = {entry.id for entry in waiting}
                if (ids := [f"question-{entry.id}" for entry in waiting]) != sent_ids:
                    sent_ids = ids
                    yield change("waiting", ids=ids)
                await wait()

    async def _waiting(self, access: Access) -> AsyncGenerator[dict[str, str]]:
        """Yield how many questions wait, for pages that show nothing else that changes."""
        sent_count: int | None = None
        async with aclosing(self._inbox(access)) as changes:
            async for one in changes:
                data = json.loads(one["data"])
                if data["do"] == "waiting" and len(data["ids"]) != sent_count:
                    sent_count = len(data["ids"])
                    yield change("inbox", count=sent_count)

    async def _part(
        self, access: Access, target: str, first: str, make: Callable[[], Awaitable[str]]
    ) -> AsyncGenerator[dict[str, str]]:
        """Yield a part of a page whenever it has changed, and how many questions wait."""
        shown, part, waiting = "", first, -1
        async with self._hearing(access) as wait:
            while True:
                if part != shown:
                    shown = part
                    yield change("replace", target, part)
                if (count := len(await self._engine.questions(access))) != waiting:
                    waiting = count
                    yield change("inbox", count=count)
                began = time.monotonic()
                try:
                    part = await make()
                except BelljarError:
                    yield change("reload")  # what it shows is gone: the page says so
                    return
                # What takes long to make is not made all the time.
                await wait(_PART_S + _PART_SHARE * (time.monotonic() - began))

    async def _sessions(self, access: Access, after: str) -> AsyncGenerator[dict[str, str]]:
        """Yield the rows of sessions that changed, gathered for half a second."""
        changed: set[str] = set()
        wake = asyncio.Event()
        place = after

        async def listen() -> None:
            nonlocal place
            async with aclosing(self._engine.server_events(access, after)) as happened:
                async for item in happened:
                    place = item.id
                    if item.kind != "question":
                        changed.add("" if item.kind == "reset" else item.session_id)
                    else:  # those of workflows may have no session
                        changed.update({_INBOX, item.session_id or _INBOX})
                    wake.set()

        listening = asyncio.get_running_loop().create_task(listen())
        try:
            while True:
                await _first(wake.wait(), listening)
                await asyncio.sleep(_GATHER_S)
                wake.clear()
                ids, at = [*changed], place
                changed.clear()
                if "" in ids:
                    yield change("reload", id=at)
                    continue
                if _INBOX in ids:
                    yield change("inbox", count=len(await self._engine.questions(access)))
                shown = [session_id for session_id in ids if session_id != _INBOX]
                for session_id in shown:
                    # Only the last one completes the place: a page that comes back gets all of them.
                    place_told = at if session_id == shown[-1] else ""
                    if (row := await self._row(access, session_id, place_told)) is not None:
                        yield row
                    else:
                        changed.add(session_id)
                        wake.set()
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _row(self, access: Access, session_id: str, place: str) -> dict[str, str] | None:
        """Return the change of a row; None while the session cannot be read."""
        try:
            entry = await self._engine.session(access, session_id)
        except SessionNotFound:
            return change("remove", f"session-{session_id}", id=place)
        except BelljarError:
            return None
        if entry.state == "gone":
            return change("remove", f"session-{session_id}", id=place)
        html = self._pages.session_row(access, entry)
        return change("row", f"session-{session_id}", html, id=place, list="live" if entry.state in LIVE else "others")


async def _first(waiting: Any, task: "asyncio.Task[None]") -> None:
    """Wait until something happens, or raise what ended the task."""
    wait = asyncio.ensure_future(waiting)
    try:
        await asyncio.wait([wait, task], return_when=asyncio.FIRST_COMPLETED)
    finally:
        wait.cancel()
    if task.done():
        task.result()


class SessionPageStream:
    """The stream of one open page of a session."""

    def __init__(self, engine: Engine, pages: Pages, access: Access, session_id: str) -> None:
        self._engine = engine
        self._pages = pages
        self._access = access
        self._session_id = session_id
        self._cell: RenderedOutput | None = None
        self._had_ended = False
        """Whether the cell had ended before the page heard of it: it is sent once, whole, instead of in parts."""
        self._has_tail = False
        self._rewindable: frozenset[str] | None = None
        """The cells one can go back to, as the page was told; None before it was told."""

    async def events(self, after: str, rewindable: list[str]) -> AsyncGenerator[dict[str, str]]:
        """Yield the changes after a place; `rewindable` are the cells one can go back to now."""
        # First, because the end of the last cell is told once more, with the line above it.
        for event in self._rewindable_cells(rewindable):
            yield event
        if after:
            await self._resume(after)
        async with aclosing(self._engine.follow(self._access, self._session_id, after)) as happened:
            async for item in happened:
                async for event in self._changes(item):
                    yield event

    async def _resume(self, after: str) -> None:
        """Load the last cell up to the event that the page has shown."""
        execution_id, _, sequence = after.partition(":")
        if not (sequence.isdecimal() and len(sequence) < 10):
            return
        try:
            entry = await self._engine.execution(self._access, execution_id)
            events = await self._engine.excerpt(self._access, execution_id, int(sequence)) if int(sequence) else []
        except BelljarError:
            return
        self._cell = await self._output(entry)
        self._cell.add_all(events)
        self._had_ended = False

    async def _output(self, entry: ExecutionEntry) -> RenderedOutput:
        self._has_tail = False
        self._had_ended = entry.status not in UNFINISHED
        return RenderedOutput(entry.execution_id, self._pages.stored.content, entry.execution_count)

    async def _changes(self, item: Followed) -> AsyncIterator[dict[str, str]]:
        match item.kind:
            case "cell" if item.execution is not None:
                await highlight([item.execution.code])
                if self._cell is None or self._cell.execution_id != item.execution_id:
                    self._cell = await self._output(item.execution)
                    if self._had_ended:
                        return
                    html = self._pages.cell(self._view(item.execution, self._cell))
                    yield change("cell", f"cell-{item.execution_id}", html, id=item.id)
                else:
                    html = self._pages.cell_head(self._view(item.execution, self._cell))
                    yield change("replace", f"head-{item.execution_id}", html, id=item.id)
            case "output" if item.output is not None and self._cell is not None:
                await self._pages.stored.read_new(self._access, item.execution_id, [item.output])
                steps = self._cell.add(item.output)
                if self._had_ended:
                    # What it changes in displays of earlier cells is on the page already, and not part of this cell.
                    for step in steps:
                        if step.kind == "update":
                            yield self._step(step, item.execution_id, "")
                    return
                for place, step in enumerate(steps):
                    # Only the last step of an event completes it: a page that comes back gets all of it or nothing.
                    yield self._step(step, item.execution_id, item.id if place == len(steps) - 1 else "")
            case "tail" if item.tail is not None:
                self._has_tail = True
                if self._had_ended:
                    return
                html = self._pages.tail(item.execution_id, item.tail.lines, item.tail.text)
                yield change("tail", f"tail-{item.execution_id}", html, id=item.id, outputs=f"out-{item.execution_id}")
            case "ended" if item.execution is not None:
                async for event in self._end_of_cell(item, item.execution):
                    yield event
            case "undone":
                yield change("undone", ids=[f"cell-{execution_id}" for execution_id in item.undone])
            case "session" if item.session is not None:
                html = self._pages.session_header(self._access, item.session)
                yield change("inbox", count=len(await self._engine.questions(self._access)))
                yield change("replace", "session-state", html)
                for event in self._rewindable_cells(item.session.rewindable):
                    yield event
            case "gone":
                yield change("gone")
            case "reset":
                yield change("reload")
            case _:
                pass

    def _step(self, step: RenderStep, execution_id: str, place: str) -> dict[str, str]:
        outputs = f"out-{execution_id}"
        match step.kind:
            case "append" if step.block is not None:
                return change("append", outputs, self._pages.block(step.block), id=place)
            case "text" if step.block is not None:
                return change("text", step.block.id, id=place, text=step.text)
            case "replace" if step.block is not None:
                return change("replace", step.block.id, self._pages.block(step.block), id=place)
            case "update" if step.block is not None:
                html = self._pages.block(step.block)
                return change("update", step.block.display, html, id=place)
            case _:
                return change("empty", outputs, id=place)

    async def _end_of_cell(self, item: Followed, entry: ExecutionEntry) -> AsyncIterator[dict[str, str]]:
        """Yield how a cell ended; of one that printed too much for the stream also its output, head and tail."""
        if self._has_tail:
            (view,) = await self._pages.views(self._access, [entry], self._rewindable or ())
            kind = "cell" if self._had_ended else "replace"
            yield change(kind, f"cell-{item.execution_id}", self._pages.cell(view), id=item.id, ended=view.status_text)
            self._has_tail = False
            return
        output = self._cell or await self._output(entry)
        view = self._view(entry, output)
        if self._had_ended:
            yield change("cell", f"cell-{item.execution_id}", self._pages.cell(view), id=item.id)
            return
        yield change("replace", f"head-{item.execution_id}", self._pages.cell_head(view))
        yield change(
            "replace",
            f"end-{item.execution_id}",
            self._pages.cell_end(view),
            id=item.id,
            ended=f"{view.label} {view.status_text}",
        )

    def _rewindable_cells(self, rewindable: list[str]) -> Iterator[dict[str, str]]:
        """Yield which cells one can go back to, if that has changed, with the control for those that have none."""
        if (held := frozenset(rewindable)) == self._rewindable:
            return
        self._rewindable = held
        parts = {one: self._pages.way_back(self._session_id, one) for one in rewindable}
        yield change("rewindable", parts=parts)

    def _view(self, entry: ExecutionEntry, output: RenderedOutput) -> CellView:
        is_rewindable = entry.execution_id in (self._rewindable or ())
        return CellView(entry, output.blocks, code_markup(entry.code), is_rewindable)


def change(kind: str, target: str = "", html: str = "", *, id: str = "", **more: object) -> dict[str, str]:  # noqa: A002
    """Return one event for the page."""
    data = {"do": kind, "target": target, **({"html": html} if html else {}), **more}
    return {"event": "change", "data": json.dumps(data), **({"id": id} if id else {})}
