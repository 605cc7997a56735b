"""Operations of the HTTP API on what the code of a session has at hand: its variables and its packages."""

import re
from typing import Final

from pydantic import Field

from belljar.engine.contract import Engine
from belljar.engine.packages import MAX_REQUIREMENTS, PackageList
from belljar.engine.variables import MAX_COLUMNS, MAX_LISTED, MAX_ROWS, TableRows, VariableList
from belljar.errors import InvalidArgument
from belljar.models import Model
from belljar.surfaces.api_operations import ApiCall, Operation, Parameter

_SESSION: Final = "/sessions/{session_id}"
_WINDOW: Final = re.compile(r"([0-9]{1,9}):([0-9]{1,9})")


class NewPackages(Model):
    """Packages to install: names with an optional version, like pandas>=2."""

    packages: list[str] = Field(min_length=1, max_length=MAX_REQUIREMENTS)


class Installing(Model):
    """The cell that installs packages. Its output and its end are events of the session."""

    execution_id: str


def variable_operations(engine: Engine) -> list[Operation]:
    """Return the operations on variables. They change nothing and wake no session."""

    async def variables(call: ApiCall) -> Model:
        return await engine.variables(call.access, call.path("session_id"), call.query["offset"], call.query["limit"])

    async def rows(call: ApiCall) -> Model:
        first, count = column_window(call.query["columns"])
        return await engine.rows(
            call.access,
            call.path("session_id"),
            call.path("name"),
            offset=call.query["offset"],
            limit=call.query["limit"],
            first_column=first,
            columns=count,
            order=call.query["order"],
        )

    return [
        Operation(
            "GET",
            f"{_SESSION}/variables",
            "Its variables; while it is busy or asleep, their names",
            variables,
            VariableList,
            {"offset": Parameter("After so many", 0), "limit": Parameter("How many", 500, 1, MAX_LISTED)},
        ),
        Operation(
            "GET",
            f"{_SESSION}/variables/{{name:path}}/rows",
            "Rows of a DataFrame, a Series, an array or a list of dictionaries",
            rows,
            TableRows,
            {
                "offset": Parameter("After so many rows", 0),
                "limit": Parameter("How many rows", 100, 1, MAX_ROWS),
                "order": Parameter("POSITION:asc or POSITION:desc of the column to sort by"),
                "columns": Parameter(f"FIRST:LAST, the positions of columns; {MAX_COLUMNS} at most", "0:30"),
            },
        ),
    ]


def column_window(text: str) -> tuple[int, int]:
    """Return the first column of a window `FIRST:LAST` and how many it has; the last one is not in it."""
    window = _WINDOW.fullmatch(text)
    if window is None or not 0 < int(window[2]) - int(window[1]) <= MAX_COLUMNS:
        raise InvalidArgument(
            f"columns is {text[:64]!r}", hint=f"Pass FIRST:LAST, like 0:30; at most {MAX_COLUMNS} columns"
        )
    return int(window[1]), int(window[2]) - int(window[1])


def package_operations(engine: Engine) -> list[Operation]:
    """Return the operations on packages."""

    async def packages(call: ApiCall) -> Model:
        return await engine.packages(call.access, call.path("session_id"))

    async def install(call: ApiCall) -> Model:
        body: NewPackages = call.body
        execution_id = await engine.install(call.access, call.path("session_id"), body.packages)
        return Installing(execution_id=execution_id)

    path = f"{_SESSION}/packages"
    return [
        Operation("GET", path, "What its code can import", packages, PackageList),
        Operation(
            "POST",
            path,
            "Install packages by a cell",
            install,
            Installing,
            body=NewPackages,
            status=202,
        ),
    ]
