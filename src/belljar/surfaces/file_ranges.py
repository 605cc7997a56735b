"""Files of sessions as downloads of the HTTP API, whole or by range, read a part at a time whatever their size."""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from belljar.engine.models import FilePart
from belljar.errors import FileMissing
from belljar.surfaces.api_operations import BYTES, attachment_headers

PART_BYTES: Final = 1024 * 1024
ReadPart = Callable[[int, int], Awaitable[FilePart]]
"""Reads a part of a file, from an offset on and of this length at most."""


async def file_download(request: Request, name: str, read: ReadPart) -> Response:
    """Return a file, or the range of it that the request asks for. A browser never shows it in our origin."""
    start = await read(0, 0)
    tag = f'"{start.size:x}-{start.version}"'
    headers = {**attachment_headers(name), "Accept-Ranges": "bytes", "ETag": tag}
    wanted = request.headers.get("range", "")
    if request.headers.get("if-range", tag) != tag:
        wanted = ""  # the file has changed since the reader got its first part
    match _byte_range(wanted, start.size):
        case None:
            first, last, status = 0, start.size - 1, 200
        case (first, last) if first > last:
            return Response(status_code=416, headers={"Content-Range": f"bytes */{start.size}"})
        case (first, last):
            status = 206
            headers["Content-Range"] = f"bytes {first}-{last}/{start.size}"
    headers["Content-Length"] = str(last - first + 1)
    if request.method == "HEAD":
        return Response(status_code=status, media_type=BYTES, headers=headers)
    parts = _parts(read, first, last + 1, start.version)
    return StreamingResponse(parts, status_code=status, media_type=BYTES, headers=headers)


async def _parts(read: ReadPart, offset: int, end: int, version: str) -> AsyncGenerator[bytes]:
    while offset < end:
        part = await read(offset, min(PART_BYTES, end - offset))
        if part.version != version or not part.content:
            # The reader sees that the download is short, rather than half of one file and half of another.
            raise FileMissing("the file changed while it was downloaded")
        offset += len(part.content)
        yield part.content


def _byte_range(wanted: str, size: int) -> tuple[int, int] | None:
    """Return the first and the last byte of a range; None without one, or for several, which may be ignored."""
    found = re.fullmatch(r"bytes=(\d{0,15})-(\d{0,15})", wanted)
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:
        return (max(0, size - int(found[2])), size - 1) if int(found[2]) else (size, size - 1)
    return int(found[1]), min(int(found[2]) if found[2] else size - 1, size - 1)
