"""Loading a session's variables from a file that another process of the same environment has saved.

There are two unpicklers: a fast one, and a forgiving one for when that fails. In the stream every variable may refer to
objects of earlier ones, so one that cannot be unpickled would cost all after it. The forgiving one puts a placeholder
where something cannot be made, goes on, and tells which variables contain one. A half-made variable is never returned
as if it were complete.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar

from . import gpu, interpreter_state, rich_output
from .pickle_faults import error_line
from .pickling import function
from .state_file import (
    IMPORTS,
    INTERRUPTED,
    SURROUNDING,
    VARIABLE,
    WHOLE_FILE,
    StateDamaged,
    StateEntry,
    StateReader,
    VariableLoss,
    VariableReport,
    undisturbed,
)

# Variables may have any type.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false


ENDS_EARLY = "the file ends early"


class StateLoader:
    """One loading of variables into a session that has none."""

    def __init__(self, shell: Any, path: str) -> None:
        self.report = VariableReport()
        self._shell = shell
        self._path = path
        self._order: list[str] = []
        self._left: list[StateEntry] = []
        self._loaded: dict[str, Any] = {}
        self._afterwards: list[tuple[interpreter_state.InterpreterPart, Any]] = []
        self._is_begun = False
        self._stopped = INTERRUPTED

    def run(self) -> None:
        """Unpickle everything, without assigning names yet."""
        try:
            reader = StateReader(self._path)
        except StateDamaged as error:
            self.report.lost.append(VariableLoss(WHOLE_FILE, "", error_line(error)))
            self._is_begun = True
            return
        self._is_begun = True
        self.report.size_bytes = reader.size_bytes
        with contextlib.closing(reader), undisturbed():
            python = self._read_header(reader)
            if python or not self._is_loaded_fast(reader):
                self._load_forgiving(reader, python)

    def finish(self) -> None:
        """Assign the loaded variables to their names, and complete the report."""
        if not self._is_begun:
            self.report.lost.append(VariableLoss(WHOLE_FILE, "", self._stopped))
        for name in self._order:
            if name in self._loaded:
                self._shell.user_ns[name] = self._loaded[name]
                self.report.kept.append(name)
        for one, value in self._afterwards:
            self._restore_part(one, value)
        if "matplotlib.figure" in sys.modules:  # a figure may have been loaded without pyplot
            rich_output.prepare_figures()
        if gpu.TENSORS.moved:
            self.report.lost.append(VariableLoss("place of GPU tensors", "", gpu.MOVED))
        self.report.lost += [VariableLoss(entry.name, entry.value, self._stopped) for entry in self._left]

    def _read_header(self, reader: StateReader) -> str:
        """Read the header, and return the version of the Python that wrote the file if it differs from ours."""
        try:
            self._order = [str(name) for name in reader.header["order"]]
            entries = [StateEntry(str(kind), str(name), str(of)) for kind, name, of in reader.header["entries"]]
            python = str(reader.header["python"])
        except (KeyError, TypeError, ValueError):
            self.report.lost.append(VariableLoss(WHOLE_FILE, "", "the file is damaged: its header is not whole"))
            return ""
        self._left = entries if reader.count is None else entries[: reader.count]
        if reader.count is None:
            self.report.lost.append(VariableLoss(WHOLE_FILE, "", ENDS_EARLY))
        if python.split(".")[:2] == sys.version.split()[0].split(".")[:2]:
            return ""
        reason = f"saved by Python {python}, and this is {sys.version.split()[0]}: code in it cannot be loaded"
        self.report.lost.append(VariableLoss(WHOLE_FILE, "", reason))
        return python

    def _is_loaded_fast(self, reader: StateReader) -> bool:
        entries = list(self._left)
        unpickler = FastUnpickler(reader, self._loaded)
        try:
            while self._left:
                self._add_entry(self._left[0], unpickler.load())
                del self._left[0]
        except KeyboardInterrupt:
            raise
        except BaseException:
            # Free what was loaded before the second attempt, because there may not be memory for both.
            self._loaded.clear()
            self._afterwards.clear()
            self._left = entries
            return False
        return True

    def _load_forgiving(self, reader: StateReader, python: str) -> None:
        unpickler = ForgivingUnpickler(reader, self._loaded, python)
        try:
            while self._left:
                value = unpickler.load_entry()
                entry = self._left.pop(0)
                if unpickler.fault:
                    self.report.lost.append(VariableLoss(entry.name, entry.value, unpickler.fault))
                else:
                    self._add_entry(entry, value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._stopped = error_line(error)

    def _add_entry(self, entry: StateEntry, value: Any) -> None:
        if entry.kind == VARIABLE:
            self._loaded[entry.name] = value
        elif entry.kind == IMPORTS:
            self._import(*value)
        for one in interpreter_state.BEFORE_VARIABLES:
            if (entry.kind, entry.name) == (SURROUNDING, one.name):
                self._restore_part(one, value)
        for one in interpreter_state.AFTER_VARIABLES:
            if (entry.kind, entry.name) == (SURROUNDING, one.name):
                self._afterwards.append((one, value))

    def _import(self, modules: dict[str, str], submodules: list[str]) -> None:
        for name, module in modules.items():
            try:
                self._loaded[name] = importlib.import_module(module)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self.report.lost.append(VariableLoss(name, "module", error_line(error)))
        for module in submodules:
            if module not in sys.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(module)

    def _restore_part(self, one: interpreter_state.InterpreterPart, value: Any) -> None:
        try:
            one.give(self._shell, value)
        except BaseException as error:
            self.report.lost.append(VariableLoss(one.name, "", error_line(error)))


# The unpicklers

# The standard library's unpickler in Python has no types, and variables may have any type.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false


MAX_LOOKED_AT = 1_000_000
SHARED = "it may share an object with another variable that could not be loaded"
_Python: Any = vars(pickle)["_Unpickler"]  # the one in C cannot continue after an error
_ATOMS = (str, bytes, int, float, complex, type(None))
_GLOBALS = (type, types.FunctionType, types.BuiltinFunctionType)
# Callables that make functions out of bytecode, which another version of Python would misread, or crash on.
_BYTECODE = {
    (function.__module__, function.__name__),
    ("cloudpickle.cloudpickle", "_builtin_type"),
    ("types", "CodeType"),
    ("builtins", "code"),
}


class FastUnpickler(pickle.Unpickler):
    """The fast unpickler, in C; call `load` once for each variable."""

    def __init__(self, reader: StateReader, loaded: dict[str, Any]) -> None:
        self._loaded = loaded
        super().__init__(reader.stream(), buffers=reader.buffers())

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Look up names in `__main__` among the variables that are loaded so far."""
        return _found(self._loaded, super().find_class, module_name, global_name)


class _MissingObject:
    """The placeholder for something that could not be made; calling it returns itself."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __call__(self, *_: Any, **__: Any) -> _MissingObject:
        return self


class ForgivingUnpickler(_Python):
    """The forgiving unpickler; call `load_entry` once for each variable. `fault` is empty if that one is complete."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_Python.dispatch)

    def __init__(self, reader: StateReader, loaded: dict[str, Any], bytecode_of: str) -> None:
        """Set up; `bytecode_of` is the version of the Python that wrote the stream, if it differs from ours."""
        self._loaded = loaded
        self._bytecode_of = bytecode_of
        self._faulty: list[range] = []
        self._damaged: dict[int, tuple[Any, str]] = {}
        self.fault = ""
        super().__init__(reader.stream(), buffers=reader.buffers())

    def load_entry(self) -> Any:
        """Return the next variable. Raises only when the stream cannot be read any further."""
        self.fault = ""
        first = len(self.memo)
        value = self.load()
        if self.fault:
            self._faulty.append(range(first, len(self.memo)))
        return value

    def find_class(self, module: str, name: str) -> Any:
        """Look up a global name; return a placeholder if it is not there."""
        if self._bytecode_of and (module, name) in _BYTECODE:
            return self.blame(f"it has code of Python {self._bytecode_of} in it")
        try:
            return _found(self._loaded, super().find_class, module, name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return self.blame(error_line(error))

    def blame(self, reason: str) -> _MissingObject:
        """Note the fault, unless the variable has one already, and return a placeholder for what is missing."""
        self.fault = self.fault or reason
        return _MissingObject(reason)

    def note_damage(self, value: Any, reason: str) -> None:
        """Note that an object exists but is not as it was saved."""
        self._damaged[id(value)] = (value, reason)

    def fault_of(self, value: Any) -> str:
        """Return why this very object is not as it was saved; empty when it is."""
        return value.reason if type(value) is _MissingObject else self._damaged.get(id(value), (None, ""))[1]

    def fault_among(self, given: list[Any]) -> str:
        """Return the first fault among what an object is made from: a callable and, last, its arguments."""
        arguments = given[-1] if given and type(given[-1]) is tuple else ()
        return next(filter(None, map(self.fault_of, (*given, *arguments))), "")

    def recall(self, index: int) -> None:
        """Push an object from the memo, which an earlier part of the stream has made."""
        value = self.memo[index]
        if any(index in part for part in self._faulty) and (reason := self._fault_within(value)):
            self.blame(reason)
        self.append(value)

    def _fault_within(self, value: Any) -> str:
        seen: set[int] = set()
        left = [value]
        while left:
            one = left.pop()
            if id(one) in seen or _is_harmless(one):
                continue
            if reason := self.fault_of(one):
                return reason
            seen.add(id(one))
            if len(seen) > MAX_LOOKED_AT:
                return SHARED
            left += gc.get_referents(one)
        return ""


def _found(loaded: dict[str, Any], find: Callable[[str, str], Any], module: str, name: str) -> Any:
    if module == "__main__" and name in loaded:
        return loaded[name]
    if (module, name) == gpu.TensorLoader.NAME:
        return gpu.TENSORS.load
    return find(module, name)


def _is_harmless(value: Any) -> bool:
    """Return whether a value is the same whichever variable it came from: an atom, a module, or a module's global."""
    if isinstance(value, (*_ATOMS, types.ModuleType)) or value is sys.modules["__main__"].__dict__:
        return True
    if not isinstance(value, _GLOBALS):
        return False
    module = sys.modules.get(str(value.__module__))
    return value.__module__ != "__main__" and getattr(module, value.__qualname__, None) is value


def _forgive_making(opcode: bytes, argument_count: int) -> None:
    """Replace an opcode that takes so many objects from the stack and pushes what it made.

    After an error it pushes a placeholder.
    """
    original = _Python.dispatch[opcode[0]]

    def load(unpickler: Any) -> None:
        depth = len(unpickler.stack) - argument_count
        given = unpickler.stack[depth:]
        try:
            original(unpickler)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            unpickler.stack[depth:] = [unpickler.blame(unpickler.fault_among(given) or error_line(error))]
            return
        if reason := unpickler.fault_among(given):
            unpickler.note_damage(unpickler.stack[-1], reason)

    ForgivingUnpickler.dispatch[opcode[0]] = load


def _forgive_filling(opcode: bytes) -> None:
    """Replace an opcode that fills an object on the stack; after an error, the object stays as far as it was filled."""
    original = _Python.dispatch[opcode[0]]

    def load(unpickler: Any) -> None:
        try:
            original(unpickler)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            unpickler.blame(error_line(error))
            unpickler.note_damage(unpickler.stack[-1], error_line(error))

    ForgivingUnpickler.dispatch[opcode[0]] = load


def _recall_short(unpickler: Any) -> None:
    unpickler.recall(unpickler.read(1)[0])


def _recall_long(unpickler: Any) -> None:
    unpickler.recall(int.from_bytes(unpickler.read(4), "little"))


for _opcode, _count in ((pickle.REDUCE, 2), (pickle.NEWOBJ, 2), (pickle.NEWOBJ_EX, 3), (pickle.NEXT_BUFFER, 0)):
    _forgive_making(_opcode, _count)
for _opcode in (pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS, pickle.ADDITEMS):
    _forgive_filling(_opcode)
for _opcode in (pickle.BUILD, pickle.READONLY_BUFFER):
    _forgive_filling(_opcode)
ForgivingUnpickler.dispatch[pickle.BINGET[0]] = _recall_short
ForgivingUnpickler.dispatch[pickle.LONG_BINGET[0]] = _recall_long
