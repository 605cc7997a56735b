"""Pictures within the message budget. The bytes come from the cell: only what is over the budget is decoded at all."""

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MAX_PIXELS = 40_000_000
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
_SCALES = (0.75, 0.5, 0.35, 0.25, 0.15)


def fitted(content: bytes, mime: str, budget_bytes: int) -> tuple[bytes, str] | None:
    """The picture in at most `budget_bytes`, scaled down if need be; None when it cannot be made to fit."""
    if len(content) <= budget_bytes:
        return content, mime
    # Only large pictures pay for loading Pillow.
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
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
