"""The shapes of the old versions (2024-02-02-preview, 2024-08-02-preview): everything in `properties`, with `$id`s."""

import itertools
from collections.abc import Iterable
from typing import Any, cast

from starlette.responses import Response

from belljar.files.workspace import DEFAULT_LIMIT, FileEntry
from belljar.journal.session_records import iso_ms
from belljar.surfaces.foundry.calls import Call, number, word
from belljar.surfaces.foundry.executions import (
    EXECUTION_TYPES,
    OLD_TIMEOUT_S,
    Executions,
    Order,
    code_of,
    command_cell,
    is_command,
)
from belljar.surfaces.foundry.files import Files
from belljar.surfaces.foundry.problems import invalid, json_response
from belljar.surfaces.foundry.values import picture_in

_WITHIN = "properties."
_VALUES = {"2024-02-02-preview": "result", "2024-08-02-preview": "executionResult"}
"""The key under which a version has the value. The other one has it too, unless it is a figure, which may be large."""


class OldShapes:
    """The routes that the old versions have, or have in another shape."""

    def __init__(self, executions: Executions, files: Files) -> None:
        self._executions = executions
        self._files = files

    async def execute(self, call: Call) -> Response:
        """Answer `POST /code/execute`."""
        identifier = call.identifier
        body = await call.body(self._executions.body_limit)
        wrapped = body.get("properties")
        if not isinstance(wrapped, dict):
            raise invalid("The body has no object `properties`", "properties")
        fields = cast("dict[str, Any]", wrapped)
        if word(fields, "executionType", "Synchronous", EXECUTION_TYPES, within=_WITHIN) != "Synchronous":
            raise invalid("executionType takes synchronous in this version", f"{_WITHIN}executionType")
        timeout_s = number(fields, "timeoutInSeconds", within=_WITHIN) or OLD_TIMEOUT_S
        is_shell = is_command(fields) and isinstance(fields["shellCommand"], str)
        code = command_cell(fields["shellCommand"]) if is_shell else code_of(fields, within=_WITHIN)
        report = await self._executions.run(Order(identifier, code, timeout_s), call.principal, call.request)
        value = self._executions.value(report, is_old=True)
        # Clients index the keys and print what they find: a value that is missing must not be `None`.
        value = "" if value is None else value
        other = "" if picture_in(value) is not None else value
        answer = {
            "$id": "2",
            "status": "Success" if report.result.success else "Failure",
            "stdout": report.stdout,
            "stderr": report.stderr,
            **dict.fromkeys(_VALUES.values(), other),
            _VALUES[call.version]: value,
            "executionTimeInMilliseconds": report.milliseconds,
        }
        return json_response({"$id": "1", "properties": answer}, headers={"operation-id": report.id})

    async def upload(self, call: Call) -> Response:
        """Answer `POST /files/upload`."""
        return _answer([await self._files.upload(call)])

    async def list(self, call: Call) -> Response:
        """Answer `GET /files`: every file, also in sub-folders."""
        folder = await self._files.folder(call)
        listing = await self._files.read(folder.list, call.query.get("path", ""), DEFAULT_LIMIT)
        return _answer(listing.entries)

    async def show(self, call: Call, name: str) -> Response:
        """Answer `GET /files/{name}`: one entry."""
        return _answer([await self._files.entry(await self._files.folder(call), name)])

    async def content(self, call: Call, name: str) -> Response:
        """Answer `GET /files/content/{name}`: the bytes."""
        return await self._files.send_content(await self._files.folder(call), name)


def _answer(entries: Iterable[FileEntry]) -> Response:
    numbers = map(str, itertools.count(2))
    value = [
        {
            "$id": next(numbers),
            "properties": {
                "$id": next(numbers),
                "filename": entry.name,
                "size": entry.size,
                "lastModifiedTime": iso_ms(entry.mtime_ns / 1e9),
            },
        }
        for entry in entries
    ]
    return json_response({"$id": "1", "value": value})
