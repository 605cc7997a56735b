"""Reads objects of the session without running any code of it: no method, no property, no comparison, no `repr`.

A class that a cell defined may have a bug or be hostile, and looking at a variable must neither run nor show that. So
classes are told by `type(x)`, never by `isinstance`, attributes are taken out of the dictionaries of objects and
classes, and only functions that are written in C are called, after a check that they are. Dictionaries are walked, not
asked: a key with the hash of the wanted one would be compared by its own `__eq__`.
"""

# What is read has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import builtins
import gc
import sys
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import date, datetime, timedelta, timezone
from datetime import time as time_of_day
from types import GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

# A copy, for the functions that follow: a cell can put a `len` of its own into the module `builtins`.
__builtins__ = {**vars(builtins)}

LONGEST_TYPE_NAME = 100
MAX_DIGIT_BITS = 256
MAX_BYTES_SHOWN = 50

# Taken now, before any cell could replace them.
_class_dict: "Callable[[Any], Any]" = type.__dict__["__dict__"].__get__
_class_name: "Callable[[Any], Any]" = type.__dict__["__name__"].__get__
_class_module: "Callable[[Any], Any]" = type.__dict__["__module__"].__get__
_class_mro: "Callable[[Any], Any]" = type.__dict__["__mro__"].__get__
_class_flags: "Callable[[Any], int]" = type.__dict__["__flags__"].__get__
_getsizeof, _monotonic = sys.getsizeof, time.monotonic
_gettrace, _settrace, _getprofile, _setprofile = sys.gettrace, sys.settrace, sys.getprofile, sys.setprofile
_gc_is_enabled, _gc_disable, _gc_enable = gc.isenabled, gc.disable, gc.enable
_HEAP_TYPE = 1 << 9
_CONTAINERS: "tuple[Any, ...]" = (list, tuple, dict, set, frozenset, deque)
_SIZED: "tuple[Any, ...]" = (str, bytes, bytearray, range, *_CONTAINERS)
_attributes: "dict[tuple[int, str], Any]" = {}
"""What classes have under names, as found during this look; a frame may have 10,000 blocks of one class."""
_CYTHON_FUNCTION = "cython_function_or_method"


class UnreadableObject(Exception):
    """An object that is not kept as its library keeps it, or that takes too long to read."""


class Deadline:
    """The time until which a look must be over. Its loops ask it, because they run no code that a signal could stop."""

    def __init__(self, limit_s: float) -> None:
        self._end = _monotonic() + limit_s

    def is_over(self) -> bool:
        """Return whether the time is over."""
        return _monotonic() > self._end

    def check(self) -> None:
        """Raise `UnreadableObject` when the time is over."""
        if _monotonic() > self._end:
            raise UnreadableObject("reading it took too long")


@contextmanager
def undisturbed() -> Generator[None, None, None]:
    """Keep trace functions, profile functions and finalisers of cyclic garbage of the session from running in it."""
    trace, profile, collects = _gettrace(), _getprofile(), _gc_is_enabled()
    _settrace(None)
    _setprofile(None)
    _gc_disable()
    try:
        yield
    finally:
        _attributes.clear()
        if collects:
            _gc_enable()
        _setprofile(profile)
        _settrace(trace)


# Classes


def type_name(kind: Any) -> str:
    """Return the name of a class, whatever its metaclass says."""
    return str.__str__(_class_name(kind))[:LONGEST_TYPE_NAME]


def module_of(kind: Any) -> str:
    """Return the module that a class says it is from; anybody can write that there."""
    if is_static(kind):
        return str(_class_module(kind))
    place = (id(kind), "its own __module__")
    if place not in _attributes:
        _attributes[place] = _found(_class_dict(kind), "__module__")
    module = _attributes[place]
    return module if type(module) is str else ""


def is_static(kind: Any) -> bool:
    """Return whether a class is compiled into Python or a library, so that no code can make or change one."""
    return not _class_flags(kind) & _HEAP_TYPE


def class_attribute(kind: Any, name: str) -> Any:
    """Return what a class has under a name, as it stands in its dictionary or that of a base; None for nothing."""
    place = (id(kind), name)
    if place not in _attributes:
        found = (_found(_class_dict(base), name) for base in _class_mro(kind))
        _attributes[place] = next((value for value in found if value is not None), None)
    return _attributes[place]


def is_one_of(kind: Any, kinds: "tuple[Any, ...]") -> bool:
    """Return whether a class is one of some. Not by `in`, which asks the metaclass for its hash and for equality."""
    return any(kind is one for one in kinds)


def is_ndarray(value: Any) -> bool:
    """Return whether it is an array of numpy, and not of a subclass."""
    kind = type(value)
    return is_static(kind) and type_name(kind) == "ndarray" and module_of(kind) == "numpy"


def is_of(value: Any, package: str, *names: str) -> bool:
    """Return whether a value's class has one of these names, and says that its module is of the package."""
    kind = type(value)
    if type_name(kind) not in names:
        return False
    module = module_of(kind)
    return module == package or module.startswith(package + ".")


# Attributes


def attribute(value: Any, name: str) -> Any:
    """Return an attribute that an object has in its own dictionary; None for nothing."""
    entry = class_attribute(type(value), "__dict__")
    if type(entry) is not GetSetDescriptorType or entry.__name__ != "__dict__":
        return None
    own = entry.__get__(value)
    return _found(own, name) if type(own) is dict else None


def compiled_attribute(value: Any, name: str, *owners: str) -> Any:
    """Return an attribute that a compiled class of pandas, one of `owners`, has for its objects; None for nothing."""
    place = (id(type(value)), f"compiled {name}")
    if place not in _attributes:
        entry = class_attribute(type(value), name)
        _attributes[place] = entry if _is_compiled(entry, name, owners) else None
    entry = _attributes[place]
    return None if entry is None else entry.__get__(value)


def _is_compiled(entry: Any, name: str, owners: "tuple[str, ...]") -> bool:
    if type(entry) is not GetSetDescriptorType and type(entry) is not MemberDescriptorType:
        return False
    kind = entry.__objclass__
    return entry.__name__ == name and type_name(kind) in owners and module_of(kind).startswith("pandas._libs.")


def compiled_method(kind: Any, name: str) -> "Callable[..., Any] | None":
    """Return a method of a class if it is compiled; None for one that is written in Python, or for none."""
    entry = class_attribute(kind, name)
    if type(entry) is MethodDescriptorType:
        return entry if entry.__name__ == name else None
    function = type(entry)
    if type_name(function) != _CYTHON_FUNCTION:
        return None
    # Code can name a class of its own so, but its `__call__` would be no wrapper of a slot that belongs to it.
    call = class_attribute(function, "__call__")
    return entry if type(call) is WrapperDescriptorType and call.__objclass__ is function else None


def _found(mapping: Any, name: str) -> Any:
    for key, value in [*mapping.items()]:
        if type(key) is str and key == name:
            return value
    return None


# Facts about one object


def length_of(value: Any) -> "int | None":
    """Return the length of an object of a type that Python has built in; None for others."""
    try:
        return len(value) if is_one_of(type(value), _SIZED) else None
    except OverflowError:
        return None  # a range over a number of 64 bits


def size_of(value: Any) -> "int | None":
    """Return what `sys.getsizeof` says, for objects whose class says it in C; None for others."""
    kind = type(value)
    if is_static(kind):
        return int(_getsizeof(value))
    entry = class_attribute(kind, "__sizeof__")
    # Not by `getsizeof`, which would look for it again, in dictionaries whose keys may be the session's.
    if type(entry) is not MethodDescriptorType or entry.__name__ != "__sizeof__":
        return None
    try:
        return int(entry(value))
    except TypeError:
        return None  # of another class


def plain_text(value: Any, chars: int) -> "str | None":
    """Return a value of a plain type as text, cut behind `chars`; None for None and for other types."""
    kind = type(value)
    if kind is str:
        return value[:chars]
    if kind is bool or kind is float:
        return repr(value)
    if kind is int:
        bits = value.bit_length()
        return repr(value) if bits <= MAX_DIGIT_BITS else f"(an integer of {bits:,} bits)"
    if is_static(kind) and module_of(kind) == "numpy" and "generic" in map(type_name, _class_mro(kind)):
        item = compiled_method(kind, "item")
        inner = item(value) if item is not None else None
        return plain_text(inner, chars) if is_one_of(type(inner), (str, bool, int, float)) else None
    return None


def cell_text(value: Any, chars: int) -> "str | None":
    """Return what a table shows of a value; None for one that is missing. Of a class that is not known, its name."""
    if value is None:
        return None
    text = plain_text(value, chars)
    if text is not None:
        return text
    kind = type(value)
    if kind is bytes or kind is complex:
        return repr(value[:MAX_BYTES_SHOWN] if kind is bytes else value)[:chars]
    if is_one_of(kind, _CONTAINERS):
        return f"{type_name(kind)} of {len(value):,}"
    if kind is datetime or kind is time_of_day:
        zone = value.tzinfo
        if zone is None or type(zone) is timezone:
            return value.isoformat()
        return f"{value.replace(tzinfo=None).isoformat()} {type_name(type(zone))}"
    if kind is date:
        return value.isoformat()
    if kind is timedelta:
        return str(value)
    if is_of(value, "pandas", "NAType", "NaTType"):
        return None
    return _number_text(value, chars) or f"<{type_name(kind)}>"


def _number_text(value: Any, chars: int) -> "str | None":
    """Return a decimal number as text, if its class is the compiled one."""
    kind = type(value)
    if not is_of(value, "decimal", "Decimal"):
        return None
    own = _found(_class_dict(kind), "__str__")
    if type(own) is WrapperDescriptorType and own.__objclass__ is kind:
        return str(own(value))[:chars]
    return None
