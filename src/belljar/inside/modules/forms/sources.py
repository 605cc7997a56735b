"""What a form is read from: the path of a file, an address, HTML text, or bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

from .errors import FormError

_LARGEST_BYTES = 100 * 1024 * 1024


def is_address(source: Any) -> bool:
    """Return whether a source is an address of a page or document."""
    return isinstance(source, str) and source.startswith(("http://", "https://"))


def content_of(source: Any) -> bytes | None:
    """Return the bytes of a file, or of text that is HTML; None for an address."""
    if isinstance(source, (bytes, bytearray)):
        return bytes(source)
    if isinstance(source, str) and source.lstrip().startswith("<"):
        return source.encode("utf-8", "replace")
    if isinstance(source, str) and "://" in source:
        return None
    if not isinstance(source, (str, os.PathLike)):
        raise FormError(f"a {type(source).__name__} is no form: pass a path, a URL, or HTML")
    file = Path(cast("str", source))
    try:
        if file.stat().st_size > _LARGEST_BYTES:
            raise FormError(f"{file} has more than {_LARGEST_BYTES:,} bytes")
        return file.read_bytes()
    except OSError as error:
        raise FormError(f"{str(file)[:200]} cannot be read: {error.strerror}") from None
    except ValueError:
        raise FormError(f"{str(file)[:200]!r} is no path") from None


def name_of(source: Any) -> str:
    """Return what errors and receipts call a source."""
    if isinstance(source, (bytes, bytearray)):
        return "the document"
    text = str(source)
    return "the page" if text.lstrip().startswith("<") else text
