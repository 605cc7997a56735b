"""All files of a folder of a session as one .zip, made while it is sent: neither memory nor disk holds it whole.

Names are the session's, so they are made harmless for whoever unpacks them.
"""

import asyncio
import re
import zipfile
from collections.abc import AsyncGenerator
from typing import BinaryIO, Final, cast

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from belljar.engine.contract import MAX_PART_BYTES, Access, Engine
from belljar.engine.models import FileEntryInfo
from belljar.errors import BelljarError, FileMissing, TooLarge
from belljar.http.api_operations import attachment_headers

MAX_FILES: Final = 10_000
MAX_BYTES: Final = 2 * 1024**3
_PART_BYTES: Final = min(MAX_PART_BYTES, 1024 * 1024)
_LEFT_OUT: Final = "NOT-COMPLETE.txt"
# What some system takes for a separator, a drive or a control, and names that mean a place elsewhere.
_UNSAFE: Final = re.compile(r'[\x00-\x1f\x7f\\:*?"<>|]')
_ZIP_EPOCH: Final = (1980, 1, 1, 0, 0, 0)


class Archives:
    """Answers `/console/sessions/ID/archive?path=…`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def serve(self, request: Request) -> Response:
        """Answer with the archive of a folder, or refuse one that is too large before anything is sent."""
        access: Access = request.state.access
        session_id = str(request.path_params["session_id"])
        path = request.query_params.get("path", "")[:4_096].strip("/")
        session = await self._engine.session(access, session_id)
        files = await self._files(access, session_id, path)
        name = path.rpartition("/")[2] or session.reason or f"session-{session_id[:8]}"
        headers = attachment_headers(f"{name[:80]}.zip")
        content = self._content(access, session_id, files)
        return StreamingResponse(content, media_type="application/zip", headers=headers)

    async def _files(self, access: Access, session_id: str, path: str) -> list[FileEntryInfo]:
        found: list[FileEntryInfo] = []
        after: str | None = ""
        while after is not None:
            page = await self._engine.files(access, session_id, path, after, recursive=True)
            found += page.items
            after = page.next if page.items else None
            size = sum(file.size for file in found)
            if len(found) > MAX_FILES or size > MAX_BYTES:
                raise TooLarge(
                    f"the folder has more than {MAX_FILES:,} files or {MAX_BYTES // 1024**3} GiB",
                    hint="Download a folder in it, or single files",
                )
        if not found:
            raise FileMissing("there are no files to download")
        return found

    async def _content(self, access: Access, session_id: str, files: list[FileEntryInfo]) -> AsyncGenerator[bytes]:
        sink, missing, taken = _Sink(), list[str](), dict[str, int]()
        with zipfile.ZipFile(cast("BinaryIO", sink), "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for file in files:
                entry = zipfile.ZipInfo(_safe_name(file.name, taken), _ZIP_EPOCH)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = 0o644 << 16
                with archive.open(entry, "w", force_zip64=True) as target:
                    offset, version = 0, ""
                    while True:
                        try:
                            part = await self._engine.read_part(access, session_id, file.name, offset, _PART_BYTES)
                        except BelljarError:
                            missing.append(file.name)
                            break
                        if (version and part.version != version) or offset + len(part.content) > file.size:
                            missing.append(file.name)  # it changes, and may grow without an end
                            break
                        if not part.content:
                            break
                        version, offset = part.version, offset + len(part.content)
                        await asyncio.to_thread(target.write, part.content)
                        yield sink.take()
                        if offset >= part.size:
                            break
            if missing:
                told = "\n".join(["These files changed or went while they were read:", *missing])
                archive.writestr(_LEFT_OUT, told.encode(errors="replace"))
        yield sink.take()


class _Sink:
    """Takes what a ZIP file is made of, in order; it cannot be sought in."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        pass

    def take(self) -> bytes:
        """Return what came since the last call."""
        content = b"".join(self._parts)
        self._parts.clear()
        return content


def _safe_name(name: str, taken: dict[str, int]) -> str:
    """Return a name that leads nowhere else on any system; of two that become one, the second is numbered.

    `taken` has the latest number of each, because thousands may become one.
    """
    clean = _UNSAFE.sub("_", name.encode(errors="replace").decode())
    parts = [part if part.strip(". ") else "_" * max(1, len(part)) for part in clean.split("/") if part]
    whole = "/".join(parts) or "_"
    safe, number = whole, taken.get(whole.lower(), 1)
    while safe.lower() in taken:
        number += 1
        safe = f"{whole}~{number}"
    taken[whole.lower()] = number
    taken.setdefault(safe.lower(), 1)
    return safe
