"""Uploads: the one file of a multipart body, written to disk as it arrives and never held in memory.

The file is one without a name until the body has ended, so that an upload that stops half-way leaves nothing, whatever
ends it.
"""

import asyncio
import re
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final
from urllib.parse import unquote_to_bytes

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect, Request

from belljar.files.openat import unwritable
from belljar.surfaces.foundry.calls import caller_gone, length_of
from belljar.surfaces.foundry.problems import Problem, invalid

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FIELD: Final = "file"
WRITE_BYTES: Final = 1024 * 1024
"""How much is gathered before it is written, in a thread."""
AROUND_BYTES: Final = 1024 * 1024
"""What a body may have beside the file: boundaries, headers and other fields."""
MAX_HEADER_BYTES: Final = 16_384
MAX_PARTS: Final = 100
_EXTENDED: Final = re.compile(rb"""filename\*=utf-8'[^']*'([^;\s]+)""", re.IGNORECASE)
_HINT: Final = 'Send multipart/form-data with one field "file" that has a file name'


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that has arrived: its name as it was sent, and its content on disk."""

    name: str
    file: BinaryIO
    size: int


@asynccontextmanager
async def receive(
    request: Request, folder: Path, limit_bytes: int, chunks: AsyncIterator[bytes] | None = None
) -> AsyncGenerator[Upload]:
    """Receive the file of a request into a nameless file in `folder`, which is gone when the block ends.

    `chunks` is the request's body, where the caller has begun to read it.
    """
    if length_of(request) > limit_bytes + AROUND_BYTES:
        raise _too_large(limit_bytes)
    try:
        file = await asyncio.to_thread(tempfile.TemporaryFile, dir=folder)
    except OSError as error:
        raise unwritable("upload", 0, error) from error
    try:
        parts = _FormParts(limit_bytes)
        await _receive(request, chunks or request.stream(), parts, file)
        file.flush()
        yield Upload(parts.checked_name(), file, parts.size)
    finally:
        with suppress(OSError):  # a full disk, whose error was raised before
            file.close()


async def _receive(request: Request, chunks: AsyncIterator[bytes], parts: "_FormParts", file: BinaryIO) -> None:
    parser: MultipartParser | None = None
    first = b""
    received_bytes = 0
    try:
        async for chunk in chunks:
            received_bytes += len(chunk)
            if received_bytes > parts.limit_bytes + AROUND_BYTES:
                raise _too_large(parts.limit_bytes)
            if parser is None:
                first += chunk
                boundary = _boundary(request.headers.get("content-type", ""), first)
                if boundary is None:
                    continue
                parser, chunk = MultipartParser(boundary, parts.callbacks()), first
            parser.write(chunk)
            if parts.gathered >= WRITE_BYTES:
                await _write(parts, file)
    except ClientDisconnect:
        raise caller_gone() from None
    except FormParserError:
        raise invalid(f"The body is no multipart/form-data. {_HINT}", "body") from None
    if not parts.has_ended:
        raise invalid(f"The multipart body has no end, or no beginning. {_HINT}", "body")
    await _write(parts, file)


async def _write(parts: "_FormParts", file: BinaryIO) -> None:
    pieces = parts.take()
    try:
        await asyncio.to_thread(file.writelines, pieces)
    except OSError as error:
        raise unwritable(parts.name, parts.size, error) from error


def _boundary(content_type: str, start: bytes) -> bytes | None:
    """Return the boundary: what the header says, or the first line where the header says something else.

    None while that line has not arrived. One client in use sends `application/json` before a multipart body.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind == b"multipart/form-data" and boundary:
        return boundary
    line, end, _ = start.lstrip(b"\r\n").partition(b"\r\n")
    if not end and len(start) < 1_024 and b"--".startswith(start[:2]):
        return None
    if not line.startswith(b"--") or not 2 < len(line) <= 202:
        raise invalid(f"The body is no multipart/form-data. {_HINT}", "body")
    return line[2:]


class _FormParts:
    """What the parser has found so far: the file's name, and its content that is not written yet."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.name = ""
        self.size = 0
        self.gathered = 0
        self.has_ended = False
        self._has_file = False
        self._is_file = False
        self._count = 0
        self._pieces: list[bytes] = []
        self._header = b""
        self._value = b""
        self._disposition = b""
        self._header_bytes = 0

    def callbacks(self) -> "MultipartCallbacks":
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._on_header,
            "on_header_value": self._on_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._on_data,
            "on_end": self._end,
        }

    def take(self) -> list[bytes]:
        """Return what was gathered since the last call."""
        pieces, self._pieces, self.gathered = self._pieces, [], 0
        return pieces

    def checked_name(self) -> str:
        """Return the name of the file, which has to have been there."""
        if not self._has_file:
            raise invalid(f'The body has no file in a field "{FIELD}". {_HINT}', FIELD)
        if not self.name:
            raise invalid(f"The file has no name. {_HINT}", FIELD)
        return self.name

    def _begin(self) -> None:
        self._count += 1
        self._disposition, self._header_bytes, self._is_file = b"", 0, False
        if self._count > MAX_PARTS:
            raise invalid(f"The body has more than {MAX_PARTS} fields. {_HINT}", "body")

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += self._taken(data, start, end)

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += self._taken(data, start, end)

    def _taken(self, data: bytes, start: int, end: int) -> bytes:
        self._header_bytes += end - start
        if self._header_bytes > MAX_HEADER_BYTES:
            raise invalid(f"A field has headers of more than {MAX_HEADER_BYTES:,} bytes", "body")
        return data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        if extended := _EXTENDED.search(self._disposition):
            # RFC 7578 forbids this form, which some clients use for names that are not ASCII, and the parser drops it.
            options.setdefault(b"filename", unquote_to_bytes(extended[1]))
        if options.get(b"name") != FIELD.encode() or b"filename" not in options:
            return
        if self._has_file:
            raise invalid("The body has more than one file. Send one file a call", FIELD)
        self._has_file = self._is_file = True
        # Clients escape a quotation mark as browsers do; the rest of the name is as it is.
        self.name = options[b"filename"].decode(errors="surrogateescape").replace("%22", '"')

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file:
            return
        self.size += end - start
        if self.size > self.limit_bytes:
            raise _too_large(self.limit_bytes)
        self._pieces.append(bytes(data[start:end]))
        self.gathered += end - start

    def _end(self) -> None:
        self.has_ended = True


def _too_large(limit_bytes: int) -> Problem:
    message = f"The file has more than {limit_bytes:,} bytes, which is the limit"
    return Problem(413, "FileTooLarge", message, target=FIELD)
