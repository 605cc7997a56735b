"""Mime bundles to displays: which form comes first, what is kept as text, what becomes a file; and scaling of pictures.

The bundle comes from the cell, so every value is checked: it may have invalid base64, numbers in place of text, or any
number of forms. Files are written outside the session's folder, where the cell cannot touch them.
"""

import base64
import binascii
import hashlib
import io
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from belljar.files.private import make_folder, write_file
from belljar.models import Display
from belljar.outputs.budget import clip
from belljar.outputs.forms import PICTURES, extension_of, form_of, pillow_format, rank_of

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

INLINE_CHARS = 4_000
BLOCK_BYTES = 4_096
MAX_FORMS = 12
_URI = re.compile(r"execution://(?P<execution_id>[0-9a-z]{16,64})/displays/(?P<name>\d{1,9}\.\w{1,16})")


def display_uri(execution_id: str, name: str) -> str:
    """Return the resource URI of a stored display."""
    return f"execution://{execution_id}/displays/{name}"


def read_display(folder: Path, uri: str) -> bytes | None:
    """Return a display stored under a session's `folder`, by its URI; None if it is not there."""
    match = _URI.fullmatch(uri)
    if match is None:
        return None
    try:
        return (folder / match["execution_id"] / match["name"]).read_bytes()
    except OSError:
        return None


@dataclass(slots=True)
class DisplayStore:
    """The files of one execution's displays, numbered; the folder is made when the first is stored."""

    _displays: Path
    _execution_id: str
    total_bytes: int = 0
    _stored: dict[str, str] = field(default_factory=dict[str, str])
    _before: int = 0

    @property
    def _folder(self) -> Path:
        return self._displays / self._execution_id

    def continue_after(self) -> None:
        """Continue the numbers after the files that an earlier server stored for the same execution."""
        sizes = [max(path.stat().st_size, BLOCK_BYTES) for path in self._folder.glob("*.*")]
        self._before, self.total_bytes = len(sizes), sum(sizes)

    def store(self, mime: str, content: bytes) -> str:
        """Store one file and return its URI; the same content is stored once."""
        digest = hashlib.sha256(content).hexdigest()
        if digest not in self._stored:
            make_folder(self._displays)
            make_folder(self._folder)
            name = f"{self._before + len(self._stored) + 1}{extension_of(mime)}"
            write_file(self._folder / name, content)
            self._stored[digest] = display_uri(self._execution_id, name)
            # A file takes a block at least, so that a million tiny pictures count for what they take.
            self.total_bytes += max(len(content), BLOCK_BYTES)
        return self._stored[digest]


def display_of(bundle: dict[str, JsonValue], store: DisplayStore, display_id: str | None = None) -> Display | None:
    """Return the display of a bundle, its best form first; None when it is plain text and nothing else."""
    forms = sorted((mime for mime in bundle if mime != "text/plain"), key=rank_of)[:MAX_FORMS]
    displays = [_form(mime, bundle[mime], store) for mime in forms]
    if not displays:
        return None
    first = displays[0]
    plain = plain_of(bundle)
    shown = clip(plain, INLINE_CHARS) if plain is not None else None
    return first.model_copy(update={"plain": shown, "display_id": display_id, "also": displays[1:]})


def plain_of(bundle: dict[str, JsonValue]) -> str | None:
    """Return the plain text of a bundle, if it has one."""
    plain = bundle.get("text/plain")
    return plain if isinstance(plain, str) else None


def _form(mime: str, value: JsonValue, store: DisplayStore) -> Display:
    try:
        return _store(mime, value, store)
    except OSError as error:  # a full disk costs the picture, not the cell
        return Display(mime=mime, text=f"<not kept: {error.strerror or error}>")


def _store(mime: str, value: JsonValue, store: DisplayStore) -> Display:
    content = _binary(mime, value)
    if content is not None:
        return Display(mime=mime, uri=store.store(mime, content), size=len(content))
    text = value if isinstance(value, str) else json.dumps(value)
    size = len(text.encode(errors="replace"))
    if len(text) <= INLINE_CHARS:
        return Display(mime=mime, text=text, size=size)
    return Display(mime=mime, uri=store.store(mime, text.encode(errors="replace")), size=size)


def _binary(mime: str, value: JsonValue) -> bytes | None:
    if not isinstance(value, str) or not form_of(mime).is_binary:
        return None
    try:
        return base64.b64decode("".join(value.split()), validate=True)
    except (binascii.Error, ValueError):
        return None


# Pictures within the message budget. Their bytes come from the cell, so only what is over the budget is decoded.

MAX_PIXELS = 40_000_000
_SCALES = (0.75, 0.5, 0.35, 0.25, 0.15)


def fitted(content: bytes, mime: str, budget_bytes: int) -> tuple[bytes, str] | None:
    """Return the picture in at most `budget_bytes`, scaled down if need be; None when it cannot be made to fit."""
    if len(content) <= budget_bytes:
        return content, mime
    # Imported here, so that only large pictures pay for loading Pillow.
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=[*map(pillow_format, PICTURES)]) as image:
            if image.width * image.height > MAX_PIXELS:
                return None
            image.load()
            for scale in _SCALES:
                smaller = _encoded(image, scale)
                if len(smaller) <= budget_bytes:
                    return smaller, "image/png"
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError):
        return None
    return None


def _encoded(image: "Picture", scale: float) -> bytes:
    size = (max(1, int(image.width * scale)), max(1, int(image.height * scale)))
    buffer = io.BytesIO()
    smaller: Picture = image.resize(size)  # pyright: ignore[reportUnknownMemberType]
    smaller.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
