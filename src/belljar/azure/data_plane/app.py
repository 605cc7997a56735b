"""The data plane as an ASGI app: which route a request means, and how what it raises is answered.

What is small is answered here: sessions, their packages, and the older shapes of requests and answers. It stands
behind the guards of `http/app.py`, which know who is calling. Knows nothing of credentials.
"""

import asyncio
import hashlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from belljar import logs, metrics, tracing
from belljar.azure.data_plane.calls import Address, Call, number, read_address, word
from belljar.azure.data_plane.cell_values import picture_in
from belljar.azure.data_plane.description import description
from belljar.azure.data_plane.executions import (
    EXECUTION_TYPES,
    OLD_TIMEOUT_S,
    Executions,
    Order,
    code_of,
    command_cell,
    is_command,
)
from belljar.azure.data_plane.files import Files
from belljar.azure.data_plane.problems import Problem, internal_problem, invalid, json_response, problem_of
from belljar.environments.base import Environment
from belljar.environments.installed_check import describe_packages
from belljar.environments.selection import KERNEL_PREFIX
from belljar.errors import BelljarError, out_of_descriptors
from belljar.files.workspace import DEFAULT_LIMIT, FileEntry
from belljar.http.auth import current_principal
from belljar.journal.session_records import SessionRecord
from belljar.mcp.tools import note_refusal
from belljar.models import iso_ms
from belljar.runtime import Runtime
from belljar.sessions.endings import DAY_S

Handler = Callable[[Call], Awaitable[Response]]
Methods = Mapping[str, tuple[str, Handler]]
"""By HTTP method: the name that a call is counted under, and what answers it."""

MCP: Final = "mcp"
DESCRIPTION: Final = "foundry.description"

log = logging.getLogger(__name__)
LISTED: Final = 100
_WITHIN = "properties."
_VALUES = {"2024-02-02-preview": "result", "2024-08-02-preview": "executionResult"}
"""The key under which a version has the value. The other one has it too, unless it is a figure, which may be large."""


class FoundryApp:
    """The REST data plane over one runtime. Requests whose path ends in `mcp` go to another app, where there is one."""

    def __init__(self, runtime: Runtime, executions: Executions) -> None:
        self._executions = executions
        self._files = Files(runtime)
        self._session_routes = SessionRoutes(runtime)
        self._old = OldShapes(executions, self._files)
        self.mcp: ASGIApp | None = None
        """Answers MCP under the prefix of a pool, as it is answered at the root."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        address = read_address(_path(scope))
        if address.head == MCP and self.mcp is not None:
            await self.mcp({**scope, "path": f"/{MCP}", "raw_path": f"/{MCP}".encode()}, receive, send)
            return
        request = Request(scope, receive)
        response = await self._answer(request, address)
        await response(scope, receive, send)

    async def _answer(self, request: Request, address: Address) -> Response:
        began_at, name, outcome = time.perf_counter(), "unknown", "error"
        with (
            logs.about(principal=current_principal()),
            tracing.request_span("foundry", None, (request.headers,)) as span,
        ):
            try:
                call = Call(request, address)
                name, handler = _chosen(self._routes(call), request.method)
                if name != DESCRIPTION:
                    call.check_version()
                response = await handler(call)
                outcome = "ok"
            except Problem as problem:
                response = problem.response()
            except BelljarError as error:
                note_refusal(error)
                response = problem_of(error).response()
            except Exception as error:
                # The last boundary: a fault of belljar is answered like any other problem.
                named = out_of_descriptors(error)
                if named is None:
                    log.exception("a request to the data plane failed inside belljar")
                response = (problem_of(named) if named is not None else internal_problem()).response()
            if outcome == "error":
                tracing.fail_if_unset(span, "refused")
            metrics.tool_calls.observe(time.perf_counter() - began_at, name, outcome)
            return response

    def _routes(self, call: Call) -> Methods | None:
        """Return what the address can be asked; None for an address that there is not."""
        address, is_plain = call.address, "/" not in call.address.rest
        sessions, executions = self._session_routes, self._executions
        match address.head:
            case "code" if address.after("code", "execute") == "":
                return {"POST": ("foundry.execute", self._old.execute)}
            case "executions" if is_plain:
                return {"POST": ("foundry.execute", executions.create)}
            case "executions":
                wanted = address.after("executions") or ""
                return {"GET": ("foundry.get_execution", partial(executions.show, operation_id=wanted))}
            case "files":
                return self._file_routes(call, address.after("files") or "")
            case "session" if is_plain:
                return {"GET": ("foundry.session", sessions.show), "DELETE": ("foundry.end_session", sessions.remove)}
            case "listsessions" if is_plain:
                return {"GET": ("foundry.list_sessions", sessions.list)}
            case "metadata" if is_plain:
                return {"GET": ("foundry.metadata", sessions.metadata)}
            case "openapi.json" if is_plain:
                return {"GET": (DESCRIPTION, _describe)}
            case _:
                return None

    def _file_routes(self, call: Call, name: str) -> Methods | None:
        files, old = self._files, self._old
        if not name.strip("/"):
            if call.is_old:
                return {"GET": ("foundry.list_files", old.list)}
            return {"GET": ("foundry.list_files", files.list), "POST": ("foundry.upload", files.create)}
        if name.lower() == "upload" and call.request.method == "POST":
            return {"POST": ("foundry.upload", old.upload)}
        removed = ("foundry.delete_file", partial(files.remove, name=name))
        if not call.is_old and call.request.method == "POST" and name.endswith("/send"):
            return {"POST": ("foundry.send", partial(files.send, name=name.removesuffix("/send")))}
        if not call.is_old:
            return {"GET": ("foundry.file", partial(files.show, name=name)), "DELETE": removed}
        if content := call.address.after("files", "content"):
            return {"GET": ("foundry.download", partial(old.content, name=content))}
        return {"GET": ("foundry.file", partial(old.show, name=name)), "DELETE": removed}


async def _describe(call: Call) -> Response:
    return json_response(description(call.address.prefix or "/"))


def _path(scope: Scope) -> str:
    """Return the path as it was sent: an escaped slash is part of a file's name, and not a slash."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.decode("latin-1").partition("?")[0]


def _chosen(routes: Methods | None, method: str) -> tuple[str, Handler]:
    if routes is None:
        raise Problem(404, "NotFound", "There is no such address; /openapi.json lists those there are")
    if method not in routes:
        allowed = ", ".join(routes)
        message = f"{method[:16]} is not possible here, only {allowed}"
        raise Problem(405, "MethodNotAllowed", message, headers={"Allow": allowed})
    return routes[method]


class SessionRoutes:
    """The routes about sessions as a whole, over one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._sessions = runtime.sessions
        self._identified = runtime.identified
        self._started_at = datetime.now(UTC).timestamp()
        self._described: dict[str, Any] | None = None

    async def show(self, call: Call) -> Response:
        """Answer `GET /session`."""
        entry = self._identified.known(call.identifier, call.principal)
        return json_response(self._fields(call.identifier, entry))

    async def remove(self, call: Call) -> Response:
        """Answer `DELETE /session`, which succeeds also where there is none."""
        await self._identified.clear(call.identifier, call.principal)
        return Response(status_code=204)

    async def list(self, call: Call) -> Response:
        """Answer `GET /listSessions`."""
        skip = call.query.get("skip", "0")
        if not skip.isascii() or not skip.isdigit() or len(skip) > 9:
            raise invalid("skip has to be a whole number from 0 on", "skip")
        found = self._identified.records.of(call.principal, after=int(skip), count=LISTED + 1)
        entries = [(each.identifier, self._sessions.records.find(each.session_id)) for each in found[:LISTED]]
        link = call.url("listSessions", skip=str(int(skip) + LISTED)) if len(found) > LISTED else None
        sessions = [self._fields(identifier, entry) for identifier, entry in entries if entry is not None]
        return json_response({"sessions": sessions, "nextLink": link})

    async def metadata(self, call: Call) -> Response:
        """Answer `GET /metadata`: what code finds in every session."""
        if self._described is None:
            self._described = await self._describe()
        times = {"createdAt": iso_ms(self._started_at), "lastUpdatedAt": iso_ms(self._started_at)}
        return json_response({**self._described, **times})

    def _fields(self, identifier: str, entry: SessionRecord) -> dict[str, Any]:
        live = next((each for each in self._sessions.of(entry.principal) if each.id == entry.id), None)
        used_at = live.lease.used_at if live else entry.used_at
        expires_at = live.lease.expires_at if live else entry.used_at + self._runtime.settings.keep_days * DAY_S
        return {
            "identifier": identifier,
            "createdAt": iso_ms(live.lease.created_at if live else entry.created_at),
            "lastAccessedAt": iso_ms(used_at),
            "expireAt": iso_ms(expires_at),
            "etag": hashlib.sha256(entry.id.encode()).hexdigest()[:32],
        }

    async def _describe(self) -> dict[str, Any]:
        name = self._runtime.settings.environment
        if name.startswith(KERNEL_PREFIX):
            kernel = name.removeprefix(KERNEL_PREFIX)
            return {"runtimes": [], "preInstalledPackages": [], "jupyterKernel": kernel}
        environment: Environment = await self._runtime.starter.environments.get(name)
        description = await asyncio.to_thread(describe_packages, environment)
        packages = [{"name": package, "version": version} for package, version in description.packages.items()]
        return {
            "runtimes": [{"name": "python", "version": description.version}],
            "preInstalledPackages": packages,
            "jupyterKernel": "python3",
        }


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
