"""The media type that a file's name suggests, how answers name it, and the kind that a mode means. Reads no content."""

import mimetypes
import stat
from pathlib import PurePosixPath
from urllib.parse import quote

from belljar.models import FileReference

_ADDITIONS = {
    ".7z": "application/x-7z-compressed",
    ".arrow": "application/vnd.apache.arrow.file",
    ".bz2": "application/x-bzip2",
    ".cfg": "text/plain",
    ".db": "application/vnd.sqlite3",
    ".docx": "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    ".feather": "application/vnd.apache.arrow.file",
    ".flac": "audio/flac",
    ".geojson": "application/geo+json",
    ".gz": "application/gzip",
    ".ini": "text/plain",
    ".ipynb": "application/x-ipynb+json",
    ".js": "text/javascript",
    ".jsonl": "application/jsonl",
    ".log": "text/plain",
    ".md": "text/markdown",
    ".ndjson": "application/x-ndjson",
    ".ogg": "audio/ogg",
    ".parquet": "application/vnd.apache.parquet",
    ".pptx": "application/vnd.openxmlformats-officedocument.presentationml.presentation",
    ".py": "text/x-python",
    ".r": "text/x-r",
    ".rst": "text/x-rst",
    ".sh": "text/x-sh",
    ".sql": "application/sql",
    ".sqlite": "application/vnd.sqlite3",
    ".tex": "text/x-tex",
    ".tgz": "application/gzip",
    ".toml": "application/toml",
    ".ts": "text/x-typescript",
    ".wav": "audio/wav",
    ".webp": "image/webp",
    ".woff2": "font/woff2",
    ".xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
    ".xz": "application/x-xz",
    ".yaml": "application/yaml",
    ".yml": "application/yaml",
    ".zst": "application/zstd",
}

# A new MimeTypes has Python's own table only, because with /etc/mime.types answers would differ between hosts.
_TYPES = {**mimetypes.MimeTypes().types_map[True], **_ADDITIONS}

_TEXT = frozenset(
    {
        "application/javascript",
        "application/json",
        "application/jsonl",
        "application/sql",
        "application/toml",
        "application/x-ndjson",
        "application/xml",
        "application/yaml",
    }
)


def mime_type_of(name: str) -> str:
    """Return the media type by the last suffix; `data.csv.gz` is gzip, as its bytes are."""
    return _TYPES.get(PurePosixPath(name).suffix.lower(), "application/octet-stream")


def is_text(mime: str) -> bool:
    """Tell whether content of this media type is to be shown as text."""
    essence = mime.partition(";")[0].strip().lower()
    return essence.startswith("text/") or essence in _TEXT or essence.endswith(("+json", "+xml"))


def decoded(content: bytes, mime: str) -> str | bytes:
    """Return content of a text type as text if it is valid UTF-8, and any other content as bytes."""
    if not is_text(mime):
        return content
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content


# The words for the kinds of files that a mode can have.
_KINDS = {
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "named pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
    stat.S_IFREG: "regular file",
}


def kind_of(mode: int) -> str:
    """Return the word for the kind of file that has that mode."""
    return _KINDS.get(stat.S_IFMT(mode), "special file")


def file_uri(session_id: str, name: str) -> str:
    """Return the resource URI of a file in a session's folder."""
    return f"kernel://{session_id}/{quote(name)}"


def file_reference(session_id: str, name: str, size: int) -> FileReference:
    """Return a session's file as answers name it."""
    return FileReference(uri=file_uri(session_id, name), name=name, mime_type=mime_type_of(name), size=size)
