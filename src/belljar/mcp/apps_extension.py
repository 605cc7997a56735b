"""The protocol's extension `io.modelcontextprotocol/ui` (MCP Apps): the cells of a session, drawn in the client.

One tool, `show_session`, and one page of ours, `session_view.html`. Both are listed only for clients that declare the
extension, because hosts without it would show the model a tool that it has no use for. The page gets data and never
asks for approvals: whatever runs in a host's page may call tools.
"""

import asyncio
import base64
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Annotated, Final, Literal

from mcp.server.apps import Apps
from mcp.types import CallToolResult, TextContent
from pydantic import Field

from belljar.errors import ExecutionNotFound
from belljar.http.auth import current_principal
from belljar.mcp.content import text_of
from belljar.mcp.tools import READS, SessionId, refusals_as_results
from belljar.models import Display, ExecutionResult, Model
from belljar.outputs.budget import clip
from belljar.outputs.displays import fitted
from belljar.outputs.forms import PICTURES
from belljar.outputs.terminal_text import as_plain
from belljar.runtime import Runtime

APP_URI: Final = "ui://belljar/session.html"
APP_TOOL: Final = "show_session"
MAX_CELLS: Final = 10
CODE_CHARS: Final = 8_000
TEXT_CHARS: Final = 12_000
"""The most characters of one cell's output; ten cells and their code stay below 250 kB."""
PICTURE_BYTES: Final = 200_000
PICTURES_BYTES: Final = 320_000
"""All pictures of one answer, which are a third longer as text: hosts refuse messages of 1 MB."""


class Part(Model):
    """A piece of a cell's output, in order."""

    kind: Literal["text", "picture"]
    text: str = ""
    """The text, or the picture's text form."""
    src: str = ""
    """The picture as a `data:` URL; empty when it was too large to come along."""
    uri: str = ""
    """Where the picture is, as a resource."""


class ShownCell(Model):
    """A cell as the page draws it."""

    execution_id: str
    number: int
    code: str
    status: str
    parts: list[Part]
    error: str = ""
    cause: str = ""
    files: list[str]
    wall_s: float = 0.0
    sequence: int = 0


class ShownSession(Model):
    """What `show_session` gives the page."""

    session_id: str
    environment: str
    cells: list[ShownCell]
    console: str = ""
    """Where the person sees the session in a browser; empty where the server has no address."""


class SessionApp:
    """The tool and the page, over one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._sessions = runtime.sessions

    def extension(self) -> Apps:
        """Return the extension to build a server with."""
        apps = Apps()
        description = "Show the person the session's latest cells and figures, live."
        apps.tool(resource_uri=APP_URI, description=description, annotations=READS, structured_output=False)(
            self.show_session
        )
        page = files("belljar.mcp").joinpath("session_view.html").read_text("utf-8")
        apps.add_html_resource(APP_URI, page, name="session", prefers_border=True)
        return apps

    @refusals_as_results
    async def show_session(
        self,
        session_id: SessionId,
        execution_id: Annotated[str, Field(description="Only this execution; empty for the latest")] = "",
    ) -> CallToolResult:
        """See `extension`, which has the words that models read."""
        principal = current_principal()
        # Looking must not wake the session.
        _, environment = self._sessions.folders_and_environment(session_id, principal)
        self._sessions.journal.commit()
        ids = [execution_id] if execution_id else self._sessions.journal.not_undone(session_id, MAX_CELLS)
        results = [self._result(each, session_id, principal) for each in ids]
        codes = [self._code(each) for each in ids]
        read = self._sessions.executions.display_reader(session_id)
        cells = await asyncio.to_thread(_cells, codes, results, read)
        url = self._sessions.inbox.console_url()
        console = f"{url}/console/sessions/{session_id}" if url else ""
        shown = ShownSession(session_id=session_id, environment=environment, cells=cells, console=console)
        text = "\n\n".join(_text(cell, result) for cell, result in zip(cells, results, strict=True))
        text = text or f"session {session_id} has run nothing yet."
        return CallToolResult(
            content=[TextContent(type="text", text=f"{text}\n\nIn the console: {console}" if console else text)],
            structured_content=shown.model_dump(mode="json"),
        )

    def _result(self, execution_id: str, session_id: str, principal: str) -> ExecutionResult:
        result = self._sessions.executions.result(execution_id, principal)
        if result.session_id != session_id:
            raise ExecutionNotFound(f"session {session_id} has no execution {execution_id[:64]!r}")
        return result

    def _code(self, execution_id: str) -> str:
        record = self._sessions.journal.find(execution_id)
        return record.code if record is not None else ""


def _cells(
    codes: Sequence[str], results: Sequence[ExecutionResult], read: Callable[[str], bytes | None]
) -> list[ShownCell]:
    """Return the cells with their pictures, of which the latest come first where not all have room."""
    left, cells = PICTURES_BYTES, list[ShownCell]()
    for code, result in reversed([*zip(codes, results, strict=True)]):
        parts: list[Part] = []
        place = 0
        for display in result.displays:
            at = len(result.output) if display.at is None else display.at
            parts += _text_parts(result.output[place:at])
            place = max(place, at)
            part, size = _display_part(display, read, min(left, PICTURE_BYTES))
            parts.append(part)
            left -= size
        parts += _text_parts(result.output[place:])
        if result.result is not None and not any(display.at is None for display in result.displays):
            parts += _text_parts([result.result])
        cells.append(_cell(code, result, parts))
    return cells[::-1]


def _cell(code: str, result: ExecutionResult, parts: list[Part]) -> ShownCell:
    room = TEXT_CHARS
    for part in parts:
        part.text = clip(part.text, max(200, room))
        room -= len(part.text)
    trace = "\n".join(result.traceback)
    return ShownCell(
        execution_id=result.execution_id,
        number=result.execution_count,
        code=clip(code, CODE_CHARS),
        status=result.status,
        parts=parts[:200],
        error=clip(trace or result.error or "", TEXT_CHARS),
        cause=clip(result.cause or "", 1_000),
        files=[file.name for file in result.files[:20]],
        wall_s=result.usage.wall_s,
        sequence=result.sequence,
    )


def _text_parts(texts: Sequence[str]) -> list[Part]:
    text = as_plain("".join(texts))
    return [Part(kind="text", text=text)] if text else []


def _display_part(display: Display, read: Callable[[str], bytes | None], budget_bytes: int) -> tuple[Part, int]:
    """Return a display as the page can draw it, and how much of the budget it takes."""
    plain = display.plain or display.text or ""
    form = next((each for each in (display, *display.also) if each.uri and each.mime in PICTURES), None)
    if form is None or form.uri is None:
        return Part(kind="text", text=f"{plain or f'[{display.mime}]'}\n"), 0
    content = read(form.uri)
    picture = fitted(content, form.mime, budget_bytes) if content is not None and budget_bytes > 0 else None
    if picture is None:
        return Part(kind="picture", text=plain[:200], uri=form.uri), 0
    encoded = base64.b64encode(picture[0]).decode()
    part = Part(kind="picture", text=plain[:200], src=f"data:{picture[1]};base64,{encoded}", uri=form.uri)
    return part, len(picture[0])


def _text(cell: ShownCell, result: ExecutionResult) -> str:
    return f"In [{cell.number or '*'}]:\n{cell.code}\n{text_of(result)}"
