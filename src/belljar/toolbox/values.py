"""What a server answered, as the value that a call returns: JSON where there is some, media as what they are.

A declared result that is nothing but `{"result": …}` is taken out of its wrapping, which SDKs put around values that
are no objects. Text is read as JSON only where it is an object or a list: a text "42" stays a text.
"""

import base64
import codecs
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
    """A medium, or a piece of JSON beside media, as it goes over the wire."""

    kind: str
    fields: JsonObject = field(default_factory=dict[str, Any])

    def as_json(self) -> JsonObject:
        """For the wire."""
        return {"kind": self.kind, **self.fields}


@dataclass(frozen=True, slots=True)
class ToolValue:
    """What a call returns. With media, the parts tell it all, in order; `value` is then the declared result, if any."""

    value: Any = None
    parts: tuple[ValuePart, ...] = ()

    @property
    def learnable(self) -> bool:
        """Whether its shape says something about the next one's."""
        return not self.parts


def result_schema(output_schema: JsonObject | None) -> JsonObject | None:
    """What a declared result is, out of its wrapping; None where nothing is declared."""
    if not output_schema:
        return None
    fields = as_schema(output_schema.get("properties"))
    if [*fields] != [_WRAPPER] or output_schema.get("required") != [_WRAPPER]:
        return output_schema
    return as_schema(fields[_WRAPPER])


def value_of(answer: ToolAnswer, output_schema: JsonObject | None, hide: Callable[[Any], Any]) -> ToolValue:
    """The value of an answer that is no error, hidden where it has to be."""
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
    """What a tool says that failed."""
    said = "\n".join(block.text for block in answer.blocks if block.text)
    return said or (json.dumps(answer.structured, default=str) if answer.structured is not None else "")


def parsed(text: str) -> Any:
    """The JSON that a text is, if it is an object or a list."""
    if text.lstrip()[:1] not in ("{", "["):
        return text
    try:
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
    """A media type is one by its form; what else a server says there is nobody's business."""
    hidden = str(hide(given[:_MEDIA_TYPE_CHARS]))
    return hidden if _MEDIA_TYPE.fullmatch(hidden) else ""


def _hidden_bytes(block: Block, hide: Callable[[Any], Any]) -> bytes:
    """Text that came as bytes is text all the same; a server says what it is, so what reads as text is taken for it."""
    encodings = ["utf-8"]
    if block.data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        encodings.append("utf-16")
    if block.mime.startswith("text/"):
        encodings.append("latin-1")  # any bytes are that, and what is not replaced comes out as it went in
    for encoding in encodings:
        try:
            text = block.data.decode(encoding)
        except UnicodeDecodeError:
            continue
        hidden = hide(text)
        return block.data if hidden == text else str(hidden).encode(encoding, errors="replace")
    return block.data
