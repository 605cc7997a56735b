"""Variables of sessions as an engine shows them: what a live kernel tells, or the names that the journal has."""

import re
from typing import Final, Literal

from belljar.engine.models import TableColumnInfo, TableRows, VariableEntry, VariableList
from belljar.errors import Busy, InvalidArgument, VariableMissing
from belljar.kernels.variables import MAX_COLUMNS, MAX_ROWS, TablePart
from belljar.sessions.kernel_questions import NoRows, look_at_rows, look_at_variables
from belljar.sessions.session import Session

_ORDER: Final = re.compile(r"([0-9]{1,9}):(asc|desc)")
MAX_WHERE_CHARS: Final = 200
_WHERE: Final = re.compile(rf"([0-9]{{1,9}}|any):(.{{1,{MAX_WHERE_CHARS}}})", re.DOTALL)
_TABLES: Final = (
    "DataFrames, Series, Arrow tables, arrays with one or two dimensions and lists of dictionaries have rows"
)

_NOTES: Final[dict[str, str]] = {
    "busy": "A cell runs or waits. These are the names after the last cell; look again when it has ended",
    "asleep": "The session sleeps. These are the names after its last cell; looking does not wake it, a cell does",
    "not started": "No kernel runs in the session now; a cell starts one",
    "names only": "This kernel tells nothing of its variables but the names that belljar knows",
    "withheld": "A rule of the policy withholds what is in the variables",
    "gone": "The session has ended, and its variables with it",
}


async def list_variables(
    session: Session | None, state: str, names: list[str], offset: int = 0, limit: int = 500
) -> VariableList:
    """Return variables of a session; `names` are those on record, for when its kernel cannot be asked."""
    found = "gone" if state == "gone" else "asleep"
    if session is not None:
        found = await look_at_variables(session, offset, limit)
    if not isinstance(found, str):
        items = [VariableEntry.model_validate(item.model_dump()) for item in found.items]
        return VariableList(state="live", items=items, total=found.total, next=found.next)
    shown = [] if found in ("withheld", "gone") else names
    part = shown[offset : offset + limit]
    following = offset + limit if offset + limit < len(shown) else None
    items = [VariableEntry(name=name) for name in part]
    return VariableList(state=found, note=_NOTES[found], items=items, total=len(shown), next=following)


async def table_rows(session: Session | None, name: str, part: TablePart) -> TableRows:
    """Return rows of a variable; `Busy` where the kernel cannot be asked now."""
    page = await look_at_rows(session, name, part) if session is not None else "asleep"
    if isinstance(page, str):
        raise Busy(_refusal(page, name), hint=_HINTS.get(page, ""))
    if page.problem == "missing":
        raise VariableMissing(f"there is no variable {name[:64]!r}", hint="GET …/variables lists them")
    if page.problem == "no rows":
        raise InvalidArgument(f"{name[:64]!r} is a {page.kind}, which has no rows to show", hint=_TABLES)
    if page.problem:
        raise InvalidArgument(
            f"the rows of {name[:64]!r} cannot be shown: {page.reason}", hint="Run a cell that shows the part you need"
        )
    if part.where is not None and page.matching is None:
        raise InvalidArgument("this kernel is of an earlier version, which cannot filter", hint="Run the cell anew")
    total = page.total_rows if page.matching is None else page.matching
    end = part.offset + len(page.rows)
    return TableRows(
        name=name,
        type=page.kind,
        total_rows=page.total_rows,
        total_columns=page.total_columns,
        offset=part.offset,
        order="" if part.order is None else f"{part.order}:{'desc' if part.is_descending else 'asc'}",
        columns=[TableColumnInfo.model_validate(column.model_dump()) for column in page.columns],
        labels=page.labels,
        rows=page.rows,
        matching=total,
        next=end if page.rows and end < total else None,
    )


_HINTS: Final[dict[str, str]] = {
    "busy": "Look again when the cell has ended",
    "asleep": "Looking does not wake it; run a cell in it first",
    "not started": "Run a cell in it first",
}


def _refusal(reason: NoRows | Literal["asleep"], name: str) -> str:
    if reason == "busy":
        return "the session runs a cell, or did not answer in time"
    if reason == "asleep":
        return "the session sleeps"
    if reason == "not started":
        return "the session has no kernel yet"
    if reason == "withheld":
        return f"a rule of the policy withholds what is in {name[:64]!r}"
    if reason == "no filter":
        return "rows are not filtered where personal data or rules for output are hidden from what is shown"
    return "this kernel does not tell what is in its variables"


def table_part(
    offset: int, limit: int, first_column: int, columns: int, order: str, where: str = "", *, summaries: bool = False
) -> TablePart:
    """Return the part of a table that a caller wants, or refuse one that no table has."""
    by = _ORDER.fullmatch(order)
    if order and by is None:
        raise InvalidArgument(
            f"order is {order[:64]!r}", hint="Pass POSITION:asc or POSITION:desc, with the position of a column"
        )
    looked_for = _WHERE.fullmatch(where)
    if where and looked_for is None:
        raise InvalidArgument(
            f"where is {where[:64]!r}",
            hint=f"Pass POSITION:TEXT, or any:TEXT; TEXT has at most {MAX_WHERE_CHARS} characters",
        )
    if not (offset >= 0 and 1 <= limit <= MAX_ROWS and first_column >= 0 and 1 <= columns <= MAX_COLUMNS):
        raise InvalidArgument(
            f"rows {offset} to {offset + limit} of {columns} columns",
            hint=f"At most {MAX_ROWS} rows of {MAX_COLUMNS} columns",
        )
    return TablePart(
        offset,
        limit,
        first_column,
        columns,
        order=int(by[1]) if by else None,
        is_descending=by is not None and by[2] == "desc",
        where=(-1 if looked_for[1] == "any" else int(looked_for[1]), looked_for[2]) if looked_for else None,
        summaries=summaries,
    )
