"""The pages of what the code of a session has at hand: its variables, the rows of one, and its packages."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from belljar.console.forms import check_length
from belljar.console.templating import markup
from belljar.engine.contract import Access, Engine
from belljar.engine.variables import TableRows, VariableEntry
from belljar.errors import BelljarError, SessionNotFound, VariableMissing
from belljar.outputs.tables import column_html, has_large, written

ROWS_AT_ONCE: Final = 50
COLUMNS_AT_ONCE: Final = 12
_VARIABLES_AT_ONCE: Final = 200

Link = Callable[[int, int, str], str]
"""Makes the address of a part of a table out of an offset, a column and an order."""
Page = Callable[..., Awaitable[Response]]
"""Makes a page out of a template, a request and the values of the template."""


class VariablePages:
    """Makes these pages; `page` is what all pages of the console are made with."""

    def __init__(self, engine: Engine, page: Page) -> None:
        self._engine = engine
        self._page = page

    async def variables(self, request: Request) -> Response:
        """Answer `/console/sessions/ID/variables`."""
        access, session_id = _who(request)
        detail = await self._engine.session(access, session_id)
        offset = _number(request, "offset")
        found = await self._engine.variables(access, session_id, offset, _VARIABLES_AT_ONCE)
        return await self._page(
            "variables.html",
            request,
            session=detail,
            found=found.model_dump(include={"state", "note", "total", "next"}),
            variables=[(entry, _extent(entry)) for entry in found.items],
            offset=offset,
            earlier=max(0, offset - _VARIABLES_AT_ONCE) if offset else None,
        )

    async def rows(self, request: Request) -> Response:
        """Answer `/console/sessions/ID/variables/NAME`: a part of a table, with links to the parts around it."""
        access, session_id = _who(request)
        name = str(request.path_params["name"])
        detail = await self._engine.session(access, session_id)
        offset, first = _number(request, "offset"), _number(request, "column")
        order, looked_for = request.query_params.get("order", ""), request.query_params.get("q", "").strip()
        position = request.query_params.get("in", "any")
        where = f"{position}:{looked_for}" if looked_for else ""
        table: TableRows | None = None
        problem: BelljarError | None = None
        try:
            table = await self._engine.rows(
                access,
                session_id,
                name,
                offset=offset,
                limit=ROWS_AT_ONCE,
                first_column=first,
                columns=COLUMNS_AT_ONCE,
                order=order,
                where=where,
                summaries=1,
            )
        except (SessionNotFound, VariableMissing):
            raise
        except BelljarError as error:
            problem = error
        here = f"/console/sessions/{quote(session_id, safe='')}/variables/{quote(name, safe='')}"
        link = partial(_link, here, {"q": looked_for, "in": position} if looked_for else {})
        return await self._page(
            "rows.html",
            request,
            session=detail,
            name=name,
            table=table,
            problem=problem,
            here=here,
            is_ordered=bool(order),
            looked_for=looked_for,
            position=position,
            order=order,
            first=first,
            places=_places(link, table, offset, first, order) if table is not None else {},
            headers=_headers(link, table, first, order) if table is not None else [],
            rows=_written_rows(table) if table is not None else [],
            summaries=_summaries(table) if table is not None else "",
            read=max((one.summary.count for one in table.columns if one.summary), default=0) if table else 0,
        )

    async def packages(self, request: Request) -> Response:
        """Answer `/console/sessions/ID/packages`."""
        access, session_id = _who(request)
        detail = await self._engine.session(access, session_id)
        found = await self._engine.packages(access, session_id)
        own = [entry for entry in found.items if entry.origin == "session"]
        shared = [entry for entry in found.items if entry.origin == "environment"]
        return await self._page("packages.html", request, session=detail, packages=found, own=own, shared=shared)

    async def install(self, request: Request) -> Response:
        """Answer `POST /console/sessions/ID/packages`: run the cell that installs, and show it."""
        access, session_id = _who(request)
        check_length(request)
        async with request.form(max_files=0, max_fields=2) as form:
            wanted = str(form.get("packages", ""))
        execution_id = await self._engine.queue_install(access, session_id, wanted.split())
        return RedirectResponse(f"/console/sessions/{quote(session_id, safe='')}#cell-{execution_id}", status_code=303)


def _who(request: Request) -> tuple[Access, str]:
    return request.state.access, str(request.path_params["session_id"])


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def _extent(entry: VariableEntry) -> str:
    """Return how large a variable is, in the words of its kind."""
    if entry.shape:
        return " × ".join(f"{count:,}" for count in entry.shape)
    return "" if entry.length is None else f"{entry.length:,}"


def _link(here: str, kept: dict[str, str], offset: int, column: int, order: str) -> str:
    query = {"offset": offset, "column": column, "order": order, **kept}
    given = {name: value for name, value in query.items() if value}
    return f"{here}?{urlencode(given)}" if given else here


def _places(link: Link, table: TableRows, offset: int, first: int, order: str) -> dict[str, str]:
    """Return links to the parts of a table around the one that is shown, by what they are called."""
    places: dict[str, str] = {}
    if offset:
        places["First rows"] = link(0, first, order)
        places["Earlier rows"] = link(max(0, offset - ROWS_AT_ONCE), first, order)
    if table.next is not None:
        places["Later rows"] = link(table.next, first, order)
        places["Last rows"] = link(max(0, table.matching - ROWS_AT_ONCE), first, order)
    if first:
        places["Columns before"] = link(offset, max(0, first - COLUMNS_AT_ONCE), order)
    if first + len(table.columns) < table.total_columns:
        places["Columns after"] = link(offset, first + COLUMNS_AT_ONCE, order)
    return places


def _headers(link: Link, table: TableRows, first: int, order: str) -> list[dict[str, Any]]:
    """Return columns with the link that sorts by each: ascending, then descending, then not at all."""
    headers: list[dict[str, Any]] = []
    for column in table.columns:
        sorted_by = order.partition(":")[2] if order.partition(":")[0] == str(column.position) else ""
        following = {"": "asc", "asc": "desc", "desc": ""}[sorted_by]
        target = f"{column.position}:{following}" if following else ""
        headers.append(
            {
                "column": column,
                "link": link(0, first, target),
                "sorted": {"asc": "ascending", "desc": "descending"}.get(sorted_by, ""),
                "mark": {"asc": "▲", "desc": "▼"}.get(sorted_by, ""),
            }
        )
    return headers


def _written_rows(table: TableRows) -> list[list[str | None]]:
    """Return the rows as people write them."""
    columns = [[row[place] for row in table.rows] for place in range(len(table.columns))]
    has_commas = has_large(
        texts for texts, column in zip(columns, table.columns, strict=True) if column.kind == "number"
    )
    shown = [
        written(texts, column.kind, column.name, has_commas=has_commas) if column.kind in ("number", "time") else texts
        for texts, column in zip(columns, table.columns, strict=True)
    ]
    return [[*row] for row in zip(*shown, strict=True)]


def _summaries(table: TableRows) -> Any:
    """Return what the columns hold, as a list."""
    told = [
        column_html(column.name, column.kind, column.summary.model_dump(), column.dtype)
        for column in table.columns
        if column.summary is not None
    ]
    return markup(f'<ul class="columns">{"".join(told)}</ul>') if told else ""
