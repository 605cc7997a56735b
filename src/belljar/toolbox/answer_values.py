"""Converts a server's answer into the value that a call returns: JSON if there is some, and media.

A declared result of the form `{"result": …}` is unwrapped, because SDKs wrap values that are no objects that way. Text
is parsed as JSON only if it is an object or a list: the text "42" stays a text. A value is passed to a session in the
message if it fits, else as files in the session folder with handles to them.
"""

import asyncio
import base64
import codecs
import json
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

from pydantic_core import to_json

from belljar.json_values import check_values
from belljar.outputs.forms import extension_of
from belljar.toolbox.base import Block, JsonObject, ToolAnswer, ToolDefinition
from belljar.toolbox.names import assigned
from belljar.toolbox.schemas import as_schema
from belljar.toolbox.server_text import one_line

_WRAPPER = "result"
_URI_CHARS = 4_000
_NAME_CHARS = 1_000
_MEDIA_TYPE_CHARS = 200
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9][\w.+-]*/[A-Za-z0-9][\w.+-]*(?:; ?[\w-]+=(?:[\w.+-]+|\"[\w .+-]*\"))*", re.ASCII)
FOLDER = "results"
_SMALL_BYTES = 65_536
_LOOKED_AT = 50
# The most bytes of JSON for one character (two escapes of six bytes), and around a value (a number, or a comma, a colon
# and quotes).
_MAX_A_CHARACTER = 12
_MAX_AROUND = 32

Keep = Callable[[str, bytes], Awaitable[None]]
"""Writes a file into the session folder, if its quota allows."""


@dataclass(frozen=True, slots=True)
class ToolValue:
    """What a call returns. With media, `parts` has everything in order, and `value` is the declared result, if any.

    A part is a medium, or a piece of JSON beside media, as it is sent to the session.
    """

    value: Any = None
    parts: tuple[JsonObject, ...] = ()

    @property
    def learnable(self) -> bool:
        """Return whether the value's shape says something about the shape of the tool's next result."""
        return not self.parts


def result_schema(output_schema: JsonObject | None) -> JsonObject | None:
    """Return the schema of a declared result, unwrapped; None if nothing is declared."""
    if not output_schema:
        return None
    fields = as_schema(output_schema.get("properties"))
    if [*fields] != [_WRAPPER] or output_schema.get("required") != [_WRAPPER]:
        return output_schema
    return as_schema(fields[_WRAPPER])


def value_of(answer: ToolAnswer, output_schema: JsonObject | None, hide: Callable[[Any], Any]) -> ToolValue:
    """Return the value of an answer that is no error, redacted by `hide`."""
    media = any(block.kind != "text" for block in answer.blocks)
    if answer.structured is not None:
        value = hide(_unwrapped(answer.structured, output_schema))
        parts = [_part(block, hide) for block in answer.blocks if block.kind != "text"] if media else []
        return ToolValue(value, tuple(parts))
    if media:
        return ToolValue(None, tuple(_part(block, hide) for block in answer.blocks))
    texts = [hide(parsed(block.text)) for block in answer.blocks]
    return ToolValue(texts[0] if len(texts) == 1 else texts or None)


def error_text(answer: ToolAnswer) -> str:
    """Return the text of an answer that is an error."""
    text = "\n".join(block.text for block in answer.blocks if block.text)
    return text or (json.dumps(answer.structured, default=str) if answer.structured is not None else "")


def parsed(text: str) -> Any:
    """Return the object or list that a text is in JSON; else the text."""
    if text.lstrip()[:1] not in ("{", "["):
        return text
    try:
        check_values(text)
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _unwrapped(structured: Any, output_schema: JsonObject | None) -> Any:
    is_wrapped = output_schema is not None and result_schema(output_schema) is not output_schema
    fields = as_schema(structured)
    return fields[_WRAPPER] if is_wrapped and [*fields] == [_WRAPPER] else structured


def _part(block: Block, hide: Callable[[Any], Any]) -> JsonObject:
    if block.kind == "text":
        return {"kind": "json", "value": hide(parsed(block.text))}
    fields: JsonObject = {
        "mime": _media_type(block.mime, hide),
        "uri": hide(one_line(block.uri, _URI_CHARS)),
        "name": hide(one_line(block.name, _NAME_CHARS)),
    }
    if block.kind == "resource" and block.text:
        fields["text"] = hide(block.text)
    elif block.data:
        fields["data"] = base64.b64encode(_hidden_bytes(block, hide)).decode()
    return {"kind": block.kind, **{name: value for name, value in fields.items() if value}}


def _media_type(given: str, hide: Callable[[Any], Any]) -> str:
    """Return a media type if it has the form of one; else an empty text, whatever the server wrote there."""
    hidden = str(hide(given[:_MEDIA_TYPE_CHARS]))
    return hidden if _MEDIA_TYPE.fullmatch(hidden) else ""


def _hidden_bytes(block: Block, hide: Callable[[Any], Any]) -> bytes:
    """Return a block's bytes, redacted if they can be read as text.

    A server's media type is not trusted to say what is text, so everything that decodes is treated as text.
    """
    encodings = ["utf-8"]
    if block.data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        encodings.append("utf-16")
    if block.mime.startswith("text/"):
        encodings.append("latin-1")  # it decodes any bytes, and encodes what is not replaced to the same bytes
    for encoding in encodings:
        try:
            text = block.data.decode(encoding)
        except UnicodeDecodeError:
            continue
        hidden = hide(text)
        return block.data if hidden == text else str(hidden).encode(encoding, errors="replace")
    return block.data


async def spill_large(
    value: ToolValue, keep: Keep, folder: str, tool: ToolDefinition, *, limit_bytes: int
) -> JsonObject:
    """Return the outcome for the session, no larger than the limit except for the handles of files."""
    outcome: JsonObject = {"outcome": "value", "value": value.value}
    if value.parts:
        outcome |= {"parts": [*value.parts], "has_value": value.value is not None}
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
                suffix = extension_of(str(part.get("mime", "")))
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
