"""Passes a value to a session: in the message if it fits, else as files in the session folder with handles to them."""

import asyncio
import base64
import json
import mimetypes
import secrets
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any, cast

from pydantic_core import to_json

from belljar.toolbox.base import JsonObject, ToolDefinition
from belljar.toolbox.names import assigned
from belljar.toolbox.values import ToolValue

FOLDER = "results"
_SMALL_BYTES = 65_536
_LOOKED_AT = 50
# The most bytes of JSON for one character (two escapes of six bytes), and around a value (a number, or a comma, a colon
# and quotes).
_MAX_A_CHARACTER = 12
_MAX_AROUND = 32

Keep = Callable[[str, bytes], Awaitable[None]]
"""Writes a file into the session folder, if its quota allows."""


async def spill_large(
    value: ToolValue, keep: Keep, folder: str, tool: ToolDefinition, *, limit_bytes: int
) -> JsonObject:
    """Return the outcome for the session, no larger than the limit except for the handles of files."""
    outcome: JsonObject = {"outcome": "value", "value": value.value}
    if value.parts:
        outcome |= {"parts": [part.as_json() for part in value.parts], "has_value": value.value is not None}
    if not is_larger(outcome, limit_bytes):
        return outcome
    spill = _Spill(keep, folder, tool)
    if is_larger(value.value, _SMALL_BYTES):
        outcome |= {"value": None, "file": await spill.value(value.value)}
    if value.parts:
        outcome["parts"] = [await spill.part(part) for part in outcome["parts"]]
    return outcome


def is_larger(value: Any, limit_bytes: int) -> bool:
    """Return whether a value takes more than that as JSON."""
    fits = _surely_fits(value, limit_bytes)
    return len(encoded(value)) > limit_bytes if fits is None else not fits


def _surely_fits(value: Any, limit_bytes: int) -> bool | None:
    """Estimate from a few values whether a value fits; return None if only encoding can tell.

    Most results have few fields, and are either far below the limit or one text far beyond it.
    """
    left, waiting, least_bytes, most_bytes = _LOOKED_AT, [value], 0, 0
    while waiting and left > 0 and least_bytes <= limit_bytes:
        left -= 1
        one = waiting.pop()
        if isinstance(one, str):
            least_bytes += len(one)
            most_bytes += _MAX_A_CHARACTER * len(one)
        elif isinstance(one, dict):
            fields = cast("dict[str, Any]", one)
            waiting += islice(fields, left + 1)
            waiting += islice(fields.values(), left + 1)
        elif isinstance(one, list):
            waiting += islice(cast("list[Any]", one), left + 1)
        elif isinstance(one, int):
            most_bytes += one.bit_length()
        most_bytes += _MAX_AROUND
    if least_bytes > limit_bytes:
        return False
    return True if not waiting and most_bytes < limit_bytes else None


def _as_bytes(value: Any) -> bytes:
    return value.encode(errors="replace") if isinstance(value, str) else encoded(value)


class _Spill:
    def __init__(self, keep: Keep, folder: str, tool: ToolDefinition) -> None:
        self._keep = keep
        self._folder = folder
        (self._stem,) = assigned([f"{tool.server}_{tool.name}"], fallback="tool").values()

    async def value(self, value: Any) -> JsonObject:
        """Write a value to a file, as JSON or as plain text, and return its handle."""
        is_json = not isinstance(value, str)
        # In a thread, because all sessions wait for the event loop, and 60 MB take a while.
        data = await asyncio.to_thread(_as_bytes, value)
        path = await self._write(".json" if is_json else ".txt", data)
        return {"path": path, "size": len(data), "is_json": is_json}

    async def part(self, part: JsonObject) -> JsonObject:
        """Write a large part to a file and return its handle; return a small part unchanged."""
        if part["kind"] == "json":
            return {"kind": "file", **await self.value(part["value"])} if is_larger(part, _SMALL_BYTES) else part
        for name in ("data", "text"):
            content = part.get(name)
            if isinstance(content, str) and len(content) > _SMALL_BYTES:
                data = await asyncio.to_thread(base64.b64decode, content) if name == "data" else _as_bytes(content)
                suffix = mimetypes.guess_extension(str(part.get("mime", ""))) or ".bin"
                kept = {key: value for key, value in part.items() if key != name}
                return {**kept, "path": await self._write(suffix, data)}
        return part

    async def _write(self, suffix: str, data: bytes) -> str:
        name = f"{FOLDER}/{self._stem}-{secrets.token_hex(4)}{suffix}"
        await self._keep(name, data)
        return f"{self._folder}/{name}"


# Encoding. It has to be fast, because results are large and each is encoded to learn its size.


def encoded(value: Any) -> bytes:
    """Return a JSON value in one line."""
    try:
        return to_json(value, inf_nan_mode="constants")
    except ValueError:
        # A lone surrogate cannot be encoded in UTF-8, but JSON can escape it.
        return json.dumps(value).encode()
