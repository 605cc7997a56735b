"""Saving: the session's variables go to a file, as one object graph, within limits."""

# What is kept may be anything.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

from . import interpreter_state
from .pickle_faults import reason_for, said, type_name
from .picklers import make_pickler, owner_of
from .state_file import (
    IMPORTS,
    INTERRUPTED,
    SURROUNDING,
    VARIABLE,
    WHOLE_FILE,
    CannotWrite,
    CountingSink,
    StateEntry,
    StateReport,
    StateTooLarge,
    StateWriter,
    VariableLoss,
    undisturbed,
)
from .time_limit import TimeIsUp, TimeLimit

# Finding the part of a variable that is to blame takes no longer than this.
BLAME_S = 2.0


class StateSaver:
    """Writes one object graph, variable after variable, small ones first.

    After each variable the file could end and be whole: whatever stops the work costs the large ones. A variable that
    cannot be pickled has left half of itself in the stream and in the pickler's memory, so all is begun again without.
    """

    def __init__(self, shell: Any, path: str, limit_bytes: int | None, limit_s: float | None) -> None:
        self.report = StateReport()
        self._shell = shell
        self._path = path
        self._limit_bytes = limit_bytes
        self._limit_s = limit_s
        self._alarms = TimeLimit(limit_s)
        self._writer: StateWriter | None = None
        self._order: list[str] = []
        self._imported: list[str] = []
        self._entries: list[StateEntry] = []
        self._stopped = INTERRUPTED
        self._apart: frozenset[int] = frozenset()
        """Ids of arrays that are too large to be kept for what shares their memory."""

    def run(self) -> None:
        """All but the last step."""
        try:
            self._entries = self._collected()
            self._writer = StateWriter(self._path, self._limit_bytes)
            with self._alarms.taken(), undisturbed():
                while not self._is_done(self._writer):
                    continue
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._stopped = said(error)

    def finish(self) -> None:
        """Give the file its name, with as much as is whole."""
        if not self._entries:
            self.report.lost.append(VariableLoss(WHOLE_FILE, "", self._stopped))
        count = 0
        if self._writer is not None:
            try:
                self.report.size_bytes = self._writer.commit()
                count = self._writer.whole_count
            except (OSError, CannotWrite) as error:
                self._stopped = said(error)
            self._writer.close()
        for entry in self._entries[count:]:
            self._lose(entry, self._stopped)
        names = {entry.name for entry in self._entries[:count] if entry.kind == VARIABLE}
        if any(entry.kind == IMPORTS for entry in self._entries[:count]):
            names.update(self._imported)
        self.report.kept = [name for name in self._order if name in names]

    def _collected(self) -> list[StateEntry]:
        variables = interpreter_state.variables(self._shell)
        self._order = list(variables)
        modules = {name: module for name, value in variables.items() if (module := _module_name(value))}
        self._imported = list(modules)
        entries = self._surroundings(interpreter_state.BEFORE_VARIABLES)
        if modules:
            entries.append(StateEntry(IMPORTS, "import", (modules, _submodules(modules))))
        entries += self._surroundings(interpreter_state.AFTER_VARIABLES)
        own = [StateEntry(VARIABLE, name, value) for name, value in variables.items() if name not in modules]
        return entries + sorted(own, key=lambda entry: _rough_size(entry.value))

    def _surroundings(self, chosen: tuple[interpreter_state.InterpreterPart, ...]) -> list[StateEntry]:
        taken: list[StateEntry] = []
        for one in chosen:
            try:
                value = one.take(self._shell)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self.report.lost.append(VariableLoss(one.name, "", said(error)))
                continue
            if value is not None:
                taken.append(StateEntry(SURROUNDING, one.name, value))
        return taken

    def _is_done(self, writer: StateWriter) -> bool:
        """One attempt with the entries that are left; without those that spoil it there may be another."""
        entries = self._entries
        writer.restart(self._header())
        pickler = make_pickler(writer, self._shell, self._apart)
        sizes: list[int] = []
        for index, entry in enumerate(entries):
            try:
                with self._alarms.limited(self._share_s(is_last=index == len(entries) - 1)):
                    pickler.dump(entry.value)
                sizes.append(writer.end_variable())
            except (KeyboardInterrupt, CannotWrite):
                raise
            except TimeIsUp:
                if not self._alarms.left_s():
                    self._stopped = f"the time limit of {self._limit_s:g} s was over before this was done"
                    return True
                self._drop({index: self._too_slow()})
                return False
            except BaseException as error:
                del pickler  # with all that it remembers
                self._set_apart(entry)
                self._drop({index: self._reason(entry, error), **self._other_faults(index + 1)})
                return False
        return self._is_within_limit(writer, sizes)

    def _other_faults(self, first: int) -> dict[int, str]:
        """The same for the entries from that one on, without writing: all that fail are dropped at once."""
        faults: dict[int, str] = {}
        sink = CountingSink(self._limit_bytes)
        pickler = make_pickler(sink, self._shell, self._apart)
        for index, entry in enumerate(self._entries[first:], first):
            sink.restart()
            try:
                with self._alarms.limited(self._share_s(is_last=False)):
                    pickler.dump(entry.value)
                continue
            except KeyboardInterrupt:
                raise
            except TimeIsUp:
                if not self._alarms.left_s():
                    break
                faults[index] = self._too_slow()
            except BaseException as error:
                faults[index] = self._reason(entry, error)
            pickler = make_pickler(sink, self._shell, self._apart)
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
            return said(error)
        left_s = self._alarms.left_s()
        try:
            with self._alarms.limited(BLAME_S if left_s is None else min(BLAME_S, left_s / 4)):
                return reason_for(entry.name, entry.value, error, self._fault)
        except KeyboardInterrupt:
            raise
        except BaseException:
            return said(error)

    def _fault(self, value: Any) -> BaseException | None:
        try:
            make_pickler(CountingSink(self._limit_bytes), self._shell, self._apart).dump(value)
        except (KeyboardInterrupt, TimeIsUp):
            raise
        except BaseException as error:
            return error
        return None

    def _share_s(self, *, is_last: bool) -> float | None:
        """One variable that hangs leaves half of the time to the others."""
        left_s = self._alarms.left_s()
        return left_s if left_s is None or is_last else left_s / 2

    def _too_slow(self) -> str:
        return f"it took too long, and all together may take {self._limit_s:g} s"

    def _drop(self, reasons: dict[int, str]) -> None:
        for index, reason in reasons.items():
            entry = self._entries[index]
            self._set_apart(entry)
            gone = {self._entries[one].name for one in reasons}
            others = [other for other in self._sharing(entry) if other.name not in gone]
            shared = f"; kept without its memory: {', '.join(other.name for other in others)}" if others else ""
            self._lose(entry, f"{reason}{shared}")
        self._entries = [entry for index, entry in enumerate(self._entries) if index not in reasons]

    def _set_apart(self, entry: StateEntry) -> None:
        """What shared the memory of an array that is not kept is kept without it."""
        if _is_array(entry.value):
            self._apart |= {id(owner_of(entry.value))}

    def _sharing(self, entry: StateEntry) -> list[StateEntry]:
        """The other arrays with the same memory."""
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
    """What to import to have it again; empty when that is not how to. The value is not asked: it may lie or raise."""
    if not issubclass(type(value), types.ModuleType):
        return ""
    name = str(object.__getattribute__(value, "__dict__").get("__name__"))
    return name if sys.modules.get(name) is value else ""


def _submodules(modules: dict[str, str]) -> list[str]:
    """`import a.b` puts only `a` under a name."""
    packages = tuple(f"{name}." for name in modules.values())
    return [name for name in list(sys.modules) if name.startswith(packages)]


def _type_of(entry: StateEntry) -> str:
    return type_name(entry.value) if entry.kind == VARIABLE else ""


def _is_array(value: Any) -> bool:
    return type(value) is getattr(sys.modules.get("numpy"), "ndarray", None)


def _rough_size(value: Any) -> int:
    """Enough to have the large ones last, without asking code of the session's."""
    kind = type(value)
    if kind in (type, types.FunctionType):
        return 0
    if _is_array(value) and value.base is not None:
        return 1 + int(owner_of(value).nbytes)  # after its owner, which is then written for its own sake
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
