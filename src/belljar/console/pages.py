"""The pages of the console: what each template gets. Reads through `Engine` and changes nothing.

A file is the session's: nothing of it gets into our document but escaped text, and pictures whose header was checked.
"""

import asyncio
import re
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from belljar.console.cell_views import CellView, QuestionView, waterfall
from belljar.console.cells import (
    OutputBlock,
    PageContent,
    RenderedOutput,
    code_markup,
    fold,
    formulas_of,
    highlight,
    page_content,
    stored_pages,
    update_earlier,
)
from belljar.console.forms import DONE
from belljar.console.frames import picture_response
from belljar.console.table_files import reading_code, table_preview
from belljar.console.templating import render
from belljar.console.timeline import lane_count, timeline_rows
from belljar.engine.contract import Access, Engine, SessionFilter, place_of
from belljar.engine.history import parsed_place
from belljar.engine.models import UNFINISHED, ExecutionEntry, FoundPage, SessionDetail, SessionEntry
from belljar.errors import BelljarError, ExecutionNotFound, FileMissing, InvalidArgument, QuestionNotFound
from belljar.models import OutputEvent
from belljar.outputs.forms import picture_named
from belljar.outputs.mathematics import latex_html
from belljar.outputs.terminal_text import as_plain
from belljar.questions.models import InboxQuestion

CELLS_AT_ONCE: Final = 50
LIVE: Final = ("waiting", "running", "idle", "fresh")
"""The states of sessions in the first part of their list; those that wait for a person come first."""
_LINES_AT_ONCE: Final = 500
_WINDOW_LINES: Final = 200
_SESSIONS_AT_ONCE: Final = 100
_SEARCH_SHOWN: Final = 1_000
_MAX_REMEMBERED: Final = 5_000
_MAX_REMEMBERED_CHARS: Final = 16 * 1024 * 1024
_CELL_PIXELS: Final = 220
_ENDED_SHOWN: Final = 20
_NEARLY: Final = 0.9
_FORKS_SHOWN: Final = 50
_MAX_DECISIONS: Final = 2_000
_DECISIONS_SHOWN: Final = 200
_SHOWN_BYTES: Final = 256 * 1024
_MAX_PICTURE_BYTES: Final = 16 * 1024 * 1024
_PART_BYTES: Final = 4 * 1024 * 1024
_MAX_NAME_CHARS: Final = 4_096
_LEFT_OUT: Final = re.compile("[^0-9]")
# What has fewer than a million characters is shown whole in its place; of more there is a page that shows a part.
_WHOLE_CHARS, _WHOLE_DIGITS = 1_000_000, 7
_LINES_COUNTED: Final = 8


class StoredPages:
    """Remembers what there is to know of stored pages, so that each is read once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[tuple[str, str], PageContent] = {}
        self._chars = 0

    async def read_new(self, access: Access, execution_id: str, events: list[OutputEvent]) -> None:
        """Read the stored pages among these events that are not known yet, and set the formulas."""
        if formulas := formulas_of(events):
            # In a thread, because everybody's cells would wait for it otherwise; what was set is remembered.
            await asyncio.to_thread(lambda: [*map(latex_html, formulas)])
        for name in stored_pages(events):
            if (execution_id, name) in self._known:
                continue
            try:
                content = await self._engine.display(access, execution_id, name)
            except BelljarError:
                content = b""
            known = await asyncio.to_thread(page_content, content.decode(errors="replace"))
            self._known[execution_id, name] = known
            self._chars += len(known.table or "")
            while len(self._known) > _MAX_REMEMBERED or self._chars > _MAX_REMEMBERED_CHARS:
                self._chars -= len(self._known.pop(next(iter(self._known))).table or "")

    def content(self, execution_id: str, name: str) -> PageContent:
        """Return what is known of a stored page; what is not known counts as having a script."""
        return self._known.get((execution_id, name), PageContent())


class Pages:
    """Makes pages and parts of pages."""

    def __init__(
        self, engine: Engine, *, address: str = "", serves_mcp: bool = True, allows_scripts: bool = True
    ) -> None:
        self._engine = engine
        self._serves_mcp = serves_mcp
        self._address = address
        self._allows_scripts = allows_scripts
        self.stored = StoredPages(engine)

    # Sessions

    async def sessions(self, request: Request) -> Response:
        """Answer `/console`."""
        access: Access = request.state.access
        query = request.query_params
        wanted = SessionFilter(
            state=query.get("state", ""), owner=query.get("owner", "")[:200], text=query.get("q", "")[:200]
        )
        found = await self._engine.sessions(access, wanted, query.get("cursor", ""), _SESSIONS_AT_ONCE)
        live = [entry for entry in found.items if entry.state in LIVE]
        others = [entry for entry in found.items if entry.state not in LIVE]
        return await self.page(
            "sessions.html",
            request,
            live=sorted(live, key=lambda entry: entry.state != "waiting"),
            others=others,
            wanted=wanted,
            next=found.next,
            address=self._address or str(request.base_url).rstrip("/"),
            serves_mcp=self._serves_mcp,
            is_filtered=bool(wanted.state or wanted.owner or wanted.text),
            is_later=bool(query.get("cursor")),
            after=found.after,
        )

    async def search(self, request: Request) -> Response:
        """Answer `/console/search`: cells by words of their code and output, of all sessions."""
        wanted, cursor = request.query_params.get("q", "").strip(), request.query_params.get("cursor", "")
        found, refusal = FoundPage(items=[]), None
        if wanted:
            try:
                found = await self._engine.search(request.state.access, wanted, cursor, CELLS_AT_ONCE)
            except InvalidArgument as error:
                refusal = error
        return await self.page(
            "search.html",
            request,
            wanted=wanted[:_SEARCH_SHOWN],
            problem=refusal,
            found=found.items,
            next=found.next,
            unread=found.unread,
        )

    def session_row(self, access: Access, entry: SessionEntry) -> str:
        """Return the row of a session in the list."""
        return render("_session_row.html", entry=entry, access=access)

    async def session(self, request: Request) -> Response:
        """Answer `/console/sessions/ID`."""
        access: Access = request.state.access
        session_id = str(request.path_params["session_id"])
        detail = await self._engine.session(access, session_id)
        found = await self._engine.executions(access, session_id, limit=CELLS_AT_ONCE)
        entries = found.items[::-1]
        views = await self.views(access, entries, detail.rewindable)
        blocks = await self._engine.blocks(access, session_id, CELLS_AT_ONCE) if found.next else []
        older: list[dict[str, Any]] = [{"cursor": cursor, "height": CELLS_AT_ONCE * _CELL_PIXELS} for cursor in blocks]
        wanted = request.query_params.get("cell", "")
        if wanted and all(entry.execution_id != wanted for entry in entries):
            await self._load_around(access, detail, wanted, older)
        return await self.page(
            "session.html",
            request,
            session=detail,
            cells=views,
            older=older[::-1],
            after=_place(views),
            allows_scripts=self._allows_scripts,
        )

    async def _load_around(
        self, access: Access, detail: SessionDetail, wanted: str, older: list[dict[str, Any]]
    ) -> None:
        """Load the block of earlier cells that has one, so that a link to it leads there. The latest block is first."""
        try:
            target = await self._engine.execution(access, wanted)
        except ExecutionNotFound:
            return
        if target.session_id == detail.session_id:
            # The last of the blocks that end behind it.
            behind = [block for block in older if _number(block["cursor"]) > _number(target.cursor)]
            for block in behind[-1:]:
                found = await self._engine.executions(access, detail.session_id, block["cursor"], CELLS_AT_ONCE)
                block["cells"] = await self.views(access, found.items[::-1], detail.rewindable)

    def session_header(self, access: Access, entry: SessionEntry) -> str:
        """Return the part of a session's page that changes with its state."""
        return render("_session_state.html", session=entry, access=access)

    async def older_cells(self, request: Request) -> Response:
        """Answer `/console/sessions/ID/cells`: the cells before a cursor, as a part of the page."""
        access: Access = request.state.access
        session_id = str(request.path_params["session_id"])
        detail = await self._engine.session(access, session_id)
        cursor = request.query_params.get("cursor", "")
        found = await self._engine.executions(access, session_id, cursor, CELLS_AT_ONCE)
        views = await self.views(access, found.items[::-1], detail.rewindable)
        return HTMLResponse(await asyncio.to_thread(lambda: "".join(map(self.cell, views))))

    async def timeline(self, request: Request) -> Response:
        """Answer `/console/sessions/ID/timeline`: cells, what was undone, and where the session can go back to."""
        access: Access = request.state.access
        session_id = str(request.path_params["session_id"])
        detail = await self._engine.session(access, session_id)
        cursor = request.query_params.get("cursor", "")
        found = await self._engine.executions(access, session_id, cursor, _SESSIONS_AT_ONCE)
        cells = [CellView(entry, [], "", entry.execution_id in detail.rewindable) for entry in found.items]
        rows = timeline_rows(cells, await self._forks(access, detail, cells, cursor), goes_on=bool(found.next))
        lanes = lane_count(rows)
        return await self.page("timeline.html", request, session=detail, rows=rows, next=found.next, lanes=lanes)

    async def _forks(
        self, access: Access, detail: SessionDetail, cells: list[CellView], cursor: str
    ) -> dict[str, list[SessionDetail]]:
        """Return the forks among some cells, by the execution before which each was made; empty for as it was then."""
        forks: dict[str, list[SessionDetail]] = {}
        first = cells[-1].entry.submitted_at if cells else ""
        for session_id in detail.forks[-_FORKS_SHOWN:]:
            with suppress(BelljarError):
                fork = await self._engine.session(access, session_id)
                is_here = first <= fork.created_at and (not cursor or fork.created_at <= cells[0].entry.submitted_at)
                if fork.origin_execution or is_here:
                    forks.setdefault(fork.origin_execution, []).append(fork)
        return forks

    async def calls(self, request: Request) -> Response:
        """Answer `/console/sessions/ID/calls`: the tool calls of its latest cells."""
        access: Access = request.state.access
        session_id = str(request.path_params["session_id"])
        detail = await self._engine.session(access, session_id)
        found = await self._engine.executions(access, session_id, request.query_params.get("cursor", ""))
        calls = await asyncio.gather(*(self._engine.calls(access, entry.execution_id) for entry in found.items))
        rows = [
            (CellView(entry, [], ""), waterfall(made)) for entry, made in zip(found.items, calls, strict=True) if made
        ]
        return await self.page("calls.html", request, session=detail, rows=rows, next=found.next)

    # Questions

    async def inbox(self, request: Request) -> Response:
        """Answer `/console/inbox`."""
        access: Access = request.state.access
        ended = await self._engine.questions(access, "ended")
        questions = [QuestionView.of(entry, access) for entry in await self._engine.questions(access)]
        shown = [QuestionView.of(entry, access) for entry in ended[:_ENDED_SHOWN]]
        return await self.page("inbox.html", request, questions=questions, ended=shown, before=[], only=False)

    async def one_question(self, request: Request) -> Response:
        """Answer `GET /console/inbox/ID`: one question, whether it waits or not."""
        access: Access = request.state.access
        question_id = str(request.path_params["question_id"])
        waiting = [one for one in await self._engine.questions(access) if one.id == question_id]
        ended = [one for one in await self._engine.questions(access, "ended") if one.id == question_id]
        if not waiting and not ended:
            raise QuestionNotFound(f"there is no question {question_id[:80]!r}", hint="The inbox lists those that wait")
        questions, before = ([QuestionView.of(entry, access) for entry in found] for found in (waiting, ended))
        return await self.page("inbox.html", request, questions=questions, ended=before, before=before, only=True)

    def question(self, entry: InboxQuestion, access: Access) -> str:
        """Return a question as a part of the inbox."""
        return render("_question.html", question=QuestionView.of(entry, access))

    async def page(self, template: str, request: Request, **values: Any) -> Response:
        """Return a page with what all pages have."""
        access: Access = request.state.access
        waiting = len(await self._engine.questions(access))
        done = DONE.get(request.query_params.get("done", ""), "")
        common = {"access": access, "path": request.url.path, "waiting": waiting, "done": done}
        # In a thread, because the output of fifty cells may take seconds to colour.
        return HTMLResponse(await asyncio.to_thread(render, template, **common, **values))

    # One execution, decisions, health

    async def execution(self, request: Request) -> Response:
        """Answer `/console/executions/ID`: every line of its output, a page at a time, and its tool calls."""
        access: Access = request.state.access
        execution_id, query = str(request.path_params["execution_id"]), request.query_params
        entry = await self._engine.execution(access, execution_id)
        text = query.get("q", "")[:200]
        lines = await self._engine.lines(access, execution_id, _line_number(request), _LINES_AT_ONCE, text)
        await highlight([entry.code])
        return await self.page(
            "execution.html",
            request,
            cell=CellView(entry, [], code_markup(entry.code)),
            lines=lines,
            count=_LINES_AT_ONCE,
            q=text,
            decisions=await self._engine.decisions(access, execution_id=execution_id),
            calls=waterfall(await self._engine.calls(access, execution_id)),
            plain=as_plain,
        )

    async def lines(self, request: Request) -> Response:
        """Answer `/console/executions/ID/lines`: some lines, as a part of the page."""
        access: Access = request.state.access
        execution_id = str(request.path_params["execution_id"])
        lines = await self._engine.lines(access, execution_id, _line_number(request), _WINDOW_LINES)
        return HTMLResponse(render("_lines.html", lines=lines, plain=as_plain))

    async def decisions(self, request: Request) -> Response:
        """Answer `/console/decisions`, filtered by session, rule or tool, and by what was decided."""
        query = request.query_params
        wanted, decision = query.get("q", "")[:200], query.get("decision", "")[:40]
        found = await self._engine.decisions(request.state.access, limit=_MAX_DECISIONS)
        known = sorted({str(one.get("decision", "")) for one in found} - {""})
        if decision:
            found = [one for one in found if one.get("decision") == decision]
        if wanted:
            found = [one for one in found if wanted.lower() in " ".join(map(str, one.values())).lower()]
        shown = found[:_DECISIONS_SHOWN]
        return await self.page(
            "decisions.html", request, decisions=shown, wanted=wanted, decision=decision, known=known
        )

    async def health(self, request: Request) -> Response:
        """Answer `/console/health`."""
        access: Access = request.state.access
        return await self.page("health.html", request, **await self._health(access))

    async def health_part(self, access: Access, _: str = "") -> str:
        """Return the part of the health page that changes."""
        return render("_health.html", **await self._health(access))

    async def _health(self, access: Access) -> dict[str, Any]:
        health, usage = await self._engine.health(access), await self._engine.usage(access)
        states = [usage.gauges.get(name, []) for name in ("running", "idle", "fresh")]
        sessions = [sum(values) for values in zip(*states, strict=True)]
        problems = [(name, state) for name, state in health.checks.items() if state != "ok"]
        problems += [(one.name, "this server does not answer") for one in health.servers if not one.is_answering]
        limit = health.gauges.get("sessions_limit")
        if limit and sessions and sessions[-1] >= _NEARLY * limit:
            problems.append(
                ("sessions", f"{sessions[-1]:g} of at most {limit:g} are open: the oldest idle ones go next")
            )
        return {"health": health, "usage": usage, "sessions": sessions, "problems": problems}

    # Cells

    async def views(
        self, access: Access, entries: list[ExecutionEntry], rewindable: Collection[str] = ()
    ) -> list[CellView]:
        """Return cells with what they printed and showed, of long text only head and tail."""
        excerpts = await asyncio.gather(*(self._engine.excerpt(access, entry.execution_id) for entry in entries))
        outputs: list[RenderedOutput] = []
        for entry, events in zip(entries, excerpts, strict=True):
            await self.stored.read_new(access, entry.execution_id, events)
            output = RenderedOutput(entry.execution_id, self.stored.content, entry.execution_count)
            output.add_all(events)
            outputs.append(output)
        update_earlier(outputs)
        await highlight(entry.code for entry in reversed(entries))
        counted = 0
        for entry, output in zip(reversed(entries), reversed(outputs), strict=True):
            if entry.status not in UNFINISHED:
                # Lines are counted by reading them: of the latest cells that were cut, and not of fifty long ones.
                counted += await self._fold(access, entry, output, counts_lines=counted < _LINES_COUNTED)
        return [
            CellView(entry, output.blocks, code_markup(entry.code), entry.execution_id in rewindable, output.sequence)
            for entry, output in zip(entries, outputs, strict=True)
        ]

    async def _fold(self, access: Access, entry: ExecutionEntry, output: RenderedOutput, *, counts_lines: bool) -> bool:
        """Fold what is long; return whether its lines were counted, because the page can get all that was left out."""
        total, whole = 0, ""
        cut = next((block for block in output.blocks if block.kind == "left-out"), None)
        if cut is not None and len(_LEFT_OUT.sub("", cut.text)) < _WHOLE_DIGITS:
            whole = f"/console/executions/{entry.execution_id}/whole"
            if counts_lines:
                with suppress(BelljarError):
                    total = (await self._engine.lines(access, entry.execution_id, 1, 1)).total
        fold(output.blocks, total=total, whole=whole)
        return bool(total)

    async def whole_output(self, request: Request) -> Response:
        """Answer `/console/executions/ID/whole`: all that a cell put out, as a part of its session's page."""
        access: Access = request.state.access
        execution_id = str(request.path_params["execution_id"])
        entry = await self._engine.execution(access, execution_id)
        events = await self._engine.excerpt(access, execution_id, chars=_WHOLE_CHARS)
        await self.stored.read_new(access, execution_id, events)
        output = RenderedOutput(execution_id, self.stored.content, entry.execution_count)
        output.add_all(events)
        return HTMLResponse(await asyncio.to_thread(lambda: "".join(map(self.block, output.blocks))))

    def cell(self, view: CellView) -> str:
        """Return a cell as a part of a page."""
        return render("_cell.html", cell=view, allows_scripts=self._allows_scripts)

    def cell_head(self, view: CellView) -> str:
        """Return the line above a cell."""
        return render("_cell_head.html", cell=view)

    def way_back(self, session_id: str, execution_id: str) -> str:
        """Return the control that goes back to before a cell."""
        return render("_way_back.html", session_id=session_id, execution_id=execution_id)

    def cell_end(self, view: CellView) -> str:
        """Return what stands below the output of a cell: how it ended, the files that it changed, what was lost."""
        return render("_cell_end.html", cell=view)

    def block(self, block: OutputBlock) -> str:
        """Return a block of output as a part of a page."""
        return render("_block.html", block=block, allows_scripts=self._allows_scripts)

    def tail(self, execution_id: str, lines: int, text: str) -> str:
        """Return the end of the output of a cell that printed more than its page shows while it runs."""
        block = OutputBlock(f"tail-{execution_id}", "text", execution_id=execution_id, stream="stdout", text=text)
        return render("_tail.html", block=block, lines=lines)


def _number(cursor: str) -> int:
    return parsed_place(place_of(cursor)) if cursor else 0


def _line_number(request: Request) -> int:
    first = request.query_params.get("first", "1")
    return max(1, int(first)) if first.isdecimal() and len(first) < 10 else 1


def _place(views: list[CellView]) -> str:
    """Return the place in the stream of a session up to which a page has everything."""
    # The first cell that had not ended: those after it wait for it.
    last = next((view for view in views if view.is_running), views[-1] if views else None)
    return f"{last.entry.execution_id}:{max(last.sequence, last.entry.events)}" if last is not None else ""


class FilePages:
    """Makes the pages; `pages` puts them into their frame."""

    def __init__(self, engine: Engine, pages: Pages) -> None:
        self._engine = engine
        self._pages = pages

    async def folder(self, request: Request) -> Response:
        """Answer `/console/sessions/ID/files?path=…`."""
        access: Access = request.state.access
        session_id, query = str(request.path_params["session_id"]), request.query_params
        path, after = query.get("path", "")[:_MAX_NAME_CHARS].strip("/"), query.get("after", "")[:_MAX_NAME_CHARS]
        detail = await self._engine.session(access, session_id)
        listing = await self._engine.files(access, session_id, path, after)
        names = path.split("/") if path else []
        steps = [{"name": name, "path": "/".join(names[: place + 1])} for place, name in enumerate(names)]
        shown = listing.model_dump()
        return await self._pages.page("files.html", request, session=detail, listing=shown, here=path, steps=steps)

    async def file(self, request: Request) -> Response:
        """Answer `/console/sessions/ID/view?name=…`: the beginning of a text, or a picture."""
        access: Access = request.state.access
        session_id, name = str(request.path_params["session_id"]), _name(request)
        detail = await self._engine.session(access, session_id)
        part = await self._engine.read_part(access, session_id, name, 0, _SHOWN_BYTES)
        is_picture = _mime(name) is not None and part.size <= _MAX_PICTURE_BYTES
        is_whole = len(part.content) == part.size
        text = None if is_picture else _text(part.content, is_whole=is_whole)
        # In a thread, because many cells are many texts to look at.
        table = await asyncio.to_thread(table_preview, name, text, is_whole=is_whole) if text else None
        return await self._pages.page(
            "file.html",
            request,
            session=detail,
            name=name,
            size=part.size,
            kind="picture" if is_picture else "table" if table else "text" if text else "other",
            text=text or "",
            table=table,
            code=reading_code(name),
            left=part.size - len(part.content),
        )

    async def picture(self, request: Request) -> Response:
        """Answer `/console/sessions/ID/picture?name=…`, for files that are pictures by name and by content."""
        access: Access = request.state.access
        session_id, name = str(request.path_params["session_id"]), _name(request)
        mime = _mime(name)
        if mime is None:
            raise FileMissing(f"{name[:100]!r} is no picture")
        content = b""
        while True:
            part = await self._engine.read_part(access, session_id, name, len(content), _PART_BYTES)
            content += part.content
            if not part.content or len(content) >= min(part.size, _MAX_PICTURE_BYTES):
                return await picture_response(content, mime)


def _name(request: Request) -> str:
    return request.query_params.get("name", "")[:_MAX_NAME_CHARS]


def _mime(name: str) -> str | None:
    """Return the type of a picture by its name; an SVG is shown as text."""
    _, dot, ending = name.rpartition(".")
    return picture_named(ending) if dot else None


def _text(content: bytes, *, is_whole: bool) -> str | None:
    """Return the content as text; None if it is none. A character that the end cuts in two is left out."""
    if b"\0" in content:
        return None
    for cut in range(1 if is_whole else 4):
        try:
            return as_plain(content[: len(content) - cut].decode())
        except UnicodeDecodeError:
            continue
    return None
