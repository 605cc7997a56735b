"""Saving a session's variables to a file, as one object graph, within limits of size and time."""

# Variables may have any type.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import signal
import sys
import time
import types
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from . import interpreter_state
from .pickle_faults import error_line, reason_for, type_name
from .pickling import make_pickler, owner_of
from .state_file import (
    IMPORTS,
    INTERRUPTED,
    SURROUNDING,
    VARIABLE,
    WHOLE_FILE,
    CannotWrite,
    CountingSink,
    StateEntry,
    StateTooLarge,
    StateWriter,
    VariableLoss,
    VariableReport,
    undisturbed,
)

# The most time for finding the part of a variable that cannot be pickled.
BLAME_S = 2.0


class StateSaver:
    """One saving. It writes one object graph, variable after variable, small ones first.

    After each variable the file could end and be valid, so whatever stops the work costs only the large variables. A
    variable that cannot be pickled has left half of itself in the stream and in the pickler's memo, so the file is
    started again without it.
    """

    def __init__(self, shell: Any, path: str, limit_bytes: int | None, limit_s: float | None) -> None:
        self.report = VariableReport()
        self._shell = shell
        self._path = path
        self._limit_bytes = limit_bytes
        self._limit_s = limit_s
        self._time_limit = TimeLimit(limit_s)
        self._writer: StateWriter | None = None
        self._order: list[str] = []
        self._imported: list[str] = []
        self._entries: list[StateEntry] = []
        self._stopped = INTERRUPTED
        self._unshared: frozenset[int] = frozenset()
        """Ids of arrays that are not saved; views of their memory are saved as arrays of their own."""

    def run(self) -> None:
        """Write everything to a temporary file."""
        try:
            self._entries = self._collect_entries()
            self._writer = StateWriter(self._path, self._limit_bytes)
            with self._time_limit.take_timer(), undisturbed():
                while not self._is_done(self._writer):
                    continue
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._stopped = error_line(error)

    def finish(self) -> None:
        """Move the file to its name, with the variables that are complete, and fill in the report."""
        if not self._entries:
            self.report.lost.append(VariableLoss(WHOLE_FILE, "", self._stopped))
        count = 0
        if self._writer is not None:
            try:
                self.report.size_bytes = self._writer.commit()
                count = self._writer.whole_count
            except (OSError, CannotWrite) as error:
                self._stopped = error_line(error)
            self._writer.close()
        for entry in self._entries[count:]:
            self._lose(entry, self._stopped)
        names = {entry.name for entry in self._entries[:count] if entry.kind == VARIABLE}
        if any(entry.kind == IMPORTS for entry in self._entries[:count]):
            names.update(self._imported)
        self.report.kept = [name for name in self._order if name in names]

    def _collect_entries(self) -> list[StateEntry]:
        variables = interpreter_state.variables(self._shell)
        self._order = list(variables)
        modules = {name: module for name, value in variables.items() if (module := _module_name(value))}
        self._imported = list(modules)
        entries = self._interpreter_parts(interpreter_state.BEFORE_VARIABLES)
        if modules:
            entries.append(StateEntry(IMPORTS, "import", (modules, _submodules(modules))))
        entries += self._interpreter_parts(interpreter_state.AFTER_VARIABLES)
        own = [StateEntry(VARIABLE, name, value) for name, value in variables.items() if name not in modules]
        return entries + sorted(own, key=lambda entry: _rough_size(entry.value))

    def _interpreter_parts(self, chosen: tuple[interpreter_state.InterpreterPart, ...]) -> list[StateEntry]:
        taken: list[StateEntry] = []
        for one in chosen:
            try:
                value = one.take(self._shell)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self.report.lost.append(VariableLoss(one.name, "", error_line(error)))
                continue
            if value is not None:
                taken.append(StateEntry(SURROUNDING, one.name, value))
        return taken

    def _is_done(self, writer: StateWriter) -> bool:
        """Make one attempt with the remaining entries. If some fail, drop them and return False: try again."""
        entries = self._entries
        writer.restart(self._header())
        pickler = make_pickler(writer, self._shell, self._unshared)
        sizes: list[int] = []
        for index, entry in enumerate(entries):
            try:
                with self._time_limit.limited(self._variable_limit_s(is_last=index == len(entries) - 1)):
                    pickler.dump(entry.value)
                sizes.append(writer.end_variable())
            except (KeyboardInterrupt, CannotWrite):
                raise
            except TimeIsUp:
                if not self._time_limit.left_s():
                    self._stopped = f"the time limit of {self._limit_s:g} s was over before this was done"
                    return True
                self._drop({index: self._too_slow()})
                return False
            except BaseException as error:
                del pickler  # frees its memo, which refers to everything pickled so far
                self._mark_unshared(entry)
                self._drop({index: self._reason(entry, error), **self._other_faults(index + 1)})
                return False
        return self._is_within_limit(writer, sizes)

    def _other_faults(self, first: int) -> dict[int, str]:
        """Return the faults of the entries from `first` on, without writing, so that all are dropped in one attempt."""
        faults: dict[int, str] = {}
        sink = CountingSink(self._limit_bytes)
        pickler = make_pickler(sink, self._shell, self._unshared)
        for index, entry in enumerate(self._entries[first:], first):
            sink.restart()
            try:
                with self._time_limit.limited(self._variable_limit_s(is_last=False)):
                    pickler.dump(entry.value)
                continue
            except KeyboardInterrupt:
                raise
            except TimeIsUp:
                if not self._time_limit.left_s():
                    break
                faults[index] = self._too_slow()
            except BaseException as error:
                faults[index] = self._reason(entry, error)
            pickler = make_pickler(sink, self._shell, self._unshared)
        return faults

    def _is_within_limit(self, writer: StateWriter, sizes: list[int]) -> bool:
        if not writer.is_over:
            return True
        total, dropped = writer.size_bytes, dict[int, str]()
        for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
            if total <= (self._limit_bytes or 0):
                break
            if self._entries[index].kind == VARIABLE:
                total -= sizes[index]
                dropped[index] = f"it takes {sizes[index]:,} bytes, and all together may take {self._limit_bytes:,}"
        self._drop(dropped)
        return not dropped

    def _reason(self, entry: StateEntry, error: BaseException) -> str:
        if isinstance(error, StateTooLarge):
            return error_line(error)
        left_s = self._time_limit.left_s()
        try:
            with self._time_limit.limited(BLAME_S if left_s is None else min(BLAME_S, left_s / 4)):
                return reason_for(entry.name, entry.value, error, self._fault)
        except KeyboardInterrupt:
            raise
        except BaseException:
            return error_line(error)

    def _fault(self, value: Any) -> BaseException | None:
        try:
            make_pickler(CountingSink(self._limit_bytes), self._shell, self._unshared).dump(value)
        except (KeyboardInterrupt, TimeIsUp):
            raise
        except BaseException as error:
            return error
        return None

    def _variable_limit_s(self, *, is_last: bool) -> float | None:
        """Return the time for one variable: half of what is left, so that one that hangs leaves time to the others."""
        left_s = self._time_limit.left_s()
        return left_s if left_s is None or is_last else left_s / 2

    def _too_slow(self) -> str:
        return f"it took too long, and all together may take {self._limit_s:g} s"

    def _drop(self, reasons: dict[int, str]) -> None:
        for index, reason in reasons.items():
            entry = self._entries[index]
            self._mark_unshared(entry)
            gone = {self._entries[one].name for one in reasons}
            others = [other for other in self._sharing(entry) if other.name not in gone]
            shared = f"; kept without its memory: {', '.join(other.name for other in others)}" if others else ""
            self._lose(entry, f"{reason}{shared}")
        self._entries = [entry for index, entry in enumerate(self._entries) if index not in reasons]

    def _mark_unshared(self, entry: StateEntry) -> None:
        """Note that this array is not saved, so that views of its memory are saved as arrays of their own."""
        if _is_array(entry.value):
            self._unshared |= {id(owner_of(entry.value))}

    def _sharing(self, entry: StateEntry) -> list[StateEntry]:
        """Return the other arrays that share this one's memory."""
        if not _is_array(entry.value):
            return []
        arrays = [other for other in self._entries if other is not entry and _is_array(other.value)]
        return [other for other in arrays if owner_of(other.value) is owner_of(entry.value)]

    def _lose(self, entry: StateEntry, reason: str) -> None:
        if entry.kind == IMPORTS:
            self.report.lost += [VariableLoss(name, "module", reason) for name in self._imported]
        else:
            self.report.lost.append(VariableLoss(entry.name, _type_of(entry), reason))

    def _header(self) -> dict[str, Any]:
        entries = [[entry.kind, entry.name, _type_of(entry)] for entry in self._entries]
        return {"python": sys.version.split()[0], "order": self._order, "entries": entries}


def _module_name(value: Any) -> str:
    """Return the name to import a module by; empty for anything else.

    Read `__dict__` directly, because an attribute look-up on the value may run code that lies or raises.
    """
    if not issubclass(type(value), types.ModuleType):
        return ""
    name = str(object.__getattribute__(value, "__dict__").get("__name__"))
    return name if sys.modules.get(name) is value else ""


def _submodules(modules: dict[str, str]) -> list[str]:
    """Return the loaded submodules of these packages, because `import a.b` gives a name to `a` only."""
    packages = tuple(f"{name}." for name in modules.values())
    return [name for name in list(sys.modules) if name.startswith(packages)]


def _type_of(entry: StateEntry) -> str:
    return type_name(entry.value) if entry.kind == VARIABLE else ""


def _is_array(value: Any) -> bool:
    return type(value) is getattr(sys.modules.get("numpy"), "ndarray", None)


def _rough_size(value: Any) -> int:
    """Return a rough size that is good enough to save large values last, without running code of the session."""
    kind = type(value)
    if kind in (type, types.FunctionType):
        return 0
    if _is_array(value) and value.base is not None:
        return 1 + int(owner_of(value).nbytes)  # sorts a view after its owner, so that the owner is written first
    if type_name(value).partition(".")[0] in ("numpy", "pandas", "polars", "pyarrow", "torch", "scipy"):
        with contextlib.suppress(Exception):
            return int(value.nbytes)
        with contextlib.suppress(Exception):
            return int(value.memory_usage(deep=False).sum())
    if kind in (list, tuple, dict, set, frozenset):
        return 100 * len(value)
    if kind in (str, bytes, bytearray):
        return len(value)
    return 1_000


# The time limit for the session's code on the main thread, by SIGALRM: it raises there, but not inside C code

# Raise again after this time, because the session's code may have swallowed the first one.
_REPEAT_S = 0.25


class TimeIsUp(BaseException):
    """The time is over. Not an Exception, so that `except Exception` in the session's code does not catch it."""


class TimeLimit:
    """A limit on the whole and on parts of it. It uses the process's only timer, and restores what the session set."""

    def __init__(self, limit_s: float | None) -> None:
        self._deadline = None if limit_s is None else time.monotonic() + limit_s
        self._is_armed = False

    def left_s(self) -> float | None:
        """Return how much of the whole time is left; None when there is no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    @contextmanager
    def take_timer(self) -> Generator[None, None, None]:
        """Take the timer over for the block; `limited` works inside of it only."""
        handler = signal.signal(signal.SIGALRM, self._on_signal)
        timer = signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
            signal.setitimer(signal.ITIMER_REAL, *timer)

    @contextmanager
    def limited(self, limit_s: float | None) -> Generator[None, None, None]:
        """Raise `TimeIsUp` in the block after this time."""
        if limit_s is None:
            yield
            return
        signal.setitimer(signal.ITIMER_REAL, max(limit_s, 0.001), _REPEAT_S)
        try:
            self._is_armed = True
            yield
        finally:
            self._is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_armed:
            raise TimeIsUp
