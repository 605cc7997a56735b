"""Learns the result shapes of tools without an output schema: names and types, never values.

A shape is a small JSON Schema, bounded in size. It is learned from every answer, so it knows fields that are not always
there or not always of one type. Shapes are on disk, a file for each server and owner, because other owners must not
learn even the field names of an owner's results. If an object has data as keys, such as names of people, its keys are
not kept, because they are values.
"""

import contextlib
import hashlib
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast

from belljar.files.private import make_folder, replace_file
from belljar.toolbox.base import JsonObject

log = logging.getLogger(__name__)

MAX_FIELDS: Final = 60
MAX_DEPTH: Final = 5
MAX_TOOLS: Final = 500
MAX_OWNERS: Final = 64
"""The most owners whose shapes are in memory."""
_LOOKED_AT: Final = 2_000
_ITEMS: Final = 20
_SHAPE_CHARACTERS: Final = 20_000
_KINDS: Final = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string"}
_FILE_BYTES: Final = 2_000_000
# Keys that look like names of fields; an address, a date, a sentence or a hash does not.
_FIELD: Final = re.compile(r"[A-Za-z_$@][A-Za-z0-9_$@.:-]{0,63}")
_DATA: Final = re.compile(r"^[0-9a-fA-F-]{12,}$|\d{4}|@[^.@]*\.|\d-\d")


def shape_of(value: Any) -> JsonObject:
    """Return the shape of a value, from a bounded part of it."""
    return _ShapeReader().at(value, 0)


class _ShapeReader:
    """Derives the shape of one value, up to a number of steps."""

    def __init__(self) -> None:
        self._left = _LOOKED_AT

    def at(self, value: Any, depth: int) -> JsonObject:
        self._left -= 1
        if isinstance(value, list):
            return self._list(cast("list[Any]", value), depth)
        if isinstance(value, dict):
            return self._object(cast("dict[Any, Any]", value), depth)
        kind = _KINDS.get(cast("type[Any]", type(value)))
        return {"type": kind} if kind else {}

    def _list(self, items: list[Any], depth: int) -> JsonObject:
        inner = merged(self._each(items, depth))
        return {"type": "array", "items": inner} if inner else {"type": "array"}

    def _object(self, value: dict[Any, Any], depth: int) -> JsonObject:
        names = [str(name) for name in islice(value, MAX_FIELDS + 1)]
        if len(names) > MAX_FIELDS or not all(map(_is_field, names)):
            inner = merged(self._each(value.values(), depth))
            return {"type": "object", "additionalProperties": inner} if inner else {"type": "object"}
        if depth >= MAX_DEPTH:
            return {"type": "object"}
        properties = {str(name): self.at(item, depth + 1) for name, item in value.items()}
        shape: JsonObject = {"type": "object", "properties": properties, "required": sorted(names)}
        return _table(shape) if _are_rows([*properties.values()]) else shape

    def _each(self, items: Iterable[Any], depth: int) -> Iterator[JsonObject]:
        if depth < MAX_DEPTH:
            for item in islice(items, _ITEMS):
                if self._left > 0:
                    yield self.at(item, depth + 1)


def _is_field(name: str) -> bool:
    return bool(_FIELD.fullmatch(name)) and not _DATA.search(name)


def _are_rows(shapes: list[JsonObject]) -> bool:
    """Return whether all are objects with the same fields, because then their keys are probably data, not names."""
    fields = [frozenset(_properties(shape) or ()) for shape in shapes]
    return len(fields) > 1 and bool(fields[0]) and len({*fields}) == 1


def merged(shapes: Iterable[JsonObject]) -> JsonObject:
    """Return one shape that covers all of these."""
    kinds: dict[str, JsonObject] = {}
    for shape in shapes:
        for one in cast("list[JsonObject]", shape.get("anyOf")) if "anyOf" in shape else [shape]:
            kind = str(one.get("type", ""))
            kinds[kind] = _both(kinds[kind], one) if kind in kinds else one
    kinds.pop("", None)
    if "integer" in kinds and "number" in kinds:
        del kinds["integer"]
    parts = [kinds[kind] for kind in sorted(kinds)]
    if len(parts) > 1:
        return {"anyOf": parts}
    return parts[0] if parts else {}


def _both(one: JsonObject, other: JsonObject) -> JsonObject:
    """Return one shape that covers two of the same type."""
    if one["type"] == "array":
        items = merged(shape["items"] for shape in (one, other) if "items" in shape)
        return {"type": "array", "items": items} if items else {"type": "array"}
    if one["type"] != "object":
        return one
    fields, more = _properties(one), _properties(other)
    if fields is None or more is None or len({*fields, *more}) > MAX_FIELDS:
        return _table(one, other)
    if fields and more and fields.keys().isdisjoint(more):
        return _table(one, other)  # two answers without a common key, so the keys are probably data
    names = [*fields, *(name for name in more if name not in fields)]
    both = {name: merged(shape[name] for shape in (fields, more) if name in shape) for name in names}
    required = sorted({*cast("list[str]", one["required"])} & {*cast("list[str]", other["required"])})
    return {"type": "object", "properties": both, "required": required}


def _properties(shape: JsonObject) -> dict[str, JsonObject] | None:
    return cast("dict[str, JsonObject] | None", shape.get("properties"))


def _table(*shapes: JsonObject) -> JsonObject:
    """Return a shape for objects whose keys are data; it describes only their values."""
    parts = [cast("JsonObject", shape["additionalProperties"]) for shape in shapes if "additionalProperties" in shape]
    inner = merged([*parts, *(part for shape in shapes for part in (_properties(shape) or {}).values())])
    return {"type": "object", "additionalProperties": inner} if inner else {"type": "object"}


class OwnedShapes:
    """The shapes of all owners, in a folder that only the host can read."""

    def __init__(self, folder: Path, only_owner: str) -> None:
        self._folder = folder
        self._only_owner = only_owner
        """The owner of all shapes; empty if there may be several owners."""
        self._shapes: OrderedDict[str, Shapes] = OrderedDict()

    def of(self, owner: str) -> "Shapes":
        """Return the shapes of one owner."""
        owner = self._only_owner or owner
        if owner not in self._shapes:
            self._shapes[owner] = Shapes(self._folder / hashlib.sha256(owner.encode()).hexdigest()[:24])
            if len(self._shapes) > MAX_OWNERS:
                self._shapes.popitem(last=False)  # they are on disk
        self._shapes.move_to_end(owner)
        return self._shapes[owner]

    def for_all(self, server: str, tool: str) -> JsonObject | None:
        """Return the shape that everybody may see: the only owner's, or none."""
        return self.of(self._only_owner).shape(server, tool) if self._only_owner else None

    def remove_unowned(self) -> None:
        """Delete the files of earlier belljar versions, which do not say who owns them."""
        for file in self._folder.glob("*.json"):
            with contextlib.suppress(OSError):
                file.unlink()


class Shapes:
    """One owner's shapes of the tools of all servers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, dict[str, JsonObject]] = {}

    def shape(self, server: str, tool: str) -> JsonObject | None:
        """Return the shape learned from a tool's results."""
        return self._of(server).get(tool)

    def learn(self, server: str, tool: str, value: Any) -> bool:
        """Learn from an answer; return whether the shape changed."""
        known = self._of(server)
        before = known.get(tool)
        seen = shape_of(value)
        after = merged([before, seen]) if before else seen
        if not after or after == before or (before is None and len(known) >= MAX_TOOLS):
            return False
        if len(json.dumps(after)) > _SHAPE_CHARACTERS:
            return False
        known[tool] = after
        self._keep(server, known)
        return True

    def _of(self, server: str) -> dict[str, JsonObject]:
        if server not in self._known:
            self._known[server] = _read(self._file(server))
        return self._known[server]

    def _file(self, server: str) -> Path:
        return self._folder / f"{hashlib.sha256(server.encode()).hexdigest()[:24]}.json"

    def _keep(self, server: str, known: dict[str, JsonObject]) -> None:
        """Write a server's shapes to its file; if that fails, they last until belljar stops."""
        text = json.dumps(known, indent=1)
        if len(text) > _FILE_BYTES:
            return
        try:
            make_folder(self._folder)
            replace_file(self._file(server), text)
        except OSError as error:
            log.warning("the shapes of %s cannot be kept: %s", server, error.strerror)


def _read(file: Path) -> dict[str, JsonObject]:
    """Return the shapes in a file; none if it cannot be read or has another form."""
    try:
        value: Any = json.loads(file.read_text("utf-8")) if file.stat().st_size <= _FILE_BYTES else {}
    except (OSError, ValueError):
        return {}
    if not isinstance(value, dict):
        return {}
    shapes = cast("dict[str, Any]", value)
    return {tool: cast("JsonObject", shape) for tool, shape in shapes.items() if isinstance(shape, dict)}
