"""Decodes uploads into a session, and saves downloads from a session to the user's disk.

Uploads come as text, base64, or a data: or https: URL; downloads go to a folder of the host. Archives are not unpacked
in either direction, because code in the session can do that inside the sandbox. This module knows no session folder.
"""

import binascii
import re
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from urllib.parse import unquote_to_bytes

from belljar.errors import FileMissing, InvalidArgument, SettingsError, TooLarge
from belljar.files.names import MAX_DEPTH
from belljar.files.workspace import Workspace

_MAX_SAME_NAME = 1_000
_MAX_SAVED_NAME_BYTES = 200
_WHITESPACE = str.maketrans("", "", " \t\r\n")


async def decode_upload(
    text: str | None = None,
    base64: str | None = None,
    url: str | None = None,
    *,
    max_bytes: int,
    given: Mapping[str, str | None] | None = None,
) -> bytes:
    """Return the bytes of an upload, given in exactly one of three ways; an empty `text` is an empty file.

    A URL may name any public host. `given` are all the ways that the caller has, where there are more.
    """
    ways = given or {"text": text, "base64": base64, "url": url}
    chosen = [name for name, value in ways.items() if value is not None]
    if len(chosen) != 1:
        *others, last = ways
        raise InvalidArgument(
            f"exactly one of {', '.join(others)} and {last} is taken, and the call has "
            f"{', '.join(chosen) or 'none of them'}",
            hint="Give the content once",
        )
    if text is not None:
        return _encode_text(text, max_bytes)
    if base64 is not None:
        return _decode_base64(base64, "base64", max_bytes)
    url = (url or "").strip()
    if url[:5].lower() == "data:":
        return _decode_data_url(url, max_bytes)
    # Imported here because it takes 24 ms, and most servers never fetch.
    from belljar.files.https import PUBLIC, fetch_https

    return await fetch_https(url, max_bytes, reach=PUBLIC)


def download_folder(directory: Path, session_id: str) -> Path:
    """Return the folder for a session's files on the user's disk, which holds nothing else and need not exist yet."""
    return directory / _safe_component(session_id[:8])


def save_download(directory: Path, session_id: str, name: str, data: bytes) -> Path:
    """Save a file in the session's folder below `directory`; if another file has that name, add -1, -2, … to ours."""
    folder = download_folder(directory, session_id)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"the download directory {str(directory)!r} cannot be used: {error.strerror}",
            hint="Choose another download directory",
        ) from error
    saved = Workspace(folder)
    wanted = safe_path(name)
    for number in range(_MAX_SAME_NAME):
        candidate = wanted if number == 0 else wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
        try:
            saved.create(str(candidate), data)
        except FileExistsError:
            if not _has_content(saved, str(candidate), data):
                continue
        return folder / candidate
    raise TooLarge(
        f"{_MAX_SAME_NAME} different files named {wanted.name!r} are saved already", hint="Clear the download directory"
    )


def _encode_text(text: str, max_bytes: int) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"text has a lone surrogate at character {error.start}", hint="Send binary content as base64"
        ) from error
    return _within(data, "text", max_bytes)


def _decode_base64(encoded: str, source: str, max_bytes: int) -> bytes:
    compact = encoded.translate(_WHITESPACE)
    if len(compact) // 4 * 3 - 2 > max_bytes:
        raise _too_large(source, len(compact) // 4 * 3, max_bytes)
    try:
        data = b64decode(compact, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(
            f"{source} of {len(encoded)} characters is not valid base64: {error}",
            hint="Use the standard alphabet (+ and /) with its padding, and nothing else",
        ) from error
    return _within(data, source, max_bytes)


def _decode_data_url(url: str, max_bytes: int) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        raise InvalidArgument(
            f"the data: URL of {len(url)} characters has no comma", hint="Use data:[type][;base64],content"
        )
    data = unquote_to_bytes(body)
    if not head.lower().endswith(";base64"):
        return _within(data, "the data: URL", max_bytes)
    return _decode_base64(data.decode("latin-1"), "the data: URL", max_bytes)


def _within(data: bytes, source: str, max_bytes: int) -> bytes:
    if len(data) > max_bytes:
        raise _too_large(source, len(data), max_bytes)
    return data


def _too_large(source: str, size: int, max_bytes: int) -> TooLarge:
    return TooLarge(f"{source} is {size} bytes, and the limit is {max_bytes}", hint="Upload it in smaller parts")


def _has_content(saved: Workspace, name: str, data: bytes) -> bool:
    try:
        return saved.read(name, len(data)) == data
    except (FileMissing, TooLarge):
        return False


def safe_path(name: str) -> PurePosixPath:
    """Return the caller's path with components that are valid on any file system and safe to show."""
    parts = [_safe_component(part) for part in name.split("/") if part not in ("", ".", "..")]
    return PurePosixPath(*parts[-MAX_DEPTH:] or ["file"])


def _safe_component(text: str) -> str:
    visible = re.sub(
        r'[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff<>:"|?*\\/]', "_", text
    )
    # A leading dot would hide the file; some file systems drop trailing dots and spaces.
    visible = re.sub(r"^\.", "_", visible).rstrip(". ") or "_"
    if len(visible.encode()) <= _MAX_SAVED_NAME_BYTES:
        return visible
    suffix = PurePosixPath(visible).suffix
    suffix = suffix if len(suffix.encode()) <= 20 else ""
    stem = visible.encode()[: _MAX_SAVED_NAME_BYTES - len(suffix.encode())].decode(errors="ignore")
    return stem + suffix
