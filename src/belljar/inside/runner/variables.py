"""What a session has in its variables, for a person who looks at it between two cells.

Nothing of the session runs, nothing of it changes, and an answer is bounded in time and size. What can be shown is
`exact_types`, how tables are read is `tables`.
"""

# What is read has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterator
from contextlib import suppress
from json.encoder import encode_basestring
from typing import Any

from .exact_types import Deadline, ExactTypes, UnreadableObject, length_of, type_name, undisturbed
from .tables import TableReader

LIMIT_S = 1.0
LIMIT_BYTES = 256 * 1024 - 4_096
"""Room is left for the frame around the entries."""
LONGEST_NAME = 200
NO_VARIABLES: "dict[str, Any]" = {"type": "variables", "items": [], "total": 0, "next": None}
NO_ROWS: "dict[str, Any]" = {"type": "rows", "name": "", "problem": "missing", "kind": ""}
_CHECKED_EVERY = 50
_LONG_CHARS = 100
_ENTRY_BYTES = 180
"""What the names of an entry's fields and its numbers take at most."""


def answer_variables(shell: Any, message: "dict[str, Any]") -> "dict[str, Any]":
    """Return some of the variables: name, type, length or shape, size, and the value if it is of a plain type."""
    answer: dict[str, Any] = {**NO_VARIABLES, "items": []}
    with undisturbed(), suppress(Exception):
        shown = [*_shown(shell)]
        answer["total"] = len(shown)
        deadline, room, known = Deadline(LIMIT_S), LIMIT_BYTES, ExactTypes()
        start = message["offset"]
        for place, (name, value) in enumerate(shown[start : start + message["limit"]], start):
            entry = _entry(name, value, message["chars"], known, deadline)
            room -= _ENTRY_BYTES + sum(_size(entry.get(key)) for key in ("name", "type", "value"))
            room -= 22 * len(entry.get("shape") or ())
            if room < 0 or (place % _CHECKED_EVERY == 0 and place > start and deadline.is_over()):
                break
            answer["items"].append(entry)
        end = start + len(answer["items"])
        answer["next"] = end if answer["items"] and end < len(shown) else None
    return answer


def answer_rows(shell: Any, message: "dict[str, Any]") -> "dict[str, Any]":
    """Return a page of rows of one variable; `problem` says why there is none."""
    answer: dict[str, Any] = {**NO_ROWS, "name": message["name"], "problem": ""}
    with undisturbed():
        found = [value for name, value in _shown(shell) if name == message["name"]]
        if not found:
            return {**answer, "problem": NO_ROWS["problem"]}
        value = found[0]
        answer["kind"] = type_name(type(value))
        try:
            reader = TableReader(ExactTypes(), Deadline(LIMIT_S))
            table = reader.table_of(value)
            if table is None:
                return {**answer, "problem": "no rows"}
            page = reader.page(table, message)
        except UnreadableObject as reason:
            return {**answer, "problem": "unreadable", "reason": str(reason)[:500]}
        except Exception as error:
            # A thread changes it meanwhile, or it is not what its class says.
            return {**answer, "problem": "unreadable", "reason": f"it could not be read ({type_name(type(error))})"}
        return {**answer, **_within(page), "total_rows": table.rows, "total_columns": table.columns}


def _within(page: "dict[str, Any]") -> "dict[str, Any]":
    """Return as many rows of a page as an answer has room for, and at least one."""
    names = _bounded([column["name"] for column in page["columns"]])
    columns = [{**column, "name": name} for column, name in zip(page["columns"], names)]  # noqa: B905 - Python 3.9
    room = LIMIT_BYTES - len(columns) * _ENTRY_BYTES - sum(map(_size, names))
    room -= sum(_summary_size(column.get("summary")) for column in columns)
    count = 0
    for label, row in zip(page["labels"], page["rows"]):  # noqa: B905 - Python 3.9
        room -= _size(label) + sum(map(_size, row)) + 4
        if room < 0 and count:
            break
        count += 1
    if count == 1:
        page["rows"][0] = _bounded(page["rows"][0])
    return {**page, "columns": columns, "labels": page["labels"][:count], "rows": page["rows"][:count]}


def _summary_size(summary: "dict[str, Any] | None") -> int:
    if summary is None:
        return 0
    texts = [summary["least"], summary["most"], *(one["text"] for one in summary["frequent"])]
    return 2 * _ENTRY_BYTES + sum(map(_size, texts))


def _bounded(texts: "list[Any]") -> "list[Any]":
    """Return the texts of one row; where they are full of signs that take six bytes each, none that is long."""
    if sum(map(_size, texts)) < LIMIT_BYTES // 3:
        return texts
    return ["<long text>" if text is not None and len(text) > _LONG_CHARS else text for text in texts]


def _size(text: "str | None") -> int:
    """Return how many bytes a text takes in an answer, with its quotes and a comma."""
    return 6 if text is None else 2 + len(encode_basestring(text).encode("utf-8", "replace"))


def shown_names(shell: Any) -> "Iterator[str]":
    """Yield the names of the session's variables."""
    return (name for name, _ in _shown(shell))


def _shown(shell: Any) -> "Iterator[tuple[str, Any]]":
    """Yield the session's variables, as its results name them: none of IPython's, none that begins with `_`."""
    names, hidden = shell.user_ns, shell.user_ns_hidden
    if type(names) is not dict or type(hidden) is not dict:
        return
    unseen = {name for name in [*hidden] if type(name) is str}
    # One step in C, so that no thread of the session can change the dictionary meanwhile.
    for name, value in [*names.items()]:
        if type(name) is str and name not in unseen and not name.startswith("_") and len(name) <= LONGEST_NAME:
            yield name, value


def _entry(name: str, value: Any, chars: int, known: ExactTypes, deadline: Deadline) -> "dict[str, Any]":
    kind, reader = type(value), TableReader(known, deadline)
    entry: dict[str, Any] = {"name": name, "type": type_name(kind), "has_rows": False}
    try:
        entry["length"] = length_of(value)
        entry["value"] = known.plain_text(value, chars) if value is not None else "None"
        entry["is_cut"] = kind is str and (entry["length"] or 0) > chars
        entry["shape"] = reader.shape_of(value)
        entry["size_bytes"] = reader.bytes_of(value)
        entry["has_rows"] = reader.is_table(value)
    except Exception:
        return entry  # it holds objects of other classes, or a thread has changed it meanwhile
    return entry
