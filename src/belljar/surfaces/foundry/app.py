"""The data plane as an ASGI app: which route a request means, and how what it raises is answered.

It stands behind the guards of `surfaces/http.py`, which know who is calling. Knows nothing of credentials.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from belljar import logs, measures, spans
from belljar.errors import BelljarError, out_of_descriptors
from belljar.runtime import Runtime
from belljar.sessions.identified import IdentifiedSessions
from belljar.surfaces.auth import current_principal
from belljar.surfaces.foundry.calls import Address, Call, read_address
from belljar.surfaces.foundry.description import description
from belljar.surfaces.foundry.executions import Executions
from belljar.surfaces.foundry.files import Files
from belljar.surfaces.foundry.old_shapes import OldShapes
from belljar.surfaces.foundry.problems import Problem, internal_problem, json_response, problem_of
from belljar.surfaces.foundry.sessions import SessionRoutes
from belljar.surfaces.request_tracing import note_refusal

Handler = Callable[[Call], Awaitable[Response]]
Methods = Mapping[str, tuple[str, Handler]]
"""By HTTP method: the name that a call is counted under, and what answers it."""

MCP: Final = "mcp"
DESCRIPTION: Final = "foundry.description"

log = logging.getLogger(__name__)


class FoundryApp:
    """The REST data plane over one runtime. Requests whose path ends in `mcp` go to another app, where there is one."""

    def __init__(self, runtime: Runtime, identified: IdentifiedSessions, executions: Executions) -> None:
        self._executions = executions
        self._files = Files(runtime, identified)
        self._session_routes = SessionRoutes(runtime, identified)
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
            spans.request_span("foundry", None, (request.headers,)) as span,
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
                spans.fail_if_unset(span, "refused")
            measures.tool_calls.observe(time.perf_counter() - began_at, name, outcome)
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
