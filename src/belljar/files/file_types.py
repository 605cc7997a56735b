"""What kind of file a name promises. Knows names only: the content may be anything."""

import mimetypes
import stat
from pathlib import PurePosixPath

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

# A fresh MimeTypes has Python's own table only: /etc/mime.types would make answers differ from host to host.
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
    """Media type by the last suffix; `data.csv.gz` is gzip, as its bytes are."""
    return _TYPES.get(PurePosixPath(name).suffix.lower(), "application/octet-stream")


def is_text(mime: str) -> bool:
    """Whether content of this media type is to be shown as text."""
    essence = mime.partition(";")[0].strip().lower()
    return essence.startswith("text/") or essence in _TEXT or essence.endswith(("+json", "+xml"))


def decoded(content: bytes, mime: str) -> str | bytes:
    """Text for a text type, unless its bytes say otherwise; nothing is replaced."""
    if not is_text(mime):
        return content
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content


# What a thing in a folder is, in words.

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
    """What has that mode."""
    return _KINDS.get(stat.S_IFMT(mode), "special file")
