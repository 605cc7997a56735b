"""Columns of tables: their values as texts, and the order of rows by them, read by `raw_objects`."""

# What is read has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# ruff: noqa: B905 - Python 3.9 has no `strict`

import builtins
import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from .raw_objects import (
    Deadline,
    UnreadableObject,
    cell_text,
    type_name,
)

__builtins__ = {**vars(builtins)}  # see `raw_objects`

MAX_SORTED = 1_000_000
"""Numbers and times are sorted up to here, in a few tenths of a second that nothing can interrupt."""
MAX_SORTED_TEXTS = 300_000
MAX_SORTED_OBJECTS = 200_000
_KINDS = {"b": "boolean", "i": "number", "u": "number", "f": "number", "c": "number", "M": "time", "m": "time"}
_TEXT_KINDS = frozenset("SUT")
_NAMES = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex", "M": "datetime64", "m": "timedelta64"}


class _Unsafe:
    """Stands for what a dictionary has that cannot be asked without running code of the session."""


UNSAFE = _Unsafe()


class Column:
    """One column. `kind` is number, boolean, time, text or object; `dtype` is what its library calls it."""

    kind = "object"
    dtype = "object"

    def __init__(self, length: int) -> None:
        self.length = length

    def texts(self, places: "slice | list[int]", chars: int, deadline: Deadline) -> "list[str | None]":
        """Return what is shown of the values at some places."""
        raise NotImplementedError

    def order(self, deadline: Deadline) -> "tuple[Any, Any]":
        """Return the places of its values in ascending order, and the places of those that are missing."""
        raise UnreadableObject("this column cannot be sorted")


class UnknownColumn(Column):
    """A column of a class that is not known: only its name is shown."""

    def __init__(self, values: Any, length: int) -> None:
        super().__init__(length)
        self.dtype = type_name(type(values))

    def texts(self, places: "slice | list[int]", chars: int, deadline: Deadline) -> "list[str | None]":
        """See `Column`."""
        return [f"<{self.dtype}>"] * len(listed(places, self.length))


class RangeColumn(Column):
    """The numbers of a range."""

    kind, dtype = "number", "int64"

    def __init__(self, numbers: range) -> None:
        super().__init__(len(numbers))
        self._numbers = numbers

    def texts(self, places: "slice | list[int]", chars: int, deadline: Deadline) -> "list[str | None]":
        """See `Column`."""
        return [str(self._numbers[place]) for place in listed(places, self.length)]


class ObjectColumn(Column):
    """Python objects, in a list or an array."""

    def __init__(self, values: Any) -> None:
        super().__init__(len(values) if type(values) is list else values.shape[0])
        self._values: Any = values

    def texts(self, places: "slice | list[int]", chars: int, deadline: Deadline) -> "list[str | None]":
        """See `Column`."""
        return [cell_text(value, chars) for value in self._taken(places)]

    def _taken(self, places: "slice | list[int]") -> "list[Any]":
        values: Any = self._values
        if type(values) is list:
            return [values[place] for place in listed(places, self.length)]
        return self._values[places].tolist()

    def order(self, deadline: Deadline) -> "tuple[Any, Any]":
        """See `Column`. Numbers come before texts; whatever else there is counts as missing."""
        _check_count(self.length, MAX_SORTED_OBJECTS)
        numbers: list[tuple[Any, int]] = []
        texts: list[tuple[str, int]] = []
        missing: list[int] = []
        for place, value in enumerate(self._taken(slice(0, self.length))):
            kind = type(value)
            if kind is str:
                texts.append((value, place))
            elif (kind is int or kind is bool or kind is float) and value == value:
                numbers.append((value, place))
            else:
                missing.append(place)
            if place % 10_000 == 0:
                deadline.check()
        numbers.sort()
        texts.sort()
        return [place for _, place in itertools.chain(numbers, texts)], missing


class TextColumn(ObjectColumn):
    """Texts that pandas keeps as Python objects, with NaN or NA for those that are missing."""

    kind, dtype = "text", "str"

    def texts(self, places: "slice | list[int]", chars: int, deadline: Deadline) -> "list[str | None]":
        """See `Column`."""
        return [cell_text(value, chars) if type(value) is str else None for value in self._taken(places)]


class ArrayColumn(Column):
    """An array of numpy with one dimension and no Python objects."""

    def __init__(self, values: Any) -> None:
        super().__init__(values.shape[0])
        self._values = values
        kind = values.dtype.kind
        self.kind = _KINDS.get(kind, "text" if kind in _TEXT_KINDS else "object")
        self.dtype = dtype_name(values.dtype)

    def texts(self, places: "slice | list[int]", chars: int, deadline: Deadline) -> "list[str | None]":
        """See `Column`."""
        values = self._values[places]
        kind, size = values.dtype.kind, values.dtype.itemsize
        if kind == "M":
            return [_time_text(text) for text in values.astype("U48").tolist()]
        if kind == "m":
            return [_duration_text(value) for value in values.astype("m8[us]").tolist()]
        if kind == "f" and size != 8:
            return values.astype("U48").tolist()  # through a double, 0.1 of 4 bytes would have 17 digits
        if kind == "U":
            return values.astype(f"U{chars}").tolist() if size > 4 * chars else values.tolist()
        if kind == "T":  # one by one, because there is no limit to how long each is
            return [cell_text(values[place], chars) for place in range(values.shape[0])]
        if kind in "biufcS":
            return [cell_text(value, chars) for value in values.tolist()]
        return [f"<{self.dtype}>"] * values.shape[0]

    def order(self, deadline: Deadline) -> "tuple[Any, Any]":
        """See `Column`."""
        values = self._values
        if values.dtype.kind not in "biufMmSU":
            return super().order(deadline)
        _check_count(self.length, MAX_SORTED_TEXTS if values.dtype.kind in "SU" else MAX_SORTED)
        order = values.argsort(kind="stable")
        # numpy sorts NaN and NaT to the end, and neither is equal to itself.
        missing = (values != values).nonzero()[0].shape[0] if values.dtype.kind in "fMm" else 0
        return order[: self.length - missing], order[self.length - missing :]


class MaskedColumn(ArrayColumn):
    """An array of pandas that may lack values: Int64, boolean and the like."""

    def __init__(self, values: Any, mask: Any) -> None:
        super().__init__(values)
        self._mask = mask
        self.dtype = self.dtype if self.kind == "boolean" else self.dtype.capitalize()

    def texts(self, places: "slice | list[int]", chars: int, deadline: Deadline) -> "list[str | None]":
        """See `Column`."""
        texts = super().texts(places, chars, deadline)
        return [None if lacks else text for text, lacks in zip(texts, self._mask[places].tolist())]

    def order(self, deadline: Deadline) -> "tuple[Any, Any]":
        """See `Column`."""
        _check_count(self.length, MAX_SORTED)
        order = self._values.argsort(kind="stable")
        lacks = self._mask[order]
        return order[~lacks], order[lacks]


class CategoricalColumn(Column):
    """Codes, and the categories that they stand for; it is sorted by the order of the categories."""

    dtype = "category"

    def __init__(self, codes: Any, categories: Column) -> None:
        super().__init__(codes.shape[0])
        self._codes, self._categories = codes, categories
        self.kind = categories.kind

    def texts(self, places: "slice | list[int]", chars: int, deadline: Deadline) -> "list[str | None]":
        """See `Column`."""
        codes = self._codes[places].tolist()
        used = sorted({code for code in codes if 0 <= code < self._categories.length})
        known = dict(zip(used, self._categories.texts(used, chars, deadline)))
        return [known.get(code) for code in codes]

    def order(self, deadline: Deadline) -> "tuple[Any, Any]":
        """See `Column`."""
        _check_count(self.length, MAX_SORTED)
        order = self._codes.argsort(kind="stable")
        missing = (self._codes < 0).nonzero()[0].shape[0]
        return order[missing:], order[:missing]


class ArrowColumn(Column):
    """An array of pyarrow, of a type that Python has too."""

    def __init__(self, values: Any, slice_of: "Callable[..., Any]", listed: "Callable[..., Any]", length: int) -> None:
        super().__init__(length)
        self._values, self._slice, self.listed = values, slice_of, listed
        self.kind = "text"
        self.dtype = "str"

    def texts(self, places: "slice | list[int]", chars: int, deadline: Deadline) -> "list[str | None]":
        """See `Column`."""
        if type(places) is slice:
            start, stop, _ = places.indices(self.length)
            values = self.listed(self._slice(self._values, start, max(0, stop - start)))
        else:
            values = [self.listed(self._slice(self._values, place, 1))[0] for place in places]
        return [cell_text(value, chars) for value in values]

    def order(self, deadline: Deadline) -> "tuple[Any, Any]":
        """See `Column`."""
        _check_count(self.length, MAX_SORTED_OBJECTS)
        return ObjectColumn(self.listed(self._values)).order(deadline)


class JoinedColumn(Column):
    """The labels of rows or columns that have several parts."""

    kind = "text"

    def __init__(self, parts: "list[Column]") -> None:
        super().__init__(parts[0].length)
        self._parts = parts

    def texts(self, places: "slice | list[int]", chars: int, deadline: Deadline) -> "list[str | None]":
        """See `Column`."""
        found = [part.texts(places, chars, deadline) for part in self._parts]
        return [", ".join("" if text is None else text for text in texts)[:chars] for texts in zip(*found)]


class KeyColumn(Column):
    """What the dictionaries of a list have under one key."""

    def __init__(self, rows: "list[Any]", key: Any, are_plain: "dict[int, bool]") -> None:
        super().__init__(len(rows))
        self._rows, self._key, self._are_plain = rows, key, are_plain

    def texts(self, places: "slice | list[int]", chars: int, deadline: Deadline) -> "list[str | None]":
        """See `Column`."""
        values = (self._value(place, deadline) for place in listed(places, self.length))
        return ["<keys of other types>" if value is UNSAFE else cell_text(value, chars) for value in values]

    def order(self, deadline: Deadline) -> "tuple[Any, Any]":
        """See `Column`."""
        _check_count(self.length, MAX_SORTED_OBJECTS)
        return ObjectColumn([self._value(place, deadline) for place in range(self.length)]).order(deadline)

    def _value(self, place: int, deadline: Deadline) -> Any:
        row = self._rows[place]
        if type(row) is not dict:
            return None
        deadline.check()
        if place not in self._are_plain:
            # Another key may have the same hash, and an `__eq__` of the session's.
            self._are_plain[place] = all(type(key) is str or type(key) is int for key in [*row])
        return row.get(self._key) if self._are_plain[place] else UNSAFE


def listed(places: "slice | list[int]", length: int) -> "Sequence[int]":
    """Return the numbers of these places."""
    return range(*places.indices(length)) if type(places) is slice else places  # type: ignore[return-value]


def _check_count(count: int, most: int) -> None:
    if count > most:
        raise UnreadableObject(f"{count:,} rows are too many to sort here, where {most:,} are the most")


def _time_text(text: str) -> "str | None":
    if text == "NaT":
        return None
    return text.rstrip("0").rstrip(".") if "." in text else text


def _duration_text(value: Any) -> "str | None":
    return str(value) if type(value) is timedelta else None if value is None else f"{value} µs"


def dtype_name(dtype: Any) -> str:
    """Return what numpy calls a dtype; its own `name` is made by Python code that may have been replaced."""
    kind = dtype.kind
    if kind in "iufc":
        return f"{_NAMES[kind]}{8 * dtype.itemsize}"
    return _NAMES.get(kind, {"O": "object", "S": "bytes"}.get(kind, "str" if kind in _TEXT_KINDS else "void"))
