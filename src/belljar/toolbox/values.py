"""Converts a server's answer into the value that a call returns: JSON if there is some, and media.

A declared result of the form `{"result": …}` is unwrapped, because SDKs wrap values that are no objects that way. Text
is parsed as JSON only if it is an object or a list: the text "42" stays a text.
"""

import base64
import codecs
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from belljar.json_values import check_values
from belljar.toolbox.base import Block, JsonObject, ToolAnswer
from belljar.toolbox.schemas import as_schema
from belljar.toolbox.texts import one_line

_WRAPPER = "result"
_URI_CHARS = 4_000
_NAME_CHARS = 1_000
_MEDIA_TYPE_CHARS = 200
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9][\w.+-]*/[A-Za-z0-9][\w.+-]*(?:; ?[\w-]+=(?:[\w.+-]+|\"[\w .+-]*\"))*", re.ASCII)


@dataclass(frozen=True, slots=True)
class ValuePart:
    """A medium, or a piece of JSON beside media, as it is sent to the session."""

    kind: str
    fields: JsonObject = field(default_factory=dict[str, Any])

    def as_json(self) -> JsonObject:
        """Return the part as JSON for the session."""
        return {"kind": self.kind, **self.fields}


@dataclass(frozen=True, slots=True)
class ToolValue:
    """What a call returns. With media, `parts` has everything in order, and `value` is the declared result, if any."""

    value: Any = None
    parts: tuple[ValuePart, ...] = ()

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


def _part(block: Block, hide: Callable[[Any], Any]) -> ValuePart:
    if block.kind == "text":
        return ValuePart("json", {"value": hide(parsed(block.text))})
    fields: JsonObject = {
        "mime": _media_type(block.mime, hide),
        "uri": hide(one_line(block.uri, _URI_CHARS)),
        "name": hide(one_line(block.name, _NAME_CHARS)),
    }
    if block.kind == "resource" and block.text:
        fields["text"] = hide(block.text)
    elif block.data:
        fields["data"] = base64.b64encode(_hidden_bytes(block, hide)).decode()
    return ValuePart(block.kind, {name: value for name, value in fields.items() if value})


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
