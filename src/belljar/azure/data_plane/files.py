"""Files of the data plane, in the form of the new versions; the old form is in `app.py`.

Names and paths are those of `/mnt/data`, absolute or relative. Reading wakes no session that sleeps. What is uploaded
is a file without a name until the body has ended, so that an upload that stops half-way leaves nothing, whatever ends
it.
"""

import asyncio
import os
import re
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, Final, ParamSpec, TypeVar
from urllib.parse import unquote_to_bytes

from anyio import to_thread
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from belljar.azure.data_plane.calls import Call, caller_gone, length_of, text
from belljar.azure.data_plane.problems import Problem, invalid, json_response, problem_of
from belljar.egress.rules import parse_rules
from belljar.errors import BelljarError, FileMissing, InvalidPath
from belljar.files.names import SANDBOX_ROOT
from belljar.files.openat import unwritable
from belljar.files.transfer import decode_upload
from belljar.files.workspace import FileEntry, FolderEntry, Workspace
from belljar.models import iso_ms
from belljar.runtime import Runtime
from belljar.sessions.session import Session

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

LISTED: Final = 1_000
READ_BYTES: Final = 256 * 1024
MAX_URL_BYTES: Final = 65_536
P = ParamSpec("P")
Found = TypeVar("Found")
_ROOT: Final = SANDBOX_ROOT.strip("/") + "/"
FIELD: Final = "file"
WRITE_BYTES: Final = 1024 * 1024
"""How much is gathered before it is written, in a thread."""
AROUND_BYTES: Final = 1024 * 1024
"""What a body may have beside the file: boundaries, headers and other fields."""
MAX_HEADER_BYTES: Final = 16_384
MAX_PARTS: Final = 100
_EXTENDED: Final = re.compile(rb"""filename\*=utf-8'[^']*'([^;\s]+)""", re.IGNORECASE)
_HINT: Final = 'Send multipart/form-data with one field "file" that has a file name'


class Files:
    """The files of sessions by identifier, over one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._settings = runtime.settings
        self._shows_workspace = runtime.shows_workspace
        self._identified = runtime.identified
        # An upload in base64 within a data: URL, and the JSON around it.
        self._most_json_bytes = runtime.settings.max_upload_bytes * 4 // 3 + 1024 * 1024

    # Routes

    async def list(self, call: Call) -> Response:
        """Answer `GET /files`: what is in a folder, or with `recursive` also what is below it."""
        folder = await self.folder(call)
        path, after = call.query.get("path", ""), call.query.get("after", "")
        if _is_true(call.query.get("recursive", "")):
            page = await self.read(folder.list_page, path, after, LISTED)
            folders = [] if after else _folders_of(page.entries, path, folder)
            next_after = page.entries[-1].name if page.rest and page.entries else None
            entries: Sequence[FileEntry | FolderEntry] = [*folders, *page.entries]
        else:
            listing = await self.read(folder.list_folder, path, after, LISTED)
            next_after, entries = listing.next_after, [*listing.folders, *listing.files]
        query = {name: call.query[name] for name in ("path", "recursive") if name in call.query}
        link = (
            call.url("files", identifier=call.identifier, **query, after=next_after) if next_after is not None else None
        )
        fields = [self._fields(folder, entry) for entry in entries]
        fields.sort(key=lambda each: (each["directory"], each["name"]))
        return json_response({"value": fields, "nextLink": link})

    async def create(self, call: Call) -> Response:
        """Answer `POST /files`: one file, uploaded or named by a URL that the host fetches."""
        chunks = aiter(call.request.stream())
        first = await _first_chunk(chunks)
        whole = _with_first(first, chunks)
        is_json = call.request.headers.get("content-type", "").lower().startswith("application/json")
        if is_json and not first.lstrip().startswith(b"--"):
            return await self._fetch(call, await call.parse(whole, self._most_json_bytes))
        entry = await self.upload(call, call.query.get("path", ""), whole)
        return json_response(self._fields(await self.folder(call), entry))

    async def _fetch(self, call: Call, fields: dict[str, Any]) -> Response:
        """Bring in what a data: or https: URL has."""
        name, url = self.path(call, text(fields, "name")), text(fields, "url")
        session = await self._identified.reach(call.identifier, call.principal)
        with session.in_use():
            try:
                session.workspace.check_name(name)
                content = await decode_upload(url=url, max_bytes=self._settings.max_upload_bytes)
                await session.write_file(name, content)
                entry = await asyncio.to_thread(session.workspace.look_at, name)
                return json_response(self._fields(session.workspace, entry))
            except InvalidPath as error:
                raise problem_of(error, "name") from None
            except BelljarError as error:
                raise problem_of(error, "url") from None

    async def send(self, call: Call, name: str) -> Response:
        """Answer `POST /files/{name}/send`: the host puts a file to a URL, under the egress rules."""
        url = text(await call.body(MAX_URL_BYTES), "url")
        # Imported here, because it takes 24 ms, and most servers never send.
        from belljar.files.https import Reach, send_https

        settings = self._settings
        rules = parse_rules(settings.egress) if settings.allow_network_access else []
        folder = await self.folder(call)
        file, status = await self._first(folder.open_read, self.path(call, name))
        try:
            if status.st_size > settings.max_upload_bytes:
                limit = f"{settings.max_upload_bytes:,}"
                raise Problem(413, "FileTooLarge", f"The file has more than {limit} bytes, the limit", target="name")
            answered = await send_https(url, file, status.st_size, reach=Reach(rules, settings.egress_allow_private))
        except BelljarError as error:
            raise problem_of(error, "url") from None
        finally:
            file.close()
        return json_response({"name": name, "sizeInBytes": status.st_size, "status": answered})

    async def show(self, call: Call, name: str) -> Response:
        """Answer `GET /files/{name}`: one entry, or the content where the name ends in `/content`."""
        folder = await self.folder(call)
        if name.rstrip("/").endswith("/content"):
            try:
                return await self.send_content(folder, self.path(call, name.rstrip("/").removesuffix("/content")))
            except Problem as problem:
                # A file may itself be called `content`.
                if problem.status != 404:
                    raise
        return json_response(self._fields(folder, await self.entry(folder, self.path(call, name))))

    async def remove(self, call: Call, name: str) -> Response:
        """Answer `DELETE /files/{name}`."""
        session = await self._identified.reach(call.identifier, call.principal)
        await self._first(session.workspace.delete, self.path(call, name))
        return Response(status_code=204)

    def _fields(self, folder: Workspace, entry: FileEntry | FolderEntry) -> dict[str, Any]:
        return entry_fields(entry, SANDBOX_ROOT if self._shows_workspace else str(folder.root))

    # Steps that the old form shares

    async def folder(self, call: Call) -> Workspace:
        """Return the folder of the caller's session."""
        return await self._identified.folder(call.identifier, call.principal)

    @staticmethod
    def path(call: Call, name: str) -> str:
        """Return the path that a name has in the folder that the query names."""
        folder = call.query.get("path", "")
        if not folder or name.startswith("/"):
            return name
        return f"{folder.rstrip('/')}/{name}"

    async def upload(self, call: Call, folder: str = "", chunks: AsyncIterator[bytes] | None = None) -> FileEntry:
        """Receive one file into the caller's session, and return its entry."""
        session = await self._identified.reach(call.identifier, call.principal)
        with session.in_use():
            limit = self._settings.max_upload_bytes
            async with receive(call.request, session.folders.root, limit, chunks) as upload:
                name = upload.name if upload.name.startswith("/") or not folder else f"{folder}/{upload.name}"
                return await self._keep(session, name, upload.file, upload.size)

    async def _keep(self, session: Session, name: str, file: BinaryIO, size: int) -> FileEntry:
        try:
            session.workspace.check_name(name)
            await asyncio.to_thread(_rewound, file)
            limit = self._settings.max_upload_bytes
            async with session.quota.room_for(size):
                await to_thread.run_sync(session.workspace.write_from, name, file.fileno(), limit)
            return await asyncio.to_thread(session.workspace.look_at, name)
        except BelljarError as error:
            raise problem_of(error, "file") from None

    async def entry(self, folder: Workspace, path: str) -> FileEntry:
        """Return the entry of one file."""
        return await self._first(folder.look_at, path)

    async def send_content(self, folder: Workspace, path: str) -> Response:
        """Return an answer that streams one file."""
        file, status = await self._first(folder.open_read, path)
        headers = {"Content-Length": str(status.st_size), "Content-Disposition": "attachment"}
        return StreamingResponse(_chunks(file, status.st_size), 200, headers, "application/octet-stream")

    @staticmethod
    async def _first(method: Callable[[str], Found], path: str) -> Found:
        """Call a method of the folder with each spelling of a path, until it finds the file."""
        problem = invalid("The address names no file", "name")
        for candidate in _spellings(path):
            try:
                return await asyncio.to_thread(method, candidate)
            except (FileMissing, InvalidPath) as error:
                problem = problem_of(error, "name")
        raise problem

    @staticmethod
    async def read(method: Callable[P, Found], *arguments: P.args, **options: P.kwargs) -> Found:
        """Call a method of the folder in a thread; a path that there is not is a problem of the query."""
        try:
            return await asyncio.to_thread(method, *arguments, **options)
        except (FileMissing, InvalidPath) as error:
            raise problem_of(error, "path") from None


def entry_fields(entry: FileEntry | FolderEntry, root: str) -> dict[str, Any]:
    """Return an entry as the new versions have it; `root` is where code sees the session's folder."""
    path = PurePosixPath(entry.name)
    is_file = isinstance(entry, FileEntry)
    return {
        "name": path.name,
        "type": "file" if is_file else "directory",
        "contentType": entry.mime_type if is_file else None,
        "sizeInBytes": entry.size if is_file else 0,
        "lastModifiedAt": iso_ms(entry.mtime_ns / 1e9),
        "directory": f"{root}/{path.parent}" if path.parent.name else root,
    }


def _folders_of(files: Sequence[FileEntry], path: str, folder: Workspace) -> list[FolderEntry]:
    """Return the folders between `path` and the files below it, each with the time of its newest file."""
    start = len(folder.check_name(path)) if path.strip("/") and path.rstrip("/") != SANDBOX_ROOT else 0
    newest: dict[str, int] = {}
    for file in files:
        parts = file.name.split("/")[:-1]
        for depth in range(start + 1, len(parts) + 1):
            name = "/".join(parts[:depth])
            newest[name] = max(newest.get(name, 0), file.mtime_ns)
    return [FolderEntry(name, mtime_ns) for name, mtime_ns in newest.items()]


def _spellings(path: str) -> list[str]:
    """Return what a path may mean: a proxy may have dropped the second slash before `mnt/data/`."""
    return [path, path.removeprefix(_ROOT)] if path.startswith(_ROOT) else [path]


def _is_true(word: str) -> bool:
    return word.lower() in ("true", "1")


def _rewound(file: BinaryIO) -> None:
    file.flush()
    file.seek(0)


async def _first_chunk(chunks: AsyncIterator[bytes]) -> bytes:
    try:
        return await anext(chunks, b"")
    except ClientDisconnect:
        raise caller_gone() from None


async def _with_first(first: bytes, rest: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    yield first
    async for chunk in rest:
        yield chunk


async def _chunks(file: BinaryIO, size: int) -> AsyncGenerator[bytes]:
    """Yield what the file had when it was opened, no more: the header has announced that size."""
    left = size
    try:
        while left > 0:
            chunk = await asyncio.to_thread(os.read, file.fileno(), min(READ_BYTES, left))
            if not chunk:  # it was cut off since; the connection breaks off too, so that nobody takes this for all
                return
            left -= len(chunk)
            yield chunk
    finally:
        file.close()


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
