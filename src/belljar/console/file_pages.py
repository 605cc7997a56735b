"""The pages of a session's files: folders, and a look at one file. Reads through `Engine` and changes nothing.

A file is the session's: nothing of it gets into our document but escaped text, and pictures whose header was checked.
"""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from belljar.console.frames import picture_response
from belljar.console.pages import Pages
from belljar.engine.contract import Access, Engine
from belljar.errors import FileMissing
from belljar.outputs.mime_bundles import RASTER
from belljar.outputs.terminal_text import as_plain

_SHOWN_BYTES: Final = 256 * 1024
_MAX_PICTURE_BYTES: Final = 16 * 1024 * 1024
_PART_BYTES: Final = 4 * 1024 * 1024
_MAX_NAME_CHARS: Final = 4_096
_SUFFIXES: Final = {suffix: mime for mime, suffix in RASTER.items()} | {".jpeg": "image/jpeg"}


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
        text = None if is_picture else _text(part.content, is_whole=len(part.content) == part.size)
        return await self._pages.page(
            "file.html",
            request,
            session=detail,
            name=name,
            size=part.size,
            kind="picture" if is_picture else "text" if text else "other",
            text=text or "",
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
    return next((mime for suffix, mime in _SUFFIXES.items() if name.lower().endswith(suffix)), None)


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
