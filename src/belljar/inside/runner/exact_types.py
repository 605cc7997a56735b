"""Tells which objects of a session can be shown: those of exact types, not of subclasses, that Python or a library has.

Looking at a variable must not run code of the session, so an object of any other class is told by the name of its class
and its size. Types are compared by identity, because a metaclass can have an `__eq__` or a `__hash__` of its own.
"""

# What is read has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import gc
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import date, datetime, timedelta, timezone
from datetime import time as time_of_day
from decimal import Decimal
from typing import Any

LONGEST_TYPE_NAME = 100
MAX_DIGIT_BITS = 256
MAX_BYTES_SHOWN = 50

_class_name: "Callable[[Any], Any]" = type.__dict__["__name__"].__get__
_class_flags: "Callable[[Any], int]" = type.__dict__["__flags__"].__get__
_class_bases: "Callable[[Any], Any]" = type.__dict__["__mro__"].__get__
_class_dictionary: "Callable[[Any], Any]" = type.__dict__["__dict__"].__get__
_IMMUTABLE_TYPE, _HEAP_TYPE = 1 << 8, 1 << 9
_CONTAINERS: "tuple[Any, ...]" = (list, tuple, dict, set, frozenset, deque)
_SIZED: "tuple[Any, ...]" = (str, bytes, bytearray, range, *_CONTAINERS)
_PYTHONS_OWN = ("builtins", "collections", "decimal", "numpy")
"""The modules of compiled classes that know their objects' size without calling anything."""
_PANDAS_ARRAYS = (
    *("ArrowExtensionArray", "ArrowStringArray", "ArrowStringArrayNumpySemantics", "BooleanArray", "Categorical"),
    *("DatetimeArray", "FloatingArray", "IntegerArray", "IntervalArray", "NumpyExtensionArray", "PandasArray"),
    *("PeriodArray", "StringArray", "StringArrayNumpySemantics", "TimedeltaArray"),
)
_INDEXES = ("Index", "CategoricalIndex", "DatetimeIndex", "IntervalIndex", "PeriodIndex", "TimedeltaIndex")
_KNOWN: "dict[str, tuple[str, ...]]" = {
    "numpy": ("ndarray",),
    "pandas": ("DataFrame", "Series", "RangeIndex", "MultiIndex", "Timestamp", "Timedelta", "Period", "Interval"),
    "pandas.arrays": _PANDAS_ARRAYS,
    "pandas.core.arrays.string_": _PANDAS_ARRAYS,
    "pandas.core.arrays.string_arrow": _PANDAS_ARRAYS,
    "polars": ("DataFrame", "Series"),
    "pyarrow": (
        *("Table", "DataType", "Decimal128Type", "Decimal256Type", "DurationType"),
        *("FixedSizeBinaryType", "Time32Type", "Time64Type", "TimestampType"),
    ),
    "zoneinfo": ("ZoneInfo",),
}
_WITH_ARROW_TYPES = ("pyarrow.Table", "pandas.ArrowExtensionArray")


class UnreadableObject(Exception):
    """An object that has no rows to show, or that takes too long to read."""


class Deadline:
    """The time until which a look must be over."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s

    def is_over(self) -> bool:
        """Return whether the time is over."""
        return time.monotonic() > self._end

    def check(self) -> None:
        """Raise `UnreadableObject` when the time is over."""
        if self.is_over():
            raise UnreadableObject("reading it took too long")


@contextmanager
def undisturbed() -> "Generator[None, None, None]":
    """Keep trace functions, profile functions and finalisers of cyclic garbage of the session from running in it."""
    trace, profile, collects = sys.gettrace(), sys.getprofile(), gc.isenabled()
    sys.settrace(None)
    sys.setprofile(None)
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        sys.setprofile(profile)
        sys.settrace(trace)


class ExactTypes:
    """The types of libraries that can be shown, as far as the session has imported the libraries; made for one look.

    A session that replaces parts of a library has its own run by a look, until the host interrupts that.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        for module, names in _KNOWN.items():
            self._add(module, names)
        if _has_arrow_types():
            self._names = {kind: name for kind, name in self._names.items() if name not in _WITH_ARROW_TYPES}
        self._add("pandas", _INDEXES, "pandas.Index")
        for kind in _dictionary(_module("numpy").get("sctypeDict")).values():
            self._names[id(kind)] = "numpy.generic"
        self._missing = {id(_module("pandas").get(name, self)) for name in ("NA", "NaT")}

    def _add(self, module: str, names: "tuple[str, ...]", called: str = "") -> None:
        found = _module(module)
        package = module.partition(".")[0]
        for name in names:
            if name in found:
                self._names[id(found[name])] = called or f"{package}.{name}"

    def name(self, value: Any) -> str:
        """Return the name of a value's type with its library, like `pandas.DataFrame`; empty for all others."""
        return self._names.get(id(type(value)), "")

    def plain_text(self, value: Any, chars: int) -> "str | None":
        """Return a value of a plain type as text, cut behind `chars`; None for None and for other types."""
        kind = type(value)
        if kind is str:
            return value[:chars]
        if kind is bool or kind is float:
            return repr(value)
        if kind is int:
            bits = value.bit_length()
            return repr(value) if bits <= MAX_DIGIT_BITS else f"(an integer of {bits:,} bits)"
        if self.name(value) == "numpy.generic":
            inner = value.item()
            return self.plain_text(inner, chars) if type(inner) is not kind else None
        return None

    def cell_text(self, value: Any, chars: int) -> "str | None":
        """Return what a table shows of a value; None for one that is missing. Of another class, its name."""
        if value is None or id(value) in self._missing:
            return None
        text = self.plain_text(value, chars)
        if text is not None:
            return text
        kind = type(value)
        if kind is bytes or kind is complex:
            return repr(value[:MAX_BYTES_SHOWN] if kind is bytes else value)[:chars]
        if is_one_of(kind, _CONTAINERS):
            return f"{type_name(kind)} of {len(value):,}"
        name = self.name(value)
        if kind is datetime or kind is time_of_day or name == "pandas.Timestamp":
            zone = value.tzinfo
            if zone is None or type(zone) is timezone or self.name(zone):
                return value.isoformat()
            return f"{value.replace(tzinfo=None).isoformat()} {type_name(type(zone))}"
        if kind is date:
            return value.isoformat()
        if kind is timedelta or kind is Decimal or name in ("pandas.Timedelta", "pandas.Period", "pandas.Interval"):
            return str(value)[:chars]
        return f"<{type_name(kind)}>"


def _module(name: str) -> "dict[str, Any]":
    """Return the names in a module, if the session has imported it. Not by `getattr`: it can have a `__getattr__`."""
    found = sys.modules.get(name)
    return vars(found) if type(found) is types.ModuleType else {}


def _has_arrow_types() -> bool:
    """Return whether the session has defined types of pyarrow, which makes objects of them even to name a column."""
    base: Any = _module("pyarrow").get("ExtensionType")
    libraries = (_module("pyarrow.lib"), _module("pandas.core.arrays.arrow.extension_types"))
    theirs = {id(kind) for names in libraries for kind in names.values()}
    return base is not None and any(id(kind) not in theirs for kind in type.__subclasses__(base))


def _dictionary(value: Any) -> "dict[Any, Any]":
    return value if type(value) is dict else {}


def is_one_of(kind: Any, kinds: "tuple[Any, ...]") -> bool:
    """Return whether a class is one of some. Not by `in`, which asks the metaclass for equality."""
    return any(kind is one for one in kinds)


def type_name(kind: Any) -> str:
    """Return the name of a class, whatever its metaclass says."""
    return str.__str__(_class_name(kind))[:LONGEST_TYPE_NAME]


def length_of(value: Any) -> "int | None":
    """Return the length of an object of a type that Python has built in; None for others."""
    try:
        return len(value) if is_one_of(type(value), _SIZED) else None
    except OverflowError:
        return None  # a range over a number of 64 bits


def size_of(value: Any) -> "int | None":
    """Return how many bytes an object itself takes; None where a library or the session would have to say it."""
    for kind in _class_bases(type(value)):
        if _class_flags(kind) & (_HEAP_TYPE | _IMMUTABLE_TYPE) != _HEAP_TYPE:
            if kind.__sizeof__ is not object.__sizeof__ and kind.__module__ not in _PYTHONS_OWN:
                return None
            return sys.getsizeof(value) if kind is type(value) else int(kind.__sizeof__(value))
        if any(type(name) is str and name == "__sizeof__" for name in [*_class_dictionary(kind)]):
            return None
    return None
